"""What the plans of a prefill and of a decode step come to."""

import pytest

from swa_jax.plan.serving import describe_serving, serving


def report(length, seconds=None, **memory):
    found = {
        "batch": {"rows": 4, "length": length},
        "cache_read_seconds": 0.25,
        "memory": {"fits": seconds is not None, "cache": 400} | memory,
    }
    return found | ({} if seconds is None else {"time": {"seconds": seconds}})


def test_the_columns_of_table_5():
    found = serving(report(100, 2.0, total=7000), report(110, 0.5, total=6000), 10)
    assert found == {
        "fits": True,
        "kv_cache_bytes": 100,
        "memory_bytes": 7000,
        "first_token_seconds": 2.0,
        "token_seconds": 0.75,
        "tokens_per_second": pytest.approx(4 * 110 / (2 + 9 * 0.75)),
    }
    text = describe_serving(found, 10)
    assert "time to the first token    2 s" in text
    assert "each further token         750 ms" in text


def test_a_step_that_does_not_fit_has_no_times():
    found = serving(report(100, total=9000), report(110, 0.5, total=6000), 10)
    assert found == {"fits": False, "kv_cache_bytes": 100, "memory_bytes": 9000}
    assert "no times: a step does not fit" in describe_serving(found, 10)
