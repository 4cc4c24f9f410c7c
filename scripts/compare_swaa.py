"""SWAA's Table 1 in small: LoRA on a model's own replies beside LoRA on plain text, under every pattern of the table.

    python scripts/compare_swaa.py --model chains --out runs/compare-swaa-chains

A bundled model answers prompts with full attention: chains of one to three hops, or needles among one and four keys
(`--model recall`). What it answers rightly is its training data (`swa-jax distill`). Under each pattern, LoRA (SWAA's:
rank 16, queries, keys and values) trains on those replies by cross-entropy, on the same replies by KL to the full
model's log-probabilities, or on plain text: equal steps, rows and seeds. Then other prompts and held-out text are
measured. One line of `cells.jsonl` is one cell (pattern, data, seed); what is there is not done again, so the same
command may be started again at any time. `--report-only` makes `table.md` of what is there, `--docs FILE` puts it into
a document as well. `--checkpoint` names another model of chains; `--beside` puts several into one table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from documents import put_between

from swa_jax.adapt.tasks import HOPS, RIVALS, Task, measure
from swa_jax.checkpoint.folder import load_model, weights_sum
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.haystack import Haystack, library_files, read_text
from swa_jax.data.sources import SourceConfig
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.errors import ConfigError
from swa_jax.estimates import Estimate, paired_bootstrap, paired_score
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.needle import needle_examples
from swa_jax.files import write_text
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.lora import LoraConfig
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.config import StageConfig, TrainConfig
from swa_jax.train.loop import train
from swa_jax.train.optimizer import OptimizerConfig

ROOT = Path(__file__).resolve().parents[1]
LAYERS = 8
WINDOW_2K = 32  # keys: the context is 16 times as long, in the paper (24k) 12 times
SINKS = {0: 0, 10: 1, 100: 4, 1000: 16}  # the paper's sink tokens, and ours
DEPTHS = (0.0, 0.4)  # of the needles: further back than 8 windows reach
DATA = ("none", "text", "replies", "replies, KL")  # none: the model as it is


@dataclasses.dataclass(frozen=True)
class Size:
    """What a run of the comparison takes."""

    length: int = 512
    prompts: int = 48  # that the original answers, 4 times each
    steps: int = 40
    rows: int = 4  # a step
    examples: int = 48  # measured of each needle task
    texts: int = 8  # rows of text that are measured


TINY = Size(length=256, prompts=3, steps=2, rows=2, examples=4, texts=2)


class Row(NamedTuple):
    """A pattern of SWAA's Table 1; sink tokens as the paper has them."""

    numbers: str  # in the table
    windows: int  # the window, in units of 2k
    first: int | None  # full layer, and each `step`-th from there on; None: no layer is full
    step: int
    sinks: int
    full_decode: bool

    def pattern(self) -> AttentionPattern:
        full = set() if self.first is None else set(range(self.first, LAYERS, self.step))
        types = tuple(FULL if layer in full else WINDOW for layer in range(LAYERS))
        window = WINDOW_2K * self.windows if WINDOW in types else None
        return AttentionPattern(types, window, SINKS[self.sinks], full_attention_decode=self.full_decode)

    def cells(self) -> list[str]:
        """Columns of the table."""
        full = "none" if self.first is None else ", ".join(map(str, range(self.first, LAYERS, self.step)))
        if self.step == 1:
            return [self.numbers, "-", "all", "-", "-"]
        sinks = str(SINKS[self.sinks])
        return [self.numbers, str(WINDOW_2K * self.windows), full, sinks, "yes" if self.full_decode else "no"]


# Those that the paper trains come first.
ROWS = (
    Row("0, 24", 1, 0, 1, 0, False),
    Row("1, 25", 1, None, 2, 0, False),
    Row("4, 27", 1, None, 2, 0, True),
    Row("5, 28", 1, 1, 2, 0, False),
    Row("13, 31", 1, 1, 2, 0, True),
    Row("11, 32", 1, 0, 2, 0, True),
    Row("8, 30", 1, None, 2, 100, True),
    Row("18, 34", 1, 1, 2, 100, True),
    Row("33", 1, 1, 4, 0, True),
    Row("26", 1, None, 2, 100, False),
    Row("7, 29", 1, None, 2, 10, True),
    # Not trained in the paper.
    Row("10", 1, 0, 2, 10, False),
    Row("16", 1, 0, 2, 10, True),
    Row("12", 1, 1, 2, 10, False),
    Row("17", 1, 1, 2, 10, True),
    Row("19", 1, 1, 4, 10, True),
    Row("20", 1, 1, 8, 10, True),
    Row("21", 1, 3, 4, 10, True),
    Row("3", 1, None, 2, 10, False),
    Row("9", 1, None, 2, 1000, True),
    Row("14", 2, None, 2, 10, True),
    Row("22", 2, 1, 2, 100, True),
    Row("2", 4, None, 2, 0, False),
    Row("6", 4, None, 2, 0, True),
    Row("15", 4, None, 2, 10, True),
    Row("23", 4, 1, 2, 100, True),
)


# ---- data ----


class StandIn(NamedTuple):
    """A bundled model and what it is asked. The names of `draw`'s tasks are those of `tasks`, in this order."""

    draw: Callable[[Tokenizer, Size, int, bool], list[list[Example]]]  # seed, and whether for training
    tasks: dict[str, str]  # name -> what is found, in the table
    answer_tokens: int


def draw_needles(tokenizer: Tokenizer, size: Size, seed: int, training: bool) -> list[list[Example]]:
    """Among one key and four; in training, with room for a text that becomes some tokens longer on its way."""
    hay = Haystack(tokenizer, tuple(library_files(held_out=not training)))
    length = size.length - 16 if training else size.length
    count = size.prompts // 2 if training else size.examples
    return [
        needle_examples(
            tokenizer, length=length, num_examples=count, num_keys=keys, haystack=hay, depths=DEPTHS, seed=seed + keys
        )
        for keys in (1, 4)
    ]


def draw_chains(tokenizer: Tokenizer, size: Size, seed: int, training: bool) -> list[list[Example]]:
    """Of each number of hops."""
    count = size.prompts // len(HOPS) if training else size.examples
    cells = [ChainCell(hops, RIVALS, size.length) for hops in HOPS]
    return [chain_examples(tokenizer, cell, num_examples=count, gap=WINDOW_2K, seed=seed) for cell in cells]


STAND_INS = {
    "recall": StandIn(draw_needles, {"needles-1": "1 key found, %", "needles-4": "4 keys found, %"}, 18),
    "chains": StandIn(draw_chains, {f"chains-{n}": f"{n} hop{'s' if n > 1 else ''}, %" for n in HOPS}, 3),
}


def prepare(name: str, checkpoint: str | Path | None, out: Path, size: Size) -> None:
    """The original as a checkpoint, and its replies as training data. Without `checkpoint` it is the bundled model."""
    source = model_folder(checkpoint or name)
    model, prompts = out / "model", out / "prompts.jsonl"
    if not (model / "config.json").exists():
        shutil.copytree(source, model)
    elif checkpoint is not None and weights_sum(source) != weights_sum(model):
        raise ConfigError(f"{out} has cells of another model than {checkpoint}: name another --out")
    tokenizer = load_tokenizer(model)
    if not prompts.exists():
        drawn = STAND_INS[name].draw(tokenizer, size, 10, True)
        lines = [
            {"prompt": tokenizer.decode(example.prompt), "answer": example.references[0]}
            for examples in drawn
            for example in examples
        ]
        write_text(prompts, "".join(json.dumps(line) + "\n" for line in lines))
    if not (out / "replies.jsonl").exists():
        command = [
            sys.executable, "-m", "swa_jax.cli", "distill", model, "--prompts", prompts, "--out", out / "replies.jsonl",
            "-n", 4, "--temperature", 1, "--max-new-tokens", STAND_INS[name].answer_tokens, "--keep-cut",
            "--filter", "contains", "--top-logprobs", 16, "--dtype", "float32",
        ]  # fmt: skip
        subprocess.run([str(word) for word in command], check=True)


def draw_tasks(name: str, out: Path, size: Size) -> list[Task]:
    """Prompts with answers, and text of files that no training reads."""
    tokenizer = load_tokenizer(out / "model")
    drawn = STAND_INS[name].draw(tokenizer, size, 0, False)
    tasks = [
        Task(task, title, "", examples)
        for (task, title), examples in zip(STAND_INS[name].tasks.items(), drawn, strict=True)
    ]
    tokens = tokenizer.encode(read_text(tuple(library_files(held_out=True)))[: 20 * size.length * size.texts])
    starts = np.linspace(0, len(tokens) - size.length, size.texts).astype(int)
    rows = [Example([tokens[at]], tokens[at + 1 : at + size.length], []) for at in starts]
    return [*tasks, Task("text", "plain text", "", rows, answers=False)]


# ---- cells ----


class Cell(NamedTuple):
    row: Row
    data: str  # one of DATA
    seed: int

    @property
    def key(self) -> list[Any]:
        return [self.row.numbers, self.data, self.seed]


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    """All of them: first the models as they are, then a seed of the paper's trained patterns, then the next."""
    trained, others = ROWS[:11], ROWS[11:]
    yield from (Cell(row, "none", 0) for row in ROWS)
    for data in (DATA[1:3], DATA[3:]):
        for seed in seeds:
            yield from (Cell(row, one, seed) for row in trained for one in data)
    for seed in seeds:
        yield from (Cell(row, one, seed) for row in others for one in DATA[1:3])


def work(out: Path, cell: Cell, tasks: list[Task], size: Size) -> dict[str, Any]:
    """Train, if the cell does, and measure."""
    pattern, start = cell.row.pattern(), time.time()
    folder = out / "model"
    if cell.data != "none":
        run = out / "run"
        shutil.rmtree(run, ignore_errors=True)  # a cell that was cut off begins again: it is short
        # Plain text has no answers: where they would see everything, it is read as a prompt.
        mask = dataclasses.replace(pattern, full_attention_decode=False) if cell.data == "text" else pattern
        mask.to_json(out / "pattern.json")
        text = SourceConfig(kind="text")
        replies = SourceConfig(kind="distilled", files=(str(out / "replies.jsonl"),))
        stage = StageConfig(
            steps=size.steps,
            sequence_length=size.length,
            batch_size=size.rows,
            data=(text if cell.data == "text" else replies,),
        )
        config = TrainConfig(
            output=str(run),
            tokenizer=str(folder),
            init_from=str(folder),
            stages=(stage,),
            pattern=str(out / "pattern.json"),
            lora=LoraConfig(),
            seed=cell.seed,
            checkpoint_every=1000,
            kl_top_k=16 if cell.data == "replies, KL" else None,
            optimizer=OptimizerConfig(name="adamw", learning_rate=2e-3, warmup_steps=3),
        )
        folder = train(config, quiet=True)
    scores = measure(load_model(folder, pattern, dtype="float32"), tasks, pattern, 8)
    return {"cell": cell.key, "size": dataclasses.asdict(size), "seconds": round(time.time() - start), "scores": scores}


def read_cells(out: Path, size: Size) -> dict[str, dict[str, Any]]:
    """The cells that are done, by their key as text; a last line that was cut off is none."""
    file = out / "cells.jsonl"
    found = {}
    if file.exists():
        whole = file.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
        for line in lines:
            if line["size"] != dataclasses.asdict(size):
                sys.exit(f"{file} has cells of another size: name another --out")
            found[json.dumps(line["cell"])] = line["scores"]
    return found


# ---- report ----


class Column(NamedTuple):
    title: str
    tasks: Sequence[str]
    figure: str  # "right" or "losses"
    digits: int
    compared: bool  # with the difference


def columns_of(name: str) -> list[Column]:
    tasks = STAND_INS[name].tasks
    found = [Column(title, [task], "right", 0, False) for task, title in tasks.items()]
    # Where some are found and others not, the difference is worth a column.
    overall = [Column("found in all, %", list(tasks), "right", 0, True)] if name == "chains" else []
    losses = Column("answer loss", list(tasks), "losses", 4, True)
    return [*found, *overall, losses, Column("text loss", ["text"], "losses", 2, True)]


class Done(NamedTuple):
    """The cells of one model, and the seeds that count."""

    scores: dict[str, dict[str, Any]]
    seeds: Sequence[int]

    def has(self, row: Row, data: str) -> int:
        """How many seeds are done."""
        return sum(json.dumps([row.numbers, data, seed]) in self.scores for seed in self.seeds)

    def values(self, row: Row, data: str, seed: int, column: Column) -> list[float]:
        cell = self.scores.get(json.dumps([row.numbers, data, seed]))
        return [] if cell is None else [x for task in column.tasks for x in cell[task][column.figure]]

    def shown(self, row: Row, data: str, column: Column) -> str:
        """The mean; a model as it is has no seeds."""
        which = [0] if data == "none" else self.seeds
        found = [x for seed in which for x in self.values(row, data, seed, column)]
        scale = 100 if column.figure == "right" else 1
        return f"{scale * np.mean(found):.{column.digits}f}" if found else "-"

    def difference(self, row: Row, column: Column) -> str:
        """Replies - text over the seeds that both have."""
        pairs = [
            pair
            for seed in self.seeds
            for pair in zip(
                self.values(row, "replies", seed, column), self.values(row, "text", seed, column), strict=False
            )
        ]
        if not pairs:
            return ""
        replies, text = np.array(pairs).T
        if column.figure == "right":
            return _interval(paired_score(replies, text).map(lambda x: 100 * x), column.digits)
        return _interval(paired_bootstrap(replies, text), column.digits)


HEAD = ["No.", "window", "full layers", "sink tokens", "FA decode"]


def table(name: str, done: Done) -> str:
    """Rows of Table 1: what is found and lost under each, by what was trained on, and the paired differences."""
    columns = columns_of(name)
    head = [*HEAD, "seeds"]
    for column in columns:
        head += [column.title, f"{column.title}, replies - text"] if column.compared else [column.title]
    lines = []
    for row in ROWS:
        line = [*row.cells(), str(done.has(row, "replies"))]
        for column in columns:
            line.append(" / ".join(done.shown(row, data, column) for data in DATA))
            if column.compared:
                line.append(done.difference(row, column))
        lines.append(line)
    return _lines(head, lines)


def table_of_models(models: dict[str, Done]) -> str:
    """What several models of chains find in all, under the patterns that each of them was trained under."""
    column = next(one for one in columns_of("chains") if len(one.tasks) == len(HOPS) and one.figure == "right")
    head = [*HEAD, *(part for name in models for part in (name, f"{name}, replies - text"))]
    lines = []
    for row in ROWS:
        if all(done.has(row, "text") and done.has(row, "replies") for done in models.values()):
            line = row.cells()
            for done in models.values():
                found = [done.shown(row, data, column) for data in ("none", "text", "replies")]
                line += [" / ".join(found), done.difference(row, column)]
            lines.append(line)
    seeds = ", ".join(str(max(done.has(row, "replies") for row in ROWS)) for done in models.values())
    return f"Right answers over all hops, %, of {', '.join(models)}; seeds: {seeds}.\n\n{_lines(head, lines)}"


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = ("| " + " | ".join(row) + " |" for row in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])


def _interval(estimate: Estimate, digits: int) -> str:
    low, high = estimate.low, estimate.high
    ends = "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f"{estimate.mean:+.{digits}f}{ends}"


def put_into(file: Path, made_by: str, text: str) -> None:
    """Replace what stands between the two marks of a document; `made_by`: the options that the first mark names."""
    marks = f"<!-- swaa: made by scripts/compare_swaa.py {made_by} -->\n", "<!-- end of swaa -->"
    try:
        put_between(file, *marks, f"\n{text}\n\n")
    except ConfigError as error:
        sys.exit(str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(STAND_INS), default="chains")
    parser.add_argument("--checkpoint", help="another model of that kind, by its name, in place of the bundled one")
    parser.add_argument("--out", type=Path, help="default: runs/compare-swaa-MODEL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report-only", action="store_true", help="make the table of what is there")
    parser.add_argument("--docs", type=Path, help="a document to put the table into")
    numbers = [row.numbers for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=numbers, metavar="NO", help="only these patterns, by their No.")
    parser.add_argument("--cells", type=int, help="stop after so many new cells")
    parser.add_argument("--tiny", action="store_true", help="a few steps and examples, to try the script")
    parser.add_argument(
        "--beside", type=Path, nargs="+", help="compute nothing: one table of these --out folders, models of chains"
    )
    options = parser.parse_args()
    name, size = options.model, TINY if options.tiny else Size()
    if options.beside:
        folders = {folder.name.removeprefix("compare-swaa-"): folder for folder in options.beside}
        text = table_of_models(
            {model: Done(read_cells(folder, size), options.seeds) for model, folder in folders.items()}
        )
        if options.docs:
            put_into(options.docs, "--beside", text)
        print(text)
        return
    out = (options.out or Path(f"runs/compare-swaa-{name}")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    done = read_cells(out, size)
    try:
        if not options.report_only:
            prepare(name, options.checkpoint, out, size)
            tasks = draw_tasks(name, out, size)
            new = [
                cell
                for cell in cells(options.seeds)
                if json.dumps(cell.key) not in done and cell.row.numbers in (options.rows or numbers)
            ]
            for number, cell in enumerate(new[: options.cells]):
                line = work(out, cell, tasks, size)
                with (out / "cells.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                done[json.dumps(cell.key)] = line["scores"]
                print(f"{number + 1} of {len(new)}: {cell.key}, {line['seconds']} s", flush=True)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    text = table(name, Done(done, options.seeds))
    write_text(out / "table.md", text + "\n")
    if options.docs:
        put_into(options.docs, f"--model {name}", text)
    print(text)


if __name__ == "__main__":
    main()
