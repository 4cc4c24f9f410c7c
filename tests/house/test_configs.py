"""The committed configurations: each can be read, is the size the paper says, and has a small twin that trains."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from training_runs import losses

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config
from swa_jax.checkpoint.families.pattern_files import load_pattern
from swa_jax.checkpoint.named import BUNDLED, load_tokenizer
from swa_jax.data.chains import VOCAB_SIZE
from swa_jax.model.decoder import Decoder
from swa_jax.model.lora import LoraConfig
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.train.config import METHODS, TrainConfig
from swa_jax.train.loop import train
from swa_jax.train.optimizer import learning_rate

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml") if path.parent.name != "models")
# The runs of the papers and, for each, the same run in small.
TWINS = {
    "swat/340m.yaml": "swat-tiny.yaml",
    "swat/760m.yaml": "swat-tiny.yaml",
    "swat/analysis-248m.yaml": "swat/analysis-tiny.yaml",
    "swiattn/pretrain-4k.yaml": "swiattn/pretrain-4k-tiny.yaml",
    "swiattn/cpt-4k.yaml": "swiattn/cpt-4k-tiny.yaml",
    "swiattn/extend-32k.yaml": "swiattn/extend-32k-tiny.yaml",
    "swiattn/cpt-32k.yaml": "swiattn/cpt-32k-tiny.yaml",
    "bosch/qwen3-1.7b.yaml": "bosch/qwen3-tiny.yaml",
    "bosch/qwen3-8b.yaml": "bosch/qwen3-tiny.yaml",
    "bosch/qwen3-14b.yaml": "bosch/qwen3-tiny.yaml",
    "swaa/qwen3-4b-lora.yaml": "swaa/lora-tiny.yaml",
    "swaa/lora-distil.yaml": "swaa/lora-tiny.yaml",
}
QWEN = {"bosch/qwen3-1.7b.yaml": 1.7, "bosch/qwen3-8b.yaml": 8.2, "bosch/qwen3-14b.yaml": 14.8}  # Table 4


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def load(name: str, *overrides: str) -> TrainConfig:
    return load_config(TrainConfig, FOLDER / name, overrides)


def variants(name: str) -> dict[str, list[str]]:
    """The overrides that a file's comments name: lines `#   NAME: a.b=c ...` and those indented under them."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / name).read_text().splitlines():
        if match := re.fullmatch(r"#   (\S[^:=]*): (\S+=.*)", line):
            found[match[1]] = match[2].split()
        elif found and re.match(r"#       \S+=", line):
            found[list(found)[-1]] += line[1:].split()
    return found


def parameters(config: TrainConfig) -> int:
    assert config.model is not None
    pattern = load_pattern(config.attention, config.model, config.window)
    model = nnx.eval_shape(lambda: Decoder(config.model, pattern, rngs=nnx.Rngs(0)))
    return sum(variable.get_value().size for _, variable in nnx.to_flat_state(nnx.state(model)))


def tokens(config: TrainConfig) -> int:
    return sum(stage.steps * stage.batch_size * stage.sequence_length for stage in config.stages)


@pytest.mark.parametrize("name", FILES)
def test_every_configuration_and_its_variants_can_be_read(name):
    for overrides in ([], *variants(name).values()):
        config = load(name, *overrides)
        assert config.output.startswith("runs/")
        if config.model is not None:
            for stage in config.stages:
                for pattern in stage.patterns or (config.attention,):
                    load_pattern(pattern, config.model, Window(stage.sliding_window).of(config.window, needed=False))
            bundled = config.tokenizer in BUNDLED
            vocabulary = load_tokenizer(config.tokenizer).vocab_size if bundled else 0
            # That of the chains is learned when it is first needed.
            assert (VOCAB_SIZE if name == "chains.yaml" else vocabulary) <= config.model.vocab_size
        elif config.attention.endswith(".json"):
            AttentionPattern.from_json(Path(config.attention))
        else:
            AttentionPattern.from_recipe(config.attention, 8, sliding_window=config.sliding_window)
        if overrides:
            assert config != load(name)


@pytest.mark.parametrize(
    ("name", "overrides", "millions", "trained"),
    [
        ("swat/340m.yaml", [], (330, 350), 15e9),
        ("swat/760m.yaml", [], (720, 770), 30e9),
        ("swat/analysis-248m.yaml", [], (245, 250), 20e9),
        ("swiattn/pretrain-4k.yaml", [], (1490, 1530), 240e9),
        ("swiattn/pretrain-4k.yaml", variants("swiattn/pretrain-4k.yaml")["192B"], (1490, 1530), 192e9),
        ("swiattn/cpt-4k.yaml", [], None, 20e9),
        ("swiattn/extend-32k.yaml", [], None, 24e9),
        ("swiattn/cpt-32k.yaml", [], None, 8e9),
        ("bosch/qwen3-1.7b.yaml", [], None, 2.5e9),
        ("bosch/qwen3-8b.yaml", [], None, 2.5e9),
        ("bosch/qwen3-14b.yaml", [], None, 2.5e9),
    ],
)
def test_sizes_and_tokens_are_the_papers(name, overrides, millions, trained):
    config = load(name, *overrides)
    if millions is not None:
        assert millions[0] < parameters(config) / 1e6 < millions[1]
    assert 0.95 < tokens(config) / trained < 1.1


def test_swiattns_32k_model_has_one_schedule_over_both_of_its_runs():
    """Appendix C: "during the first 2000 steps" to 1e-3, "during the last 24B tokens (i.e., last 6000 steps)" to 0."""
    first = load("swiattn/pretrain-4k.yaml", *variants("swiattn/pretrain-4k.yaml")["192B"])
    second = load("swiattn/extend-32k.yaml")
    assert second.init_optimizer
    assert second.init_from == f"{first.output}/model"
    assert second.optimizer.first_step == first.total_steps
    for name in ("b1", "b2", "weight_decay"):
        assert getattr(first.optimizer, name) == getattr(second.optimizer, name)
    steps = [(first, 0), (first, 1000), (first, 2000), (first, 45775), (second, 0), (second, 3000), (second, 6000)]
    rates = [learning_rate(c.optimizer, c.optimizer.learning_rate, c.total_steps)(step) for c, step in steps]
    np.testing.assert_allclose(rates, [0, 5e-4, 1e-3, 1e-3, 1e-3, 5e-4, 0], atol=1e-9)


def test_swats_ablations_are_all_there():
    name = "swat/analysis-248m.yaml"
    rows = {row: load(name, *overrides) for row, overrides in variants(name).items()}
    rows["Table 3 row 8"] = load(name)

    def summary(config):
        model = config.model
        heads = (model.alibi_negative_heads, model.alibi_positive_heads) if model.uses_alibi else None
        window = config.sliding_window if config.pattern == "window" else None
        length = config.stages[0].sequence_length
        return (window, model.attention_activation, model.position_embedding, heads, length)

    assert {row: summary(config) for row, config in rows.items()} == {
        "Table 3 row 1": (None, "softmax", "rope", None, 128),
        "Table 3 row 2": (None, "sigmoid", "rope", None, 128),
        "Table 3 row 3": (128, "softmax", "rope", None, 1024),
        "Table 3 row 4": (128, "sigmoid", "alibi", (12, 0), 1024),
        "Table 3 row 5": (128, "sigmoid", "alibi", (8, 4), 1024),
        "Table 3 row 6": (128, "sigmoid", "alibi", (6, 6), 1024),
        "Table 3 row 7": (128, "sigmoid", "alibi", (6, 6), 2048),
        "Table 3 row 8": (128, "sigmoid", "alirope", (6, 6), 1024),
        "Table 3 row 9": (1024, "sigmoid", "alirope", (6, 6), 1024),
        "Table 3 row 10": (None, "softmax", "rope", None, 1024),
        "Table 3 row 11": (None, "sigmoid", "alibi", (12, 0), 1024),
        "Table 2 Sliding Window B": (1024, "softmax", "rope", None, 4096),
        "Table 2 Vanilla C": (None, "softmax", "rope", None, 4096),
        "Table 2 Vanilla D": (None, "softmax", "rope", None, 16384),
    }
    assert {tokens(config) for config in rows.values()} == {80000 * 2**18}
    assert {config.model.slope_schedule for row, config in rows.items() if row[-2:] in (" 4", "11")} == {"press"}
    signs = [
        (config.model.alibi_negative_heads, config.model.alibi_positive_heads)
        for config in (load("swat/760m.yaml", *variants("swat/340m.yaml")[row]) for row in ("SWAT(-)", "SWAT(+)"))
    ]
    assert signs == [(16, 0), (0, 16)]


def test_one_switch_turns_swiattn_into_its_baselines():
    layers = {
        method: AttentionPattern.from_recipe(recipe, 22, sliding_window=1024) for method, recipe in METHODS.items()
    }
    assert layers["static-hybrid"].full_layers == (3, 7, 11, 15, 19)
    assert set(layers["swiattn"].layer_types) == {"switch_attention"}
    assert layers["full"].full_layers == tuple(range(22))
    assert layers["swa-cpt"] == layers["swa-zero-shot"]
    assert load("swiattn/cpt-4k.yaml", "method=swa-zero-shot").total_steps == 0
    assert load("swiattn/cpt-4k.yaml", "method=swa-cpt").attention == "window"
    with pytest.raises(ConfigError, match="'method' = full stands for a pattern"):
        load("swiattn/cpt-4k.yaml", "method=full", "pattern=window")
    losses = {load("swiattn/cpt-4k.yaml", *overrides).switch_loss for overrides in _ablations().values()}
    assert len(losses) == len(_ablations()) == 7
    assert load("swiattn/cpt-4k.yaml").switch_loss not in losses


def _ablations():
    return {name: over for name, over in variants("swiattn/cpt-4k.yaml").items() if name[0] == "V"}


@pytest.mark.parametrize("name", QWEN)
def test_bosch_plans_without_a_checkpoint_and_windows_three_quarters_of_the_heads(name):
    config = load(name, f"model=@configs/models/{Path(name).name}", "init_from=null")
    assert abs(parameters(config) / 1e9 - QWEN[name]) < 0.05
    pattern = load_pattern(config.attention, config.model)
    assert pattern.sliding_window == config.sliding_window == 1024
    assert sum(pattern.full_head_counts) * 4 == config.model.num_hidden_layers * 8
    stage, optimizer = config.stages[0], config.optimizer
    assert (stage.sequence_length, stage.batch_size) == (32768, 64)
    assert (optimizer.learning_rate, optimizer.schedule) == (1e-5, "cosine")
    assert optimizer.warmup_steps == round(config.total_steps / 10)


def test_swaa_trains_adapters_as_the_paper_does():
    name = "swaa/qwen3-4b-lora.yaml"
    config = load(name, "model=@configs/models/qwen3-4b.yaml", "init_from=null")
    assert abs(parameters(config) / 1e9 - 4.02) < 0.01
    assert config.lora == LoraConfig()
    assert (config.lora.rank, config.lora.scale, config.lora.dropout) == (16, 8, 0.1)
    assert config.optimizer.warmup_steps == round(config.total_steps * 0.05 + 0.01)
    assert config.stages[0].batch_size * config.total_steps == 16000
    code = variants(name)["the scale as in the authors' code"]
    assert load(name, *code).lora.scale == config.lora.scale
    assert load(name, *variants(name)["trained, quality"]).attention == "swaa-trained-quality"


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_differs_in_size_only(name):
    big, small = load(name), load(TWINS[name])
    assert small.attention == big.attention or small.attention.endswith("stand-in-8x4.json")
    assert small.switch_loss == big.switch_loss
    assert small.optimizer.name == big.optimizer.name
    assert small.lora == big.lora
    assert (small.model is None) == (big.model is None)
    if small.model is not None:
        names = ("model_type", "attention_activation", "position_embedding", "slope_schedule", "qk_norm")
        assert [getattr(small.model, n) for n in names] == [getattr(big.model, n) for n in names]
    changes = [config.model_changes.rope_scaling for config in (small, big)]
    assert len({None if change is None else change.rope_type for change in changes}) == 1


def test_swiattn_is_planned_with_its_own_shapes():
    planned = load_config(
        TrainConfig,
        FOLDER / "swiattn" / "cpt-32k.yaml",
        ["init_from=null", f"model=@{FOLDER}/models/swiattn-1.5b.yaml"],
    ).model
    trained = load("swiattn/pretrain-4k.yaml").model
    assert dataclasses.replace(planned, max_position_embeddings=4096) == trained


def test_every_run_of_the_papers_has_a_twin():
    large = {name for name in FILES if not name.endswith("tiny.yaml") and not name.startswith("compare/")}
    assert large == {*TWINS, "recall.yaml", "chains.yaml", "swiattn/cpt-smollm2.yaml"}
    assert {name for name in FILES if name.endswith("tiny.yaml")} == set(TWINS.values())


@pytest.mark.long
def test_the_twins_train(tmp_path):
    """Two steps each, in the order of the runs: the long continued pretraining starts from the extended model."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x): return x + {i} * {i * 7919 % 1000}\n" for i in range(4000)))
    starts = {"recall": "recall"}
    for name in dict.fromkeys(TWINS.values()):
        config = load(name)
        overrides = [
            f"output={tmp_path / name}",
            "stages.0.steps=2",
            f"stages.0.data=[{{kind: text, files: [{text}]}}]",
        ]
        if config.init_from is not None:
            overrides.append(f"init_from={starts[config.init_from]}")
        starts[f"{config.output}/model"] = train(load(name, *overrides), quiet=True)
        first, _ = losses(tmp_path / name)
        assert 0 < first < 8, name
