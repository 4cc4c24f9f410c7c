"""Which class of an inference server runs a model with windows, and what `config.json` must say for it.

A server does not ask transformers what a `config.json` means: it has classes of its own, and a key that a class does
not read is ignored without a word. So a server's file says of each class how it finds out which layers are windowed.
It was read from the server's source, in the version named.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import TYPE_CHECKING, Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.checkpoint.families import expressed, fully, inexpressible, model_config, same_model
from swa_jax.checkpoint.families.common import Family, HfConfig, HfKeys
from swa_jax.checkpoint.families.vllm_plugin import with_pattern
from swa_jax.checkpoint.servers.common import Reads, Server, ServerClass
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

if TYPE_CHECKING:
    from swa_jax.checkpoint.gguf.graphs import Described


@dataclasses.dataclass(frozen=True)
class Served:
    """What an export for a server says.

    Attributes:
      hf: the `config.json`.
      model_type: the family as which the tensors are written.
      pattern: what the server computes.
      runs: the class that does.
      command: starts the server; "{folder}" stands for the export. "" for transformers, which is a library.
      file: how the server's own file has the model, where the export is one.
    """

    hf: dict[str, Any]
    model_type: str
    pattern: AttentionPattern
    runs: ServerClass
    command: str
    file: Described | None = None

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
        if self.file is not None:
            lines += self.file.notes()
        if windowed and not self.runs.frees:
            lines.append("It computes the windows, but keeps the caches of windowed layers whole.")
        return "\n".join(lines)


# A server is one file with a `SERVER`; its name here makes it known.
_FILES = "vllm vllm_plugin tpu_inference sglang sglang_jax mlx_lm llama_cpp"
SERVERS: dict[str, Server] = {
    "llama.cpp" if name == "llama_cpp" else name.replace("_", "-"): import_module(f"{__name__}.{name}").SERVER
    for name in _FILES.split()
}
TARGETS = ("transformers", *SERVERS)
_POOL_KEYS = ("is_hybrid_swa", "hybrid_layer_pattern")  # of SGLang


def list_targets() -> str:
    """The servers, with the version of each that was read and the day it came out, as a table for a terminal."""
    rows = [("--for", "version", "released"), ("transformers", "", "")]
    rows += [(name, server.version, server.released) for name, server in SERVERS.items()]
    return "\n".join(f"{name:14}{version:19}{day}".rstrip() for name, version, day in rows)


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
    full = find_served(server, fully(hf), pattern.opened)
    if as_full and full is not None:
        return full
    known = {} if server == "transformers" or full is not None else SERVERS[server].no_class
    if as_full:
        why = known.get(hf["model_type"], "no class of it is known to do so")
        raise ConfigError(f"{_called(server)} does not run model_type '{hf['model_type']}': {why}")
    others = [other for other in TARGETS if other != server and find_served(other, hf, pattern) is not None]
    routes = [f"--for {' or '.join(others)} runs it"] if others else []
    if full is not None:
        routes.append("--as-full exports it with full attention in every layer")
    generic = f"it has no class that runs {hf['model_type']} with these windows"
    reason = unserved(server, pattern) or known.get(hf["model_type"], generic)
    raise ConfigError("; ".join([f"{_called(server)} cannot run this pattern: {reason}", *routes]))


def _called(server: str) -> str:
    return server if server == "transformers" else f"{server} {SERVERS[server].version}"


def find_served(server: str, hf: HfConfig, pattern: AttentionPattern) -> Served | None:
    """The same as `served_config`, but None where the server cannot run the pattern, without looking for what can."""
    if unserved(server, pattern) is not None:
        return None
    config = model_config(hf)
    if server in SERVERS and (describes := SERVERS[server].describes) is not None:
        if (found := describes(config, pattern)) is None:
            return None
        runs = ServerClass(found.architecture)
        return Served(found.hf, config.model_type, pattern, runs, SERVERS[server].command, found)
    full = pattern.opened
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
    return (SERVERS[server].lacks if server in SERVERS else inexpressible)(pattern)


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
