"""The tokenizer of one token a byte."""

import pytest

from swa_jax.data.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(byte_tokenizer):
    return load_tokenizer(byte_tokenizer)
