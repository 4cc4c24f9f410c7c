"""`swa-jax evaluate efficiency`: how fast the model answers under each pattern, on the device at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from rich.console import Group, RenderableType

from swa_jax.cli.evaluate.evaluation import Evaluation, Measurement, Rows, Run
from swa_jax.cli.options import in_prompts, in_running, numbers


def efficiency(
    evaluation: Evaluation,
    lengths: Annotated[str, in_prompts(metavar="N,N", help="Tokens of a prompt, such as 1024,4096.")] = "1024",
    new_tokens: Annotated[int, in_prompts(metavar="N", help="Tokens of an answer.", min=2)] = 32,
    requests: Annotated[int, in_running(metavar="N", help="Prompts at a time.", min=1)] = 1,
    repeats: Annotated[int, in_running(metavar="N", help="Rounds; figures are their medians.", min=1)] = 5,
    full_ratio: Annotated[
        float,
        in_running(
            help="Share of the tokens that routed layers send to full attention, for what is counted.", min=0, max=1
        ),
    ] = 1.0,
) -> Measurement:
    """Time to the first token and for each further one, throughput and memory, the patterns in turn in one run.

    What a prefill computes and what decoding reads are counted by position.
    """
    import numpy as np

    from swa_jax.evaluate.efficiency import measure_efficiency
    from swa_jax.model.flops import some_positions, work_by_position
    from swa_jax.report.evaluation_tables import efficiency_table, position_table

    sizes = numbers("--lengths", lengths)
    config, longest = evaluation.config, max(sizes) + new_tokens
    rng = np.random.default_rng(evaluation.seed)

    def measure(run: Run) -> Iterator[Rows]:
        for length in sizes:
            prompts = rng.integers(config.vocab_size, size=(requests, length)).tolist()
            figures = measure_efficiency(
                dict(run.models), prompts, new_tokens=new_tokens, repeats=repeats, advance=run.plain["advance"]
            )
            about = {"length": length, "new_tokens": new_tokens, "requests": requests}
            yield [{"name": name} | about | figures[name] for name, _ in run.models]

    by_position = [
        {"name": name} | at._asdict()
        for name, pattern in evaluation.patterns
        for at in work_by_position(config, pattern, some_positions(longest), full_ratio)
    ]
    evaluation.results["efficiency_by_position"] = by_position

    def table(rows: Rows) -> RenderableType:
        return Group(position_table(by_position), efficiency_table(rows))

    total = len(sizes) * (repeats + 1)
    return Measurement("efficiency", "requests", total, measure, table, longest=longest, by_model=False)
