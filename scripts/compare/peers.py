"""Our TPU kernels beside other libraries', counted from what libtpu compiles.

For each head_dim, window and pass stand the cycles per 1024 query rows and head of our kernel, of JAX's and tokamax's
splash attention, each with the best of several block sizes, and of FlyWheel with its own (`swa-jax bench cycles` says
how cycles are found). `--packed` gives every call segment ids, as training does. A document has a place for each chip,
number of heads and choice of libraries. A library that is not installed is left out, and said.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from scripts.compare.runner import Cell, Comparison, Done, key_of, markdown
from swa_jax.base.errors import ConfigError
from swa_jax.bench import peer_calls
from swa_jax.bench.cycles import check, measure

Shape = tuple[int, int | None]  # head_dim, window; None: full attention
SHAPES: tuple[Shape, ...] = (
    *((128, window) for window in (128, 512, 1024, 2048, 4096, None)),
    *((size, window) for size in (64, 256) for window in (1024, None)),
)
SMALL = ((128, 128, 128), (256, 256, 256), (512, 256, 256), (512, 512, 512))  # for windows up to 512
LARGE = ((512, 512, 512), (1024, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (2048, 1024, 512))
PASSES = ("forward", "backward")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chip", default="v6e", help="v5e, v5p, v6e or v7x")
    parser.add_argument("--packed", action="store_true", help="every call has segment ids, of one document")
    parser.add_argument("--heads", type=int, nargs=2, default=(1, 1), metavar="N", help="query heads, KV heads")
    parser.add_argument("--libraries", nargs="+", choices=peer_calls.LIBRARIES, help="default: all that are installed")
    told = "head_dim and window, as 128x1024 or 128xfull; default: all of the table"
    parser.add_argument("--shapes", nargs="+", type=read_shape, default=SHAPES, metavar="DxWINDOW", help=told)


def read_shape(text: str) -> Shape:
    head_dim, _, window = text.partition("x")
    return int(head_dim), None if window == "full" else int(window)


class Setting(NamedTuple):
    """What the calls of one table share."""

    chip: str
    packed: bool  # every call has segment ids, of one document a row
    heads: tuple[int, int] = (1, 1)  # query heads, KV heads

    @property
    def shared(self) -> dict[str, Any]:
        """The settings of every call."""
        heads = {} if self.heads == (1, 1) else dict(zip("HK", self.heads, strict=True))
        return {"T": 8192} | heads | ({"packed": True} if self.packed else {})


class PeerCall(NamedTuple):
    function: str
    chip: str
    settings: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.function, self.chip, dict(sorted(self.settings.items())))


def ours(pass_: str, setting: Setting, head_dim: int, window: int | None) -> PeerCall:
    given = {"D": head_dim} | setting.shared
    if window is None:
        return PeerCall(f"full_{pass_}", setting.chip, given)
    return PeerCall(f"window_{pass_}", setting.chip, given | {"window": window})


def peer(name: str, pass_: str, setting: Setting, head_dim: int, window: int | None) -> Iterator[PeerCall]:
    shared = ours(pass_, setting, head_dim, window).settings | {"window": window}
    if name == "flywheel":
        if pass_ == "forward" or (window is None and not setting.packed):
            yield PeerCall(f"{name}_{pass_}", setting.chip, shared)
        return
    for sizes in SMALL if window is not None and window <= 512 else LARGE:
        blocks = dict(zip(("block_q", "block_kv", "block_kv_compute"), sizes, strict=True))
        yield PeerCall(f"{name}_{pass_}", setting.chip, shared | blocks)


def calls(setting: Setting, shapes: Sequence[Shape], peers: Sequence[str]) -> Iterator[PeerCall]:
    for shape in shapes:
        for pass_ in PASSES:
            yield ours(pass_, setting, *shape)
            for name in peers:
                yield from peer(name, pass_, setting, *shape)


def installed(libraries: Sequence[str]) -> list[str]:
    found = []
    for name in libraries:
        try:
            peer_calls.check_installed(f"{name}_forward")
            found.append(name)
        except ConfigError as error:
            print(error, file=sys.stderr)
    return found


def comparison(options: argparse.Namespace) -> Comparison:
    setting = Setting(options.chip, options.packed, tuple(options.heads))
    peers = installed(options.libraries or list(peer_calls.LIBRARIES))
    cells = [Cell(call.key, functools.partial(work, call)) for call in calls(setting, options.shapes, peers)]
    mark = f"peers on {setting.chip}" + (", segment ids" if setting.packed else "")
    mark += "" if setting.heads == (1, 1) else f", {setting.heads[0]} heads over {setting.heads[1]}"
    mark += f", {' '.join(options.libraries)}" if options.libraries else ""
    return Comparison(mark, cells, lambda done: (table(setting, options.shapes, peers, done), []))


def work(call: PeerCall) -> dict[str, Any]:
    try:
        check([call.function], [call.chip], call.settings)
        measured = measure(*call)
    except ConfigError as error:  # blocks that need more VMEM than the chip has, for one
        return {"cycles": None, "why_not": str(error)}
    return {"cycles": measured.cycles_per_1024, "kernel_cycles": measured.kernel_cycles_per_1024}


def table(setting: Setting, shapes: Sequence[Shape], peers: Sequence[str], done: Done) -> str:
    """A row for each head_dim and window, and in brackets how many times our cycles a peer takes."""

    def cycles(call: PeerCall) -> float | None:
        return done.get(key_of(*call.key), {}).get("cycles")

    rows = []
    for head_dim, window in shapes:
        row = [str(head_dim), "full" if window is None else str(window)]
        for pass_ in PASSES:
            own = cycles(ours(pass_, setting, head_dim, window))
            row.append("-" if own is None else f"{own:.0f}")
            for name in peers:
                found = [one for call in peer(name, pass_, setting, head_dim, window) if (one := cycles(call))]
                ratio = f" ({min(found) / own:.2f})" if found and own else ""
                row.append(f"{min(found):.0f}{ratio}" if found else "-")
        rows.append(row)
    return markdown(["head_dim", "window", *(f"{p}: {name}" for p in PASSES for name in ("ours", *peers))], rows)
