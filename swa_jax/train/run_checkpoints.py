"""The checkpoints of a training run: saved in the background, verified by SHA-256, one folder a step.

    checkpoints/120/             Orbax's files, the run's settings, and `manifest.json`, the SHA-256 sums of all of them
    checkpoints/130.writing      not finished: never read, removed when the run starts again
    checkpoints/110.damaged      passed over by a run that went on from an earlier one; nothing removes it

A step's folder gets its plain name, by a rename, when its manifest is on the disk: it is there whole or not at all,
whenever a process is killed. With several processes the folder is one that all of them see (NFS, Filestore, a FUSE
mount); each writes its own shards, process 0 does the rest.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.experimental.v1._src.synchronization import multihost as orbax_processes  # no public name

from swa_jax.base.errors import CheckpointError, reason
from swa_jax.base.files import sum_of, sum_of_file, sync_folder, write_text
from swa_jax.train.worker import DAY, check_lease, meet

MANIFEST_FILE = "manifest.json"
_LEFTOVER = re.compile(r"\d+\.(writing|deleting)\b.*")  # of a killed process; Orbax appends to our name
_MESSAGE_BYTES = 65536  # of what process 0 tells the others

log = logging.getLogger(__name__)
# Orbax's processes would wait for each other for 5 minutes, which is less than process 0 takes for the sums of a large
# checkpoint, and less than may lie between those that read one from a busy disk.
orbax_processes._DEFAULT_BARRIER_TIMEOUT = DAY
# Orbax logs the traceback of a failed save once a thread, pages of it, and raises it as well: we say it in a sentence.
logging.getLogger("absl").addFilter(lambda record: "_SignalingThread.run() raised" not in str(record.msg))


class RunCheckpoints:
    """The checkpoints in a folder, which is made if need be; as a context manager, it waits for the last save.

    Opening it removes what a killed run left half-written and verifies checkpoints, newest first, until a good one
    is found. A damaged one is set aside as `<step>.damaged`, with a warning that names the file.

    With several processes every method but `check` is called by all of them in the same order. A save that failed is
    raised on the process where it failed: whoever runs the processes ends them all (`swa_jax.train.processes` does).

    Args:
      keep: how many of the newest checkpoints stay.
      keep_period: checkpoints whose step is a multiple of it stay for ever, in addition.
      records: the text files, by name, that every checkpoint gets beside the state; `recorded` reads them.

    Raises `CheckpointError`, changing nothing, if there are checkpoints and each of them is damaged.
    """

    newest: int | None  # step of the newest good checkpoint

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_period: int | None = None,
        records: Mapping[str, str] = MappingProxyType({}),
    ):
        self.folder = Path(folder).absolute()
        self.keep, self.keep_period, self.records = keep, keep_period, records
        self._pending: threading.Thread | None = None
        self._failure = ""  # of the last save, in a sentence
        self._cause: Exception | None = None
        self.newest, error = from_first_process(self._open)
        if error:
            raise CheckpointError(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.wait()
        elif self._pending is not None:
            self._pending.join()  # not `wait`: the other processes may not be leaving, so they are not waited for
            if self._failure:
                log.error(self._failure)

    def save(self, step: int, state: Any, data_state: Any) -> None:
        """Write a checkpoint in the background; returns once the arrays are copied off their devices.

        Args:
          state: a tree of jax.Array.
          data_state: what JSON can hold; the same on every process.

        A step that is the newest already is not written again. Raises `CheckpointError` if the save before this one
        failed, or this one at once; the sentence says which checkpoint is there to go on from.
        """
        self.wait()
        if step == self.newest:
            return
        if (self.folder / str(step)).exists():
            raise CheckpointError(f"{self.folder / str(step)} exists already; move it elsewhere to save that step")
        try:
            with _orbax_options():
                response = ocp.save_async(self._writing(step), named(state), custom_metadata={"data_state": data_state})
        except Exception as error:
            self._failed(step, error)
            self.check()
        else:
            self._pending = threading.Thread(target=self._finish, args=(step, response), name=f"save-{step}")
            self._pending.start()

    def check(self) -> None:
        """Raise `CheckpointError`, once, if the save in the background has failed on this process; does not wait."""
        failure, cause = self._failure, self._cause
        self._failure, self._cause = "", None
        if failure:
            raise CheckpointError(failure) from cause

    def wait(self) -> None:
        """Return when this process's part of the last save is done; raises `CheckpointError` if it failed.

        On process 0 the checkpoint is then on the disk under its name.
        """
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        self.check()

    def restore(self, abstract: Any) -> tuple[Any, Any]:
        """Read the newest checkpoint, which was verified or written, onto whatever mesh the shardings name.

        Args:
          abstract: a tree of jax.ShapeDtypeStruct with shardings, in the structure of the state that was saved.

        Returns (state, data_state).

        Raises `CheckpointError` if an array has another shape or dtype than `abstract` says.
        """
        self.wait()
        return load_state(self.folder / str(self.newest), abstract)

    # ---- writing ----

    def _writing(self, step: int) -> Path:
        return self.folder / f"{step}.writing"

    def _finish(self, step: int, response: Any) -> None:
        """In a thread: when Orbax is done, write the manifest, give the folder its name, drop old checkpoints."""
        try:
            response.result()
            check_lease()
            if jax.process_index() == 0:
                for name, text in self.records.items():
                    (self._writing(step) / name).write_text(text)
                _write_manifest(self._writing(step), step)
                check_lease()
                os.rename(self._writing(step), self.folder / str(step))
                sync_folder(self.folder)
        except Exception as error:
            self._failed(step, error)
            return
        self.newest = step
        if jax.process_index() == 0:
            self._drop_old()

    def _failed(self, step: int, error: Exception) -> None:
        check_lease()
        if jax.process_index() == 0:  # half a checkpoint is of no use, and would keep a full disk full
            for leftover in self.folder.glob(f"{step}.writing*"):
                shutil.rmtree(leftover, ignore_errors=True)
        before = (
            "there is no earlier one"
            if self.newest is None
            else f"the previous one, of step {self.newest}, is untouched, and the run can go on from it"
        )
        self._cause = error
        self._failure = f"{self.folder}: the checkpoint of step {step} could not be written: {reason(error)}; {before}"

    def _drop_old(self) -> None:
        steps = _steps(self.folder)
        period = self.keep_period
        for step in steps[: -self.keep]:
            check_lease()
            if period is not None and step % period == 0:
                continue
            # Renamed first: a removal cut short must not look like a damaged checkpoint.
            doomed = self.folder / f"{step}.deleting"
            try:
                os.rename(self.folder / str(step), doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                log.warning("checkpoint %s could not be removed: %s", self.folder / str(step), error)

    # ---- finding ----

    def _open(self) -> tuple[int | None, str]:
        """(step of the newest good checkpoint, "" or what stands in the way)."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            good, damaged = _newest_good(self.folder, _steps(self.folder))
            if damaged and good is None:
                others = f" (and {len(damaged) - 1} more are damaged)" if damaged[1:] else ""
                return None, (
                    f"{damaged[0][1]}; no good checkpoint is left{others}: bring one back from a copy, or move "
                    f"{self.folder} elsewhere to start the run from its beginning"
                )
            for leftover in self.folder.iterdir():
                if _LEFTOVER.fullmatch(leftover.name):
                    shutil.rmtree(leftover)
            for step, problem in damaged:
                aside = _unused(self.folder / f"{step}.damaged")
                os.rename(self.folder / str(step), aside)
                log.warning(
                    "%s; going on from the checkpoint of step %d (%s is now %s)", problem, good, step, aside.name
                )
            return good, ""
        except OSError as error:  # told to the other processes, which wait for an answer
            return None, f"{error.filename}: {error.strerror}"


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has a finished checkpoint there, good or damaged."""
    return bool(_steps(folder))


def last_good(folder: Path) -> int:
    """The step of a run's last checkpoint, after its files are verified; nothing in the folder is changed.

    Raises `CheckpointError` if there is none, or the last is damaged.
    """
    good, damaged = _newest_good(folder, _steps(folder))
    if damaged:
        raise CheckpointError(damaged[0][1])
    if good is None:
        raise CheckpointError(f"{folder} holds no checkpoint")
    return good


def load_state(path: Path, abstract: Any) -> tuple[Any, Any]:
    """(state, data_state) of one checkpoint, whose files are not verified here; see `RunCheckpoints.restore`."""
    wanted = named(abstract)
    metadata = ocp.metadata(path)
    _check_arrays(path, metadata.metadata, wanted)
    with _orbax_options():
        loaded = ocp.load(path, wanted)
    state = jax.tree.unflatten(jax.tree.structure(abstract), [loaded[name] for name in wanted])
    return state, metadata.custom_metadata["data_state"]


def recorded(run: Path, name: str) -> Path | None:
    """The file in which a run has recorded something: the undamaged copy of its newest checkpoint that has one, else
    the run folder's own. That one comes second, because somebody may have edited it.
    """
    folder = run / "checkpoints"
    for step in reversed(_steps(folder)):
        file = folder / str(step) / name
        try:
            manifest = (folder / str(step) / MANIFEST_FILE).read_text()
            sums = json.loads(manifest)["sha256"]
            if manifest == _manifest(step, sums) and sum_of_file(file) == sums[name]:
                return file
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, which opening the checkpoints tells
    return run / name if (run / name).is_file() else None


def newest_step(folder: Path) -> int:
    """The step of the newest finished checkpoint, good or damaged; 0 if there is none."""
    return max(_steps(folder), default=0)


def named(tree: Any) -> dict[str, Any]:
    """A flat dict in leaf order: what is on disk does not depend on optax's or NNX's container types."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _steps(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def _unused(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _orbax_options() -> ocp.Context:
    context = ocp.Context()
    context.array.saving.use_compression = False  # weights hardly compress
    context.asynchronous.timeout_secs = DAY  # in place of 20 minutes: a slow disk is better than no checkpoint
    return context


def _check_arrays(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Orbax would cast, and its sentences for other differences are long."""
    for name in wanted.keys() | stored.keys():
        if name not in stored or name not in wanted:
            has, lacks = ("this run", path) if name in wanted else (path, "this run")
            raise CheckpointError(f"array '{name}' is in {has} and not in {lacks}: they are of different models")
    for name, leaf in wanted.items():
        there, here = ((str(np.dtype(x.dtype)), tuple(x.shape)) for x in (stored[name], leaf))
        if there != here:
            raise CheckpointError(
                f"array '{name}' in {path} is {there[0]} {list(there[1])}, this run's is {here[0]} {list(here[1])}"
            )


# ---- the manifest ----


def _write_manifest(folder: Path, step: int) -> None:
    """The sums of what is on the disk: every file is flushed as it is read, the manifest after them."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = dict(zip(names, pool.map(lambda name: sum_of_file(folder / name, flush=True), names), strict=True))
    for inner in folder.rglob("*"):
        if inner.is_dir():
            sync_folder(inner)
    write_text(folder / MANIFEST_FILE, _manifest(step, sums))
    sync_folder(folder)


def _manifest(step: int, sums: dict[str, str]) -> str:
    """The only text that a manifest of these sums can be, its own sum included."""
    body = {"step": step, "sha256": sums}
    own = sum_of(json.dumps(body))
    return json.dumps(body | {"sha256_of_the_above": own}, indent=2) + "\n"


def _damage(folder: Path, step: int) -> str:
    """A sentence that names the damaged file of a checkpoint, or ""."""
    manifest = folder / MANIFEST_FILE
    try:
        text = manifest.read_bytes().decode()
        sums = json.loads(text)["sha256"]
        if text != _manifest(step, sums):
            return f"{manifest} is damaged: it does not have its own SHA-256, or is not of step {step}"
    except FileNotFoundError:
        return f"{manifest} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{manifest} is damaged: it is not a manifest"
    except OSError as error:
        return f"{manifest} cannot be read: {error.strerror}"

    def problem(name: str) -> str:
        try:
            if sum_of_file(folder / name) != sums[name]:
                return f"{folder / name} is damaged: its SHA-256 is not the one in {MANIFEST_FILE}"
        except FileNotFoundError:
            return f"{folder / name} is missing"
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
        return ""

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return next(filter(None, pool.map(problem, sums)), "")


def _newest_good(folder: Path, steps: list[int]) -> tuple[int | None, list[tuple[int, str]]]:
    """(the newest step that verifies, [(step, its damage)] of those after it, newest first)."""
    damaged: list[tuple[int, str]] = []
    for step in sorted(steps, reverse=True):
        problem = _damage(folder / str(step), step)
        if not problem:
            return step, damaged
        damaged.append((step, problem))
    return None, damaged


# ---- several processes ----


def from_first_process(ask: Callable[[], Any]) -> Any:
    """What `ask()` returns on process 0, JSON-able, on every process; the others do not call it, but wait for it."""
    if jax.process_count() == 1:
        return ask()
    padded = np.zeros(_MESSAGE_BYTES, np.uint8)
    if jax.process_index() == 0:
        encoded = json.dumps(ask()).encode()
        padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    meet()  # `ask` may take minutes, as verifying a checkpoint does
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)).rstrip(b"\0"))
