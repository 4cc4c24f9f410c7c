"""Reads libtpu's listings of a compiled program: how many bundles (instruction words) each block of code has.

A block ends where control flow may leave or enter it. Its bundles are its cycles, hazards and waits for memory aside.
"""

import re
from pathlib import Path
from typing import NamedTuple

_LISTING = re.compile(r"^\d+-(.+)-\d+-final_bundles\.txt$")
_USE = re.compile(r"^\d+-(.+)-\d+-final_hlo-static-per-bundle-utilization\.txt$")
# "0x1a8 PF: > { ... }": address, label of a block's start if any, loop depth, instructions.
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT)?\s*:\s*>*\s*\{(.*)")
_BRANCH = re.compile(r"\bsbr\.(?:rel|abs)\b")
_VECTOR_UNITS = ("MXU", "XLU", "VALU", "EUP")


class BundleBlock(NamedTuple):
    bundles: int
    matmuls: int  # instructions that start one
    is_vector: bool  # uses a vector unit or stores vectors


class Code(NamedTuple):
    """The blocks of one op by what decides how often they run."""

    bodies: tuple[int, ...]  # bundles of the blocks with matmuls, as they stand in the code
    other_vector: int  # bundles of all other vector blocks
    scalar: int  # bundles of the rest


def read_code(folder: Path) -> dict[str, Code]:
    """The code of every op that libtpu listed in the folder, by the op's name."""
    use = {match[1]: file for file in folder.iterdir() if (match := _USE.match(file.name))}
    code = {}
    for file in folder.iterdir():
        if match := _LISTING.match(file.name):
            table = use.get(match[1])
            code[match[1]] = sort_blocks(
                split_blocks(file.read_text(errors="replace"), table.read_text() if table else "")
            )
    return code


def split_blocks(listing: str, utilization: str) -> list[BundleBlock]:
    """The blocks of a listing (`final_bundles.txt`), in order; the other text has a line of use counts a bundle."""
    uses = _vector_use(utilization)
    blocks: list[BundleBlock] = []
    bundles = matmuls = index = 0
    is_vector = False

    def close() -> None:
        nonlocal bundles, matmuls, is_vector
        if bundles:
            blocks.append(BundleBlock(bundles, matmuls, is_vector))
        bundles, matmuls, is_vector = 0, 0, False

    for line in listing.splitlines():
        if not (match := _BUNDLE.match(line)):
            continue
        if match[1]:
            close()
        bundles += 1
        matmuls += match[2].count("vmatmul")
        is_vector |= index < len(uses) and uses[index]
        index += 1
        if _BRANCH.search(match[2]):
            close()
    close()
    return blocks


def sort_blocks(blocks: list[BundleBlock]) -> Code:
    return Code(
        bodies=tuple(b.bundles for b in blocks if b.matmuls),
        other_vector=sum(b.bundles for b in blocks if b.is_vector and not b.matmuls),
        scalar=sum(b.bundles for b in blocks if not b.is_vector and not b.matmuls),
    )


def _vector_use(utilization: str) -> list[bool]:
    """For each bundle, whether it uses a vector unit. The text: title, names of units, their slots, title, rows."""
    lines = utilization.splitlines()
    if len(lines) < 4:
        return []
    units = [unit.strip() for unit in lines[1].split(",")]
    wanted = [i for i, unit in enumerate(units) if unit in _VECTOR_UNITS]
    rows = (line.split() for line in lines[4:] if line.strip())
    return [any(row[i] != "0" for i in wanted) for row in rows]
