"""SWAA's Table 1 in small: LoRA on a model's own replies beside LoRA on plain text, under every pattern of the table.

A model of chains answers prompts of one to three hops with full attention. What it answers rightly is its training data
(`swa-jax distill`). Under each pattern, LoRA (SWAA's: rank 16, queries, keys and values) trains on those replies by
cross-entropy, on the same replies by KL to the full model's log-probabilities, or on plain text: equal steps, rows and
seeds. Then other prompts and held-out text are measured. A cell is a pattern, its data and a seed.
"""

import argparse
import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from scripts.compare.runner import Cell, Comparison, Done, key_of, markdown, read_done, told
from swa_jax.adapt.tasks import HOPS, RIVALS, EvalTask, measure
from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import paired_score
from swa_jax.base.files import write_text
from swa_jax.checkpoint.folder import load_model, weights_sum
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.haystack import library_files, read_text
from swa_jax.data.sources import SourceConfig
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.evaluate.examples import Example
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.lora import LoraConfig
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.config import StageConfig, TrainConfig
from swa_jax.train.loop import train
from swa_jax.train.objectives import Distill
from swa_jax.train.optimizer import OptimizerConfig

LAYERS = 8
GAP = 32  # tokens between the statements of a chain: one window
DECLARED = yaml.safe_load(Path(__file__).with_name("swaa.yaml").read_text())
DATA = ("none", "text", "replies", "replies, KL")  # none: the model as it is
TASKS = {f"chains-{n}": f"{n} hop{'s' if n > 1 else ''}, %" for n in HOPS}


@dataclasses.dataclass(frozen=True)
class RunSize:
    """What a run of the comparison takes."""

    length: int = 512
    prompts: int = 48  # that the original answers, 4 times each
    steps: int = 40
    rows: int = 4  # a step
    examples: int = 48  # measured of each task
    texts: int = 8  # rows of text that are measured


TINY = RunSize(length=256, prompts=3, steps=2, rows=2, examples=4, texts=2)


class PatternRow(NamedTuple):
    """A pattern, as swaa.yaml has it."""

    numbers: str
    window: int
    full: Sequence[int]
    sinks: int
    decode: bool

    def pattern(self) -> AttentionPattern:
        types = tuple(FULL if layer in self.full else WINDOW for layer in range(LAYERS))
        window = self.window if WINDOW in types else None
        return AttentionPattern(types, window, self.sinks, full_attention_decode=self.decode)

    def cells(self) -> list[str]:
        """Columns of the table."""
        if len(self.full) == LAYERS:
            return [self.numbers, "-", "all", "-", "-"]
        full = ", ".join(map(str, self.full)) or "none"
        return [self.numbers, str(self.window), full, str(self.sinks), "yes" if self.decode else "no"]


TRAINED, OTHERS = (
    [PatternRow(number, **row) for number, row in DECLARED[name].items()] for name in ("trained", "others")
)
ROWS = [*TRAINED, *OTHERS]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="chains", help="the model, one of chains; default: the bundled one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tiny", action="store_true", help="a few steps and examples, to try the command")
    parser.add_argument("--beside", type=Path, nargs="+", help="measure nothing: one table of these --out folders")


def comparison(options: argparse.Namespace) -> Comparison:
    """The cells of one model, or the table of several."""
    if options.beside:
        models = {folder.name.removeprefix("compare-"): read_done(folder) for folder in options.beside}
        return Comparison("swaa beside", [], lambda _: (table_of_models(models, options.seeds), []))
    size, out = TINY if options.tiny else RunSize(), options.out.resolve()
    prepared = functools.cache(lambda: prepare(options.base, out, size))

    def cell(row: PatternRow, *key: Any) -> Cell:
        made = functools.partial(work, row, *key, out, size, prepared)
        return Cell((row.numbers, *key), made, lambda: dataclasses.asdict(size))

    cells = [cell(*one) for one in keys(options.seeds)]
    return Comparison("swaa", cells, lambda done: (table(done, options.seeds), []))


def keys(seeds: Sequence[int]) -> Iterator[tuple[PatternRow, str, int]]:
    """First the models as they are, then a seed of the patterns that the paper trains, then the next."""
    yield from ((row, "none", 0) for row in ROWS)
    for data in (DATA[1:3], DATA[3:]):
        yield from ((row, one, seed) for seed in seeds for row in TRAINED for one in data)
    yield from ((row, one, seed) for seed in seeds for row in OTHERS for one in DATA[1:3])


# ---- cells ----


def draw(tokenizer: Tokenizer, size: RunSize, seed: int, count: int) -> list[list[Example]]:
    """Prompts of each number of hops."""
    cells = [ChainCell(hops, RIVALS, size.length) for hops in HOPS]
    return [chain_examples(tokenizer, cell, num_examples=count, gap=GAP, seed=seed) for cell in cells]


def prepare(base: str | Path, out: Path, size: RunSize) -> list[EvalTask]:
    """The original as a checkpoint, and its replies as training data; what is measured on."""
    source, model, prompts = model_folder(base), out / "model", out / "prompts.jsonl"
    if not (model / "config.json").exists():
        shutil.copytree(source, model)
    elif weights_sum(source) != weights_sum(model):
        raise ConfigError(f"{out} has cells of another model than {base}: name another --out")
    tokenizer = load_tokenizer(model)
    if not prompts.exists():
        drawn = [one for examples in draw(tokenizer, size, 10, size.prompts // len(HOPS)) for one in examples]
        lines = [{"prompt": tokenizer.decode(one.prompt), "answer": one.references[0]} for one in drawn]
        write_text(prompts, "".join(json.dumps(line) + "\n" for line in lines))
    if not (out / "replies.jsonl").exists():
        command = [sys.executable, "-m", "swa_jax.cli", "distill", model, "--prompts", prompts]
        command += ["--out", out / "replies.jsonl", "-n", 4, "--temperature", 1, "--max-new-tokens", 3, "--keep-cut"]
        command += ["--filter", "contains", "--top-logprobs", 16, "--dtype", "float32"]
        subprocess.run([str(word) for word in command], check=True)
    drawn = draw(tokenizer, size, 0, size.examples)
    tasks = [EvalTask(task, title, "", some) for (task, title), some in zip(TASKS.items(), drawn, strict=True)]
    tokens = tokenizer.encode(read_text(tuple(library_files(held_out=True)))[: 20 * size.length * size.texts])
    starts = np.linspace(0, len(tokens) - size.length, size.texts).astype(int)
    rows = [Example([tokens[at]], tokens[at + 1 : at + size.length], []) for at in starts]
    return [*tasks, EvalTask("text", "plain text", "", rows, answers=False)]


def work(row: PatternRow, data: str, seed: int, out: Path, size: RunSize, prepared) -> dict[str, Any]:
    """Train, if the cell does, and measure."""
    tasks, pattern, folder = prepared(), row.pattern(), out / "model"
    if data != "none":
        run = out / "run"
        shutil.rmtree(run, ignore_errors=True)  # a cell that was cut off begins again: it is short
        # Plain text has no answers: where they would see everything, it is read as a prompt.
        mask = dataclasses.replace(pattern, full_attention_decode=False) if data == "text" else pattern
        mask.to_json(out / "pattern.json")
        replies = SourceConfig(kind="distilled", files=(str(out / "replies.jsonl"),))
        read = (SourceConfig(kind="text") if data == "text" else replies,)
        stage = StageConfig(steps=size.steps, sequence_length=size.length, batch_size=size.rows, data=read)
        config = TrainConfig(
            output=str(run),
            tokenizer=str(folder),
            init_from=str(folder),
            stages=(stage,),
            pattern=str(out / "pattern.json"),
            lora=LoraConfig(),
            seed=seed,
            checkpoint_every=1000,
            distill=Distill(top_k=16) if data == "replies, KL" else None,
            optimizer=OptimizerConfig(name="adamw", learning_rate=2e-3, warmup_steps=3),
        )
        folder = train(config, quiet=True)
    return {"scores": measure(load_model(folder, pattern, dtype="float32"), tasks, pattern, 8)}


# ---- report ----


class Figure(NamedTuple):
    title: str
    tasks: Sequence[str]
    figure: str  # "right" or "losses"
    digits: int
    compared: bool  # with the difference


OVERALL = Figure("found in all, %", list(TASKS), "right", 0, True)
COLUMNS = (
    *(Figure(title, [task], "right", 0, False) for task, title in TASKS.items()),
    OVERALL,
    Figure("answer loss", list(TASKS), "losses", 4, True),
    Figure("text loss", ["text"], "losses", 2, True),
)
HEAD = ["No.", "window", "full layers", "sink tokens", "FA decode"]


def values(done: Done, row: PatternRow, data: str, seed: int, column: Figure) -> list[float]:
    line = done.get(key_of(row.numbers, data, seed))
    return [] if line is None else [x for task in column.tasks for x in line["scores"][task][column.figure]]


def count(done: Done, row: PatternRow, data: str, seeds: Sequence[int]) -> int:
    """How many seeds are done."""
    return sum(key_of(row.numbers, data, seed) in done for seed in seeds)


def shown(done: Done, row: PatternRow, data: str, column: Figure, seeds: Sequence[int]) -> str:
    """The mean; a model as it is has no seeds."""
    found = [x for seed in ([0] if data == "none" else seeds) for x in values(done, row, data, seed, column)]
    scale = 100 if column.figure == "right" else 1
    return f"{scale * np.mean(found):.{column.digits}f}" if found else "-"


def difference(done: Done, row: PatternRow, column: Figure, seeds: Sequence[int]) -> str:
    """Replies - text, the mean over the seeds that both have, with its interval over prompts, which seeds share."""
    both = [[values(done, row, data, seed, column) for data in ("replies", "text")] for seed in seeds]
    whole = [pair for pair in both if all(pair)]
    if not whole:
        return ""
    scale = 100 if column.figure == "right" else 1
    return told(paired_score(*np.mean(whole, 0)), f".{column.digits}f", "+", scale)


def table(done: Done, seeds: Sequence[int]) -> str:
    """Rows of Table 1: what is found and lost under each, by what was trained on, and the paired differences."""
    titles = [[one.title, f"{one.title}, replies - text"][: 1 + one.compared] for one in COLUMNS]
    lines = []
    for row in ROWS:
        line = [*row.cells(), str(count(done, row, "replies", seeds))]
        for column in COLUMNS:
            line.append(" / ".join(shown(done, row, data, column, seeds) for data in DATA))
            if column.compared:
                line.append(difference(done, row, column, seeds))
        lines.append(line)
    return markdown([*HEAD, "seeds", *(title for pair in titles for title in pair)], lines)


def table_of_models(models: dict[str, Done], seeds: Sequence[int]) -> str:
    """What several models of chains find in all, under the patterns that each of them was trained under."""
    lines = []
    for row in ROWS:
        if all(count(done, row, data, seeds) for done in models.values() for data in ("text", "replies")):
            line = row.cells()
            for done in models.values():
                found = [shown(done, row, data, OVERALL, seeds) for data in ("none", "text", "replies")]
                line += [" / ".join(found), difference(done, row, OVERALL, seeds)]
            lines.append(line)
    head = [*HEAD, *(part for name in models for part in (name, f"{name}, replies - text"))]
    counts = ", ".join(str(max(count(done, row, "replies", seeds) for row in ROWS)) for done in models.values())
    said = f"Right answers over all hops, %, of {', '.join(models)}; seeds: {counts}."
    return f"{said}\n\n{markdown(head, lines)}"
