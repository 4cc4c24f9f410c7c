"""Our TPU kernels beside other libraries', counted from what libtpu compiles: `python scripts/compare_peers.py`.

For each head_dim, window and pass stand the cycles per 1024 query rows and head of our kernel and of JAX's and
tokamax's splash attention, each with the best of several block sizes (`swa-jax bench cycles` says how cycles are
found). `--packed` gives every call segment ids, as training does. What is measured goes to `cycles.jsonl` in --out, so
that the same command goes on after an interruption. `--docs FILE` puts the table into a document, between the marks of
this chip. A library that is not installed is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from documents import put_between

from swa_jax.bench import peer_calls
from swa_jax.bench.cycles import check, measure
from swa_jax.errors import ConfigError
from swa_jax.files import write_text

Shape = tuple[int, int | None]  # head_dim, window; None: full attention
SHAPES: tuple[Shape, ...] = (
    *((128, window) for window in (128, 512, 1024, 2048, 4096, None)),
    *((size, window) for size in (64, 256) for window in (1024, None)),
)
SMALL = ((128, 128, 128), (256, 256, 256), (512, 256, 256), (512, 512, 512))  # for windows up to 512
LARGE = ((512, 512, 512), (1024, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (2048, 1024, 512))
PASSES = ("forward", "backward")
END = "<!-- end of peers -->"


class Setting(NamedTuple):
    """What the calls of one table share."""

    chip: str
    packed: bool  # every call has segment ids, of one document a row

    @property
    def begin(self) -> str:
        """The mark before the table in a document."""
        ids = ", segment ids" if self.packed else ""
        return f"<!-- peers on {self.chip}{ids}: made by scripts/compare_peers.py -->\n"


class Call(NamedTuple):
    function: str
    chip: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return json.dumps(self, sort_keys=True)


def shared_settings(setting: Setting, head_dim: int, window: int | None) -> dict[str, Any]:
    given = {"window": window} if window is not None else {}
    return {"D": head_dim, "T": 8192} | given | ({"packed": True} if setting.packed else {})


def ours(pass_: str, setting: Setting, head_dim: int, window: int | None) -> Call:
    kind = "full" if window is None else "window"
    return Call(f"{kind}_{pass_}", setting.chip, shared_settings(setting, head_dim, window))


def peer(name: str, pass_: str, setting: Setting, head_dim: int, window: int | None) -> Iterator[Call]:
    shared = shared_settings(setting, head_dim, window) | {"window": window}
    for block_q, block_kv, compute in SMALL if window is not None and window <= 512 else LARGE:
        blocks = {"block_q": block_q, "block_kv": block_kv, "block_kv_compute": compute}
        yield Call(f"{name}_{pass_}", setting.chip, shared | blocks)


def calls(setting: Setting, shapes: Sequence[Shape], peers: list[str]) -> Iterator[Call]:
    for head_dim, window in shapes:
        for pass_ in PASSES:
            yield ours(pass_, setting, head_dim, window)
            for name in peers:
                yield from peer(name, pass_, setting, head_dim, window)


def table(setting: Setting, shapes: Sequence[Shape], peers: list[str], done: dict[str, dict[str, Any]]) -> str:
    """A row for each head_dim and window, and in brackets how many times our cycles a peer takes."""
    head = ["head_dim", "window", *(f"{pass_}: {name}" for pass_ in PASSES for name in ("ours", *peers))]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for head_dim, window in shapes:
        row = [str(head_dim), "full" if window is None else str(window)]
        for pass_ in PASSES:
            own = done.get(ours(pass_, setting, head_dim, window).key, {}).get("cycles")
            row.append("-" if own is None else f"{own:.0f}")
            for name in peers:
                found = [done.get(call.key, {}) for call in peer(name, pass_, setting, head_dim, window)]
                best = min((one["cycles"] for one in found if one.get("cycles")), default=None)
                ratio = f" ({best / own:.2f})" if best and own else ""
                row.append("-" if best is None else f"{best:.0f}{ratio}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def read_shape(text: str) -> Shape:
    head_dim, _, window = text.partition("x")
    return int(head_dim), None if window == "full" else int(window)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chip", default="v6e", help="v5e, v5p, v6e or v7x")
    parser.add_argument("--packed", action="store_true", help="every call has segment ids, of one document")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=read_shape,
        default=SHAPES,
        metavar="DxWINDOW",
        help="head_dim and window, as 128x1024 or 128xfull; default: all of the table",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/compare-peers"))
    parser.add_argument("--calls", type=int, help="stop after so many new ones")
    parser.add_argument("--docs", type=Path, help="a document to put the table into")
    options = parser.parse_args()
    setting, shapes = Setting(options.chip, options.packed), options.shapes
    peers = []
    for name in peer_calls.MAKERS:
        try:
            peer_calls.check_installed(f"{name}_forward")
            peers.append(name)
        except ConfigError as error:
            print(error)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "cycles.jsonl"
    kept = file.read_text().splitlines() if file.exists() else []
    done = {line["key"]: line for line in map(json.loads, kept)}
    new = [call for call in calls(setting, shapes, peers) if call.key not in done]
    for number, call in enumerate(new[: options.calls]):
        line: dict[str, Any] = {"key": call.key, "cycles": None}
        try:
            check([call.function], [call.chip], call.settings)
            measured = measure(*call)
            line |= {"cycles": measured.cycles_per_1024, "kernel_cycles": measured.kernel_cycles_per_1024}
        except ConfigError as error:  # blocks that need more VMEM than the chip has, for one
            line["why_not"] = str(error)
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        done[call.key] = line
        print(f"{number + 1} of {len(new)}: {call}: {line['cycles']}", flush=True)
    text = table(setting, shapes, peers, done)
    write_text(options.out / f"table-{setting.chip}{'-packed' if setting.packed else ''}.md", text + "\n")
    if options.docs:
        try:
            put_between(options.docs, setting.begin, END, f"\n{text}\n\n")
        except ConfigError as error:
            sys.exit(str(error))
    print(text)


if __name__ == "__main__":
    main()
