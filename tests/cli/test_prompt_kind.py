"""What prompts `select` and `compare` draw: needles, or chains of several numbers of hops in turn."""

import pytest
from command_line import fails

from swa_jax.cli.options import PromptKind
from swa_jax.data.chains import chain_tokenizer
from swa_jax.errors import ConfigError
from swa_jax.evaluate.chains import ChainCell, chain_examples


@pytest.fixture(scope="module")
def words():
    return chain_tokenizer(texts=["the cat sat on the mat"] * 50)


def test_chains_of_each_number_of_hops_come_in_turn(words):
    kind = PromptKind(128, chains="hops=1-3,rivals=2,gap=16")
    drawn = kind.draw(words, 5, seed=4)
    one, two, three = (
        chain_examples(words, ChainCell(hops, 2, 128), num_examples=2, gap=16, seed=4) for hops in (1, 2, 3)
    )
    assert [example.prompt for example in drawn] == [
        example.prompt for example in (one[0], two[0], three[0], one[1], two[1])
    ]
    assert kind.settings() == {"chains": "hops=1-3,rivals=2,gap=16", "haystack": "filler words"}
    assert "chains, hops=1-3,rivals=2,gap=16, filler words between" in str(kind)


def test_rivals_and_gap_may_be_left_out(words):
    (example,) = PromptKind(128, chains="hops=2").draw(words, 1, seed=0)
    assert example.meta["hops"] == 2
    assert example.meta["rivals"] == 3


def test_text_lies_between_the_statements_where_it_is_named(words, tmp_path):
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 200)
    (example,) = PromptKind(128, haystack=tmp_path / "text", chains="hops=2").draw(words, 1, seed=0)
    assert "cat sat" in words.decode(example.prompt)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chains": "hops=1", "keys": 4}, "--keys is of needles, which --chains replaces"),
        ({"chains": "1,2,3"}, "--chains is '1,2,3': write it like hops=1-3"),
        ({"chains": "hops=3-1"}, "--chains is 'hops=3-1'"),
        ({"chains": "hops=1,gap"}, "--chains is 'hops=1,gap'"),
    ],
)
def test_what_does_not_belong_together_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PromptKind(128, **options)


def test_on_the_command_line(tmp_path):
    out = ("--out", tmp_path / "out")
    assert "--chains is 'x'" in fails("compare", "no-model", "--chains", "x", "--window", 8, *out)
