"""What is known already, by the content that it was made from, in files that a killed run leaves to the next.

A name or a path may stand for something else tomorrow, and a time says nothing. So what is kept belongs to content: to
the sums of weights, data and options, which `digest` makes keys of. Equal keys, equal results.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swa_jax.errors import ConfigError
from swa_jax.files import parse_json, read_json, sum_of_json

START_OVER = "name another file, or remove this one to start over"
_MEANS = {  # what a user would call what differs
    "weights": "weights, so that it is of another model",
    "config": "model configuration, by which --yarn also counts",
    "examples": "examples (--length, --examples, --keys, --haystack, --prompts or --seed)",
}
_STARTS = b'{"content": ', b'{"key": '  # of our lines
log = logging.getLogger(__name__)


def digest(value: Any) -> str:
    """A key: 32 hexadecimal digits of the SHA-256 of plain JSON values, whatever the order of a mapping."""
    return sum_of_json(value)[:32]


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def tell_found(file: Path | None, found: int, total: int, kind: str, say: Callable[[str], object] = _to_stderr) -> None:
    """Say how many of `total` results of a kind, such as "replies", a run finds in a file and need not make, if any."""
    if found:
        say(f"{file}: found {found} of {total} {kind} here, doing {total - found}")


class Store:
    """Records by key, each a line of JSON that is written as it comes: a killed run loses no more than the one in work.

    Without a file, records are kept for this process alone. A line that is damaged is told in the log and does not
    count; it costs no other.

    Attributes:
      records: what is known, by key.
    """

    def __init__(self, file: Path | None, kind: str, content: Mapping[str, Any] | None = None):
        """Reads what earlier runs have left.

        Args:
          kind: what the records are, for sentences: "scores of masks".
          content: what all of them depend on, beside their keys, as plain JSON values: the first line of the file.

        Raises:
          ConfigError: the file holds something else, or records of other content.
        """
        self.records: dict[str, dict[str, Any]] = {}
        self._file, self._content = file, None if content is None else {"content": dict(content)}
        self._whole: int | None = None  # bytes of the whole lines, where a kill has left half a line behind them
        if file is not None and file.exists():
            self._read(file, kind)
        before = [one["seconds"] for one in self.records.values() if "seconds" in one]
        self._started = time.monotonic() - max(before, default=0.0)

    @property
    def seconds(self) -> float:
        """Since this was made, and what the runs before took, by the `seconds` of their records."""
        return time.monotonic() - self._started

    def add(self, key: str, **record: Any) -> None:
        """Keep a record of JSON values, in place of the one that the key has."""
        self.records[key] = record
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._whole is not None:
            os.truncate(self._file, self._whole)
            self._whole = None
        with self._file.open("ab") as stream:
            if self._content is not None and not stream.tell():
                stream.write(_line(self._content))
            stream.write(_line({"key": key} | record))

    def _read(self, file: Path, kind: str) -> None:
        *lines, half = file.read_bytes().split(b"\n")
        if half:
            self._whole = sum(len(line) + 1 for line in lines)
        if not lines and not any(half[:8] == start[: len(half[:8])] for start in _STARTS):
            raise ConfigError(f"{file} holds no {kind}: {START_OVER}")
        values = [_value(line, file) for line in lines]
        if self._content is not None and lines:
            if values[0] is None or values[0].keys() != {"content"}:
                raise ConfigError(f"{file} holds no {kind}, or its first line is damaged: {START_OVER}")
            check_content(file, kind, values[0]["content"], self._content["content"])
            values[0] = {}
        for value in values:
            if value and "key" in value:
                self.records[value.pop("key")] = value
        if damaged := [str(number) for number, value in enumerate(values, 1) if value is None]:
            lines_of = f"lines {', '.join(damaged)} are" if len(damaged) > 1 else f"line {damaged[0]} is"
            log.warning("%s: %s damaged and does not count: what it held is made again", file, lines_of)


def _line(value: dict[str, Any]) -> bytes:
    """As text of one line, with a sum by which damage shows."""
    return (json.dumps(value | {"sum": sum_of_json(value)[:8]}, ensure_ascii=False) + "\n").encode()


def _value(line: bytes, file: Path) -> dict[str, Any] | None:
    """What a line holds; None where it is damaged."""
    try:
        value = parse_json(line, file)
        return value if value.pop("sum") == sum_of_json(value)[:8] else None
    except (ConfigError, KeyError):
        return None


def check_content(
    file: Path, kind: str, before: Mapping[str, Any], now: Mapping[str, Any], advice: str = START_OVER
) -> None:
    """Raise `ConfigError`, which names what differs, where a file holds results of other content than is asked for."""
    differences = []
    for name in [*now, *(before.keys() - now.keys())]:
        one, other = before.get(name), now.get(name)
        if one == other:
            continue
        plain = all(isinstance(value, bool | int | float | None) or len(str(value)) < 32 for value in (one, other))
        known = _MEANS.get(name, name)
        differences.append(f"{name} was {one} there and is {other} here" if plain else f"other {known}")
    if differences:
        raise ConfigError(f"{file} holds {kind} of other content ({'; '.join(differences)}): {advice}")


def read_document(file: Path, kind: str, part: str = "", advice: str = START_OVER) -> dict[str, Any]:
    """The JSON object that a run keeps in a file and writes whole; {} where there is none yet.

    Raises:
      ConfigError: the file is damaged, or holds something else: its `part`, an object or a list, is missing.
    """
    if not file.exists():
        return {}
    try:
        document = read_json(file)
    except ConfigError as error:
        raise ConfigError(f"{error}: {advice}") from None
    if part and not isinstance(document.get(part), dict | list):
        raise ConfigError(f"{file} holds no {kind}: {advice}")
    return document
