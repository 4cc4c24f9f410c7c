"""A process with vLLM's engine in it."""

import contextlib
from pathlib import Path

from line_process import line_process

PLUGIN = Path(__file__).parents[3] / "plugins" / "vllm"

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the process that asks it, where its tables can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # what is compiled of small functions takes seconds each time
    "PYTHONPATH": "",
}


@contextlib.contextmanager
def engine_process(log, packages="", script="engine.py"):
    """A function from the arguments of `run` in a script here to what that returns. `packages`: a folder with more."""
    with line_process(script, log, **ENVIRONMENT | {"PYTHONPATH": str(packages)}) as process:

        def ask(folder, prompts, length, batched_tokens, new_tokens=8, turn=(), **options):
            sizes = {"length": length, "batched_tokens": batched_tokens, "new_tokens": new_tokens}
            return process(folder=str(folder), prompts=prompts, turn=turn, **sizes, **options)

        yield ask
