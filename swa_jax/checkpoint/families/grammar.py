"""The types of the keys of `config.json`, whatever family it is of.

A family says what is wrong with the keys that it reads in a way of its own. Here stand those that it would take as they
are, such as "false", which Python takes for true, and those that no family reads but that Hugging Face's classes check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swa_jax.base.errors import ConfigError

_SWITCHES = (
    "attention_bias", "attention_k_eq_v", "attention_out_bias", "enable_moe_block", "is_causal", "mlp_bias",
    "mup_enabled", "norm_topk_prob", "tie_word_embeddings", "use_bias", "use_cache", "use_double_wide_mlp", "use_mrope",
    "use_qk_norm", "use_sliding_window",
)  # fmt: skip
_NUMBERS = (
    "attention_dropout", "attention_multiplier", "attn_logit_softcapping", "embedding_multiplier",
    "final_logit_softcapping", "hidden_dropout", "initializer_range", "layer_norm_eps", "logit_scale", "logits_scaling",
    "norm_epsilon", "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps", "rope_local_base_freq",
    "attention_value_scale", "moe_routed_scaling_factor", "moe_router_logit_softcapping", "route_scale",
    "routed_scaling_factor", "router_aux_loss_coef", "swiglu_alpha", "swiglu_limit",
)  # fmt: skip
_SIZES = (
    "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "moe_intermediate_size",
    "num_attention_heads", "num_key_value_heads", "sliding_window", "vocab_size",
)  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TEXTS = ("dtype", "torch_dtype", "transformers_version")
_LISTS_OF_TYPES = ("layer_types", "mlp_layer_types")
MOST = 2**31 - 1  # positions, rows and columns are counted in 32 bits


def check_types(hf: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a key with a value of the wrong type; null always passes, as an absent key does."""
    for keys, kind, fits in _GRAMMAR:
        for key in keys:
            if hf.get(key) is not None and not fits(hf[key]):
                raise ConfigError(f"config.json: {key} must be {kind}, got {shortened(hf[key])}")


def shortened(value: Any) -> str:
    """A value as a sentence shows it."""
    text = str(value) if isinstance(value, int) and value.bit_length() < 1000 else repr(value)[:200]
    return text if len(text) <= 100 else f"{text[:100]}..."


def _is_size(value: Any) -> bool:
    return not isinstance(value, int) or isinstance(value, bool) or value <= MOST  # other types: the families' own


def _is_token(value: Any) -> bool:
    return type(value) is int and -1 <= value <= MOST  # -1 is none, in old files


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_GRAMMAR: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (_SWITCHES, "true or false", lambda value: isinstance(value, bool)),
    (_NUMBERS, "a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    (_SIZES, f"at most {MOST}", _is_size),
    (
        _TOKENS,
        "the id of a token, or a list of them",
        lambda value: _is_token(value) or (isinstance(value, list) and all(map(_is_token, value))),
    ),
    (_TEXTS, "a text", lambda value: isinstance(value, str)),
    (("architectures",), "a list of names", _are_texts),
    (_LISTS_OF_TYPES, "a list with one type a layer", _are_texts),
)
