"""Options that several verbs share, and what they resolve to."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option, echo

from swa_jax.errors import ConfigError
from swa_jax.families.pattern_files import read_pattern
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.pattern import AttentionPattern

if TYPE_CHECKING:
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.evaluate import Example
    from swa_jax.model.decoder import Decoder
    from swa_jax.model.sharding import Partition

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
Length = Annotated[int, Option("--length", help="Tokens of a prompt with its answer.", min=1)]
Haystack = Annotated[
    Path | None,
    Option(
        "--haystack", help="A text, or a folder of them, to hide needles in; default: Python library sources."
    ),
]
BatchSize = Annotated[int, Option("--batch-size", min=1)]
Seed = Annotated[int, Option("--seed", min=0)]
Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Annotated[
    Dtype | None,
    Option("--dtype", help="Of weights and arithmetic; default: as stored. CPUs are faster in float32."),
]
Yarn = Annotated[
    float | None,
    Option("--yarn", help="Stretch the model's context this many times by YaRN, for prompts beyond it."),
]


def resolve_pattern(
    source: str,
    layers: int | ModelConfig,
    window: int | None,
    sink_tokens: int | None,
    full_decode: bool | None,
    default_window: int | None = None,
) -> AttentionPattern:
    """A recipe or a pattern file; options that the user gave win over both, None being what was not given.

    `default_window` is for recipes alone, which name none.
    """
    options: dict[str, Any] = {
        "sliding_window": window,
        "num_sink_tokens": sink_tokens,
        "full_attention_decode": full_decode,
    }
    pattern = read_pattern(source, layers, default_window=default_window, **options)
    if isinstance(layers, ModelConfig):
        pattern.validate(layers)
    elif pattern.num_layers != layers:
        raise ConfigError(f"{source} has {pattern.num_layers} layers, --layers says {layers}")
    return pattern


def check_output(option: str, file: Path) -> None:
    """Find out before the work what would keep its result from being written: a folder's name, no permission.

    Raises:
      ConfigError: the file could not be written.
    """
    if file.is_dir():
        raise ConfigError(f"{option} is {file}, a folder: name a file in it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be written: {error.strerror}") from None


def load_checkpoint(
    model: Path, dtype: Dtype | None, partition: Partition | None = None, yarn: float | None = None
) -> tuple[Decoder, Tokenizer]:
    from swa_jax.checkpoint.folder import load_model, open_checkpoint
    from swa_jax.data.tokenizer import load_tokenizer

    config = None
    if yarn is not None:
        plain = open_checkpoint(model).config
        try:
            config = plain.with_yarn(yarn)
        except ConfigError as error:
            raise ConfigError(f"--yarn {yarn:g}: {error}") from None
    return load_model(model, dtype=dtype, config=config, partition=partition), load_tokenizer(model)


def parse_mesh(text: str) -> Partition:
    """`data=2,fsdp=4` over all devices of this machine; axes that are not named count 1."""
    import jax

    from swa_jax.model.sharding import AXES, MeshConfig, Partition, make_mesh

    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or not size.removeprefix("-").isdecimal():
            raise ConfigError(
                f"--mesh must be sizes of the axes {', '.join(AXES)} such as data=2,fsdp=4, got '{part}'"
            )
        sizes[name] = int(size)
    try:
        return Partition(make_mesh(MeshConfig(**sizes), jax.devices()))
    except ConfigError as error:
        raise ConfigError(f"--mesh {text}: {error}") from None


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
        haystack=None if haystack is None else text_files(haystack),
        seed=seed,
    )


def with_options(
    model: Decoder, source: str | None, window: int | None, sink_tokens: int | None, full_decode: bool | None
) -> Decoder:
    """The model under another pattern, or under its own with the options that are given."""
    if source is not None:
        chosen = resolve_pattern(source, model.config, window, sink_tokens, full_decode)
        if SWITCH in chosen.layer_types and SWITCH not in model.pattern.layer_types:
            echo(
                f"the model has no routers for --pattern {source}: they are drawn at random, untrained",
                err=True,
            )
        return model.with_pattern(chosen)
    options = {
        "sliding_window": window,
        "num_sink_tokens": sink_tokens,
        "full_attention_decode": full_decode,
    }
    given = {name: value for name, value in options.items() if value is not None}
    words = {
        "sliding_window": "--window",
        "num_sink_tokens": "--sink-tokens",
        "full_attention_decode": "--fa-decode",
    }
    idle = [words[name] for name, value in given.items() if value]
    if idle and len(model.pattern.full_layers) == model.pattern.num_layers:
        raise ConfigError(
            f"{idle[0]} has no effect: the checkpoint's own pattern has full attention in every layer; name another, "
            "such as --pattern window"
        )
    return model.with_pattern(dataclasses.replace(model.pattern, **given)) if given else model  # type: ignore[arg-type]


def fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--depths must be fractions such as 0,0.5,1, got '{text}'") from None


def numbers(option: str, text: str, word: str | None = None) -> list[Any]:
    """Positive whole numbers between commas; `word`, if given, may stand among them and becomes None."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part == word or (part.isdecimal() and int(part) > 0) for part in parts):
        also = f" or '{word}'" if word else ""
        raise ConfigError(f"{option} must be positive whole numbers{also} such as 512,1024, got '{text}'")
    return [None if part == word else int(part) for part in parts]


def text_files(path: Path) -> list[Path]:
    """The file, or all files of the folder in the order of their names."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file())
    if not files:
        raise ConfigError(f"{path} is a folder without files; give a text file or a folder of them")
    return files
