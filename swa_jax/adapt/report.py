"""What `swa-jax adapt` found: `report.html`, one file that links to nothing, and the summary for the terminal."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from swa_jax.adapt.job import STAGES, Job, command_line
from swa_jax.adapt.plan import duration
from swa_jax.adapt.search import BY_HEADS, BY_LOSS, BY_PLACE, NONE
from swa_jax.adapt.stages import Results
from swa_jax.adapt.tasks import Task
from swa_jax.checkpoint.servers import SERVERS
from swa_jax.evaluate.efficiency import break_even
from swa_jax.files import write_text
from swa_jax.model.cache import cache_bytes
from swa_jax.model.layer_types import FULL, HYBRID
from swa_jax.model.pattern import AttentionPattern
from swa_jax.report import html, svg
from swa_jax.report.numbers import MEGABYTE, with_interval

_CHOSEN_BY = {
    BY_LOSS: "by what each is worth to the answers (NLL)",
    BY_HEADS: "KV heads, by what each is worth to the answers (NLL)",
    BY_PLACE[0]: "by place: at equal distances",
    BY_PLACE[1]: "by place: start, middle and end",
    NONE: "none",
}


def write_report(job: Job, results: Results) -> Path:
    """Write `report.html`, whole or not at all; returns its path."""
    found = results.found
    row, pattern = results.best, results.pattern
    title = f"{job.source.name}, adapted" + (f" for {_called(job.settings.server)}" if job.settings.server else "")
    body = [
        html.heading(title, 1),
        html.paragraph(" ".join(_sentences(job, results)), "lead"),
        html.cards(_cards(job, results)),
        *_chosen(pattern, row),
        *_quality(job.tasks.measuring, found["adapted"], found["tune"]),
        *_memory(job, found["efficiency"], pattern, row),
        *_speed(found["efficiency"], sum(results.seconds.values())),
        *_tried(job, found["search"]),
        *_serving(job, found["export"], found.get("canary")),
        *_origin(job, results),
    ]
    file = job.settings.out / "report.html"
    write_text(file, html.page(title, body))
    return file


def summary(job: Job, results: Results, report: Path) -> str:
    """A few lines for the terminal."""
    lines = _sentences(job, results)
    if command := results.found["export"].get("command"):
        lines.append(f"Start it with: {command}")
    return "\n".join([*lines, f"Pattern: {job.settings.out / 'pattern.json'}", f"Report: {report}"])


# ---- in words ----


def _sentences(job: Job, results: Results) -> list[str]:
    row, rows = results.best, results.found["adapted"]["compared"]
    worse = [one for one in rows if verdict(one)[1] == "bad"]
    names = {task.name: task.title.lower() for task in job.tasks.measuring}
    quality = (
        "On no task can a loss of quality be told from chance."
        if not worse
        else f"It does worse than the original in: {', '.join(dict.fromkeys(names[one['task']] for one in worse))}. "
        f"{_remedies(job)}"
    )
    return [
        _pattern_words(results.pattern),
        f"The cache of a sequence of {job.memory.length} tokens takes {row['share']:.1%} of what full attention takes, "
        f"counted {_where(job)}; the budget was {job.settings.kv_budget:.0%}. {job.memory.steps}".rstrip(),
        quality,
    ]


def _remedies(job: Job) -> str:
    """What may lose less than the pattern that was found."""
    settings = job.settings
    ways = ["a larger --kv-budget"]
    if not settings.tune_steps:
        ways.append("training under the pattern (--tune)")
    if settings.server and any("num_sink_tokens" in line for line in job.space.left_out):
        ways.append(f"sink tokens, which {_called(settings.server)} does not run (leave out --for)")
    return f"What may keep more: {'; '.join(ways)}."


def _pattern_words(pattern: AttentionPattern) -> str:
    layers, full = pattern.num_layers, pattern.full_layers
    sinks = f", and the first {pattern.num_sink_tokens} tokens" if pattern.num_sink_tokens else ""
    sees = f"a window of {pattern.sliding_window} tokens{sinks}"
    decode = " Tokens of an answer see everything." if pattern.full_attention_decode else ""
    if heads := sum(pattern.full_head_counts):
        also = f"{len(full)} of {layers} layers and " if full else ""
        return f"{also}{heads} single KV heads keep full attention; the rest sees {sees}.{decode}"
    if not full:
        return f"All {layers} layers see {sees}.{decode}"
    which = ", ".join(map(str, full))
    noun = "Layer" if len(full) == 1 else "Layers"
    verb = "keeps" if len(full) == 1 else "keep"
    return f"{noun} {which} of {layers} {verb} full attention; the others see {sees}.{decode}"


def verdict(row: Mapping[str, Any]) -> tuple[str, str]:
    """What a paired difference says, and "good", "bad" or "" for it."""
    mean, low, high = row["difference"]
    if low is None or high is None or low <= 0 <= high:
        return "no difference beyond chance", ""
    better = mean > 0 if row["figure"] == "right" else mean < 0
    return ("better", "good") if better else ("worse", "bad")


def _cards(job: Job, results: Results) -> list[tuple[str, str]]:
    figures = results.found["efficiency"]["figures"]
    before, after = figures["original"], figures["adapted"]
    right = [row for row in results.found["adapted"]["compared"] if row["figure"] == "right"]
    cards = [(f"{results.best['share']:.1%}", f"of full attention's cache, {_where(job)}")]
    if right:
        shares = [sum(row[who][0] for row in right) / len(right) for who in ("adapted", "original")]
        cards.append((f"{shares[0]:.0%}", f"of answers right; the original {shares[1]:.0%}"))
    for key, about in (("first_token_seconds", "to the first token"), ("token_seconds", "for each further token")):
        cards.append((_milliseconds(after[key]), f"{about}; the original {_milliseconds(before[key])}"))
    return cards


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


# ---- the sections ----


def _chosen(pattern: AttentionPattern, row: Mapping[str, Any]) -> list[str]:
    kinds = [{FULL: "full", HYBRID: "heads"}.get(kind, "window") for kind in pattern.layer_types]
    why = {
        BY_LOSS: "With all layers windowed, single layers were made full and scored by how likely the right answers "
        "then are. The best one stayed full, and the others were scored again beside it, until as many were chosen as "
        "the budget allows.",
        BY_HEADS: "With all KV heads windowed, single ones were made full and scored by how likely the right answers "
        "then are. The best ones stayed full, and others were scored again beside them.",
        NONE: "No full layer was worth its memory: larger windows in every layer did better.",
    }.get(row["layout"], "Full layers at these places did better than those that the answers' loss names.")
    return [
        html.heading("What was chosen, and why"),
        html.layer_row(kinds),
        html.paragraph(f"Filled: full attention. {_framed(kinds)}The others: a window.", "soft"),
        html.paragraph(
            f"{why} Then window, sink tokens and decode mode were varied in turn, each candidate with as many full "
            "layers as fit. The chosen one has the smallest loss against the original on the examples to choose by: "
            f"{_signed(row['lost'])} nats a token, the mean over the tasks. Below 0 it does better than the original."
        ),
    ]


def _framed(kinds: Sequence[str]) -> str:
    return "Thick frame: single heads. " if "heads" in kinds else ""


def _trained_on(tune: Mapping[str, Any]) -> str:
    replies = tune.get("replies")
    return f", on {replies} replies of the original model" if replies else ""


def _quality(tasks: Sequence[Task], adapted: Mapping[str, Any], tune: Mapping[str, Any]) -> list[str]:
    rows, windows = adapted["compared"], adapted["windows"]
    titles = {task.name: task.title for task in tasks}
    cells, kinds = [], []
    for row in rows:
        percent = row["figure"] == "right"
        words, kind = verdict(row)
        kinds.append(kind)
        figure = "answers right" if percent else "loss, nats a token"
        cells.append(
            [
                f"{titles[row['task']]}: {figure}",
                str(row["n"]),
                *(_interval(row[who], percent) for who in ("original", "adapted")),
                _interval(row["difference"], percent, signed=True),
                words,
            ]
        )
    tuned = f" It was fine-tuned by LoRA for {tune['steps']} steps{_trained_on(tune)}." if tune else ""
    return [
        html.heading("Quality"),
        html.paragraph(
            f"Both models on the same examples, which nothing was chosen by.{tuned} In brackets: 95 % intervals. The "
            "difference is paired, example by example, so that its interval is narrower than those beside it."
        ),
        html.table(["Task", "Examples", "Original", "Adapted", "Difference", "Verdict"], cells, kinds=kinds),
        html.bullets([f"{task.title}: {task.about}{_plain(windows.get(task.name))}" for task in tasks]),
    ]


def _plain(scores: Mapping[str, Sequence[float]] | None) -> str:
    """How many answers of a task are right where every layer has the same window, and nothing else."""
    if scores is None:
        return ""
    right = sum(scores["right"]) / len(scores["right"])
    return f" With the chosen window in every layer, {100 * right:.0f} % are right."


def _interval(estimate: Sequence[float | None], percent: bool, signed: bool = False) -> str:
    def form(value: float) -> str:
        if percent:
            return _signed(100 * value, 0) if signed else f"{100 * value:.0f}"
        return _signed(value) if signed else f"{value:.3f}"

    text = with_interval(estimate[0], estimate[1:], form, " %" if percent and not signed else "")
    return text.replace("\n", " ")


def _signed(value: float, digits: int = 3) -> str:
    """A difference, with its sign unless it is rounded to 0."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def _memory(job: Job, efficiency: Mapping[str, Any], pattern: AttentionPattern, row: Mapping[str, Any]) -> list[str]:
    memory, figures = job.memory, efficiency["figures"]
    full = AttentionPattern((FULL,) * pattern.num_layers)
    counted: list[tuple[str, float, float]] = [
        (f"{_where(job)}, {memory.length} tokens, 2 bytes a number", memory.full, row["bytes"])
    ]
    if memory.server is not None:
        before, after = (cache_bytes(memory.config, one, 1, memory.length, 2) for one in (full, pattern))
        counted.append((f"here, {memory.length} tokens, 2 bytes a number", before, after))
    tokens = efficiency["prompt_tokens"] + efficiency["new_tokens"]
    before, after = (figures[name]["kv_cache_bytes"] for name in ("original", "adapted"))
    about = f"here, allocated for a request of {tokens} tokens, {job.dtype}; the original in place of full attention"
    counted.append((about, before, after))
    cells = [
        [where, f"{before / MEGABYTE:.2f} MiB", f"{after / MEGABYTE:.2f} MiB", f"{after / before:.1%}"]
        for where, before, after in counted
    ]
    note = []
    if memory.server is not None and memory.batched_tokens is not None:
        name = f"{_called(memory.server)} {SERVERS[memory.server].version}"
        about = (
            f"{name} hands out memory in blocks, to groups of layers of one size, and windowed layers also hold the "
            f"{memory.batched_tokens} tokens of prompts that are read at once. So a pattern saves less there than "
            f"here. {memory.steps}"
        )
        note.append(html.paragraph(about))
    return [
        html.heading("Memory: the key/value cache of one sequence"),
        html.table(["Where", "Full attention", "Adapted", "Share"], cells),
        *note,
    ]


def _called(server: str) -> str:
    """A server as it writes itself."""
    return {"vllm": "vLLM", "sglang": "SGLang"}.get(server, server)


def _where(job: Job) -> str:
    """Where the cache is counted."""
    return "here" if job.settings.server is None else f"in {_called(job.settings.server)}"


def _speed(efficiency: Mapping[str, Any], cost: float) -> list[str]:
    before, after = (efficiency["figures"][name] for name in ("original", "adapted"))
    kinds = (
        ("time to the first token", "first_token_seconds"),
        ("time for each further token", "token_seconds"),
        ("time for the whole request", "request_seconds"),
    )
    cells = [
        [name, _milliseconds(before[key]), _milliseconds(after[key]), f"{before[key] / after[key]:.2f} times"]
        for name, key in kinds
    ]
    requests = break_even(cost, before, after)
    if requests is None:
        verdict = "On this device the adapted model is not faster, so that the adaptation pays by its memory alone."
    else:
        verdict = (
            f"The adaptation took {duration(cost)} of this machine. It is earned back in time after {requests} such "
            "requests; its memory is saved from the first."
        )
    return [
        html.heading("Speed on this device"),
        html.paragraph(
            f"On {_device()}: a request of {efficiency['prompt_tokens']} tokens and an answer of "
            f"{efficiency['new_tokens']}, both models in turn in one run, medians of "
            f"{len(before['token_seconds_all'])} rounds. A server on another device has other figures."
        ),
        html.table(["", "Original", "Adapted", "Faster"], cells),
        html.paragraph(verdict),
    ]


def _tried(job: Job, search: Mapping[str, Any]) -> list[str]:
    candidates, chosen = search["candidates"], search["best"]
    marks = [
        svg.Mark(100 * row["share"], row["lost"], "chosen" if number == chosen else _name(row), number == chosen)
        for number, row in enumerate(candidates)
    ]
    marks.append(svg.Mark(100.0, 0.0, "original", reference=True))
    drawing = svg.scatter(
        marks,
        xlabel=f"KV cache {_where(job)}, % of full attention",
        ylabel="loss against the original (nats a token)",
        limit=100 * job.settings.kv_budget,
    )
    order = sorted(range(len(candidates)), key=lambda number: (number != chosen, candidates[number]["lost"]))
    pieces = [
        html.heading("What was tried"),
        html.figure(drawing, "Lower is better, and so is further left."),
        html.table(
            ["Full layers", "which", "Window", "Sink tokens", "Full decode", "Right", "Loss", "MiB", "Cache"],
            [_candidate_cells(candidates[number]) for number in order],
            text_columns=2,
            chosen=0,
        ),
    ]
    if search["layer_scores"]:
        filled = candidates[chosen]["full_layers"]
        drawing = svg.bars(search["layer_scores"], filled, xlabel="layer", ylabel="worth (nats a token)")
        pieces.append(
            html.figure(
                drawing,
                "What making a layer full does for the answers, beside those found before it, with 95 % intervals. "
                "Layers without a bar gain little by a gradient, and were not tried.",
            )
        )
    if search["left_out"]:
        pieces += [
            html.paragraph("Left out, as the server or the budget does not allow it:"),
            html.bullets(search["left_out"]),
        ]
    if search["doubts"]:
        pieces += [html.paragraph("What the tasks do not tell:"), html.bullets(search["doubts"])]
    return pieces


def _name(row: Mapping[str, Any]) -> str:
    return f"window {row['sliding_window']}, {row['layout']}"


def _candidate_cells(row: Mapping[str, Any]) -> list[str]:
    heads = sum(row["full_head_counts"])
    which = ", ".join(map(str, row["full_layers"])) or "none"
    return [
        _CHOSEN_BY[row["layout"] if row["full_layers"] or heads else NONE],
        which + (f" and {heads} heads" if heads else ""),
        str(row["sliding_window"]),
        str(row["num_sink_tokens"]),
        "yes" if row["full_attention_decode"] else "no",
        "" if row["right"] is None else f"{row['right']:.0%}",
        _signed(row["lost"]),
        f"{row['bytes'] / MEGABYTE:.2f}",
        f"{row['share']:.1%}",
    ]


def _serving(job: Job, export: Mapping[str, Any], canary: Mapping[str, Any] | None) -> list[str]:
    out = job.settings.out
    model = out / "tuned" / "model" if job.settings.tune_steps else job.source.folder
    pattern = shlex.quote(str(out / "pattern.json"))
    here = [
        f'swa-jax generate {shlex.quote(str(model))} "Once upon a time" --pattern {pattern}',
        f"swa-jax pattern {pattern} --model {shlex.quote(str(model))} --length {job.memory.length}",
    ]
    pieces = [html.heading("How to run it")]
    if export:
        pieces += [
            html.paragraph(line) for text in export["describe"] for line in text.splitlines() if "Start it" not in line
        ]
        if export["command"]:
            pieces.append(html.code([export["command"]]))
        else:
            folder = str(job.export_folder)
            lines = ["import transformers", f"model = transformers.AutoModelForCausalLM.from_pretrained({folder!r})"]
            pieces.append(html.code(lines))
        pieces.append(html.paragraph(_receipt(job, canary)))
    return [*pieces, html.paragraph("With this library:"), html.code(here)]


def _receipt(job: Job, canary: Mapping[str, Any] | None) -> str:
    """What is known of the export's receipt; None: it is not made yet."""
    if canary is None:
        return "The receipt of the export (canary.json) is still being made. If it is not there, run the command again."
    if not job.settings.canary:
        return "The export has no receipt (--no-canary)."
    return str(canary["describe"])


def _origin(job: Job, results: Results) -> list[str]:
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "numpy")]
    seconds = results.seconds
    stages = [[name, f"{seconds[name]:.1f} s"] for name in STAGES if name in seconds]
    return [
        html.heading("How this came about"),
        html.table(["Stage", "Time"], [*stages, ["together", f"{sum(seconds.values()):.1f} s"]]),
        html.paragraph(f"{_program()}; {', '.join(versions)}; {_device()}; seed {job.settings.seed}.", "soft"),
        html.code([command_line(job.settings)]),
    ]


def _device() -> str:
    device = jax.devices()[0]
    return (
        f"{len(jax.devices())} x {device.device_kind}" if device.platform != "cpu" else f"a CPU ({platform.machine()})"
    )


def _program() -> str:
    """This library's version, and the revision where it runs from a clone."""
    try:
        version = f"swa-jax {importlib.metadata.version('swa-jax')}"
    except importlib.metadata.PackageNotFoundError:
        version = "swa-jax from its sources"
    here = Path(__file__).parents[2]
    if not (here / ".git").exists():
        return version
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version}, revision {found.stdout.strip()}"
