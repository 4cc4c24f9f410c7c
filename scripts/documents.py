"""Tables in documents: what a script makes stands between two marks, and is replaced there."""

from __future__ import annotations

from pathlib import Path

from swa_jax.errors import ConfigError
from swa_jax.files import write_text


def put_between(document: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between the marks.

    Raises:
      ConfigError: the document does not have one of them, followed by the other; it stays as it was.
    """
    before, _, rest = document.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ConfigError(f"{document} has no '{begin.strip()}' followed by '{end}'")
    write_text(document, f"{before}{begin}{text}{end}{after}")
