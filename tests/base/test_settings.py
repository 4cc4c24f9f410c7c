"""Typed configuration: what is read, and the sentence for everything that cannot be."""

import dataclasses
from typing import Any, Literal

import pytest
import yaml

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict, load_config, to_dict
from swa_jax.model.config import ModelConfig, RopeScaling


@dataclasses.dataclass(frozen=True)
class Part:
    size: int
    kind: Literal["round", "square"] = "round"


@dataclasses.dataclass(frozen=True)
class Whole:
    name: str
    rate: float = 0.5
    flag: bool = False
    limit: int | None = None
    part: Part = Part(1)
    parts: tuple[Part, ...] = ()
    numbers: tuple[int, ...] = ()
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


FULL = {
    "name": "x",
    "rate": 1e-3,
    "flag": True,
    "limit": 3,
    "part": {"size": 2, "kind": "square"},
    "parts": [{"size": 4}, {"size": 5, "kind": "square"}],
    "numbers": [1, 2],
    "notes": {"any": ["thing"]},
}


def test_nested_values_go_through_yaml_and_back():
    whole = from_dict(Whole, FULL)
    assert whole.part == Part(2, "square")
    assert whole.parts == (Part(4), Part(5, "square"))
    assert whole.numbers == (1, 2)
    assert from_dict(Whole, {"name": "x"}) == Whole("x")
    assert from_dict(Whole, yaml.safe_load(yaml.safe_dump(to_dict(whole)))) == whole


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"name": "x", "rat": 1.0}, "unknown key 'rat'; did you mean 'rate'?"),
        ({"name": "x", "zzz": 1}, "unknown key 'zzz'; known: flag, limit, name"),
        ({"name": "x", "part": {"size": 1, "knd": "round"}}, "unknown key 'part.knd'; did you mean 'kind'?"),
        ({"name": "x", "parts": [{"size": 1}, {"sise": 1}]}, "unknown key 'parts.1.sise'; did you mean 'size'?"),
        ({}, "missing key 'name'"),
        ({"name": "x", "part": {}}, "missing key 'part.size'"),
        ({"name": 3}, "'name' must be str, got 3"),
        ({"name": "x", "flag": 1}, "'flag' must be bool, got 1"),
        ({"name": "x", "limit": True}, "'limit' must be int, got True"),
        ({"name": "x", "limit": 1.5}, "'limit' must be int, got 1.5"),
        ({"name": "x", "rate": "fast"}, "'rate' must be float, got 'fast'"),
        ({"name": "x", "rate": None}, "'rate' must be float, got None"),
        ({"name": "x", "numbers": [1, "b"]}, "'numbers.1' must be int, got 'b'"),
        ({"name": "x", "numbers": 1}, "'numbers' must be a list, got 1"),
        ({"name": "x", "part": [1]}, "part must be a mapping of keys, got [1]"),
        ({"name": "x", "part": {"size": 1, "kind": "oval"}}, "'part.kind' must be one of round, square, got 'oval'"),
        ({"name": "x", "notes": [1]}, "'notes' must be a mapping, got [1]"),
        ([1], "the configuration must be a mapping of keys, got [1]"),
    ],
)
def test_errors_name_the_key(data, sentence):
    with pytest.raises(ConfigError) as error:
        from_dict(Whole, data)
    assert str(error.value).startswith(sentence)


def test_overrides(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("name: x\nrate: 1e-4\nparts:\n  - size: 4\n")
    overrides = ["rate=1e-3", "part.size=7", "parts.0.kind=square", "limit=null", "numbers=[3, 4]", "name=a=b"]
    whole = load_config(Whole, file, overrides)
    assert whole == Whole("a=b", 1e-3, part=Part(7), parts=(Part(4, "square"),), numbers=(3, 4))
    assert load_config(Whole, file).rate == 1e-4  # YAML reads it as a string
    part = tmp_path / "part.yaml"
    part.write_text("size: 9\n")
    assert load_config(Whole, file, [f"part=@{part}", "part.kind=square"]).part == Part(9, "square")


def test_a_file_may_build_on_another(tmp_path):
    (tmp_path / "first.yaml").write_text("name: x\nrate: 0.1\npart: {size: 1, kind: square}\nnumbers: [1, 2]\n")
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "second.yaml").write_text("base: ../first.yaml\npart: {size: 2}\nnumbers: [3]\n")
    third = folder / "third.yaml"
    third.write_text("base: second.yaml\nrate: 0.3\n")
    assert load_config(Whole, third, ["name=y"]) == Whole("y", 0.3, part=Part(2, "square"), numbers=(3,))
    for change, key in (("name=y", "part.size"), ("part={size: 3}", "name")):
        (tmp_path / "part.yaml").write_text("rate: 0.3\npart: {kind: square}\n")
        with pytest.raises(ConfigError, match=f"^missing key '{key}' in .*part.yaml: write it there$"):
            load_config(Whole, tmp_path / "part.yaml", [change])
    (tmp_path / "first.yaml").write_text("base: inner/third.yaml\n")
    with pytest.raises(ConfigError, match="'base' leads back to"):
        load_config(Whole, third)
    third.write_text("base: absent.yaml\n")
    with pytest.raises(ConfigError, match=r"absent.yaml does not exist"):
        load_config(Whole, third)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rate", "override 'rate' must have the form a.b=value"),
        ("=3", "override '=3' must have the form a.b=value"),
        ("rte=3", "unknown key 'rte'; did you mean 'rate'?"),
        ("part.siz=3", "unknown key 'part.siz'; did you mean 'size'?"),
        ("rate.x=3", "override 'rate.x=3': 'rate' is a value, not a group of keys"),
        ("parts.1.size=3", "override 'parts.1.size': '1' is no index into a list of 1"),
        (
            "name=[",
            "override 'name=[' is not valid YAML: expected the node content, but found "
            "'<stream end>' (line 1, column 2)",
        ),
        (
            "part={size: 3, size: 4}",
            "override 'part={size: 3, size: 4}' is not valid YAML: the key 'size' is there twice: "
            "remove one (line 1, column 11)",
        ),
        ("rate=" + "9" * 400, f"'rate' must be float, got {'9' * 200}"),
        (
            "rate=" + "9" * 5000,
            f"override 'rate={'9' * 75}' is not valid YAML for us: a whole number in it has thousands of digits",
        ),
        ("part=@absent.yaml", "configuration file absent.yaml does not exist"),
        ("parts.first=3", "override 'parts.first': 'first' is no index into a list of 1"),
    ],
)
def test_wrong_overrides(tmp_path, override, sentence):
    file = tmp_path / "run.yaml"
    file.write_text("name: x\nrate: 1.0\nparts: [{size: 4}]\n")
    with pytest.raises(ConfigError) as error:
        load_config(Whole, file, [override])
    assert str(error.value) == sentence


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match=r"configuration file .*absent.yaml does not exist"):
        load_config(Whole, tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [")
    with pytest.raises(ConfigError, match=r"broken.yaml is not valid YAML: [^\n]*\(line 1, column 8\)$"):
        load_config(Whole, broken)
    with pytest.raises(ConfigError, match="is not a YAML file"):
        load_config(Whole, tmp_path)


BOMB = "- &a0 [" + "1," * 10 + "]\n" + "".join(f"- &a{i} [{f'*a{i - 1},' * 10}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: x\nname: y\n", r"is not valid YAML: the key 'name' is there twice: remove one \(line 2, column 1\)"),
        ("parts: [{size: 1, 'size': 2}]", r"is not valid YAML: the key 'size' is there twice: remove one \(line 1, "),
        ("[" * 200_000, "is not valid YAML for us: its lists and mappings lie too deep in each other"),
        ("parts: &a [*a]", "is not valid YAML for us: its lists and mappings lie too deep in each other"),
        (BOMB, "is not valid YAML for us: it has more than 100000 values"),
        ("name: " + "7" * 5000, "is not valid YAML for us: a whole number in it has thousands of digits"),
        (r'name: "a \ud83d b"', r"is not valid YAML: '\\ud83d' is no character of a text \(line 1, column 7\)"),
        (r'name: "a\0b"', r"is not valid YAML: '\\x00' is no character of a text"),
        ("name: 2001-99-99", "is not valid YAML for us: month must be in 1..12"),
        ("name: !!bool 3", "is not valid YAML for us: a value in it is not what its tag says"),
        ("name: !!timestamp x", "is not valid YAML for us: "),
        ("just a text", "run.yaml is no configuration: it must have keys with values"),
    ],
)
def test_yaml_that_is_none(tmp_path, text, sentence):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_config(Whole, file, ["name=x"])


def test_a_key_may_be_merged_and_given(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("part: &p {size: 1}\nparts: [{<<: *p, size: 2}]\nname: x\nrate: 1\n")
    assert load_config(Whole, file).parts[0].size == 2


SIZES = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": -4}, "hidden_size must be above 0, got -4"),
        ({"head_dim": 5}, "head_dim (5) must be even for rotary embeddings"),
        ({"position_embedding": "alibi", "alibi_negative_heads": 3}, "alibi_negative_heads (3) + "),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'rope_scaling.rope_type' must be one of linear"),
    ],
)
def test_model_config_refuses(change, sentence):
    with pytest.raises(ConfigError) as error:
        from_dict(ModelConfig, SIZES | change)
    assert str(error.value).startswith(sentence)


def test_model_config_round_trip():
    config = from_dict(ModelConfig, SIZES | {"rope_scaling": {"rope_type": "yarn", "factor": 4}})
    assert config.rope_scaling == RopeScaling("yarn", 4.0)
    assert from_dict(ModelConfig, to_dict(config)) == config
    assert hash(config) == hash(from_dict(ModelConfig, to_dict(config)))  # a jit-static value
