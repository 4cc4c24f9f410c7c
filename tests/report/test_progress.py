"""Progress: a bar on a terminal, plain lines elsewhere; when lines come, and what they say."""

import io

import pytest
from rich.console import Console

from swa_jax.report.progress import Progress, counted, duration, rate


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def shown(terminal, **options):
    """(progress, its clock, what it has written)"""
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200)
    return Progress("step", console=console, clock=clock, **options), clock, file


def test_without_a_terminal_a_line_at_the_first_step_then_every_30_seconds_and_at_the_end():
    progress, clock, file = shown(False)
    with progress:
        for step in range(1001, 1096):  # a run that was resumed; a step a second
            progress.update(step, 1095, f"loss {step / 1000:.3f}", "last checkpoint 1000" if step > 1040 else "")
            clock.now += 1
    assert file.getvalue().splitlines() == [
        "step 1001/1095  loss 1.001",
        "step 1031/1095  loss 1.031  ETA 1 min",
        "step 1061/1095  loss 1.061  ETA 34 s  last checkpoint 1000",
        "step 1091/1095  loss 1.091  ETA 4 s  last checkpoint 1000",
        "step 1095/1095  loss 1.095  last checkpoint 1000",
    ]


def test_what_is_found_says_nothing_of_the_time_that_is_left():
    progress, clock, file = shown(False)
    with progress:
        progress.update(1, 1000)
        for done in range(900, 920):  # found within a second, and then one in a minute
            progress.update(done, 1000)
            clock.now += 60
    assert file.getvalue().splitlines()[-1] == "step 919/1000  ETA 1 h 21 min"


def test_what_is_over_soon_prints_no_line():
    progress, clock, file = shown(False, at_once=False)
    with progress:
        for done in (0, 1, 2):
            progress.update(done, 2)
        assert file.getvalue() == ""
        for done in (1, 2):
            clock.now += 40
            progress.update(done, 4)
    assert file.getvalue().splitlines() == ["step 1/4  ETA 2 min", "step 2/4  ETA 1 min"]


def test_the_end_is_said_once():
    progress, _, file = shown(False)
    with progress:
        progress.update(1, 1)
        progress.update(1, 1)
    assert file.getvalue() == "step 1/1\n"


def test_long_lines_are_not_broken_and_nothing_is_markup():
    clock, file = Clock(), io.StringIO()
    with Progress("[red]step", console=Console(file=file, width=20), clock=clock) as progress:
        progress.update(1, 2, "loss [bold]2.5", "last checkpoint :smile: 1000")
    assert file.getvalue() == "[red]step 1/2  loss [bold]2.5  last checkpoint :smile: 1000\n"


def test_on_a_terminal_it_is_a_bar_with_the_same_words():
    progress, _, file = shown(True, transient=False)
    with progress:
        progress.update(30, 60, "loss 2.714  412k tokens/s  MFU 41 %")
    text = file.getvalue()
    assert "━" in text
    assert "30/60" in text
    assert "loss 2.714  412k tokens/s  MFU 41 %" in text
    assert "step 30/60" not in text  # no plain line


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet(terminal):
    progress, _, file = shown(terminal, quiet=True)
    with progress:
        progress.update(1, 2, "loss 1")
    assert file.getvalue() == ""


def test_counted():
    file = io.StringIO()
    with counted("needles", 7, Console(file=file)) as advance:
        advance(3)
        advance(3)
        advance(1)
    assert file.getvalue().splitlines() == ["needles 3/7", "needles 7/7"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.4, "4 s"), (59.7, "60 s"), (89, "1 min"), (3599, "1 h 0 min"), (11520, "3 h 12 min"), (86399, "1 d 0 h"),
     (200000, "2 d 8 h")],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0.5, "0.5"), (950, "950"), (999.7, "1k"), (41234, "41.2k"), (412345, "412k"), (1.25e6, "1.25M"), (3e9, "3G")],
)
def test_rates(count, text):
    assert rate(count) == text
