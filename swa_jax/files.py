"""Files and folders that are whole or not there: atomic writes, SHA-256 sums, new folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swa_jax.errors import CheckpointError, ConfigError, UserError

_BUCKET = re.compile(r"(gs|gcs|s3|s3a|r2|az|abfs|abfss|hdfs):/\S+")
_MARK = ".incomplete"  # lies in a folder while it is being written

# ---- files ----


def write_bytes(file: str | Path, data: bytes) -> None:
    """Write a file in one step: whoever reads it, even after a power cut, finds the old content or the new one."""
    partial = Path(f"{file}.partial")
    try:
        with partial.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)  # half a file is of no use, and would keep a full disk full
        raise


def write_text(file: str | Path, text: str) -> None:
    """Write text in UTF-8 as `write_bytes` does."""
    write_bytes(file, text.encode())


def write_json(file: str | Path, data: Any, indent: int = 2) -> None:
    """Write a JSON value as `write_bytes` does."""
    write_text(file, json.dumps(data, indent=indent) + "\n")


def read_json(file: Path, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
      error: the file holds something else.
      OSError: there is no such file, or it cannot be read.
    """
    try:
        data = json.loads(file.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise error(f"{file} is not valid JSON: {problem}") from None
    if not isinstance(data, dict):
        raise error(f"{file} must hold a JSON object")
    return data


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk: a rename or a new file in it is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- SHA-256 sums, in hexadecimal digits ----


def sum_of(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def sum_of_json(value: Any) -> str:
    """The sum of a JSON value; the order of keys does not count."""
    return sum_of(json.dumps(value, sort_keys=True))


def sum_of_file(
    file: Path, *, flush: bool = False, progress: Callable[[int], None] = lambda number: None
) -> str:
    """The sum of a file's bytes; `flush` puts them on the disk first, `progress` is told how many have been read."""
    total = hashlib.sha256()
    with file.open("rb") as data:
        if flush:
            os.fsync(data.fileno())
        while block := data.read(1 << 18):
            total.update(block)
            progress(len(block))
    return total.hexdigest()


# ---- folders ----


def check_local(path: str | Path, what: str) -> None:
    """Raise `ConfigError` if a path is the address of a bucket: weights, data and runs are on file systems alone.

    `Path` makes one slash of the two, so that `gs:/bucket` is found as well.
    """
    if _BUCKET.fullmatch(str(path)):
        raise ConfigError(
            f"{what} {path} is the address of a bucket, which is not read or written directly: mount the bucket on "
            "every machine (for gs:// with GCS FUSE, see docs/pods.md), and give the path of the mounted folder"
        )


def check_destination(destination: str | Path) -> Path:
    """The absolute path of a folder that may be written: one that does not exist, or is empty."""
    check_local(destination, "the destination")
    path = Path(destination).expanduser().resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{destination} exists already; give a folder that does not, or remove it first"
        )
    return path


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder `<destination>.partial` to write into, renamed to `destination` at the end and removed on an error.

    What a killed run left there is cleared away, but only a folder that carries our mark.
    """
    partial = partial_folder(destination)
    if (
        partial.exists()
        and not (partial / _MARK).is_file()
        and not (partial.is_dir() and not any(partial.iterdir()))
    ):
        raise CheckpointError(
            f"{partial} is in the way and was not made by an interrupted run; move it elsewhere"
        )
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        (partial / _MARK).touch()
        yield partial
        (partial / _MARK).unlink()
        os.replace(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_folder(destination: Path) -> Path:
    """Where `new_folder` writes."""
    return destination.with_name(destination.name + ".partial")
