"""Small files that people edit by hand, damaged by a program: whatever reads them gives a value or one sentence."""

import copy
import json
import random

import pytest
import yaml

from swa_jax.base.errors import UserError
from swa_jax.base.settings import load_config
from swa_jax.data.chat import load_chat_template
from swa_jax.data.documents import read_texts
from swa_jax.data.prompt_file import read_prompts
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.train.config import TrainConfig

VALUES = (
    None, True, 0, -1, 7, 10**30, 1e308, -0.5, float("nan"), float("inf"), "", "x", "é\u2028", "1", [], [1], [[]], {},
    {"a": 1}, {"content": None}, {"content": "b"}, "{{ 1/0 }}", [None], [{"name": "default", "template": 3}],
)  # fmt: skip
JSON = {
    "tokenizer_config.json": {
        "eos_token": {"content": "b"},
        "bos_token": "a",
        "chat_template": "{{ messages[0].content }}",
        "added_tokens_decoder": {"1": {"content": "b"}},
        "extra_special_tokens": {"image_token": "c"},
    },
    "special_tokens_map.json": {"eos_token": "b", "additional_special_tokens": ["c"]},
    "generation_config.json": {"eos_token_id": [2, 3], "do_sample": True},
    "config.json": {"eos_token_id": 2, "text_config": {"eos_token_id": [2]}},
}
CONFIG = {
    "output": "run", "tokenizer": "t", "seed": 3, "checkpoint_every": 4, "log": {"every": 2},
    "model": {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    "optimizer": {"name": "muon", "learning_rate": 0.01, "warmup_steps": 2}, "mesh": {"fsdp": 1},
    "stages": [{"steps": 2, "sequence_length": 16, "batch_size": 6, "data": [{"files": ["a.txt"], "weight": 1.0}]}],
}  # fmt: skip
RECORDS = [{"text": "a b", "prompt": "a", "answer": "b"}, {"messages": [{"role": "user", "content": "x"}]}]


def damaged(value: object, rng: random.Random) -> object:
    """A copy with one value, somewhere inside, that is another, gone, or of another name."""
    value = copy.deepcopy(value)
    places = []

    def walk(inner):
        for key in list(inner) if isinstance(inner, dict) else range(len(inner)):
            places.append((inner, key))
            if isinstance(inner[key], dict | list):
                walk(inner[key])

    walk(value)
    inner, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del inner[key]
    elif kind == 1 and isinstance(inner, dict):
        inner[str(key) + rng.choice("sx_")] = inner.pop(key)
    else:
        inner[key] = rng.choice(VALUES)
    return value


def torn(data: bytes, rng: random.Random) -> bytes:
    """Some of the time: bytes that are cut off, doubled, or flipped."""
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    kind = rng.randrange(8)
    if kind == 0:
        return data[:start]
    if kind == 1:
        return data[:start] + data[start:end] * 2 + data[end:]
    if kind == 2 and data:
        place = rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if kind == 3:
        return data[:start] + rng.choice([b"\\ud83d", b"\xed\xa0\xbd", b"\0", b"[" * 9999, b"9" * 5000]) + data[start:]
    return data


def refuses(read) -> bool:
    """Whether the reader refuses a file, in one sentence; no other error than a user's mistake is let pass."""
    try:
        read()
    except UserError as error:
        said = str(error)
        assert len(said.splitlines()) == 1, said
        assert len(said) < 1000, said
        return True
    return False


@pytest.fixture
def folder(tmp_path, byte_tokenizer):
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer.read_bytes())
    return tmp_path


@pytest.mark.parametrize("seed", range(5))
def test_files_beside_a_tokenizer(folder, seed):
    rng, refused = random.Random(seed), 0
    for _ in range(60):
        for name, value in JSON.items():
            (folder / name).write_text(json.dumps(value))
        name = rng.choice(list(JSON))
        (folder / name).write_bytes(torn(json.dumps(damaged(JSON[name], rng)).encode(), rng))
        refused += refuses(lambda: load_tokenizer(folder))
    assert 10 < refused < 50


@pytest.mark.parametrize("seed", range(2))
def test_chat_templates(folder, seed):
    rng = random.Random(seed)
    template = "{% for m in messages %}{{ m['role'] + ': ' + m.content | trim }}{{ eos_token }}{% endfor %}"
    for _ in range(12):
        if rng.random() < 0.5:
            (folder / "chat_template.jinja").write_bytes(torn(template.encode(), rng))
        else:
            (folder / "chat_template.jinja").unlink(missing_ok=True)
            config = json.dumps(damaged(JSON["tokenizer_config.json"], rng))
            (folder / "tokenizer_config.json").write_text(config)

        def render():
            found = load_chat_template(folder)
            return found and found.render(RECORDS[1]["messages"])

        refuses(render)


@pytest.mark.parametrize("seed", range(5))
def test_lines_of_json(tmp_path, seed):
    rng, refused = random.Random(seed), 0
    file = tmp_path / "lines.jsonl"
    for _ in range(60):
        lines = [json.dumps(rng.choice([record, damaged(record, rng)])) for record in RECORDS * 2]
        file.write_bytes(torn("\n".join(lines).encode(), rng))
        refused += refuses(lambda: read_prompts(file))
        refused += refuses(lambda: list(read_texts(file, "text")))
    assert refused > 20


@pytest.mark.parametrize("seed", range(5))
def test_configurations(tmp_path, seed):
    rng, refused = random.Random(seed), 0
    file = tmp_path / "run.yaml"
    for _ in range(60):
        text = yaml.safe_dump(damaged(CONFIG, rng), allow_unicode=True).encode()
        file.write_bytes(torn(text, rng))
        override = rng.choice(["seed=1", "log.every=3", "stages.0.steps=1", "mesh=3", "model.head_dim=x", "a.b.c=1"])
        value = torn(rng.choice(VALUES).__repr__().encode(), rng).decode(errors="replace")
        overrides = rng.choice([[], [override], [f"{override.split('=')[0]}={value}"]])
        refused += refuses(lambda given=overrides: load_config(TrainConfig, file, given))
    assert 10 < refused < 60
