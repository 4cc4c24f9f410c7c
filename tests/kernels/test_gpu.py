"""The kernels for GPUs: every variant lowers for real devices, and works under JAX's transformations."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from python_process import python

from pallas_kernels import AttentionSpec, attention, decode_attention, gpu, routed_attention
from pallas_kernels.math.spec import PerHead, Pools
from pallas_kernels.pools import attend_over_pools

from .suite import PACKED, Call

# The one warning that the project filters: the Triton lowering is deprecated, which is why one file alone
# uses it.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

DEVICES = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"]
COMMON = (
    "window",
    "full",
    "sigmoid",
    "head-dim-256",
    "float32",
    "softmax-everything",
)  # for the first device in `make test`; the other variants and devices are slow
TARGET = "__gpu$xla.gpu.triton"
WINDOW = AttentionSpec(window=40)
ROWS = tuple(tuple(row * 4) for row in PACKED)


def call(spec, options=(), **sizes):
    sizes = {"q_length": 200, "kv_length": 200, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"} | sizes
    return Call(spec, options, **sizes)


CALLS = {
    "full": call(AttentionSpec()),
    "bidirectional": call(AttentionSpec(window=40, causal=False)),
    "window": call(WINDOW),
    "sink-tokens": call(AttentionSpec(window=40, num_sink_tokens=4)),
    "chunked": call(AttentionSpec(window=40, num_sink_tokens=4, chunked=True)),
    "full-heads": call(WINDOW, ("full_heads",)),
    "full-from": call(WINDOW, ("full_from_row",)),
    "softcap-alibi-sink-logits": call(AttentionSpec(logit_softcap=30.0), ("alibi_slopes", "sink_logits")),
    "packed": call(WINDOW, ("full_from",), segments=ROWS),
    "ring": call(WINDOW, ("chunk", "ring"), q_length=64),
    "sigmoid": call(AttentionSpec(window=40, activation="sigmoid"), ("alibi_slopes", "sigmoid_bias")),
    "multi-head-dim-128": call(WINDOW, heads=2, head_dim=128),
    "head-dim-256": call(WINDOW, head_dim=256),
    "head-dim-80": call(WINDOW, head_dim=80),
    "head-dim-96": call(WINDOW, head_dim=96),
    "float32": call(WINDOW, dtype="float32"),
    "groups-of-three": call(WINDOW, heads=6),
    "multi-query": call(WINDOW, heads=5, kv_heads=1),
    "full-bidirectional": call(AttentionSpec(causal=False)),
    "softmax-everything": call(
        AttentionSpec(window=40, num_sink_tokens=4, logit_softcap=30.0),
        ("alibi_slopes", "sink_logits", "full_from", "full_heads"),
        segments=ROWS,
    ),
    "sigmoid-everything": call(
        AttentionSpec(window=40, num_sink_tokens=4, logit_softcap=30.0, activation="sigmoid"),
        ("alibi_slopes", "sigmoid_bias", "full_from", "full_heads"),
        segments=ROWS,
    ),
}


def abstract_gpu(kind: str) -> AbstractMesh:
    """What makes JAX trace for a GPU although it is not there."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
    return AbstractMesh((1,), ("x",), abstract_device=device)


def lowered(device: str, function, *args) -> str:
    with jax.sharding.use_abstract_mesh(abstract_gpu(device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def loss_and_gradient(function, *args):
    """The function to lower: values and the gradients of `args`."""

    def both(*args):
        out, pullback = jax.vjp(function, *args)
        return out, pullback(jax.tree.map(jnp.ones_like, out))

    return both


def both_pools(k, v):
    """Caches [B, S, K, D] as a pool of whole sequences, and as one of rings that holds the last KV head."""
    heads = k.shape[2]
    pools = [x.transpose(2, 0, 1, 3) for x in (k, v)]
    in_ring = jnp.arange(heads) == heads - 1
    rings = (pool[-1:, :, :44] for pool in pools)
    positions = jnp.broadcast_to(jnp.arange(44)[None], (k.shape[0], 44))
    return (
        Pools(*pools, jnp.where(in_ring, heads, jnp.arange(heads))),
        Pools(*rings, jnp.where(in_ring, 0, 1), positions),
    )


def program(name, kind):
    """A function that makes a call in one of the ways of `KERNELS`, and its arguments."""
    spec = CALLS[name].spec
    learned, fixed = CALLS[name].draw()
    given = {"implementation": "triton", **fixed}
    if kind in ("attention", "routed"):
        if kind == "routed":
            learned["gate"] = jnp.ones(learned["q"].shape[:2])
        op = attention if kind == "attention" else routed_attention
        return loss_and_gradient(lambda learned: op(**learned, spec=spec, **given)), [learned]
    q, k, v = (learned.pop(x) for x in "qkv")
    given |= learned
    tokens, lengths, some = int(kind[-1]), jnp.array([150, 20]), jnp.array([True, False])

    def decode(q, k, v, lengths):
        return decode_attention(q, k, v, spec, lengths=lengths, starts=lengths // 2, **given)

    def decode_ring(q, k, v, lengths, positions):
        return decode_attention(q, k, v, spec, lengths=lengths, kv_positions=positions, **given)

    def decode_pools(q, k, v, lengths):
        whole, rings = both_pools(k, v)
        options = {"others": (rings, spec), "full_from": lengths // 2, "implementation": "triton"}
        return attend_over_pools(q, whole, spec, PerHead(full_heads=some), lengths=lengths, **options)

    if kind.startswith("ring"):
        return decode_ring, [q[:, :tokens], k[:, :44], v[:, :44], lengths, jnp.zeros((2, 44), jnp.int32)]
    return decode_pools if kind.startswith("pools") else decode, [q[:, :tokens], k, v, lengths]


KERNELS = {  # that each way to call takes
    "attention": 3,  # forward, dq, dk and dv
    "routed": 6,  # these of the window and of what lies outside
    **dict.fromkeys(("decode 1", "decode 8", "pools 1", "ring 1", "ring 8"), 1),
}
DECODED = ("full", "full-heads", "softcap-alibi-sink-logits", "sigmoid", "head-dim-80", "float32")
NAMES = {
    "attention": (*CALLS,),
    "routed": ("window", "full-heads", "packed", "sigmoid", "softmax-everything", "sigmoid-everything"),
    "decode 1": DECODED,
    "decode 8": DECODED,
    "pools 1": ("full", "window", "sink-tokens", "head-dim-80", "head-dim-256", "float32"),
    "ring 1": ("window", "sink-tokens"),
    "ring 8": ("window", "sink-tokens"),
}


def on_devices():
    """Every variant for one device, the uncommon ones slow; a device decides sizes of tiles alone, so that others lower
    one variant here, and compile all of them below."""
    for kind, names in NAMES.items():
        for name in names:
            yield pytest.param(kind, name, DEVICES[0], marks=[] if name in COMMON else pytest.mark.slow)
        yield from (pytest.param(kind, names[-1], device, marks=pytest.mark.long) for device in DEVICES[1:])


@pytest.mark.parametrize(("kind", "name", "device"), [*on_devices()])
def test_every_call_lowers(kind, name, device):
    function, arguments = program(name, kind)
    assert lowered(device, function, *arguments).count(TARGET) == KERNELS[kind]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs JAX's plugin for CUDA")
@pytest.mark.parametrize("device", ["h100", "h200", "a100", "rtx4090"])
def test_every_call_compiles(device):
    assert len(python("-m", "tests.kernels.compile_for_gpu", device).splitlines()) > len(CALLS)


def equations(jaxpr):
    """Those of a jaxpr and of all jaxprs inside of it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("name", ["window", "head-dim-80", "multi-head-dim-128", "sigmoid-everything", "decode"])
def test_what_reaches_over_the_end_of_an_array_is_masked(name):
    """Interpret mode cuts off what a block has beyond the end of its array; on a GPU it lands on what lies there."""
    case = CALLS["head-dim-80" if name == "decode" else name]
    learned, fixed = case.draw()
    learned = {x: learned[x] for x in "qkv"}

    def function(learned):
        q, k, v = (learned[x] for x in "qkv")
        if name == "decode":
            return decode_attention(q[:, :1], k, v, case.spec, lengths=jnp.array([9, 5]), implementation="triton")
        return attention(q, k, v, case.spec, **fixed, implementation="triton")

    run = function if name == "decode" else loss_and_gradient(function)
    calls = [e for e in equations(jax.make_jaxpr(run)(learned).jaxpr) if e.primitive.name == "pallas_call"]
    written = []
    for call in calls:
        mapping, kernel = call.params["grid_mapping"], call.params["jaxpr"]
        arrays = {
            ref: array.aval.shape[-ref.aval.ndim :]
            for ref, array in zip(kernel.invars[-mapping.num_outputs :], call.outvars, strict=True)
        }
        for eqn in equations(kernel):
            if eqn.primitive.name not in ("swap", "masked_swap"):
                continue
            ref, value = eqn.invars[0], eqn.outvars[0].aval.shape
            whole = all(r % v == 0 for r, v in zip(ref.aval.shape, value, strict=True))
            if ref.aval.ndim == 2:  # [sequence, channels], of an array [.., sequence, heads, channels]
                whole &= arrays[ref][-1] == value[1]
            written.append(ref)
            masked = eqn.primitive.name == "masked_swap" and bool(
                jax.tree.leaves(jax.tree.unflatten(eqn.params["args_tree"], eqn.invars)[3])
            )
            assert whole or masked, (kernel.debug_info.func_name, value, ref.aval)
    assert len(calls) == (1 if name == "decode" else 3)
    assert len(written) >= 4 or name == "decode"


@pytest.mark.parametrize("call", ["training", "decode", "pools"])
@pytest.mark.parametrize("head_dim", [1, 4, 8, 12, 80])
def test_no_product_is_smaller_than_a_tensor_core_takes(head_dim, call):
    """On an H100 a product over 4 channels was four times what it is; interpret mode and lowering say nothing."""
    q, k, v = (jnp.zeros((1, 3, heads, head_dim), jnp.bfloat16) for heads in (2, 1, 1))

    def function(q, k, v):
        options = {"lengths": jnp.array([3]), "implementation": "triton"}
        if call == "decode":
            return decode_attention(q[:, :1], k, v, WINDOW, **options)
        if call == "pools":
            pools = Pools(*(x.transpose(2, 0, 1, 3) for x in (k, v)), jnp.array([0]))
            return attend_over_pools(q[:, :1], pools, WINDOW, PerHead(), **options)
        return attention(q, k, v, WINDOW, implementation="triton")

    run = loss_and_gradient(function) if call == "training" else function
    kernels = [
        e.params["jaxpr"] for e in equations(jax.make_jaxpr(run)(q, k, v).jaxpr) if e.primitive.name == "pallas_call"
    ]
    products = [e for kernel in kernels for e in equations(kernel) if e.primitive.name == "dot_general"]
    assert products
    for eqn in products:
        assert min(size for operand in eqn.invars for size in operand.aval.shape) >= 16


def test_a_batch_of_vmaps_lowers():
    (q, k, v), _ = operands(CALLS["window"])
    function = jax.vmap(jax.vmap(functools.partial(attention, spec=WINDOW, implementation="triton")))
    assert lowered(DEVICES[0], function, *(x[None, :, None] for x in (q, k, v))).count(TARGET) == 1


def operands(call):
    learned, fixed = call.draw()
    return [learned[name] for name in "qkv"], fixed


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (80, 2), (128, 2), (256, 2), (64, 4), (256, 4)])
def test_tiles_fit_shared_memory(capability, head_dim, itemsize):
    kilobytes = {80: 163, 90: 227, 100: 227}.get(capability, 99)
    width = 2 ** int(np.ceil(np.log2(head_dim)))
    tiles = gpu.tile_sizes(head_dim, itemsize, capability)
    staged = {  # rows of the operands that a program holds, and of those that a visit stages
        "forward": (tiles.forward.q_block, 2 * tiles.forward.kv_block),
        "dq": (2 * tiles.dq.q_block, 2 * tiles.dq.kv_block),
        "dkv": (2 * tiles.dkv.kv_block, 2 * tiles.dkv.q_block),
        "decode": (16, 2 * tiles.decode.kv_block),
    }
    for name, (held, visited) in staged.items():
        assert getattr(tiles, name).num_warps in (1, 2, 4, 8, 16), name
        rows = held + visited * getattr(tiles, name).num_stages
        assert rows * width * itemsize <= kilobytes * 1024, name
