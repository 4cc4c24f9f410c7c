"""Compare methods as the papers do, at a size that a CPU runs, and write the tables of docs/.

    python -m scripts.compare swat --seeds 0 1 2 --docs docs/small-scale.md

| name | what |
|---|---|
| swat, swat-longer | SWAT's Tables 2 and 3, trained from scratch |
| swiattn, swiattn-chains | SwiAttn's continued pretraining and its baselines, on needles and on models of chains |
| swiattn-ablations | its Table 4, on models of chains |
| swaa | SWAA's Table 1: LoRA on a model's own replies beside LoRA on plain text |
| card | which layers and heads a model of chains needs |
| windows | does a large window delay long look-ups when a hybrid is trained? |
| plants | which planted heads each selection method finds |
| contrasts | is one method of `swa-jax compare` above another, and could its prompts tell? |
| chips | what plans go by, beside timings of real chips |
| peers | our TPU kernels beside other libraries', counted from what libtpu compiles |
| generation | prefill and decode beside transformers on this machine's CPU |

What is measured goes to `cells.jsonl` in --out, so that the same command goes on after an interruption; `--report-only`
measures nothing. The table goes to `table.md` there, and with `--docs FILE` between its two marks in a document.
`python -m scripts.compare NAME --help` has what a comparison takes.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from scripts.compare.runner import run
from swa_jax.base.errors import UserError

MODULES = dict.fromkeys(("swat", "swat-longer", "swiattn", "swiattn-chains", "swiattn-ablations"), "training")
OTHERS = ("swaa", "card", "windows", "plants", "contrasts", "chips", "peers", "generation")
MODULES |= {name: name for name in OTHERS}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    given = sys.argv[1:] if arguments is None else list(arguments)
    for name, module in MODULES.items():
        one = kinds.add_parser(name)
        if name in given:
            one.add_argument("--out", type=Path, default=Path("runs") / f"compare-{name}", help="default: %(default)s")
            one.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these rows of the table")
            one.add_argument("--limit", type=int, help="stop after so many new cells")
            one.add_argument("--report-only", action="store_true", help="measure nothing")
            one.add_argument("--docs", type=Path, help="a document to put the table into")
            importlib.import_module(f"scripts.compare.{module}").add_options(one)
    options = parser.parse_args(given)
    try:
        print(run(importlib.import_module(f"scripts.compare.{MODULES[options.name]}").comparison(options), options))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
