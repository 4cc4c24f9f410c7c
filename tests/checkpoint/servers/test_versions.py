"""That no server has a newer version while its table is old: asks the package registry, where there is one."""

import re
import subprocess
import sys
from datetime import date

import pytest
from server_versions import outdated

from swa_jax.checkpoint.servers import SERVERS


@pytest.mark.parametrize("name", SERVERS)
def test_no_table_is_older_than_what_can_be_had(name):
    package = SERVERS[name].package
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", package]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if asked.returncode:
        pytest.skip(f"no registry lists {package} for this Python: {asked.stderr.strip().splitlines()[-1:]}")
    found = re.search(r"Available versions: (.*)", asked.stdout)
    assert found is not None, asked.stdout
    assert outdated(SERVERS[name], found[1].split(", "), date.today()) is None
