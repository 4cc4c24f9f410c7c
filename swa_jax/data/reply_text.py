"""The text of a reply while its tokens come: whole characters only, and nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers.decoders import DecodeStream

from swa_jax.base.errors import ConfigError
from swa_jax.data.tokenizer import Tokenizer

BEGIN_OF_THINKING, END_OF_THINKING = "<think>", "</think>"


def after_thinking(text: str, begun: bool = False) -> str:
    """What a reply says after its thinking; nothing where the thinking has no end.

    Args:
      begun: the prompt ends inside the thinking, so that the reply does not show where it begins.
    """
    _, end, answer = text.rpartition(END_OF_THINKING)
    if end:
        return answer
    return "" if begun or text.lstrip().startswith(BEGIN_OF_THINKING) else text


def check_stop(stop: Sequence[str]) -> None:
    """Raises `ConfigError` where one of these stop strings is empty."""
    if "" in stop:
        raise ConfigError("a stop string is empty: it would end every reply before it begins")


class ReplyText:
    """What of one reply may be shown.

    The pieces that `push` and `close` return are together the text of all tokens, cut before the first stop string.
    What may be the beginning of a stop string, or of a character, is held back until more tokens come.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.text = ""  # what has been returned
        self.stopped = False  # a stop string has come
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # A special token has no text of its own in a reply, so that none would be found there.
        named = (tokenizer.backend.token_to_id(one) for one in stop)
        self._stop_tokens = {token for token in named if token is not None and not tokenizer.decode([token])}
        self._stream = DecodeStream(skip_special_tokens=True)
        self.tokens: list[int] = []  # up to the stop string's last
        self._held = ""

    def push(self, tokens: Iterable[int]) -> str:
        """The new text that these tokens bring."""
        for token in tokens:
            if self.stopped:
                break
            self.tokens.append(token)
            self._held += self._stream.step(self._tokenizer.backend, token) or ""
            self._cut()
            self.stopped |= token in self._stop_tokens
        open_end = 0 if self.stopped else max(map(self._open_end, self._stop), default=0)
        return self._show(len(self._held) - open_end)

    def close(self) -> str:
        """The rest, when no more tokens come."""
        if not self.stopped:
            # Bytes that are no whole character are shown as the tokenizer shows them.
            whole = self._tokenizer.decode(self.tokens)
            self._held = whole[len(self.text) :]
            self._cut()
        return self._show(len(self._held))

    def _cut(self) -> None:
        places = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if places:
            self._held, self.stopped = self._held[: min(places)], True

    def _open_end(self, stop: str) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self.text += shown
        return shown
