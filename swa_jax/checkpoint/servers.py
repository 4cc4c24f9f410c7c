"""Which class of an inference server runs a model with windows, and what `config.json` must say for it.

A server does not ask transformers what a `config.json` means: it has classes of its own, and a key that a class does
not read is ignored without a word. So the table below says of each class how it finds out which layers are windowed.
It was read from the servers' sources, in the versions named; where a class is not in it, full attention is all that
is known of it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.checkpoint.families import expressed, fully, inexpressible, model_config, same_model
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.vllm_plugin import architecture_of, with_pattern
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern


class Reads(enum.Enum):
    """How a class finds out which layers have a window."""

    LAYER_TYPES = "by layer_types"
    EVEN = "layers 0, 2, 4 and so on have it"
    ALIKE = "all layers, or none"
    NEVER = "no layer has one"
    PATTERN = "by the pattern itself, with sink tokens, full-attention decode and single full KV heads"


@dataclasses.dataclass(frozen=True)
class ServerClass:
    """A class of a server that runs one `model_type`.

    Attributes:
      surplus: how many keys more than `sliding_window` says a windowed query sees.
      alone: it reads `layer_types` where transformers' class of that name has no such windows.
      keys: what `config.json` must say besides.
      flags: of the command that serves it.
      frees: whether the caches of windowed layers keep the window only, where other layers are full.
    """

    name: str
    reads: Reads = Reads.NEVER
    surplus: int = 0
    alone: bool = False
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: str = ""
    frees: bool = True


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
# SGLang counts the keys before the query's own. Most of its classes take one off. Cohere's, and the one that runs
# models of transformers, take `sliding_window` as it is, and leave it to FlashAttention to mind it. Only gpt-oss frees
# what windowed layers no longer need.
_FA3 = "--attention-backend fa3"
_SGLANG_BY_TRANSFORMERS = _native(
    "TransformersForCausalLM", surplus=1, flags=f"--model-impl transformers {_FA3}", frees=False
)
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
    "sglang": Server(
        "0.5.10",
        "python -m sglang.launch_server --model-path {folder}",
        {
            "llama": _native("LlamaForCausalLM", Reads.NEVER),
            "mistral": _native("MistralForCausalLM", Reads.NEVER),
            "qwen2": _native("Qwen2ForCausalLM", Reads.NEVER) + _SGLANG_BY_TRANSFORMERS,
            "qwen3": _native("Qwen3ForCausalLM", Reads.NEVER) + _SGLANG_BY_TRANSFORMERS,
            "gemma2": _native("Gemma2ForCausalLM", Reads.EVEN, frees=False),
            "gemma3_text": _native("Gemma3ForCausalLM", frees=False),
            "granite": _native("GraniteForCausalLM", Reads.NEVER),
            "phi3": _native("Phi3ForCausalLM", Reads.NEVER),
            "cohere": _native("CohereForCausalLM", Reads.NEVER),
            "cohere2": _native("Cohere2ForCausalLM", surplus=1, flags=_FA3, frees=False),
            # Its own class reads another form of `sliding_window_pattern`, by which it rotates, too.
            "exaone4": _SGLANG_BY_TRANSFORMERS,
            "olmo2": _native("Olmo2ForCausalLM", Reads.NEVER),
            "starcoder2": _native("Starcoder2ForCausalLM", Reads.NEVER),
            "apertus": _native("ApertusForCausalLM", Reads.NEVER),
            "gpt_oss": _native("GptOssForCausalLM"),
        }
        | dict.fromkeys(
            ("olmo3", "smollm3", "ministral", "cwm", "seed_oss", "vaultgemma", "mellum"), _SGLANG_BY_TRANSFORMERS
        ),
    ),
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
        able = [runs for runs in SERVERS[server].classes.get(family.model_type, ()) if _has(runs, pattern)]
        if not able or expressed(family, described, full, config) is None:
            continue  # another model
        for runs in able:
            if (out := _written_for(runs, family, described, pattern)) is not None:
                command = f"{SERVERS[server].environment} {SERVERS[server].command} {runs.flags}".strip()
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
        return True
    possible = {
        Reads.LAYER_TYPES: True,
        Reads.EVEN: windowed == [layer % 2 == 0 for layer in range(pattern.num_layers)],
        Reads.ALIKE: all(windowed),
        Reads.NEVER: False,
        Reads.PATTERN: True,
    }[runs.reads]
    return possible and (pattern.sliding_window or 0) > runs.surplus


def _written_for(runs: ServerClass, family: Family, hf: HfConfig, pattern: AttentionPattern) -> HfKeys | None:
    """`hf` with the keys by which a class has the windows of a pattern; None if the family cannot say them."""
    if runs.reads is Reads.PATTERN:
        return with_pattern(fully(hf), pattern)
    out = expressed(family, hf, pattern)
    if out is None and runs.alone:
        out = {**fully(hf), "layer_types": list(pattern.layer_types), "sliding_window": pattern.sliding_window}
    if out is None:
        return None
    if WINDOW in pattern.layer_types:
        out["sliding_window"] -= runs.surplus
    elif runs.reads is Reads.EVEN:  # a window that is longer than any text
        out["sliding_window"] = hf["max_position_embeddings"]
    return {**out, **runs.keys}
