"""Options of the verbs `swa-jax select METHOD`, and what they write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swa_jax.base.errors import ConfigError
from swa_jax.cli.groups import Options
from swa_jax.cli.options import (
    BatchedTokens,
    BatchSize,
    ComputeDtype,
    Device,
    PromptKind,
    Seed,
    ServeLength,
    Server,
    check_output,
    few_prompts,
    in_output,
    in_pattern,
    in_prompts,
    note_context,
)

if TYPE_CHECKING:
    from swa_jax.checkpoint.served_cache import Memory
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.evaluate import Example
    from swa_jax.model.config import ModelConfig
    from swa_jax.model.pattern import AttentionPattern
    from swa_jax.model.window import Window

Force = Annotated[bool, in_output("--force", help="Choose even by prompts that tell nothing.")]


@dataclasses.dataclass
class Running(Options):
    """How the model computes."""

    batch_size: BatchSize = 8
    dtype: ComputeDtype = None


@dataclasses.dataclass
class Counted(Options):
    """Where the key/value cache is counted."""

    server: Server = None
    serve_length: ServeLength = None
    batched_tokens: BatchedTokens = None
    device: Device = None

    def memory(self, config: ModelConfig, hf_config: Mapping[str, Any], length: int) -> Memory:
        """Where the cache is counted; `length` is that of the prompts."""
        from swa_jax.checkpoint.served_cache import Memory

        return Memory(config, hf_config, self.serve_length or length, self.server, self.batched_tokens, self.device)


@dataclasses.dataclass
class Written(Options):
    """What is written, and where."""

    out: Annotated[Path, in_output(help="The pattern's JSON file. The picture goes beside it.")]
    resume_file: Annotated[
        Path | None, in_output(help="A file that keeps the scores of a search, to go on from. Default: beside --out.")
    ] = None
    force: Force = False

    def check(self, method: str) -> None:
        """Raise `ConfigError` for a file that no pattern can be written to, or that holds something else than one which
        this method chose."""
        if self.out.suffix != ".json":
            raise ConfigError(f"--out is {self.out}: a pattern file must end in .json")
        check_output("--out", self.out)
        taken = next((file for file in (self.out, self.picture) if file.exists()), None)
        if taken is not None and (taken == self.picture or _method_of(taken) != method):
            raise ConfigError(
                f"{taken} is there already, and is not from `select {method}`: name another --out, or remove it"
            )

    @property
    def picture(self) -> Path:
        return self.out.with_suffix(".png")

    @property
    def scores(self) -> Path:
        """The file of the searches' scores."""
        return self.resume_file or self.out.with_suffix(".scores.jsonl")


@dataclasses.dataclass
class Examples(Options):
    """How many prompts to choose by, and prompts of one's own."""

    examples: Annotated[int, in_prompts(metavar="N", help="Prompts to choose by.", min=1, callback=few_prompts)] = 64
    prompts: Annotated[
        Path | None,
        in_prompts(help="In place of needles: JSONL, Parquet or ArrayRecord with the fields prompt and answer."),
    ] = None
    min_answer: Annotated[int, in_prompts(metavar="N", help="Fewest tokens of an answer.", min=1)] = 1
    seed: Seed = 0

    def draw(
        self, kind: PromptKind, model: Path, tokenizer: Tokenizer, config: ModelConfig
    ) -> tuple[list[Example], str]:
        """The examples, and what they are."""
        note_context(config, kind.length)
        if self.prompts is not None and kind != PromptKind(kind.length, chat=kind.chat):
            raise ConfigError(
                "--keys, --haystack and --chains are for drawn prompts, which --prompts replaces: leave them out"
            )
        kind = kind.of(model)
        if self.prompts is None:
            return kind.draw(tokenizer, self.examples, self.seed), f"{self.examples} {kind}"
        from swa_jax.evaluate import prompt_examples

        drawn = prompt_examples(
            tokenizer,
            self.prompts,
            num_examples=self.examples,
            length=kind.length,
            min_answer=self.min_answer,
            wrap=kind.wrap,
            seed=self.seed,
        )
        chat = ", in the model's chat template" if kind.chat else ""
        return drawn, f"{self.examples} prompts of {self.prompts} with at most {kind.length} tokens{chat}"


@dataclasses.dataclass
class Budget(Counted):
    """How many layers or KV heads stay full."""

    ratio: Annotated[float | None, in_pattern(metavar="SHARE", help="Share that is windowed.")] = None
    budget: Annotated[int | None, in_pattern(metavar="N", help="Or: how many stay full.", min=0)] = None
    one_in: Annotated[int | None, in_pattern(metavar="N", help="Or: one in N stays full.", min=1)] = None
    kv_budget: Annotated[float | None, in_pattern(metavar="SHARE", help="Or: share of the full cache.")] = None

    def check(self, unit: str) -> None:
        """Raise `ConfigError` for what can be seen to be wrong without the model."""
        if sum(one is not None for one in (self.ratio, self.budget, self.one_in, self.kv_budget)) != 1:
            raise ConfigError(
                f"give exactly one of --ratio, --budget, --one-in and --kv-budget: how many {unit} stay full"
            )
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise ConfigError(f"--ratio is {self.ratio:g}: the share of windowed {unit} must lie between 0 and 1")
        from swa_jax.checkpoint.servers import runs_single_heads

        if self.kv_budget is None:
            given = {"--for": self.server, "--serve-length": self.serve_length, "--batched-tokens": self.batched_tokens}
            given["--device"] = self.device
            if idle := next((option for option, value in given.items() if value is not None), None):
                raise ConfigError(f"{idle} says where or how the cache of --kv-budget is counted: give that too")
        elif unit == "KV heads" and not runs_single_heads(self.server):
            raise ConfigError(
                f"--for {self.server} runs no single full heads: take --for vllm-plugin, leave it out, or choose layers"
            )
        elif not 0 < self.kv_budget <= 1:
            raise ConfigError(f"--kv-budget is {self.kv_budget:g}: give a share above 0 and at most 1")

    def ratio_of(
        self,
        unit: str,
        config: ModelConfig,
        hf_config: Mapping[str, Any],
        length: int,
        window: Window,
        heads_in: int = 1,
    ) -> float:
        """The share that is windowed, in a pattern with this window; `length` is that of the prompts.

        `heads_in`: KV heads that stay together.
        """
        if self.ratio is not None:
            return self.ratio
        from swa_jax.checkpoint.served_cache import most_within
        from swa_jax.select.heads import head_mask, head_pattern, heuristic_mask, of_all_layers, single_heads

        heads, layers = config.common_kv_heads if unit == "KV heads" else 1, len(config.attention_layers)
        total = layers * heads
        if self.kv_budget is not None:
            memory = self.memory(config, hf_config, length)

            def make(full: int) -> AttentionPattern:
                share = 1 - full * heads_in / total
                mask = of_all_layers(heuristic_mask("interleave", layers, heads // heads_in, share), config)
                return head_pattern(single_heads(mask, heads_in), window, linear=config.linear_layers)

            pattern = most_within(memory, self.kv_budget, total // heads_in, make)
            full = int(head_mask(pattern, heads).sum())
            typer.echo(
                f"{full} of {total} {unit} stay full: with them the cache of {memory.length} tokens takes "
                f"{memory.share(pattern):.1%} of full attention's, counted {memory.place}. {memory.steps}".rstrip(". ")
            )
        else:
            full = max(1, total // self.one_in) if self.one_in is not None else self.budget or 0
        if full > total:
            raise ConfigError(f"--budget is {full} full {unit}, the model has {total}")
        return 1 - full / total


def _method_of(file: Path) -> str | None:
    """The method that chose the pattern in a file; None for other files."""
    from swa_jax.model.pattern import AttentionPattern

    try:
        return AttentionPattern.from_json(file).provenance.get("method")
    except ValueError:
        return None


def write_choice(pattern: AttentionPattern, config: ModelConfig, written: Written) -> None:
    """The pattern's file, and beside it a picture: of the layers' scores, or of the heads that stay full."""
    from swa_jax.base.estimates import Estimate
    from swa_jax.report.heat_maps import head_map
    from swa_jax.report.layer_charts import layer_scores_chart
    from swa_jax.select.heads import head_mask

    pattern.to_json(written.out)
    picture, said = written.picture, pattern.provenance
    if "intervals" in said:
        means = [math.nan if mean is None else mean for mean in said["scores"]]
        scores = [Estimate(mean, *(ends or (None, None))) for mean, ends in zip(means, said["intervals"], strict=True)]
        axis = {"axis": "Attention on sink tokens\nand recent keys"} if "recent_keys" in said else {}
        layer_scores_chart(scores, pattern.full_layers, picture, title=f"{said['method']}: each layer's score", **axis)
    else:
        full = head_mask(pattern, config.most_kv_heads)[list(pattern.attention_layers)]
        title = f"{said['method']}: {int((~full).sum())} of {full.size} KV heads windowed"
        larger = said.get("larger_is_local")
        head_map(full, picture, title=title, scores=None if larger is None else said["scores"], larger_is_local=larger)
    typer.echo(f"{pattern}\nwritten to {written.out} and {picture}")
