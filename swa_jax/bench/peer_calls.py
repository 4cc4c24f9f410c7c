"""Other libraries' attention on TPUs, compiled and counted as `swa_jax.bench.tpu_kernels` does our own.

Splash attention, JAX's and tokamax's, reads from scalar memory which blocks it visits, and runs the same code at each
visit. So its cycles are the bundles of that code times the visits, which `executions` reads from the kernels' own
tables. That leaves out waits, steps of the grid that visit nothing beyond their scalar code, and the reading of mask
blocks. FlyWheel's kernels loop over their visits by themselves, under conditions that the simulator does not follow:
their cycles are counted in the same way, visits by its own schedule.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.bench.tpu_kernels import Executions

JAX_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"
TOKAMAX_SPLASH = "tokamax._src.ops.experimental.tpu.splash_attention"
FLYWHEEL = "flywheel_tpu"


@dataclasses.dataclass(frozen=True)
class Shape:
    """H query heads, K KV heads, T tokens, D head_dim; `window` None is full. FlyWheel has block sizes of its own."""

    H: int = 1
    K: int = 1
    T: int = 16384
    D: int = 128
    window: int | None = 1024
    packed: bool = False  # segment ids are given
    block_q: int = 1024
    block_kv: int = 1024
    block_kv_compute: int = 512
    residuals: bool = True  # the forward pass gives what the backward pass needs
    # tokamax's own: whether an array lies with its tokens minor, another order of instructions, partial sums of dq.
    q_minor: bool = False
    k_minor: bool = False
    v_minor: bool = False
    scheduler: bool = False
    dq_steps: int | None = 3

    @property
    def queries(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.H, self.T, self.D), jnp.bfloat16)

    @property
    def keys(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.K, self.T, self.D), jnp.bfloat16)

    @property
    def ids(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.T,), jnp.int32)

    def blocks(self) -> dict[str, int]:
        """As the peers name them, for the forward and the backward pass."""
        q, kv, compute = self.block_q, self.block_kv, self.block_kv_compute
        forward = {"block_q": q, "block_kv": kv, "block_kv_compute": compute}
        return forward | {"block_q_dkv": q, "block_kv_dkv": kv, "block_kv_dkv_compute": compute}


def jax_splash(shape: Shape, **options: bool) -> Any:
    """JAX's splash attention, its backward pass in one kernel."""
    kernels, masks = _modules(JAX_SPLASH)
    mask = masks.MultiHeadMask([_mask(masks, shape)] * shape.H)  # they share one table
    sizes = kernels.BlockSizes(**shape.blocks(), use_fused_bwd_kernel=True)
    return kernels.make_splash_mha_single_device(mask, block_sizes=sizes, **options)


def tokamax_splash(shape: Shape, **options: bool) -> Any:
    """tokamax's splash attention, which has other code for blocks that need no mask."""
    kernels, masks = _modules(TOKAMAX_SPLASH)
    minor = {"q_layout": shape.q_minor, "k_layout": shape.k_minor, "v_layout": shape.v_minor}
    layouts = {
        name: kernels.QKVLayout.SEQ_MINOR if tokens else kernels.QKVLayout.HEAD_DIM_MINOR
        for name, tokens in minor.items()
    }
    config = kernels.SplashConfig(
        **shape.blocks(), **layouts, use_experimental_scheduler=shape.scheduler, dq_reduction_steps=shape.dq_steps
    )
    return kernels.make_splash_mha_single_device(_mask(masks, shape), config=config, **options)


MAKERS: dict[str, tuple[Callable[..., Any], str]] = {
    "jax_splash": (jax_splash, JAX_SPLASH),
    "tokamax_splash": (tokamax_splash, TOKAMAX_SPLASH),
}


def _modules(package: str) -> tuple[Any, Any]:
    names = (f"{package}.splash_attention_{part}" for part in ("kernel", "mask"))
    kernels, masks = (importlib.import_module(name) for name in names)
    return kernels, masks


def _mask(masks: Any, shape: Shape) -> Any:
    size = (shape.T, shape.T)
    return masks.CausalMask(size) if shape.window is None else masks.LocalMask(size, (shape.window - 1, 0), 0)


def segments(package: str, ids: jax.Array) -> Any:
    """A row's segment ids [T] as a peer takes them."""
    return _modules(package)[0].SegmentIds(ids, ids)


def forward(name: str, **settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A peer's forward pass with what its backward pass needs, and the arguments to compile it for."""
    make, package = MAKERS[name]
    shape = Shape(**settings)
    kernel = make(shape, save_residuals=shape.residuals)

    def function(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> Any:
        return kernel(q, k, v, segments(package, ids)) if shape.packed else kernel(q, k, v)

    return function, (shape.queries, shape.keys, shape.keys, shape.ids)


def backward(name: str, **settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """dq, dk and dv of what a peer's forward pass left."""
    make, package = MAKERS[name]
    shape = Shape(**settings)
    kernel = make(shape)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> Any:
        given = segments(package, ids) if shape.packed else None
        return jax.vjp(lambda q, k, v: kernel(q, k, v, given), q, k, v)[1]

    pullback = jax.eval_shape(run, shape.queries, shape.keys, shape.keys, shape.ids)
    return lambda dout, pullback: pullback(dout), (shape.queries, pullback)


def flywheel_forward(**settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """FlyWheel's forward pass, with lse unless `residuals` is false; `packed` is one document in its packed form."""
    api, shape = importlib.import_module(f"{FLYWHEEL}.flash_attn_interface"), Shape(**settings)
    bounds = (-1, -1) if shape.window is None else (shape.window - 1, 0)
    options = {"causal": True, "window_size": bounds, "return_softmax_lse": shape.residuals}

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        if not shape.packed:
            return api.flash_attn_func(q[None], k[None], v[None], **options)
        ends = jnp.array([0, shape.T], jnp.int32)
        return api.flash_attn_varlen_func(q, k, v, ends, ends, shape.T, shape.T, **options)

    return function, (shape.queries, shape.keys, shape.keys)


def flywheel_backward(**settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """dq, dk and dv of FlyWheel's full attention; it has none of windows, nor of packed rows."""
    kernels, shape = importlib.import_module(f"{FLYWHEEL}.pallas.flash_bwd"), Shape(**settings)
    if shape.window is not None or shape.packed:
        raise ConfigError("flywheel_backward has neither windows nor packed rows: give --set window=null")

    def function(q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, lse: jax.Array, dout: jax.Array) -> Any:
        return kernels.flash_attn_bwd(q, k, v, out, lse, dout, causal=True, softmax_scale=shape.D**-0.5)

    lse = jax.ShapeDtypeStruct((shape.H, shape.T), jnp.float32)
    return function, (shape.queries, shape.keys, shape.keys, shape.queries, lse, shape.queries)


def _named(pass_: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda **settings: pass_(name, **settings)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"{name}_{pass_.__name__}": _named(pass_, name) for name in MAKERS for pass_ in (forward, backward)},
    "flywheel_forward": flywheel_forward,
    "flywheel_backward": flywheel_backward,
}
LIBRARIES = {"jax_splash": "jax", "tokamax_splash": "tokamax", "flywheel": "flywheel-tpu"}


def settings(name: str) -> tuple[str, ...]:
    """The keyword arguments that a function of FUNCTIONS takes."""
    return tuple(inspect.signature(Shape).parameters)


def check_installed(name: str) -> None:
    """Raises `ConfigError` where the library is not installed."""
    library = LIBRARIES[name.rpartition("_")[0]]
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        raise ConfigError(f"{name} needs {library}, which is not installed: pip install {library}")


def executions(name: str, **settings: Any) -> Executions:
    """How often the code of the call's kernel runs."""
    maker, _, pass_ = name.rpartition("_")
    shape = Shape(**settings)
    if maker == "flywheel":
        return _of_flywheel_forward(shape) if pass_ == "forward" else _of_flywheel_backward(shape)
    kernel = MAKERS[maker][0](shape)
    info = kernel.fwd_mask_info if pass_ == "forward" else kernel.dkv_mask_info
    kinds = np.asarray(info.block_mask)  # [1, blocks, blocks] or [visits]: 0 nothing to do, 1 masked, 2 not masked
    masked, plain = (shape.H * int((kinds == kind).sum()) for kind in (1, 2))
    rows = shape.H * shape.T // (shape.block_q if pass_ == "forward" else shape.block_kv)
    bodies = (masked, plain) if maker == "tokamax_splash" else (masked + plain,)  # tokamax has code for each
    return Executions(bodies, rows, kinds.size)


def _of_flywheel_forward(shape: Shape) -> Executions:
    """It has code for blocks that need no mask and, of rows that are not packed, for each place of a block that needs
    one: the parts of the block that hold something, so that the length of the code follows from their number."""
    api, schedule = (
        importlib.import_module(f"{FLYWHEEL}.{part}") for part in ("flash_attn_interface", "pallas.loop_schedule")
    )
    bounds = (-1, -1) if shape.window is None else (shape.window - 1, 0)
    longest = shape.T if shape.packed else None
    sizes = api.default_block_sizes(shape.T, shape.T, longest, longest, window_size=bounds, head_dim=shape.D)
    block_q, block_kv = sizes.block_q, sizes.block_kv
    left = shape.T if shape.window is None else shape.window - 1
    compute = {"bq_compute": sizes.block_q_compute, "bkv_compute": sizes.block_kv_compute}
    whole = block_q * block_kv // (sizes.block_q_compute * sizes.block_kv_compute)
    plans = {}
    if not shape.packed:
        plans = schedule.window_fragment_plans(
            bq=block_q, bkv=block_kv, **compute, left=None if shape.window is None else left, right=0, causal_offset=0
        )
    visits = dict.fromkeys([*plans, "plain", "masked"], 0)
    for q, kv in itertools.product(range(0, shape.T, block_q), range(0, shape.T, block_kv)):
        if kv > q + block_q - 1 or kv + block_kv - 1 < q - left:
            continue
        inside = kv + block_kv - 1 <= q and q + block_q - 1 - left <= kv
        visits["plain" if inside else kv - q if kv - q in plans else "masked"] += shape.H
    lengths = {offset: (len(plan), 1) for offset, plan in plans.items()} | {"plain": (whole, 0), "masked": (whole, 1)}
    if plans:
        del visits["masked"]
    bodies = tuple(visits[kind] for kind in sorted(visits, key=lambda kind: lengths[kind], reverse=True))
    return Executions(bodies, shape.H * shape.T // block_q, sum(visits.values()), replays=True)


def _of_flywheel_backward(shape: Shape) -> Executions:
    """Blocks on the diagonal are masked; the query heads of a KV head are one block."""
    block = importlib.import_module(f"{FLYWHEEL}.pallas.flash_bwd").default_bwd_block(shape.T)
    rows = shape.T // block
    bodies = (shape.K * rows, shape.K * rows * (rows - 1) // 2)
    return Executions(bodies, shape.K * rows, sum(bodies))
