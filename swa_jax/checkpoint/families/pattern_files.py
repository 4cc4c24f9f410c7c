"""Where a pattern comes from: a recipe's name, or a JSON file of ours, of SWAA, or of a model."""

from __future__ import annotations

from pathlib import Path

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import hf_pattern
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import SWAA_KEYS, AttentionPattern, read_object
from swa_jax.model.recipes import PUBLISHED
from swa_jax.model.window import OWN, Window


def load_pattern(
    source: AttentionPattern | str | Path,
    model: ModelConfig,
    window: Window = OWN,
    *,
    default_window: int | None = None,
    seed: int = 0,
) -> AttentionPattern:
    """A pattern object with a window, or what `read_pattern` reads, checked against the model."""
    if isinstance(source, AttentionPattern):
        pattern = source.with_window(window)
    else:
        pattern = read_pattern(source, model, window, default_window=default_window, seed=seed)
    try:
        pattern.validate(model)
    except ConfigError as error:
        nameless = isinstance(source, AttentionPattern) or str(source).lstrip().startswith("{")
        raise ConfigError(str(error) if nameless else f"{source}: {error}") from None
    return pattern


def choose_pattern(
    own: AttentionPattern, source: AttentionPattern | str | Path | None, model: ModelConfig, window: Window
) -> AttentionPattern:
    """The pattern for a model whose own is `own`: that, or a pattern object, or what `read_pattern` reads.

    What is given of `window` wins over it. Raises `ConfigError` as `read_pattern`, and for a window that an own pattern
    of full layers alone would not show.
    """
    if source is None and any(window.fields.values()) and set(own.layer_types) == {FULL}:
        raise ConfigError(
            "a window, sink tokens and full-attention decode have no effect: the model's own pattern has full "
            "attention in every layer; name another pattern, such as 'window'"
        )
    return load_pattern(own if source is None else source, model, window, default_window=own.sliding_window)


def read_pattern(
    source: str | Path,
    layers: int | ModelConfig,
    window: Window = OWN,
    *,
    default_window: int | None = None,
    seed: int = 0,
) -> AttentionPattern:
    """The path of a JSON file, its text, one of `PUBLISHED`, or a recipe's name; what is given of `window` wins.

    A JSON file holds a pattern as `swa-jax select` writes it, a SWAA configuration
    (`AttentionPattern.from_swaa_config`) or a model's own `config.json` (`hf_pattern`).

    Args:
      layers: of the model, for sources that do not say how many there are; seed: for recipes that draw.
      default_window: the size of a recipe's, which names none, where none is given; None: the recipes' own.

    Raises:
      ConfigError: an unknown recipe, or a file that is none of these.
    """
    if not is_pattern_file(source):
        pattern = AttentionPattern.from_recipe(str(source), layers, seed=seed, **window.fields)
        sized = window.size is not None or pattern.is_full
        return pattern if sized else pattern.with_window(Window(default_window))
    name, data = read_object(source)
    if "num_hidden_layers" in data:
        pattern = hf_pattern(data)
        if pattern.is_full and WINDOW in (data.get("layer_types") or ()):
            raise ConfigError(
                f"{name}: transformers' class for model_type '{data['model_type']}' does not read the windows of "
                "layer_types: name a pattern file, such as the pattern.json of an export"
            )
    elif any(key in data for key in SWAA_KEYS) and "layer_types" not in data:
        number = layers.num_hidden_layers if isinstance(layers, ModelConfig) else layers
        try:
            pattern = AttentionPattern.from_swaa_config(data, number)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    else:
        pattern = AttentionPattern.from_object(name, data)
    return pattern.with_window(window)


def no_window(pattern: AttentionPattern, model: ModelConfig) -> str | None:
    """What a user should know of windows as long as the model's context, which is full attention; None for others."""
    context, window = model.max_position_embeddings, pattern.sliding_window
    if window is None or window < context or pattern.is_full:
        return None
    return f"a window of {window} holds the model's whole context of {context}, which is full attention"


def is_pattern_file(source: str | Path) -> bool:
    """Whether a pattern is named by a JSON file, by its text, or as one of `PUBLISHED`, and not by a recipe."""
    text = str(source)
    return text in PUBLISHED or text.endswith(".json") or text.lstrip().startswith("{")


def layers_of_file(source: str | Path) -> int | None:
    """How many layers the pattern of a JSON file has; None for a SWAA configuration, which does not say."""
    name, data = read_object(source)
    if "num_hidden_layers" in data:
        return hf_pattern(data).num_layers
    if not any(key in data for key in SWAA_KEYS):
        return AttentionPattern.from_object(name, data).num_layers
    types = data.get("layer_types")
    return len(types) if isinstance(types, list) else None
