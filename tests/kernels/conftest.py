import jax
import pytest

DEPRECATED = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"


def pytest_collection_modifyitems(items):
    """On a GPU every test may compile by the lowering that says so; elsewhere those of one file do."""
    if jax.default_backend() == "gpu":
        for item in items:
            item.add_marker(pytest.mark.filterwarnings(DEPRECATED))


@pytest.fixture
def implementation(request, monkeypatch):
    """The implementation under test, its block size in force."""
    return request.param.install(monkeypatch)
