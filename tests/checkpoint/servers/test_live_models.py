"""SmolLM2 and `chains` in a live `vllm serve` with our plug-in: what the receipt says, and what users are answered.

Prompts of 8 windows in chunks, once more from the cache of prefixes, the next turn, whose first answer is in the cache,
and requests that are put aside because blocks run out.
"""

import os
import re
import subprocess
import sys
import urllib.request

import pytest
from engine_answers import check_answers, check_likeliest, logprobs_of
from letter_patterns import DECODE, LICENSE, SINKS, made_pattern
from live import check_named, completions
from real_models import real_model
from sized_models import LENGTH

from swa_jax import load_model
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.tokenizer import load_tokenizer

WINDOW, NEW = 32, 8
# Letters of layers, and the blocks of the server's cache: enough for a sequence of LENGTH, too few for two answers.
KINDS = {
    "decode": ("wwwF", DECODE, 6),
    "sinks": ("wwwF", SINKS, 25),
    "heads": ("wwwh", {}, 41),
    "all": ("whwF", SINKS | DECODE, 6),
}
# The least receipt that has answers.
EXPORT = """
from swa_jax.checkpoint import canary
from swa_jax.cli.__main__ import main
canary.BUDGET["cpu"] = 1.8e12
main()
"""


@pytest.mark.parametrize(
    ("name", "kind"), [*(pytest.param("smollm2", kind, marks=pytest.mark.models) for kind in KINDS), ("chains", "all")]
)
def test_a_live_server_answers_as_we_do(name, kind, serve, plugin, tmp_path):
    letters, options, blocks = KINDS[kind]
    folder = model_folder(real_model(name) if name == "smollm2" else name)
    layers = open_checkpoint(folder).config.num_hidden_layers
    pattern = made_pattern(letters, options, layers, WINDOW)
    pattern.to_json(tmp_path / "pattern.json")
    options = ["--pattern", tmp_path / "pattern.json", "--for", "vllm-plugin", "--serve-length", str(LENGTH)]
    command = [sys.executable, "-c", EXPORT, "export", folder, tmp_path / "export", *options, "--batched-tokens", "64"]
    # Programs that go token by token are slow as `make test-servers` compiles them.
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": ""}, check=True, capture_output=True)
    export = tmp_path / "export"
    model = load_model(folder, pattern=pattern, dtype="float32")
    text = list(load_tokenizer(folder).encode(LICENSE.read_text()))
    # An answer begins in one block and ends in the next.
    prompt, turn = text[:252], text[300:340]
    how = ["--num-gpu-blocks-override", str(blocks), "--enable-prompt-tokens-details"]
    with serve(export, *how, packages=plugin) as url:
        found = check_named(export, url, "right")
        first = completions(url, [prompt], NEW, prompt_logprobs=0)
        second = completions(url, [prompt], NEW)
        later = completions(url, [[*prompt, *first["tokens"][0], *turn]], NEW, logprobs=0)
        both = [text[start : start + 246] for start in (400, 700)]
        together = completions(url, both, 20)
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            put_aside = float(re.search(r"^vllm:num_preemptions_total\S* (\S+)", answer.read().decode(), re.M)[1])
    assert found["generated"]["verdict"] == 0
    said = {"logprobs": first["logprobs"], "tokens": first["tokens"], "second": second["tokens"]}
    said |= {"reused": second["reused"], "next_turn": later["tokens"], "next_reused": later["reused"]}
    check_answers(model, [prompt], said | {"next_logprobs": later["new_logprobs"]}, turn)
    check_likeliest(logprobs_of(model, both, together["tokens"]), both, together["tokens"])
    assert put_aside > 0
