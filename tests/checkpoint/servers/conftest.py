"""vLLM's engine, in a process of its own that all tests of a worker share."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the process that asks it, where its tables can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "",
}


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """A function from the arguments of `run` in `engine.py` to what that returns."""
    log = tmp_path_factory.mktemp("engine") / "log"
    command = [os.environ["SERVERS_PYTHON"], str(Path(__file__).with_name("engine.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stderr=errors, env=os.environ | ENVIRONMENT, **pipes) as process,
    ):

        def ask(folder, prompts, length, batched_tokens, new_tokens=8):
            job = {"folder": str(folder), "prompts": prompts, "new_tokens": new_tokens}
            job |= {"length": length, "batched_tokens": batched_tokens}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, log.read_text()[-3000:]
            return json.loads(line)

        yield ask
        process.stdin.close()
