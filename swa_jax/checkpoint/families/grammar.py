"""The types of the keys of `config.json`, whatever family it is of.

A family says what is wrong with the keys that it reads in a way of its own. Here stand those that it would take as they
are, such as "false", which Python takes for true, and those that no family reads but that Hugging Face's classes check.
Below stand the readers of single keys that several families use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swa_jax.base.errors import ConfigError, UserError

HfConfig = Mapping[str, Any]  # a `config.json`
HfKeys = dict[str, Any]  # some of its keys
Grammar = tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...]  # keys, and what they hold

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
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TEXTS = ("dtype", "torch_dtype", "transformers_version")
_LISTS_OF_TYPES = ("layer_types", "mlp_layer_types")
MOST = 2**31 - 1  # positions, rows and columns are counted in 32 bits


def check_types(hf: HfConfig) -> None:
    """Raise `ConfigError` for a key with a value of the wrong type; null always passes, as an absent key does."""
    check_keys(hf, _GRAMMAR, "config.json", ConfigError)


def check_keys(held: Mapping[str, Any], grammar: Grammar, where: str, error: type[UserError]) -> None:
    """The same for what another file holds, as its own grammar and kind of error say."""
    for keys, kind, fits in grammar:
        for key in keys:
            if held.get(key) is not None and not fits(held[key]):
                raise error(f"{where}: {key} must be {kind}, got {shortened(held[key])}")


def shortened(value: Any) -> str:
    """A value as a sentence shows it."""
    text = str(value) if isinstance(value, int) and value.bit_length() < 1000 else repr(value)[:200]
    return text if len(text) <= 100 else f"{text[:100]}..."


def whole(hf: HfConfig, key: str, by_default: int, *, least: int = 0) -> int:
    """A key that counts something; null is as absent. Raises `ConfigError`."""
    value = by_default if hf.get(key) is None else hf[key]
    if type(value) is not int or value < least:
        raise ConfigError(f"config.json: {key} must be a whole number{' above 0' if least else ''}, got {value!r}")
    return value


def layers_of(hf: HfConfig) -> int:
    """`num_hidden_layers`, or 0 where `read_dense` says what is wrong with it."""
    layers = hf.get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0


def positive_number(hf: HfConfig, key: str, by_default: float | None) -> float:
    """A key that is a factor. Raises `ConfigError`."""
    value = hf.get(key, by_default)
    if not is_number(value) or value <= 0:
        raise ConfigError(f"config.json: {key} must be a number above 0, got {value!r}")
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_tokens(value: Any) -> bool:
    """-1 is none, in old files."""
    return all(type(token) is int and -1 <= token <= MOST for token in (value if isinstance(value, list) else [value]))


def _is_size(value: Any) -> bool:
    return not isinstance(value, int) or isinstance(value, bool) or value <= MOST  # other types: the families' own


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


# What keys hold, in words, and whether a value is that.
SWITCH = ("true or false", lambda value: isinstance(value, bool))
NUMBER = ("a number", is_number)
TOKENS = ("the id of a token, or a list of them", _are_tokens)
_GRAMMAR: Grammar = (
    (_SWITCHES, *SWITCH),
    (_NUMBERS, *NUMBER),
    (_SIZES, f"at most {MOST}", _is_size),
    (TOKEN_KEYS, *TOKENS),
    (_TEXTS, "a text", lambda value: isinstance(value, str)),
    (("architectures",), "a list of names", _are_texts),
    (_LISTS_OF_TYPES, "a list with one type a layer", _are_texts),
)
