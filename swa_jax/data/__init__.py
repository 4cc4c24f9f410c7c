"""Training data: documents and prompts, packed into rows and mixed, as a grain iterator that resumes exactly.

`make_batches` is what training calls; docs/data.md says what it reads and how to tokenise ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.data.sources import STANDARD_LIBRARY, SourceConfig, source_files, text_files
from swa_jax.exports import lazy

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
__getattr__ = lazy(
    __name__,
    {
        "PackedPrompts": "packing",
        "PackedText": "packing",
        "StoredDocuments": "stored",
        "check_source": "batches",
        "make_batches": "batches",
        "read_documents": "documents",
    },
)
