"""The result of `swa_jax.plan.search` as text to read."""

from __future__ import annotations

from swa_jax.base.chips import GIB
from swa_jax.plan.search import Found, Tried, outcome
from swa_jax.train.config import TrainConfig

NEXT = 5  # lines of what was not compiled


def describe_search(found: Found, config: TrainConfig, stage: int, topology: str) -> str:
    """The table of what was tried, and the best settings as overrides."""
    allowed, fitting = found.counts["allowed"], found.counts["would_fit"]
    lines = [
        f"settings for {topology}: {allowed} that the run's sizes allow; {allowed - fitting} of them do not fit by "
        f"estimate; {len(found.tried)} compiled",
        "",
        f"{'':34}{'seconds a step':>20}{'GiB of a chip':>20}",
        f"{'':34}{'estimate':>10}{'compiled':>10}{'estimate':>10}{'compiled':>10}{'MFU':>6}",
    ]
    if found.refused is not None:
        lines.append(f"as it stands: cannot be had: {found.refused}")
    for tried in found.tried:
        lines += _lines(tried, own=tried.settings == found.own)
    if found.not_tried:
        lines += ["", "not compiled, the next by estimate (--tries compiles more):"]
        for tried in found.not_tried[:NEXT]:
            lines += _lines(tried)
    return "\n".join([*lines, "", *_best_lines(found, config, stage)])


def _lines(tried: Tried, own: bool = False) -> list[str]:
    line = f"  {tried.estimate.seconds:>42.3g}"
    line += f"{'–' if tried.seconds is None else format(tried.seconds, '.3g'):>10}"
    line += f"{tried.estimate.bytes / GIB:>10.2f}"
    line += f"{'–' if tried.bytes is None else format(tried.bytes / GIB, '.2f'):>10}"
    if tried.seconds is not None and tried.report is not None:
        line += f"{tried.report['time']['mfu_scheduled']:>6.0%}"
    elif tried.report is not None:
        line += "  does not fit"
    rest = [] if tried.why_not is None else [f"    {outcome(tried)}"]
    return [f"{tried.settings}{' (as it stands)' if own else ''}", line, *rest]


def _best_lines(found: Found, config: TrainConfig, stage: int) -> list[str]:
    best = found.best
    if best is None or best.seconds is None:
        return ["nothing that was compiled fits: take a larger slice, fewer tokens in a step, or more --tries"]
    overrides = " ".join(best.settings.overrides(config, stage))
    lines = [f"best: {outcome(best)}"]
    own = next((one.seconds for one in found.tried if one.settings == found.own), None)
    if own is not None and best.settings != found.own:
        lines[0] += f"; {own / best.seconds:.2f} times as fast as the configuration as it stands"
    lines.append(f"  {overrides or 'the configuration as it stands'}")
    return lines
