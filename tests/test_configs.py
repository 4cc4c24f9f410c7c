"""The committed configurations: each can be read, and those of the papers are the sizes they say."""

from pathlib import Path

import pytest
from flax import nnx

from swa_jax.config import ConfigError, load_config
from swa_jax.model import Decoder
from swa_jax.pattern import AttentionPattern, load_pattern
from swa_jax.train_config import METHODS, TrainConfig

FOLDER = Path(__file__).parents[1] / "configs"
MODELS = sorted(path.stem for path in (FOLDER / "models").glob("*.yaml"))
FILES = sorted(
    path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml") if path.parent.name != "models"
)


def parameters(config: TrainConfig) -> int:
    assert config.model is not None
    pattern = load_pattern(config.attention, config.model, sliding_window=config.sliding_window)
    model = nnx.eval_shape(lambda: Decoder(config.model, pattern, rngs=nnx.Rngs(0)))
    return sum(variable.get_value().size for _, variable in nnx.to_flat_state(nnx.state(model)))


@pytest.mark.parametrize("name", FILES)
def test_every_configuration_can_be_read(name):
    config = load_config(TrainConfig, FOLDER / name)
    assert config.output.startswith("runs/")
    if config.model is not None:
        load_pattern(config.attention, config.model, sliding_window=config.sliding_window)


@pytest.mark.parametrize(
    ("name", "millions", "tokens"),
    [
        ("swat/340m.yaml", (330, 350), 15e9),
        ("swat/760m.yaml", (720, 770), 30e9),
        ("swiattn/pretrain-4k.yaml", (1490, 1530), 240e9),
        ("swiattn/cpt-4k.yaml", None, 20e9),
        ("swiattn/extend-32k.yaml", None, 24e9),
        ("swiattn/cpt-32k.yaml", None, 8e9),
        ("bosch/qwen3-1.7b.yaml", None, 2.5e9),
        ("bosch/qwen3-8b.yaml", None, 2.5e9),
        ("bosch/qwen3-14b.yaml", None, 2.5e9),
    ],
)
def test_sizes_and_tokens_are_the_papers(name, millions, tokens):
    config = load_config(TrainConfig, FOLDER / name)
    if millions is not None:
        assert millions[0] < parameters(config) / 1e6 < millions[1]
    trained = sum(stage.steps * stage.batch_size * stage.sequence_length for stage in config.stages)
    assert 0.95 < trained / tokens < 1.1


def test_one_switch_turns_swiattn_into_its_baselines():
    layers = {
        method: AttentionPattern.from_recipe(recipe, 22, sliding_window=1024)
        for method, recipe in METHODS.items()
    }
    assert layers["static-hybrid"].full_layers == (3, 7, 11, 15, 19)
    assert set(layers["swiattn"].layer_types) == {"switch_attention"}
    assert layers["full"].full_layers == tuple(range(22))
    assert layers["swa-cpt"] == layers["swa-zero-shot"]
    file = FOLDER / "swiattn" / "cpt-4k.yaml"
    assert load_config(TrainConfig, file, ["method=swa-zero-shot"]).total_steps == 0
    assert load_config(TrainConfig, file, ["method=swa-cpt"]).attention == "window"
    with pytest.raises(ConfigError, match="'method' = full stands for a pattern"):
        load_config(TrainConfig, file, ["method=full", "pattern=window"])


@pytest.mark.parametrize(("name", "billions"), [("qwen3-1.7b", 1.7), ("qwen3-8b", 8.2), ("qwen3-14b", 14.8)])
def test_bosch_plans_without_a_checkpoint_and_windows_three_quarters_of_the_heads(
    name, billions, monkeypatch
):
    monkeypatch.chdir(FOLDER.parent)
    shapes = [f"model=@configs/models/{name}.yaml", "init_from=null"]
    config = load_config(TrainConfig, f"configs/bosch/{name}.yaml", shapes)
    assert abs(parameters(config) / 1e9 - billions) < 0.05  # Table 4
    pattern = load_pattern(config.attention, config.model)
    assert pattern.sliding_window == 1024
    assert sum(pattern.full_head_counts) * 4 == config.model.num_hidden_layers * 8
    assert config.optimizer.warmup_steps == round(config.total_steps / 10)
