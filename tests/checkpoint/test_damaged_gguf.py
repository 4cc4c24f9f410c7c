"""GGUF files that a program damages: each is refused in one sentence, or is a model all the same."""

import contextlib
import functools
import random
import resource
import shutil
import signal
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf_files import write_byte_level, write_gguf, write_sentencepiece
from golden_models import GOLDEN, contents

from scripts.torture.fuzz import one_sentence, too_long
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.data.tokenizer import load_tokenizer

BASES = {
    "llama3-rope": write_byte_level,
    "gemma3-hybrid": write_sentencepiece,
    "gpt-oss-hybrid": functools.partial(write_byte_level, pre="gpt-4o"),
    "phi3-window": write_sentencepiece,
    "qwen3-moe-full": functools.partial(write_byte_level, pre="qwen2"),
}
ABSURD = (0, 1, 2, 3, 7, 255, 2**15, 2**16 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
SECONDS, MORE_MEMORY = 30, 1 << 30


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Whole files, and the places of the numbers in their headers."""
    folder = tmp_path_factory.mktemp("bases")
    found = []
    for case, tokenizer in BASES.items():
        file = write_gguf(folder / f"{case}.gguf", GOLDEN / case, GGMLQuantizationType.Q8_0, tokenizer=tokenizer)
        found.append((file.read_bytes(), numbers_in(file)))
    return found


def numbers_in(file: Path) -> list[tuple[int, int]]:
    """(place, bytes) of counts, lengths, types and values; of lists the first few entries."""
    reader = gguf.GGUFReader(file)
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    found = []
    for field in fields:
        place = field.offset
        for part in field.parts[:12]:
            if part.dtype != np.uint8 or part.size == 1:
                found += [(place + i * part.itemsize, part.itemsize) for i in range(part.size)]
            place += part.nbytes
    return found


def damage(data: bytes, numbers: list[tuple[int, int]], rng: random.Random) -> bytes:
    """One file's content after one of three kinds of damage."""
    kind = rng.choice(("cut", "flip", "number", "number"))
    if kind == "cut":
        return data[: rng.randrange(len(data))]
    out = bytearray(data)
    if kind == "flip":
        header = max(place for place, _ in numbers)
        for _ in range(rng.randint(1, 3)):
            out[rng.randrange(header if rng.random() < 0.8 else len(out))] ^= 1 << rng.randrange(8)
    else:
        place, size = rng.choice(numbers)
        out[place : place + size] = (rng.choice(ABSURD) % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(out)


@contextlib.contextmanager
def limits():
    """A second process's worth of memory is too much, and so is half a minute."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc to see its memory")
@pytest.mark.parametrize("number", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_or_are_models(bases, tmp_path, number):
    file, out, refused = tmp_path / "damaged.gguf", tmp_path / "out", 0
    for i in range(number):
        rng = random.Random(f"gguf {i}")
        file.write_bytes(damage(*rng.choice(bases), rng))
        try:
            with limits():
                import_model(file, out)
        except Exception as error:
            one_sentence(error)
            assert not list(tmp_path.glob("out*")), f"damage {i} left something"
            refused += 1
            continue
        assert all(np.isfinite(array).all() for array in contents(out).values()), i
        if (out / "tokenizer.json").is_file():
            tokenizer = load_tokenizer(out)
            tokenizer.decode(tokenizer.encode("a bc abc"))
        shutil.rmtree(out)
    assert 3 * number / 8 < refused < number
