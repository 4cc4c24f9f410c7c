"""Gemma 4's `config.json`: both spellings of the heads of full layers, and what is refused."""

import hashlib
import json
from pathlib import Path

import pytest
from golden_models import hf_of

from swa_jax.checkpoint.families import apply_pattern, hf_config, hf_pattern, model_config
from swa_jax.checkpoint.families.text_part import text_config
from swa_jax.checkpoint.tensor_names import hf_tensors, is_left_out
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.parameters import parameters
from swa_jax.model.pattern import AttentionPattern

BIG, SMALL = (hf_of(f"gemma4-{name}-hybrid") for name in ("31b", "e2b"))


def older(hf: dict) -> dict:
    """As the released files say it, and as transformers up to 5.23 does."""
    heads = hf["per_layer_config"][max(hf["per_layer_config"])]
    rest = {key: value for key, value in hf.items() if key != "per_layer_config"}
    return rest | {"global_head_dim": heads["head_dim"], "num_global_key_value_heads": heads.get("num_key_value_heads")}


@pytest.mark.parametrize("hf", [BIG, SMALL], ids=["31b", "e2b"])
def test_both_spellings_are_the_same_model(hf):
    assert "global_head_dim" not in hf
    config = model_config(older(hf))
    assert config == model_config(hf)
    assert config.head_shapes[-1] == ((1, 24) if hf is BIG else (2, 24))
    assert config.head_shapes[0] == (2, 16)
    written = hf_config(config, hf_pattern(hf))
    assert model_config(older(written)) == config  # both are written


def test_what_counts_where_keys_are_values_alone():
    heads = older(BIG) | {"attention_k_eq_v": False}
    assert model_config(heads).num_global_key_value_heads is None
    assert model_config(BIG | {"attention_k_eq_v": False}).num_global_key_value_heads == 1
    assert model_config(older(SMALL) | {"global_head_dim": 16}).global_head_dim is None  # one spelling


def test_the_last_layer_is_full():
    types = [WINDOW] * 4
    hf = {**older(BIG), "num_hidden_layers": 4, "layer_types": types}
    assert list(hf_pattern(hf).layer_types) == [*types[:-1], FULL]
    assert model_config(hf).rope_layers == ("local", "local", "local", "global")


def test_the_text_part_of_a_released_model():
    """26B-A4B: transformers' own class has as many tensors of these names and shapes, 3.8 of 25.2 billion active."""
    file = Path(__file__).parent / "configs" / "google--gemma-4-26B-A4B.json"
    config = model_config(text_config(json.loads(file.read_text())))
    lines = [f"{name} {'x'.join(map(str, shape))}" for name, shape in sorted(hf_tensors(config).items())]
    assert len(lines) == 657
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == "7fe2fb9cd57908c7"
    rows = parameters(config)
    assert sum(row.size for row in rows) == pytest.approx(25.2e9, rel=0.01)
    assert sum(row.active_size for row in rows) == pytest.approx(3.8e9, rel=0.01)


def test_keys_that_no_layer_reads_are_left_out():
    """The released files of small models hold them; transformers does not read them either."""
    config = model_config(SMALL)
    assert is_left_out("model.layers.3.self_attn.k_proj.weight", config)
    assert not is_left_out("model.layers.2.self_attn.k_proj.weight", config)
    assert not is_left_out("model.layers.3.self_attn.q_proj.weight", config)
    assert not is_left_out("model.layers.3.self_attn.v_norm.weight", model_config(BIG))


def test_shared_keys_are_those_of_the_last_layer_of_the_type():
    config = model_config(SMALL)
    assert config.kv_sources == (0, 1, 2, 1, 2, 1, 2)
    assert model_config(BIG).kv_sources == (0, 1, 2, 3, 4)


def test_every_layer_full():
    hf = older(SMALL) | {"layer_types": [FULL] * 7}
    config = model_config(hf)
    assert (config.head_dim, config.global_head_dim, config.rope_layers) == (24, None, ())
    assert config.kv_sources == (0, 1, 2, 2, 2, 2, 2)
    assert model_config(hf_config(config)) == config


def test_other_patterns_stay_in_pattern_json():
    own, other = hf_pattern(SMALL), AttentionPattern((WINDOW,) * 7, 8)
    wider = AttentionPattern(own.layer_types, 16)
    assert (apply_pattern(SMALL, wider)[0]["sliding_window"], apply_pattern(SMALL, wider)[1]) == (16, None)
    written, notice = apply_pattern(SMALL, other)
    assert hf_pattern(written) == AttentionPattern((FULL,) * 7)
    assert "cannot express this pattern" in notice
    assert model_config(written) == model_config(SMALL)
