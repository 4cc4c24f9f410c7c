"""The versions of vLLM that this plug-in was tried with. It uses what vLLM changes without notice."""

import os

TRIED = ("0.32.0",)
UNTRIED = "SWA_JAX_VLLM_UNTRIED"


def may_run() -> bool:
    """Whether this vLLM was tried, or the user wants to try it."""
    import vllm

    return vllm.__version__.split("+")[0] in TRIED or os.environ.get(UNTRIED) == "1"


def check_version() -> None:
    """Raise `RuntimeError` for a vLLM that was not tried."""
    if not may_run():
        import vllm

        raise RuntimeError(
            f"swa-jax-vllm was tried with vLLM {', '.join(TRIED)}, and this is vLLM {vllm.__version__}: install "
            f"vllm=={TRIED[-1]}, or set {UNTRIED}=1 and check the server's answers (check_server.py in the export)"
        )
