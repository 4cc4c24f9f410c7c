"""The command line, `swa-jax <verb>`: one file a verb."""

from swa_jax.cli.main import app, main

__all__ = ["app", "main"]
