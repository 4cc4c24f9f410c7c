"""The other end of `line_process`, in the interpreter of `make test-servers`."""

import json
import os
import sys


def answer_lines(run):
    """Answer each line of JSON by `run` of it; what is printed besides goes where errors go."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            said = run(**json.loads(line))
        except Exception as error:  # a server's refusal is an answer, whatever its class
            said = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)
