"""What tests of scripts share."""

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = str(Path(__file__).parents[2] / "scripts")


@pytest.fixture(scope="module")
def load_script():
    """`load_script("train_chains")` is that file of scripts/ as a module."""
    sys.path.insert(0, SCRIPTS)
    yield importlib.import_module
    sys.path.remove(SCRIPTS)


@pytest.fixture(scope="module")
def script(request, load_script):
    """The script that the test file names as `SCRIPT`."""
    return load_script(request.module.SCRIPT)
