"""A live server, asked by the receipt of an export, and as its users do."""

import json
import subprocess
import sys
import urllib.request

from swa_jax.checkpoint import check_server


def check_named(folder, url, expected, *options) -> dict:
    """Asserts that `check_server.py` finds the reading `expected`; what it says, as JSON."""
    command = [sys.executable, folder / "check_server.py", "--url", url, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    code = check_server.RIGHT if expected == "right" else check_server.WRONG
    assert (found.get("nearest"), done.returncode) == (expected, code), found
    return found


def completions(url, prompts, new_tokens, **options) -> dict:
    """What vLLM's server answers greedily to prompts in one request, as `run` of `engine.py` says it."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    wanted = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps({"model": model, "prompt": prompts, **wanted, **options}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)
    choices = sorted(said["choices"], key=lambda choice: choice["index"])
    told = [choice.get("prompt_logprobs") or [] for choice in choices]
    return {
        "tokens": [choice["token_ids"] for choice in choices],
        "logprobs": [
            [row[str(token)]["logprob"] for token, row in zip(prompt[1:], rows[1:], strict=False)]
            for prompt, rows in zip(prompts, told, strict=True)
        ],
        "new_logprobs": [(choice["logprobs"] or {}).get("token_logprobs") for choice in choices],
        "reused": [((said["usage"] or {}).get("prompt_tokens_details") or {}).get("cached_tokens", 0)],
    }
