"""Training data: documents and prompts, packed into rows and mixed, as a grain iterator that resumes exactly.

`make_batches` is what training calls; docs/data.md says what it reads and how to tokenise ahead.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from swa_jax.data.sources import STANDARD_LIBRARY, SourceConfig, source_files, text_files

if TYPE_CHECKING:
    from swa_jax.data.batches import check_source, make_batches
    from swa_jax.data.documents import read_documents
    from swa_jax.data.packing import PackedPrompts, PackedText
    from swa_jax.data.stored import StoredDocuments

__all__ = [
    "STANDARD_LIBRARY",
    "PackedPrompts",
    "PackedText",
    "SourceConfig",
    "StoredDocuments",
    "check_source",
    "make_batches",
    "read_documents",
    "source_files",
    "text_files",
]

# These bring grain, JAX and the tokenizer with them: only when asked for.
_HOMES = {
    "PackedPrompts": "packing",
    "PackedText": "packing",
    "StoredDocuments": "stored",
    "check_source": "batches",
    "make_batches": "batches",
    "read_documents": "documents",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
