"""What `swa-jax adapt` found: `report.html`, one file that links to nothing, and the summary for the terminal."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from swa_jax.adapt.estimate import duration
from swa_jax.adapt.job import STAGES, Adaptation, command_line
from swa_jax.adapt.search import BY_HEADS, BY_LOSS, HOW, NONE
from swa_jax.adapt.stages import StageResults
from swa_jax.adapt.tasks import EvalTask
from swa_jax.base.files import write_text
from swa_jax.checkpoint.canary import SCRIPT
from swa_jax.checkpoint.servers import SERVERS
from swa_jax.evaluate.efficiency import break_even
from swa_jax.model.cache import cache_bytes
from swa_jax.model.layer_types import FULL, HYBRID
from swa_jax.model.pattern import AttentionPattern
from swa_jax.report import html
from swa_jax.report.layer_charts import layer_scores_chart
from swa_jax.report.memory_charts import candidates_chart
from swa_jax.report.numbers import MEGABYTE, with_interval

FIGURES = {"right": "answers right", "losses": "loss, nats a token"}


def write_report(job: Adaptation, results: StageResults) -> Path:
    """Write `report.html`, whole or not at all; returns its path."""
    found = results.found
    row, pattern = results.best, results.pattern
    title = f"{job.source.name}, adapted" + (f" for {_called(job.settings.server)}" if job.settings.server else "")
    body = [
        html.heading(title, 1),
        html.paragraph(" ".join(sentences(job, results)), "lead"),
        html.cards(_cards(job, results)),
        *_verdicts(job.tasks.measuring, found["adapted"]["compared"]),
        *_memory(job, results),
        *_serving(job, found["export"], found.get("canary")),
        *_quality(job, results),
        *_chosen(pattern, row),
        *_speed(found["efficiency"], sum(results.seconds.values())),
        *_tried(job, found["search"]),
        *_origin(job, results),
    ]
    file = job.settings.out / "report.html"
    write_text(file, html.page(title, body))
    return file


def summary(job: Adaptation, results: StageResults, report: Path) -> str:
    """A few lines for the terminal."""
    lines = sentences(job, results)
    if command := results.found["export"].get("command"):
        lines += [
            f"Start it with: {command}",
            *(f"Check it with: {check}" for check in check_command(job, job.export_folder)),
        ]
    return "\n".join([*lines, f"Pattern: {job.settings.out / 'pattern.json'}", f"Report: {report}"])


# ---- in words ----


def sentences(job: Adaptation, results: StageResults) -> list[str]:
    row, rows = results.best, results.found["adapted"]["compared"]
    worse = [one for one in rows if verdict(one)[1] == "bad"]
    names = {task.name: task.title.lower() for task in job.tasks.measuring}
    quality = (
        "On every task it does as well as the original, as far as this many examples can tell."
        if not worse
        else f"It does worse than the original in: {', '.join(dict.fromkeys(names[one['task']] for one in worse))}. "
        f"{_remedies(job)}"
    )
    return [
        _pattern_words(results.pattern),
        f"The cache of a sequence of {job.memory.length} tokens takes {row['share']:.1%} of what full attention takes, "
        f"counted in {_place(job)}; the budget was {job.settings.kv_budget:.0%}. {job.memory.steps}".rstrip(),
        quality,
    ]


def _remedies(job: Adaptation) -> str:
    """What may lose less than the pattern that was found."""
    settings = job.settings
    ways = ["a larger --kv-budget"]
    if not settings.tune:
        ways.append("training under the pattern (--tune)")
    if settings.server and any("num_sink_tokens" in line for line in job.space.left_out):
        ways.append(f"sink tokens ({_called(settings.server)} cannot run them, --for vllm-plugin can)")
    return f"What may help: {'; '.join(ways)}."


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
        return "no clear difference", ""
    better = mean > 0 if row["figure"] == "right" else mean < 0
    return ("better", "good") if better else ("worse", "bad")


def _cards(job: Adaptation, results: StageResults) -> list[tuple[str, str]]:
    figures = results.found["efficiency"]["figures"]
    before, after = figures["original"], figures["adapted"]
    right = [row for row in results.found["adapted"]["compared"] if row["figure"] == "right"]
    cards = [(f"{results.best['share']:.1%}", f"of full attention's cache, in {_place(job)}")]
    if right:
        shares = [sum(row[who][0] for row in right) / len(right) for who in ("adapted", "original")]
        cards.append((f"{shares[0]:.0%}", f"of answers right; the original {shares[1]:.0%}"))
    for key, about in (("first_token_seconds", "to the first token"), ("token_seconds", "for each further token")):
        cards.append((_milliseconds(after[key]), f"{about}; the original {_milliseconds(before[key])}"))
    return cards


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


# ---- the sections ----


def _verdicts(tasks: Sequence[EvalTask], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each task: the figure with the worst verdict; right answers before the loss where both say the same."""
    titles = {task.name: task.title for task in tasks}
    cells, kinds = [], []
    for name, figures in itertools.groupby(rows, lambda row: row["task"]):
        row = max(figures, key=lambda row: ("good", "", "bad").index(verdict(row)[1]))
        words, kind = verdict(row)
        values = (_interval(row[who][:1], row["figure"] == "right") for who in ("original", "adapted"))
        cells.append([f"{titles[name]}\n{FIGURES[row['figure']]}", words, *values])
        kinds.append(kind)
    return [
        html.heading("Verdict"),
        html.table(["Task", "Verdict", "Original", "Adapted"], cells, text_columns=2, kinds=kinds),
    ]


def _chosen(pattern: AttentionPattern, row: Mapping[str, Any]) -> list[str]:
    kinds = [{FULL: "full", HYBRID: "heads"}.get(kind, "window") for kind in pattern.layer_types]
    why = {
        BY_LOSS: "The full layers were found one by one. With a window in every layer, each layer in turn was given "
        "full attention, and the loss on the right answers was measured. The layer that lowered it most stayed full. "
        "The others were measured again beside it, until the budget was used up.",
        BY_HEADS: "The full heads were found one by one. With a window in every KV head, single heads were given full "
        "attention, and the loss on the right answers was measured. Those that lowered it most stayed full, and others "
        "were measured again beside them.",
        NONE: "No full layer was worth its memory: windows in every layer did better.",
    }.get(_layout(row), "Full layers at these places did better than those that were chosen by the answers' loss.")
    framed = "Thick frame: single heads. " if "heads" in kinds else ""
    return [
        html.heading("What was chosen, and why"),
        html.layer_row(kinds),
        html.paragraph(f"Filled: full attention. {framed}The others: a window.", "soft"),
        html.paragraph(
            f"{why} Then other windows, sink tokens and decode modes were tried in turn, each with as many full "
            "layers as fit into the budget. Of all candidates, this one has the smallest loss on examples that were "
            f"used for choosing only: {_signed(row['lost'])} nats a token against the original, the mean over the "
            "tasks. Below 0 it does better than the original."
        ),
    ]


def quality_cells(job: Adaptation, results: StageResults) -> list[list[str]]:
    """A row for each figure of each task: task, verdict, original, adapted, difference, examples."""
    titles, cells = {task.name: task.title for task in job.tasks.measuring}, []
    for row in results.found["adapted"]["compared"]:
        percent = row["figure"] == "right"
        figures = [_interval(row[who], percent) for who in ("original", "adapted")]
        figures += [_interval(row["difference"], percent, signed=True), str(row["n"])]
        cells.append([f"{titles[row['task']]}\n{FIGURES[row['figure']]}", verdict(row)[0], *figures])
    return cells


def tuned(tune: Mapping[str, Any]) -> str:
    """What was trained, to stand after "It was" or "were"; nothing where nothing was."""
    drawn = f", on {tune['replies']} replies of the original model" if tune.get("replies") else ""
    return f"fine-tuned by LoRA for {tune['steps']} steps{drawn}" if tune else ""


def _quality(job: Adaptation, results: StageResults) -> list[str]:
    adapted, words = results.found["adapted"], tuned(results.found["tune"])
    it_was = f" It was {words}." if words else ""
    return [
        html.heading("Quality in detail"),
        html.paragraph(
            f"Both models answered the same examples. The search did not use these.{it_was} In brackets: 95 % "
            "intervals. The difference is taken example by example, so its interval is narrower than the two beside "
            "it. “No clear difference” means that this interval contains 0."
        ),
        html.table(
            ["Task", "Verdict", "Original", "Adapted", "Difference", "Examples"],
            quality_cells(job, results),
            text_columns=2,
            kinds=[verdict(row)[1] for row in adapted["compared"]],
        ),
        html.bullets(
            [f"{task.title}: {task.about}{_plain(adapted['windows'].get(task.name))}" for task in job.tasks.measuring]
        ),
    ]


def _plain(scores: Mapping[str, Sequence[float]] | None) -> str:
    """How many answers of a task are right where every layer has the same window, and nothing else."""
    if scores is None:
        return ""
    right = sum(scores["right"]) / len(scores["right"])
    return f" With the same window in every layer and no full layer, {100 * right:.0f} % are right."


def _interval(estimate: Sequence[float | None], percent: bool, signed: bool = False) -> str:
    def form(value: float) -> str:
        if percent:
            return _signed(100 * value, 0) if signed else f"{100 * value:.0f}"
        return _signed(value) if signed else f"{value:.3f}"

    return with_interval(estimate[0], estimate[1:] or None, form, " %" if percent and not signed else "")


def _signed(value: float, digits: int = 3) -> str:
    """A difference, with its sign unless it is rounded to 0."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def memory_cells(job: Adaptation, results: StageResults) -> list[list[str]]:
    """The cache of one sequence, a row for each way to count it: where, with full attention, adapted, the share."""
    memory, efficiency, pattern = job.memory, results.found["efficiency"], results.pattern
    counted: list[tuple[str, float, float]] = [
        (f"{_place(job)}\n{memory.length} tokens, 2 bytes a number", memory.full, results.best["bytes"])
    ]
    if memory.server is not None:
        before, after = (cache_bytes(memory.config, one, 1, memory.length, 2) for one in (pattern.opened, pattern))
        counted.append((f"this library\n{memory.length} tokens, 2 bytes a number", before, after))
    tokens = efficiency["prompt_tokens"] + efficiency["new_tokens"]
    before, after = (efficiency["figures"][name]["kv_cache_bytes"] for name in ("original", "adapted"))
    about = f"this library, measured\na request of {tokens} tokens, {job.dtype}; first column: the original"
    counted.append((about, before, after))
    return [
        [where, f"{before / MEGABYTE:.2f} MiB", f"{after / MEGABYTE:.2f} MiB", f"{after / before:.1%}"]
        for where, before, after in counted
    ]


def _memory(job: Adaptation, results: StageResults) -> list[str]:
    memory, note = job.memory, []
    if memory.server is not None and memory.batched_tokens is not None:
        server = SERVERS[memory.server]
        about = (
            f"{server.title} {server.version} allocates memory in {server.cache.layout}. Its windowed layers also hold "
            "the tokens of a prompt that are computed at once (--batched-tokens), of all batches that are planned and "
            "not yet ended. So a pattern saves less there than in this library."
        )
        note.append(html.paragraph(about))
    return [
        html.heading("Memory: the key/value cache of one sequence"),
        html.table(["Where", "Full attention", "Adapted", "Share"], memory_cells(job, results)),
        *note,
    ]


def _called(server: str) -> str:
    """A server as it writes itself."""
    return SERVERS[server].title if server in SERVERS else server


def _place(job: Adaptation) -> str:
    """Where the cache is counted."""
    return "this library" if job.settings.server is None else _called(job.settings.server)


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


def _tried(job: Adaptation, search: Mapping[str, Any]) -> list[str]:
    candidates, chosen = search["candidates"], search["best"]
    drawing = functools.partial(
        candidates_chart,
        [(row["share"], row["lost"]) for row in candidates],
        chosen,
        job.settings.kv_budget,
        xlabel=f"KV cache in {_place(job)}, % of full attention",
        ylabel="Loss against the original\n(nats a token)",
    )
    order = sorted(range(len(candidates)), key=lambda number: (number != chosen, candidates[number]["lost"]))
    rows = [_candidate(candidates[number]) for number in order]
    pieces = [
        html.heading("What was tried"),
        html.figure(drawing, "Each point is a candidate. Lower is better, and so is further left."),
        html.table(list(rows[0]), [list(row.values()) for row in rows], text_columns=2, chosen=0),
    ]
    if search["layer_scores"]:
        filled = candidates[chosen]["full_layers"]
        drawing = functools.partial(layer_scores_chart, search["layer_scores"], filled)
        pieces.append(
            html.figure(
                drawing,
                "How much the loss on the right answers falls when a layer gets full attention beside those that were "
                "chosen before it, with 95 % intervals. Layers without a bar were not measured: a gradient says that "
                "they help little.",
            )
        )
    if search["left_out"]:
        pieces += [
            html.paragraph("Not tried, because the server cannot run it or the budget does not allow it:"),
            html.bullets(search["left_out"]),
        ]
    if search["doubts"]:
        pieces += [html.paragraph("What these tasks cannot tell:"), html.bullets(search["doubts"])]
    return pieces


def _layout(row: Mapping[str, Any]) -> str:
    """How the full layers of a candidate were chosen; `NONE` where it has none."""
    return row["layout"] if row["full_layers"] or sum(row["full_head_counts"]) else NONE


def _candidate(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of the table of candidates, by its titles."""
    heads = sum(row["full_head_counts"])
    return {
        "Full layers": (", ".join(map(str, row["full_layers"])) or "none") + (f" and {heads} heads" if heads else ""),
        "How they were chosen": HOW.get(_layout(row), ""),
        "Window": str(row["sliding_window"]),
        "Sink tokens": str(row["num_sink_tokens"]),
        "Full decode": "yes" if row["full_attention_decode"] else "no",
        "Right": "" if row["right"] is None else f"{row['right']:.0%}",
        "Loss": _signed(row["lost"]),
        "MiB": f"{row['bytes'] / MEGABYTE:.2f}",
        "Cache": f"{row['share']:.1%}",
    }


def _serving(job: Adaptation, export: Mapping[str, Any], canary: Mapping[str, Any] | None) -> list[str]:
    out = job.settings.out
    model = shlex.quote(str(out / "tuned" / "model") if job.settings.tune else job.settings.model)
    pattern = shlex.quote(str(out / "pattern.json"))
    here = [
        f'swa-jax generate {model} "Once upon a time" --pattern {pattern}',
        f"swa-jax pattern {pattern} --model {model} --length {job.memory.length}",
    ]
    pieces = [html.heading("How to serve it" if export else "How to run it")]
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
        if command := check_command(job, job.export_folder):
            after = "It prints one sentence, and ends with status 0 (right), 1 (wrong) or 2 (it cannot tell)."
            pieces += [
                html.paragraph("Then check that the server computes this model and not something else:"),
                html.code(command),
                html.paragraph(after),
            ]
        pieces.append(html.paragraph(_receipt(job, canary)))
    return [*pieces, html.paragraph("With this library:"), html.code(here)]


def check_command(job: Adaptation, folder: Path | None) -> list[str]:
    """The command that compares a running server with the receipt of the export, which lies in `folder`; none where
    there is no receipt."""
    if folder is None or job.export_folder is None or not (job.export_folder / SCRIPT.name).exists():
        return []
    where = "--transformers"
    if (server := SERVERS.get(job.settings.server or "")) is not None:
        if server.port is None:
            return []
        where = f"--url http://localhost:{server.port}"
    return [f"python {shlex.quote(str(folder / SCRIPT.name))} {where}"]


def _receipt(job: Adaptation, canary: Mapping[str, Any] | None) -> str:
    """What is known of the export's receipt; None: it is not made yet."""
    if not job.settings.canary:
        return "The export has no receipt to check a server by (--no-canary)."
    if canary is None:
        return "The receipt to check a server by (canary.json) is not finished. If it does not come, run adapt again."
    return str(canary["describe"])


def _origin(job: Adaptation, results: StageResults) -> list[str]:
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
    kind = jax.devices()[0].device_kind
    return f"a CPU ({platform.machine()})" if jax.default_backend() == "cpu" else f"{len(jax.devices())} x {kind}"


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
