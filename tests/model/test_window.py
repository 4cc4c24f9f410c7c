"""A window that is given in part, and what stands in for the rest."""

import pytest
from tiny_models import make

from swa_jax.base.errors import ConfigError
from swa_jax.model.window import OWN, Window


def test_what_is_not_given_is_the_models_own():
    own = make("wF", sliding_window=5, num_sink_tokens=2, full_attention_decode=True).window
    assert own == Window(5, 2, True, 0)
    assert OWN.of(own) == own
    assert Window(7, 0, False).of(own) == Window(7, 0, False, 0)  # 0 and False are given
    assert Window(sink_tokens=1).of(own) == Window(5, 1, True, 0)
    last = make("wF", sliding_window=5, full_attention_decode=True, num_last_tokens=3).window
    assert OWN.of(last) == last
    assert Window(full_decode=False).of(last) == Window(5, 0, False, 0)  # they are nothing without it


def test_a_size_is_needed_unless_it_is_not():
    own = make("FF", sliding_window=None).window
    with pytest.raises(ConfigError, match=r"no window is given \(--window\), and the model's own pattern has none"):
        Window(sink_tokens=1).of(own)
    assert Window(sink_tokens=1).of(own, needed=False) == Window(None, 1, False, 0)


def test_a_pattern_takes_what_is_given():
    pattern = make("wF", sliding_window=5, num_sink_tokens=2)
    assert pattern.with_window(OWN) == pattern
    assert pattern.with_window(Window(7, full_decode=True)).window == Window(7, 2, True, 0)


def test_a_window_holds_its_keys_and_the_sink_tokens():
    window = Window(6, 1)
    assert window.holds(7)
    assert not window.holds(8)
    assert OWN.holds(10**6)  # full attention
