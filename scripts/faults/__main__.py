"""Plant faults, one at a time, in a copy of the code, and see which the tests notice.

    python -m scripts.faults plant --only 'swa_jax/data/*' 'tpu-*'
    python -m scripts.faults draw --seed 1 --count 200

`plant` takes the known slips of scripts/faults.toml. First the tests run that a fault names; if these pass, those of
the file's room (`tests/model` for `swa_jax/model/`), always without the slow ones, as `make test` does. Results go to
`--out` after each fault; one whose text, file and tests are the same as there is not tried again.

`draw` takes slips that a program draws, as `slips.py` lists them: each turn over the files of the packages, in an order
that the seed decides, draws one slip a file, first its kind and then its place. It is tried by the files of tests that
are near it by name. The list is scripts/drawn_faults.json, with the results: stop and go on as you like, also when code
has moved. A slip that no test can see is marked there by hand: its `result` is "equivalent", and `why` says why.
`timeout`: the tests did not end. `--again` tries what was not caught, `--slow` by the tests of `make test-slow`.

A fault counts as caught if a test fails with it that passes without it. The exit status is 0 if at least 95 % are.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.faults import draw, plant
from swa_jax.base.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, metavar="plant|draw")
    known, drawn = kinds.add_parser("plant"), kinds.add_parser("draw")
    for kind, module in ((known, plant), (drawn, draw)):
        kind.set_defaults(run=module.main)
        kind.add_argument("--list", action="store_true", help="print the faults to try and their tests; run nothing")
        kind.add_argument("--out", type=Path, help="results, read and written")
        kind.add_argument("--timeout", type=float, help=f"seconds a run of tests; default: {module.SECONDS}")
    known.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="names or files")
    drawn.add_argument("--seed", type=int, default=1, help="of a new list")
    drawn.add_argument("--count", type=int, default=200, help="of a new list")
    drawn.add_argument("--again", action="store_true", help="try again what was not caught")
    drawn.add_argument("--slow", action="store_true", help="by the tests of `make test-slow`")
    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
