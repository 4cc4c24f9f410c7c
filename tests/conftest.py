"""What every test shares: the CPU as platform unless told otherwise, skips without hardware, a byte tokenizer."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers


def pytest_collection_modifyitems(items):
    platform = jax.default_backend()
    for item in items:
        for kind in ("gpu", "tpu"):
            if item.get_closest_marker(kind) and platform != kind:
                item.add_marker(pytest.mark.skip(reason=f"needs a {kind.upper()}; JAX runs on {platform}"))


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
