"""What `swa-jax` and `python -m swa_jax.cli` start."""

import sys


def main() -> None:
    """Run the verb that this process was started with."""
    try:
        from swa_jax.cli.main import app  # Ctrl-C while modules come in is no traceback either

        app()
    except KeyboardInterrupt:  # before a verb has begun: `Verbs` answers for those
        sys.exit(130)


if __name__ == "__main__":
    main()
