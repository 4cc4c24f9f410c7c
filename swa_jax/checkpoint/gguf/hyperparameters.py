"""From a GGUF file's metadata to the `config.json` of a Hugging Face model: one table of architectures, one of keys.

A new architecture is a line of `ARCHITECTURES`, and one of `KEYS` for each key that no other has. Facts: the `gguf`
package's names of keys, and llama.cpp's conversion and src/models for what the file leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.checkpoint.gguf.header import GgufTensor, Header
from swa_jax.model.layer_types import FULL, WINDOW


class Metadata:
    """What a file says of a model of some architecture: values by key, and which tensors there are."""

    def __init__(self, header: Header, file: object):
        self.file, self.values, self.tensors = file, header.metadata, header.tensors
        self.architecture = self._known(header.metadata.get("general.architecture"))
        self.blocks = self.whole("block_count")
        self.layers = self.blocks - self.whole("nextn_predict_layers", 0)
        if not 1 <= self.layers <= len(self.tensors):
            raise self.wrong("block_count", f"is {self.layers} in a file of {len(self.tensors)} tensors")

    def _known(self, name: Any) -> str:
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ConfigError(
                f"{self.file}: general.architecture {str(name)[:100]!r} is not supported; supported: "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
        return name

    def is_left_out(self, tensor: str) -> bool:
        """Whether a tensor is of a layer for multi-token prediction, which stand behind the others, or never read."""
        number, _, name = tensor.removeprefix("blk.").partition(".")
        if not (tensor.startswith("blk.") and number.isdigit()):
            return False
        keys = self.layers - self.whole("attention.shared_kv_layers", 0)  # layers behind read those of others
        unread = name.startswith(("attn_k.", "attn_v.", "attn_k_norm.")) and int(number) >= keys
        return self.layers <= int(number) < self.blocks or unread

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def wrong(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.key(name)} {what}")

    def has(self, tensor: str, layer: int = 0) -> bool:
        """Whether the file has a tensor of a layer, such as "attn_q.bias"."""
        return f"blk.{layer}.{tensor}" in self.tensors

    def each(self, name: str) -> list[int]:
        """A whole number for each layer. Raises `CheckpointError`."""
        value = self.values.get(self.key(name))
        if not isinstance(value, np.ndarray):
            return [self.whole(name)] * self.layers
        if value.dtype.kind not in "iu" or len(value) < self.layers or (value < 0).any():
            raise self.wrong(name, "must have a whole number for each layer")
        numbers: list[int] = value.tolist()[: self.layers]
        return numbers

    def whole(self, name: str, default: int | None = None) -> Any:
        """A whole number; lists of one a layer must agree. Raises `CheckpointError`, also where it must be there."""
        value = self.values.get(self.key(name), default)
        if isinstance(value, np.ndarray):
            found = set(value.tolist()[: getattr(self, "layers", None)])
            if len(found) != 1:
                raise self.wrong(name, "differs between layers, which is not supported; supported: one for all layers")
            value = found.pop()
        if value is not default and (type(value) is not int or value < 0):
            raise self.wrong(name, f"must be a whole number, got {str(value)[:100]!r}")
        if value is None and name in _NEEDED:
            raise CheckpointError(f"{self.file} lacks {self.key(name)}, without which the model is not known")
        return value

    def number(self, name: str) -> float | None:
        """A number, as the shortest decimal that makes the file's 32 bits."""
        value = self.values.get(self.key(name))
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise self.wrong(name, f"must be a number, got {str(value)[:100]!r}")
        with np.errstate(over="ignore"):
            return float(str(np.float32(value)))

    def text(self, name: str) -> str | None:
        value = self.values.get(self.key(name))
        if not isinstance(value, str | None):
            raise self.wrong(name, f"must be a text, got {str(value)[:100]!r}")
        return value


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a name in `general.architecture` stands for.

    One layer in `period` is full, where a file with a window does not say which; None: there are no windows by layer.
    """

    model_type: str | Callable[[Metadata], str]  # the family, or what finds it
    period: int | None = None
    full_first: bool = False  # of each period the first layer is full, and not the last
    permuted: bool = False  # rows of q and k are in the order of rotary embeddings that rotate neighbouring channels
    by_layer: tuple[str, ...] = ()  # keys whose numbers may differ between layers: the first, and `more` for the others
    # Keys of `config.json` that no key of the file says.
    more: Callable[[Metadata, dict[str, Any]], Mapping[str, Any]] = lambda metadata, hf: {}


DEFAULT_THETA = 10000.0  # llama.cpp's, where a file does not say
SOFTMAX, SIGMOID = 1, 2  # of `expert_gating_func`
_NEEDED = ("block_count", "embedding_length", "attention.head_count")

# Keys of a file and of `config.json`.
WHOLE = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "num_shared_experts",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
    "expert_weights_scale": "routed_scaling_factor",
}


# ---- what single architectures need ----


def _llama(metadata: Metadata) -> str:
    """llama.cpp calls all of these by one name: they differ in their tensors."""
    if metadata.whole("expert_count", 0):
        return "mixtral"
    return "qwen2" if _has_bias(metadata) and not metadata.has("attn_output.bias") else "llama"


def _has_bias(metadata: Metadata) -> bool:
    return metadata.has("attn_q.bias") or metadata.has("attn_qkv.bias")


def _biases(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": _has_bias(metadata), "mlp_bias": metadata.has("ffn_up.bias")}


def _granite(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    return {**_biases(metadata, hf), "logits_scaling": hf.get("logit_scale") or 1.0}


def _granite_swa(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    """Some layers may have no rotary embeddings; the others have one theta."""
    rotated = metadata.values.get(metadata.key("attention.rope_pattern"), np.ones(metadata.layers, bool))
    if not isinstance(rotated, np.ndarray) or len(rotated) < metadata.layers:
        raise metadata.wrong(
            "attention.rope_pattern", f"must be true or false for each of the {metadata.layers} layers"
        )
    theta = metadata.number("rope.freq_base") or DEFAULT_THETA
    thetas = [theta if one else 0 for one in rotated.tolist()[: metadata.layers]]
    experts = _all_experts(metadata, hf) if "num_experts" in hf else {}
    return {**_granite(metadata, hf), **experts, "layer_rope_theta": thetas}


def _mistral3(metadata: Metadata) -> str:
    """Queries grow with their position in Ministral 3, and not in what else llama.cpp calls so."""
    return "ministral3" if metadata.number("attention.temperature_scale") else _llama(metadata)


def _step35(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    """Step 3.5's own models have gates and experts, which no Qwen 3 has; without them it is one with windows."""
    heads, rotated = hf["head_dim"], metadata.whole("rope.dimension_count", hf["head_dim"])
    swa = metadata.whole("rope.dimension_count_swa", rotated), metadata.number("rope.freq_base_swa") or DEFAULT_THETA
    if (rotated // 2, *swa) != (heads, heads, metadata.number("rope.freq_base") or DEFAULT_THETA):
        raise metadata.wrong("rope.dimension_count", "asks for layers that rotate in different ways")
    return {**_biases(metadata, hf), "use_sliding_window": True}


def _gemma(layers_of_27b: int) -> Callable[[Metadata, dict[str, Any]], dict[str, Any]]:
    """The scale of the attention logits is that of the head's channels, except in the 27B models."""

    def more(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
        scalar: float = hf["head_dim"]
        if metadata.layers == layers_of_27b:
            scalar = hf["hidden_size"] // hf["num_attention_heads"]
        if (scale := hf.pop("attention_multiplier", None)) is not None and scale > 0:
            scalar = float(f"{scale**-2:.6g}")  # as exact as 32 bits are
        return {
            "query_pre_attn_scalar": scalar,
            "attn_logit_softcapping": hf.get("attn_logit_softcapping"),
            "final_logit_softcapping": hf.get("final_logit_softcapping"),
        }

    return more


def _gemma4(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    """Full layers have heads of another shape, whose keys may be their values too."""
    full = [i for i, kind in enumerate(hf["layer_types"]) if kind == FULL]
    heads, widths = metadata.each("attention.head_count_kv"), metadata.each("feed_forward_length")
    shared = metadata.whole("attention.shared_kv_layers", 0)
    table = metadata.tensors.get("per_layer_token_embd.weight")
    return {
        "head_dim": metadata.whole("attention.key_length_swa", hf["head_dim"]),
        "num_key_value_heads": next((heads[i] for i in range(metadata.layers) if i not in full), heads[0]),
        "per_layer_config": {str(i): {"head_dim": hf["head_dim"], "num_key_value_heads": heads[i]} for i in full},
        "attention_k_eq_v": not all(metadata.has("attn_v.weight", i) for i in full if i < metadata.layers - shared),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": widths[0] != widths[-1],
        "hidden_size_per_layer_input": metadata.whole("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": 0 if table is None else table.shape[0],
        "enable_moe_block": "num_experts" in hf,
        "top_k_experts": hf.get("num_experts_per_tok"),
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
    }


def _qwen3_moe(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp always makes the weights of a token's experts sum to 1."""
    return {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": _dense(metadata)}


def _some_sparse(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    dense = _dense(metadata)
    types = ["dense" if layer in dense else "sparse" for layer in range(metadata.layers)]
    return {"norm_topk_prob": True, "mlp_layer_types": types}


def _sigmoid_routing(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    if metadata.whole("expert_gating_func", SIGMOID) not in (0, SIGMOID):
        what = f"is not that of sigmoids ({SIGMOID}), by which {hf['model_type']} routes"
        raise metadata.wrong("expert_gating_func", what)
    factor = hf.get("routed_scaling_factor") or 1.0
    return {**_some_sparse(metadata, hf), "routed_scaling_factor": factor}


def _afmoe(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    keys = _sigmoid_routing(metadata, hf)
    return {**keys, "route_scale": keys["routed_scaling_factor"], "mup_enabled": True}


def _cohere2_moe(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    scores = "softmax" if metadata.whole("expert_gating_func", SIGMOID) == SOFTMAX else "sigmoid"
    return {
        **_some_sparse(metadata, hf),
        **_all_experts(metadata, hf),
        "norm_topk_prob": metadata.values.get(metadata.key("expert_weights_norm"), False),
        "prefix_dense_intermediate_size": hf.get("intermediate_size"),
        "expert_selection_fn": scores,
    }


def _dense(metadata: Metadata) -> list[int]:
    """The layers without experts."""
    return [layer for layer in range(metadata.layers) if not metadata.has("ffn_gate_inp.weight", layer)]


def _all_experts(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    """Families whose layers all have experts, the width of which `config.json` calls by the name of dense ones."""
    return {"intermediate_size": hf.pop("moe_intermediate_size", None) or hf.get("intermediate_size")}


def _mixtral_or_llama(metadata: Metadata, hf: dict[str, Any]) -> dict[str, Any]:
    return _all_experts(metadata, hf) if hf["model_type"] == "mixtral" else _biases(metadata, hf)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, permuted=True, more=_mixtral_or_llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", more=_biases),
    "qwen3moe": Architecture("qwen3_moe", more=_qwen3_moe),
    "olmo2": Architecture(lambda it: "olmo3" if it.whole("attention.sliding_window", 0) else "olmo2", period=4),
    "smollm3": Architecture("smollm3", permuted=True, more=_biases),
    "gemma2": Architecture("gemma2", period=2, more=_gemma(46)),
    "gemma3": Architecture("gemma3_text", period=6, more=_gemma(62)),
    "gemma4": Architecture(
        "gemma4_text", period=6, by_layer=("attention.head_count_kv", "feed_forward_length"), more=_gemma4
    ),
    "granite": Architecture("granite", permuted=True, more=_granite),
    "granite_swa": Architecture(
        lambda it: "granitemoe_swa" if it.whole("expert_count", 0) else "granite_swa",
        period=4,
        full_first=True,
        permuted=True,
        more=_granite_swa,
    ),
    "mistral3": Architecture(_mistral3, permuted=True, more=_mixtral_or_llama),
    "seed_oss": Architecture(
        "seed_oss", more=lambda it, hf: {**_biases(it, hf), "attention_out_bias": it.has("attn_output.bias")}
    ),
    "step35": Architecture("qwen3", period=4, more=_step35),
    "starcoder2": Architecture(
        "starcoder2", more=lambda it, hf: {"use_bias": _has_bias(it), "norm_epsilon": hf.get("layer_norm_eps")}
    ),
    "phi3": Architecture("phi3"),
    "command-r": Architecture("cohere", more=_biases),
    "cohere2": Architecture("cohere2", period=4, more=_biases),
    "exaone4": Architecture("exaone4", period=4),
    "gpt-oss": Architecture(
        "gpt_oss", period=2, more=lambda it, hf: {**_all_experts(it, hf), "attention_bias": _has_bias(it)}
    ),
    "mellum": Architecture("mellum", period=4, more=_some_sparse),
    "afmoe": Architecture("afmoe", period=4, more=_afmoe),
    "exaone-moe": Architecture("exaone_moe", period=4, more=_sigmoid_routing),
    "cohere2moe": Architecture("cohere2_moe", period=4, full_first=True, more=_cohere2_moe),
}


# ---- all architectures ----


def hf_config(metadata: Metadata, embedding: GgufTensor) -> dict[str, Any]:
    """The `config.json` of the model, less its rotary embeddings (`rope.rope_keys`).

    Raises:
      ConfigError: an architecture that is not supported.
      CheckpointError: metadata that no model has; the sentence names the key.
    """
    known = ARCHITECTURES[metadata.architecture]
    model_type = known.model_type if isinstance(known.model_type, str) else known.model_type(metadata)
    hf: dict[str, Any] = {"model_type": model_type, "num_hidden_layers": metadata.layers}
    for name, ours in WHOLE.items():
        value = metadata.each(name)[0] if name in known.by_layer else metadata.whole(name)
        hf |= {} if value is None else {ours: value}
    hf |= {ours: value for name, ours in NUMBERS.items() if (value := metadata.number(name)) is not None}
    heads = hf["num_attention_heads"]
    hf.setdefault("num_key_value_heads", heads)
    if "head_dim" not in hf:
        if heads < 1 or hf["hidden_size"] % heads:
            raise metadata.wrong(
                "embedding_length",
                f"({hf['hidden_size']}) is no multiple of {metadata.key('attention.head_count')} ({heads}), and there "
                f"is no {metadata.key('attention.key_length')}",
            )
        hf["head_dim"] = hf["hidden_size"] // heads
    if metadata.whole("attention.value_length", hf["head_dim"]) != hf["head_dim"]:
        raise CheckpointError(f"{metadata.file}: keys and values have heads of different sizes, which is not supported")
    if metadata.values.get(metadata.key("attention.causal")) is False:
        hf["is_causal"] = False
    if experts := metadata.whole("expert_count", 0):
        hf |= {"num_experts": experts, "num_local_experts": experts}
    hf |= {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        **_windows(metadata, known),
    }
    more = known.more(metadata, hf)  # it may take keys out
    return {**hf, **more}


def _windows(metadata: Metadata, known: Architecture) -> dict[str, Any]:
    window = metadata.whole("attention.sliding_window", 0) or None
    if known.period is None:
        return {"sliding_window": window if metadata.architecture == "phi3" else None}
    if window is None:
        return {"sliding_window": None, "layer_types": [FULL] * metadata.layers}
    pattern = metadata.values.get(metadata.key("attention.sliding_window_pattern"), known.period)
    if isinstance(pattern, np.ndarray) and pattern.dtype == bool and len(pattern) >= metadata.layers:
        windowed = pattern.tolist()[: metadata.layers]
    elif type(pattern) is int and pattern >= 0:
        counted = range(metadata.layers) if known.full_first else range(1, metadata.layers + 1)
        windowed = [pattern == 0 or i % pattern != 0 for i in counted]
    else:
        what = f"must be true or false for each of the {metadata.layers} layers, or a period, got {str(pattern)[:100]}"
        raise metadata.wrong("attention.sliding_window_pattern", what)
    return {"sliding_window": window, "layer_types": [WINDOW if one else FULL for one in windowed]}
