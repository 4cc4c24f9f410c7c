"""Prompts from a file, and their replies into one: JSON lines that an interrupted command goes on with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import Store, digest, parse_json_value, read_utf8, tell_found, write_lines

FORMS = 'a text, {"prompt": text} or {"messages": [...]}'


class Prompt(NamedTuple):
    """One prompt: a text, or the messages of a chat."""

    text: str | None
    messages: list[dict[str, Any]] | None
    record: dict[str, Any] | None = None  # the whole line, if it is an object
    where: str = ""  # its file and line, for sentences


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
        Prompt(line, None, where=where) if plain else _prompt(line, where)
        for number, line in enumerate(lines, 1)
        if line.strip() and (where := f"{file}, line {number}")
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
        return Prompt(value, None, where=where)
    if isinstance(value, dict):
        text, messages = value.get("prompt"), value.get("messages")
        if isinstance(text, str) and messages is None:
            return Prompt(text, None, value, where)
        if isinstance(messages, list) and messages and text is None:
            return Prompt(None, messages, value, where)
        if text is not None and messages is not None:
            raise ConfigError(f"{where} has both 'prompt' and 'messages': one of them is expected")
    raise ConfigError(f"{where} is not a prompt: {FORMS} is expected, got {line[:60]!r}")


class ReplyFile:
    """Replies as JSON lines. They are kept in `<file>.unfinished` as they come; `finish` sorts them into `file`.

    Args:
      file: where the replies go in the end.
      settings: what they depend on, as a JSON value. Replies of other settings are not gone on with.

    Attributes:
      settings: their digest. Where a reply has it, it tells what the file is of when the file is whole.
      is_finished: the file is there, and is of these settings; that was said.

    Raises `ConfigError`: the file is there with something else, or `<file>.unfinished` holds replies of other settings.
    """

    def __init__(self, file: Path, settings: Any):
        self.file, self._log, self.settings = file, Path(f"{file}.unfinished"), digest(settings)
        self.is_finished = file.exists()
        if self.is_finished:
            with file.open("rb") as lines:
                if f'"settings": "{self.settings}"'.encode() not in next(lines, b""):
                    raise ConfigError(f"{file} is there already: remove it, or give --out another name")
            print(f"{file} is finished already", file=sys.stderr)
        self._store = Store(self._log, "replies", {"model, prompts or settings": self.settings})
        self.replies = {(one["prompt"], one["sample"]): one for one in self._store.records.values()}

    def tell_found(self, total: int) -> None:
        """Say how many of `total` replies are here, if any."""
        tell_found(self._log, len(self.replies), total, "replies")

    def add(self, reply: dict[str, Any]) -> None:
        """One reply; `prompt` and `sample` are its numbers."""
        self.replies[reply["prompt"], reply["sample"]] = reply
        self._store.add(f"{reply['prompt']}.{reply['sample']}", **reply)

    def finish(self, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        """All replies, by prompt and sample, into the file; those that `keep` refuses into `<file>.rejected`."""
        replies = [reply for _, reply in sorted(self.replies.items())]
        if keep is not None:
            write_lines(Path(f"{self.file}.rejected"), [reply for reply in replies if not keep(reply)])
            replies = [reply for reply in replies if keep(reply)]
        write_lines(self.file, replies)
        self._log.unlink(missing_ok=True)
