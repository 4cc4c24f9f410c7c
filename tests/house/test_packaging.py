"""The repository as people meet it: dependencies, the wheel, the Makefile's environment, the README."""

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = f"{PROJECT['name']}["  # an extra that has another one
ALL_REQUIREMENTS = [
    Requirement(text) for text in sum(EXTRAS.values(), PROJECT["dependencies"]) if not text.startswith(OWN)
]
CONSTRAINTS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
PINNED = {canonicalize_name(name): version for name, version in CONSTRAINTS.items()}


# ---- dependencies ----


@pytest.mark.parametrize("requirement", ALL_REQUIREMENTS, ids=str)
def test_requirement_is_bounded_and_its_pin_lies_inside(requirement):
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators == {">=", "<"}, f"{requirement} needs one lower and one upper bound"
    pin = PINNED.get(canonicalize_name(requirement.name))
    assert pin is None or requirement.specifier.contains(pin), f"constraints.txt has {requirement.name} {pin}"


def test_constraints_are_plain_pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)] == []
    assert len(PINNED) == len(CONSTRAINTS) == len(lines), "constraints.txt names a package twice"


def test_constraints_cover_everything_an_installation_brings():
    """Walk the installed metadata from our own requirements; whatever is reached must be pinned."""
    todo = [Requirement(text) for text in PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["docs"]]
    seen: set[tuple[str, frozenset[str]]] = set()
    missing = set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        if key[0] not in PINNED:
            missing.add(key[0])
        try:
            below = importlib.metadata.requires(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # the environment was made by other means than `make`
        for text in below:
            child = Requirement(text)
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(child)
    assert not missing, f"constraints.txt lacks {sorted(missing)}"
    assert len(seen) > len(PROJECT["dependencies"])


def test_python_version_is_the_oldest_supported():
    assert PROJECT["requires-python"] == f">={(ROOT / '.python-version').read_text().strip()}"


# ---- what is shipped ----


def test_console_script_resolves():
    module, function = PROJECT["scripts"]["swa-jax"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_wheel_holds_both_packages_whole_and_nothing_else(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling comes with the dev extra")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = {
        path.relative_to(ROOT).as_posix()
        for package in ("pallas_kernels", "swa_jax")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"pallas_kernels/__init__.py", "swa_jax/__init__.py"} <= here
    assert shipped == here


def test_golden_files_stay_small():
    """Every family adds one, so each has to be small."""
    models = [path for path in (ROOT / "tests/golden").iterdir() if path.is_dir()]
    sizes = {model.name: sum(path.stat().st_size for path in model.iterdir()) for model in models}
    assert sizes
    assert {name: size for name, size in sizes.items() if not 0 < size < 760_000} == {}


def test_readme_shows_both_commands_on_its_first_screen():
    first_screen = (ROOT / "README.md").read_text().splitlines()[:25]
    for command in ("make demo", "make test"):
        assert any(line.startswith(command) for line in first_screen), f"'{command}' is not in the first 25 lines"


# ---- the Makefile's environment ----


@pytest.fixture
def workshop(tmp_path):
    """A copy of what `make venv` reads, and a PATH with the tools it needs but without any Python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "rm", "mkdir", "sed", "touch", "cp"):
        (tools / tool).symlink_to(shutil.which(tool))
    return tmp_path


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def fake_python(path: Path, pip: str) -> None:
    """Passes for a Python >= 3.12; `-m venv --clear DIR` puts the shell script `pip` at DIR/bin/python."""
    made = path.with_name(f"made-by-{path.name}")
    script(made, pip)
    script(path, f'if [ "$2" = venv ]; then rm -rf "$4"; mkdir -p "$4/bin"; cp {made} "$4/bin/python"; fi')


def make(workshop: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("make") or pytest.skip("make is not installed")
    path = {"PATH": str(workshop / "tools")}
    return subprocess.run([program, *arguments], cwd=workshop, env=path, capture_output=True, text=True)


def test_make_says_so_without_a_suitable_python(workshop):
    script(workshop / "tools/python3.12", "echo not found >&2; exit 127")  # a version manager's empty shim
    script(workshop / "tools/python3", "exit 1")  # too old: the version check fails
    result = make(workshop, "venv")
    assert result.returncode != 0
    assert "No Python 3.12 or newer with its venv module found (tried: python3.12 python3.13" in result.stderr
    assert "PYTHON=/path/to/python" in result.stderr
    assert not (workshop / ".venv").exists()


def test_make_passes_over_a_broken_python(workshop):
    script(workshop / "tools/python3.12", "exit 127")
    fake_python(workshop / "tools/python3.13", pip='echo "installing: $*"')
    result = make(workshop, "venv")
    assert result.returncode == 0, result.stderr
    assert "Making .venv with python3.13" in result.stdout
    assert "installing: -m pip install" in result.stdout
    assert "installing" not in make(workshop, "venv").stdout  # nothing is left to do
    shutil.rmtree(workshop / ".venv")
    fake_python(workshop / "special", pip="exit 0")
    assert "Making .venv with ./special" in make(workshop, "venv", "PYTHON=./special").stdout


def test_interrupted_installation_leaves_no_stamp(workshop):
    fake_python(workshop / "tools/python3.12", pip="exit 1")
    assert make(workshop, "venv").returncode != 0
    fake_python(workshop / "tools/python3.12", pip="exit 0")
    again = make(workshop, "venv")
    assert again.returncode == 0
    assert "Making .venv" in again.stdout  # afresh, not on top of half an environment


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(workshop, name):
    fake_python(workshop / "tools/python3.12", pip='echo "installing: $*"')
    make(workshop, "venv")
    newer = (workshop / ".venv/.installed").stat().st_mtime + 10
    os.utime(workshop / name, (newer, newer))
    assert "installing" in make(workshop, "venv").stdout


def test_another_jax_gets_an_environment_of_its_own(workshop):
    fake_python(workshop / "tools/python3.12", pip="exit 0")
    assert make(workshop, "venv", "JAX=0.11.2").returncode == 0
    lines = (workshop / ".venv-jax0.11.2/constraints.txt").read_text().splitlines()
    assert {"jax==0.11.2", "jaxlib==0.11.2", f"flax=={PINNED['flax']}"} <= set(lines)
    assert len(lines) == len(CONSTRAINTS)
