"""Whether examples tell full attention and windows apart."""

import numpy as np
import pytest

from swa_jax.select.separation import doubt, weakness


@pytest.mark.parametrize("count", [2, 8, 64])
def test_answers_that_windows_lose_tell_enough(count):
    assert doubt(np.ones(count, bool), np.zeros(count, bool), "answers") is None
    assert weakness(np.ones(count)) is None


def test_a_model_that_gets_less_than_half_right_is_too_weak():
    few, half = np.arange(64) < 31, np.arange(64) < 32
    assert doubt(half, np.zeros(64), "answers") is None
    found = doubt(few, np.zeros(64), "answers")
    assert found.reason == "with full attention the model itself gets 48% of the 64 answers right"
    assert found.advice.startswith("take a task that the model can do: shorter prompts (--length)")
    assert found.advice.endswith("or choose by the answers' loss (--by loss, or a method by NLL)")
    losses = np.linspace(1, 2, 64)
    assert doubt(losses, losses + 0.1, "loss") is None  # by loss it does not matter


def test_no_difference_beyond_chance():
    full = np.arange(64) < 60
    for windowed in (full, np.arange(64) < 58, np.ones(64)):
        found = doubt(full, windowed, "answers")
        assert found.reason.startswith(f"windows in every layer get {np.mean(windowed):.0%} of the answers right")
        assert found.reason.endswith("full attention 94%, no difference beyond chance on 64 examples")
        assert found.advice.startswith("take longer prompts or a smaller window")
    assert doubt(full, np.arange(64) < 40, "answers") is None


def test_losses_differ_beyond_chance_or_not():
    rng = np.random.default_rng(0)
    full, noise = rng.random(64), rng.normal(size=64)
    assert doubt(full, full + 0.5 + noise, "loss") is None
    for windowed in (full, full + 0.01 + noise, full - 0.5 + noise):  # windows may also be better by chance
        found = doubt(full, windowed, "loss")
        assert "nats a token against full attention, no difference beyond chance on 64 examples" in found.reason
        assert "--by loss" not in found.advice
    assert doubt([1.0], [2.0], "loss") is not None  # one example shows nothing
