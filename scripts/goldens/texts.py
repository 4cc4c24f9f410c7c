"""What transformers makes of drawn chat templates, messages and tokenizer files.

A case has the files of a model's folder, the tokens that have a name, the ids that end a reply, and chats: messages
with tools or documents, and their text (null where transformers refuses them). Left out is where we read a second file
and transformers does not: a `special_tokens_map.json` beside a list of added tokens, `config.json` beside a
generation_config.json without ends.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import transformers
import yaml
from transformers import AutoTokenizer, GenerationConfig

from scripts.goldens.cases import GOLDEN, write_cases

OUT = GOLDEN / "texts.json"
SEED, COUNT, CHATS = 0, 40, 5
PARTS = yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text())
WORDS, TOKENS = PARTS["words"], PARTS["tokens"]


def draw_template(rng: random.Random) -> str:
    heads = "".join(rng.sample(PARTS["heads"], rng.randrange(4)))
    body = rng.choice(PARTS["bodies"])
    return f"{heads}{{% for m in messages %}}{body}{{% endfor %}}{rng.choice(PARTS['tails'])}"


def draw_message(rng: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": rng.choice(PARTS["roles"])}
    kind = rng.randrange(6)
    if kind < 3:
        message["content"] = rng.choice([" hi ", "1 < 2 & é", "", "<s>", "{{ 1 }}"])
    elif kind == 3:
        message["content"] = [{"type": "text", "text": "see"}, {"type": "image"}]
    elif kind == 4:
        message["tool_calls"] = [PARTS["call"]]
        if rng.random() < 0.5:
            message["content"] = None
    else:
        message[rng.choice(["reasoning_content", "thinking", "reasoning"])] = "because"
        message["content"] = "so"
    return message


def draw_tokens(rng: random.Random, whole_names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in rng.sample(TOKENS, rng.randrange(len(TOKENS))):
        text = rng.choice(WORDS)
        whole = {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": False, "rstrip": False}
        whole |= {"single_word": False, "special": True}
        found[name] = whole if name in whole_names and rng.random() < 0.5 else text
    return found


def draw_files(rng: random.Random) -> dict[str, Any]:
    files: dict[str, Any] = {"config.json": {"model_type": "llama"}}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **draw_tokens(rng, TOKENS[:5])}
    if rng.random() < 0.3:
        settings["extra_special_tokens"] = {"image_token": "<image>", "call_token": "<call>"}
    if rng.random() < 0.3:
        settings["additional_special_tokens"] = ["<call>"]
    if rng.random() < 0.5:
        decoder = {"2": {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "special": True}}
        decoder["2"]["single_word"] = False
        settings["added_tokens_decoder"] = decoder
    elif rng.random() < 0.7:
        found = draw_tokens(rng, TOKENS)
        files["special_tokens_map.json"] = {
            key: {k: v for k, v in value.items() if k not in ("__type", "special")}
            if isinstance(value, dict)
            else value
            for key, value in found.items()
        }
    template = draw_template(rng)
    place = rng.randrange(4)
    if place == 0:
        files["chat_template.jinja"] = template
    elif place == 1:
        settings["chat_template"] = [
            {"name": "tool_use", "template": draw_template(rng)},
            {"name": "default", "template": template},
        ]
    else:
        settings["chat_template"] = template
    files["tokenizer_config.json"] = settings
    said = rng.choice([None, 2, [2, 7], [0]])
    if rng.random() < 0.3:
        files["generation_config.json"] = {"eos_token_id": rng.choice([2, [7, 2], 5])}
    if rng.random() < 0.7:
        files["config.json"]["eos_token_id"] = said
    else:
        files["config.json"]["text_config"] = {"eos_token_id": said}
    return files


def draw_chat(rng: random.Random) -> dict[str, Any]:
    chat: dict[str, Any] = {
        "conversation": [draw_message(rng) for _ in range(rng.randrange(1, 4))],
        "add_generation_prompt": rng.random() < 0.7,
    }
    if rng.random() < 0.3:
        chat["tools"] = [PARTS["tool"]]
    if rng.random() < 0.3:
        chat["documents"] = [{"title": "A", "text": "b"}]
    return chat


def expected(files: dict[str, Any], chats: list[dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
        tokenizers.Tokenizer(words).save(f"{folder}/tokenizer.json")
        for name, content in files.items():
            Path(folder, name).write_text(content if isinstance(content, str) else json.dumps(content))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts: list[str | None] = []
        for chat in chats:
            try:
                texts.append(tokenizer.apply_chat_template(tokenize=False, **chat))
            except (jinja2.TemplateError, TypeError, ValueError, LookupError):
                texts.append(None)
        try:
            generation = GenerationConfig.from_pretrained(folder)
        except OSError:
            generation = GenerationConfig.from_model_config(files["config.json"])
        ends = generation.eos_token_id
    ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return {"tokens": tokenizer.special_tokens_map, "ends": ids, "texts": texts}


def write_texts(given) -> None:
    rng, cases = random.Random(SEED), []
    for _ in range(COUNT):
        files, chats = draw_files(rng), [draw_chat(rng) for _ in range(CHATS)]
        cases.append({"files": files, "chats": chats, **expected(files, chats)})
    write_cases(OUT, cases, transformers=transformers.__version__, seed=SEED)
    refused = sum(text is None for case in cases for text in case["texts"])
    print(f"{OUT}: {len(cases)} folders of {CHATS} chats, {refused} chats refused")
