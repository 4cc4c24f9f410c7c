"""Times attention on a GPU, forward, backward and decoding, against what else is installed, as ratios from
one run.

    python scripts/bench_gpu.py [--lengths 4096 ...] [--windows 1024 2048] [--markdown table.md] [--dry-run]

Peers: `jax.nn.dot_product_attention` (cudnn, with its own window; xla, with the window as a mask up to 8192
tokens, whose logits still fit memory) and, where torch with CUDA is installed, FlexAttention with the same
mask. A ratio is the peer's time over ours: above 1 we are faster. `cudnn` windows are an upper bound of
skipping, not an oracle: see docs/kernels.md.
"""

import argparse
import dataclasses
import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels import AttentionSpec, attention, decode_attention

LONGEST_DENSE = 8192  # tokens for which a peer may hold all logits


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str  # forward, backward (with its forward) or decode
    length: int
    window: int | None
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.kind:8}  T={self.length:<6}  window={self.window or 'full':<5}"


def cases(args) -> list[Case]:
    sizes = {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    windows = [*args.windows, None]
    training = [
        Case(kind, length, window, **sizes)
        for kind in ("forward", "backward")
        for length in args.lengths
        for window in windows
        if window is None or window < length
    ]
    decoding = [
        Case("decode", length, window, **sizes, batch=args.decode_batch)
        for length in args.lengths
        for window in windows
        if window is None or window < length
    ]
    return training + decoding


def peers(case: Case) -> list[str]:
    names = ["triton", "cudnn"]
    if case.kind == "decode" or case.length <= LONGEST_DENSE:
        names.append("xla")
    if importlib.util.find_spec("torch") is not None:
        names.append("flex")
    return names


def drawn(case: Case) -> tuple[jax.Array, ...]:
    q_length = 1 if case.kind == "decode" else case.length
    shapes = [(q_length, case.heads), (case.length, case.kv_heads), (case.length, case.kv_heads)]
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(
        jax.random.normal(key, (case.batch, length, heads, case.head_dim), jnp.bfloat16)
        for key, (length, heads) in zip(keys, shapes, strict=True)
    )


def jax_function(case: Case, name: str) -> Callable:
    """`function(q, k, v)`, which returns out, or the gradients of its sum."""
    if case.kind == "decode":
        return jax.jit(functools.partial(_decode, case, name))

    def forward(q, k, v):
        if name == "triton":
            return attention(q, k, v, AttentionSpec(window=case.window), implementation="triton")
        window = None if case.window is None else (case.window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation=name
        )

    if case.kind == "forward":
        return jax.jit(forward)
    return jax.jit(jax.grad(lambda *qkv: forward(*qkv).astype(jnp.float32).sum(), (0, 1, 2)))


def _decode(case: Case, name: str, q, k, v):
    lengths = jnp.full((case.batch,), case.length, jnp.int32)
    if name == "triton":
        return decode_attention(
            q, k, v, AttentionSpec(window=case.window), lengths=lengths, implementation="triton"
        )
    if case.window is not None:  # the kindest reading: the peer is given the window alone
        k, v = k[:, -case.window :], v[:, -case.window :]
    return jax.nn.dot_product_attention(q, k, v, implementation=name)


def seconds_jax(case: Case, name: str, repeats: int) -> float:
    function, arrays = jax_function(case, name), drawn(case)
    return _median(lambda: jax.block_until_ready(function(*arrays)), repeats)


def seconds_flex(case: Case, repeats: int) -> float:
    """FlexAttention, compiled, with a block mask of the same window."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q_length = 1 if case.kind == "decode" else case.length
    offset = case.length - q_length

    def visible(_batch, _head, i, j):
        causal = j <= i + offset
        return causal if case.window is None else causal & (i + offset - j < case.window)

    mask = create_block_mask(visible, None, None, q_length, case.length, device="cuda")
    shapes = [(q_length, case.heads), (case.length, case.kv_heads), (case.length, case.kv_heads)]
    arrays = [
        torch.randn(
            case.batch,
            heads,
            n,
            case.head_dim,
            device="cuda",
            dtype=torch.bfloat16,
            requires_grad=case.kind == "backward",
        )
        for n, heads in shapes
    ]
    compiled = torch.compile(flex_attention)

    def run():
        out = compiled(*arrays, block_mask=mask, enable_gqa=True)
        if case.kind == "backward":
            torch.autograd.grad(out.float().sum(), arrays)
        torch.cuda.synchronize()

    return _median(run, repeats)


def _median(run: Callable, repeats: int) -> float:
    for _ in range(3):  # compile, then settle
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(case: Case, repeats: int) -> dict[str, float | str]:
    """Seconds of each implementation, or the reason why it has none."""
    results: dict[str, float | str] = {}
    for name in peers(case):
        try:
            results[name] = (
                seconds_flex(case, repeats) if name == "flex" else seconds_jax(case, name, repeats)
            )
        except Exception as error:  # a peer that refuses a case must not end the run
            results[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return results


def row(case: Case, results: dict[str, float | str]) -> str:
    ours = results["triton"]
    cells = [case.kind, f"{case.length}", f"{case.window or 'full'}"]
    cells.append(f"{ours * 1e3:.3f}" if isinstance(ours, float) else "failed")
    for name in ("cudnn", "xla", "flex"):
        theirs = results.get(name, math.nan)
        both = isinstance(theirs, float) and isinstance(ours, float) and not math.isnan(theirs)
        cells.append(f"{theirs / ours:.2f}" if both else "–")
    return "| " + " | ".join(cells) + " |"


HEADER = [
    "| | T | window | ours, ms | cudnn / ours | xla / ours | flex / ours |",
    "|---|---|---|---|---|---|---|",
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--windows", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--decode-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--dry-run", action="store_true", help="list what would run, without a GPU")
    args = parser.parse_args(argv)
    if args.dry_run:
        for case in cases(args):
            for name in peers(case):
                if name != "flex":  # shapes and arguments are checked; nothing runs
                    jax.eval_shape(
                        jax_function(case, "xla" if name == "cudnn" else name),
                        *jax.eval_shape(lambda c=case: drawn(c)),
                    )
            print(f"{case}  {', '.join(peers(case))}")
        return
    if jax.default_backend() != "gpu":
        raise SystemExit(
            f"JAX runs on {jax.default_backend()}: this measures on a GPU; --dry-run lists what it would run."
        )
    shape = f"{args.heads} heads, {args.kv_heads} KV heads, head_dim {args.head_dim}"
    lines = [f"{jax.devices()[0].device_kind}, bfloat16, {shape}", "", *HEADER]
    print("\n".join(lines), flush=True)
    for case in cases(args):
        results = measure(case, args.repeats)
        lines.append(row(case, results))
        print(
            lines[-1],
            *(f"  {n}: {r}" for n, r in results.items() if isinstance(r, str)),
            sep="\n",
            flush=True,
        )
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
