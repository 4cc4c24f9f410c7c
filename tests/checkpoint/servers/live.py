"""A live server, asked by the receipt of an export."""

import json
import subprocess
import sys

from swa_jax.checkpoint import check_server


def check_named(folder, url, expected, *options) -> dict:
    """Asserts that `check_server.py` finds the reading `expected`; what it says, as JSON."""
    command = [sys.executable, folder / "check_server.py", "--url", url, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    code = check_server.RIGHT if expected == "right" else check_server.WRONG
    assert (found.get("nearest"), done.returncode) == (expected, code), found
    return found
