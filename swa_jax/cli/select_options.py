"""Options of the verbs `swa-jax select METHOD`, and what they write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from swa_jax.cli.groups import Options
from swa_jax.cli.options import (
    OUTPUT,
    PATTERN,
    PROMPTS,
    RUNNING,
    BatchedTokens,
    Chains,
    Chat,
    Haystack,
    Length,
    NumKeys,
    PromptKind,
    Seed,
    ServeLength,
    Server,
    check_output,
    note_context,
)
from swa_jax.errors import ConfigError
from swa_jax.select.method_table import By

if TYPE_CHECKING:
    import numpy as np

    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.estimates import Estimate
    from swa_jax.evaluate import Example
    from swa_jax.model.config import ModelConfig
    from swa_jax.model.decoder import Decoder
    from swa_jax.model.pattern import AttentionPattern
    from swa_jax.model.sharding import Partition

SEARCH = "Method"  # a panel: how a method chooses

Out = Annotated[Path, Option(help="The pattern's JSON file. The picture goes beside it.", rich_help_panel=OUTPUT)]
FaDecode = Annotated[
    bool, Option("--fa-decode", help="Set full-attention decode in the pattern.", rich_help_panel=PATTERN)
]
Force = Annotated[
    bool,
    Option(
        "--force",
        help="Write the pattern also where the prompts tell nothing about the choice.",
        rich_help_panel=OUTPUT,
    ),
]
Iterations = Annotated[
    int,
    Option(
        "--iterations",
        help="Masks tried for each layer of a subproblem, or fewer where there are fewer.",
        min=1,
        rich_help_panel=SEARCH,
    ),
]
Evaluations = Annotated[
    Path | None,
    Option(
        "--evaluations",
        help="JSON that keeps the scores, so that an interrupted search goes on. Default: beside --out.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
Greedy = Annotated[bool, Option("--greedy", help="Score again after each layer chosen.", rich_help_panel=SEARCH)]
Tried = Annotated[
    int | None,
    Option(
        metavar="N",
        help="Layers that a round of --greedy scores; 0: all. Default: 4, if there are 13 or more.",
        min=0,
        show_default=False,
        rich_help_panel=SEARCH,
    ),
]
ScoreFaDecode = Annotated[
    bool | None,
    Option(
        "--score-fa-decode/--no-score-fa-decode",
        help="Full-attention decode in scoring. Default: as --fa-decode.",
        show_default=False,
        rich_help_panel=SEARCH,
    ),
]
TogglesAtOnce = Annotated[
    int,
    Option(
        "--toggles-at-once",
        metavar="N",
        help="Layers made full side by side: more memory, fewer and larger steps.",
        min=1,
        rich_help_panel=RUNNING,
    ),
]
ResumeFile = Annotated[
    Path | None,
    Option(
        "--resume-file",
        help="JSON that keeps the scores, so that an interrupted selection goes on.",
        rich_help_panel=OUTPUT,
    ),
]
Mesh = Annotated[
    str | None,
    Option("--mesh", help="Spread weights and examples over the devices: data=2,fsdp=4.", rich_help_panel=RUNNING),
]
MinAnswer = Annotated[
    int,
    Option(
        "--min-answer", metavar="N", help="Fewest tokens of an answer of --prompts.", min=1, rich_help_panel=PROMPTS
    ),
]
LastQueries = Annotated[
    int,
    Option("--last", help="Last queries of a prompt that are looked at. SWAA takes 64.", min=1, rich_help_panel=SEARCH),
]
RecentKeys = Annotated[
    int | None,
    Option(
        "--recent",
        help="Keys that count as near, the query's own included. Default: 1020, fewer if --window is shorter.",
        min=1,
        show_default=False,
        rich_help_panel=SEARCH,
    ),
]
LazySinks = Annotated[int, Option("--lazy-sinks", help="First keys that count as near.", min=0, rich_help_panel=SEARCH)]


ScoreBy = Annotated[
    By, Option("--by", help="Score masks by right answers, or by the answers' loss.", rich_help_panel=SEARCH)
]


@dataclasses.dataclass
class Examples(Options):
    """What to choose by: needles, chains, or prompts of one's own."""

    examples: Annotated[int, Option(metavar="N", help="Examples to choose by.", min=1, rich_help_panel=PROMPTS)] = 64
    length: Length = 1024
    keys: NumKeys = 1
    haystack: Haystack = None
    chains: Chains = None
    chat: Chat = None
    prompts: Annotated[
        Path | None,
        Option(
            help="In place of needles: JSONL, Parquet or ArrayRecord with the fields prompt and answer.",
            rich_help_panel=PROMPTS,
        ),
    ] = None
    seed: Seed = 0

    def draw(
        self, model: Path, tokenizer: Tokenizer, config: ModelConfig, min_answer: int = 1
    ) -> tuple[list[Example], str]:
        """The examples, and what they are."""
        note_context(config, self.length)
        kind = PromptKind(self.length, self.keys, self.haystack, self.chains, self.chat)
        if self.prompts is not None and kind != PromptKind(self.length, chat=self.chat):
            raise ConfigError(
                "--keys, --haystack and --chains are of drawn prompts, which --prompts replaces: leave them out"
            )
        kind = kind.of(model)
        if self.prompts is None:
            return kind.draw(tokenizer, self.examples, self.seed), f"{self.examples} {kind}"
        from swa_jax.evaluate import prompt_examples

        drawn = prompt_examples(
            tokenizer,
            self.prompts,
            num_examples=self.examples,
            length=self.length,
            min_answer=min_answer,
            wrap=kind.wrap,
            seed=self.seed,
        )
        chat = ", in the model's chat template" if kind.chat else ""
        return drawn, f"{self.examples} prompts of {self.prompts} with at most {self.length} tokens{chat}"


@dataclasses.dataclass
class LongExamples(Examples):
    """For LightTransfer, which looks further than other methods."""

    length: Length = 2048


KvBudget = Annotated[
    float | None,
    Option(
        "--kv-budget",
        metavar="SHARE",
        help="As many as fit this share of the full cache.",
        show_default=False,
        rich_help_panel=PATTERN,
    ),
]


def _check_budget(kv_budget: float | None, needing: dict[str, Any]) -> None:
    """Raise `ConfigError` for a budget out of its range, or for what means something with a budget alone."""
    if kv_budget is not None and not 0 < kv_budget <= 1:
        raise ConfigError(f"--kv-budget is {kv_budget:g}: give a share above 0 and at most 1")
    idle = next((option for option, value in needing.items() if value is not None), None)
    if kv_budget is None and idle is not None:
        raise ConfigError(f"{idle} says where or how the cache of --kv-budget is counted: give that too")


@dataclasses.dataclass
class LayerBudget(Options):
    """How many layers stay full."""

    budget: Annotated[
        int | None, Option(metavar="N", help="Layers that stay full.", min=0, rich_help_panel=PATTERN)
    ] = None
    one_in: Annotated[
        int | None,
        Option(metavar="N", help="In place of --budget: one full layer in N.", min=1, rich_help_panel=PATTERN),
    ] = None
    kv_budget: KvBudget = None
    server: Server = None
    serve_length: ServeLength = None
    batched_tokens: BatchedTokens = None

    def check(self) -> None:
        if sum(one is not None for one in (self.budget, self.one_in, self.kv_budget)) != 1:
            raise ConfigError("give exactly one of --budget, --one-in and --kv-budget: how many layers stay full")
        counted = {"--for": self.server, "--serve-length": self.serve_length, "--batched-tokens": self.batched_tokens}
        _check_budget(self.kv_budget, counted)

    def layers(
        self,
        model: Path,
        config: ModelConfig,
        length: int,
        window: int | None,
        num_sink_tokens: int,
        full_attention_decode: bool,
    ) -> int:
        """How many layers stay full in a pattern with these windows; `length` is that of the prompts."""
        from swa_jax.checkpoint.folder import open_checkpoint
        from swa_jax.checkpoint.served_cache import Memory, most_within
        from swa_jax.model.pattern import AttentionPattern
        from swa_jax.select.layer_patterns import full_layer_budget

        if self.kv_budget is None:
            return full_layer_budget(config.num_hidden_layers, self.budget, self.one_in)
        if window is None:
            raise ConfigError("--window is missing: --kv-budget needs to know what a windowed layer keeps")
        hf_config = open_checkpoint(model).hf_config
        memory = Memory(config, hf_config, self.serve_length or length, self.server, self.batched_tokens)

        def make(full: int) -> AttentionPattern:
            return AttentionPattern.from_full_layers(
                range(full),
                config.num_hidden_layers,
                window,
                num_sink_tokens=num_sink_tokens,
                full_attention_decode=full_attention_decode,
            )

        pattern = most_within(memory, self.kv_budget, config.num_hidden_layers, make)
        typer.echo(
            f"{len(pattern.full_layers)} full layers fit: with them the cache of {memory.length} tokens takes "
            f"{memory.share(pattern):.1%} of full attention's, counted {memory.place}. {memory.steps}".rstrip(". ")
        )
        return len(pattern.full_layers)


@dataclasses.dataclass
class HeadBudget(Options):
    """How many KV heads are windowed."""

    ratio: Annotated[
        float | None,
        Option(
            help="Share of the KV heads that are windowed.", min=0, max=1, show_default=False, rich_help_panel=PATTERN
        ),
    ] = None
    kv_budget: KvBudget = None
    serve_length: ServeLength = None

    def check(self) -> None:
        if (self.ratio is None) == (self.kv_budget is None):
            raise ConfigError("give exactly one of --ratio and --kv-budget: how many KV heads are windowed")
        _check_budget(self.kv_budget, {"--serve-length": self.serve_length})

    def share(self, config: ModelConfig, length: int, window: int | None, num_sink_tokens: int) -> float:
        """The share that is windowed, counted in this library: no server runs single full heads."""
        from swa_jax.checkpoint.served_cache import Memory, most_within
        from swa_jax.select.heads import head_mask, head_pattern, heuristic_mask

        if self.ratio is not None:
            return self.ratio
        assert self.kv_budget is not None
        if window is None:
            raise ConfigError("--window is missing: --kv-budget needs to know what a windowed head keeps")
        layers, heads = config.num_hidden_layers, config.common_kv_heads
        memory = Memory(config, {}, self.serve_length or length)

        def make(full: int) -> AttentionPattern:
            mask = heuristic_mask("interleave", layers, heads, 1 - full / (layers * heads))
            return head_pattern(mask, window, num_sink_tokens, {})

        pattern = most_within(memory, self.kv_budget, layers * heads, make)
        full = int(head_mask(pattern, heads).sum())
        typer.echo(
            f"{full} of {layers * heads} KV heads stay full: with them the cache of {memory.length} tokens takes "
            f"{memory.share(pattern):.1%} of full attention's"
        )
        return 1 - full / (layers * heads)


def means_nothing(reason: str, force: bool, advice: str = "take longer prompts or a smaller window") -> None:
    """Stop before a pattern is written that was chosen by nothing; with `force` say so and go on."""
    if not force:
        raise ConfigError(
            f"{reason}: the choice would mean nothing, and no pattern is written. {advice[0].upper()}{advice[1:]}, or "
            "write it all the same with --force"
        )
    typer.echo(f"{reason}: the choice means nothing")


def check_separation(
    decoder: Decoder,
    examples: Sequence[Example],
    window: int,
    num_sink_tokens: int,
    by: By,
    force: bool,
    *,
    full_attention_decode: bool = False,
    batch_size: int = 8,
    partition: Partition | None = None,
) -> None:
    """Score full attention and windows in every layer, and stop where the examples do not tell them apart: two passes
    before a search of hundreds."""
    from swa_jax.evaluate.nll import score_answers
    from swa_jax.model.pattern import AttentionPattern
    from swa_jax.select.separation import doubt, weakness

    queries = (len(e.prompt) + (0 if full_attention_decode else len(e.answer) - 1) for e in examples)
    if max(queries) <= window + num_sink_tokens:
        means_nothing(f"the window of {window} keys holds whole prompts", force)
        return
    layers = decoder.config.num_hidden_layers
    full, windowed = (
        score_answers(
            decoder,
            examples,
            batch_size=batch_size,
            full_attention_decode=full_attention_decode,
            pattern=AttentionPattern.from_full_layers(kept, layers, window, num_sink_tokens=num_sink_tokens),
            partition=partition,
        )
        for kept in (range(layers), ())
    )
    all_full, none_full = (one.right if by == "answers" else one.nll for one in (full, windowed))
    if (found := doubt(all_full, none_full, by)) is not None:
        means_nothing(found.reason, force, found.advice)
    elif any(e.value is not None for e in examples) and (found := weakness(full.right)) is not None:
        typer.echo(f"{found.reason}: {found.advice}", err=True)


def check_out(out: Path) -> None:
    if out.suffix != ".json":
        raise ConfigError(f"--out is {out}: a pattern file must end in .json")
    check_output("--out", out)


def write_heads(pattern: AttentionPattern, full: np.ndarray, out: Path, scores: np.ndarray | None = None) -> None:
    from swa_jax.report import head_map

    title = f"{pattern.provenance['method']}: {int((~full).sum())} of {full.size} KV heads windowed"
    larger = pattern.provenance.get("larger_is_local")
    _write(pattern, out, lambda picture: head_map(full, picture, title=title, scores=scores, larger_is_local=larger))


def write_layers(pattern: AttentionPattern, scores: Sequence[Estimate], out: Path, **labels: str) -> None:
    from swa_jax.report import layer_scores_chart

    _write(pattern, out, lambda picture: layer_scores_chart(scores, pattern.full_layers, picture, **labels))


def _write(pattern: AttentionPattern, out: Path, draw: Callable[[Path], None]) -> None:
    pattern.to_json(out)
    picture = out.with_suffix(".png")
    draw(picture)
    typer.echo(f"{pattern}\nwritten to {out} and {picture}")


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    from swa_jax.report.progress import Progress

    with Progress(label) as progress:
        yield progress.update
