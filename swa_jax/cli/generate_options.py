"""The options of `generate` and `chat`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, CallbackParam

from swa_jax.base.errors import ConfigError
from swa_jax.cli.options import in_chat, in_output, in_pattern, in_prompts, in_running, panel

if TYPE_CHECKING:
    from swa_jax.model.generate import Sampling

in_sampling = panel("Sampling")


def _a_share(option: CallbackParam, value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise ConfigError(f"{option.opts[0]} must be above 0 and at most 1, got {value}")
    return value


Pattern = Annotated[str | None, in_pattern(help="A recipe or a pattern JSON. Default: the checkpoint's own.")]
MaxNewTokens = Annotated[int, in_sampling(help="Tokens to write at most.", min=1)]
Temperature = Annotated[float, in_sampling(help="Randomness of sampling; 0 takes the likeliest token.", min=0)]
TopK = Annotated[int | None, in_sampling(help="Sample among the K likeliest tokens.", min=1)]
TopP = Annotated[
    float | None,
    in_sampling(help="Sample among the likeliest tokens that together have the probability P.", callback=_a_share),
]
Stop = Annotated[list[str] | None, in_sampling(help="A text that ends a reply and is not part of it, repeatable.")]
Chunk = Annotated[int, in_running(help="Prompt tokens computed at once.", min=1)]
PromptText = Annotated[str | None, Argument(help="The text to continue; - reads it from standard input.")]
PromptFile = Annotated[
    Path | None,
    in_prompts(
        help='A file of prompts: .txt has one a line; else each line is a JSON text, {"prompt": text} or '
        '{"messages": [...]}.'
    ),
]
Samples = Annotated[int, in_prompts("--samples", "-n", help="Replies to each prompt.", min=1)]
WithTemplate = Annotated[bool, in_chat("--chat", help="Put each prompt into the model's chat template.")]
Thinking = Annotated[bool | None, in_chat(help="Whether the model thinks first, if its chat template can switch that.")]
ReplyPath = Annotated[
    Path | None,
    in_output(
        help="A new file for the replies, one JSON object a line. The same command goes on after an interruption."
    ),
]
Slots = Annotated[int, in_running(help="Replies generated at once.", min=1)]
Prefixes = Annotated[int, in_running(help="Prompts whose caches are remembered for others that begin alike.", min=0)]


def sampling_options(temperature: float, top_k: int | None, top_p: float | None, samples: int = 1) -> Sampling:
    """How tokens are drawn. Raises `ConfigError` where an option would change nothing."""
    from swa_jax.model.generate import sampling

    if temperature == 0 and samples > 1:
        raise ConfigError(
            f"-n {samples} needs a --temperature above 0: without it, replies to one prompt are all alike"
        )
    for option, value in (("--top-k", top_k), ("--top-p", None if top_p == 1 else top_p)):
        if temperature == 0 and value is not None:
            raise ConfigError(
                f"{option} {value} needs a --temperature above 0: without it, the likeliest token is taken"
            )
    return sampling(temperature, top_k, top_p)
