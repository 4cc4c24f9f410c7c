"""Windows in `config.json`: which layers have one, as the families read it and write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.grammar import HfConfig, HfKeys, whole
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

# A window, and the type of each layer; what reads them, and what reads the types alone, of so many layers.
Windows = tuple[int | None, Sequence[str]]
WindowReader = Callable[[HfConfig, int], Windows]
TypeReader = Callable[[HfConfig, int], list[str]]
# By which some reader finds windows. A family writes its own; one that another left would be believed by somebody.
WINDOW_KEYS = (
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "sliding_window_size", "is_hybrid_swa", "hybrid_layer_pattern",
)  # fmt: skip


# ---- reading ----


def no_windows(hf: HfConfig, layers: int) -> Windows:
    """A family whose layers are all full: Hugging Face's class reads no key for windows, `layer_types` included."""
    return None, [FULL] * layers


def layer_types(hf: HfConfig, by_default: list[str]) -> list[str]:
    """The key `layer_types`, or else what the family assumes.

    Raises:
      ConfigError: no list, or another number of layer types than of layers.
    """
    types = by_default if hf.get("layer_types") is None else hf["layer_types"]
    if not isinstance(types, list):
        raise ConfigError(f"config.json: layer_types must be a list with one type a layer, got {types!r}")
    if len(types) != len(by_default):
        raise ConfigError(f"config.json: layer_types has {len(types)} entries for {len(by_default)} layers")
    return types


def one_full_in(interval: int, key: str | None = None, *, first: bool = False) -> TypeReader:
    """Reads `layer_types`. Without it the last layer of every `interval` layers is full, or the first.

    `key` is that of `config.json` which may say another interval.
    """

    def read(hf: HfConfig, layers: int) -> list[str]:
        length = interval
        if key is not None and hf.get("layer_types") is None:
            length = whole(hf, key, interval, least=1)
        counted = range(layers) if first else range(1, layers + 1)
        return layer_types(hf, [WINDOW if i % length else FULL for i in counted])

    return read


def windows_alike(default: int | None = None, *, by_type: bool = False) -> WindowReader:
    """Reads the key `sliding_window` (where it is absent: `default`) as the window of every layer; null means none.

    `by_type`: `layer_types` may say that some are full.
    """

    def read(hf: HfConfig, layers: int) -> Windows:
        window = hf.get("sliding_window", default)
        types = [FULL if window is None else WINDOW] * layers
        return window, layer_types(hf, types) if by_type else types

    return read


def windows_of(types: TypeReader, default: int | None, context: int | None = None) -> WindowReader:
    """Reads the key `sliding_window` (where it is absent: `default`) as the window of layers of that type.

    Args:
      context: `max_position_embeddings` where that is absent, in families where a window that reaches over the whole
        context stands for full attention (`window_keys_by_type`); None: there it is a window like any other.
    """

    def read(hf: HfConfig, layers: int) -> Windows:
        window, found = hf.get("sliding_window", default), types(hf, layers)
        if context is None:
            return window, found
        return within_context(window, found, hf.get("max_position_embeddings") or context)

    return read


def within_context(window: int | None, types: Sequence[str], max_positions: int) -> Windows:
    """A window that reaches over the whole context stands for full attention (see `window_keys_by_type`)."""
    if window is None or (isinstance(window, int) and window >= max_positions):
        return None, [FULL] * len(types)
    return window, types


# ---- writing ----


def no_window_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    """A family that has no keys for windows: full attention is all that it can say."""
    return {}


def window_alike_keys(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    """A family with a window in every layer or in none."""
    return {"sliding_window": pattern.sliding_window}


def window_always(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    """The keys of a pattern for Hugging Face's classes that want a window even where no layer has it: without one they
    fail at the first token. It then reaches over the whole context."""
    window = pattern.sliding_window or config.max_position_embeddings
    return {"sliding_window": window, "layer_types": list(pattern.layer_types)}


def window_keys_by_type(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    """The keys of a pattern in families whose RoPE goes by layer type. For full attention the window reaches over the
    whole context, so that every layer keeps its type, and with it its RoPE."""
    keys = window_always(config, pattern)
    if config.rope_layers:
        keys["layer_types"] = [WINDOW if kind == "local" else FULL for kind in config.rope_layers]
    return keys


def window_keys_with_nope(config: ModelConfig, pattern: AttentionPattern) -> HfKeys:
    """The keys of a pattern in families that rotate windowed layers only; what is full and rotated has a window that
    reaches over the whole context."""
    types = [FULL if kind == "none" else WINDOW for kind in config.rope_kinds_by_layer]
    return window_always(config, pattern) | {"layer_types": types}
