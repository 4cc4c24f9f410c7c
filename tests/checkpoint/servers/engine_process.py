"""A process with vLLM's engine in it."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

PLUGIN = Path(__file__).parents[3] / "plugins" / "vllm"

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the process that asks it, where its tables can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "",
}


@contextlib.contextmanager
def engine_process(log, packages="", script="engine.py"):
    """A function from the arguments of `run` in a script here to what that returns. `packages`: a folder with more."""
    command = [os.environ["SERVERS_PYTHON"], str(Path(__file__).with_name(script))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(packages)}
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, env=environment, **pipes) as process:

        def ask(folder, prompts, length, batched_tokens, new_tokens=8, turn=(), **options):
            job = {"folder": str(folder), "prompts": prompts, "new_tokens": new_tokens}
            job |= {"length": length, "batched_tokens": batched_tokens, "turn": turn, **options}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, log.read_text()[-3000:]
            return json.loads(line)

        yield ask
        process.stdin.close()
