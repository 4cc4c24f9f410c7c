"""Other libraries' attention on TPUs, compiled and counted as `swa_jax.bench.tpu_kernels` does our own.

They read from scalar memory which blocks they visit, and run the same code at each visit. So their cycles are the
bundles of that code times the visits, which `executions` reads from the kernels' own tables. That leaves out waits,
steps of the grid that visit nothing beyond their scalar code, and the reading of mask blocks.
"""

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.bench.tpu_kernels import Executions

JAX_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"
TOKAMAX_SPLASH = "tokamax._src.ops.experimental.tpu.splash_attention"


@dataclasses.dataclass(frozen=True)
class Shape:
    """H query heads, K KV heads, T tokens, D head_dim; `window` None is full."""

    H: int = 1
    K: int = 1
    T: int = 16384
    D: int = 128
    window: int | None = 1024
    packed: bool = False  # segment ids are given
    block_q: int = 1024
    block_kv: int = 1024
    block_kv_compute: int = 512

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
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), kernels.QKVLayout.HEAD_DIM_MINOR)
    config = kernels.SplashConfig(**shape.blocks(), **layouts, dq_reduction_steps=3)
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
    kernel = make(shape, save_residuals=True)

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


def _named(pass_: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda **settings: pass_(name, **settings)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{name}_{pass_.__name__}": _named(pass_, name) for name in MAKERS for pass_ in (forward, backward)
}


def settings(name: str) -> tuple[str, ...]:
    """The keyword arguments that a function of FUNCTIONS takes."""
    return tuple(inspect.signature(Shape).parameters)


def check_installed(name: str) -> None:
    """Raises `ConfigError` where the library is not installed."""
    library = MAKERS[name.rpartition("_")[0]][1].partition(".")[0]
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"{name} needs {library}, which is not installed: pip install {library}")


def executions(name: str, **settings: Any) -> Executions:
    """How often the code of the call's kernel runs; tokamax has code for blocks with a mask and for those without."""
    maker, _, pass_ = name.rpartition("_")
    shape = Shape(**settings)
    kernel = MAKERS[maker][0](shape)
    info = kernel.fwd_mask_info if pass_ == "forward" else kernel.dkv_mask_info
    kinds = np.asarray(info.block_mask)  # [1, blocks, blocks] or [visits]: 0 nothing to do, 1 masked, 2 not masked
    masked, plain = (shape.H * int((kinds == kind).sum()) for kind in (1, 2))
    rows = shape.H * shape.T // (shape.block_q if pass_ == "forward" else shape.block_kv)
    bodies = (masked, plain) if maker == "tokamax_splash" else (masked + plain,)
    return Executions(bodies, rows, kinds.size)
