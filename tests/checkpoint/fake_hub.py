"""A Hugging Face hub on this machine, with one repository, which counts what it sends."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from web_server import Requests, web_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/model"


def in_cache(cache: Path, folder: Path, repository: str = REPOSITORY, leave_out: str = "") -> None:
    """A folder's files in the hub's cache as its own library makes it: links into a store of blobs."""
    home = cache / f"models--{repository.replace('/', '--')}"
    for part in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (home / part).mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for file in folder.iterdir():
        if file.name != leave_out:
            shutil.copy(file, home / "blobs" / f"of-{file.name}")
            (home / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/of-{file.name}")


class HubRequests(Requests):
    def do_GET(self) -> None:
        self.server.hub.answer(self)

    do_HEAD = do_POST = do_GET


@contextlib.contextmanager
def running_hub(folder: Path) -> Iterator["Hub"]:
    hub = Hub(folder)
    with web_server(HubRequests, hub=hub) as hub.url:
        yield hub


class Hub:
    """Serves a folder as `someone/model`, revisions `main` and `COMMIT`."""

    url: str

    def __init__(self, folder: Path):
        self.folder = folder
        self.sent: dict[str, int] = {}  # bytes by file
        self.breaks_after: int | None = None  # bytes of weights, after which it answers nothing more

    def answer(self, request: Any) -> None:
        path = unquote(request.path.split("?")[0])
        length = int(request.headers.get("content-length") or 0)
        body = request.rfile.read(length)
        revision = rf"(main|{COMMIT})"
        if re.fullmatch(rf"/api/models/{REPOSITORY}(/revision/{revision})?", path):
            self.json(request, {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": [], "tags": []})
        elif re.fullmatch(rf"/api/models/{REPOSITORY}/tree/{revision}/?", path):
            self.json(request, [self.entry(file) for file in sorted(self.folder.iterdir())])
        elif re.fullmatch(rf"/api/models/{REPOSITORY}/paths-info/{revision}", path):
            names = json.loads(body)["paths"] if body.startswith(b"{") else re.findall(rb"paths=([^&]+)", body)
            found = [self.folder / (name if isinstance(name, str) else name.decode()) for name in names]
            self.json(request, [self.entry(file) for file in found if file.is_file()])
        elif match := re.fullmatch(rf"/{REPOSITORY}/resolve/{revision}/([^/]+)", path):
            self.file(request, self.folder / match[2])
        else:
            message = {"error": "Repository not found"}
            self.json(
                request, message, 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            )

    def entry(self, file: Path) -> dict[str, Any]:
        return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40}

    def json(self, request: Any, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        request.say(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def file(self, request: Any, file: Path) -> None:
        data = file.read_bytes()
        headers = {"ETag": '"0"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range") or "")
        status, part = 200, data
        if wanted:
            first, last = int(wanted[1]), int(wanted[2])
            status, part = 206, data[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        weights = sum(size for name, size in self.sent.items() if name.endswith(".safetensors"))
        if self.breaks_after is not None and weights > self.breaks_after:
            return request.say(b"no more", 403)  # an answer that is not asked for again
        if request.command == "GET":
            self.sent[file.name] = self.sent.get(file.name, 0) + len(part)
        return request.say(part, status, headers)
