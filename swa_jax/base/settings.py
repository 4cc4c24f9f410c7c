"""Typed configuration: frozen dataclasses read from YAML or JSON, with `a.b=c` overrides.

Every error names the key at fault and, where one is near, the key that was probably meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import yaml

from swa_jax.base.errors import ConfigError

SHOWN, LONGEST = 30, 80  # of what is known, in a sentence: how many names, and how much of each


class MissingKeyError(ConfigError):
    """A key that must be given; `load_config` adds the file to the sentence."""


def nearest(word: str, choices: Sequence[str], *, listed: bool = True) -> str:
    """A ready clause such as "; did you mean 'seed'?", or, when none is near, the list of choices if `listed`."""
    close = difflib.get_close_matches(word[:LONGEST], choices, n=1)
    if close:
        return f"; did you mean '{close[0]:.{LONGEST}}'?"
    if not listed:
        return ""
    some = [choice[:LONGEST] for choice in sorted(choices)[:SHOWN]]
    more = f" and {len(choices) - SHOWN} more" if len(choices) > SHOWN else ""
    return f"; known: {', '.join(some)}{more}"


def from_dict[T](cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Build the dataclass `cls` from nested mappings; unknown keys and wrong types raise `ConfigError`."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or 'the configuration'} must be a mapping of keys, got {data!r:.200}")
    hints = _type_hints(cls)  # type: ignore[arg-type]
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown key '{_join(path, key):.{LONGEST}}'{nearest(str(key), list(fields))}")
    missing = [
        name
        for name, f in fields.items()
        if name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise MissingKeyError(f"missing key '{_join(path, missing[0])}'")
    return cls(**{key: _convert(hints[key], value, _join(path, key)) for key, value in data.items()})


def check_choices(config: Any) -> None:
    """Raise `ConfigError` where a field of a dataclass is none of the words that its type lists."""
    for name, hint in _type_hints(type(config)).items():  # type: ignore[arg-type]
        if typing.get_origin(hint) is Literal:
            _convert(hint, getattr(config, name), name)


@functools.cache  # servers' classes are tried one by one, and read thousands of small configurations
def _type_hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def to_dict(config: Any) -> Any:
    """The plain nested form of a configuration, ready for YAML or JSON."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [to_dict(value) for value in config]
    return config


def to_yaml(config: Any) -> str:
    """A configuration with every key, as `load_config` reads it."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def load_config[T](cls: type[T], file: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file into `cls`, with `a.b=c` overrides on top; a value is YAML, or `@file.yaml`: what is in it.

    A file may name another with `base: FILE` (beside it, unless absolute) and then holds only what differs from it.
    """
    data = _read_with_base(Path(file))
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is no configuration: it must have keys with values, as the files of configs/ have")
    for override in overrides:
        _apply_override(data, override)
    try:
        return from_dict(cls, data)
    except MissingKeyError as error:
        raise ConfigError(f"{error} in {file}: write it there") from None


def _read_with_base(file: Path, above: tuple[Path, ...] = ()) -> Any:
    data = _read_yaml(file)
    if data is None:
        raise ConfigError(f"{file} is empty: it must have keys with values, as the files of configs/ have")
    if not isinstance(data, Mapping) or "base" not in data:
        return data
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
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {file} does not exist") from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise ConfigError(f"configuration file {file} is not a YAML file") from None
    return parse_yaml(text, str(file))


class _Loader(yaml.SafeLoader):
    """Without what PyYAML lets pass: two values for one key, halves of characters."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key_node.value}' is there twice: remove one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if isinstance(node, yaml.ScalarNode) and (wrong := re.search("[\0\ud800-\udfff]", node.value)):
            raise yaml.constructor.ConstructorError(
                None, None, f"{wrong[0]!r} is no character of a text", node.start_mark
            )
        return super().construct_scalar(node)


LARGEST = 100_000  # values in a document, those of aliases counted wherever they stand


def parse_yaml(text: str, name: str) -> Any:
    """The YAML value in `text`, which `name` stands for in sentences.

    Raises `ConfigError`: it is none, has a key twice, or is too deep or too large.
    """
    try:
        value = yaml.load(text, _Loader)  # a safe loader
        _count(value, 0, 0)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {_where(error)}") from None
    except RecursionError:
        raise ConfigError(
            f"{name} is not valid YAML for us: its lists and mappings lie too deep in each other"
        ) from None
    except (ValueError, LookupError, AttributeError) as error:  # of PyYAML, for values that are not of their kind
        words = str(error) if isinstance(error, ValueError) else "a value in it is not what its tag says"
        if "digits" in words:
            words = "a whole number in it has thousands of digits"
        raise ConfigError(f"{name} is not valid YAML for us: {words}") from None
    return value


def _count(value: Any, depth: int, total: int) -> int:
    """How many values there are so far."""
    if depth > 100:  # an alias may lead back to itself
        raise RecursionError
    if total > LARGEST:
        raise ValueError(f"it has more than {LARGEST} values")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        total = _count(one, depth + 1, total)
    return total + 1


def _where(error: yaml.YAMLError) -> str:
    """One line of what PyYAML says in several."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{override:.{LONGEST}}' must have the form a.b=value")
    node: Any = data
    *parents, last = key.split(".")
    for parent in parents:
        node = node[_list_index(node, parent, key)] if isinstance(node, list) else node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            raise ConfigError(
                f"override '{override:.{LONGEST}}': '{parent:.{LONGEST}}' is a value, not a group of keys"
            )
    value = _read_yaml(text[1:]) if text.startswith("@") else parse_yaml(text, f"override '{override:.{LONGEST}}'")
    if isinstance(node, list):
        node[_list_index(node, last, key)] = value
    else:
        node[last] = value


def _list_index(items: list[Any], text: str, key: str) -> int:
    if not text.isdigit() or int(text) >= len(items):
        raise ConfigError(f"override '{key:.{LONGEST}}': '{text:.{LONGEST}}' is no index into a list of {len(items)}")
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
                failures.append(error)
        start = f"'{path}' must be "
        if not all(str(failure).startswith(start) for failure in failures):
            raise failures[0]
        kinds, got = zip(*(str(failure).removeprefix(start).rsplit(", got ", 1) for failure in failures), strict=True)
        raise ConfigError(f"{start}{' or '.join(kinds)}, got {got[0]}")
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"'{path}' must be one of {', '.join(map(str, args))}, got {value!r:.200}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"'{path}' must be a list, got {value!r:.200}")
        return tuple(_convert(args[0], item, f"{path}.{i}") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"'{path}' must be a mapping, got {value!r:.200}")
        return {key: _convert(args[1], item, _join(path, key)) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, path)
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as a string
        except (ValueError, OverflowError):
            pass
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"'{path}' must be {hint.__name__}, got {value!r:.200}")
    return value
