"""Prompts of chains, and the compiled model that solves them: there the contrasts between patterns are known."""

import json

import numpy as np
import pytest
from command_line import fails, run
from compiled_chains import CLASSES, LAYERS, PROMPT_LAYERS, WINDOW_SIZE, compiled_chains, small_tokenizer

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.folder import save_model
from swa_jax.cli.options import PromptKind
from swa_jax.data.chains import ChainWords
from swa_jax.data.lessons import write_tokenizer
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate.chains import ChainCell, chain_examples, chain_grid, chain_scores
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.pattern import AttentionPattern

GAP = 2 * WINDOW_SIZE


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return compiled_chains(tokenizer)


def examples_of(tokenizer, hops, count=32, **options):
    cell = ChainCell(**{"hops": hops, "rivals": 3, "length": 128} | options)
    return chain_examples(tokenizer, cell, num_examples=count, gap=GAP)


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("depth", [None, 0.0, 0.5, 1.0])
def test_statements_stand_apart_and_where_they_should(tokenizer, hops, depth):
    for example in examples_of(tokenizer, hops, count=8, depth=depth):
        assert len(example.prompt) + len(example.answer) == 128
        places = [*example.meta["statements"], len(example.prompt) - 2]
        assert (np.diff(places) >= GAP).all()
        words = [tokenizer.decode([token]).strip() for token in example.prompt]
        value = example.references[0].split()[1]
        for place in example.meta["statements"]:
            assert (words[place], words[place + 2]) == ("=", value)
            value = words[place + 1]
        assert words[-2:] == ["?", value]
        assert example.value is None  # the name that was asked for is a part of the answer, not given
        assert tokenizer.decode(example.answer).strip() == f"= {example.references[0]}"
        assert words.count("=") == 4 * hops
        if depth == 0:
            assert places[0] == 0
        if depth == 1:
            assert (np.diff(places) == GAP).all()


def test_the_rivals_chains_are_whole(tokenizer):
    """Every name but the asked chain's last is given once, before it is referred to."""
    for example in examples_of(tokenizer, 3, count=8):
        words = [tokenizer.decode([token]).strip() for token in example.prompt]
        given = {}
        for i in np.flatnonzero(np.array(words) == "=").tolist():
            assert words[i + 2].isdigit() or words[i + 2] in given
            given[words[i + 1]] = words[i + 2]
        assert sum(value.isdigit() for value in given.values()) == 4
        assert len(given) == 12


def test_sums_ask_for_two_numbers(tokenizer):
    for example in examples_of(tokenizer, 2, count=8, sums=True):
        words = [tokenizer.decode([token]).strip() for token in example.prompt]
        given = {words[i + 1]: words[i + 2] for i in range(len(words)) if words[i] == "="}
        assert words[-4] == "?"
        total = 0
        for name in (words[-3], words[-1]):
            while not name.isdigit():
                name = given[name]
            total += int(name)
        assert example.references == [f"{words[-3]} + {words[-1]} {total}"]


def test_the_grid_has_every_combination():
    cells = chain_grid((1, 2), (0, 3), (64, 128), (0.0, 1.0))
    assert len(set(cells)) == len(cells) == 16
    assert cells[0] == ChainCell(1, 0, 64, 0.0)


def patterned(layers) -> AttentionPattern:
    kinds = tuple("full_attention" if i in layers else "sliding_attention" for i in range(LAYERS))
    return AttentionPattern(kinds, WINDOW_SIZE, full_attention_decode=True)


def test_the_compiled_model_tells_patterns_apart(tokenizer, model):
    """Full-attention decode alone gives one hop; every further hop needs a layer that sees the whole prompt."""
    words = ChainWords.of(tokenizer)

    def found(layers) -> list[list[bool]]:
        pattern = patterned(layers)
        return [score_answers(model, some, batch_size=32, pattern=pattern).right.tolist() for some in prompts]

    prompts = [examples_of(tokenizer, hops) for hops in (1, 2, 3)]
    # The class of the name whose number the chain's last statement takes over: its look-up is in layer 5 or 6.
    last = [
        words.names.tolist().index(example.prompt[example.meta["statements"][1] + 1]) % CLASSES
        for example in prompts[2]
    ]
    in_five = [c < 3 for c in last]
    assert 0.5 < np.mean(in_five) < 1
    everything, nothing = [True] * 32, [False] * 32
    assert found(range(LAYERS)) == [everything] * 3
    assert found(()) == [everything, nothing, nothing]
    assert found(PROMPT_LAYERS) == [everything] * 3
    assert found((2, 5)) == [everything, everything, in_five]
    assert found((0, 2, 4, 6)) == [everything, everything, [not five for five in in_five]]
    assert found((1, 3, 5, 7))[2] == nothing
    assert found((3, 7)) == [everything, nothing, nothing]


def test_scores_come_by_cell(tokenizer, model):
    cells = chain_grid((1, 2), (3,), (128,))
    drawn = {cell: chain_examples(tokenizer, cell, num_examples=32, gap=GAP) for cell in cells}
    one, two = chain_scores(model.with_pattern(patterned(())), drawn, batch_size=32)
    assert (one.cell, one.score, one.n) == (cells[0], 1.0, 32)
    assert (two.cell, two.score) == (cells[1], 0.0)
    assert one.interval is not None
    assert 0.85 < one.interval[0] < one.interval[1] == 1
    assert two.answer_nll > one.answer_nll + 0.1


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (ChainCell(3, 3, 64), "3 hops 16 tokens apart and 3 rivals take 80 tokens, more than length = 64"),
        (ChainCell(1, 3, 64, 1.5), "from 0 to 1, got 1.5"),
        (ChainCell(1, 0, 64, sums=True), "a sum needs a rival"),
        (ChainCell(3, 40, 4096), "41 chains of 3 hops"),
    ],
)
def test_cells_that_cannot_be_are_refused(tokenizer, cell, sentence):
    with pytest.raises(ConfigError, match=sentence):
        chain_examples(tokenizer, cell, num_examples=1, gap=GAP)


def test_chains_on_the_command_line(tokenizer, model, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "swa_jax.evaluate.chains.chain_examples", lambda *a, **k: drawn.append(chain_examples(*a, **k)) or drawn[-1]
    )
    write_tokenizer(tokenizer, tmp_path / "tokenizer")
    save_model(model, tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    options = ("--hops", "1,2", "--lengths", 128, "--gap", GAP, "--examples", 32, "--batch-size", 32)
    patterns = ("--pattern", "full", "--pattern", "window", "--window", WINDOW_SIZE, "--fa-decode")
    out = tmp_path / "results"
    output = run("evaluate", "chains", tmp_path / "model", *options, *patterns, "--out", out)
    assert "Chains: questions for the number at a chain's end answered, %" in output
    rows = json.loads((out / "results.json").read_text())["chains"]
    assert [(row["name"], row["hops"], row["score"]) for row in rows] == [
        ("full", 1, 1),
        ("full", 2, 1),
        ("window", 1, 1),
        ("window", 2, 0),
    ]
    # Others than those that `select --chains` chooses by.
    chosen_by = PromptKind(128, chains=f"hops=1-2,gap={GAP}").draw(load_tokenizer(tmp_path / "model"), 64, 0)
    assert not {tuple(e.prompt) for e in chosen_by} & {tuple(e.prompt) for cell in drawn[:2] for e in cell}
    refused = fails("evaluate", "chains", tmp_path / "model", "--lengths", 64, "--rivals", 30)
    assert "raise the length" in refused
    assert "--rivals is 'x': give whole numbers from 0 on" in fails(
        "evaluate", "chains", tmp_path / "model", "--rivals", "x"
    )
