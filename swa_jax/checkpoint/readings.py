"""What a server may compute in place of an exported model: the right reading, and the errors that are known.

Each reading is the model with another pattern, another configuration, or other tokens before it. `canary` writes what
each would answer, and `check_server.py` finds the one that a server's answers are nearest to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

MOST_LAYERS = 8  # whose kind is read wrongly, one at a time
GUESSED_WINDOW = 16  # of a server that sees windows where there are none
# What a class may leave out: the field of `ModelConfig`, its value without it, and what then is wrong.
LEFT_OUT: tuple[tuple[str, Any, str], ...] = (
    ("sink_logits", False, "the learned sink logits are left out"),
    ("attention_softcap", None, "attention logits without their softcap"),
    ("logit_softcap", None, "output logits without their softcap"),
    ("attention_scale", None, "attention logits divided by the square root of head_dim, not scaled as written"),
    ("embedding_multiplier", 1.0, "embeddings are not multiplied by their factor"),
    ("residual_multiplier", 1.0, "the outputs of layers are not multiplied by their factor"),
    ("logit_multiplier", 1.0, "output logits are not multiplied by their factor"),
    ("attention_gate", "none", "what heads say is not multiplied by their gate"),
    ("shared_expert_intermediate_size", 0, "the expert that every token meets is left out"),
    ("attention_bias", False, "queries, keys and values without their biases"),
    ("qk_norm", False, "queries and keys without their norms"),
    ("v_norm", False, "values without their norm"),
    ("layer_scalar", False, "the outputs of layers are not multiplied by their stored factor"),
    ("norm_bias", False, "norms without their biases"),
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """One way of computing an exported model.

    Attributes:
      name: for machines.
      sentence: what it computes, or what is wrong with it.
      pattern, config: of what it computes.
      first: it is one of the few that a small canary still has.
      jump: positions from the middle of the text on are one too large.
      long_rope: LongRoPE's frequencies for long texts.
      in_front: a token stands before the prompt.
      padding_seen: shorter prompts of a batch are padded on the left, and the padding is seen.
    """

    name: str
    sentence: str
    pattern: AttentionPattern
    config: ModelConfig
    first: bool = False
    jump: bool = False
    long_rope: bool = False
    in_front: bool = False
    padding_seen: bool = False

    @property
    def computes(self) -> tuple[Any, ...]:
        """All but the words: equal readings compute the same."""
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _WORDS)

    def but(self, name: str, sentence: str, *, first: bool = False, **changes: Any) -> Reading:
        """The same with a mistake."""
        return dataclasses.replace(self, name=name, sentence=sentence, first=first, **changes)

    def of_config(self, name: str, sentence: str, **fields: Any) -> Reading:
        """The same with other fields of its configuration."""
        return self.but(name, sentence, config=dataclasses.replace(self.config, **fields))


_WORDS = ("name", "sentence", "first")


def readings_of(config: ModelConfig, pattern: AttentionPattern, hf: Mapping[str, Any]) -> list[Reading]:
    """The right reading, then the wrong ones, the commonest first; each computes something else.

    Args:
      config: the model's.
      pattern: what the export says.
      hf: its `config.json`.
    """
    right = Reading("right", describe(pattern), pattern, config, first=True)
    found: dict[tuple[Any, ...], Reading] = {}
    for reading in (
        right,
        *_windows(right, hf),
        right.but("padding", "the padding of a batch is seen", first=True, padding_seen=True),
        *_rope(right),
        *_left_out(right),
        *_tokens(right, hf),
        *_layers(right),
    ):
        found.setdefault(reading.computes, reading)
    return list(found.values())


def describe(pattern: AttentionPattern) -> str:
    """A pattern in a few words."""
    windowed = [layer for layer, kind in enumerate(pattern.layer_types) if kind != FULL]
    if not windowed:
        return "full attention in every layer, as written"
    where = "every layer" if len(windowed) == pattern.num_layers else f"{len(windowed)} of {pattern.num_layers} layers"
    sinks = f" and {pattern.num_sink_tokens} sink tokens" if pattern.num_sink_tokens else ""
    heads = ", with single full KV heads" if HYBRID in pattern.layer_types else ""
    decode = ", with full-attention decode" if pattern.full_attention_decode else ""
    kind = "chunks" if pattern.chunked else "a window"
    return f"{kind} of {pattern.sliding_window} keys{sinks} in {where}{heads}{decode}, as written"


def _windows(right: Reading, hf: Mapping[str, Any]) -> Iterator[Reading]:
    """Another window, or the same one in all layers or in none."""
    pattern, layers = right.pattern, right.pattern.num_layers
    window = pattern.sliding_window
    if window is None or pattern.is_full:
        seen = hf.get("sliding_window")
        seen = seen if isinstance(seen, int) and 1 <= seen <= GUESSED_WINDOW else GUESSED_WINDOW
        everywhere = AttentionPattern((WINDOW,) * layers, seen)
        yield right.but("window everywhere", f"a window of {seen} keys in every layer", first=True, pattern=everywhere)
        return

    full = dataclasses.replace(pattern, layer_types=(FULL,) * layers, full_kv_heads=())
    yield right.but("full everywhere", "full attention in every layer", first=True, pattern=full)
    if HYBRID in pattern.layer_types:
        types = tuple(WINDOW if kind == HYBRID else kind for kind in pattern.layer_types)
        dropped = dataclasses.replace(pattern, layer_types=types, full_kv_heads=())
        yield right.but("full heads dropped", "the full heads have windows", first=True, pattern=dropped)
        layers_of = list(zip(pattern.layer_types, pattern.full_kv_heads, right.config.head_shapes, strict=True))
        swapped = tuple(
            tuple({*range(count)} - {*heads}) if kind == HYBRID else () for kind, heads, (count, _) in layers_of
        )
        leading = tuple(tuple(range(len(heads))) for heads in pattern.full_kv_heads)
        for name, sentence, heads in (
            ("full heads swapped", "the full heads have windows, and the others are full", swapped),
            ("first heads", "the first KV heads of a layer are full, in place of those that should be", leading),
        ):
            changed = dataclasses.replace(pattern, full_kv_heads=heads)
            yield right.but(name, sentence, first=True, pattern=changed)
    everywhere = dataclasses.replace(full, layer_types=(WINDOW,) * layers)
    sentence = "a window in every layer, although some should have full attention"
    yield right.but("window everywhere", sentence, first=True, pattern=everywhere)
    for name, sentence, other, first in (
        ("window - 1", "the window is one key shorter", window - 1, True),
        ("window + 1", "the window is one key longer", window + 1, True),
        ("half the window", "the window is half as long", window // 2, False),
        ("twice the window", "the window is twice as long", 2 * window, False),
    ):
        if other >= 1:
            changed = dataclasses.replace(pattern, sliding_window=other)
            yield right.but(name, f"{sentence} ({other} in place of {window})", first=first, pattern=changed)
    if sinks := pattern.num_sink_tokens:
        for name, sentence, other, first in (
            ("sink tokens dropped", "the sink tokens are not seen beyond the window", 0, True),
            ("sink tokens - 1", f"there is one sink token less ({sinks - 1} in place of {sinks})", sinks - 1, False),
            ("sink tokens + 1", f"there is one sink token more ({sinks + 1} in place of {sinks})", sinks + 1, False),
        ):
            changed = dataclasses.replace(pattern, num_sink_tokens=other)
            yield right.but(name, sentence, first=first, pattern=changed)


def _layers(right: Reading) -> Iterator[Reading]:
    """The wrong layers have windows."""
    pattern = right.pattern
    types = pattern.layer_types
    if pattern.sliding_window is None or not set(types) <= {FULL, WINDOW}:
        return
    other = {FULL: WINDOW, WINDOW: FULL}
    swapped = tuple(other[kind] for kind in types)
    wrong = [
        ("kinds swapped", "windows where attention should be full, and the other way round", swapped),
        ("kinds one layer late", "each layer has the attention of the one below it", (types[-1], *types[:-1])),
        ("kinds one layer early", "each layer has the attention of the one above it", (*types[1:], types[0])),
        (
            "every second layer",
            "windows in layers 0, 2, 4 and so on",
            tuple(FULL if layer % 2 else WINDOW for layer in range(len(types))),
        ),
    ]
    step = max(1, (len(types) - 1) / (MOST_LAYERS - 1))
    for layer in sorted({round(i * step) for i in range(min(len(types), MOST_LAYERS))}):
        kinds = (*types[:layer], other[types[layer]], *types[layer + 1 :])
        seen = "a window" if kinds[layer] == WINDOW else "full attention"
        wrong.append((f"layer {layer}", f"layer {layer} has {seen}", kinds))
    for name, sentence, kinds in wrong:
        yield right.but(name, sentence, pattern=dataclasses.replace(pattern, layer_types=kinds))


def _rope(right: Reading) -> Iterator[Reading]:
    """Other rotary embeddings."""
    config, layers = right.config, right.config.num_hidden_layers
    if not config.uses_rope:
        return
    kinds = config.rope_kinds_by_layer
    swapped_words = "each layer has the RoPE of the other layer type"
    if config.heads_differ:  # a layer's heads go with its RoPE
        thetas = {"rope_theta": config.local_rope_theta, "local_rope_theta": config.rope_theta}
        yield right.of_config("rope swapped", swapped_words, **thetas, rope_scaling=None)
    elif "local" in kinds:
        other = {"local": "global", "global": "local", "none": "none"}
        swapped = tuple(other[kind] for kind in kinds)
        yield right.of_config("rope swapped", swapped_words, rope_layers=swapped)
        for kind, owners in (("global", "full"), ("local", "windowed")):
            sentence = f"the RoPE of {owners} layers in every layer"
            yield right.of_config(f"rope {kind}", sentence, rope_layers=(kind,) * layers)
    if "none" in kinds and not config.heads_differ:
        yield right.of_config("rope everywhere", "RoPE also in layers without it", rope_layers=("global",) * layers)
        others = tuple("none" if kind != "none" else "global" for kind in kinds)
        yield right.of_config("rope in the others", "RoPE in the wrong layers", rope_layers=others)
    if config.rope_scaling is not None:
        yield right.of_config("rope unscaled", "RoPE without its scaling", rope_scaling=None)
        if config.rope_scaling.llama_4_scaling_beta:
            flat = dataclasses.replace(config.rope_scaling, llama_4_scaling_beta=0.0)
            sentence = "queries without the factor that grows with positions"
            yield right.of_config("query scale", sentence, rope_scaling=flat)
    if config.rope_theta != 10000.0:
        yield right.of_config("rope theta", "RoPE with a rope_theta of 10000", rope_theta=10000.0)
    if config.long_rope_after is not None:
        yield right.but("long rope", "LongRoPE's factors for long texts also for short ones", long_rope=True)


def _left_out(right: Reading) -> Iterator[Reading]:
    for field, without, sentence in LEFT_OUT:
        if getattr(right.config, field) != without:
            yield right.of_config(f"without {field}", sentence, **{field: without})


def _tokens(right: Reading, hf: Mapping[str, Any]) -> Iterator[Reading]:
    """Other positions, or a token too many. Positions that are all shifted change nothing: RoPE sees differences."""
    if right.config.uses_rope:
        yield right.but("positions", "positions are one too large from the middle of the text on", jump=True)
    if isinstance(hf.get("bos_token_id"), int):
        yield right.but("token in front", "a token is put in front of the prompt", in_front=True)
