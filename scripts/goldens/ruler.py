"""The prompts that RULER's own generator makes of a small stand-in for its data: tests/golden/ruler.json.

Its code is taken out of the wheel and run as it stands, but for what it reads: the tokenizer is that of the bundled
model `recall`, essays, questions and words are those of tests/ruler_files.py, and sentences end at "." and "!", where
RULER asks NLTK.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from swa_jax.base.files import write_json
from swa_jax.evaluate.ruler import RULER_TASKS

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/ruler.json"
SEED, EXAMPLES, LENGTHS = 42, 4, (6000, 3000)
STUBS = {
    "long_context_eval/data/tokenizer.py": """
from tokenizers import Tokenizer
class Plain:
    def __init__(self, path):
        self.backend = Tokenizer.from_file(path)
    def text_to_tokens(self, text):
        return self.backend.encode(text, add_special_tokens=False).tokens
def select_tokenizer(kind, path):
    return Plain(path)
""",
    "wonderwords/__init__.py": "from wonderwords import random_word",
    "wonderwords/random_word.py": """
from pathlib import Path
def _get_words_from_text_file(name):
    file = {"nounlist.txt": "nouns", "adjectivelist.txt": "adjectives", "verblist.txt": "verbs"}[name]
    return [word.rstrip() for word in (Path(__file__).parents[1] / f"{file}.txt").open()]
""",
    "nltk/__init__.py": "",
    "nltk/tokenize.py": """
import re
def sent_tokenize(text):
    return [part.strip() for part in re.split(r"(?<=[.!])", text) if part.strip()]
""",
    "tqdm.py": "tqdm = iter",
}


def write_ruler(given: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from ruler_files import write_ruler_data

    found: dict[str, dict[str, list[list[object]]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with zipfile.ZipFile(given.wheel) as wheel:
            wheel.extractall(folder)
        write_ruler_data(folder)
        texts = folder / "long_context_eval/data/synthetic/json"
        essays = (folder / "essays.txt").read_text().replace("\n", "")
        (texts / "PaulGrahamEssays.json").write_text(json.dumps({"text": essays}))
        for name in ("squad.json", "hotpotqa.json"):
            (texts / name).write_bytes((folder / name).read_bytes())
        for name, code in STUBS.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(code)
        for length in LENGTHS:
            for task in given.only or RULER_TASKS:
                found.setdefault(str(length), {})[task] = _prompts(folder, task, length)
    write_json(GOLDEN, {"seed": SEED, "prompts": found})


def _prompts(folder: Path, task: str, length: int) -> list[list[object]]:
    """Of each prompt its characters, the sum of its text, and what is to be found."""
    program = folder / "long_context_eval/data/prepare.py"
    options = ["--save_dir", folder / "out" / str(length), "--task", task, "--tokenizer_type", "hf"]
    options += ["--tokenizer_path", ROOT / "swa_jax/recall/tokenizer.json", "--max_seq_length", length]
    command = [sys.executable, program, *options, "--num_samples", EXAMPLES]
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        list(map(str, command)), check=True, timeout=120, env=os.environ | {"PYTHONPATH": str(folder), "PATH": python}
    )
    lines = (folder / "out" / str(length) / task / "validation.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [
        [len(record["input"]), hashlib.sha256(record["input"].encode()).hexdigest(), record["outputs"]]
        for record in records
    ]
