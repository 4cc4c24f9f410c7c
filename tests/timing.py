"""Times that other work on the machine can only lengthen: more rounds are made where they say too much."""

import math
import time


def least_seconds(seconds, cases, holds, rounds=8):
    """{case: the least of `seconds(case)`}, measured in turns until `holds(it)`, for at most `rounds` rounds.

    A claim that is false stays false: the least times come ever closer to those of a quiet machine.
    """
    least = dict.fromkeys(cases, math.inf)
    for _ in range(rounds):
        for case in cases:
            least[case] = min(least[case], seconds(case))
        if holds(least):
            break
    return least


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
