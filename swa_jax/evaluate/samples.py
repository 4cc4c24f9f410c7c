"""What a model said to each example, a JSON line each: an interrupted evaluation goes on from there.

Examples go through a model in batches, and rows of a batch share its padding. So what is known belongs to a batch: to
the tokens and references of all its rows, and to the model and the settings that they went through. A batch that is
known whole is not computed again, and the numbers are those of an evaluation that nothing has interrupted.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swa_jax.evaluate.examples import Example
from swa_jax.files import parse_json, sum_of_json


class Samples:
    """Records by batch; with `file`, lines that are added as batches end, and found again.

    Args:
      file: JSON lines; made when there is something to write. Lines that are damaged count as not there.
    """

    def __init__(self, file: Path | None = None):
        self._file, self._context = file, None
        self._known: dict[str, dict[int, dict[str, Any]]] = {}  # by batch and row
        if file is None or not file.exists():
            return
        for line in file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
            try:
                record = parse_json(line.encode(), file)
                self._known.setdefault(record["batch"], {})[record["row"]] = record
            except (ValueError, TypeError, KeyError):
                continue

    def under(self, context: Any) -> Samples:
        """The same file for another model, pattern or setting, all of which `context`, a JSON value, tells apart."""
        other = copy.copy(self)
        other._context = context
        return other

    def find(self, kind: str, examples: Sequence[Example], settings: Any) -> list[dict[str, Any]] | None:
        """The records of a batch, one for each example; None where one of them is missing."""
        if self._file is None:
            return None
        known = self._known.get(self._batch(kind, examples, settings), {})
        return [known[row] for row in range(len(examples))] if len(known) == len(examples) else None

    def add(self, kind: str, examples: Sequence[Example], settings: Any, records: Sequence[dict[str, Any]]) -> None:
        """Keep what is known of a batch: one record for each example, of JSON values."""
        if self._file is None:
            return
        batch = self._batch(kind, examples, settings)
        lines = [
            {"kind": kind, "batch": batch, "row": row, "prompt": sum_of_json(list(map(int, e.prompt)))[:16]} | record
            for row, (e, record) in enumerate(zip(examples, records, strict=True))
        ]
        self._known[batch] = dict(enumerate(lines))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        whole = _ends_a_line(self._file)
        with self._file.open("a", encoding="utf-8") as stream:
            # The end of a line that a kill has cut off must not be taken for the beginning of this one.
            stream.write("" if whole else "\n")
            stream.writelines(json.dumps(line) + "\n" for line in lines)

    def _batch(self, kind: str, examples: Sequence[Example], settings: Any) -> str:
        rows = [[list(map(int, e.prompt)), list(map(int, e.answer)), e.references, e.value] for e in examples]
        return sum_of_json([kind, self._context, settings, rows])[:32]


def _ends_a_line(file: Path) -> bool:
    if not file.exists() or not file.stat().st_size:
        return True
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


NO_SAMPLES = Samples()  # keeps nothing
