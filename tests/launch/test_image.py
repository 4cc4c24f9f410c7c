"""The image for pods: what it copies is enough to install and to run, and nothing else travels."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import yaml
from launching import pod_of, settings

ROOT = Path(__file__).parents[2]
LINES = [line.split() for line in (ROOT / "launch" / "Dockerfile").read_text().splitlines() if line[:1].isupper()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[list[str]]:
    return [words for first, *words in LINES if first == name]


def test_what_is_copied_installs(tmp_path):
    copied = [(source, tmp_path / words[-1]) for words in instructions("COPY") for source in words[:-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source for source, _ in copied} == sent
    for source, target in copied:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, target)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"swa_jax/cli/__init__.py", "pallas_kernels/__init__.py"} <= set(names)


def test_its_names_are_those_of_the_project():
    """Extras, Python, the program that GKE starts, and the configuration that the example trains."""
    ((extra,),) = instructions("ARG")
    assert extra.removeprefix("EXTRA=") in PROJECT["optional-dependencies"]
    comments = (ROOT / "launch" / "Dockerfile").read_text()
    for named in re.findall(r"EXTRA=([a-z,]+)", comments):
        assert set(named.split(",")) <= set(PROJECT["optional-dependencies"])
    ((image,),) = instructions("FROM")
    assert PROJECT["requires-python"] == f">={re.findall(r'[0-9]+[.][0-9]+', image)[0]}"
    ((entry,),) = instructions("ENTRYPOINT")
    (container,) = pod_of()["spec"]["containers"]
    assert yaml.safe_load(entry) == container["command"][:1]
    config = settings().config
    assert any(Path(config).is_relative_to(words[0]) for words in instructions("COPY"))
    assert container["command"].count(config) == 1
