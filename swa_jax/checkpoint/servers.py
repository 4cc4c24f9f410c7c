"""Which class of an inference server runs a model with windows, and what `config.json` must say for it.

A server does not ask transformers what a `config.json` means: it has classes of its own, and a key that a class does
not read is ignored without a word. So the table below says of each class how it finds out which layers are windowed.
It was read from the servers' sources, in the versions named; where a class is not in it, full attention is all that
is known of it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.checkpoint.families import expressed, fully, inexpressible, model_config, same_model
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.vllm_plugin import architecture_of, with_pattern
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern


class Reads(enum.Enum):
    """How a class finds out which layers have a window."""

    LAYER_TYPES = "by layer_types"
    MIXED = "by layer_types, where some are full"
    BOTH = "by layer_types, where some are full and some have it"
    EVEN = "layers 0, 2, 4 and so on have it"
    ALIKE = "all layers, or none"
    NEVER = "no layer has one"
    PATTERN = "by the pattern itself, with sink tokens, full-attention decode and single full KV heads"


def _any(config: ModelConfig) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class ServerClass:
    """A class of a server that runs one `model_type`.

    Attributes:
      surplus: how many keys more than `sliding_window` says a windowed query sees.
      alone: it reads `layer_types` where transformers' class of that name has no such windows.
      keys: what `config.json` must say besides.
      spelled: it has defaults of its own, or reads RoPE as transformers 4 wrote it, so that every key is written.
      only: which models of that type it runs right.
      full_flags: of the command that serves it where no layer has a window.
      frees: whether the caches of windowed layers keep the window only, where other layers are full.
      pooled: it frees where `is_hybrid_swa` and `hybrid_layer_pattern` (1 for a window, 0 for none) say so.
    """

    name: str
    reads: Reads = Reads.NEVER
    surplus: int = 0
    alone: bool = False
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spelled: bool = False
    only: Callable[[ModelConfig], bool] = _any
    full_flags: str = ""
    frees: bool = True
    pooled: bool = False


@dataclasses.dataclass(frozen=True)
class Server:
    """An inference server: the version whose source was read, how it is started, and its classes by `model_type`."""

    version: str
    command: str  # what stands before and behind the folder's name
    classes: Mapping[str, tuple[ServerClass, ...]]
    environment: str = ""


@dataclasses.dataclass(frozen=True)
class Served:
    """What an export for a server says.

    Attributes:
      hf: the `config.json`.
      model_type: the family as which the tensors are written.
      pattern: what the server computes.
      runs: the class that does.
      command: starts the server; "{folder}" stands for the export. "" for transformers, which is a library.
    """

    hf: dict[str, Any]
    model_type: str
    pattern: AttentionPattern
    runs: ServerClass
    command: str

    def describe(self, server: str) -> str:
        """What the server will run, in a few sentences."""
        windowed = self.pattern.num_layers - len(self.pattern.full_layers)
        of = f"{windowed} of {self.pattern.num_layers} layers" if windowed else "no layer"
        lines = [f"{_called(server)} runs it as {self.runs.name}, with a window in {of}."]
        if windowed and self.runs.surplus:
            lines.append(
                f"This class sees {self.runs.surplus} key more than sliding_window says, so "
                f"{self.hf['sliding_window']} is written for a window of {self.pattern.sliding_window}."
            )
        if self.runs.reads is Reads.PATTERN:
            lines.append("It needs the plug-in swa-jax-vllm beside vLLM: pip install ./plugins/vllm")
            if windowed and self.pattern.full_attention_decode:
                lines.append("With full-attention decode all layers keep the whole sequence.")
        if windowed and not self.runs.frees:
            lines.append("It computes the windows, but keeps the caches of windowed layers whole.")
        return "\n".join(lines)


def _native(name: str, reads: Reads = Reads.LAYER_TYPES, **options: Any) -> tuple[ServerClass, ...]:
    return (ServerClass(name, reads, **options),)


# Qwen 2 is Llama with biases for q, k and v alone, and vLLM's Llama reads both `qkv_bias` and `layer_types`. A model
# that came as a Seed-OSS says `attention_bias`, which is that of all four there.
_QWEN2_AS_LLAMA = _native(
    "LlamaForCausalLM", keys={"architectures": ["LlamaForCausalLM"], "qkv_bias": True, "attention_bias": False}
)
_VLLM = {
    "llama": _native("LlamaForCausalLM", alone=True),
    "mistral": _native("MistralForCausalLM", alone=True),
    "phi3": _native("Phi3ForCausalLM", alone=True),
    "qwen2": _native("Qwen2ForCausalLM", Reads.ALIKE) + _QWEN2_AS_LLAMA,
    "qwen3": _native("Qwen3ForCausalLM", Reads.ALIKE),
    "gemma2": _native("Gemma2ForCausalLM"),
    "gemma3_text": _native("Gemma3ForCausalLM"),
    "cohere": _native("CohereForCausalLM", Reads.NEVER),
    "cohere2": _native("CohereForCausalLM", surplus=1),
    "exaone4": _native("Exaone4ForCausalLM"),
    # With `layer_types` this class expects learned sink logits unless it is told that there are none.
    "granite": _native("GraniteForCausalLM", alone=True, keys={"attention_sinks": False}),
    "granite_swa": _native("GraniteForCausalLM"),
    "apertus": _native("ApertusForCausalLM", alone=True),
    "gpt_oss": _native("GptOssForCausalLM", Reads.EVEN),
    # Whether these have a window in every layer where `sliding_window` says so was not found out.
    "qwen3_moe": _native("Qwen3MoeForCausalLM", Reads.NEVER),
    "mixtral": _native("MixtralForCausalLM", Reads.NEVER),
}
_VLLM_BY_TRANSFORMERS = {
    "olmo2": _native("TransformersForCausalLM", Reads.NEVER),
    "olmo3": _native("TransformersForCausalLM"),
    "smollm3": _native("TransformersForCausalLM"),
    "ministral": _native("TransformersForCausalLM"),
    "cwm": _native("TransformersForCausalLM"),
    "seed_oss": _native("TransformersForCausalLM"),
    "starcoder2": _native("TransformersForCausalLM", Reads.ALIKE),
    "vaultgemma": _native("TransformersForCausalLM"),
    "mellum": _native("TransformersMoEForCausalLM"),
}
_VLLM_PLUGIN = {
    model_type: _native(architecture_of(model_type), Reads.PATTERN)
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
}


def _unbiased(config: ModelConfig) -> bool:
    return not (config.attention_bias or config.attention_out_bias or config.mlp_bias)


def _untied(config: ModelConfig) -> bool:
    return not config.tie_word_embeddings


def _rotated_as_olmo3(config: ModelConfig) -> bool:
    """One theta for all layers, and its scaling in full layers alone."""
    if config.rope_layers:
        return config.local_rope_theta == config.rope_theta
    return config.rope_scaling is None


# SGLang counts the keys before the query's own. Most of its classes take one off; Cohere's, and the one that runs
# models of transformers, take `sliding_window` as it is. The latter runs by its own name, without a flag that may be
# forgotten; it leaves VaultGemma's softcap out. Qwen3-MoE's class, which Mellum's follows, and gpt-oss's always have an
# output matrix of their own. A model that SGLang knows by its name as one with windows does not start without one,
# unless it is told so. Gemma's and OLMo's caches it keeps whole by their names, whatever `config.json` says.
_BY_TRANSFORMERS = ServerClass(
    "TransformersForCausalLM",
    Reads.LAYER_TYPES,
    surplus=1,
    keys={"architectures": ["TransformersForCausalLM"]},
    pooled=True,
)
_POOL_KEYS = ("is_hybrid_swa", "hybrid_layer_pattern")
_NO_POOL = "--disable-hybrid-swa-memory"
_SGLANG = {
    "llama": _native("LlamaForCausalLM", Reads.NEVER),
    "mistral": _native("MistralForCausalLM", Reads.NEVER),
    "qwen2": (*_native("Qwen2ForCausalLM", Reads.NEVER), _BY_TRANSFORMERS),
    # With a matrix of its own it runs as Mellum, in a class of SGLang's own.
    "qwen3": (
        *_native("Qwen3ForCausalLM", Reads.NEVER),
        dataclasses.replace(_BY_TRANSFORMERS, only=lambda config: config.tie_word_embeddings),
    ),
    "qwen3_moe": _native("Qwen3MoeForCausalLM", Reads.NEVER, only=_untied),
    "mellum": _native("MellumForCausalLM", only=_untied, full_flags=_NO_POOL),
    "gemma2": _native("Gemma2ForCausalLM", Reads.EVEN, frees=False),
    "gemma3_text": _native("Gemma3ForCausalLM", frees=False),
    "granite": _native("GraniteForCausalLM", Reads.NEVER, only=_unbiased),
    "granite_swa": _native("GraniteSWAForCausalLM", only=_unbiased, full_flags=_NO_POOL),
    "phi3": _native("Phi3ForCausalLM", Reads.NEVER),
    "cohere": _native("CohereForCausalLM", Reads.NEVER),
    "cohere2": _native("Cohere2ForCausalLM", surplus=1, pooled=True),
    "olmo2": _native("Olmo2ForCausalLM", Reads.NEVER),
    "olmo3": _native("Olmo2ForCausalLM", only=_rotated_as_olmo3, spelled=True, frees=False),
    "starcoder2": _native("Starcoder2ForCausalLM", Reads.NEVER),
    "apertus": _native("ApertusForCausalLM", Reads.NEVER),
    "gpt_oss": _native("GptOssForCausalLM", only=_untied, full_flags=_NO_POOL),
}
# EXAONE 4's own class reads another form of `sliding_window_pattern`, by which it rotates, too.
_SGLANG |= dict.fromkeys(("exaone4", "smollm3", "ministral", "cwm", "seed_oss"), (_BY_TRANSFORMERS,))


def _as_in_mlx(config: ModelConfig) -> bool:
    """SwiGLU, and a RoPE of all channels that MLX-LM has as Hugging Face has it; others, such as LongRoPE, differ."""
    scaling = config.rope_scaling
    if config.partial_rotary_factor != 1 or config.hidden_act != "silu":
        return False
    if scaling is None:
        return True
    own = scaling.attention_factor, scaling.mscale, scaling.mscale_all_dim
    return scaling.rope_type in ("llama3", "yarn") and scaling.truncate and not any(own)


def _mlx(
    name: str, reads: Reads, only: Callable[[ModelConfig], bool] = _any, **options: Any
) -> tuple[ServerClass, ...]:
    return _native(name, reads, spelled=True, only=lambda config: _as_in_mlx(config) and only(config), **options)


# MLX-LM's other classes read another key for windows, or none. SmolLM3's sees them in prompts and not in answers, and
# Mellum's has experts in every layer.
_MLX = {
    "llama": _mlx("llama.Model", Reads.MIXED, alone=True),
    "mistral": _mlx("llama.Model", Reads.MIXED, alone=True),
    "mellum": _mlx(
        "mellum.Model", Reads.MIXED, lambda config: {*config.mlp_kinds} == {"sparse"} and not config.attention_bias
    ),
    "olmo2": _mlx("olmo2.Model", Reads.NEVER),
    "olmo3": _mlx("olmo3.Model", Reads.BOTH, _rotated_as_olmo3),
    "qwen2": _mlx(
        "qwen2.Model", Reads.NEVER, lambda config: config.head_dim * config.num_attention_heads == config.hidden_size
    ),
    "qwen3": _mlx("qwen3.Model", Reads.NEVER),
    "smollm3": _mlx("smollm3.Model", Reads.NEVER),
}
SERVERS: dict[str, Server] = {
    "vllm": Server("0.33.0", "vllm serve {folder}", _VLLM | _VLLM_BY_TRANSFORMERS),
    "vllm-plugin": Server("0.32.0", "vllm serve {folder}", _VLLM_PLUGIN),
    "tpu-inference": Server(
        # Its own classes in JAX know no window; those of vLLM do, and run where the variable says so.
        "0.32.0",
        "vllm serve {folder}",
        _VLLM,
        environment="MODEL_IMPL_TYPE=vllm",
    ),
    "sglang": Server("0.5.23", "python -m sglang.launch_server --model-path {folder}", _SGLANG),
    "mlx-lm": Server("0.32.2", "mlx_lm.server --model {folder}", _MLX),
}
TARGETS = ("transformers", *SERVERS)


def check_target(server: str | None) -> None:
    """Raise `ConfigError` for a name that is none of TARGETS."""
    if server is not None and server not in TARGETS:
        raise ConfigError(f"--for is '{server}'{nearest(server, TARGETS, listed=False)}; known: {', '.join(TARGETS)}")


def served_config(server: str, hf: HfConfig, pattern: AttentionPattern, *, as_full: bool = False) -> Served:
    """What to write so that a server runs this model with this pattern.

    Args:
      server: one of TARGETS.
      hf: the model's `config.json`.
      as_full: write full attention in every layer where the server cannot do what the pattern says.

    Raises:
      ConfigError: the server is not known, or cannot run the pattern; the sentence names what can.
    """
    check_target(server)
    if (found := find_served(server, hf, pattern)) is not None:
        return found
    full = AttentionPattern((FULL,) * pattern.num_layers)
    if as_full:
        if (found := find_served(server, fully(hf), full)) is not None:
            return found
        raise ConfigError(f"{_called(server)} has no class for model_type '{hf['model_type']}'")
    others = [other for other in TARGETS if other != server and find_served(other, hf, pattern) is not None]
    routes = [f"--for {' or '.join(others)} runs it"] if others else []
    if find_served(server, fully(hf), full) is not None:
        routes.append("--as-full exports it with full attention in every layer")
    reason = unserved(server, pattern) or f"it has no class that runs {hf['model_type']} with these windows"
    raise ConfigError("; ".join([f"{_called(server)} cannot run this pattern: {reason}", *routes]))


def _called(server: str) -> str:
    return server if server == "transformers" else f"{server} {SERVERS[server].version}"


def find_served(server: str, hf: HfConfig, pattern: AttentionPattern) -> Served | None:
    """The same as `served_config`, but None where the server cannot run the pattern, without looking for what can."""
    if unserved(server, pattern) is not None:
        return None
    config = model_config(hf)
    full = AttentionPattern((FULL,) * pattern.num_layers)
    for family, described in same_model(hf, config):
        if server == "transformers":
            if (out := expressed(family, described, pattern, config)) is not None:
                runs = ServerClass(family.architecture, Reads.LAYER_TYPES)
                return Served(out, family.model_type, pattern, runs, "")
            continue
        classes = SERVERS[server].classes.get(family.model_type, ())
        able = [runs for runs in classes if _has(runs, pattern) and runs.only(config)]
        if not able or expressed(family, described, full, config) is None:
            continue  # another model
        for runs in able:
            if (out := _written_for(runs, family, described, config, pattern)) is not None:
                flags = "" if WINDOW in pattern.layer_types else runs.full_flags
                command = f"{SERVERS[server].environment} {SERVERS[server].command} {flags}".strip()
                return Served(out, family.model_type, pattern, runs, command)
    return None


def unserved(server: str, pattern: AttentionPattern) -> str | None:
    """What no class of a server knows of a pattern."""
    if server == "vllm-plugin":
        types = tuple(WINDOW if kind == HYBRID else kind for kind in pattern.layer_types)
        return inexpressible(AttentionPattern(types, pattern.sliding_window))
    return inexpressible(pattern)


def runs_single_heads(server: str | None) -> bool:
    """Whether layers may keep single KV heads full; None: here, where they may."""
    return server is None or unserved(server, AttentionPattern((HYBRID,), 1, full_kv_heads=((0,),))) is None


def _has(runs: ServerClass, pattern: AttentionPattern) -> bool:
    """Whether a class can have the windows of a pattern."""
    windowed = [kind != FULL for kind in pattern.layer_types]
    if not any(windowed):
        return runs.reads is not Reads.BOTH
    possible = {
        Reads.LAYER_TYPES: True,
        Reads.MIXED: not all(windowed),
        Reads.BOTH: not all(windowed),
        Reads.EVEN: windowed == [layer % 2 == 0 for layer in range(pattern.num_layers)],
        Reads.ALIKE: all(windowed),
        Reads.NEVER: False,
        Reads.PATTERN: True,
    }[runs.reads]
    return possible and (pattern.sliding_window or 0) > runs.surplus


def _written_for(
    runs: ServerClass, family: Family, hf: HfConfig, config: ModelConfig, pattern: AttentionPattern
) -> HfKeys | None:
    """`hf` with the keys by which a class has the windows of a pattern; None if the family cannot say them."""
    if runs.reads is Reads.PATTERN:
        return with_pattern(fully(hf), pattern)
    out = expressed(family, hf, pattern, config)
    if out is None and runs.alone:
        out = {**fully(hf), "layer_types": list(pattern.layer_types), "sliding_window": pattern.sliding_window}
    if out is None:
        return None
    out = {key: value for key, value in out.items() if key not in _POOL_KEYS}  # another export may have left them
    if WINDOW in pattern.layer_types:
        out["sliding_window"] -= runs.surplus
        if runs.pooled:
            windowed = [int(kind == WINDOW) for kind in pattern.layer_types]
            out |= dict(zip(_POOL_KEYS, (True, windowed), strict=True))
    elif runs.reads is Reads.EVEN:  # a window that is longer than any text
        out["sliding_window"] = hf["max_position_embeddings"]
    if runs.spelled:
        out |= family.to_hf(dataclasses.replace(config, model_type=family.model_type))
    return {**out, "architectures": [family.architecture], **runs.keys}
