"""AttentionPattern: which layer, and inside it which KV head, attends how.

Recipes and selection methods produce it; model, generation, export and compilation consume it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import parse_json, write_text
from swa_jax.base.settings import from_dict, nearest
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import CHUNKED, FULL, HYBRID, LAYER_TYPES, LINEAR, SWITCH, WINDOW
from swa_jax.model.recipes import PUBLISHED, read_recipe
from swa_jax.model.window import Window

if TYPE_CHECKING:
    import jax

SWAA_KEYS = ("sliding_window_size", "keep_first", "force_fa_decode", "non_sliding_layers")
VERSION = 1
MOST_POSITIONS = 2**31 - 1  # they are counted in 32 bits


@dataclasses.dataclass(frozen=True)
class AttentionPattern:
    """How each of a model's L layers attends, and inside a layer each KV head.

    Attributes:
      layer_types: L names, each one of `swa_jax.model.layer_types.LAYER_TYPES`. Layers without attention are
        `linear_attention` in every pattern of their model: nothing chooses, counts or changes them.
      sliding_window: the visible keys of a windowed query, its own included, or the tokens of a chunk (Hugging Face's
        `attention_chunk_size`). None only if every layer is full.
      num_sink_tokens: how many first keys of a segment stay visible beside the window.
      full_attention_decode: whether the queries of the answer see everything (SWAA). Where the answer begins is data:
        `full_from`.
      num_last_tokens: under full-attention decode, how many last tokens of the prompt see everything as well, as in
        TriangleMix (arXiv:2507.21526).
      full_kv_heads: for each layer the KV heads (from 0) that stay full. Layers of the type `head_hybrid_attention`
        name some; all others have ().
      nope_full_layers: full layers have no rotary embeddings (NoPE), as in arXiv:2601.22156; layers of other types keep
        theirs.
      provenance: how the pattern came about: method, data, scores, seed. Equality ignores it.
    """

    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    num_sink_tokens: int = 0
    full_attention_decode: bool = False
    num_last_tokens: int = 0
    full_kv_heads: tuple[tuple[int, ...], ...] = ()
    nope_full_layers: bool = False
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.layer_types, str) or isinstance(self.full_kv_heads, Mapping):
            raise ConfigError("layer_types and full_kv_heads are lists with one entry a layer")
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        for name in ("sliding_window", "num_sink_tokens", "num_last_tokens"):
            if name != "sliding_window" or self.sliding_window is not None:
                object.__setattr__(self, name, _integer(name, getattr(self, name)))
        given = self.full_kv_heads or ((),) * len(self.layer_types)
        heads = tuple(
            tuple(sorted(_integer(f"full_kv_heads[{i}]", head) for head in h or ())) for i, h in enumerate(given)
        )
        object.__setattr__(self, "full_kv_heads", heads)
        for i, kind in enumerate(self.layer_types):
            if kind not in LAYER_TYPES:
                raise ConfigError(f"layer_types[{i}] is '{kind}'{nearest(kind, LAYER_TYPES)}")
            if kind != HYBRID and self.full_kv_heads[i : i + 1] not in ((), ((),)):
                raise ConfigError(f"full_kv_heads[{i}] is set, but layer {i} is {kind}, not {HYBRID}")
        if self.chunked and not set(self.layer_types) <= {FULL, CHUNKED, LINEAR}:
            raise ConfigError(f"layer_types has {CHUNKED}: all other layers must be {FULL}, got {self.layer_types}")
        if not self.layer_types:
            raise ConfigError("layer_types is empty: a pattern needs at least one layer")
        if len(self.full_kv_heads) != len(self.layer_types):
            raise ConfigError(
                f"full_kv_heads has {len(self.full_kv_heads)} entries for {len(self.layer_types)} layers: "
                "give one a layer"
            )
        if self.sliding_window is None and not self.is_full:
            raise ConfigError("sliding_window is missing: every layer type but full_attention needs one")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1 (the query's own key), got {self.sliding_window}")
        if self.num_last_tokens and not self.full_attention_decode:
            raise ConfigError(f"num_last_tokens is {self.num_last_tokens}: it needs full_attention_decode (+fa-decode)")
        for name in ("sliding_window", "num_sink_tokens", "num_last_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must be 0 or more, got {value}")
            if value is not None and value > MOST_POSITIONS:
                raise ConfigError(f"{name} must be at most {MOST_POSITIONS}, got {value}")

    # ---- reading it ----

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def chunked(self) -> bool:
        """Whether its windows are chunks."""
        return CHUNKED in self.layer_types

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices (from 0) of the layers with full attention throughout."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices (from 0) of the layers that attend in some way; the others are linear."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind != LINEAR)

    @property
    def is_full(self) -> bool:
        """Whether every layer that attends is full."""
        return self.full_layers == self.attention_layers

    @property
    def opened(self) -> AttentionPattern:
        """Full attention in every layer that attends."""
        return AttentionPattern(tuple(FULL if i in self.attention_layers else LINEAR for i in range(self.num_layers)))

    @property
    def window(self) -> Window:
        """What its windowed queries see."""
        return Window(self.sliding_window, self.num_sink_tokens, self.full_attention_decode, self.num_last_tokens)

    def with_window(self, window: Window) -> AttentionPattern:
        """The same with what is given of a window."""
        return dataclasses.replace(self, **window.of(self.window, needed=False).fields)

    def full_from(self, prompt_lengths: jax.Array) -> jax.Array | None:
        """The first queries that see everything, by prompts' lengths [B]; None without full-attention decode."""
        return (prompt_lengths - self.num_last_tokens).clip(0) if self.full_attention_decode else None

    @property
    def full_head_counts(self) -> tuple[int, ...]:
        return tuple(len(heads) for heads in self.full_kv_heads)

    def full_cache_heads(self, num_kv_heads: int) -> np.ndarray:
        """Which (layer, KV head) needs the whole sequence in its cache: bool [L, K]."""
        whole = np.array([self.full_attention_decode or kind in (FULL, SWITCH) for kind in self.layer_types])
        table = np.repeat(whole[:, None], num_kv_heads, axis=1)  # [L, K]
        for layer, heads in enumerate(self.full_kv_heads):
            table[layer, list(heads)] = True
        return table

    def of_layers(self, layers: Sequence[int]) -> AttentionPattern:
        """The pattern of some layers alone."""
        types = tuple(self.layer_types[layer] for layer in layers)
        heads = tuple(self.full_kv_heads[layer] for layer in layers)
        return dataclasses.replace(self, layer_types=types, full_kv_heads=heads)

    def validate(self, model: ModelConfig) -> None:
        """Raise `ConfigError` where this pattern does not fit the model."""
        if self.num_layers != model.num_hidden_layers:
            raise ConfigError(
                f"the pattern has {self.num_layers} layers, the model {model.num_hidden_layers}: they must agree"
            )
        for layer, kind in enumerate(self.layer_types):
            if (kind == LINEAR) != (layer in model.linear_layers):
                is_linear = "a linear layer" if kind != LINEAR else "an attention layer"
                raise ConfigError(
                    f"layer_types[{layer}] is '{kind}', but layer {layer} of the model is {is_linear}: the linear "
                    f"layers, and they alone, are '{LINEAR}'"
                )
        for layer, heads in enumerate(self.full_kv_heads):
            count, _ = model.head_shapes[layer]
            wrong = [h for h in heads if not 0 <= h < count]
            if wrong:
                raise ConfigError(
                    f"full_kv_heads[{layer}] names KV head {wrong[0]}, the model has heads 0 to {count - 1}"
                )
            if len(set(heads)) != len(heads):
                raise ConfigError(f"full_kv_heads[{layer}] names a KV head twice: {list(heads)}")
        if self.nope_full_layers:
            self._check_nope(model)

    def _check_nope(self, model: ModelConfig) -> None:
        if not model.uses_rope:
            raise ConfigError(
                f"nope_full_layers takes rotary embeddings away, but position_embedding = {model.position_embedding} "
                "has none: leave nope_full_layers (+nope) out"
            )
        if set(self.layer_types) == {FULL} or FULL not in self.layer_types:
            what = "only full layers, and would know no positions" if FULL in self.layer_types else "no full layer"
            raise ConfigError(f"nope_full_layers is for patterns with full and other layers; this one has {what}")
        for layer in model.attention_layers:
            source = model.kv_sources[layer]
            if (self.layer_types[layer] == FULL) != (self.layer_types[source] == FULL):
                raise ConfigError(
                    f"nope_full_layers: layer {layer} reads the keys of layer {source}, and one of the two is full, so "
                    "that only one is rotated: make both full, or neither"
                )

    def __str__(self) -> str:
        """The effective per-layer map, on one screen: F full, w window, c chunks, h head hybrid, S switch, L linear."""
        letters = {FULL: "F", WINDOW: "w", CHUNKED: "c", HYBRID: "h", SWITCH: "S", LINEAR: "L"}
        row = "".join(letters[kind] for kind in self.layer_types)
        lines = [
            f"{self.num_layers} layers: {' '.join(row[i : i + 8] for i in range(0, len(row), 8))}",
            f"full attention in {len(self.full_layers)} layers: {list(self.full_layers)}",
        ]
        if self.sliding_window is not None:
            lines.append(
                f"window {self.sliding_window} (own key included), {self.num_sink_tokens} sink tokens, "
                f"full-attention decode {'on' if self.full_attention_decode else 'off'}"
                + (f", for a prompt's last {self.num_last_tokens} tokens too" if self.num_last_tokens else "")
            )
        hybrids = [f"{i}:{list(h)}" for i, h in enumerate(self.full_kv_heads) if self.layer_types[i] == HYBRID]
        if hybrids:
            lines.append(f"full KV heads by layer: {', '.join(hybrids)}")
        if self.nope_full_layers:
            lines.append("full layers without rotary embeddings (NoPE)")
        if self.provenance:
            lines.append(f"made by {self.provenance.get('method', 'unknown')}")
        return "\n".join(lines)

    # ---- JSON ----

    def to_json(self, file: str | Path | None = None) -> str:
        """The pattern as JSON text. If `file` is given, the text is also written there, whole or not at all."""
        data = dataclasses.asdict(self) | {"version": VERSION}
        text = json.dumps(data, indent=2, default=_plain) + "\n"
        if file is not None:
            write_text(file, text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> AttentionPattern:
        """Read JSON text or a file; unknown keys, a newer version or contradictions raise `ConfigError`."""
        name, data = read_object(source)
        return cls.from_object(name, data)

    @classmethod
    def from_object(cls, name: str, data: dict[str, Any]) -> AttentionPattern:
        if "layer_types" not in data:
            raise ConfigError(f"{name} has no 'layer_types': it is not an attention pattern")
        version = data.pop("version", VERSION)
        if version != VERSION:
            raise ConfigError(f"{name} has version {version}, this library reads version {VERSION}")
        try:
            return from_dict(cls, data)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    # ---- where patterns come from ----

    @classmethod
    def from_recipe(
        cls,
        recipe: str,
        num_layers: int | ModelConfig,
        *,
        sliding_window: int | None = None,
        num_sink_tokens: int | None = None,
        full_attention_decode: bool | None = None,
        seed: int = 0,
    ) -> AttentionPattern:
        """The pattern that a recipe stands for in a model of that many layers.

        Args:
          recipe: such as "interleave-1-in-4+fa-decode"; `swa_jax.model.recipes` lists all.
          num_layers: the number of layers, or a `ModelConfig`, of whose layers those that attend are counted.
          sliding_window: None is 2048, unless every layer is full.
          num_sink_tokens: None is what the recipe says.
          full_attention_decode: None is what the recipe says.
          seed: for the recipes that draw layers.

        Raises `ConfigError`: an unknown recipe, or a number out of its range.
        """
        if isinstance(num_layers, ModelConfig):
            layers: Sequence[int] = num_layers.attention_layers
        elif (number := _integer("num_layers", num_layers)) < 1:
            raise ConfigError(f"num_layers must be at least 1, got {number}")
        else:
            layers = range(number)
        read = read_recipe(recipe, layers, seed)
        window = Window(sliding_window, num_sink_tokens, full_attention_decode).of(read.window, needed=False)
        provenance = {"method": recipe} | ({"seed": seed} if read.drawn else {})
        fields = {"provenance": provenance, "nope_full_layers": read.nope, **window.fields}
        return cls.from_full_layers(read.full_layers, num_layers, rest=read.rest, **fields)

    @classmethod
    def from_full_layers(
        cls,
        full_layers: Sequence[int],
        num_layers: int | ModelConfig,
        sliding_window: int | None = None,
        *,
        rest: str = WINDOW,
        **fields: Any,
    ) -> AttentionPattern:
        """Full attention in the named layers (from 0), `rest` in all others that attend: a number stands for a model
        whose layers all do."""
        linear: tuple[int, ...] = ()
        if isinstance(num_layers, ModelConfig):
            linear, num_layers = num_layers.linear_layers, num_layers.num_hidden_layers
        wrong = [i for i in full_layers if not 0 <= i < num_layers]
        if wrong:
            raise ConfigError(f"full layer {wrong[0]} does not exist: the model has layers 0 to {num_layers - 1}")
        if wrong := [i for i in full_layers if i in linear]:
            raise ConfigError(f"full layer {wrong[0]} is a linear layer of this model: it cannot attend")
        full = {*full_layers}
        types = (LINEAR if i in linear else FULL if i in full else rest for i in range(num_layers))
        return cls(tuple(types), sliding_window, **fields)

    @classmethod
    def everywhere(
        cls, kind: str, num_layers: int | ModelConfig, sliding_window: int | None = None, **fields: Any
    ) -> AttentionPattern:
        """Every layer that attends does so in one way."""
        return cls.from_full_layers((), num_layers, sliding_window, rest=kind, **fields)

    @classmethod
    def from_swaa_config(cls, config: Mapping[str, Any], num_layers: int) -> AttentionPattern:
        """Read SWAA's words: `sliding_window_size`, `keep_first`, `force_fa_decode`, `non_sliding_layers`.

        Raises `ConfigError` for an unknown key, a value of the wrong kind, or a layer that does not exist.
        """
        for key in config:
            if key not in SWAA_KEYS:
                raise ConfigError(f"SWAA config: unknown key '{key}'{nearest(key, SWAA_KEYS)}")
        decode, full_layers = config.get("force_fa_decode"), config.get("non_sliding_layers")
        if not isinstance(decode, bool | None):
            raise ConfigError(f"force_fa_decode must be true or false, got {decode!r}")
        if not isinstance(full_layers, list | tuple | None):
            raise ConfigError(f"non_sliding_layers must be a list of layers, got {full_layers!r}")
        full_layers = [_integer(f"non_sliding_layers[{i}]", layer) for i, layer in enumerate(full_layers or ())]
        if config.get("sliding_window_size") is None:
            return cls((FULL,) * num_layers, provenance={"method": "swaa-config"})
        return cls.from_full_layers(
            full_layers,
            num_layers,
            _integer("sliding_window_size", config["sliding_window_size"]),
            num_sink_tokens=_integer("keep_first", config.get("keep_first") or 0),
            full_attention_decode=bool(decode),
            provenance={"method": "swaa-config"},
        )


def read_object(source: str | Path) -> tuple[str, dict[str, Any]]:
    """The JSON object of a file, or of a text or one of `PUBLISHED`, and what to call it in messages."""
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    name, source = "the pattern" if is_text else str(source), PUBLISHED.get(str(source), source)
    try:
        data = str(source).encode() if is_text else Path(source).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"pattern file {source} does not exist") from None
    except OSError as error:
        raise ConfigError(f"pattern file {source} cannot be read: {error.strerror}") from None
    return name, parse_json(data, name, finite=True)


def _integer(name: str, value: Any) -> int:
    """A whole number of Python or NumPy as `int`."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _plain(value: Any) -> Any:
    """NumPy's and JAX's numbers and arrays, which provenance may hold, as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"provenance holds a {type(value).__name__}, which JSON has no form for")
