"""Tables of the measurements, for the terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from swa_jax.bench.attention import Row
from swa_jax.bench.cycles import SIMULATED, Measurement, Op

HOW_TO_READ = """\
Compiled by libtpu, not run. simulated: by libtpu, transfers included. bundles x visits: instruction words of
the compiled code times how often they run, without waits. Memory traffic of XLA's own ops is in neither.
'>': a part has no figure. ms: at the chip's clock (v5p: two cores as one; v7x: one core).
"""


def cycles_table(m: Measurement, num_ops: int) -> Table:
    """The total, and below it the most expensive ops."""
    table = Table(box=box.SIMPLE)
    table.add_column("Function / op", min_width=28)
    table.add_column("Chip", no_wrap=True)
    for title in ("Cycles", "per 1024 rows\nand head", "ms", "Temporary\nbytes"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("How")
    options = " ".join(f"{name}={value}" for name, value in m.settings.items())
    table.add_row(
        f"[bold]{m.function}[/bold] {options}",
        m.chip,
        f"{'> ' if m.cycles is None else ''}{_sum(m.ops):,}",
        _number(m.cycles_per_1024, ",.0f"),
        _number(m.milliseconds, ".4f"),
        _number(m.temp_bytes, ","),
        "; ".join([*dict.fromkeys(op.source for op in m.ops if op.cycles is not None), *m.notes]),
    )
    for op in m.ops[:num_ops]:
        table.add_row(f"  {op.name}", "", _number(op.cycles, ","), "", "", "", op.source)
    if num_ops and (rest := m.ops[num_ops:]):
        how = SIMULATED if all(op.source == SIMULATED for op in rest) else ""
        table.add_row(f"  {len(rest)} more", "", f"{_sum(rest):,}", "", "", "", how)
    return table


def _sum(ops: Sequence[Op]) -> int:
    return sum(op.cycles or 0 for op in ops)


def attention_table(row: Row, device: str) -> Table:
    """The candidates of one case side by side."""
    case = row.case
    reference = next((result.name for result in row.results if result.ratio is not None), "nothing")
    table = Table(
        title=f"{case}\n{device}, {case.dtype}, {case.heads} heads, {case.kv_heads} KV heads, "
        f"head_dim {case.head_dim}, batch {case.batch}",
        box=box.SIMPLE,
        title_justify="left",
    )
    table.add_column("Candidate", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column(f"Time over\n{reference}'s", justify="right", no_wrap=True)
    table.add_column("Quartiles", justify="right", no_wrap=True)
    table.add_column("Not measured, because")
    for result in row.results:
        if result.ratio is None:
            table.add_row(result.name, "–", "–", "–", result.missing)
        else:
            milliseconds = f"{1e3 * (result.seconds or 0):.3f}"
            quartiles = f"{result.low:.2f} – {result.high:.2f}"
            table.add_row(result.name, milliseconds, f"{result.ratio:.2f}", quartiles, "")
    return table


def _number(value: float | None, form: str) -> str:
    return "no figure" if value is None else format(value, form)
