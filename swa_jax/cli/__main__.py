"""`python -m swa_jax.cli`."""

from swa_jax.cli import main

main()
