"""Gemma 4's text models: full layers have heads of another shape, values are normed, layers may have inputs of their
own, the last ones may read the keys and values of earlier ones, and experts may stand beside the MLPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import experts
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, attention_biases, read_dense, write_dense
from swa_jax.checkpoint.families.rope import read_local_theta, rope_keys, rope_kinds_of, rope_of, without_rope
from swa_jax.checkpoint.families.windows import one_full_in, window_keys_by_type, windows_of
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW

DEFAULT_CONTEXT, DEFAULT_WINDOW = 131072, 512
DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": DEFAULT_CONTEXT,
    "tie_word_embeddings": True,
}
OTHER_DEFAULTS = {
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
DEFAULT_FULL_HEAD_DIM = 512
DEFAULT_ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    WINDOW: {"rope_type": "default", "rope_theta": 1e4},
}
EXPERT_KEYS = {
    "num_experts": "num_experts",
    "top_k_experts": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
}
_LAYER = "model.layers.{layer}.experts"
JOINED = {
    f"{_LAYER}.gate_up_proj": ("layers.experts.gate_proj.kernel", "layers.experts.up_proj.kernel"),
    f"{_LAYER}.down_proj": ("layers.experts.down_proj.kernel",),
}
_PER_LAYER = ("head_dim", "num_key_value_heads")


def from_hf(hf: HfConfig) -> ModelConfig:
    if hf.get("use_bidirectional_attention") not in (None, False, "vision"):  # text is causal beside images
        raise ConfigError(
            f"config.json: use_bidirectional_attention {hf['use_bidirectional_attention']!r} is not supported; "
            "supported: causal attention"
        )
    hf = {**hf, "hidden_act": hf.get("hidden_activation", "gelu_pytorch_tanh")}
    ropes = hf.get("rope_parameters") or {}
    if not isinstance(ropes, Mapping) or not all(isinstance(rope, Mapping) for rope in ropes.values()):
        raise ConfigError(f"config.json: rope_parameters must have those of {FULL} and of {WINDOW}, got {ropes!r}")
    hf["rope_parameters"] = {**DEFAULT_ROPE, **ropes}
    others = {key: default if hf.get(key) is None else hf[key] for key, default in OTHER_DEFAULTS.items()}
    if hf.get("enable_moe_block"):
        others |= _experts(hf)
    if not others["hidden_size_per_layer_input"]:
        others["vocab_size_per_layer_input"] = 0
    config = read_dense(
        rope_of(experts.without(hf), FULL),
        DEFAULTS,
        **attention_biases(hf),
        norm_placement="sandwich",
        qk_norm=True,
        v_norm=True,
        layer_scalar=True,
        attention_scale=1.0,
        logit_softcap=hf.get("final_logit_softcapping"),
        **others,
    )
    types = _types(hf, config.num_hidden_layers)
    return dataclasses.replace(
        config,
        embedding_multiplier=config.hidden_size**0.5,
        rope_layers=rope_kinds_of(types),
        local_rope_theta=read_local_theta(rope_of(hf, WINDOW), config.max_position_embeddings),
        use_double_wide_mlp=config.use_double_wide_mlp and config.num_kv_shared_layers > 0,
        **_heads_of_full_layers(hf, config, types),
    )


def _experts(hf: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    found: dict[str, Any] = {"norm_topk_prob": True, "experts_beside_mlp": True}
    for key, field in EXPERT_KEYS.items():
        if (value := hf.get(key)) is None:
            raise ConfigError(f"config.json: {key} is missing; enable_moe_block needs it")
        found[field] = value
    return found


def _heads_of_full_layers(hf: HfConfig, config: ModelConfig, types: Sequence[str]) -> dict[str, Any]:
    """Fields of `ModelConfig`, from either spelling: `global_head_dim` and `num_global_key_value_heads` (which counts
    where keys are values), or an entry of `per_layer_config` for every full layer."""
    full = [layer for layer, kind in enumerate(types) if kind == FULL]
    given, heads = hf.get("per_layer_config"), dict[str, Any]()
    if given is None:
        heads = {"head_dim": hf.get("global_head_dim") or DEFAULT_FULL_HEAD_DIM}
        if config.attention_k_eq_v and hf.get("num_global_key_value_heads") is not None:
            heads["num_key_value_heads"] = hf["num_global_key_value_heads"]
    else:
        names = given if isinstance(given, Mapping) else {"": None}
        entries: dict[Any, Any] = {int(key) if key.isdecimal() else key: names[key] for key in names}  # "05" is 5
        heads = entries.get(full[0], {})
        alike = isinstance(heads, Mapping) and entries == (dict.fromkeys(full, heads) if heads else {})
        if not alike or not {*heads} <= {*_PER_LAYER}:
            raise ConfigError(
                "config.json: per_layer_config must have one entry for every layer of full attention, all alike, of "
                f"{' and '.join(_PER_LAYER)}; other layers are as the rest of the file says"
            )
    values = {key: heads.get(key, getattr(config, key)) for key in _PER_LAYER}
    for key, value in values.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"config.json: {key} of full layers must be a whole number above 0, got {value!r}")
    if len(full) == len(types):
        return values
    size, count = (None if values[key] == getattr(config, key) else values[key] for key in _PER_LAYER)
    return {"global_head_dim": size, "num_global_key_value_heads": count}


def to_hf(config: ModelConfig) -> HfKeys:
    hf = write_dense(
        config,
        *OTHER_DEFAULTS,
        "attention_bias",
        final_logit_softcapping=config.logit_softcap,
        enable_moe_block=config.num_experts > 0,
        **{key: getattr(config, field) or None for key, field in EXPERT_KEYS.items()},
    )
    hf["hidden_activation"] = hf["hidden_act"]
    kinds = config.rope_kinds_by_layer
    heads = [dict(zip(reversed(_PER_LAYER), shape, strict=True)) for shape in config.head_shapes]
    last = heads[-1]  # which is a full layer
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return without_rope(hf) | {
        "rope_parameters": {FULL: rope_keys(config)["rope_parameters"], WINDOW: local},
        "global_head_dim": last["head_dim"],
        "num_global_key_value_heads": last["num_key_value_heads"] if config.attention_k_eq_v else None,
        "per_layer_config": {str(i): heads[i] for i, kind in enumerate(kinds) if kind == "global"},
    }


def _types(hf: HfConfig, layers: int) -> list[str]:
    """Without `layer_types` every sixth layer is full; the last one always is."""
    return [*one_full_in(6)(hf, layers)[:-1], FULL]


read_windows = windows_of(_types, DEFAULT_WINDOW, DEFAULT_CONTEXT)
FAMILY = Family("gemma4_text", "Gemma4ForCausalLM", from_hf, to_hf, read_windows, window_keys_by_type, joined=JOINED)
