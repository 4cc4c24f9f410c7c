"""Do to the library what a hard day does, at random, and see that nothing is lost.

    python -m scripts.torture training --count 60 --seed 0 --json interruptions.json

| kind | --count | what must hold |
|---|---|---|
| training | signals to training runs | every loss, and every newest checkpoint |
| import | signals to imports of a large model | every byte, and nothing is left beside it |
| commands | signals to evaluations, selections and scripts | every number |
| checkpoints | damages of a run's checkpoints | each is named, and the newest good one is offered |
| fuzz | damages of model folders that are imported | one sentence, or a sound model |

SIGKILL, SIGTERM and SIGINT (Ctrl-C) come at random moments; the same command is then started again, until it has been
interrupted so often and has finished. What it gives must be equal, bit for bit, to what it gives undisturbed.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from scripts.torture.damage import damage_checkpoints
from scripts.torture.fuzz import fuzz
from scripts.torture.jobs import COMMANDS, interrupt_jobs

COUNTS = {"training": 60, "import": 20, "commands": 20, "checkpoints": 200, "fuzz": 5000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=COUNTS)
    parser.add_argument("--count", type=int, help=f"default: {COUNTS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, metavar="NAME", help="some of the commands")
    parser.add_argument("--first", type=int, default=0, help="number of the first folder that fuzz damages")
    parser.add_argument("--steps", type=int, default=400, help="of a training run")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the model that is imported")
    parser.add_argument("--folder", type=Path, help="on the disk to try; default: the system's temporary folder")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    given.count = COUNTS[given.kind] if given.count is None else given.count
    began = time.monotonic()
    if given.kind == "fuzz":
        counts, bad = fuzz(given.count, given.seed, first=given.first)
    elif given.kind == "checkpoints":
        counts, bad = damage_checkpoints(given.count, random.Random(given.seed))
    else:
        counts, bad = interrupt_jobs(given)
    figures = {"seed": given.seed, "count": given.count, **counts, "bad": len(bad)}
    figures["seconds"] = round(time.monotonic() - began)
    for key, value in figures.items():
        print(f"{key:40} {value}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
