"""The report of `swa-jax adapt` says what was found, in words that fit it."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from swa_jax.adapt.card import write_card
from swa_jax.adapt.job import STAGES, AdaptOptions, prepare
from swa_jax.adapt.report import _candidate, _pattern_words, _signed, summary, verdict, write_report
from swa_jax.adapt.search import Point, _title
from swa_jax.adapt.stages import StageResults
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window


def row(figure, difference, task="text"):
    return {
        "task": task,
        "figure": figure,
        "n": 8,
        "original": [0.5, 0.4, 0.6],
        "adapted": [0.5, 0.4, 0.6],
        "difference": difference,
    }


def candidate(pattern, lost, share):
    return {
        "layout": "nll",
        "sliding_window": pattern.sliding_window,
        "num_sink_tokens": 0,
        "full_attention_decode": False,
        "full_layers": list(pattern.full_layers),
        "lost": lost,
        "right": 0.9,
        "full_head_counts": list(pattern.full_head_counts),
        "bytes": int(share * 2**20),
        "share": share,
        "pattern": json.loads(pattern.to_json()),
    }


def figures(first, token):
    return {
        "first_token_seconds": first,
        "token_seconds": token,
        "request_seconds": first + 31 * token,
        "tokens_per_second": 1.0,
        "kv_cache_bytes": 2**20,
        "token_seconds_all": [token] * 5,
    }


def results_of(folder, *, compared, adapted_speed=(0.5, 0.01), tune=None):
    patterns = [AttentionPattern.from_full_layers([layer], 8, 16) for layer in (2, 5)]
    found = {
        "search": {
            "candidates": [candidate(patterns[0], 0.25, 0.2), candidate(patterns[1], -0.01, 0.3)],
            "best": 1,
            "layer_scores": [[0.1, None, None]] * 8,
            "left_out": ["window 9: takes at least 90.0%"],
            "doubts": ["Plain text: no difference beyond chance"],
        },
        "adapted": {"compared": compared, "windows": {"needles-1": {"losses": [1.0], "right": [0.0, 0.5]}}},
        "tune": tune or {},
        "efficiency": {
            "prompt_tokens": 250,
            "new_tokens": 32,
            "figures": {"original": figures(1.0, 0.02), "adapted": figures(*adapted_speed)},
        },
        "export": {"describe": ["vllm 0.33.0 runs it as X.\nStart it with: y"], "command": "vllm serve <out>"},
    }
    return StageResults(folder, print, found, dict.fromkeys(STAGES, 10.0) | {"canary": 0.0})


@pytest.fixture
def job(tmp_path):
    settings = AdaptOptions("recall", tmp_path, 0.4, "vllm", length=256, window=(16,), examples=4, choose_by=2)
    return prepare(settings)


def report_of(job, **changes):
    changes.setdefault("compared", [row("losses", [0.1, -0.1, 0.3])])
    results = results_of(job.folder, **changes)
    return write_report(job, results).read_text(), summary(job, results, Path("r.html"))


def test_no_loss_beyond_chance_and_the_requests_that_earn_it_back(job):
    page, text = report_of(job)
    assert "On every task it does as well as the original, as far as this many examples can tell." in page
    # 60 seconds, and 0.5 + 31 * 0.01 saved by a request
    assert "after 75 such requests" in page
    assert "vllm serve &lt;out&gt;" in page
    assert "Start it with: vllm serve <out>" in text
    assert "Layer 5 of 8 keeps full attention; the others see a window of 16 tokens." in text
    assert "takes 30.0% of what full attention takes, counted in vLLM; the budget was 40%." in text
    assert "window 9: takes at least 90.0%" in page
    assert "<li>Plain text: no difference beyond chance</li>" in page
    assert "fine-tuned" not in page
    assert page.count(">Task<") == 2
    assert "The receipt to check a server by (canary.json) is not finished." in page
    assert "check_server.py" not in page + text, "it is not there yet"


@pytest.mark.parametrize(("given", "base"), [("owner/model", "owner/model"), ("folder/model.gguf", None)])
def test_the_card_of_an_export_says_what_it_is_and_what_it_lost(job, tmp_path, monkeypatch, given, base):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder/model.gguf").touch()
    job = dataclasses.replace(job, settings=dataclasses.replace(job.settings, model=given))
    job.export_folder.mkdir(parents=True)
    (job.export_folder / "check_server.py").touch()
    compared = [row("right", [-0.2, -0.3, -0.1], "needles-1"), row("losses", [0.3, 0.1, 0.5])]
    write_card(job, results_of(job.folder, compared=compared, tune={"steps": 7}))
    _, head, card = (job.export_folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {"tags": ["sliding-window-attention"]} | ({"base_model": base} if base else {})
    assert card.startswith(f"\n# {base or 'model.gguf'} with sliding windows\n\nLayer 5 of 8 keeps full attention;")
    assert f"The weights are those of {base or 'model.gguf'}, fine-tuned by LoRA for 7 steps. Its license holds" in card
    serve, check = card.split("```sh\n")[1].splitlines()[:2]
    assert serve.startswith("vllm serve . --max-model-len 256 ")
    assert check == "python check_server.py --url http://localhost:8000"
    assert "| One number hidden, answers right | 50 % [40, 60] | 50 % [40, 60] | −20 " in card
    assert "| Plain text, loss, nats a token | 0.500 [0.400, 0.600] | 0.500 [0.400, 0.600] | +0.300 " in card
    assert card.count("| 8 |") == 2
    assert "| vLLM, 256 tokens, 2 bytes a number |" in card
    assert f"```sh\nswa-jax adapt {given} {tmp_path} --kv-budget 0.4 --for vllm" in card


def test_what_is_worse_is_said_first(job):
    compared = [row("right", [-0.2, -0.3, -0.1], "needles-1"), row("losses", [-0.2, -0.3, -0.1])]
    page, text = report_of(job, compared=compared, adapted_speed=(1.5, 0.02), tune={"steps": 7, "losses": [1.0]})
    assert "It does worse than the original in: one number hidden. What may help: " in text
    assert "a larger --kv-budget; training under the pattern (--tune); sink tokens (vLLM" in text
    assert "On this device the adapted model is not faster" in page
    assert "such requests" not in page
    assert "It was fine-tuned by LoRA for 7 steps." in page
    assert "With the same window in every layer and no full layer, 25 % are right." in page


def test_verdict_memory_and_serving_come_first(job):
    script = job.export_folder / "check_server.py"
    script.parent.mkdir(parents=True)
    script.touch()
    one = [row("right", [0.0, -0.1, 0.1], "needles-1"), row("losses", [0.3, 0.1, 0.5], "needles-1")]
    others = [row("right", [0.0, -0.1, 0.1], "needles-4"), row("losses", [0, 0, 0])]
    page, text = report_of(job, compared=one + others)
    first = ["Verdict", "Memory: the key/value cache of one sequence", "How to serve it", "Quality in detail"]
    assert re.findall("<h2>(.*?)</h2>", page)[:4] == first
    verdicts = page[page.index("Verdict</h2>") : page.index("Memory: the")]
    assert re.findall(r'<td( class="bad")? data-title="Verdict"><div>(.*?)</div>', verdicts) == [
        (' class="bad"', "worse"),  # by its loss, though as many answers are right
        ("", "no clear difference"),
        ("", "no clear difference"),
    ]
    command = f"python {script} --url http://localhost:8000"
    assert f"Check it with: {command}" in text
    assert f"<code>{command}</code>" in page


def test_a_candidate_without_full_layers_is_not_said_to_have_chosen_them():
    none = candidate(AttentionPattern.from_full_layers([], 8, 16), 0.1, 0.2)
    assert list(_candidate(none).items())[:2] == [("Full layers", "none"), ("How they were chosen", "")]
    assert _title(Point("nll-gradient", Window(16)), some_full=False) == "window 16, no full layers"
    assert _title(Point("nll-gradient", Window(16))) == "window 16, full layers chosen by the answers' loss"


@pytest.mark.parametrize(
    ("figure", "difference", "words"),
    [
        ("right", [0.1, 0.05, 0.2], "better"),
        ("right", [-0.1, -0.2, -0.05], "worse"),
        ("losses", [0.1, 0.05, 0.2], "worse"),
        ("losses", [-0.1, -0.2, -0.05], "better"),
        ("losses", [0.1, -0.05, 0.2], "no clear difference"),
        ("losses", [0.1, None, None], "no clear difference"),
        ("right", [0.0, 0.0, 0.1], "no clear difference"),
    ],
)
def test_verdicts(figure, difference, words):
    assert verdict(row(figure, difference))[0] == words


def test_patterns_in_words():
    full = AttentionPattern.from_full_layers([1, 3], 4, 16, num_sink_tokens=4, full_attention_decode=True)
    assert _pattern_words(full) == (
        "Layers 1, 3 of 4 keep full attention; the others see a window of 16 tokens, and the first 4 tokens. Tokens of "
        "an answer see everything."
    )
    none = AttentionPattern.from_full_layers([], 4, 16)
    assert _pattern_words(none) == "All 4 layers see a window of 16 tokens."
    kinds = ("full_attention", "head_hybrid_attention", "sliding_attention")
    heads = AttentionPattern(kinds, 16, full_kv_heads=((), (0, 2), ()))
    assert _pattern_words(heads) == (
        "1 of 3 layers and 2 single KV heads keep full attention; the rest sees a window of 16 tokens."
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0.0004, "0.000"), (-0.0004, "0.000"), (0.25, "+0.250"), (-0.25, "\N{MINUS SIGN}0.250")]
)
def test_differences_have_a_sign_unless_they_are_nothing(value, text):
    assert _signed(value) == text
