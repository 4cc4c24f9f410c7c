"""`swa-jax evaluate efficiency`: how fast the model answers under each pattern, on the device at hand."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from swa_jax.cli.evaluate.evaluation import Evaluation
from swa_jax.cli.options import PROMPTS, RUNNING, note_context, numbers


def efficiency(
    evaluation: Evaluation,
    lengths: Annotated[
        str, Option(metavar="N,N", help="Tokens of a prompt, such as 1024,4096.", rich_help_panel=PROMPTS)
    ] = "1024",
    new_tokens: Annotated[int, Option(metavar="N", help="Tokens of an answer.", min=2, rich_help_panel=PROMPTS)] = 32,
    requests: Annotated[int, Option(metavar="N", help="Prompts at a time.", min=1, rich_help_panel=RUNNING)] = 1,
    repeats: Annotated[
        int, Option(metavar="N", help="Rounds; figures are their medians.", min=1, rich_help_panel=RUNNING)
    ] = 5,
    full_ratio: Annotated[
        float,
        Option(
            help="Share of the tokens that routed layers send to full attention, for what is counted.",
            min=0,
            max=1,
            rich_help_panel=RUNNING,
        ),
    ] = 1.0,
) -> None:
    """Time to the first token and for each further one, throughput and memory, the patterns in turn in one run.

    What a prefill computes and what decoding reads are counted by position.
    """
    import numpy as np

    from swa_jax.evaluate.efficiency import measure_efficiency
    from swa_jax.model.flops import some_positions, work_by_position
    from swa_jax.report import table_console
    from swa_jax.report.evaluation_tables import efficiency_table, position_table
    from swa_jax.report.progress import counted

    sizes = numbers("--lengths", lengths)
    models = evaluation.models
    config = models[0][1].config
    note_context(config, max(sizes) + new_tokens)
    rng = np.random.default_rng(evaluation.seed)
    rows: list[dict[str, Any]] = []
    with counted("requests", len(sizes) * len(models) * (repeats + 1)) as advance:
        for length in sizes:
            prompts = rng.integers(config.vocab_size, size=(requests, length)).tolist()
            figures = measure_efficiency(dict(models), prompts, new_tokens=new_tokens, repeats=repeats, advance=advance)
            about = {"length": length, "new_tokens": new_tokens, "requests": requests}
            rows += [{"name": name} | about | figures[name] for name, _ in models]
            evaluation.save("efficiency", rows)
    positions = some_positions(max(sizes) + new_tokens)
    counted_rows = [
        {"name": name} | at._asdict()
        for name, model in models
        for at in work_by_position(config, model.pattern, positions, full_ratio)
    ]
    evaluation.save("efficiency_by_position", counted_rows)
    table_console().print(position_table(counted_rows))
    evaluation.finish("efficiency", rows, efficiency_table)
