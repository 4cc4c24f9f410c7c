"""What tests of scripts share."""

import importlib

import pytest


@pytest.fixture(scope="module")
def script(request):
    """The module of scripts/ that the test file names as `SCRIPT`, such as "faults.plant"."""
    return importlib.import_module(f"scripts.{request.module.SCRIPT}")
