"""Documents that the matrix unit tells apart, on strips as v6e and v7x have them."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention
from pallas_kernels.blocks import Tiles
from pallas_kernels.math.spec import coordinates
from pallas_kernels.tpu.calls import launches
from pallas_kernels.tpu.tile.tiles import Call as KernelCall
from pallas_kernels.tpu.window import window_forward_step
from pallas_kernels.tpu.window.document_codes import document_codes, reads_codes, with_query_code

from .suite import Call, Implementation, assert_matches_reference, quick_jit
from .tolerances import assert_close

TPU = Implementation("tpu")
TILES = Tiles(512, 512, strip=256, tile=256)


@pytest.fixture(autouse=True)
def coded(monkeypatch):
    """Which strips were given codes."""
    calls = []

    def noted(query, code):
        calls.append(query.shape)
        return with_query_code(query, code)

    monkeypatch.setattr(launches, "choose_tiles", lambda *_, **__: TILES)
    monkeypatch.setattr(window_forward_step, "with_query_code", noted)
    return calls


def documents(seed: int, length: int, lengths: tuple[int, ...], padding: int = 0) -> tuple[int, ...]:
    """Segment ids of documents of some of these lengths, and of padding at a third of the row and at its end."""
    rng, ids = np.random.default_rng(seed), []
    while len(ids) < length:
        ids += [(ids[-1] if ids else 0) + 1] * int(rng.choice(lengths))
    ids, third = np.array(ids[:length]), length // 3
    ids[third:] += 1  # a document ends before the padding
    if padding:
        ids[third : third + padding] = ids[-padding:] = 0
    return tuple(ids.tolist())


@pytest.mark.parametrize("lengths", [(1, 2, 3), (40, 300), (1,)], ids=["tiny", "long", "of-one-token"])
def test_the_product_of_codes_is_zero_within_a_document(lengths):
    length = 9000 if lengths == (1,) else 3000
    ids = np.array([documents(3, length, lengths, 50), documents(4, length, lengths)])
    where = coordinates(length, length, q_segment_ids=ids)
    codes = quick_jit(document_codes, static_argnums=(1, 2))(where, jnp.bfloat16, 8)
    assert (np.asarray(codes[:, length:]) == (np.arange(128) == 127)).all()
    for row in range(2):
        queries = np.asarray(with_query_code(codes[row, :, :0], codes[row]), np.float32)
        keys = np.asarray(codes[row], np.float32)
        for first in range(0, length - 256, 701):  # a strip and what it sees of a window of 2048
            here, there = slice(first, first + 256), slice(max(first - 2048, 0), first + 256)
            product = queries[here] @ keys[there].T
            same = (ids[row, here, None] == ids[row, None, there]) & (ids[row, here, None] != 0)
            assert (product[same] == 0).all()
            assert (product[~same] <= -(2.0**126)).all()


@pytest.mark.parametrize(
    ("spec", "options", "dtype"),
    [
        (AttentionSpec(512), (), "bfloat16"),
        pytest.param(AttentionSpec(640), ("alibi_slopes",), "float32", marks=pytest.mark.slow),
        pytest.param(AttentionSpec(512, num_sink_tokens=4), ("sink_logits",), "float32", marks=pytest.mark.slow),
        pytest.param(AttentionSpec(1024), ("full_from",), "bfloat16", marks=pytest.mark.slow),
    ],
    ids=["bfloat16", "edges-apart-alibi", "sink-tokens", "full-from"],
)
def test_packed_rows(spec, options, dtype, coded):
    rows = documents(0, 1536, (30, 300, 700)), documents(1, 1536, (5, 400), padding=90)
    assert_matches_reference(Call(spec, options, rows, 2, 1536, 1536, 2, 1, head_dim=128, dtype=dtype), TPU)
    assert coded


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_documents_at_random_places(seed, coded):
    rng = np.random.default_rng(seed)
    lengths = tuple(rng.integers(1, 900, 3).tolist())
    rows = (documents(seed, 1536, lengths, padding=int(rng.integers(1, 200))),)
    window = int(rng.integers(512, 1400))
    assert_matches_reference(Call(AttentionSpec(window), (), rows, 1, 1536, 1536, 1, 1, head_dim=128), TPU)
    assert coded


def test_a_key_that_is_not_finite_stays_in_its_document(coded):
    """Its product with another document's queries is not masked by codes: the step is done again by comparisons."""
    ids = np.array([[1] * 700 + [2] * 324])
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1024, 1, 128)).astype(np.float32)
    index = np.arange(1024)

    @quick_jit
    def attend(k):
        return attention(q, k, v, spec=AttentionSpec(512), q_segment_ids=ids, implementation="tpu")

    clean = np.asarray(attend(k))
    for token, value in itertools.product((300, 690, 770), (np.nan, np.inf)):
        changed = k.copy()
        changed[0, token] = value
        out = np.asarray(attend(changed))
        sees = (index >= token) & (index < token + 512) & (ids[0] == ids[0, token])
        assert np.isfinite(out[0, ~sees]).all()
        assert_close(out[0, ~sees], clean[0, ~sees], "float32")
        if np.isnan(value):
            assert np.isnan(out[0, sees]).all()
    assert coded


@pytest.mark.parametrize(
    ("spec", "tiles", "head_dim", "reads"),
    [
        (AttentionSpec(1024), Tiles(2048, 2048, strip=256), 128, True),
        (AttentionSpec(256), Tiles(2048, 2048, strip=256), 128, False),  # its steps gain nothing
        (AttentionSpec(4096), Tiles(2048, 2048, strip=256), 128, False),  # more documents than codes
        (AttentionSpec(1024), Tiles(2048, 2048, strip=128), 128, False),  # matrix units of 128 have no room
        (AttentionSpec(1024), Tiles(2048, 2048, strip=256), 256, False),
        (AttentionSpec(1024, logit_softcap=2.0), Tiles(2048, 2048, strip=256), 128, False),
        (AttentionSpec(1024, activation="sigmoid"), Tiles(2048, 2048, strip=256), 128, False),
    ],
)
def test_which_calls_read_codes(spec, tiles, head_dim, reads):
    assert reads_codes(KernelCall(spec, tiles), head_dim) == reads
