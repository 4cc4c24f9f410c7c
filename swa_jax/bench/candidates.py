"""What `swa-jax bench attention` times: this library's implementations, and others where they are installed.

A candidate turns a `BenchCase` into a function of q [B, T, H, D], k and v [B, S, K, D]: the output, for the pass
"forward+backward" the gradients of its weighted sum too. All of them see the same arrays.

With `documents`, rows are packed as in training: our implementations are given segment ids, and so are those peers that
have a mask for them. The variants are what training runs beside plain windows; no peer has them.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import AttentionSpec, alibi_slopes, attention, decode_attention, routed_attention
from pallas_kernels.dispatch import current_device
from pallas_kernels.request import Op, Request
from swa_jax.bench import peer_calls
from swa_jax.bench.bench_rows import routed_rows

PASSES = ("forward", "forward+backward", "decode")
VARIANTS = ("plain", "sink-tokens", "full-rows", "sigmoid", "routed")
SINK_TOKENS, ROUTED_SHARE, FULL_ROWS = 4, 0.13, 256  # of those variants; the last rows of each document are full
LONGEST_DENSE = 8192  # tokens up to which an implementation that holds all logits takes part
Runner = Callable[[], Any]  # starts the work; `Candidate.finish` waits for what it returned


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """One cell of the grid: causal attention over `length` tokens, `window` of them visible (None: all)."""

    which: str  # of PASSES
    length: int
    window: int | None
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: str
    documents: int | None = None  # tokens of a document in a packed row; None: no segment ids
    variant: str = "plain"  # of VARIANTS

    @property
    def q_length(self) -> int:
        return 1 if self.which == "decode" else self.length

    @property
    def spec(self) -> AttentionSpec:
        sinks = SINK_TOKENS if self.variant == "sink-tokens" else 0
        return AttentionSpec(self.window, sinks, "sigmoid" if self.variant == "sigmoid" else "softmax")

    def request(self) -> Request:
        """The call of the public function, for `pallas_kernels.dispatch.dispatched`."""
        decode = self.which == "decode"
        given = {"q_positions", "kv_positions"} if decode else {"q_segment_ids"} if self.documents else set()
        given |= {"alibi_slopes", "sigmoid_bias"} if self.variant == "sigmoid" else set()
        given |= {"full_from"} if self.variant == "full-rows" else set()
        op: Op = "routed_attention" if self.variant == "routed" else "attention"
        return Request(
            op="decode_attention" if decode else op,
            spec=self.spec,
            batch=self.batch,
            q_length=self.q_length,
            kv_length=self.length,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=current_device(),
            given=frozenset(given),
        )

    def __str__(self) -> str:
        packed = "" if self.documents is None else f"  documents={self.documents}"
        variant = "" if self.variant == "plain" else f"  {self.variant}"
        return f"{self.which}  T={self.length}  window={self.window or 'full'}{packed}{variant}"

    def segment_ids(self) -> jax.Array | None:
        """[B, T] int32, from 1; None if rows are not packed."""
        if self.documents is None:
            return None
        ids = jnp.arange(self.length, dtype=jnp.int32) // self.documents + 1
        return jnp.broadcast_to(ids, (self.batch, self.length))

    @functools.lru_cache(maxsize=1)  # noqa: B019  (all candidates of a case share them, and the next case drops them)
    def draw(self) -> tuple[jax.Array, ...]:
        """q, k, v and the weights of the sum whose gradients are taken, all normal."""
        queries, keys = (self.q_length, self.heads), (self.length, self.kv_heads)
        seeds, dtype = jax.random.split(jax.random.key(0), 4), jnp.dtype(self.dtype)
        return tuple(
            jax.random.normal(seed, (self.batch, *shape, self.head_dim), dtype)
            for seed, shape in zip(seeds, (queries, keys, keys, queries), strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """A runner that is a jitted function and its arguments."""

    function: Any
    arguments: tuple[jax.Array, ...]

    def __call__(self) -> Any:
        return self.function(*self.arguments)


class Candidate(NamedTuple):
    """An implementation; `prepare` compiles nothing yet. What its runner returns is fetched by `to_numpy`."""

    name: str
    prepare: Callable[[BenchCase], Runner]
    finish: Callable[[Any], Any]  # waits for what a runner returned
    to_numpy: Callable[[Any], list[np.ndarray]]


def ours(device: str) -> list[Candidate]:
    """The implementations to time on a platform ("cpu", "gpu", "tpu"), the device's own first."""
    names = {"tpu": ["tpu", "xla"], "gpu": ["triton", "xla"]}.get(device, ["xla"])
    return [_in_jax(name, functools.partial(_our_attention, name)) for name in names]


def peers(device: str, case: BenchCase) -> Iterator[Candidate]:
    """Others that are installed and serve the device and the case."""
    if case.variant != "plain":
        return
    packed = case.documents is not None
    if case.which == "decode" or case.length <= LONGEST_DENSE:
        yield _in_jax("jax.nn (xla)", functools.partial(_jax_nn, "xla"))
    if device == "gpu" and not packed:
        yield _in_jax("jax.nn (cudnn)", functools.partial(_jax_nn, "cudnn"))
    if device == "tpu" and case.which != "decode":
        yield _in_jax("jax splash", splash)
    has_tokamax = importlib.util.find_spec("tokamax") is not None
    if device != "cpu" and case.which != "decode" and not packed and has_tokamax:
        yield _in_jax("tokamax", _tokamax)
    if device == "gpu" and _has_torch_with_cuda():
        yield Candidate("FlexAttention", _flex_attention, _synchronize_torch, _torch_to_numpy)
        if importlib.util.find_spec("flash_attn") is not None and case.dtype != "float32":
            yield Candidate("FlashAttention", _flash_attention, _synchronize_torch, _torch_to_numpy)


def _in_jax(name: str, function: Callable) -> Candidate:
    """A candidate from `function(case, q, k, v)`."""

    def prepare(case: BenchCase) -> Runner:
        return Program(jax_program(case, function), case.draw())

    return Candidate(name, prepare, jax.block_until_ready, _jax_to_numpy)


def jax_program(case: BenchCase, function: Callable) -> Callable:
    """`program(q, k, v, weights)`, jitted."""
    forward = functools.partial(function, case)

    def both(q, k, v, weights):
        out, pullback = jax.vjp(forward, q, k, v)
        return out, *pullback(weights.astype(out.dtype))

    if case.which == "forward+backward":
        return jax.jit(both)
    return jax.jit(lambda q, k, v, weights: (forward(q, k, v),))


def _our_attention(name: str, case: BenchCase, q, k, v):
    options: dict[str, Any] = {"implementation": name}
    if case.which == "decode":
        lengths = jnp.full((case.batch,), case.length, jnp.int32)
        return decode_attention(q, k, v, case.spec, lengths=lengths, **options)
    options["q_segment_ids"] = case.segment_ids()
    if case.variant == "routed":
        gate = jnp.asarray(routed_rows(case.length, ROUTED_SHARE), jnp.float32)
        gate = jnp.broadcast_to(gate, (case.batch, case.length))
        return routed_attention(q, k, v, gate, case.spec, **options)[0].astype(q.dtype)
    if case.variant == "full-rows":
        size = case.documents or case.length
        options["full_from"] = jnp.full((case.batch, -(-case.length // size)), max(size - FULL_ROWS, 0), jnp.int32)
    if case.variant == "sigmoid":
        negative = case.heads // 2
        options |= {
            "alibi_slopes": alibi_slopes(negative, case.heads - negative, "swat"),
            "sigmoid_bias": jnp.float32(-math.log(case.window or case.length)),
        }
    return attention(q, k, v, case.spec, **options)


def _jax_nn(name: str, case: BenchCase, q, k, v):
    if case.which == "decode":
        if case.window is not None:  # the kindest reading: it is given the window alone
            k, v = k[:, -case.window :], v[:, -case.window :]
        return jax.nn.dot_product_attention(q, k, v, implementation=name)  # type: ignore[call-overload]
    window = None if case.window is None else (case.window - 1, 0)
    ids = case.segment_ids()
    mask = None if ids is None else (ids[:, :, None] == ids[:, None, :])[:, None]  # [B, 1, T, T]
    return jax.nn.dot_product_attention(  # type: ignore[call-overload]
        q, k, v, mask=mask, is_causal=True, local_window_size=window, implementation=name
    )


def _tokamax(case: BenchCase, q, k, v):
    import tokamax  # type: ignore[import-not-found, unused-ignore]

    window = None if case.window is None else (case.window - 1, 0)
    return tokamax.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)


def splash(case: BenchCase, q, k, v, *, interpret: bool = False):
    """The kernel that ships with JAX, its blocks as large as fit."""
    block = math.gcd(case.length, 1024)
    sizes = peer_calls.Shape(H=case.heads, T=case.length, window=case.window)
    shape = dataclasses.replace(sizes, block_q=block, block_kv=block, block_kv_compute=math.gcd(block, 512))
    ids = case.segment_ids()
    segments = None if ids is None else peer_calls.segments(peer_calls.JAX_SPLASH, ids[0])
    kernel = peer_calls.jax_splash(shape, interpret=interpret)
    q = q * jnp.asarray(case.head_dim**-0.5, q.dtype)
    one_row = functools.partial(kernel, segment_ids=segments)
    return jax.vmap(one_row)(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)


def _has_torch_with_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # type: ignore[import-not-found, unused-ignore]

    return torch.cuda.is_available()


def _flex_attention(case: BenchCase) -> Runner:
    import torch  # type: ignore[import-not-found, unused-ignore]
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # type: ignore[import-not-found, unused-ignore]

    offset = case.length - case.q_length

    def visible(_batch, _head, i, j):
        seen = j <= i + offset
        if case.window is not None:
            seen = seen & (i + offset - j < case.window)
        return seen if case.documents is None else seen & (i // case.documents == j // case.documents)

    mask = create_block_mask(visible, None, None, case.q_length, case.length, device="cuda")
    dtype = getattr(torch, case.dtype)
    arrays = [torch.from_numpy(np.asarray(x, np.float32)).to("cuda", dtype).transpose(1, 2) for x in case.draw()]
    *qkv, weights = (array.contiguous() for array in arrays)  # [B, H, T, D]
    backward = case.which == "forward+backward"
    for array in qkv:
        array.requires_grad_(backward)
    compiled = torch.compile(flex_attention)

    def run():
        out = compiled(*qkv, block_mask=mask, enable_gqa=True)
        return (out, *torch.autograd.grad(out, qkv, weights)) if backward else (out,)

    return run


def _flash_attention(case: BenchCase) -> Runner:
    import torch
    from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    dtype = getattr(torch, case.dtype)
    *qkv, weights = (torch.from_numpy(np.asarray(x, np.float32)).to("cuda", dtype) for x in case.draw())  # [B, T, H, D]
    backward = case.which == "forward+backward"
    for array in qkv:
        array.requires_grad_(backward)
    options = {"causal": True, "window_size": (-1, -1) if case.window is None else (case.window - 1, 0)}
    ends = torch.from_numpy(document_ends(case)).to("cuda")

    def forward():
        if case.documents is None:
            return flash_attn_func(*qkv, **options)
        longest = min(case.documents, case.length)
        flat = [array.flatten(0, 1) for array in qkv]
        return flash_attn_varlen_func(*flat, ends, ends, longest, longest, **options).unflatten(0, (case.batch, -1))

    def run():
        out = forward()
        results = (out, *torch.autograd.grad(out, qkv, weights)) if backward else (out,)
        return tuple(result.transpose(1, 2) for result in results)  # as FlexAttention's

    return run


def document_ends(case: BenchCase) -> np.ndarray:
    """Where the documents of all rows begin, one row after the other, and the end: [documents + 1] int32."""
    starts = np.arange(0, case.length, case.documents or case.length)
    every = (np.arange(case.batch)[:, None] * case.length + starts).ravel()
    return np.append(every, case.batch * case.length).astype(np.int32)


def _synchronize_torch(result: Any) -> Any:
    import torch

    torch.cuda.synchronize()
    return result


def _torch_to_numpy(result: Any) -> list[np.ndarray]:
    return [x.detach().transpose(1, 2).float().cpu().numpy() for x in result]


def _jax_to_numpy(result: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in result]
