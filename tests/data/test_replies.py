"""What becomes text around generation: replies as they come, chat templates, files of prompts and of replies."""

import json

import numpy as np
import pytest

from swa_jax.base.errors import ConfigError
from swa_jax.data import chat
from swa_jax.data.chat import chat_text, chat_tokens, load_chat_template, prompt_tokens
from swa_jax.data.prompt_file import Prompt, ReplyFile, read_prompts
from swa_jax.data.reply_text import ReplyText
from swa_jax.data.tokenizer import load_tokenizer

# ---- the text of a reply ----

TEXT = "Grüße, 世界! \U0001f600 one STOP two STO"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), TEXT),
        (("STOP",), TEXT[: TEXT.index("STOP")]),
        (("two", "STOP"), TEXT[: TEXT.index("STOP")]),
        (("界!",), "Grüße, 世"),
        (("STOPS",), TEXT),
        (("G",), ""),
    ],
)
def test_a_reply_is_whole_characters_up_to_its_stop_string(tokenizer, stop, expected):
    tokens = tokenizer.encode(TEXT)
    for size in (1, 3, 100):
        reply = ReplyText(tokenizer, stop)
        shown = [reply.push(tokens[i : i + size]) for i in range(0, len(tokens), size)]
        assert "".join([*shown, reply.close()]) == reply.text == expected
        assert reply.stopped == (expected != TEXT)
        assert "\ufffd" not in reply.text


def test_what_may_be_a_stop_string_is_held_back(tokenizer):
    reply = ReplyText(tokenizer, ["STOP"])
    assert reply.push(tokenizer.encode("a STO")) == "a "
    assert reply.push(tokenizer.encode("NE")) == "STONE"
    assert reply.push(tokenizer.encode("ST")) == ""
    assert reply.close() == "ST"
    assert not reply.stopped


def test_a_special_token_may_be_a_stop_string(tokenizer):
    """It is no part of the text, as of chat models whose files do not name the end of a turn."""
    reply = ReplyText(tokenizer, ["STOP", "<eos>"])
    assert reply.push(tokenizer.encode("one<eos>two")) == "one"
    assert (reply.close(), reply.stopped, reply.tokens[3:]) == ("", True, [tokenizer.eos_id])


def test_random_cuts_give_one_text(tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = "".join(rng.choice(list("abAB é世"), 30))
        stop = ["".join(rng.choice(list("abAB"), rng.integers(1, 4))) for _ in range(2)]
        tokens, reply, shown = tokenizer.encode(text), ReplyText(tokenizer, stop), ""
        while tokens:
            n = int(rng.integers(1, 6))
            shown += reply.push(tokens[:n])
            tokens = tokens[n:]
        shown += reply.close()
        # The stop string that is complete first ends the reply; of two that are, the one that begins first.
        first = min((text.find(s) + len(s) for s in stop if s in text), default=None)
        begins = [text.find(s) for s in stop if s in text and text.find(s) + len(s) == first]
        assert shown == reply.text == (text if first is None else text[: min(begins)])


def test_half_a_character_is_shown_at_the_end_only(tokenizer):
    tokens = tokenizer.encode("é")[:1]
    reply = ReplyText(tokenizer)
    assert reply.push(tokens) == ""
    assert reply.close() == tokenizer.decode(tokens) == "\ufffd"


def test_end_tokens_are_those_of_the_first_file_that_names_any(tmp_path, byte_tokenizer):
    """As in transformers: generation_config.json, then config.json; the tokenizer's own always ends a reply."""
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer.read_bytes())
    for files, ends in (
        ({"config": {"eos_token_id": [2, 179]}}, (256, 2, 179)),
        ({"config": {"eos_token_id": [2, 179]}, "generation_config": {"eos_token_id": 3}}, (256, 3)),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": None}}, (256, 2)),
        ({"config": {"text_config": {"eos_token_id": 5}}, "generation_config": {}}, (256, 5)),
        ({"generation_config": {"eos_token_id": [256, 9, 7, -1, 257]}}, (256, 9, 7)),
        ({"special_tokens_map": {"eos_token": "b"}, "config": {}}, (65,)),
        ({"special_tokens_map": {"eos_token": "b"}, "tokenizer_config": {"eos_token": "c"}}, (65,)),
        (
            {
                "special_tokens_map": {"eos_token": "b", "bos_token": "x"},
                "tokenizer_config": {"eos_token": "c", "added_tokens_decoder": {}},
            },
            (66,),
        ),
    ):
        for name in ("config", "generation_config", "special_tokens_map", "tokenizer_config"):
            (tmp_path / f"{name}.json").write_text(json.dumps(files.get(name, {})))
        assert load_tokenizer(tmp_path).end_ids == ends, files
    (tmp_path / "tokenizer_config.json").unlink()
    for value in ("7", [7, "8"], True, [1.0]):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(ConfigError, match=r"eos_token_id in .*/config.json must be a token id or a list of them"):
            load_tokenizer(tmp_path)


# ---- chat templates ----

TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {{- bos_token + message['role'] + ': ' + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% generation %}{% endgeneration %}{% endif %}"""
MESSAGES = [{"role": "system", "content": " be <short> "}, {"role": "user", "content": "hi & bye"}]
RENDERED = "[system: be <short><eos>[user: hi & bye<eos>assistant:"


def config_with(folder, template, **keys) -> None:
    tokens = {"bos_token": "[", "eos_token": {"content": "<eos>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens | {"chat_template": template} | keys))


def test_a_template_comes_from_either_file(tmp_path, tokenizer):
    assert load_chat_template(tmp_path) is None
    for template in (TEMPLATE, [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]):
        config_with(tmp_path, template)
        found = load_chat_template(tmp_path)
        assert found is not None
        assert found.render(MESSAGES) == RENDERED
    tokens = chat_tokens(tokenizer, found, MESSAGES)
    assert tokens.count(tokenizer.eos_id) == 2
    assert tokenizer.decode(tokens) == RENDERED.replace("<eos>", "")
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}{{ thinking }}")
    found = load_chat_template(tmp_path)
    assert found is not None
    assert found.render(MESSAGES, thinking="!") == json.dumps(MESSAGES) + "!"


def test_a_chat_may_end_inside_a_reply(tmp_path):
    config_with(tmp_path, TEMPLATE)
    text = chat_text(tmp_path)
    assert text(MESSAGES) == RENDERED
    begun = [*MESSAGES, {"role": "assistant", "content": " So be"}]
    assert text(begun, add_generation_prompt=False) == RENDERED.replace("assistant:", "[assistant: So be")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template .*: leave out --chat$"):
        chat_text(tmp_path)


def test_a_template_cannot_reach_python(tmp_path):
    for template in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        config_with(tmp_path, template)
        found = load_chat_template(tmp_path)
        assert found is not None
        with pytest.raises(ConfigError, match="refuses these messages"):
            found.render(MESSAGES)


def test_what_a_template_refuses(tmp_path):
    config_with(tmp_path, TEMPLATE)
    found = load_chat_template(tmp_path)
    assert found is not None
    with pytest.raises(ConfigError, match=r"tokenizer_config.json refuses these messages: no tools here"):
        found.render([{"role": "tool", "content": "x"}])
    for wrong in (
        "x",
        {"role": 1, "content": "x"},
        {"content": "x"},
        {"role": "user"},
        {"role": "user", "contents": "x"},
    ):
        with pytest.raises(ConfigError, match=r"messages\[1\] must be"):
            found.render([MESSAGES[0], wrong])
    for wrong in ("x", {"name": "add"}, [1]):
        with pytest.raises(ConfigError, match="tools must be a list of objects"):
            found.render(MESSAGES, tools=wrong)
    for template, sentence in (
        ("{% if %}", "cannot be read: Expected an expression"),
        (7, r"chat_template in .* must be a text, or a list of named ones, got 7"),
        ([{"name": "rag", "template": "x"}], "must have one template named 'default', got rag"),
        ([{"name": "default"}], "must be a text, or a list of named ones"),
        ([], "must have one template named 'default', got none"),
    ):
        config_with(tmp_path, template)
        with pytest.raises(ConfigError, match=sentence):
            load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    with pytest.raises(ConfigError, match=r"chat_template.jinja is not UTF-8: invalid start byte \(byte 15\)"):
        load_chat_template(tmp_path)


TWICE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ 1 / 0 }}", "refuses these messages: division by zero"),
        ("{{ range(10**9) }}", "refuses these messages: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses these messages: maximum recursion depth"),
        ("{{ 10**(10**8) }}", "cannot be read: it takes longer than 0.5 s"),
        ("{{ 10**(10**8 * messages | length) }}", "refuses these messages: it takes longer than 0.5 s"),
        (TWICE, "refuses these messages: it takes longer than 0.5 s"),
        ("{{ messages[0].content * 10**10 }}", "refuses these messages: it needs more than 512 MB of memory"),
        ("{{ messages[0].content * 10**7 }}", "refuses these messages: it writes 120000000 characters"),
        ("{{ '%5000000000d' % 1 }}", "refuses these messages: "),
        ("{{ '\\ud83d' }}", "refuses these messages: 'utf-8' codec can't encode"),
        ("{{ (" * 2000, "cannot be read: "),
        ("{{ messages[0].content.nothing.at_all }}", "refuses these messages: 'str object' has no attribute"),
    ],
)
def test_a_template_has_limits(tmp_path, monkeypatch, template, sentence):
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    monkeypatch.setattr(chat, "MEMORY", 1 << 29)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=f"the chat template of .*jinja {sentence}"):
        load_chat_template(tmp_path).render(MESSAGES)


def test_named_templates_lie_in_a_folder_beside_the_default_one(tmp_path):
    """So transformers 5 writes them; its files come before those in tokenizer_config.json."""
    config_with(tmp_path, [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old"}])
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    with pytest.raises(ConfigError, match="must have one template named 'default', got tool_use"):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("plain")
    found = load_chat_template(tmp_path)
    assert (found.render(MESSAGES), found.render(MESSAGES, tools=[{}])) == ("plain", "with tools")


def test_tools_and_documents_come_with_a_prompt(tmp_path, tokenizer):
    """As the lines of files have them; of two templates, messages with tools take "tool_use"."""
    plain, tools = "{{ documents | tojson }}", "{{ tools | tojson }}{{ documents is none }}"
    config_with(tmp_path, [{"name": "tool_use", "template": tools}, {"name": "default", "template": plain}])
    for given, expected in (
        ({"documents": [{"title": "a"}]}, '[{"title": "a"}]'),
        ({"tools": [{"name": "b"}]}, '[{"name": "b"}]True'),
    ):
        prompt = Prompt(None, MESSAGES, {"messages": MESSAGES} | given)
        (tokens,) = prompt_tokens(tmp_path, tokenizer, [prompt], chat=False)
        assert tokenizer.decode(tokens) == expected


# ---- files ----


def test_prompts_from_a_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '"one\\ntwo"\n\n{"prompt": "three\u2028", "answer": 3}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    messages = [{"role": "user", "content": "x"}]
    assert read_prompts(file) == [
        Prompt("one\ntwo", None, None, f"{file}, line 1"),
        Prompt("three\u2028", None, {"prompt": "three\u2028", "answer": 3}, f"{file}, line 3"),
        Prompt(None, messages, {"messages": messages}, f"{file}, line 4"),
    ]
    plain = tmp_path / "prompts.txt"
    plain.write_bytes(b'\xef\xbb\xbf"one"\r\ntwo \n')  # as Windows writes texts
    assert read_prompts(plain) == [
        Prompt(text, None, None, f"{plain}, line {number}") for number, text in enumerate(('"one"', "two "), 1)
    ]
    file.write_text('{"prompt": "a", "messages": [1]}')
    with pytest.raises(ConfigError, match=r"line 1 has both 'prompt' and 'messages': one of them is expected$"):
        read_prompts(file)
    for line in ("{}", "[1]", '{"prompt": 3}', '{"messages": []}'):
        file.write_text('"fine"\n' + line + "\n")
        with pytest.raises(ConfigError, match=r"prompts.jsonl, line 2 is not a prompt: a text, "):
            read_prompts(file)
    for line in ("one", '"a \\ud83d b"', "[" * 200_000, '{"prompt": "a", "n": ' + "7" * 5000 + "}"):
        file.write_text('"fine"\n' + line + "\n")
        with pytest.raises(ConfigError, match=r"prompts.jsonl, line 2 is not valid JSON.*; a text, .* is expected"):
            read_prompts(file)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(file)
    with pytest.raises(ConfigError, match=r"the prompts in .*none.jsonl cannot be read: No such file or directory$"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"the prompts in .* cannot be read: Is a directory$"):
        read_prompts(tmp_path)
    file.write_bytes(b'"a"\n\xff')
    with pytest.raises(ConfigError, match=r"prompts.jsonl is not UTF-8: invalid start byte \(byte 5\)$"):
        read_prompts(file)


def test_replies_go_on_after_any_cut(tmp_path):
    """A file that was cut at any byte gives the whole lines before the cut, and ends as if it never had been."""
    settings = {"temperature": 1.0}
    replies = [{"prompt": p, "sample": s, "text": f"ü{p}\u2028\x85{s}\n"} for p in range(2) for s in range(2)]
    file = ReplyFile(tmp_path / "all.jsonl", settings)
    for reply in replies[::-1]:
        file.add(reply)
    whole = (tmp_path / "all.jsonl.unfinished").read_bytes()
    file.finish()
    expected = (tmp_path / "all.jsonl").read_text()
    assert [json.loads(line) for line in expected.split("\n")[:-1]] == replies
    for cut in range(len(whole) + 1):
        out = tmp_path / f"cut{cut}.jsonl"
        out.with_name(out.name + ".unfinished").write_bytes(whole[:cut])
        file = ReplyFile(out, settings)
        assert len(file.replies) == max(whole[:cut].count(b"\n") - 1, 0)
        for reply in replies:
            if (reply["prompt"], reply["sample"]) not in file.replies:
                file.add(reply)
        file.finish()
        assert out.read_text() == expected
        assert not out.with_name(out.name + ".unfinished").exists()
    first, second, *others = whole.split(b"\n")
    for damage in (b"{", b"[]", b"{}", b'{"prompt": "0", "sample": 0}', b"[" * 9999, b"\xff", second + second):
        out = tmp_path / f"damaged{len(damage)}{damage[:1].hex()}.jsonl"
        out.with_name(out.name + ".unfinished").write_bytes(b"\n".join([first, damage, *others]))
        file = ReplyFile(out, settings)
        assert len(file.replies) == 3
    with pytest.raises(ConfigError, match=r"all.jsonl is there already"):
        ReplyFile(tmp_path / "all.jsonl", settings)
    (tmp_path / "other.jsonl.unfinished").write_bytes(whole)
    with pytest.raises(ConfigError, match=r"holds replies of other content \(other model, prompts or settings\)"):
        ReplyFile(tmp_path / "other.jsonl", {"temperature": 0.0})
    assert (tmp_path / "other.jsonl.unfinished").read_bytes() == whole
