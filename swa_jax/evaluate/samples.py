"""What a model said to each example, a JSON line each: an interrupted evaluation goes on from there.

Examples go through a model in batches, and rows of a batch share its padding. So what is known belongs to a batch: to
the tokens and references of all its rows, and to the model and the settings that they went through. A batch that is
known whole is not computed again, and the numbers are those of an evaluation that nothing has interrupted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swa_jax.base.files import Store, digest, sum_of_json, tell_found
from swa_jax.evaluate.examples import Example


class Samples:
    """Records by batch; with `file`, lines that are added as batches end, and found again.

    Args:
      total: how many there will be, for the line that says how many are found, before the first new one.
    """

    def __init__(self, file: Path | None = None, total: int = 0):
        self._file, self._store = file, None if file is None else Store(file, "samples")
        self._context: Any = None
        self._total, self._found = total, [0]  # of all that share the file

    def under(self, context: Any) -> Samples:
        """The same file for another model, pattern or setting, all of which `context`, a JSON value, tells apart."""
        other = copy.copy(self)
        other._context = context
        return other

    def find(self, kind: str, examples: Sequence[Example], settings: Any) -> list[dict[str, Any]] | None:
        """The records of a batch, one for each example; None where one of them is missing."""
        if self._store is None:
            return None
        known = [self._store.records.get(key) for key in self._keys(kind, examples, settings)]
        if None in known:
            tell_found(self._file, sum(self._found), self._total, "samples")
            self._found.clear()
            return None
        if self._found:
            self._found.append(len(known))
        return known  # type: ignore[return-value]

    def add(self, kind: str, examples: Sequence[Example], settings: Any, records: Sequence[dict[str, Any]]) -> None:
        """Keep what is known of a batch: one record for each example, of JSON values."""
        if self._store is None:
            return
        keys = self._keys(kind, examples, settings)
        for key, example, record in zip(keys, examples, records, strict=True):
            prompt = sum_of_json(list(map(int, example.prompt)))[:16]
            self._store.add(key, kind=kind, prompt=prompt, **record)

    def _keys(self, kind: str, examples: Sequence[Example], settings: Any) -> list[str]:
        """Of each row of a batch."""
        rows = [[list(map(int, e.prompt)), list(map(int, e.answer)), e.references, e.value] for e in examples]
        batch = digest([kind, self._context, settings, rows])
        return [f"{batch}-{row}" for row in range(len(rows))]


NO_SAMPLES = Samples()  # keeps nothing
