"""A script of this folder in the interpreter of `make test-servers`: lines of JSON go in, lines of JSON come out."""

import contextlib
import json
import os
import subprocess
from pathlib import Path


@contextlib.contextmanager
def line_process(script: str, log: Path, *arguments: str, **variables: str):
    """A function from an object to what the script answers to it; `variables` are added to its environment."""
    command = [os.environ["SERVERS_PYTHON"], str(Path(__file__).with_name(script)), *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stderr=errors, env=os.environ | variables, **pipes) as process,
    ):

        def ask(**asked):
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, log.read_text()[-3000:]
            return json.loads(line)

        yield ask
        process.stdin.close()
