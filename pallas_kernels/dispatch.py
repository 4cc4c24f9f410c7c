"""Which implementation takes a call (`choose`), and what it launches (`dispatched`).

The public functions call what `choose` says, and that runs the launches which are listed here: `swa-jax bench attention
--dry-run` and docs/kernels.md print them.
"""

import logging
from typing import Literal, get_args

import jax

from pallas_kernels import cudnn, xla
from pallas_kernels.blocks import device_kind, platform
from pallas_kernels.math.schedule import Kind
from pallas_kernels.math.spec import AttentionSpec
from pallas_kernels.request import Device, Dispatched, Op, Request
from pallas_kernels.tpu.calls.listing import list_launches

_log = logging.getLogger(__name__)

Implementation = Literal["tpu", "triton", "cudnn", "xla", "reference"]

_BEST = {"tpu": ("tpu",), "gpu": ("cudnn", "triton")}  # by platform, the best first; XLA elsewhere
_TRITON_DTYPES = ("bfloat16", "float16", "float32")
_TRITON_HEAD_DIM = 256  # at most
_TPU_DTYPES = ("float32", "bfloat16")


def current_device(implementation: str | None = None) -> Device:
    """What the current trace is for; Triton is asked for only where it may be used."""
    name, kind = platform(), device_kind()
    if name != "gpu" and implementation != "triton":
        return Device(name, kind)
    has_cudnn = name == "gpu" and cudnn.installed()
    try:
        from pallas_kernels.gpu import triton
    except ImportError as error:  # JAX may have dropped its lowering
        return Device(name, kind, no_triton=f"this JAX has no Triton lowering ({error}).", cudnn=has_cudnn)
    return Device(name, kind, triton.compute_capability() if triton.on_gpu() else None, cudnn=has_cudnn)


def dispatched(request: Request) -> Dispatched:
    """The implementation for a call and its launches; raises as `choose`."""
    name, fallback = choose(request)
    if name == "tpu":
        return Dispatched(name, list_launches(request), fallback=fallback)
    if name == "triton":
        from pallas_kernels.gpu.listing import list_launches as list_gpu_launches

        return Dispatched(name, list_gpu_launches(request), fallback=fallback)
    return Dispatched(name, blocks=xla_blocks(request) if name == "xla" else None, fallback=fallback)


def missing(name: str, request: Request) -> str | None:
    """What keeps an implementation from the call, as a sentence; None if nothing does."""
    if name == "cudnn":
        return cudnn.missing(request)
    if name == "tpu" and request.dtype not in _TPU_DTYPES:
        return f"it takes float32 and bfloat16, but q is {request.dtype}."
    if name in ("tpu", "triton") and jax.config.jax_enable_x64:
        return "its kernels count in 32 bits, but jax_enable_x64 is on."
    if name != "triton":
        return None
    device = request.device
    if device.no_triton is not None:
        return device.no_triton
    if request.dtype not in _TRITON_DTYPES:
        return f"q is {request.dtype}; the kernels for GPUs take {', '.join(_TRITON_DTYPES)}."
    if request.head_dim > _TRITON_HEAD_DIM:
        return f"head_dim is {request.head_dim}; the kernels for GPUs take at most {_TRITON_HEAD_DIM}."
    if device.capability is not None and device.capability < 80:
        return f"the GPU has compute capability {device.capability / 10}; the kernels need 8.0 (A100) or newer."
    return None


def choose(request: Request) -> tuple[str, str | None]:
    """The implementation for a call, and why it is not the best one for the device.

    Raises:
      ValueError: the call names an implementation that does not exist.
      NotImplementedError: the implementation that the call names cannot do it; the sentence says what is missing.
    """
    name = request.implementation
    if name is None:
        lacks = None
        for best in _BEST.get(request.device.platform, ()):
            lacks = missing(best, request)
            if lacks is None:
                return best, None
        return "xla", lacks
    if name not in get_args(Implementation):
        choices = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation is {name!r}; it must be one of {choices}, or None for the best here.")
    if lacks := missing(name, request):
        raise NotImplementedError(f"implementation {name!r} cannot take this call: {lacks}")
    return name, None


def xla_blocks(request: Request) -> tuple[int, int]:
    """Tokens of XLA's blocks of queries and keys."""
    if request.op == "decode_attention":
        return request.q_length, request.kv_length
    heads = request.heads // (request.kv_heads if "full_heads" in request.given else 1)
    return xla.attention_blocks(heads, request.spec.window, request.q_length, request.kv_length)


def describe(found: Dispatched) -> list[str]:
    """A line for each launch: kernel, grid, tiles and masks."""
    if not found.launches:
        blocks = "" if found.blocks is None else ", blocks of {} queries and {} keys".format(*found.blocks)
        return [f"{found.implementation}: no kernel{blocks}"]
    return [
        f"{launch.kernel} ({launch.keys} keys), grid {' x '.join(map(str, launch.grid))}, {launch.tiles}, "
        f"masks: {', '.join(kind.value for kind in launch.masks)}"
        for launch in found.launches
    ]


def table() -> str:
    """Which call takes which kernels, as Markdown: the table of docs/kernels.md."""
    devices = (Device("tpu", "TPU v6 lite"), Device("gpu", "NVIDIA H200", 90, cudnn=True), Device("cpu", "cpu"))
    window, sinks, full = AttentionSpec(1024), AttentionSpec(1024, 4), AttentionSpec()
    rows: tuple[tuple[str, Op, AttentionSpec, tuple[str, ...]], ...] = (
        ("full causal", "attention", full, ()),
        ("full causal, packed", "attention", full, ("q_segment_ids",)),
        ("window", "attention", window, ()),
        ("window, sink tokens", "attention", sinks, ()),
        ("window, packed", "attention", window, ("q_segment_ids",)),
        ("window, sink tokens, packed", "attention", sinks, ("q_segment_ids",)),
        ("window longer than the window kernels take", "attention", AttentionSpec(5000), ()),
        ("window, given positions", "attention", window, ("q_positions", "kv_positions")),
        ("window, chunked", "attention", AttentionSpec(1024, chunked=True), ()),
        ("window, full_from", "attention", window, ("full_from",)),
        ("window, full_heads", "attention", window, ("full_heads",)),
        ("both directions, window", "attention", AttentionSpec(1024, causal=False), ()),
        ("routed", "routed_attention", window, ()),
        ("routed, packed", "routed_attention", window, ("q_segment_ids",)),
        ("routed, inference", "routed_attention", window, ()),
        ("decode", "decode_attention", window, ("q_positions", "kv_positions")),
        ("decode, a model's cache", "decode_attention", window, ("pools",)),
    )
    lines = ["| call | TPU | masks on a TPU | GPU | CPU |", "|---|---|---|---|---|"]
    for words, op, spec, given in rows:
        length = 1 if op == "decode_attention" else 8192
        facts = (op, spec, 1, length, 8192, 8, 2, 128, "bfloat16")
        inference = words.endswith("inference")
        found = [dispatched(Request(*facts, device, frozenset(given), inference)) for device in devices]
        masks = {kind for launch in found[0].launches for kind in launch.masks}
        ordered = ", ".join(kind.value for kind in Kind if kind in masks)
        cells = [_kernels(one) for one in found]
        lines.append(f"| {words} | {cells[0]} | {ordered} | {cells[1]} | {cells[2]} |")
    return "\n".join(lines)


def _kernels(found: Dispatched) -> str:
    names = dict.fromkeys(launch.kernel for launch in found.launches)
    return ", ".join(f"`{name}`" for name in names) or f"`{found.implementation}.py`"
