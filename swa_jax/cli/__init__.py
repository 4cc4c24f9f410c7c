"""The command line, `swa-jax <verb>`: one file a verb."""
