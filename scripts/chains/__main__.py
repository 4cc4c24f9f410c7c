"""Models of chains: `python -m scripts.chains train` makes one, and `card` says what it can do."""

import importlib
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from swa_jax.errors import UserError

if __name__ == "__main__":
    if sys.argv[1:2] not in (["train"], ["card"]):
        sys.exit(f"{__doc__}\n`--help` after either has its options.")
    try:
        importlib.import_module(f"scripts.chains.{sys.argv[1]}").main(sys.argv[2:])
    except UserError as error:
        sys.exit(f"error: {error}")
