"""Continuous batching: every prompt gets what it gets alone, whatever shares the caches with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.tolerances import assert_close
from tiny_models import PATTERNS, WINDOW_SIZE, model_of, random_prompts

from swa_jax.base.errors import ConfigError
from swa_jax.model.cache import allocate, cache_layouts
from swa_jax.model.engine import Engine
from swa_jax.model.generate import generate, sampling
from swa_jax.model.prefixes import MOST_RINGS, Prefix, PrefixStore

NEW = 10
SLOTS, CHUNK, STEPS, BATCH = 3, WINDOW_SIZE, 4, 7  # tests of one model share its programs
QUICK = ("every-kind", "head-hybrid", "shared-keys")
SLOW = (
    *("chunked", "window", "switch", "experts", "swat-every-kind", "every-kind+fa-decode", "every-kind+last-tokens"),
    "nope-every-kind",
)


def some(slow=SLOW):
    """One of every kind of layer in `make test`, of every kind of model in `make test-slow`, and all of them."""
    return [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow if name in slow else pytest.mark.long)
        for name in PATTERNS
    ]


pytestmark = pytest.mark.usefixtures("quick_compilation")


def alone(model, prompts, **options) -> list[list[int]]:
    """What `generate` gives each prompt."""
    filled = [*prompts, *[prompts[-1]] * (BATCH - len(prompts))]
    return generate(model, filled, max_length=64, **{"max_new_tokens": NEW} | options)[: len(prompts)]


def replies(engine: Engine, prompts, **options) -> list[list[int]]:
    """Whole replies of a stream, each ended once."""
    found: list[list[int]] = [[] for _ in prompts]
    ended = []
    for piece in engine.stream(prompts, **options):
        assert piece.prompt not in ended
        found[piece.prompt] += piece.tokens
        if piece.ended:
            ended.append(piece.prompt)
    assert sorted(ended) == list(range(len(prompts)))
    return found


@pytest.mark.parametrize("name", some())
@pytest.mark.parametrize("chunk", [WINDOW_SIZE, pytest.param(2 * WINDOW_SIZE + 3, marks=pytest.mark.slow)])
def test_chunks_leave_the_caches_of_one_prefill(name, chunk):
    """Prompts of 1 to more than six windows, in turn, into one batch."""
    model, lengths = model_of(name), (40, 17, 5, 1)
    layouts = cache_layouts(model.config, model.pattern, 44)
    tokens = np.zeros((4, 40), np.int32)
    for row, prompt in zip(tokens, random_prompts(lengths), strict=True):
        row[: len(prompt)] = prompt
    empty = allocate(model.config, layouts, 4, jnp.float32)
    expected, whole = jax.jit(lambda t, n, c: model.prefill(t, n, c, layouts))(
        jnp.asarray(tokens), jnp.array(lengths), empty
    )
    extend = jax.jit(lambda full_from, *args: model.extend(*args, layouts, full_from))
    cache, logits = empty, []
    for row, length in enumerate(lengths):
        full_from = model.pattern.full_from(jnp.int32(length))
        for at in range(0, length, chunk):
            piece = np.zeros(chunk, np.int32)
            count = min(chunk, length - at)
            piece[:count] = tokens[row, at : at + count]
            last, cache = extend(full_from, jnp.asarray(piece), jnp.int32(count), jnp.int32(row), cache)
        logits.append(last)
    assert_close(jnp.stack(logits), expected, "float32")
    assert cache.lengths.tolist() == list(lengths)
    filled = (np.arange(44) < np.array(lengths)[:, None])[None, :, :, None]
    for mine, other in zip(cache.pools, whole.pools, strict=True):
        for ours, theirs in ((mine.k_whole, other.k_whole), (mine.v_whole, other.v_whole)):
            assert_close(jnp.where(filled, ours, 0), jnp.where(filled, theirs, 0), "float32")
        assert_close((mine.k_ring, mine.v_ring), (other.k_ring, other.v_ring), "float32")


@pytest.mark.parametrize(
    ("name", "chunk", "slots", "steps"),
    [
        pytest.param("every-kind", 1, SLOTS, STEPS),
        *(pytest.param(*one.values, CHUNK, SLOTS, STEPS, marks=one.marks) for one in some()),
        *(pytest.param(name, 2 * WINDOW_SIZE + 3, 2, 16, marks=pytest.mark.long) for name in PATTERNS),
    ],
)
def test_many_prompts_over_few_slots(name, chunk, slots, steps):
    model, prompts = model_of(name), random_prompts((19, 1, 40, 7, 26, 3, 19))
    engine = Engine(model, slots=slots, max_length=64, chunk=chunk, steps=steps)
    expected = alone(model, prompts)
    assert replies(engine, prompts, max_new_tokens=NEW) == expected
    # An engine that has worked starts from empty slots.
    assert replies(engine, prompts[::-1], max_new_tokens=NEW) == expected[::-1]


def test_samples_and_stop_tokens_are_those_of_generate():
    model, prompts = model_of("every-kind"), random_prompts((9, 14, 9, 30))
    prompts += prompts[:2]  # equal prompts draw different samples
    options = {"top_k": 5, "top_p": 0.8}
    plain = alone(model, prompts, temperature=1.5, seed=4, **options)
    assert plain[4] != plain[0]
    engine = Engine(model, slots=SLOTS, max_length=64, chunk=CHUNK, steps=STEPS, prefixes=4)
    for stops in ((), (plain[0][3], plain[3][0])):
        common = {"max_new_tokens": NEW, "stop_tokens": stops, "seed": 4}
        expected = alone(model, prompts, temperature=1.5, **options, **common)
        assert replies(engine, prompts, sampling=sampling(1.5, **options), **common) == expected
    assert len(expected[3]) == 0


@pytest.mark.parametrize("name", some(("window", "switch", "every-kind+fa-decode", "every-kind+last-tokens")))
def test_a_remembered_prefix_changes_nothing(name):
    """Prompts that share a beginning, are beginnings, or are equal; and a reply that the next prompt continues."""
    model = model_of(name)
    start, *ends = random_prompts((23, 6, 9, 2), seed=1)
    prompts = [start + ends[0], start + ends[1], start, start + ends[1], start + ends[2], ends[0]]
    expected = alone(model, prompts)
    engine = Engine(model, slots=1, max_length=64, chunk=CHUNK, steps=STEPS, prefixes=8)
    assert replies(engine, prompts, max_new_tokens=NEW) == expected
    # Whole caches hold every beginning. Rings show only where two prompts parted, from the second on.
    rings = engine._prefixes.has_rings
    if last := model.pattern.num_last_tokens:  # they are computed anew for each prompt, with the token before them
        assert engine.computed_tokens == 29 + 9 + (last + 1) + last + (last + 1) + 6
        return
    assert engine.computed_tokens == 29 + (32 if rings else 9) + (0 if rings else 1) + 0 + 2 + 6
    # The last token of a reply is in no cache. Full-attention decode gives a reply other keys than a prompt has.
    before, turn = engine.computed_tokens, prompts[0] + expected[0] + ends[2]
    assert replies(engine, [turn], max_new_tokens=NEW) == alone(model, [turn])
    assert engine.computed_tokens - before == (12 if model.pattern.full_attention_decode else 3)


def test_a_long_conversation_keeps_few_rings():
    """Each turn computes its own tokens and the reply's last; what older turns left behind does not pile up."""
    model, turns = model_of("window"), random_prompts((5,) * 8)
    engine = Engine(model, slots=1, max_length=128, chunk=CHUNK, steps=STEPS, prefixes=2)
    talk: list[int] = []
    for turn in turns:
        talk += turn
        talk += replies(engine, [talk], max_new_tokens=NEW)[0]
    assert engine.computed_tokens == 8 * 5 + 7
    assert replies(engine, [turns[1]], max_new_tokens=NEW) == alone(model, [turns[1]])
    assert sum(len(prefix.rings) for prefix in engine._prefixes._prefixes) <= 2 * MOST_RINGS


def test_equal_prompts_that_begin_together_are_computed_once():
    model, prompts = model_of("window"), random_prompts((29,)) * SLOTS
    engine = Engine(model, slots=SLOTS, max_length=64, chunk=CHUNK, steps=STEPS, prefixes=4)
    assert replies(engine, prompts, max_new_tokens=NEW) == alone(model, prompts[:1]) * SLOTS
    assert engine.computed_tokens == 29


def test_what_finds_no_room_is_not_remembered(monkeypatch):
    """Room for two more is wanted, of which one is left for the computation; older sequences make way."""
    model, turns = model_of("window"), random_prompts((5, 5))
    engine = Engine(model, slots=1, max_length=128, chunk=CHUNK, steps=STEPS, prefixes=2)
    expected = alone(model, turns)
    monkeypatch.setattr("swa_jax.model.memory.FEW", 0)
    for free, turn, reply in zip((2.0, 1.9), turns, expected, strict=True):
        monkeypatch.setattr("swa_jax.model.memory.free_memory", lambda free=free: free * engine.cache_bytes)
        assert replies(engine, [turn], max_new_tokens=NEW) == [reply]
        assert len(engine._prefixes._prefixes) == (free == 2)


def test_the_consumer_ends_replies():
    model, prompts = model_of("every-kind"), random_prompts((9, 14, 20, 30))
    engine = Engine(model, slots=SLOTS, max_length=64, chunk=CHUNK, steps=STEPS, prefixes=2)
    expected = alone(model, prompts)
    found: list[list[int]] = [[] for _ in prompts]
    for piece in engine.stream(prompts, max_new_tokens=NEW):
        found[piece.prompt] += piece.tokens
        if piece.prompt == 1 and not piece.ended:
            engine.stop(1)
    assert [found[0], *found[2:]] == [expected[0], *expected[2:]]
    assert 1 <= len(found[1]) < NEW
    assert found[1] == expected[1][: len(found[1])]
    # A stream that nobody reads to its end leaves nothing behind either: its slots decode no further.
    unread = engine.stream(random_prompts((3, 3, 3), seed=9), max_new_tokens=40)
    while sum(engine._sequences.active) < SLOTS:
        next(unread)
    assert replies(engine, prompts[::-1], max_new_tokens=NEW) == expected[::-1]


def test_a_reply_that_is_ended_from_outside_is_remembered_right():
    """Its slot has decoded tokens that nobody was given; the rings stand behind them."""
    model, prompts = model_of("window"), random_prompts((29, 9))
    engine = Engine(model, slots=SLOTS, max_length=64, chunk=CHUNK, steps=STEPS, prefixes=4)
    found: list[list[int]] = [[], []]
    for piece in engine.stream(prompts, max_new_tokens=20):
        found[piece.prompt] += piece.tokens
        if piece.prompt == 0 and found[1]:
            engine.stop(1)
    turn = prompts[1] + alone(model, prompts[1:], max_new_tokens=20)[0][:6]
    assert replies(engine, [turn], max_new_tokens=NEW) == alone(model, [turn])


def test_what_an_engine_refuses(monkeypatch):
    model = model_of("window")
    monkeypatch.setattr("swa_jax.model.memory.free_memory", lambda: 2.0**30)
    with pytest.raises(ConfigError, match=r"^caches of 8 sequences with room for 8388608 tokens take .* GiB, and 1"):
        Engine(model_of("every-kind"), slots=8, max_length=2**23)
    for options, sentence in (
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"prefixes": -1}, "prefixes must be at least 0, got -1"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Engine(model, **{"max_length": 64} | options)
    engine = Engine(model, slots=1, max_length=64)
    with pytest.raises(ConfigError, match=r"the longest prompt has 60 tokens .* at least 70, and is 64"):
        engine.stream(random_prompts((60,)), max_new_tokens=NEW)
    with pytest.raises(ConfigError, match=r"prompts\[1\] is empty"):
        engine.stream([[1], []], max_new_tokens=1)
    with pytest.raises(ConfigError, match="stop_tokens holds token 61"):
        engine.stream([[1]], max_new_tokens=1, stop_tokens=[61])


def test_slots_that_wait_keep_their_caches():
    """A slot whose prompt is half in is not touched by the others' decoding, rings least of all."""
    model = model_of("every-kind")
    prompts = random_prompts((3, 40, 40))
    engine = Engine(model, slots=SLOTS, max_length=64, chunk=CHUNK, steps=STEPS)
    assert replies(engine, prompts, max_new_tokens=20) == alone(model, prompts, max_new_tokens=20)


def test_what_a_longer_sequence_takes_over_from_its_beginning():
    """Rings and logits of the whole beginning too: a prompt that branches off there computes nothing before."""

    def remember(tokens: list[int]) -> None:
        parts = ((zero, zero),)
        store.add(Prefix(np.array(tokens), parts, {len(tokens): parts}, {len(tokens): zero}))

    zero, store = jnp.zeros(()), PrefixStore(4, rings=True)
    for tokens in ([1, 2, 3], [1, 2, 3, 4, 5]):
        remember(tokens)
    assert store.find([1, 2, 3, 9])[1:] == (3, 3)
    assert store.find([1, 2, 3])[1:] == (3, 3)  # its logits are known as well
    assert store.find([1, 2, 9])[1:] == (0, 2)
    for length in range(6, 12):  # of all its beginnings those are kept that were used last
        assert store.find([1, 2, 3])[1:] == (3, 3)
        remember([*range(1, length + 1)])
    assert [*store.find([1, 2, 3]).prefix.rings] == [3, 11, 10, 9]
    remember([7])
    remember([8])
    assert store.find([1, 2, 3, 4])[1:] == (3, 4)
    assert len({id(store.find(prompt).prefix) for prompt in ([1, 2, 3], [7], [8])}) == 3
