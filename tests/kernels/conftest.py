import pytest


@pytest.fixture
def implementation(request, monkeypatch):
    """The implementation under test, its block size in force."""
    return request.param.install(monkeypatch)
