"""`python -m swa_jax.cli`."""

from swa_jax.cli.main import main

main()
