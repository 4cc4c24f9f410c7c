"""Models on disk: our folder, and Hugging Face's files in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swa_jax.base.exports import lazy

if TYPE_CHECKING:
    from swa_jax.checkpoint.folder import open_checkpoint, save_model
    from swa_jax.checkpoint.hf_export import export_model
    from swa_jax.checkpoint.hf_import import import_model
    from swa_jax.checkpoint.named import load_model

__all__ = ["export_model", "import_model", "load_model", "open_checkpoint", "save_model"]

__getattr__ = lazy(
    __name__,
    {
        "load_model": "named",
        "save_model": "folder",
        "open_checkpoint": "folder",
        "import_model": "hf_import",
        "export_model": "hf_export",
    },
)
