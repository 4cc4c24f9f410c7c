"""Prompts from a file, and their replies into one: JSON lines that an interrupted command goes on with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from swa_jax.errors import ConfigError
from swa_jax.files import parse_json, parse_json_value, read_utf8, sum_of_json, write_text

FORMS = 'a text, {"prompt": text} or {"messages": [...]}'


class Prompt(NamedTuple):
    """One prompt: a text, or the messages of a chat."""

    text: str | None
    messages: list[dict[str, Any]] | None
    record: dict[str, Any] | None = None  # the whole line, if it is an object


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file. `.txt`: one a line. Any other: one JSON value a line, of one of the `FORMS`.

    Raises `ConfigError`: the file cannot be read, a line has another form (its number is named), or there is no prompt.
    """
    try:
        lines = read_utf8(file).split("\n")  # JSON may hold other line separators as they are
    except OSError as error:
        raise ConfigError(f"the prompts in {file} cannot be read: {error.strerror}") from None
    plain = file.suffix == ".txt"
    prompts = [
        Prompt(line, None) if plain else _prompt(line, f"{file}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{file} has no prompts: one a line is expected")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        value = parse_json_value(line.encode(), where)
    except ConfigError as error:
        raise ConfigError(f"{error}; {FORMS} is expected, got {line[:60]!r}") from None
    if isinstance(value, str):
        return Prompt(value, None)
    if isinstance(value, dict):
        text, messages = value.get("prompt"), value.get("messages")
        if isinstance(text, str) and messages is None:
            return Prompt(text, None, value)
        if isinstance(messages, list) and messages and text is None:
            return Prompt(None, messages, value)
    raise ConfigError(f"{where} is not a prompt: {FORMS} is expected, got {line[:60]!r}")


class ReplyFile:
    """Replies as JSON lines. They are added to `<file>.unfinished` as they come; `finish` sorts them into `file`.

    Args:
      file: where the replies go in the end.
      settings: what they depend on, as a JSON value. Replies of other settings are not gone on with.

    Raises `ConfigError`: the file is there already, or `<file>.unfinished` holds replies of other settings.
    """

    def __init__(self, file: Path, settings: Any):
        self.file, self._log = file, Path(f"{file}.unfinished")
        self.replies: dict[tuple[int, int], dict[str, Any]] = {}  # by prompt and sample
        if file.exists():
            raise ConfigError(f"{file} is there already: remove it, or give --out another name")
        first = {"settings": sum_of_json(settings)}
        if self._log.exists():
            self._read(first)
        # A line that a kill has cut off goes: the next one would be added to it.
        write_text(self._log, "".join(map(_line, (first, *self.replies.values()))))
        self._stream = self._log.open("a", encoding="utf-8")

    def _read(self, first: dict[str, str]) -> None:
        # The last line, which a kill may have cut off, has no end.
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        if not lines:
            return
        if f"{lines[0]}\n" != _line(first):
            raise ConfigError(
                f"{self._log} holds replies to other prompts, or of another model or other settings: remove it, "
                "or give --out another name"
            )
        for line in lines[1:]:
            with contextlib.suppress(ConfigError, KeyError):  # what is damaged is drawn again
                reply = parse_json(line.encode(), self._log)
                if all(isinstance(reply[key], int) for key in ("prompt", "sample")):
                    self.replies[reply["prompt"], reply["sample"]] = reply

    def add(self, reply: dict[str, Any]) -> None:
        """One reply; `prompt` and `sample` are its numbers."""
        self.replies[reply["prompt"], reply["sample"]] = reply
        self._stream.write(_line(reply))
        self._stream.flush()

    def finish(self, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        """All replies, by prompt and sample, into the file; those that `keep` refuses into `<file>.rejected`."""
        replies = [self.replies[key] for key in sorted(self.replies)]
        if keep is not None:
            refused = "".join(_line(reply) for reply in replies if not keep(reply))
            write_text(Path(f"{self.file}.rejected"), refused)
            replies = [reply for reply in replies if keep(reply)]
        write_text(self.file, "".join(map(_line, replies)))
        self._log.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close()


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
