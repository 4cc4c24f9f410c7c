"""Options that several verbs share, and what they resolve to."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, CallbackParam, Exit, Option, echo

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import write_json
from swa_jax.checkpoint.families.pattern_files import choose_pattern, is_pattern_file, no_window, read_pattern
from swa_jax.cli.groups import Options
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import SWITCH
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.recipes import DEFAULT_WINDOW
from swa_jax.model.window import Window

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swa_jax.checkpoint.folder import Checkpoint
    from swa_jax.data.chat import Wrap
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.evaluate import Example
    from swa_jax.model.sharding import Partition


# More is a slip of the hand, and would take days.
MOST_CONTEXTS = 128  # of sequences, times the model's context
MOST_PROMPTS = 100_000  # of one kind
MOST_LAYERS = 10_000


def panel(title: str) -> functools.partial[Any]:
    """What declares the options that stand together in `--help`, under this title."""
    return functools.partial(Option, rich_help_panel=title)


def at_most(most: int) -> Any:
    """What refuses greater values of an option; `max` would do so, too, and take room in `--help`."""

    def check(option: CallbackParam, value: Any) -> Any:
        if value is not None and value > most:
            raise ConfigError(f"{option.opts[0]} must be at most {most}, got {value}")
        return value

    return check


few_prompts = at_most(MOST_PROMPTS)
in_pattern, in_prompts, in_running, in_output, in_serving, in_chat = map(
    panel, ("Pattern", "Prompts", "Running", "Output", "Serving", "Chat")
)


def _list_servers(server: str | None) -> str | None:
    if server == "help":
        from swa_jax.checkpoint.servers import list_targets

        echo(list_targets())
        raise Exit
    return server


Model = Annotated[
    Path,
    Argument(help="A checkpoint, Hugging Face or PEFT folder, a GGUF file, a cached Hub model's id, chains or recall."),
]
WindowSize = Annotated[
    int | None, in_pattern(metavar="N", help="Keys that a windowed query sees, its own included.", min=1)
]
SinkTokens = Annotated[
    int | None, in_pattern(metavar="N", help="First tokens that stay visible beside the window.", min=0)
]
FullDecode = Annotated[bool | None, in_pattern(help="Answers see everything.")]
LastTokens = Annotated[int | None, in_pattern(metavar="N", help="A prompt's last N tokens, too.", min=0)]
Yarn = Annotated[
    float | None, in_pattern(help="Stretch the model's context by this factor with YaRN, for longer prompts.")
]
NumKeys = Annotated[int, in_prompts(metavar="N", help="Needles in a prompt.", min=1)]
Chains = Annotated[str | None, in_prompts(metavar="CHAINS", help="Chains, not needles: hops=1-3,rivals=3,gap=32.")]
Length = Annotated[int, in_prompts(metavar="N", help="Tokens, the answer included.", min=1)]
Chat = Annotated[bool | None, in_chat(help="Use the chat template. Default: if there is one.")]
Haystack = Annotated[
    Path | None, in_prompts(help="A text, or a folder of texts, to hide needles in. Default: Python library sources.")
]
Json = Annotated[bool, in_output("--json", help="Print JSON, not tables; all else goes to standard error.")]
BatchSize = Annotated[int, in_running(metavar="N", help="Sequences computed at once.", min=1)]
Server = Annotated[
    str | None,
    in_serving(
        "--for",
        metavar="SERVER",
        help="The server that is meant, such as vllm; help lists all, with versions.",
        callback=_list_servers,
        is_eager=True,
    ),
]
ServeLength = Annotated[
    int | None, in_serving(metavar="N", help="Tokens of the sequence that is counted. Default: --length.", min=1)
]
BatchedTokens = Annotated[int | None, in_serving(metavar="N", help="Prompt tokens computed at once.", min=1)]
Device = Annotated[str | None, in_serving(metavar="NAME", help="What it runs on, such as l4.")]
Mesh = Annotated[
    str | None, in_running(help="Spread weights and sequences over the devices, such as data=2,fsdp=4 or tensor=8.")
]
Seed = Annotated[int, in_running(metavar="N", help="Seed of random draws.", min=0)]
Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Annotated[
    Dtype | None,
    in_running(metavar="DTYPE", help="float32 or bfloat16. Default: as stored. CPUs are faster in float32."),
]


@dataclasses.dataclass
class WindowGiven(Options):
    """What the user says of windows, in place of what a pattern has; all are None where nothing is said."""

    window: WindowSize = None
    sink_tokens: SinkTokens = None
    fa_decode: FullDecode = None
    last_tokens: LastTokens = None

    @property
    def as_window(self) -> Window:
        return Window(self.window, self.sink_tokens, self.fa_decode, self.last_tokens)


def resolve_patterns(
    sources: Sequence[str], layers: int | ModelConfig, window: Window, own_window: int | None
) -> list[AttentionPattern]:
    """Recipes or pattern files; options that the user gave win over both.

    A recipe names no window: it takes `--window`, or else the model's own window, or else 2048. A note says which,
    where `--window` was not given.
    """
    patterns = [read_pattern(source, layers, window, default_window=own_window) for source in sources]
    for source, pattern in zip(sources, patterns, strict=True):
        if isinstance(layers, ModelConfig):
            try:
                pattern.validate(layers)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
        elif pattern.num_layers != layers:
            raise ConfigError(f"{source} has {pattern.num_layers} layers, not {layers}: they must agree")
    taken = [
        source
        for source, pattern in zip(sources, patterns, strict=True)
        if not is_pattern_file(source) and not pattern.is_full
    ]
    if isinstance(layers, ModelConfig) and (note := next(filter(None, (no_window(p, layers) for p in patterns)), None)):
        echo(f"{note}: take a smaller --window", err=True)
    elif taken and window.size is None:
        whose = "the model's own" if own_window is not None else "the default of recipes"
        echo(
            f"{', '.join(taken)}: the window is {own_window or DEFAULT_WINDOW}, {whose}; --window sets another",
            err=True,
        )
    return patterns


def show(shown: RenderableType) -> None:
    """Print a text, or a table as wide as the terminal."""
    if isinstance(shown, str):
        echo(shown)
        return
    from swa_jax.report.tables import table_console

    table_console().print(shown)


def print_report(report: Any, shown: RenderableType | None, as_json: bool) -> None:
    """Print a report as JSON, or else what is shown of it, if not all was."""
    if as_json:
        echo(json.dumps(report, indent=2))
    elif shown is not None:
        show(shown)


def write_report(report: Any, out: Path | None, as_json: bool) -> None:
    """Write a report to a file, where one is named, and say so, beside JSON on standard error."""
    if out is not None:
        write_json(out, report)
        echo(f"written to {out}", err=as_json)


def check_output(option: str, file: Path | None) -> None:
    """Raise `ConfigError` before the work if the file, where one is named, could not be written after it."""
    if file is None:
        return
    if file.is_dir():
        raise ConfigError(f"{option} is {file}, a folder: name a file in it")
    if file.parent.is_file():
        raise ConfigError(f"{option} {file} cannot be written: {file.parent} is a file, name a folder")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be written: {error.strerror}") from None


def find_model(name: Path) -> Path:
    """The checkpoint folder of the model that a user named; what has to be imported for it is imported."""
    from swa_jax.checkpoint.named import model_folder

    return model_folder(name)


def open_model(folder: Path, yarn: float | None = None) -> tuple[Checkpoint, Tokenizer]:
    """All of a model but its weights, with its context stretched by `yarn`."""
    from swa_jax.checkpoint.folder import open_checkpoint

    opened = open_checkpoint(folder)
    if yarn is not None:
        try:
            opened = dataclasses.replace(opened, config=opened.config.with_yarn(yarn))
        except ConfigError as error:
            raise ConfigError(f"--yarn {yarn:g}: {error}") from None
    return opened, find_tokenizer(opened)


def find_tokenizer(opened: Checkpoint) -> Tokenizer:
    from swa_jax.data.tokenizer import load_tokenizer

    if not (opened.folder / "tokenizer.json").is_file():
        raise ConfigError("the model has no tokenizer.json, without which it takes no text: put it into its folder")
    return load_tokenizer(opened.folder).within(opened.config.vocab_size)


def parse_mesh(text: str | None) -> Partition | None:
    """`data=2,fsdp=4` over all devices of this machine; axes that are not named count 1. None: no mesh."""
    import jax

    from swa_jax.model.sharding import AXES, MeshConfig, Partition, make_mesh

    if text is None:
        return None
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in AXES or not size.removeprefix("-").isdecimal():
            raise ConfigError(f"--mesh must be sizes of the axes {', '.join(AXES)} such as data=2,fsdp=4, got '{part}'")
        sizes[name] = int(size)
    try:
        return Partition(make_mesh(MeshConfig(**sizes), jax.devices()))
    except ConfigError as error:
        raise ConfigError(f"--mesh {text}: {error}") from None


def draw_needles(
    tokenizer: Tokenizer,
    count: int,
    length: int,
    keys: int,
    haystack: Path | None,
    depths: Any,
    seed: int,
    wrap: str | Wrap,
) -> list[Example]:
    from swa_jax.evaluate import needle_examples

    return needle_examples(
        tokenizer,
        length=length,
        num_examples=count,
        num_keys=keys,
        depths=depths,
        haystack=None if haystack is None else text_files(haystack),
        wrap=wrap,
        seed=seed,
    )


HELD_OUT_SEED = 10**6  # to measure by: far from any seed that prompts to choose by are drawn with
CHAINS = re.compile(r"hops=([1-9])(?:-([1-9]))?(?:,rivals=(\d+))?(?:,gap=(\d+))?")


@dataclasses.dataclass
class PromptKind(Options):
    """Which prompts are drawn: needles, or the chains of `--chains`."""

    length: Length = 1024
    keys: NumKeys = 1
    haystack: Haystack = None
    chains: Chains = None
    chat: Chat = None  # None: as the model has it, which `of` finds out

    def __post_init__(self) -> None:
        self.wrap: Wrap | None = None  # what stands around a question, which `of` finds out, too
        if self.chains is None:
            return
        for option, given in (("--chat", self.chat), ("--keys", self.keys != 1)):
            if given:
                raise ConfigError(f"{option} is for needles, which --chains replaces: leave one of them out")
        found = CHAINS.fullmatch(self.chains)
        if found is None or int(found[2] or 9) < int(found[1]):
            raise ConfigError(
                f"--chains is '{self.chains}': write it like hops=1-3,rivals=3,gap=32; rivals and gap may be left out "
                "and are then 3 and 0"
            )

    @property
    def _chains(self) -> tuple[range, int, int]:
        """Hops, rivals and gap."""
        found = CHAINS.fullmatch(self.chains or "")
        assert found is not None
        first, last, rivals, gap = found.groups()
        return range(int(first), int(last or first) + 1), int(rivals or 3), int(gap or 0)

    def of(self, model: Path) -> PromptKind:
        """The same for the model of a folder, whose chat template there may be. Errors are those of `find_wrap`."""
        from swa_jax.data.chat import find_wrap

        wrap = None if self.chains else find_wrap(model, self.chat)
        kind = dataclasses.replace(self, chat=wrap is not None)
        kind.wrap = wrap
        return kind

    def draw(self, tokenizer: Tokenizer, count: int, seed: int) -> list[Example]:
        """`count` prompts; of several numbers of hops, each in turn."""
        if self.chains is None:
            wrap = "{prompt}" if self.wrap is None else self.wrap
            return draw_needles(tokenizer, count, self.length, self.keys, self.haystack, None, seed, wrap)
        from swa_jax.data.haystack import Haystack as Texts
        from swa_jax.evaluate.chains import ChainCell, chains_in_turn

        hops, rivals, gap = self._chains
        hay = None if self.haystack is None else Texts(tokenizer, text_files(self.haystack))
        cells = [ChainCell(n, rivals, self.length) for n in hops]
        return chains_in_turn(tokenizer, cells, count, gap=gap, haystack=hay, seed=seed)

    def settings(self) -> dict[str, Any]:
        """What results say of their prompts: plain JSON values."""
        if self.chains is None:
            haystack = str(self.haystack or "python library")
            return {"keys": self.keys, "haystack": haystack, "chat": bool(self.chat)}
        return {"chains": self.chains, "haystack": str(self.haystack or "filler words")}

    def __str__(self) -> str:
        between = self.settings()["haystack"]
        if self.chains is None:
            chat = ", in the model's chat template" if self.chat else ""
            return f"needle prompts of {self.length} tokens, {self.keys} key(s), haystack {between}{chat}"
        return f"prompts of {self.length} tokens with chains, {self.chains}, {between} between"


def choose_patterns(model: Checkpoint, sources: Sequence[str], window: Window) -> list[tuple[str, AttentionPattern]]:
    """These patterns for a model, by name; where none is named its own, which is then called "own"."""
    if not sources:
        return [("own", choose_pattern(model.pattern, None, model.config, window))]
    patterns = resolve_patterns(sources, model.config, window, model.pattern.sliding_window)
    for source, pattern in zip(sources, patterns, strict=True):
        if SWITCH in pattern.layer_types and SWITCH not in model.pattern.layer_types:
            echo(f"the model has no routers for --pattern {source}: they are drawn at random, untrained", err=True)
    return list(zip(sources, patterns, strict=True))


def note_whole_prompts(patterns: Iterable[tuple[str, AttentionPattern]], longest: int) -> None:
    """Say which windows reach over whole prompts, the longest of which has `longest` tokens."""
    for name, pattern in patterns:
        if not pattern.is_full and pattern.window.holds(longest):
            echo(
                f"{name}: the window of {pattern.sliding_window} tokens holds whole prompts ({longest}), which is full "
                "attention: take longer prompts (--length) or a shorter --window",
                err=True,
            )


def check_window(window: int | None, length: int) -> None:
    """Raise `ConfigError` for a `--window` that holds whole prompts of `length` tokens: nothing would be windowed."""
    if window is not None and window >= length:
        raise ConfigError(
            f"--window {window} holds whole prompts of {length} tokens, which is full attention: take a smaller "
            "--window, or a greater --length"
        )


def check_length(config: ModelConfig, length: int) -> None:
    """Raise `ConfigError` for sequences that are out of all proportion to the model's context, before any is drawn."""
    context = config.max_position_embeddings
    if length > MOST_CONTEXTS * context:
        raise ConfigError(
            f"sequences of {length} tokens are {length // context} times as long as the model's context of {context}: "
            f"at most {MOST_CONTEXTS * context} are run"
        )


def note_context(config: ModelConfig, length: int) -> None:
    """Say that sequences of `length` tokens go beyond the model's context, where they do; errors as `check_length`."""
    check_length(config, length)
    context = config.max_position_embeddings
    if length <= context:
        return
    factor = -(-length // context)
    stretches = config.rope_scaling is None and config.uses_rope
    advice = f"; --yarn {factor} stretches the context" if stretches else ""
    echo(
        f"sequences of {length} tokens are longer than the model's context of {context}: they are run all the same, at "
        f"positions that the model was not trained for{advice}",
        err=True,
    )


def fractions(text: str) -> list[float]:
    """The depths that --depths names."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= depth <= 1 for depth in found):
        raise ConfigError(f"--depths is '{text}': give fractions from 0 to 1 with commas between, such as 0,0.5,1")
    return found


def numbers(option: str, text: str, such_as: str = "512,1024", *, least: int = 1, word: str | None = None) -> list[Any]:
    """Whole numbers between commas; `word`, if given, may stand among them and becomes None."""
    items = [item.strip() for item in text.split(",")]
    if not all(item == word or (item.isdecimal() and int(item) >= least) for item in items):
        also = f" or '{word}'" if word else ""
        raise ConfigError(
            f"{option} is '{text}': give whole numbers from {least} on{also} with commas between, such as {such_as}"
        )
    return [None if item == word else int(item) for item in items]


def text_files(path: Path) -> list[Path]:
    """The file, or all files of the folder in the order of their names."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file())
    if not files:
        raise ConfigError(f"{path} is a folder without files; give a text file or a folder of them")
    return files
