"""Plant faults, one at a time, in a copy of the code, and see which the tests notice.

    python -m scripts.faults plant --only 'swa_jax/data/*' 'tpu-*'
    python -m scripts.faults draw --seed 1 --count 200

`plant` takes the known slips of scripts/faults.toml. First the tests run that a fault names; if these pass, those of
the file's room (`tests/model` for `swa_jax/model/`), always without the slow ones, as `make test` does. Results go to
`--out` after each fault; one whose text, file and tests are the same as there is not tried again.

`draw` takes slips that a program draws, as `slips.py` lists them: each turn over the files of the packages, in an order
that the seed decides, draws one slip a file, first its kind and then its place. The list is scripts/drawn_faults.json,
with the results: stop and go on as you like, also when code has moved. A slip that no test can see is marked there by
hand: its `result` is "equivalent", and `why` says why. `timeout`: the tests did not end. `--trace` finds out once which
lines each test runs (`trace.py`): then the tests run that run the slip's line, the fastest first, and otherwise, whole,
the files of tests that are near it by name. `--again` tries what was not caught, `--slow` by `make test-slow`'s tests.

A fault counts as caught if a test fails with it that passes without it. The exit status is 0 if at least 95 % are.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.faults import draw, plant
from swa_jax.errors import ConfigError


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("plant", "draw"))
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="names or files")
    parser.add_argument("--list", action="store_true", help="print the faults to try and their tests; run nothing")
    parser.add_argument("--out", type=Path, help="results, read and written")
    parser.add_argument("--timeout", type=float, help="seconds a run of tests (default: 900 for plant, 300 for draw)")
    parser.add_argument("--seed", type=int, default=1, help="of a new list (draw)")
    parser.add_argument("--count", type=int, default=200, help="of a new list (draw)")
    parser.add_argument("--trace", action="store_true", help="find out which lines each test runs (draw)")
    parser.add_argument("--again", action="store_true", help="try again what was not caught (draw)")
    parser.add_argument("--slow", action="store_true", help="by the tests of `make test-slow` (draw)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        return {"plant": plant, "draw": draw}[given.kind].main(given)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
