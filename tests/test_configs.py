"""The committed configurations: each can be read, and those of the papers are the sizes they say."""

from pathlib import Path

import pytest
from flax import nnx

from swa_jax.config import ConfigError, load_config
from swa_jax.model import Decoder
from swa_jax.pattern import AttentionPattern, load_pattern
from swa_jax.train_config import METHODS, TrainConfig

FOLDER = Path(__file__).parents[1] / "configs"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml"))


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
