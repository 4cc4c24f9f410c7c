"""What the tests of the attention op share: the implementations under test, and drawn calls to hold them to.

A new implementation joins by a line in `IMPLEMENTATIONS`; every test here then runs for it.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import AttentionSpec, alibi_slopes, attention, blocks, gpu, routed_attention, xla
from pallas_kernels.gpu.operands import Tile
from pallas_kernels.math.spec import dense_mask
from pallas_kernels.tpu.calls import launches
from pallas_kernels.tpu.decode import decode
from pallas_kernels.tpu.schedule import documents

from .tolerances import assert_both_close


@dataclasses.dataclass(frozen=True)
class Implementation:
    name: str
    block: int | None = None  # forces this block size, so that short sequences have several blocks

    def __str__(self) -> str:
        return self.name if self.block is None else f"{self.name}-block{self.block}"

    def install(self, monkeypatch) -> "Implementation":
        if self.name == "xla" and self.block is not None:
            monkeypatch.setattr(
                xla, "attention_blocks", lambda heads, window, *lengths, **_: [min(self.block, n) for n in lengths]
            )
            monkeypatch.setattr(xla, "_CACHE", 1)  # so that a batch is more than its cores work on at once
            monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
        if self.name == "tpu" and self.block is not None:
            tiles = blocks.Tiles(self.block, self.block, strip=self.block // 2, tile=self.block // 2)
            monkeypatch.setattr(launches, "choose_tiles", lambda *_, **__: tiles)
            monkeypatch.setattr(documents, "SMALL_BLOCK", self.block // 4)
            choose_steps = decode.choose_steps
            monkeypatch.setattr(decode, "choose_steps", lambda *a: (choose_steps(*a)[0], self.block))
        if self.name == "triton" and self.block is not None:
            tile = Tile(self.block, self.block, 4, 2)
            monkeypatch.setattr(gpu, "tile_sizes", lambda *_: gpu.TilesByKernel(tile, tile, tile, tile))
        return self


# Blocks of 16 show every block boundary on short sequences.
IMPLEMENTATIONS = [Implementation(name, block=16) for name in ("xla", "triton", "tpu")]
WITH_DEFAULT_BLOCKS = [dataclasses.replace(i, block=None) for i in IMPLEMENTATIONS]


def _each(implementations):
    """Interpreted kernels take seconds to compile, so with default blocks (one or two here) they are slow tests."""
    slow = pytest.mark.slow
    params = [pytest.param(i, marks=[slow] if i.name != "xla" and i.block is None else []) for i in implementations]
    return pytest.mark.parametrize("implementation", params, ids=str, indirect=True)


every_implementation = _each(IMPLEMENTATIONS)
with_default_blocks = _each(WITH_DEFAULT_BLOCKS)

PACKED = [[1] * 20 + [2] * 17 + [3] * 10 + [0] * 3, [0] * 5 + [1] * 30 + [2] * 15]
LEFT_PADDED = [[1] * 50, [0] * 13 + [1] * 37]
ONE_ROW_EMPTY = [[1] * 50, [0] * 50]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the op, with drawn arrays. Options name the keyword arguments that are given."""

    spec: AttentionSpec
    options: tuple[str, ...] = ()
    segments: tuple | None = None
    batch: int = 2
    q_length: int = 50
    kv_length: int = 50
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 16
    dtype: str = "float32"

    def draw(self) -> tuple[dict, dict]:
        """Returns the arrays that gradients flow to, and the other arguments; all are NumPy arrays."""
        rng = np.random.default_rng(self.q_length * 1000 + self.kv_length + self.heads)

        def normal(*shape):
            return rng.normal(size=shape).astype(jnp.dtype(self.dtype))

        learned = {
            "q": normal(self.batch, self.q_length, self.heads, self.head_dim),
            "k": normal(self.batch, self.kv_length, self.kv_heads, self.head_dim),
            "v": normal(self.batch, self.kv_length, self.kv_heads, self.head_dim),
        }
        fixed = {}
        if "sink_logits" in self.options:
            learned["sink_logits"] = np.float32(rng.normal(size=self.heads))
        if "logit_scales" in self.options:
            learned["logit_scales"] = np.float32(rng.uniform(0.5, 2, self.heads))
        if "scalar_bias" in self.options:
            learned["sigmoid_bias"] = np.float32(-2.5)
        if "sigmoid_bias" in self.options:
            learned["sigmoid_bias"] = np.float32(rng.normal(size=self.heads))
        if "alibi_slopes" in self.options:
            fixed["alibi_slopes"] = alibi_slopes(self.heads - self.heads // 3, self.heads // 3, "press")
        if "full_heads" in self.options:
            fixed["full_heads"] = np.arange(self.kv_heads) == self.kv_heads // 2
        if "full_from" in self.options:
            columns = 1 if self.segments is None else int(np.max(self.segments))
            fixed["full_from"] = rng.integers(0, self.kv_length // 2, (self.batch, columns), np.int32)
        if "full_from_row" in self.options:
            fixed["full_from"] = rng.integers(0, self.kv_length, self.batch, np.int32)
        if self.segments is not None:
            fixed["q_segment_ids"] = np.int32(self.segments)
        if "chunk" in self.options:  # the queries are the last ones of the sequence, those of row 1 two tokens earlier
            last = self.kv_length - np.arange(self.batch)[:, None] * 2
            fixed["q_positions"] = np.int32(last - self.q_length + np.arange(self.q_length))
        if "ring" in self.options:  # keys lie rotated, some slots are empty
            positions = np.roll(np.arange(self.kv_length), 7)
            positions[3:6] = -1
            fixed["kv_positions"] = np.int32(np.tile(positions, (self.batch, 1)))
        return learned, fixed

    def run(self, implementation: str):
        """Values, and gradients of drawn combinations of them, of `attention` (with lse where there is one)."""
        learned, fixed = self.draw()
        options = {"return_lse": self.spec.activation == "softmax", "implementation": implementation, **fixed}
        return with_gradients(lambda learned: attention(**learned, spec=self.spec, **options))(learned)

    def run_routed(self, implementation: str, *gates: np.ndarray):
        """Values and gradients of `routed_attention` for each of the gates [B, T], compiled once for all."""
        learned, fixed = self.draw()
        options = {"implementation": implementation, **fixed}
        both = with_gradients(lambda learned: routed_attention(**learned, spec=self.spec, **options))
        return [both(learned | {"gate": gate}) for gate in gates]

    @functools.cache  # noqa: B019  (calls are few, frozen and live as long as the tests)
    def expected(self):
        return self.run("reference")


@st.composite
def packed_rows(draw, length, rows=1):
    """Segment ids 1, 2, ... in runs, padding before or after."""
    table = []
    for _ in range(rows):
        runs = draw(st.lists(st.integers(1, length), min_size=1, max_size=6))
        row = [0] * draw(st.integers(0, length // 2))
        for i, run in enumerate(runs, start=1):
            row += [i] * run
        table.append((row + [0] * length)[:length])
    return np.array(table, np.int32)


def set_parallel_dimensions(monkeypatch, count):
    """Makes that many of the leading dimensions of every grid parallel, instead of those that its kernel names."""
    real = pltpu.CompilerParams

    def parameters(dimension_semantics, **others):
        rest = len(dimension_semantics) - count
        return real(dimension_semantics=("parallel",) * count + ("arbitrary",) * rest, **others)

    monkeypatch.setattr(pltpu, "CompilerParams", parameters)


def gates(kind, shape=(2, 50)):
    """Gates [B, T] of routed attention."""
    rng = np.random.default_rng(3)
    drawn = {
        "soft": rng.uniform(size=shape),
        "none": np.zeros(shape),
        "all": np.ones(shape),
        "some": rng.uniform(size=shape) < 0.13,
        "runs": np.arange(shape[1]) // 9 % 2 * np.ones(shape),
    }[kind]
    return np.float32(drawn)


def seen_pairs(spec: AttentionSpec, where, *, outside: bool = False) -> np.ndarray:
    """The dense mask, or with `outside` what full attention sees beside it. NumPy's: JAX compiles each operation."""
    where = jax.tree.map(np.asarray, where)
    seen = np.asarray(dense_mask(spec, where))
    return np.asarray(dense_mask(spec.full, where)) & ~seen if outside else seen


def quick_jit(function, **options):
    """`jax.jit` for small calls: compiling is most of these tests' time, and on a CPU LLVM's optimisation most of that.

    Optimised, a CPU's compiler would also round the same sums otherwise in two bodies of a kernel: it joins
    multiplications and additions where it finds them side by side.
    """
    on_cpu = jax.default_backend() == "cpu"
    compiler_options = {"xla_backend_optimization_level": 0} if on_cpu else {}
    return jax.jit(function, compiler_options=compiler_options, **options)


def with_gradients(function):
    """Compiles `learned` -> its outputs, and their gradient with drawn cotangents (lse's only where it is finite)."""

    @quick_jit
    def both(learned):
        outputs, pullback = jax.vjp(function, learned)
        rng = np.random.default_rng(7)

        def cotangent(x):
            drawn = jnp.asarray(rng.normal(size=x.shape), x.dtype)
            return jnp.where(jnp.isfinite(x), drawn, 0)

        return outputs, pullback(jax.tree.map(cotangent, outputs))[0]

    return both


def assert_matches_routed(call: Call, implementation: Implementation, *gates: np.ndarray) -> None:
    """Values and gradients of routed attention, with each of the gates."""
    for actual, expected in zip(
        call.run_routed(implementation.name, *gates), call.run_routed("reference", *gates), strict=True
    ):
        assert_both_close(actual, expected, call.dtype)


def assert_matches_reference(call: Call, implementation: Implementation) -> None:
    assert_both_close(call.run(implementation.name), call.expected(), call.dtype)
