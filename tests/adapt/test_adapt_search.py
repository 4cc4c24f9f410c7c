"""The search of `swa-jax adapt`: what may be chosen, in which order layers are worth keeping full, and what is best."""

import json
from typing import ClassVar

import numpy as np
import pytest

from swa_jax.adapt import search as search_module
from swa_jax.adapt.search import Point, Search, find_space, fitting
from swa_jax.adapt.source import find_source
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.select.nll import NLLScores


@pytest.fixture(scope="module")
def source():
    return find_source("recall")


def test_a_candidate_has_as_many_full_layers_as_fit(source):
    memory = Memory(source.config, source.hf_config, 1024)
    for budget in (0.2, 0.3, 0.5, 0.9):
        pattern = fitting(Point("nll", 64), memory, budget, order=[5, 2, 0, 1, 3, 4, 6, 7])
        full = len(pattern.full_layers)
        assert full == int((budget - 64 / 1024) / (1 - 64 / 1024) * 8)
        assert set(pattern.full_layers) == set([5, 2, 0, 1, 3, 4, 6, 7][:full])
        assert memory.share(pattern) <= budget


def test_the_space_is_what_the_server_can_run(source):
    here = find_space(Memory(source.config, source.hf_config, 1024), 1.0, [64, 128])
    assert here.values["num_sink_tokens"] == (0, 4)
    assert here.values["full_attention_decode"] == (False, True)
    served = find_space(Memory(source.config, source.hf_config, 1024, "vllm", 64), 0.3, [64, 128, 256])
    assert served.values["num_sink_tokens"] == (0,)
    assert served.values["full_attention_decode"] == (False,)
    assert served.values["sliding_window"] == (64, 128)
    assert len(served.left_out) == 3  # a window, sink tokens, full-attention decode
    heads = find_space(Memory(source.config, source.hf_config, 1024), 0.3, [64], "heads")
    assert heads.start.layout == "bosch"


class Landscape:
    """In place of a model: a candidate's loss is a sum over its coordinates, least for layer 5, window 32, sinks 4."""

    def __init__(self):
        self.scored = 0

    def measure(self, model, tasks, pattern, batch_size, advance):
        self.scored += 1
        loss = (5 not in pattern.full_layers) + abs(pattern.sliding_window - 32) / 100
        loss += 0.2 * (pattern.num_sink_tokens == 0)
        return {"a": {"losses": [loss]}}


def test_the_search_finds_the_best_and_goes_on_from_its_file(source, tmp_path, monkeypatch):
    memory = Memory(source.config, source.hf_config, 1024)
    space = find_space(memory, 0.3, [16, 32, 64, 128])
    landscape = Landscape()
    monkeypatch.setattr(search_module, "measure", landscape.measure)

    def score_layers(self):
        self._order, self._layer_scores = [5, 0, 1, 2, 3, 4, 6, 7], [[0.0, None, None]] * 8

    monkeypatch.setattr(Search, "_score_layers", score_layers)

    def search():
        original = {"a": {"losses": [0.0]}}
        return Search(
            None,
            [],
            original,
            memory,
            0.3,
            space,
            tmp_path,
            "k" * 32,
            8,
            1,
            0,
            lambda _: None,
            lambda *_: None,
        )()

    first = search()
    best = first["candidates"][first["best"]]
    assert (best["full_layers"][-1], best["sliding_window"], best["num_sink_tokens"]) == (5, 32, 4)
    assert best["lost"] == 0 == min(row["lost"] for row in first["candidates"])
    assert all(row["share"] <= 0.3 for row in first["candidates"])
    count = landscape.scored
    assert search() == first
    assert landscape.scored == count
    (file,) = tmp_path.glob("candidates-*.json")
    stored = json.loads(file.read_text())
    stored["scores"].popitem()  # as a killed run leaves it
    file.write_text(json.dumps(stored))
    assert search() == first
    assert landscape.scored == count + 1


class ScorerOfCopies:
    """In place of `LayerScorer`: layers 1 and 2 save the same, layer 6 saves half of it, and the others nothing."""

    layers = 8
    rounds: ClassVar[list[list[int]]] = []

    def __init__(self, *_, **__):
        type(self).rounds = []

    def __call__(self, full_layers=(), *, progress):
        self.rounds.append(list(full_layers))
        saved = np.zeros((4, 8))
        saved[:, [1, 2]] = 0.0 if {1, 2} & set(full_layers) else 1.0
        saved[:, 6] = 0.5
        saved[:, list(full_layers)] = 0.0
        progress(9, 9)
        return NLLScores(saved, np.full(4, 2.0), 64, 0, False, tuple(full_layers))


@pytest.mark.parametrize(("scorings", "expected", "rounds"), [
    (8, [1, 6, 0], [[], [1], [1, 6]]),  # of two layers that do the same one is kept
    (2, [1, 2, 6], [[], [1, 2]]),  # two of the three at once
])  # fmt: skip
def test_layers_are_scored_again_beside_the_best(source, tmp_path, monkeypatch, scorings, expected, rounds):
    memory = Memory(source.config, source.hf_config, 1024)
    monkeypatch.setattr(search_module, "LayerScorer", ScorerOfCopies)
    monkeypatch.setattr(search_module, "SCORINGS", scorings)
    space = find_space(memory, 0.45, [64])
    assert (space.most_by_loss, space.num_scorings) == (3, len(rounds))
    steps = []
    rest = (8, 1, 0, lambda _: None, lambda done, total: steps.append(done / total))
    search = Search(None, [], {}, memory, 0.45, space, tmp_path, "k" * 32, *rest)
    search._score_layers()
    assert search._order[:3] == expected
    assert sorted(search._order) == list(range(8))
    assert ScorerOfCopies.rounds == rounds
    assert steps == [(i + 1) / len(rounds) for i in range(len(rounds))]
    worth = [score[0] for score in search._layer_scores]
    assert (worth[1], worth[2], worth[6]) == (1, 0 if scorings == 8 else 1, 0.5)
