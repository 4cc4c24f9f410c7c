"""That a table is read again after a while: by what is installed here, and by what could be (`make test-servers`)."""

import importlib.metadata
from datetime import date, timedelta

import pytest
from server_versions import MOST_DAYS, outdated

from swa_jax.checkpoint.servers import SERVERS


@pytest.mark.parametrize("name", SERVERS)
def test_no_table_is_older_than_what_is_installed(name):
    server = SERVERS[name]
    try:
        installed = [importlib.metadata.version(server.package)]
    except importlib.metadata.PackageNotFoundError:
        installed = []
    assert outdated(server, installed, date.today()) is None


def test_age_alone_is_no_reason_and_neither_is_a_new_version():
    server = SERVERS["vllm"]
    read = date.fromisoformat(server.released)
    soon, late = (read + timedelta(days=days) for days in (MOST_DAYS, MOST_DAYS + 1))
    newer = ["0.9", "99.0", server.version]
    assert outdated(server, newer, soon) is None
    assert outdated(server, [], late) is None
    assert outdated(server, ["0.9", server.version], late) is None
    assert outdated(server, newer, late) == (
        f"vllm {server.version} was read, which came out {MOST_DAYS + 1} days ago; 99.0 can be had: read it"
    )
