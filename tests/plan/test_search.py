"""The search for settings: which are tried, by which estimates, and what is kept of them."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import jax
import pytest
from command_line import fails
from small_runs import MODEL, config_of, work_of

from swa_jax.base.chips import TARGETS
from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config, to_dict
from swa_jax.model.layer_types import FULL
from swa_jax.model.lora import LoraConfig
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import MeshConfig
from swa_jax.plan.candidates import RunChanges, candidates, factorisations, present, refusal
from swa_jax.plan.choose import ORDER, SHARE, fastest, fitting
from swa_jax.plan.cost import estimate, estimate_bytes, least_bytes
from swa_jax.plan.search import SearchFile, key_of, search, to_json
from swa_jax.plan.search_text import describe_search
from swa_jax.train.config import TrainConfig
from swa_jax.train.objectives import Distill

ROOT = Path(__file__).parents[2]
EXPERTS = MODEL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160}


def report(seconds: float, gib: float = 1.0, fits: bool = True):
    memory = {"fits": fits, "total": gib * 2**30}
    time = {"time": {"seconds": seconds, "mfu_scheduled": 0.5}} if fits else {}
    return {"memory": memory, **time}


# ---- candidates ----


def test_factorisations_are_all_products_in_order():
    assert sorted(factorisations(6, 2)) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert len(set(factorisations(256, 4))) == math.comb(8 + 3, 3)
    assert all(math.prod(one) == 12 for one in factorisations(12, 3))


def test_candidates_are_legal_and_none_that_is_legal_is_missing():
    config = config_of(rows=6, length=4092)  # 4092 = 4 * 3 * 11 * 31
    found = set(candidates(config, config.model, 0, 12))
    assert all(one.devices == 12 for one in found)
    assert {one.remat for one in found} == {"none", "layer", "projections", "attention", "offload"}
    expected = set()
    for data, fsdp, context, tensor in itertools.product((1, 2, 3, 4, 6, 12), repeat=4):
        for accumulate in (1, 2, 3, 6):
            fits = data * fsdp * context * tensor == 12
            # By hand: rows of a piece, tokens, heads of keys, and 256 and 512 for the weights.
            fits &= (6 // accumulate) % (data * fsdp) == 0 and 4092 % context == 0 and 2 % tensor == 0
            fits &= 256 % (fsdp * context) == 0
            if fits:
                expected.add((data, fsdp, context, tensor, accumulate))
    assert {(one.data, one.fsdp, one.context, one.tensor, one.accumulate) for one in found} == expected


def test_a_mesh_must_suit_every_stage():
    stages = [
        {"steps": 1, "sequence_length": 4096, "batch_size": 8, "accumulate": 2},
        {"steps": 1, "sequence_length": 4096, "batch_size": 2},
    ]
    config = config_of(stages=stages)
    found = set(candidates(config, config.model, 0, 4))
    assert found
    assert {one.data * one.fsdp for one in found} == {1, 2}
    other = RunChanges(1, 4, 1, 1, "layer", 1)
    assert "'stages.1'" in refusal(other, config, config.model, 0)


def test_slices_are_counted_separately():
    config = config_of(mesh={"slices": 2, "fsdp": 4})
    assert present(config, 0, 8) == RunChanges(1, 4, 1, 1, "layer", 1)
    found = list(candidates(config, config.model, 0, 8))
    assert {one.devices for one in found} == {4}
    assert all(one.partition(config).mesh.shape["data"] == 2 * one.data for one in found)


def test_experts_have_an_axis_of_their_own():
    config = config_of(model=EXPERTS)
    found = set(candidates(config, config.model, 0, 8))
    assert {one.expert for one in found} == {1, 2, 4}  # 8 does not divide them
    assert all(one.devices == 8 for one in found)
    dense = config_of()
    assert {one.expert for one in candidates(dense, dense.model, 0, 8)} == {1}
    split = config_of(model=EXPERTS, mesh={"fsdp": 2, "expert": 4})
    assert present(split, 0, 8) == RunChanges(1, 2, 1, 1, "layer", 1, expert=4)
    assert present(split, 0, 8).overrides(config.without_auto(), 0) == ["mesh.fsdp=2", "mesh.expert=4"]


def test_overrides_make_what_was_tried(tmp_path):
    file = tmp_path / "run.yaml"
    config = config_of(xla_options={"xla_tpu_scoped_vmem_limit_kib": "32768"}).without_auto()
    file.write_text(json.dumps(to_dict(config)))
    options = (("xla_tpu_scoped_vmem_limit_kib", 98304), ("xla_lhs_prioritize", "ENABLED"), ("xla_flag", True))
    tried = RunChanges(1, 2, 2, 1, "projections", 4, options)
    overrides = tried.overrides(config, 0)
    assert overrides == [
        "mesh.fsdp=2",
        "mesh.context=2",
        "remat=projections",
        "stages.0.accumulate=4",
        "xla_options.xla_tpu_scoped_vmem_limit_kib=98304",
        "xla_options.xla_lhs_prioritize=ENABLED",
        "xla_options.xla_flag=true",
    ]
    assert load_config(TrainConfig, file, overrides) == tried.apply(config, 0)
    assert tried.apply(config, 0).xla_options["xla_flag"] is True
    given = config_of(mesh={"fsdp": 4}).without_auto()
    assert present(given, 0, 4).overrides(given, 0) == []
    left_open = TrainConfig(**vars(given) | {"mesh": MeshConfig(), "remat": "auto", "scan_layers": "auto"})
    pins = present(given, 0, 4).overrides(left_open, 0)
    assert set(pins) == {
        *("mesh.data=1", "mesh.fsdp=4", "mesh.expert=1", "mesh.context=1", "mesh.tensor=1"),
        *("remat=layer", "scan_layers=true"),
    }


# ---- estimates ----


def test_weights_and_moments_are_those_of_the_plan():
    """By hand: 3 layers, tied to nothing; norms are whole."""
    work = work_of(config_of(), 8)
    layer = 256 * 128 * (2 * 4 + 2 * 2) + 3 * 256 * 512
    split, whole = 3 * layer + 2 * 1024 * 256, 3 * 2 * 256 + 256
    guess = estimate(work, RunChanges(1, 4, 2, 1, "layer", 1))
    assert guess.bytes_by_part["weights"] == 4 * (split / 8 + whole)
    assert guess.bytes_by_part["moments"] == 8 * (split / 8 + whole)
    assert guess.bytes_by_part["activations"] == 3 * 2 * 2048 * 256 * 2
    repeated = estimate(work, RunChanges(8, 1, 1, 1, "layer", 1))
    assert repeated.bytes_by_part["weights"] == 4 * (split + whole)


def test_a_teacher_takes_its_weights_and_a_forward_pass():
    """By hand: 4 rows of 4096 tokens a device, in two pieces, three layers, bf16."""
    taught = dataclasses.replace(config_of(), model=None, init_from="-", distill=Distill(hidden=0.1))
    plain = work_of(config_of(), 2)
    work = dataclasses.replace(plain, config=taught, teacher=AttentionPattern((FULL,) * 3))
    settings = RunChanges(1, 2, 1, 1, "layer", 2)
    before, found = estimate(plain, settings), estimate(work, settings)
    layer = 256 * 128 * (2 * 4 + 2 * 2) + 3 * 256 * 512
    split, whole = 3 * layer + 2 * 1024 * 256, 3 * 2 * 256 + 256
    states, logits = 4 * 2 * 4096 * 256 * 2, 1024 * 1024 * 4  # the normed states, and those behind three layers
    assert found.bytes_by_part["teacher"] == 2 * (split / 2 + whole) + states + logits
    assert {name: size for name, size in found.bytes_by_part.items() if name != "teacher"} == before.bytes_by_part
    products = 2 * 4 * 4096 * (3 * layer + 2 * 256 * 1024) / (work.peak * work.chip.matmul_share)
    assert products < found.seconds_by_part["teacher"] < found.seconds - found.seconds_by_part["teacher"]
    lora = dataclasses.replace(work, config=dataclasses.replace(taught, lora=LoraConfig()))
    assert estimate(lora, settings).bytes_by_part["teacher"] == states + logits


def test_what_is_kept_follows_remat_and_pieces():
    work = work_of(config_of(), 8)
    kept = {
        remat: estimate(work, RunChanges(1, 8, 1, 1, remat, 1)).bytes_by_part["activations"]
        for remat in ("offload", "layer", "attention", "projections", "none")
    }
    assert list(kept.values()) == sorted(kept.values())
    assert kept["offload"] == 0
    # 4096 tokens of three layers in bf16: the input, the output of 4 heads of 128, and lse in f32.
    assert kept["attention"] == 3 * 4096 * (256 * 2 + 4 * 128 * 2 + 4 * 4)
    whole = estimate(work, RunChanges(1, 2, 4, 1, "attention", 1))
    half = estimate(work, RunChanges(1, 2, 4, 1, "attention", 2))
    assert half.bytes_by_part["activations"] == whole.bytes_by_part["activations"] / 2
    assert half.seconds_by_part["weights"] == 2 * whole.seconds_by_part["weights"]


def test_experts_cost_what_a_token_meets_of_them():
    work = work_of(config_of(model=EXPERTS), 4)
    whole, split = (
        estimate(work, settings)
        for settings in (RunChanges(1, 4, 1, 1, "layer", 1), RunChanges(1, 1, 1, 1, "layer", 1, expert=4))
    )
    # A dense model whose MLPs are as wide as the two of four experts that a token meets has their products.
    dense = estimate(
        work_of(config_of(model=MODEL | {"intermediate_size": 320}), 4), RunChanges(1, 4, 1, 1, "layer", 1)
    )
    for one in (whole, split):
        assert one.seconds_by_part["matmuls"] == pytest.approx(dense.seconds_by_part["matmuls"])
    assert whole.seconds_by_part["experts"] == dense.seconds_by_part["experts"] == 0
    experts, layer = 3 * 4 * 3 * 256 * 160, 256 * 128 * (2 * 4 + 2 * 2)
    others = 3 * (layer + 2 * 256 + 256 * 4) + 2 * 1024 * 256 + 256  # with norms and routers
    assert split.bytes_by_part["weights"] == 4 * (experts / 4 + others)
    # Three quarters of what 4 devices have, 8192 tokens each in bf16, gathered and scattered in 3 layers, 6 times with
    # remat; and the gradients of the rest, summed.
    ring = 0.75 * (4 * 2 * 4096 * 256 * 2 * 3 * 6 + 2 * others * 2)
    assert split.seconds_by_part["experts"] == pytest.approx(ring / (2 * 2 * 50e9))


def test_what_is_sent_follows_the_mesh():
    work = work_of(config_of(), 4)
    one = estimate(work, RunChanges(1, 4, 1, 1, "layer", 1)).seconds_by_part
    assert one["weights"] > 0
    assert (one["keys"], one["tensor"]) == (0, 0)
    by_heads = estimate(work, RunChanges(2, 1, 1, 2, "layer", 1)).seconds_by_part
    assert by_heads["tensor"] > 0
    window, full = (
        estimate(work_of(config_of(pattern=pattern), 4), RunChanges(1, 1, 4, 1, "layer", 1)).seconds_by_part["keys"]
        for pattern in ("window", "full")
    )
    assert 0 < window < full
    # 8 rows of 4096 tokens, keys and values of 2 heads of 128 in bf16, by 4: gathered twice, summed once, in 3 layers.
    ring = 8 * 4096 * 2 * 2 * 128 * 2 * 3 / 4
    assert full == pytest.approx(3 * (2 + 1) * ring / (2 * 2 * 50e9))


def test_what_the_compiler_has_no_room_for_takes_time():
    """256 times the rows take more than 256 times the time where layers are compiled by themselves, not in a loop."""
    by_itself = RunChanges(1, 4, 1, 1, "none", 1, scan_layers=False)
    for settings, again in ((by_itself, True), (by_itself._replace(scan_layers=True), False)):
        small, large = (estimate(work_of(config_of(rows=rows, length=8192), 4), settings) for rows in (16, 4096))
        assert large.bytes > TARGETS["v5e"].hbm_gib * 2**30 > small.bytes
        assert (large.seconds / small.seconds > 256) == again
        assert ("computed again" in large.seconds_by_part) == again


def test_a_longer_context_is_no_faster_when_rows_do_not_lie_in_zigzag():
    plain, zigzag = (
        estimate(
            work_of(config_of(pattern="full", sequence_order=order), 4), RunChanges(1, 1, 4, 1, "layer", 1)
        ).seconds_by_part["attention"]
        for order in ("contiguous", "zigzag")
    )
    assert plain / zigzag == pytest.approx(1.75, abs=0.01)


PLANS = {
    "swiattn-32k-v5p-4x4x4": "v5p",
    "swiattn-32k-v6e-16x16": "v6e",
    "swat-340m-v5e-4x4": "v5e",
    "swat-760m-v5e-16x16": "v5e",
    "qwen3-8b-bosch-v5p-4x4x8": "v5p",
    "qwen3-8b-bosch-v6e-16x16": "v6e",
    "llama-70b-v5p-4x4x4": "v5p",
}


@pytest.mark.parametrize("name", PLANS)
def test_estimates_are_near_the_published_plans(monkeypatch, name):
    """Near enough to say what to compile first. What does not fit, the compiler has brought down."""
    monkeypatch.chdir(ROOT)
    compiled = json.loads((ROOT / "docs" / "plans" / f"{name}.json").read_text())
    config = load_config(TrainConfig, compiled["config"], compiled["overrides"])
    work = work_of(config, compiled["devices"], PLANS[name])
    settings = present(config, 0, compiled["devices"])
    guess = estimate(work, settings)
    assert 0.9 < guess.seconds / compiled["time"]["seconds"] < 1.25
    assert guess.bytes / compiled["memory"]["total"] > 0.8
    fits = guess.bytes <= compiled["memory"]["capacity"]
    assert (guess.bytes if fits else least_bytes(settings, guess.bytes)) / compiled["memory"]["total"] < 1.2


# ---- the search ----


def test_a_planted_best_is_found_though_the_formula_prefers_others():
    """What keeps as much as the formula's best takes three times its estimate, and one that keeps less, on another
    mesh, half."""
    work = work_of(config_of(pattern="full"), 8)
    guesses = {one: estimate(work, one) for one in candidates(work.config, work.model, 0, 8)}
    ranked = sorted(guesses, key=lambda one: guesses[one].seconds)
    wrong = ranked[0].remat
    planted = [one for one in ranked if one.remat != wrong and one.sizes != ranked[0].sizes][2]

    def compile_one(settings):
        factor = 3 if settings.remat == wrong else 0.5 if settings == planted else 1
        return report(guesses[settings].seconds * factor)

    found = search(work, compile_one, tries=12, options=())
    assert found.best.settings == planted
    assert len(found.tried) == 12 == len({one.settings for one in found.tried})
    assert found.tried[0].settings == present(work.config, 0, 8)


@pytest.mark.parametrize("less", [2, 3])  # of what the compiler may compute again
def test_what_does_not_fit_is_not_compiled_and_teaches(less, monkeypatch):
    """Everything takes six times the estimated memory: after one refusal only what is small is tried."""
    monkeypatch.setitem(TARGETS, "v5e", dataclasses.replace(TARGETS["v5e"], hbm_gib=1.0))
    work = work_of(config_of(rows=64, length=8192, pattern="full"), 4)
    guesses = {one: estimate(work, one) for one in candidates(work.config, work.model, 0, 4)}
    assert any(one.bytes > 1.1 * 2**30 for one in guesses.values())

    def compile_one(settings):
        gib = 6 * guesses[settings].bytes / 2**30
        if settings.computed_again and gib > 1:
            gib = max(0.97, gib / less)
        return report(guesses[settings].seconds, gib, fits=gib <= 1)

    found = search(work, compile_one, tries=6, options=())
    assert found.best is not None
    assert sum(one.seconds is None for one in found.tried) <= 2
    assert 0 < found.counts["would_fit"] < found.counts["allowed"] == len(guesses)


def test_where_nothing_fits_the_text_says_what_to_change():
    work = work_of(config_of(), 4)
    found = search(work, lambda settings: report(1.0, 99, fits=False), tries=2)
    assert found.best is None
    assert len(found.tried) == 1  # the options are not tried, and everything else is expected to need as much
    text = describe_search(found, work.config, 0, "v5e:2x2")
    assert "does not fit" in text
    last = "nothing that was compiled fits: take a larger slice, fewer tokens in a step, or more --tries"
    assert text.splitlines()[-1] == last


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_the_loop_over_layers_is_tried_with_and_without(seconds):
    work = work_of(config_of(), 4)
    found = search(work, lambda settings: report(1.0 if settings.scan_layers else seconds), tries=3, options=())
    assert {one.settings.scan_layers for one in found.tried} == {True, False}
    best = found.best.settings
    assert best.scan_layers == (seconds > 1)
    assert ("scan_layers=false" in best.overrides(work.config, 0)) == (seconds < 1)
    assert "every layer by itself" in describe_search(found, work.config, 0, "v5e:2x2")


def test_what_is_said_is_kept_and_the_first_is_enough_if_no_other_is_expected_to_be_faster(monkeypatch):
    """SWAT 340M: with all kept, a batch in one piece takes 1.5 times a chip's memory. Two pieces take no time for what
    the compiler would have to compute again."""
    monkeypatch.chdir(ROOT)
    config = load_config(TrainConfig, "configs/swat/340m.yaml")
    work = work_of(config, 16)
    compiled = []

    def compile_one(settings):
        compiled.append(settings)
        return report(0.53, gib=11.1)

    best = fastest(work, compile_one, lambda line: None).settings
    assert (best.remat, best.scan_layers, best.accumulate) == ("none", False, 2)
    assert len(compiled) == 1
    given = dataclasses.replace(config, remat="layer", scan_layers=True, mesh=MeshConfig(data=4))
    compiled.clear()
    best = fastest(work_of(given, 16), compile_one, lambda line: None).settings
    assert (best.data, best.remat, best.scan_layers) == (4, "layer", True)
    assert all((one.data, one.remat, one.scan_layers) == (4, "layer", True) for one in compiled)


def test_another_is_taken_where_the_first_is_slow_or_does_not_fit():
    work = work_of(open_config(rows=64), 4)
    ranked = sorted(candidates(work.config, work.model, 0, 4, pinned=True), key=lambda one: estimate(work, one).seconds)
    lines = []
    for first in (report(100.0), report(0.0, gib=20, fits=False)):
        best = fastest(
            work,
            lambda one, first=first: first if one == ranked[0] else report(estimate(work, one).seconds),
            lines.append,
        )
        assert best.settings != ranked[0]
        assert best.seconds < 100
    assert "to pin it: mesh.data=" in lines[-1]
    none = fastest(work, lambda one: report(0.0, gib=99, fits=False), lines.append)
    assert none.seconds is None


def open_config(**changes) -> TrainConfig:
    return config_of(remat="auto", **changes)


@pytest.mark.parametrize("share", [1.01, 0.6, 0.1, 0.05, 0.02, 0.0])
def test_what_fits_into_the_memory_at_hand_is_taken(monkeypatch, share):
    """64 rows of 4096 tokens: pieces come before computing again, and pieces of one row, which are slow, come last."""
    work = work_of(open_config(rows=64), 1, chip="")
    order = [
        (remat, pieces) for last in (False, True) for remat in ORDER for pieces in (64,) * last or (1, 2, 4, 8, 16, 32)
    ]
    sizes = {one: estimate_bytes(work, RunChanges(1, 1, 1, 1, one[0], one[1])) for one in order}
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    monkeypatch.setattr("swa_jax.plan.choose.free_memory", lambda: share * sizes["none", 1] / SHARE)
    chosen = fitting(work)
    expected = next((one for one in order if sizes[one] <= share * sizes["none", 1]), ("layer", 64))
    assert (chosen.remat, chosen.accumulate) == expected


def test_options_are_added_to_the_best_and_stay_where_they_help():
    work = work_of(config_of(scan_layers=False), 4)

    def compile_one(settings):
        options = dict(settings.xla_options)
        if "xla_refused" in options:
            raise ConfigError("'xla_options.xla_refused' = true cannot be used: no such option")
        return report(
            1.0 - 0.1 * ("xla_good" in options) + 0.2 * ("xla_bad" in options) - 0.05 * ("xla_fine" in options)
        )

    tried = [(("xla_bad", True),), (("xla_refused", True),), (("xla_good", 2),), (("xla_fine", "yes"),)]
    found = search(work, compile_one, tries=2, options=tried)
    assert found.best.settings.xla_options == (("xla_good", 2), ("xla_fine", "yes"))
    assert found.best.seconds == pytest.approx(0.85)
    text = describe_search(found, work.config, 0, "v5e:2x2")
    assert "cannot be had: 'xla_options.xla_refused' = true cannot be used" in text
    assert text.count("(as it stands)") == 1
    assert text.splitlines()[-1].endswith("xla_options.xla_good=2 xla_options.xla_fine=yes")


def test_a_configuration_that_does_not_suit_the_chips_is_said_and_the_search_goes_on():
    work = work_of(config_of(rows=2, mesh={"fsdp": 4}, scan_layers=False), 4)
    found = search(work, lambda settings: report(1.0), tries=2, options=())
    assert "cannot be split in 4" in found.refused
    assert len(found.tried) == 2
    assert found.refused in describe_search(found, work.config, 0, "v5e:2x2")
    with pytest.raises(ConfigError, match="no mesh of 7 devices suits the run"):
        search(work_of(config_of(), 7), lambda settings: report(1.0))


def test_a_search_goes_on_where_it_was_interrupted(tmp_path):
    work, file = work_of(config_of(pattern="full", scan_layers=False), 8), tmp_path / "search.json"
    compiled: list[RunChanges] = []
    first: list[RunChanges] = []
    key = key_of(work, "v5e:2x4")

    def compile_one(settings):
        if len(compiled) == 3:
            raise KeyboardInterrupt
        compiled.append(settings)
        if len(compiled) == 2 and not first:
            raise ConfigError("the compiler is out of sorts")
        return report(estimate(work, settings).seconds * len(compiled))

    def run(**changes):
        results = SearchFile(file, key)
        found = search(work, compile_one, known=results.tried, keep=results.add, options=(), **changes)
        results.finish(to_json(found, work.config, 0))
        return found

    with pytest.raises(KeyboardInterrupt):
        run(tries=5)
    assert len(SearchFile(file, key).tried) == 3
    first[:], compiled[:] = compiled, []
    found = run(tries=5)
    assert len(compiled) == 2
    assert not {*compiled} & {*first}
    assert [one.settings for one in found.tried] == [*first, *compiled]
    data = json.loads(file.read_text())
    assert [one["why_not"] is None for one in data["tried"]] == [True, False, True, True, True]
    assert data["best"] == found.best.settings.overrides(work.config, 0)
    compiled.clear()
    assert run(tries=5).best == found.best  # nothing is left to do
    assert compiled == []


def test_results_of_another_search_are_not_gone_on_with(tmp_path):
    work, file = work_of(config_of(), 4), tmp_path / "search.json"
    SearchFile(file, key_of(work, "v5e:2x2")).finish({})
    other = work_of(config_of(sliding_window=256), 4)
    with pytest.raises(ConfigError, match=r"of other content \(other configuration\)"):
        SearchFile(file, key_of(other, "v5e:2x2"))
    with pytest.raises(ConfigError, match="topology was v5e:2x2 there and is v6e:2x2 here; stage was 0"):
        SearchFile(file, key_of(work, "v6e:2x2") | {"stage": 1})
    file.write_text('{"memory": {}}')
    with pytest.raises(ConfigError, match="holds no results of --search"):
        SearchFile(file, key_of(work, "v5e:2x2"))


def test_wrong_options_are_one_sentence(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(to_dict(config_of())))
    for arguments, words in (
        (["--tries", "2"], "--tries counts what --search compiles"),
        (["--options", "0"], "--options counts what --search compiles"),
        (["--search", "--step", "decode"], "--search is for training steps"),
        (["--search", "--stage", "3"], "--stage is 3: the run has stages 0 to 0"),
        (["--search", "xla_options.xla_no_such=1"], "'xla_options.xla_no_such' = 1 cannot be used"),
    ):
        assert words in fails("compile", file, "--topology", "v5e:2x2", *arguments)
