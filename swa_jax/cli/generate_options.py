"""The options of `generate` and `chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from swa_jax.cli.options import OUTPUT, PATTERN, PROMPTS, RUNNING

SAMPLING, CHAT = "Sampling", "Chat"

Pattern = Annotated[
    str | None,
    Option(
        help="A recipe or a pattern JSON. Default: the checkpoint's own.", show_default=False, rich_help_panel=PATTERN
    ),
]
MaxNewTokens = Annotated[int, Option(help="Tokens to write at most.", min=1, rich_help_panel=SAMPLING)]
Temperature = Annotated[float, Option(help="0 takes the likeliest token.", min=0, rich_help_panel=SAMPLING)]
TopK = Annotated[int | None, Option(help="Sample among the K likeliest tokens.", min=1, rich_help_panel=SAMPLING)]
TopP = Annotated[
    float | None, Option(help="Sample among the likeliest tokens that make up P.", rich_help_panel=SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    Option(
        help="A text that ends a reply and is not part of it; may be given several times.",
        show_default=False,
        rich_help_panel=SAMPLING,
    ),
]
Chunk = Annotated[int, Option(help="Prompt tokens computed at once.", min=1, rich_help_panel=RUNNING)]
PromptText = Annotated[
    str | None, Argument(help="The text to continue; - reads it from standard input.", show_default=False)
]
PromptFile = Annotated[
    Path | None,
    Option(
        help='A file of prompts: .txt has one a line; else each line is a JSON text, {"prompt": text} or '
        '{"messages": [...]}.',
        show_default=False,
        rich_help_panel=PROMPTS,
    ),
]
Samples = Annotated[int, Option("--samples", "-n", help="Replies to each prompt.", min=1, rich_help_panel=PROMPTS)]
WithTemplate = Annotated[
    bool, Option("--chat", help="Put each prompt into the model's chat template.", rich_help_panel=CHAT)
]
Thinking = Annotated[
    bool | None,
    Option(
        "--thinking/--no-thinking",
        help="Whether the model thinks first, if its chat template can switch that.",
        show_default=False,
        rich_help_panel=CHAT,
    ),
]
ReplyPath = Annotated[
    Path | None,
    Option(
        help="A new file for the replies, one JSON object a line. The same command goes on after an interruption.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
Slots = Annotated[int, Option(help="Replies that are written at once.", min=1, rich_help_panel=RUNNING)]
Prefixes = Annotated[
    int, Option(help="Prompts whose caches are remembered for others that begin alike.", min=0, rich_help_panel=RUNNING)
]
Mesh = Annotated[
    str | None, Option(help="Split the model over the devices: tensor=8.", show_default=False, rich_help_panel=RUNNING)
]
