"""The receipt of an export against a live vLLM server that reads the export, or a changed one."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from engine_process import ENVIRONMENT
from sized_models import LENGTH, write_model

from swa_jax.base.files import read_json, write_json
from swa_jax.checkpoint import check_server
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

GOLDENS = {"llama": "llama3-rope", "gemma2": "gemma2-hybrid", "gemma3": "gemma3-hybrid"}
KINDS = {"w": WINDOW, "F": FULL}


def types(letters):
    return {"layer_types": [KINDS[letter] for letter in letters]}


def rope(**changes):
    """Gemma 3's, by the layer type, with the changes to one."""
    return {"rope_parameters": changes}


GLOBAL = {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"}
LOCAL = {"rope_theta": 100.0, "rope_type": "default"}
PLAIN = {"rope_theta": 1000000.0, "rope_type": "default"}
# What is changed in config.json, and the reading that the receipt then names.
CHANGES = [
    ("llama", {}, "right"),
    ("llama", {"sliding_window": 25}, "window + 1"),
    ("llama", {"sliding_window": 23}, "window - 1"),
    ("llama", {"sliding_window": 48}, "twice the window"),
    ("llama", types("FFFFFF"), "full everywhere"),
    ("llama", types("wwwwww"), "window everywhere"),
    ("llama", types("FFwFFw"), "kinds swapped"),
    ("llama", types("FwwFww"), "kinds one layer late"),
    ("llama", types("wwwwwF"), "layer 2"),
    ("llama", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, "rope unscaled"),
    ("gemma3", {}, "right"),
    ("gemma3", rope(full_attention=LOCAL, sliding_attention=GLOBAL), "rope swapped"),
    ("gemma3", rope(full_attention=PLAIN, sliding_attention=LOCAL), "rope unscaled"),
    ("gemma3", rope(full_attention=LOCAL, sliding_attention=LOCAL), "rope local"),
    ("gemma2", {"final_logit_softcapping": None}, "without logit_softcap"),
]


@pytest.fixture(scope="session")
def exports(tmp_path_factory):
    """The folder of an export with its receipt, made when it is asked for."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            source = import_model(
                write_model(GOLDENS[name], folder / "hf", 6 if name == "llama" else None), folder / "m"
            )
            pattern = open_checkpoint(source).pattern
            if name == "llama":
                pattern = AttentionPattern(tuple(types("wwFwwF")["layer_types"]), 24)
            options = {"server": "vllm", "serve_length": LENGTH, "batched_tokens": 64, "device": "cpu"}
            made[name] = export_model(source, folder / "export", pattern=pattern, **options)
        return made[name]

    return of


def serve(folder, log, port):
    """A vLLM server; the folder has no tokenizer."""
    module = [os.environ["SERVERS_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--skip-tokenizer-init"]
    sizes = ["--max-model-len", str(LENGTH), "--max-num-batched-tokens", "64"]
    how = ["--dtype", "float32", "--enforce-eager", "--port", str(port)]
    environment = os.environ | ENVIRONMENT
    return subprocess.Popen([*module, "--model", folder, *sizes, *how], stdout=log, stderr=log, env=environment)


def wait_for(url, server, log):
    until = time.monotonic() + 180
    while server.poll() is None and time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/v1/models", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.parametrize(("name", "change", "expected"), CHANGES, ids=[f"{c[0]}-{c[2]}" for c in CHANGES])
def test_a_changed_export_is_named(name, change, expected, exports, tmp_path):
    folder, file = shutil.copytree(exports(name), tmp_path / "served"), tmp_path / "log"
    assert change.keys() <= read_json(folder / "config.json").keys()
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with file.open("w") as log, serve(folder, log, port) as server:
        try:
            wait_for(url, server, file)
            command = [sys.executable, folder / "check_server.py", "--url", url, "--json"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        finally:
            server.terminate()
    found = json.loads(done.stdout)
    code = check_server.RIGHT if expected == "right" else check_server.WRONG
    assert (found["nearest"], done.returncode) == (expected, code), found
