"""What prompts `select` and `compare` draw: needles, or chains of several numbers of hops in turn."""

import json

import pytest
from command_line import fails
from tiny_models import BYTES, byte_checkpoint, make, with_template

from swa_jax.base.errors import ConfigError
from swa_jax.cli.options import PromptKind
from swa_jax.cli.select_options import Examples
from swa_jax.data.chains import chain_tokenizer
from swa_jax.data.tokenizer import load_tokenizer
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


def test_needles_go_through_the_chat_template_of_a_model_that_has_one(tmp_path, byte_tokenizer):
    plain = byte_checkpoint(tmp_path, byte_tokenizer, make("Fw", sliding_window=16))
    talking = with_template(plain, tmp_path, "<{{ messages[0].content | trim }}>{{ enable_thinking }}:")
    tokenizer = load_tokenizer(plain)
    (asked,) = PromptKind(400).of(talking).draw(tokenizer, 1, seed=3)
    (bare,) = PromptKind(400, chat=False).of(talking).draw(tokenizer, 1, seed=3)
    (without,) = PromptKind(400).of(plain).draw(tokenizer, 1, seed=3)
    assert bare == without
    assert [len(one.prompt) + len(one.answer) for one in (asked, bare)] == [400, 400]
    text = tokenizer.decode(asked.prompt)
    assert text.startswith("<")
    assert text.endswith(f"{asked.meta['key']}?>False:")  # a model that would think first is told not to
    assert tokenizer.decode([asked.answer[place] for place in asked.value]) == asked.references[0]
    kinds = [PromptKind(400).of(folder) for folder in (talking, plain)]
    assert [kind.settings()["chat"] for kind in kinds] == [True, False]
    assert [str(kind).endswith(", in the model's chat template") for kind in kinds] == [True, False]
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptKind(400, chat=True).of(plain)


def test_prompts_of_a_file_go_through_the_template_too(tmp_path, byte_tokenizer):
    talking = with_template(
        byte_checkpoint(tmp_path, byte_tokenizer, make("Fw")), tmp_path, "<{{ messages[0].content | trim }}>"
    )
    tokenizer, file = load_tokenizer(talking), tmp_path / "qa.jsonl"
    file.write_text(json.dumps({"prompt": "What is it? ", "answer": " 7"}))
    for chat, expected in ((None, ("<What is it?>", "7")), (False, ("What is it? ", " 7"))):
        options, kind = Examples(examples=1, prompts=file), PromptKind(100, chat=chat)
        (example,), about = options.draw(kind, talking, tokenizer, BYTES)
        assert (tokenizer.decode(example.prompt), tokenizer.decode(example.answer)) == expected
        assert example.value is None
        assert about.endswith(", in the model's chat template") == (chat is None)


def test_text_lies_between_the_statements_where_it_is_named(words, tmp_path):
    (tmp_path / "text").write_text("the cat sat on the mat\n" * 200)
    (example,) = PromptKind(128, haystack=tmp_path / "text", chains="hops=2").draw(words, 1, seed=0)
    assert "cat sat" in words.decode(example.prompt)
    (tmp_path / "text").write_text(" \n")
    with pytest.raises(ConfigError, match=f"^there are no words in {tmp_path}/text: name text files with"):
        PromptKind(128, haystack=tmp_path / "text", chains="hops=2").draw(words, 1, seed=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chains": "hops=1", "chat": True}, "--chat is for needles"),
        ({"chains": "hops=1", "keys": 4}, "--keys is for needles, which --chains replaces"),
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
