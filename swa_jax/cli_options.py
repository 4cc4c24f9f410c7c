"""Options that several verbs of the command line share, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

if TYPE_CHECKING:
    from swa_jax.evaluate import Example
    from swa_jax.model import Decoder
    from swa_jax.tokenizer import Tokenizer

Model = Annotated[Path, Argument(help="A checkpoint folder, as `import` and `train` make it.")]
Window = Annotated[
    int | None, Option("--window", help="Visible keys of a windowed query, its own included.", min=1)
]
SinkTokens = Annotated[
    int | None, Option("--sink-tokens", help="First tokens that stay visible beside the window.", min=0)
]
FullDecode = Annotated[
    bool | None,
    Option("--fa-decode/--no-fa-decode", help="Whether answers see everything.", show_default=False),
]
NumKeys = Annotated[int, Option("--keys", help="Needles in a prompt, one of which is asked for.", min=1)]
Length = Annotated[int, Option("--length", help="Tokens of a needle prompt with its answer.", min=1)]
Haystack = Annotated[
    Path | None, Option("--haystack", help="A text to hide needles in; default: Python library sources.")
]
BatchSize = Annotated[int, Option("--batch-size", min=1)]
Seed = Annotated[int, Option("--seed", min=0)]
Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Annotated[
    Dtype | None,
    Option("--dtype", help="Of weights and arithmetic; default: as stored. CPUs are faster in float32."),
]


def load_for_cli(model: Path, dtype: Dtype | None) -> tuple[Decoder, Tokenizer]:
    from swa_jax.checkpoint import load_model
    from swa_jax.tokenizer import load_tokenizer

    return load_model(model, dtype=dtype), load_tokenizer(model)


def draw_needles(
    tokenizer: Tokenizer, count: int, length: int, keys: int, haystack: Path | None, depths: Any, seed: int
) -> list[Example]:
    from swa_jax.evaluate import needle_examples

    return needle_examples(
        tokenizer,
        length=length,
        num_examples=count,
        num_keys=keys,
        depths=depths,
        haystack=None if haystack is None else [haystack],
        seed=seed,
    )
