"""MiMo-V2-Flash: sigmoid routing; windowed layers have twice the KV heads, sink logits, and another RoPE than full
ones, and values are narrower than keys."""

from __future__ import annotations

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import experts
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys, read_dense, write_dense
from swa_jax.checkpoint.families.grammar import layers_of, whole
from swa_jax.checkpoint.families.layer_kinds import layer_kind_keys, of_full_layers, ropes_by_type, with_layer_kinds
from swa_jax.checkpoint.families.rope import without_rope
from swa_jax.checkpoint.families.windows import Windows, layer_types, window_keys_by_type, within_context
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

DEFAULT_CONTEXT, DEFAULT_WINDOW, DEFAULT_SHARE = 131072, 129, 0.334
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "max_position_embeddings": DEFAULT_CONTEXT,
    "rms_norm_eps": 1e-5,
    "v_head_dim": 128,
}
DEFAULT_ROPE = {FULL: {"rope_type": "default", "rope_theta": 5e6}, WINDOW: {"rope_type": "default", "rope_theta": 1e4}}
KV_HEADS = 2  # of a windowed layer, for each that a full layer has
TENSOR_NAMES = {"layers.attention.sink_logits": "model.layers.{layer}.self_attn.attention_sink_bias"}


def from_hf(hf: HfConfig) -> ModelConfig:
    """As in Hugging Face's class the keys of the first release that say which layers are windowed and sparse
    (`hybrid_layer_pattern`, `moe_layer_freq`) are not read."""
    hf = {**hf, "num_experts": hf.get("n_routed_experts", hf.get("num_local_experts"))}
    fields = experts.read(hf, count=256, per_token=8, width=("moe_intermediate_size", 2048))
    fields |= experts.sigmoid_routing(hf, "routed_scaling_factor", 1.0) | experts.groups(hf)
    types = _types(hf, layers_of(hf))
    ropes = ropes_by_type(hf, types, DEFAULT_ROPE, DEFAULT_SHARE)
    scale = hf.get("attention_value_scale", 0.707)
    config = read_dense(
        experts.without(without_rope(hf)) | {"rope_parameters": ropes[FULL], "n_routed_experts": None},
        DEFAULTS,
        attention_bias=bool(hf.get("attention_bias")),
        value_multiplier=1.0 if scale is None else scale,
        partial_rotary_factor=ropes[FULL]["partial_rotary_factor"],
        v_head_dim=hf.get("v_head_dim", DEFAULTS["v_head_dim"]),
        **experts.with_mlp_types(fields, experts.mlp_types(hf, 1)),
    )
    kv_heads = config.num_key_value_heads
    if config.num_attention_heads % (KV_HEADS * kv_heads) and WINDOW in types:
        raise ConfigError(
            f"config.json: num_attention_heads ({config.num_attention_heads}) must be a multiple of "
            f"{KV_HEADS * kv_heads}, the KV heads of windowed layers, which are {KV_HEADS} times num_key_value_heads"
        )
    full = {"num_key_value_heads": kv_heads, "sink_logits": False}
    windowed = {"num_key_value_heads": KV_HEADS * kv_heads, "sink_logits": True}
    return with_layer_kinds(config, types, ropes, full, windowed)


def to_hf(config: ModelConfig) -> HfKeys:
    kv_heads = of_full_layers(config, "num_key_value_heads")
    if config.rope_layers and "global" not in config.rope_layers:
        kv_heads //= KV_HEADS
    hf = write_dense(
        config,
        "attention_bias",
        "v_head_dim",
        attention_value_scale=config.value_multiplier,
        mlp_layer_types=list(config.mlp_kinds),
    )
    if config.num_experts:
        hf |= experts.keys_beside_dense(config) | experts.group_keys(config)
        hf["n_routed_experts"] = hf.pop("num_experts")
        hf["routed_scaling_factor"] = config.expert_multiplier
    return without_rope(hf) | layer_kind_keys(config) | {"num_key_value_heads": kv_heads}


def _types(hf: HfConfig, layers: int) -> list[str]:
    """Without `layer_types` the first layer is full, and every sixth."""
    return layer_types(hf, [FULL if i == 0 or not (i + 1) % 6 else WINDOW for i in range(layers)])


def read_windows(hf: HfConfig, layers: int) -> Windows:
    """`sliding_window_size`, which wins, does not count the query's own key."""
    window = hf.get("sliding_window", DEFAULT_WINDOW)
    if hf.get("sliding_window_size") is not None:
        window = whole(hf, "sliding_window_size", 128, least=1) + 1
    return within_context(window, _types(hf, layers), hf.get("max_position_embeddings") or DEFAULT_CONTEXT)


def window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    return window_keys_by_type(config, pattern) | {"sliding_window_size": None}


FAMILY = Family(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    from_hf,
    to_hf,
    read_windows,
    window_keys,
    peculiarity="keys and values of two widths",
    tensor_names=TENSOR_NAMES,
)
