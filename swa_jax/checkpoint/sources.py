"""Where an import reads from: a folder, a repository of the Hugging Face hub, or a bucket.

The last two are read where they are, by ranges of bytes: their weights are never on this machine's disk twice.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from swa_jax.base.errors import CheckpointError, ConfigError, UnreachableError, reason
from swa_jax.data.chat import NAMED_TEMPLATES

GGUF = ".gguf"
GGUF_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # a file of a model in several
SCHEMES = ("hf", "gs", "s3", "az")
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}
HUB_ID = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+?)(?:@([^@]+))?/?")
REQUESTS = 4  # at once, for one part of a tensor


class RemoteFile:
    """A file in another place; it looks like a `Path` that is only read."""

    def __init__(self, folder: RemoteFolder, name: str, size: int | None):
        self.folder, self.name, self.size, self.path = folder, name, size, f"{folder.path}/{name}"

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}"

    def is_file(self) -> bool:
        return self.size is not None

    def open(self, mode: Literal["rb"] = "rb") -> RemoteBytes:
        return RemoteBytes(self)

    def read_bytes(self) -> bytes:
        with self.open() as opened:
            return opened.read(self.size or 0)

    def range(self, start: int, end: int) -> bytes:
        """The bytes from `start` to below `end`. Raises `UnreachableError`."""
        with _reached(self), self.folder.files.open(self.path, "rb", cache_type="none") as f:
            f.seek(start)
            data: bytes = f.read(end - start)
        if len(data) != end - start:
            raise UnreachableError(f"{self} broke off while it was read: start the same command again")
        return data


class RemoteBytes:
    """A remote file opened; it is read as local ones are."""

    def __init__(self, file: RemoteFile):
        self.file, self.size, self.place = file, file.size or 0, 0
        self.requests = concurrent.futures.ThreadPoolExecutor(REQUESTS)

    def __enter__(self) -> RemoteBytes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.requests.shutdown(cancel_futures=True)

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        self.place = self.size + place if whence == io.SEEK_END else place
        return self.place

    def readinto(self, out: memoryview) -> int:
        end = min(self.place + len(out), self.size)
        count = end - self.place
        step = max(-(-count // REQUESTS), 1 << 20)
        starts = range(self.place, end, step)
        pieces = self.requests.map(lambda start: self.file.range(start, min(start + step, end)), starts)
        for start, piece in zip(starts, pieces, strict=True):
            out[start - self.place : start - self.place + len(piece)] = piece
        self.place = end
        return count

    def read(self, size: int) -> bytes:
        data = bytearray(min(size, max(self.size - self.place, 0)))
        self.readinto(memoryview(data))
        return bytes(data)


class RemoteFolder:
    """A folder in another place, listed once."""

    def __init__(self, url: str, files: Any, path: str, local: Path | None = None):
        """`files` is an fsspec file system, `path` the folder in it, `local` a folder that has some of its files."""
        self.url, self.files, self.path, self.local = url, files, path.rstrip("/"), local
        with _reached(self):
            listed = {entry["name"].rsplit("/", 1)[-1]: entry for entry in files.ls(self.path, detail=True)}
            if listed.get(NAMED_TEMPLATES, {}).get("type") == "directory":
                inside = files.ls(f"{self.path}/{NAMED_TEMPLATES}", detail=True)
                listed |= {"/".join(entry["name"].rsplit("/", 2)[-2:]): entry for entry in inside}
        self.entries = {name: entry for name, entry in listed.items() if entry["type"] == "file"}

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ModelFile:
        if self.local is not None and (self.local / name).is_file():
            return self.local / name
        entry = self.entries.get(name)
        return RemoteFile(self, name, None if entry is None else int(entry["size"]))

    def iterdir(self) -> Iterator[ModelFile]:
        return (self / name for name in self.entries)


ModelFile = Path | RemoteFile
ModelFolder = Path | RemoteFolder
OpenedFile = io.BufferedReader | RemoteBytes


@contextlib.contextmanager
def _reached(place: object) -> Iterator[None]:
    try:
        yield
    except (UnreachableError, AssertionError):
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{place} does not exist, or may not be read with your login") from None
    except Exception as error:  # what the libraries of stores raise is an Exception and no more
        if type(error).__name__ == "GatedRepoError":
            raise _gated(place) from None
        raise UnreachableError(f"{place} cannot be read now ({reason(error)}): start the same command again") from None


def _gated(place: object) -> CheckpointError:
    return CheckpointError(
        f"{place} is gated: accept its terms on the hub and log in (`hf auth login`), or give a folder"
    )


def open_source(source: str | Path) -> ModelFolder:
    """The folder of a model: on this machine, or in another place.

    Args:
      source: a folder; a hub id such as "Qwen/Qwen3-0.6B", with or without `hf://` before and `@revision` behind; or
        the address of a folder in a bucket, such as gs://bucket/folder.

    Raises:
      CheckpointError: there is none.
      UnreachableError: it cannot be reached.
      ConfigError: the package that reads such buckets is not installed.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    text = str(source)
    scheme = text.split("://")[0] if "://" in text else ""
    local = isinstance(source, Path) or folder.exists() or text.startswith((".", "~", "/"))
    hub = HUB_ID.fullmatch(text)
    if hub is not None and scheme in ("", "hf") and not local:
        return _hub_folder(hub[1], hub[2])
    if scheme in SCHEMES and scheme != "hf":
        return _bucket_folder(scheme, text)
    raise CheckpointError(
        f"{source} is no folder; give a folder with config.json, a hub id such as 'Qwen/Qwen3-0.6B', a GGUF file, or "
        "a folder in a bucket such as gs://bucket/model"
    )


def gguf_file(source: str | Path) -> ModelFile | None:
    """The GGUF file that `source` names, here, on the hub (owner/model/name.gguf) or in a bucket; None: it names none.

    Raises `CheckpointError` where there is no such file, and as `open_source`.
    """
    text, path = str(source), Path(source).expanduser()
    if not text.lower().endswith(GGUF) or path.is_dir():
        return None
    folder, _, name = text.rpartition("/")
    hub = isinstance(source, str) and HUB_ID.fullmatch(folder) and not path.parent.exists()
    file = open_source(folder) / name if hub or "://" in text else path
    if not file.is_file():
        raise CheckpointError(f"{source} is no file: give a GGUF file, or the folder of a model")
    return file


def _bucket_folder(scheme: str, url: str) -> RemoteFolder:
    import fsspec

    try:
        files = fsspec.filesystem(scheme)
    except ImportError:
        raise ConfigError(
            f"{url}: reading {scheme}:// needs the package {_PACKAGES[scheme]}, which is not installed: run pip "
            f"install {_PACKAGES[scheme]}, or mount the bucket and give the mounted folder"
        ) from None
    return RemoteFolder(url.rstrip("/"), files, files._strip_protocol(url))


# ---- the Hugging Face hub ----


def _hub_folder(repository: str, revision: str | None) -> ModelFolder:
    """The repository; its files are read from the hub's cache where that has them. Without the hub: the cache alone."""
    from huggingface_hub import HfApi, HfFileSystem
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        commit = HfApi().model_info(repository, revision=revision).sha
    except GatedRepoError:
        raise _gated(f"'{repository}'") from None
    except RevisionNotFoundError:
        raise CheckpointError(f"'{repository}' on the Hugging Face hub has no revision '{revision}'") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise CheckpointError(f"'{repository}' is neither a folder here nor a model on the Hugging Face hub") from None
    except (HTTPError, OSError) as error:
        if (cached := cached_snapshot(repository, revision)) is not None:
            return cached
        raise UnreachableError(
            f"'{repository}' is no folder here, and the Hugging Face hub cannot be reached ({reason(error)}); give a "
            "folder with the downloaded model"
        ) from None
    url = f"{repository}@{commit}"
    return RemoteFolder(f"hf://{url}", HfFileSystem(), url, cached_snapshot(repository, commit))


def cached_snapshot(repository: str, revision: str | None) -> Path | None:
    """The snapshot of a repository in the hub's cache; it may lack some of the files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def named_templates(folder: ModelFolder) -> list[str]:
    """The chat templates beside the default one, by their names in the folder."""
    inside: Iterable[str] = folder.entries if isinstance(folder, RemoteFolder) else ()
    if isinstance(folder, Path):
        inside = (f"{NAMED_TEMPLATES}/{file.name}" for file in (folder / NAMED_TEMPLATES).glob("*.jinja"))
    return sorted(name for name in inside if name.startswith(f"{NAMED_TEMPLATES}/") and name.endswith(".jinja"))


def stamp(file: ModelFile) -> str:
    """What changes with the content of a file, as far as its store says so."""
    if isinstance(file, RemoteFile):
        entry = file.folder.entries[file.name]
        keys = ("size", "blob_id", "etag", "ETag", "md5Hash", "generation", "mtime", "updated", "LastModified")
        return repr([str(entry[key]) for key in keys if key in entry])
    found = file.stat()
    return repr([found.st_size, found.st_mtime_ns])


# ---- files beside the weights ----


def companion(folder: ModelFolder, name: str) -> ModelFile | None:
    """A small file of a model folder, such as its tokenizer; None: there is none.

    Raises `CheckpointError` for what is no regular file, and for a link out of the folder: copied, it would carry a
    file of this machine along with the model. Links of the hub's cache into its own store are followed.
    """
    file = folder / name
    if isinstance(file, RemoteFile):
        return file if file.is_file() else None
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    if found is None and not file.is_symlink():
        return None
    target, home = file.resolve(), file.parents[name.count("/")].resolve()
    stores = [home]
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        stores.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(store) for store in stores):
        raise CheckpointError(
            f"{file} is a link to {target}, outside the model's folder: put a copy of the file there, or remove it"
        )
    if found is None or not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file} is no regular file: replace or remove it")
    return file
