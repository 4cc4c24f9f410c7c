"""The stages of `swa-jax adapt`, each with a file of its result, so that a run that was killed goes on where it was.

A result belongs to content: to the sum of the model, the examples and the options that decide. A stage whose file has
the right key is not run again; one that was killed goes on from what it had written, or starts over. Its time counts
in full: also what earlier runs spent on it, up to the last file that they wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swa_jax.adapt.estimate import canary_budget
from swa_jax.adapt.job import MARK, STAGES, Adaptation, tuning
from swa_jax.adapt.replies import Replies, draw_replies
from swa_jax.adapt.search import Search
from swa_jax.adapt.tasks import Doubts, EvalTask, compared, doubts, measure
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import digest, locked, read_document, read_json, write_json
from swa_jax.base.settings import to_dict
from swa_jax.checkpoint.canary import write_canary
from swa_jax.checkpoint.check_server import CANARY_FILE
from swa_jax.checkpoint.folder import CONFIG_FILE, content_sum, load_model
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.data.batches import content_sum as data_sum
from swa_jax.evaluate.efficiency import measure_efficiency
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.report.progress import Progress
from swa_jax.select.content import VERSION, examples_sum
from swa_jax.train.loop import train


@dataclasses.dataclass
class StageResults:
    """What the stages found, by their names, and how long each took when it ran."""

    folder: Path
    report: Callable[[str], None]
    found: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> dict[str, Any]:
        """The candidate that was chosen."""
        search = self.found["search"]
        return search["candidates"][search["best"]]

    @property
    def pattern(self) -> AttentionPattern:
        """Its pattern."""
        return AttentionPattern.from_json(json.dumps(self.best["pattern"]))

    def stage(
        self, name: str, title: str, key: str, work: Callable[[], dict[str, Any]], made: Path | None = None
    ) -> dict[str, Any]:
        """The result of a stage: found in its file if the key is right, or made and written there.

        Args:
          made: a file or folder that belongs to the result; where it is gone, the stage runs again.
        """
        file = self.folder / f"{name}.json"
        stored = self._read(file)
        if stored.get("key") == key and (made is None or made.exists()):
            self.report(f"{title}: found here ({stored['seconds']:.0f} s)")
        else:
            begun = self.folder / f"{name}-begun.json"
            before = self._spent(begun, key)
            self.report(f"{title} ..." + (f" {before:.0f} s were spent on it before" if before >= 1 else ""))
            write_json(begun, {"key": key, "before": before, "at": time.time()})
            begin = time.perf_counter()
            result = work()
            stored = {"key": key, "seconds": before + time.perf_counter() - begin, "result": result}
            write_json(file, stored)
            begun.unlink()
            self.report(f"{title}: {stored['seconds']:.0f} s")
        self.found[name], self.seconds[name] = stored["result"], stored["seconds"]
        return self.found[name]

    def _read(self, file: Path) -> dict[str, Any]:
        """What a stage has written; {} where there is nothing yet, or where it is damaged, which is reported."""
        try:
            return read_document(file)
        except ConfigError as error:
            self.report(f"{error}: it is made again")
            return {}

    def _spent(self, begun: Path, key: str) -> float:
        """Seconds that killed runs spent on a stage: until the last file of OUT that they wrote."""
        record = self._read(begun)
        if record.get("key") != key:
            return 0.0
        last = max(path.stat().st_mtime for path in self.folder.parent.rglob("*") if path.is_file())
        return record["before"] + max(0.0, last - record["at"])


def carry_out(job: Adaptation, report: Callable[[str], None], reported: Callable[[StageResults], None]) -> StageResults:
    """Run the stages that are not done yet.

    Args:
      report: called with a line of text for each.
      reported: called with the results when all is known but for the export's receipt.

    Raises:
      CheckpointError: another process is at work in OUT.
      ConfigError: OUT has the adaptation of another model.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with locked(job.folder / MARK):
        for partial in job.half_made:
            report(f"removing {partial}, which an interrupted run left half made")
            shutil.rmtree(partial)
        run = _Stages(job, StageResults(job.folder, report), content_sum(job.source.folder))
        run(reported)
    return run.results


@dataclasses.dataclass
class _Stages:
    """A job on its way through the stages."""

    job: Adaptation
    results: StageResults
    model_sum: str

    def __call__(self, reported: Callable[[StageResults], None]) -> None:
        job = self.job
        self._claim()
        original = digest([VERSION, self.model_sum, job.dtype, self._sums(job.tasks.choosing, job.tasks.measuring)])
        self._stage("original", "measuring the model as it is", original, self._measure_original)
        search = digest([original, self._searched()])
        self._stage("search", "searching", search, functools.partial(self._search, original))
        self.results.pattern.to_json(job.settings.out / "pattern.json")
        tune = self._tune_key(search)
        title = "fine-tuning by LoRA" if self._tuned else "no fine-tuning"
        self._stage("tune", title, tune, functools.partial(self._tune, tune), self._tuned)
        self._stage("adapted", "measuring the adapted model", digest([tune, "measure"]), self._measure_adapted)
        settings = job.settings
        key = digest([tune, settings.new_tokens, settings.repeats])
        self._stage("efficiency", "timing both in turn", key, self._efficiency)
        folder = job.export_folder
        key = digest([tune, settings.server])
        title = f"exporting for {settings.server}" if folder else "no export"
        self._stage("export", title, key, self._export, folder)
        reported(self.results)  # a receipt takes a while, and the report is there without it
        key = digest([key, settings.canary])
        title = "making the receipt of the export" if folder and settings.canary else "no receipt"
        made = folder / CANARY_FILE if folder and settings.canary else None
        self._stage("canary", title, key, self._canary, made)

    # ---- what is at hand ----

    @functools.cached_property
    def model(self) -> Decoder:
        """The model as it was."""
        return load_model(self.job.source.folder, dtype=self.job.dtype)

    @functools.cached_property
    def adapted(self) -> Decoder:
        """The model under the pattern that was chosen, with the weights that it was given."""
        if self._tuned is None:
            return self.model.with_pattern(self.results.pattern)
        return load_model(self._tuned, self.results.pattern, dtype=self.job.dtype)

    @property
    def _tuned(self) -> Path | None:
        return self.job.settings.out / "tuned" / "model" if self.job.settings.tune else None

    def _sums(self, *groups: list[EvalTask]) -> list[str]:
        return [examples_sum(task.examples) for tasks in groups for task in tasks]

    # ---- stages ----

    def _stage(
        self, name: str, title: str, key: str, work: Callable[[], dict[str, Any]], made: Path | None = None
    ) -> None:
        number = STAGES.index(name) + 1
        self.results.stage(name, f"{number}/{len(STAGES)} {title}", key, work, made)

    def _claim(self) -> None:
        """Make the folder this model's, or see that it is."""
        file = self.results.folder / "model.json"
        if read_document(file).get("key", self.model_sum) != self.model_sum:
            raise ConfigError(
                f"{self.job.settings.out} holds the adaptation of another model, or of one that has changed since: "
                "name a new folder"
            )
        write_json(file, {"key": self.model_sum, "model": self.job.source.name})

    def _measure(self, model: Decoder, pattern: AttentionPattern, tasks: list[EvalTask]) -> Any:
        with Progress("examples") as progress:
            return measure(model, tasks, pattern, self.job.settings.batch_size, progress.update)

    def _measure_original(self) -> dict[str, Any]:
        tasks, pattern = self.job.tasks, self.job.source.pattern
        return {
            "measuring": self._measure(self.model, pattern, tasks.measuring),
            "choosing": self._measure(self.model, pattern, tasks.choosing),
        }

    def _searched(self) -> Any:
        """What the search depends on, beside the model and its scores."""
        job, settings = self.job, self.job.settings
        memory = [job.memory.server, job.memory.length, job.memory.batched_tokens, job.memory.device]
        return [settings.kv_budget, memory, dataclasses.asdict(job.space), job.effort, settings.seed]

    def _search(self, key: str) -> dict[str, Any]:
        job, settings = self.job, self.job.settings
        found = self._doubts()
        for sentence in found.sentences:
            self.results.report(sentence)
        if found.nothing_told and not settings.force:
            raise ConfigError(
                "windows in every layer do as well as full attention on these prompts, so the search would choose by "
                f"chance ({found.sentences[0]}): search all the same with --force"
            )
        with Progress("steps") as progress:
            search = Search(
                self.model,
                job.tasks.choosing,
                self.results.found["original"]["choosing"],
                job.memory,
                settings.kv_budget,
                job.space,
                self.results.folder,
                key,
                settings.batch_size,
                job.effort,
                settings.seed,
                self.results.report,
                progress.update,
            )
            return search() | {"doubts": found.sentences}

    def _doubts(self) -> Doubts:
        """What the tasks to choose by do not tell, by one more measurement: of windows in every layer."""
        tasks, window = self.job.tasks.choosing, self.job.space.start.window
        pattern = AttentionPattern.from_full_layers((), self.model.pattern.num_layers, **window.fields)
        original = self.results.found["original"]["choosing"]
        return doubts(tasks, original, self._measure(self.model, pattern, tasks))

    def _tune_key(self, search: str) -> str:
        if not self.job.settings.tune:
            return digest([search, None])
        training = tuning(self.job, Path("pattern.json"))
        config = to_dict(training)
        for name in ("output", "tokenizer", "init_from", "stages"):  # where things lie does not count
            del config[name]
        stage = dataclasses.replace(training.stages[0], data=())
        replies = self.job.replies
        if replies is None:
            data: Any = [
                [to_dict(dataclasses.replace(one, files=())), data_sum(one)] for one in training.stages[0].data
            ]
        else:
            data = replies.content(self.model_sum)
        return digest([search, config, to_dict(stage), data])

    def _tune(self, key: str) -> dict[str, Any]:
        """An interrupted fine-tuning goes on from its last checkpoint, if it was this one."""
        if self._tuned is None:
            return {}
        started = self.results.folder / "tune-started.json"
        folder = self._tuned.parent
        if self.results._read(started).get("key") != key:
            shutil.rmtree(folder, ignore_errors=True)
            for file in self.results.folder.glob(f"{self.job.replies_file.name}*"):  # of an earlier run
                file.unlink()
            write_json(started, {"key": key})
        if self.job.replies is not None:
            self._draw(self.job.replies)
        train(tuning(self.job, self.job.settings.out / "pattern.json"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return {
            "steps": self.job.settings.tune,
            "losses": [line["loss"] for line in lines if "loss" in line],
            "replies": self.job.replies and len(self.job.replies_file.read_text().splitlines()),
        }

    def _draw(self, replies: Replies) -> None:
        """The original model's replies, into their file."""
        total = len(replies.samples)
        with Progress("replies") as progress:
            for done in draw_replies(replies, self.model, self.job.tokenizer, self.model_sum, self.job.replies_file):
                progress.update(done, total)

    def _measure_adapted(self) -> dict[str, Any]:
        tasks = self.job.tasks.measuring
        scores = self._measure(self.adapted, self.results.pattern, tasks)
        before = self.results.found["original"]["measuring"]
        window = self.results.best["sliding_window"]
        plain = AttentionPattern.from_full_layers((), self.results.pattern.num_layers, window)
        asked = [task for task in tasks if task.answers]
        naive = self._measure(self.model, plain, asked) if asked else {}
        return {"measuring": scores, "windows": naive, "compared": compared(scores, before, tasks)}

    def _efficiency(self) -> dict[str, Any]:
        settings = self.job.settings
        example = max((task.examples[0] for task in self.job.tasks.measuring), key=lambda one: len(one.prompt))
        models = {"original": self.model.with_pattern(self.job.source.pattern), "adapted": self.adapted}
        figures = measure_efficiency(models, [example.prompt], new_tokens=settings.new_tokens, repeats=settings.repeats)
        return {"prompt_tokens": len(example.prompt), "new_tokens": settings.new_tokens, "figures": figures}

    def _export(self) -> dict[str, Any]:
        folder, server = self.job.export_folder, self.job.settings.server
        if folder is None:
            return {}
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run's
        lines: list[str] = []
        export_model(
            self._tuned or self.job.source.folder,
            folder,
            pattern=self.results.pattern,
            server=server,
            serve_length=self.job.memory.length,
            batched_tokens=self.job.memory.batched_tokens,
            device=self.job.memory.device,
            canary=False,
            describe=lines.append,
        )
        served = self.job.memory.served(self.results.pattern)
        assert served is not None
        return {"describe": lines, "command": self.job.memory.command(served, folder)}

    def _canary(self) -> dict[str, Any]:
        """What can tell a server that reads the export wrongly: at most a tenth of the work of the rest."""
        job, folder = self.job, self.job.export_folder
        served = job.memory.served(self.results.pattern)
        if folder is None or served is None or not job.settings.canary:
            return {}
        with Progress("texts") as progress:
            note = write_canary(
                folder,
                self._tuned or job.source.folder,
                served.pattern,
                read_json(folder / CONFIG_FILE),
                budget=canary_budget(job),
                longest=job.memory.length,
                counted=job.memory.describe(served.pattern),
                progress=progress.update,
            )
        return {"describe": note}
