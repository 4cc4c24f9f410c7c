"""Files and folders that are whole or not there: atomic writes, SHA-256 sums, new folders, a store of results."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from swa_jax.base.errors import CheckpointError, ConfigError, UnreachableError, UserError

_BUCKET = re.compile(r"(gs|gcs|s3|s3a|r2|az|abfs|abfss|hdfs):/\S+")
_MARK = ".incomplete"  # lies in a folder while it is being written; holds what the folder is to become
log = logging.getLogger(__name__)

# ---- files ----


@contextlib.contextmanager
def new_file(file: str | Path) -> Iterator[BinaryIO]:
    """A file to write into, which appears in one step: whoever reads it, even after a power cut, finds the old content
    or the new one."""
    partial = Path(f"{file}.partial")
    try:
        with partial.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:  # as of a write
            error.filename = str(file)
        partial.unlink(missing_ok=True)  # half a file is of no use, and would keep a full disk full
        raise


def write_bytes(file: str | Path, data: bytes) -> None:
    """Write a file as `new_file` does."""
    with new_file(file) as out:
        out.write(data)


def write_text(file: str | Path, text: str) -> None:
    """Write text in UTF-8 as `write_bytes` does."""
    write_bytes(file, text.encode())


def write_json(file: str | Path, data: Any, indent: int = 2) -> None:
    """Write a JSON value as `write_bytes` does."""
    write_text(file, json.dumps(data, indent=indent) + "\n")


def write_lines(file: str | Path, values: Iterable[Any]) -> None:
    """Write JSON values, one a line, as `write_bytes` does."""
    write_text(file, "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))


def read_utf8(file: Path) -> str:
    """The text of a file, without the mark that Windows puts before it. Raises `ConfigError` if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error.reason} (byte {error.start + 1})") from None


def read_json(file: Path, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
      error: the file holds something else.
      OSError: there is no such file, or it cannot be read.
    """
    return parse_json(file.read_bytes(), file, error)


def parse_json(
    data: bytes, name: object, error: type[UserError] = ConfigError, *, finite: bool = False
) -> dict[str, Any]:
    """The JSON object in `data`: as `parse_json_value`, and anything but an object is refused too."""
    value = parse_json_value(data, name, error, finite=finite)
    if not isinstance(value, dict):
        raise error(f"{name} must hold a JSON object")
    return value


def parse_json_value(data: bytes, name: object, error: type[UserError] = ConfigError, *, finite: bool = False) -> Any:
    """The JSON value in `data`, which `name` stands for in sentences.

    Args:
      finite: refuse NaN, Infinity and numbers too large for a float as well, which JSON proper does not have.

    Raises:
      error: something else, half a pair of surrogates, which is no character and cannot be written, or an object that
        has a key twice: readers differ in which of the two they take.
    """

    def number(text: str) -> float:
        if finite and not math.isfinite(value := float(text)):
            raise error(f"{name} holds the number {text[:40]}, which is none that can be used")
        return value if finite else float(text)

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise error(f"{name} has the key {twice[:200]!r} twice: remove one of them")
        return found

    try:
        text = data.decode("utf-8-sig")  # json itself would let halves of characters pass
        value = json.loads(text, object_pairs_hook=object_of, parse_float=number, parse_constant=number)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UserError:
        raise
    except RecursionError:
        raise error(f"{name} is not valid JSON for us: its lists and objects lie too deep in each other") from None
    except json.JSONDecodeError as problem:
        place = min(problem.pos, len(problem.doc.rstrip()))  # a text that ends too early does so on its last line
        before = problem.doc[:place].split("\n")
        line = "" if ", line " in str(name) else f"line {len(before)}, "
        raise error(f"{name} is not valid JSON: {problem.msg} ({line}column {len(before[-1]) + 1})") from None
    except UnicodeEncodeError as problem:
        half = problem.object[problem.start]
        raise error(f"{name} is not valid JSON: {half!r} alone is half a character") from None
    except UnicodeDecodeError as problem:
        raise error(f"{name} is not UTF-8: {problem.reason} (byte {problem.start + 1})") from None
    except ValueError:
        raise error(f"{name} is not valid JSON for us: a whole number in it has thousands of digits") from None
    return value


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


def sum_of_file(file: Path, *, flush: bool = False, progress: Callable[[int], None] = lambda number: None) -> str:
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


def cache_folder(name: str) -> Path:
    """A folder for what can be made again, in $SWA_JAX_CACHE or the user's cache folder; it is there on return.

    Raises:
      ConfigError: it cannot be made.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("SWA_JAX_CACHE") or Path(home) / "swa-jax").expanduser() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder} cannot be made ({error.strerror}): name another one in SWA_JAX_CACHE"
        ) from None
    return folder


_RESUMABLE = (KeyboardInterrupt, UnreachableError)  # what leaves the files of a folder that has an identity


def check_local(path: str | Path, what: str) -> None:
    """Raise `ConfigError` if a path is the address of a bucket: weights, data and runs are on file systems alone.

    `Path` makes one slash of the two, so that `gs:/bucket` is found as well.
    """
    if _BUCKET.fullmatch(str(path)):
        address = re.sub("(?<=:)/+", "//", str(path), count=1)
        raise ConfigError(
            f"{what} {address} is the address of a bucket, which is not read or written directly: mount the bucket on "
            "every machine (for gs:// with GCS FUSE, see docs/pods.md), and give the path of the mounted folder"
        )


def check_destination(destination: str | Path) -> Path:
    """The absolute path of a folder that may be written: one that does not exist, or is empty."""
    check_local(destination, "the destination")
    path = Path(destination).expanduser().resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} is there already: name a new folder, or remove that one first")
    return path


@contextlib.contextmanager
def new_folder(destination: Path, identity: str = "") -> Iterator[Path]:
    """A folder `<destination>.partial` to write into, renamed to `destination` at the end and removed on an error.

    What an interrupted run left there is cleared away, but only a folder that carries our mark. With an `identity` the
    folder is resumed instead: an interruption (Ctrl-C) leaves it, and a run with the same identity finds its files.

    Args:
      identity: says what the folder is to become, and changes with all that its content depends on.
    """
    partial = partial_folder(destination)
    mark = partial / _MARK
    if partial.exists() and not mark.is_file() and not (partial.is_dir() and not any(partial.iterdir())):
        raise CheckpointError(f"{partial} is in the way and was not made by an interrupted run; move it elsewhere")
    partial.mkdir(parents=True, exist_ok=True)
    with locked(mark) as opened:  # the mark is there before everything else, and goes after everything else
        try:
            if not identity or opened.read() != identity:
                _clear(partial)
                opened.truncate(0)
                opened.write(identity)
                opened.flush()
                os.fsync(opened.fileno())  # a power cut is not to leave files without the mark
                sync_folder(partial)
            yield partial
            sync_folder(partial)
            os.replace(partial, destination)
        except BaseException as error:
            if not (identity and isinstance(error, _RESUMABLE)):
                _clear(partial)
                mark.unlink(missing_ok=True)
                partial.rmdir()
            raise
    # Interrupted before this line, a run leaves a whole folder with a mark, which does no harm.
    (destination / _MARK).unlink(missing_ok=True)
    sync_folder(destination.parent)


def locked(mark: Path) -> TextIO:
    """The file opened, and locked until it is closed or this process ends; file systems without locks do without."""
    try:
        opened = mark.open("a+")
    except OSError:  # such as a full disk
        with contextlib.suppress(OSError):
            mark.parent.rmdir()
        raise
    opened.seek(0)
    try:
        fcntl.flock(opened.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        raise CheckpointError(f"another process is writing {mark.parent}: wait for it, or end it") from None
    except OSError:
        pass
    return opened


@contextlib.contextmanager
def alone(folder: Path, work: str) -> Iterator[None]:
    """Nobody else does the same work in a folder meanwhile; the lock goes with the process, however that ends.

    File systems without locks do without. Raises `ConfigError` where another process is at work.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process is {work} {folder}: wait for it, or name another folder") from None
        yield
    finally:
        os.close(lock)


def _clear(folder: Path) -> None:
    """Remove what is in a folder, its mark excepted."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MARK:
            path.unlink()


def partial_folder(destination: Path) -> Path:
    """Where `new_folder` writes."""
    return destination.with_name(destination.name + ".partial")


def check_room(folder: Path, size: int) -> None:
    """Raise `CheckpointError` if a disk has no room for `size` bytes more in a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < size:  # some network file systems do not say their size
        raise CheckpointError(
            f"the disk of {folder} has {_size(disk.free)} left, and {_size(size)} are needed: make room, "
            "or give a folder on another disk"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2g} MB"


# ---- what is known already ----
#
# A name or a path may stand for something else tomorrow, and a time says nothing. So what is kept belongs to content:
# to the sums of weights, data and options, which `digest` makes keys of. Equal keys, equal results.

START_OVER = "name another file, or remove this one to start over"
_STARTS = (b'{"content": ', b'{"key": ')  # of our lines


def digest(value: Any) -> str:
    """A key: 32 hexadecimal digits of the SHA-256 of plain JSON values, whatever the order of a mapping."""
    return sum_of_json(value)[:32]


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def tell_found(file: Path | None, found: int, total: int, kind: str, say: Callable[[str], object] = _to_stderr) -> None:
    """Say how many of `total` results of a kind, such as "replies", a run finds in a file and need not make, if any."""
    if found:
        say(f"{file}: found {found} of {total} {kind} here, doing {total - found}")


class Store:
    """Records by key, each a line of JSON that is written as it comes: a killed run loses no more than the one in work.

    Without a file, records are kept for this process alone. A line that is damaged is told in the log and does not
    count; it costs no other.

    Attributes:
      records: what is known, by key.
    """

    def __init__(self, file: Path | None, kind: str, content: Mapping[str, Any] | None = None, *, part: str = ""):
        """Reads what earlier runs have left.

        Args:
          kind: what the records are, for sentences: "scores of masks".
          content: what all of them depend on, beside their keys, as plain JSON values: the first line of the file.
          part: in place of `content`, its `digest`: the file may hold records of other parts, which stay there and do
            not count.

        Raises:
          ConfigError: the file holds something else, or records of other content.
        """
        self.records: dict[str, dict[str, Any]] = {}
        self._part = {"part": part} if part else {}
        self._file, self._content = file, None if content is None else {"content": dict(content)}
        self._whole: int | None = None  # bytes of the whole lines, where a kill has left half a line behind them
        if file is not None and file.exists():
            self._read(file, kind)

    def add(self, key: str, **record: Any) -> None:
        """Keep a record of JSON values, in place of the one that the key has."""
        self.records[key] = record
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._whole is not None:
            os.truncate(self._file, self._whole)
            self._whole = None
        with self._file.open("ab") as stream:
            if self._content is not None and not stream.tell():
                stream.write(_line(self._content))
            stream.write(_line({"key": key} | self._part | record))

    def _read(self, file: Path, kind: str) -> None:
        lines, half = _lines(file, kind)
        if half:
            self._whole = sum(len(line) + 1 for line in lines)
        values = [_value(line, file) for line in lines]
        if self._content is not None and lines:
            if values[0] is None or values[0].keys() != {"content"}:
                raise ConfigError(f"{file} holds no {kind}, or its first line is damaged: {START_OVER}")
            check_content(file, kind, values[0]["content"], self._content["content"])
            values[0] = {}
        for value in values:
            if value and "key" in value and value.pop("part", "") == self._part.get("part", ""):
                self.records[value.pop("key")] = value
        if damaged := [str(number) for number, value in enumerate(values, 1) if value is None]:
            one, few = len(damaged) == 1, f"lines {', '.join(damaged)}"
            which = f"line {damaged[0]}" if one else few if len(damaged) < 9 else f"{len(damaged)} lines"
            rest = "is damaged and does not count: what it" if one else "are damaged and do not count: what they"
            log.warning("%s: %s %s held is made again", file, which, rest)


def check_store(file: Path, kind: str) -> None:
    """Raise `ConfigError` if a file is there and `Store` would refuse it: no line of it is ours."""
    if file.exists():
        _lines(file, kind)


def _lines(file: Path, kind: str) -> tuple[list[bytes], bytes]:
    """The whole lines of a store's file, and what a kill has left behind them. Raises as `check_store`."""
    *lines, half = file.read_bytes().split(b"\n")
    cut = not lines and any(half[:8] == start[: len(half[:8])] for start in _STARTS)
    if not cut and not any(line.startswith(_STARTS) for line in lines):
        raise ConfigError(f"{file} holds no {kind}: {START_OVER}")
    return lines, half


def _line(value: dict[str, Any]) -> bytes:
    """As text of one line, with a sum by which damage shows."""
    return (json.dumps(value | {"sum": sum_of_json(value)[:8]}, ensure_ascii=False) + "\n").encode()


def _value(line: bytes, file: Path) -> dict[str, Any] | None:
    """What a line holds; None where it is damaged."""
    try:
        value = parse_json(line, file)
        return value if value.pop("sum") == sum_of_json(value)[:8] else None
    except (ConfigError, KeyError):
        return None


def check_content(
    file: Path, kind: str, before: Mapping[str, Any], now: Mapping[str, Any], advice: str = START_OVER
) -> None:
    """Raise `ConfigError`, which names what differs, where a file holds results of other content than is asked for."""
    differences = []
    for name in [*now, *(before.keys() - now.keys())]:
        one, other = before.get(name), now.get(name)
        if one == other:
            continue
        plain = all(isinstance(value, bool | int | float | None) or len(str(value)) < 32 for value in (one, other))
        differences.append(f"{name} was {one} there and is {other} here" if plain else f"other {name}")
    if differences:
        raise ConfigError(f"{file} holds {kind} of other content ({'; '.join(differences)}): {advice}")


def read_document(file: Path, kind: str = "", part: str = "", advice: str = "") -> dict[str, Any]:
    """The JSON object that a run keeps in a file and writes whole; {} where there is none yet.

    Raises:
      ConfigError: the file is damaged, or holds something else: its `part`, an object or a list, is missing. The
        sentence ends with `advice`.
    """
    if not file.exists():
        return {}
    try:
        document = read_json(file)
    except ConfigError as error:
        raise ConfigError(f"{error}: {advice}" if advice else str(error)) from None
    if part and not isinstance(document.get(part), dict | list):
        raise ConfigError(f"{file} holds no {kind}: {advice}")
    return document
