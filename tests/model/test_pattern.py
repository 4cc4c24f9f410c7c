"""Patterns: recipes, JSON, SWAA's words for them, and what they refuse."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_models import PATTERNS, SOFTMAX, make

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.pattern_files import load_pattern
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.recipes import SWAA_ROWS, begin_middle_end
from swa_jax.model.window import Window


def layers(recipe: str, depth: int = 12, **options) -> tuple[int, ...]:
    return AttentionPattern.from_recipe(recipe, depth, **options).full_layers


# ---- recipes ----


@pytest.mark.parametrize(
    ("recipe", "depth", "full"),
    [
        ("full", 4, (0, 1, 2, 3)),
        ("window", 4, ()),
        ("streaming", 4, ()),
        ("switch", 4, ()),
        ("interleave-1-in-2", 6, (1, 3, 5)),
        ("interleave-1-in-4", 12, (3, 7, 11)),
        ("interleave-1-in-4@0", 12, (0, 4, 8)),
        ("interleave-1-in-4@1", 12, (1, 5, 9)),
        ("static-hybrid-1:3", 22, (3, 7, 11, 15, 19)),  # SwiAttn's "4, 8, 12, 16, 20-th" of 22
        ("begin-middle-end-1-in-4", 12, (0, 5, 11)),
        ("begin-middle-end-1-in-2", 12, (0, 1, 5, 6, 10, 11)),
        ("layers:5,2", 12, (2, 5)),
    ],
)
def test_full_layers_of_recipes(recipe, depth, full):
    assert layers(recipe, depth) == full


def test_fields_of_recipes():
    window = AttentionPattern.from_recipe("window", 3)
    assert window == AttentionPattern((WINDOW,) * 3, 2048)
    assert AttentionPattern.from_recipe("streaming", 3).num_sink_tokens == 10
    assert AttentionPattern.from_recipe("switch", 3).layer_types == (SWITCH,) * 3
    full = AttentionPattern.from_recipe("full", 3)
    assert full == AttentionPattern((FULL,) * 3)
    assert full.sliding_window is None
    suffixed = AttentionPattern.from_recipe("window+fa-decode+sink-tokens=7", 3, sliding_window=64)
    assert (suffixed.sliding_window, suffixed.num_sink_tokens, suffixed.full_attention_decode) == (64, 7, True)
    last = AttentionPattern.from_recipe("window+fa-decode+last-tokens=32", 3)
    assert last.num_last_tokens == 32
    assert last.with_window(Window(full_decode=False)) == window
    row = AttentionPattern.from_recipe("swaa-trained-efficiency-interleave+sink-tokens=3", 4)
    assert (row.full_layers, row.num_sink_tokens, row.full_attention_decode) == ((1, 3), 3, False)
    given = AttentionPattern.from_recipe("streaming+fa-decode", 3, num_sink_tokens=0, full_attention_decode=False)
    assert given == window  # arguments win over the recipe
    assert AttentionPattern.from_recipe("window", SOFTMAX).num_layers == SOFTMAX.num_hidden_layers
    assert AttentionPattern.from_recipe("interleave-1-in-2", 4).provenance == {"method": "interleave-1-in-2"}


def test_random_recipe_is_a_function_of_its_seed():
    assert layers("random-1-in-4") == layers("random-1-in-4")
    drawn = {layers("random-1-in-4", seed=seed) for seed in range(8)}
    assert len(drawn) > 4
    assert {len(full) for full in drawn} == {3}
    assert AttentionPattern.from_recipe("random-1-in-4", 12, seed=5).provenance["seed"] == 5


@pytest.mark.parametrize("recipe", SWAA_ROWS)
def test_swaa_rows(recipe):
    """Table 2 as read from the text: what is not trained needs sink tokens and full-attention decode."""
    pattern = AttentionPattern.from_recipe(recipe, 8)
    trained, quality = "no-training" not in recipe, "efficiency" not in recipe
    assert (pattern.num_sink_tokens == 0) == trained
    assert pattern.full_attention_decode == (recipe != "swaa-trained-efficiency-interleave")
    assert bool(pattern.full_layers) == (quality or recipe.endswith("-interleave"))
    assert pattern.provenance["method"] == recipe


@pytest.mark.parametrize("depth", range(1, 13))
def test_begin_middle_end_meets_its_budget(depth):
    for budget in range(depth + 1):
        chosen = begin_middle_end(budget, depth)
        assert len(chosen) == len(set(chosen)) == budget
        assert set(chosen) <= set(range(depth))
        assert budget < 1 or chosen[0] == 0
        assert budget < 3 or chosen[-1] == depth - 1


def test_one_in_n_is_one_count():
    """Recipes that are compared keep as many layers, also where n does not divide."""
    for recipe in ("interleave", "begin-middle-end", "random"):
        assert len(AttentionPattern.from_recipe(f"{recipe}-1-in-4", 22).full_layers) == 5


def test_numpy_numbers_are_taken(tmp_path):
    pattern = AttentionPattern.from_full_layers(
        [0], 2, np.int64(4), provenance={"scores": np.arange(2.0), "seed": np.int32(1)}
    )
    read = AttentionPattern.from_json(pattern.to_json(tmp_path / "p.json"))
    assert read == pattern
    assert read.provenance == {"scores": [0, 1], "seed": 1}
    assert AttentionPattern.from_recipe("window", np.int64(3)).num_layers == 3


def test_options_win_over_a_file(tmp_path):
    config = dataclasses.replace(SOFTMAX, num_hidden_layers=2)
    pattern = AttentionPattern.from_full_layers([0], 2, 4, num_sink_tokens=2, full_attention_decode=True)
    pattern.to_json(tmp_path / "p.json")
    for source in (tmp_path / "p.json", str(tmp_path / "p.json"), pattern.to_json()):
        assert load_pattern(source, config, seed=3) == pattern
        changed = load_pattern(source, config, Window(6, 0))
        assert changed == dataclasses.replace(pattern, sliding_window=6, num_sink_tokens=0)
    assert load_pattern(pattern, config) == pattern
    assert load_pattern("interleave-1-in-2", SOFTMAX, Window(6)) == make("wFwF")
    with pytest.raises(ConfigError, match="2 layers, the model 4"):
        load_pattern(pattern, SOFTMAX)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ("windw", "'windw' is neither a recipe nor a .json file; did you mean 'window'?"),
        (
            "swaa-trained-qualty",
            "'swaa-trained-qualty' is neither a recipe nor a .json file; did you mean 'swaa-trained-quality'?",
        ),
        ("interleave", "recipe 'interleave' is incomplete: write it as in 'interleave-1-in-4'"),
        ("static-hybrid", "recipe 'static-hybrid' is incomplete: write it as in 'static-hybrid-1:3'"),
        ("layers:", "recipe 'layers:' is incomplete: write it as in 'layers:2,5'"),
        ("interleave-1-in-4@4", "recipe 'interleave-1-in-4@4': the offset after @ must be below n"),
        ("random-1-in-4@1", "recipe 'random-1-in-4@1': the offset after @ must be below n, and is for interleave"),
        ("interleave-1-in-13", "recipe 'interleave-1-in-13' leaves none of 12 layers full: name it 'window'"),
        ("interleave-1-in-40@12", "recipe 'interleave-1-in-40@12' leaves none of 12 layers full"),
        ("static-hybrid-1:12", "recipe 'static-hybrid-1:12' leaves none of 12 layers full"),
        ("interleave-1-in-0", "recipe 'interleave-1-in-0': one layer in 0 is none; n must be at least 1"),
        ("window+fadecode", "recipe 'window+fadecode': unknown suffix '+fadecode'; known: +fa-decode"),
        ("layers:2,12", "full layer 12 does not exist: the model has layers 0 to 11"),
    ],
)
def test_wrong_recipes(recipe, sentence):
    with pytest.raises(ConfigError) as error:
        AttentionPattern.from_recipe(recipe, 12)
    assert str(error.value).startswith(sentence)


# ---- JSON ----


@pytest.mark.parametrize("name", PATTERNS)
def test_json_round_trip(name, tmp_path):
    pattern = dataclasses.replace(PATTERNS[name][1], provenance={"method": "nll", "scores": [0.5, -1.0], "seed": 3})
    text = pattern.to_json(tmp_path / "pattern.json")
    assert json.loads(text)["version"] == 1
    for again in (AttentionPattern.from_json(text), AttentionPattern.from_json(tmp_path / "pattern.json")):
        assert again == pattern == PATTERNS[name][1]  # wherever it came from
        assert hash(again) == hash(PATTERNS[name][1])
        assert again.provenance == pattern.provenance
        assert again.to_json() == text
    assert list(tmp_path.iterdir()) == [tmp_path / "pattern.json"]  # no partial file is left


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "the pattern has version 2, this library reads version 1"),
        ({"sliding_windw": 3}, "the pattern: unknown key 'sliding_windw'; did you mean 'sliding_window'?"),
        ({"sliding_window": "6"}, "the pattern: 'sliding_window' must be int, got '6'"),
        ({"full_attention_decode": 1}, "the pattern: 'full_attention_decode' must be bool, got 1"),
        ({"full_kv_heads": [[0.5], [], [], []]}, "the pattern: 'full_kv_heads.0.0' must be int, got 0.5"),
        ({"layer_types": "window"}, "the pattern: 'layer_types' must be a list, got 'window'"),
        ({"sliding_window": 0}, "the pattern: sliding_window must be at least 1"),
        (
            {"layer_types": ["chunked_attention", "sliding_attention", *["full_attention"] * 2]},
            "the pattern: layer_types has chunked_attention: all other layers must be full_attention",
        ),
    ],
)
def test_wrong_json(change, sentence):
    data = json.loads(make("wFwF").to_json()) | change
    with pytest.raises(ConfigError) as error:
        AttentionPattern.from_json(json.dumps(data))
    assert str(error.value).startswith(sentence)


def test_unreadable_json(tmp_path):
    with pytest.raises(ConfigError, match=r"pattern file .*absent.json does not exist"):
        AttentionPattern.from_json(tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"broken.json is not valid JSON"):
        AttentionPattern.from_json(broken)
    broken.write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"has no 'layer_types': it is not an attention pattern"):
        AttentionPattern.from_json(broken)


# ---- SWAA's words ----


def test_swaa_config():
    config = {"sliding_window_size": 2048, "keep_first": 10, "force_fa_decode": True, "non_sliding_layers": [1, 3]}
    pattern = AttentionPattern.from_swaa_config(config, 4)
    assert pattern == make("wFwF", sliding_window=2048, num_sink_tokens=10, full_attention_decode=True)
    assert AttentionPattern.from_swaa_config({"sliding_window_size": None}, 2).layer_types == (FULL, FULL)
    bare = AttentionPattern.from_swaa_config({"sliding_window_size": 8, "keep_first": None}, 2)
    assert bare == make("ww", sliding_window=8)
    with pytest.raises(ConfigError, match=r"unknown key 'keep_frst'; did you mean 'keep_first'"):
        AttentionPattern.from_swaa_config({"keep_frst": 1}, 2)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"layer_types": ()}, "layer_types is empty"),
        ({"layer_types": ("sliding_atention",)}, "layer_types[0] is 'sliding_atention'; did you mean 'sliding_atten"),
        ({"layer_types": (FULL, WINDOW)}, "sliding_window is missing: every layer type but full_attention needs one"),
        ({"layer_types": (WINDOW,), "sliding_window": 0}, "sliding_window must be at least 1"),
        ({"layer_types": (WINDOW,), "sliding_window": 4, "num_sink_tokens": -1}, "num_sink_tokens must be 0 or more"),
        (
            {"layer_types": (WINDOW, HYBRID), "sliding_window": 4, "full_kv_heads": ((1,), ())},
            "full_kv_heads[0] is set, but layer 0 is sliding_attention, not head_hybrid_attention",
        ),
        (
            {"layer_types": (HYBRID, HYBRID), "sliding_window": 4, "full_kv_heads": ((1,),)},
            "full_kv_heads has 1 entries for 2 layers",
        ),
        ({"layer_types": (WINDOW,), "sliding_window": 4.5}, "sliding_window must be a whole number, got 4.5"),
        ({"layer_types": (WINDOW,), "sliding_window": True}, "sliding_window must be a whole number, got True"),
        ({"layer_types": (WINDOW,), "sliding_window": "4"}, "sliding_window must be a whole number, got '4'"),
        ({"layer_types": (WINDOW,), "sliding_window": 4, "num_sink_tokens": 1.5}, "num_sink_tokens must be a whole"),
        ({"layer_types": (WINDOW,), "sliding_window": 4, "num_last_tokens": 2}, "num_last_tokens is 2: it needs full_"),
        (
            {"layer_types": (WINDOW,), "sliding_window": 4, "num_last_tokens": -1, "full_attention_decode": True},
            "num_last_tokens must be 0 or more, got -1",
        ),
        (
            {"layer_types": (HYBRID,), "sliding_window": 4, "full_kv_heads": {0: [1]}},
            "layer_types and full_kv_heads are lists with one entry a layer",
        ),
    ],
)
def test_contradictions(fields, sentence):
    with pytest.raises(ConfigError) as error:
        AttentionPattern(**fields)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        (make("www"), "the pattern has 3 layers, the model 4"),
        (make("hwww", ((2,), (), (), ())), "full_kv_heads[0] names KV head 2, the model has heads 0 to 1"),
        (make("hwww", ((-1,), (), (), ())), "full_kv_heads[0] names KV head -1"),
        (make("whww", ((), (1, 1), (), ())), "full_kv_heads[1] names a KV head twice: [1, 1]"),
    ],
)
def test_validate(pattern, sentence):
    with pytest.raises(ConfigError) as error:
        pattern.validate(SOFTMAX)
    assert str(error.value).startswith(sentence)


# ---- reading it ----


def test_full_cache_heads():
    heads = make("FwhS", ((), (), (1,), ())).full_cache_heads(2)
    np.testing.assert_array_equal(heads, [[True, True], [False, False], [False, True], [True, True]])
    decode = make("FwhS", ((), (), (1,), ()), full_attention_decode=True)
    assert decode.full_cache_heads(2).all()
    assert make("whwh", ((), (0, 1), (), (1,))).full_head_counts == (0, 2, 0, 1)


def test_print():
    pattern = make(
        "FwhSwwwwwF",
        ((), (), (1, 0), *[()] * 7),
        num_sink_tokens=2,
        full_attention_decode=True,
        provenance={"method": "bosch"},
    )
    assert str(pattern).splitlines() == [
        "10 layers: FwhSwwww wF",
        "full attention in 2 layers: [0, 9]",
        "window 6 (own key included), 2 sink tokens, full-attention decode on",
        "full KV heads by layer: 2:[0, 1]",
        "made by bosch",
    ]
    assert len(str(AttentionPattern.from_recipe("interleave-1-in-4", 126)).splitlines()) <= 24  # one screen
