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
    kind = PromptKind(128, hops="1,3", rivals=2, gap=16)
    drawn = kind.draw(words, 5, seed=4)
    one, three = (
        chain_examples(words, ChainCell(hops, 2, 128), num_examples=3, gap=16, seed=4) for hops in (1, 3)
    )
    assert [example.prompt for example in drawn] == [
        example.prompt for example in (one[0], three[0], one[1], three[1], one[2])
    ]
    assert kind.settings() == {"hops": "1,3", "rivals": 2, "gap": 16, "haystack": "filler words"}
    assert "chains of 1,3 hops, 2 rivals, gap 16" in str(kind)


def test_text_lies_between_the_statements_where_it_is_named(words, tmp_path):
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 200)
    (example,) = PromptKind(128, haystack=tmp_path / "text", hops="2").draw(words, 1, seed=0)
    assert "cat sat" in words.decode(example.prompt)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rivals": 2}, "--rivals is of chains: give --hops too"),
        ({"gap": 8}, "--gap is of chains"),
        ({"hops": "1", "keys": 4}, "--keys is of needles, which --hops replaces"),
    ],
)
def test_what_does_not_belong_together_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PromptKind(128, **options)


def test_on_the_command_line(tmp_path):
    out = ("--out", tmp_path / "out")
    assert "--gap is of chains" in fails("compare", "no-model", "--gap", 8, "--window", 8, *out)
