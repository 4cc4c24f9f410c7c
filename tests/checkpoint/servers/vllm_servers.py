"""Starts live vLLM servers, each in seconds: vLLM is imported once, and a server is a copy of this process.

The interpreter of `make test-servers` runs this file as it does `engine.py`.
"""

import importlib.metadata
import multiprocessing
import os
import signal
import socket
import sys
import time
import urllib.request

import vllm
import vllm.entrypoints.cli.main
import vllm.entrypoints.cli.serve
import vllm.entrypoints.launchers.app
import vllm.v1.engine.async_llm
import vllm.v1.worker.cpu_worker
from line_answers import answer_lines

MOST_SECONDS = 180  # until a server is up


def _serve(arguments: list[str], packages: str, log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["PYTHONPATH"] = packages
    sys.path[:0] = [packages] if packages else []
    sys.argv = ["vllm", "serve", *arguments]
    of, copied = importlib.metadata.version, multiprocessing.get_context("fork")
    # The build for CPUs has another name than the command asks for.
    importlib.metadata.version = lambda name: vllm.__version__ if name == "vllm" else of(name)
    multiprocessing.get_context = lambda method=None: copied  # as on GPUs; on CPUs vLLM asks for a new interpreter
    vllm.entrypoints.cli.main.main()


def run(arguments: list[str] = (), packages: str = "", log: str = "", stop: int | None = None) -> dict:
    """Starts `vllm serve ARGUMENTS`, with the modules in the folder `packages` too, or stops the process `stop`.

    Returns:
      url, process: of the server, once it answers; refused: what it said at last, if it ended before that.
    """
    if stop is not None:
        os.kill(stop, signal.SIGTERM)
        os.waitpid(stop, 0)
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if not (process := os.fork()):
        try:
            _serve([*arguments, "--port", str(port)], packages, log)
        finally:
            os._exit(1)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + MOST_SECONDS
    while not _answers(url):
        ended, _ = os.waitpid(process, os.WNOHANG)
        if ended or time.monotonic() > until:
            with open(log) as said:
                return {"refused": said.read()[-3000:]}
        time.sleep(0.1)
    return {"url": url, "process": process}


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    answer_lines(run)
