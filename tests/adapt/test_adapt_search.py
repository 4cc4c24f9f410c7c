"""The search of `swa-jax adapt`: what may be chosen, in which order layers are worth keeping full, and what is best."""

import json

import numpy as np
import pytest

from swa_jax.adapt import search as search_module
from swa_jax.adapt.job import find_source
from swa_jax.adapt.search import EFFORTS, Point, Search, find_space, fitting
from swa_jax.adapt.tasks import EvalTask
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.evaluate import Example
from swa_jax.model.window import Window
from swa_jax.select.nll import NLLScores
from swa_jax.select.task import Ranking


@pytest.fixture(scope="module")
def source():
    return find_source("recall")


def test_a_candidate_has_as_many_full_layers_as_fit(source):
    memory = Memory(source.config, source.hf_config, 1024)
    for budget in (0.2, 0.3, 0.5, 0.9):
        pattern = fitting(Point("nll-gradient", Window(64)), memory, budget, order=[5, 2, 0, 1, 3, 4, 6, 7])
        full = len(pattern.full_layers)
        assert full == int((budget - 64 / 1024) / (1 - 64 / 1024) * 8)
        assert set(pattern.full_layers) == set([5, 2, 0, 1, 3, 4, 6, 7][:full])
        assert memory.share(pattern) <= budget


def test_the_space_is_what_the_server_can_run(source):
    here = find_space(Memory(source.config, source.hf_config, 1024), 1.0, [64, 128])
    assert here.values["sink_tokens"] == (0, 4)
    assert here.start.window.sink_tokens == 4  # layers are ranked with sink tokens where these may be chosen
    assert here.values["full_decode"] == (False, True)
    served = find_space(Memory(source.config, source.hf_config, 1024, "vllm", 64), 0.3, [64, 128, 256])
    assert served.values["sink_tokens"] == (0,)
    assert served.start.window.sink_tokens == 0
    assert served.values["full_decode"] == (False,)
    assert served.values["size"] == (64, 128)
    assert len(served.left_out) == 3  # a window, sink tokens, full-attention decode
    plugin = Memory(source.config, source.hf_config, 8192, "vllm-plugin", 64)
    assert find_space(plugin, 0.3, [64], "heads").values["sink_tokens"] == (0, 4)
    assert find_space(plugin, 1.0, [64]).values["full_decode"] == (False, True)
    heads = find_space(Memory(source.config, source.hf_config, 1024), 0.3, [64], "heads")
    assert heads.start.layout == "nll-heads"
    assert heads.most == int((0.3 - 64 / 1024) / (1 - 64 / 1024) * 32)


class Landscape:
    """In place of a model: a candidate's loss is a sum over its coordinates, least for layer 5, window 32, sinks 4."""

    def __init__(self):
        self.scored = 0

    def measure(self, model, tasks, pattern, batch_size, progress):
        self.scored += 1
        loss = (5 not in pattern.full_layers) + abs(pattern.sliding_window - 32) / 100
        loss += 0.2 * (pattern.num_sink_tokens == 0)
        return {"a": {"losses": [loss]}}


def test_the_search_finds_the_best_and_goes_on_from_its_file(source, tmp_path, monkeypatch):
    memory = Memory(source.config, source.hf_config, 1024)
    space = find_space(memory, 0.3, [16, 32, 64, 128])
    landscape = Landscape()
    monkeypatch.setattr(search_module, "measure", landscape.measure)

    def rank(self):
        self._order, self._layer_scores = [5, 0, 1, 2, 3, 4, 6, 7], [[0.0, None, None]] * 8

    monkeypatch.setattr(Search, "_rank", rank)

    def search(effort="normal", folder=tmp_path):
        rest = (8, EFFORTS[effort], 0, lambda _: None, lambda *_: None)
        return Search(None, [], {"a": {"losses": [0.0]}}, memory, 0.3, space, folder, "k" * 32, *rest)()

    first = search()
    best = first["candidates"][first["best"]]
    assert (best["full_layers"][-1], best["sliding_window"], best["num_sink_tokens"]) == (5, 32, 4)
    assert best["lost"] == 0 == min(row["lost"] for row in first["candidates"])
    assert all(row["share"] <= 0.3 for row in first["candidates"])
    count = landscape.scored
    assert search() == first
    assert landscape.scored == count
    (file,) = tmp_path.glob("candidates.jsonl")
    file.write_text(file.read_text()[:-9])  # as a killed run leaves it
    assert search() == first
    assert landscape.scored == count + 1
    quick = search("quick", tmp_path / "quick")  # what is tried again beside another window can be left out
    assert quick["candidates"] == [row for row in first["candidates"] if row in quick["candidates"]]
    assert len(quick["candidates"]) == space.num_candidates(1) < len(first["candidates"])
    assert quick["candidates"][quick["best"]] == best


class Asked:
    """In place of `LayerScorer` and `MaskEvaluator`: remembers what it was made with."""

    layers, shape, num_known, num_evaluations, full_attention_decode = 8, (8, 4), 0, 0, False

    def __init__(self, model, examples, window, **options):
        type(self).examples, type(self).window = examples, window

    def greedy(self, budget, *, tried, rounds, progress):
        type(self).asked = budget, tried, rounds
        saved = np.zeros((2, 8))
        saved[:, [1, 2, 6]] = 2.0, 1.5, 1.0
        if tried is not None:
            saved[:, 7] = np.nan
        first = NLLScores(saved, np.ones(2), Window(64, 4, False), picked=(1,))
        second = np.where(np.arange(8) == 1, 0.0, saved / 2)
        return [first, NLLScores(second, np.ones(2), Window(64, 4, False), (1,), np.arange(8.0), (2, 6))]

    def save(self):
        pass


def ranked(source, tmp_path, monkeypatch, unit, effort):
    monkeypatch.setattr("swa_jax.select.nll.LayerScorer", Asked)
    monkeypatch.setattr("swa_jax.select.evaluator.MaskEvaluator", Asked)
    memory = Memory(source.config, source.hf_config, 1024)
    space = find_space(memory, 0.45, [64], unit)
    example = Example([1] * 9, [2], [])
    tasks = [EvalTask("a", "", "", [example] * 8), EvalTask("text", "", "", [example] * 2, answers=False)]
    rest = (8, EFFORTS[effort], 0, lambda _: None, lambda *_: None)
    search = Search(source, tasks, {}, memory, 0.45, space, tmp_path, "k" * 32, *rest)
    search._rank()
    return search


def test_layers_are_ranked_with_sink_tokens_on_a_few_examples(source, tmp_path, monkeypatch):
    search = ranked(source, tmp_path, monkeypatch, "layers", "normal")
    assert (search.space.most, Asked.asked) == (3, (3, None, 8))  # 8 layers: all are scored
    assert len(Asked.examples) == 4 + 1
    assert Asked.window == Window(64, 4, False, 0)
    assert search._order == [1, 2, 6]
    worth = [score[0] for score in search._layer_scores]
    assert worth == [0.0, 2.0, 0.75, 0.0, 0.0, 0.0, 0.5, 0.0]  # beside those found before
    pattern = search._pattern(Point("nll-gradient", Window(64, 4)))
    assert pattern.full_layers == (1, 2, 6)
    assert pattern.provenance["picked"] == [1, 2, 6]
    assert pattern.provenance["gradients"] == [[float(i) for i in range(8)]]
    assert pattern.provenance["rounds"][1][1:3] == [0.0, 0.75]
    json.loads(pattern.to_json())


def test_of_a_deep_model_those_that_a_gradient_names(source, tmp_path, monkeypatch):
    monkeypatch.setattr("swa_jax.select.nll.EXACT_BELOW", 8)
    search = ranked(source, tmp_path, monkeypatch, "layers", "quick")
    assert Asked.asked == (3, 2, 4)
    assert len(Asked.examples) == 2 + 1
    assert search._layer_scores[7] == [None, None, None]
    ranked(source, tmp_path, monkeypatch, "layers", "full")
    assert Asked.asked == (3, None, 30)


def test_heads_are_ranked_the_same_way(source, tmp_path, monkeypatch):
    def greedy_heads(evaluate, count, *, tried, rounds, progress):
        order = [(layer, 3) for layer in range(8)] + [(layer, 0) for layer in range(8)]
        return Ranking(order[:count], (8, 4), {"gradients": [[[0.0] * 4] * 8]})

    monkeypatch.setattr("swa_jax.select.greedy_heads.greedy_heads", greedy_heads)
    search = ranked(source, tmp_path, monkeypatch, "heads", "normal")
    assert Asked.window.sink_tokens == 4
    pattern = search._pattern(Point("nll-heads", Window(64, 4)))
    assert search.space.most == 13
    assert pattern.full_kv_heads == ((0, 3),) * 5 + ((3,),) * 3
    assert pattern.num_sink_tokens == 4
    assert fitting(Point("nll-heads", Window(64, 4, True)), search.memory, 1.0).full_attention_decode
    assert pattern.provenance["gradients"]
