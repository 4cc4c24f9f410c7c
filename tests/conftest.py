"""What every test shares: JAX's settings, skips without hardware, a byte tokenizer."""

import gc
import os
from pathlib import Path

# Before JAX is imported, and in the environment, so that processes which a test starts share them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compilation is most of the suite's time: what one run has compiled, the next one loads.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

# Tracing makes many objects and few circles of them: looking for circles less often takes a fifteenth off the suite.
gc.set_threshold(50_000, 20, 50)

# They need an environment with a server in it, which `make test-servers` makes.
collect_ignore = [] if "SERVERS_PYTHON" in os.environ else ["checkpoint/servers"]

CASES = {
    mark: {
        line
        for line in Path(__file__).with_name(f"{mark}_cases.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    for mark in ("slow", "long")
}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """What models are imported into by their names; processes that a test starts share it."""
    os.environ.setdefault("SWA_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="run only the Kth of N parts of the tests that are chosen")


def pytest_itemcollected(item):
    for mark, cases in CASES.items():
        if item.nodeid in cases:
            item.add_marker(mark)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != number - 1])
        items[:] = items[number - 1 :: parts]
    platform = jax.default_backend()
    for item in items:
        for kind in ("gpu", "tpu"):
            if item.get_closest_marker(kind) and platform != kind:
                item.add_marker(pytest.mark.skip(reason=f"needs a {kind.upper()}; JAX runs on {platform}"))


def pytest_runtest_teardown(item, nextitem):
    """What is compiled is mapped into memory, a few pieces each, and Linux grants a process 65530 of them."""
    maps = Path("/proc/self/maps")
    if nextitem is None or not maps.exists():
        return
    most = 50_000 if item.path == nextitem.path else 30_000  # tests of a file share programs
    if maps.read_bytes().count(b"\n") > most:
        jax.clear_caches()


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """The path of a tokenizer.json whose tokens are the 256 bytes and <eos>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(file))
    return file
