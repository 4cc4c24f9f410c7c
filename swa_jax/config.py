"""Typed configuration: frozen dataclasses read from YAML or JSON, with `a.b=c` overrides.

Every error names the key at fault and, where one is near, the key that was probably meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from swa_jax.errors import ConfigError, sentence

__all__ = [
    "ConfigError", "ModelConfig", "RopeScaling", "from_dict", "load_config", "nearest", "sentence", "to_dict",
]  # fmt: skip


def nearest(word: str, choices: Sequence[str]) -> str:
    """A ready clause such as "; did you mean 'seed'?", or the list of choices when none is near."""
    close = difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(sorted(choices))}"


def from_dict[T](cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Build the dataclass `cls` from nested mappings; unknown keys and wrong types raise `ConfigError`."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or 'the configuration'} must be a mapping of keys, got {data!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown key '{_join(path, key)}'{nearest(str(key), list(fields))}")
    missing = [
        name
        for name, f in fields.items()
        if name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing key '{_join(path, missing[0])}'")
    return cls(**{key: _convert(hints[key], value, _join(path, key)) for key, value in data.items()})


def to_dict(config: Any) -> Any:
    """The plain nested form of a configuration, ready for YAML or JSON."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [to_dict(value) for value in config]
    return config


def load_config[T](cls: type[T], file: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file into `cls`, with `a.b=c` overrides on top; a value is YAML, or `@file.yaml`: what is in it.

    A file may name another with `base: FILE` (beside it, unless absolute) and then holds only what differs from it.
    """
    data = _read_with_base(Path(file))
    for override in overrides:
        _apply_override(data, override)
    return from_dict(cls, data)


def _read_with_base(file: Path, above: tuple[Path, ...] = ()) -> Any:
    data = _read_yaml(file)
    if not isinstance(data, Mapping) or "base" not in data:
        return {} if data is None else data
    base = file.parent / str(data["base"])
    if base.resolve() in [path.resolve() for path in (file, *above)]:
        raise ConfigError(f"{file}: 'base' leads back to {base}")
    return _merged(_read_with_base(base, (file, *above)), {k: v for k, v in data.items() if k != "base"})


def _merged(below: Any, above: Any) -> Any:
    """Mappings key by key; anything else, lists included, replaces what is below."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _read_yaml(file: str | Path) -> Any:
    try:
        return yaml.safe_load(Path(file).read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file {file} does not exist") from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise ConfigError(f"configuration file {file} is not a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {_where(error)}") from None


def _where(error: yaml.YAMLError) -> str:
    """One line of what PyYAML says in several."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{override}' must have the form a.b=value")
    node: Any = data
    *parents, last = key.split(".")
    for parent in parents:
        node = node[_list_index(node, parent, key)] if isinstance(node, list) else node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override '{override}': '{parent}' is a value, not a group of keys")
    try:
        value = _read_yaml(text[1:]) if text.startswith("@") else yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override '{override}': '{text}' is not valid YAML") from None
    if isinstance(node, list):
        node[_list_index(node, last, key)] = value
    else:
        node[last] = value


def _list_index(items: list[Any], text: str, key: str) -> int:
    if not text.isdigit() or int(text) >= len(items):
        raise ConfigError(f"override '{key}': '{text}' is no index into a list of {len(items)}")
    return int(text)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        failures = []
        for option in (a for a in args if a is not type(None)):
            try:
                return _convert(option, value, path)
            except ConfigError as error:
                failures.append(str(error))
        raise ConfigError(failures[0])
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"'{path}' must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"'{path}' must be a list, got {value!r}")
        return tuple(_convert(args[0], item, f"{path}.{i}") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"'{path}' must be a mapping, got {value!r}")
        return {key: _convert(args[1], item, _join(path, key)) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, path)
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as a string
        except ValueError:
            pass
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"'{path}' must be {hint.__name__}, got {value!r}")
    return value


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings; the field names are Hugging Face's."""

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range outwards to whole channels


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder for Llama, Mistral, Qwen2, Qwen3 and SWAT; field names are Hugging Face's where it has one.

    `position_embedding`, `attention_activation` and the ALiBi fields are SWAT's (Eq. 4 and 5): "alirope" means
    balanced ALiBi and RoPE together. `alibi_negative_heads` + `alibi_positive_heads` must be all query heads.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "llama"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False  # on o (Llama's attention_bias sets both)
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    attention_activation: Literal["softmax", "sigmoid"] = "softmax"
    position_embedding: Literal["rope", "alibi", "alirope", "none"] = "rope"
    alibi_negative_heads: int = 0
    alibi_positive_heads: int = 0
    slope_schedule: Literal["swat", "press", "reference"] = "swat"
    sigmoid_bias: float = 0.0
    router_bias_init: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if (
            self.uses_alibi
            and self.alibi_negative_heads + self.alibi_positive_heads != self.num_attention_heads
        ):
            raise ConfigError(
                f"alibi_negative_heads ({self.alibi_negative_heads}) + alibi_positive_heads "
                f"({self.alibi_positive_heads}) must equal num_attention_heads ({self.num_attention_heads})"
            )
        if self.uses_rope and self.head_dim % 2:
            raise ConfigError(f"head_dim ({self.head_dim}) must be even for rotary embeddings")

    @property
    def uses_rope(self) -> bool:
        return self.position_embedding in ("rope", "alirope")

    @property
    def uses_alibi(self) -> bool:
        return self.position_embedding in ("alibi", "alirope")

    def with_yarn(self, factor: float) -> ModelConfig:
        """The same model with its context stretched `factor` times by YaRN (arXiv:2309.00071); no weight changes.

        Raises:
          ConfigError: a factor that is not above 1, a model without RoPE, or one that scales its RoPE already.
        """
        if not factor > 1:
            raise ConfigError(f"YaRN stretches the context: its factor must be above 1, got {factor:g}")
        if not self.uses_rope:
            raise ConfigError(
                f"position_embedding is '{self.position_embedding}': YaRN needs rotary embeddings"
            )
        if self.rope_scaling is not None:
            raise ConfigError(
                f"the model scales its rotary embeddings already ({self.rope_scaling.rope_type}, factor "
                f"{self.rope_scaling.factor:g}): change rope_scaling in its config.json instead"
            )
        original = self.max_position_embeddings
        scaling = RopeScaling("yarn", factor, original_max_position_embeddings=original)
        return dataclasses.replace(
            self, max_position_embeddings=round(original * factor), rope_scaling=scaling
        )
