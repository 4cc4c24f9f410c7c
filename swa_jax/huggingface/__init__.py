"""Hugging Face models: reading their configuration and weights, and writing them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swa_jax.huggingface.config import hf_config, model_config

if TYPE_CHECKING:
    from swa_jax.huggingface.export import export_model
    from swa_jax.huggingface.importing import import_model

__all__ = ["export_model", "hf_config", "import_model", "model_config"]


def __getattr__(name: str) -> Any:
    # `swa_jax.checkpoint` stands between the two halves of this package, so these two come when asked for.
    if name == "import_model":
        from swa_jax.huggingface.importing import import_model

        return import_model
    if name == "export_model":
        from swa_jax.huggingface.export import export_model

        return export_model
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
