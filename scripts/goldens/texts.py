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
from transformers import AutoTokenizer, GenerationConfig

from scripts.goldens.cases import GOLDEN

OUT = GOLDEN / "texts.json"
SEED, COUNT, CHATS = 0, 40, 5
WORDS = ("<unk>", "<s>", "</s>", "<pad>", "<image>", "<call>", "<turn>", "hi")
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "image_token", "turn_token")
HEADS = (
    "{{ bos_token }}",
    "{%- if tools %}{{ tools | tojson }}|{% endif %}",
    "{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}{% endif %}",
    "{% if documents is none %}no documents{% else %}{% for d in documents %}{{ d.title }}: {{ d['text'] }}{% endfor %}"
    "{% endif %}",
    "{% if documents is defined %}D{% endif %}{% if date is defined %}T{% endif %}",
    "{{ image_token }}{{ turn_token }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ messages | length }}{{ messages[0].keys() | list | sort | join(',') }}",
    "{{ cls_token | default('none') }}{{ unk_token }}",
    "{{ dict(a=1) | tojson }}",
)
BODIES = (
    "[{{ m.role }}]{{ m.content }}",
    "[{{ m['role'] }}]{{ m['content'] | trim }}{{ eos_token }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{{ image_token if "
    "p.type == 'image' }}{% endfor %}{% endif %}",
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}{% elif m.content is defined %}{{ m.content }}{% else %}nothing{% endif %}",
    "{% if 'content' in m %}{{ m.content }}{% endif %}"
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}",
    "{% if m.thinking is defined %}({{ m.thinking }}){% endif %}{{ m.get('content', '') }}",
    "{% if m.role == 'tool' or m.role == 'ipython' %}{{ m.content | tojson }}{% continue %}{% endif %}{{ m.content }}",
    "{% if m.role == 'developer' %}{{ raise_exception('no developers') }}{% endif %}{{ m.role + ': ' + m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}",
    "{{ m.content }}{% if loop.index0 == 1 %}{% break %}{% endif %}",
    "  \n  {%- if loop.first %}\n    first {{ m.role }}\n  {% endif %}\n{{ m.content[:2] }}",
)
TAILS = ("{% if add_generation_prompt %}reply:{% endif %}", "{{ 'reply' if add_generation_prompt }}", "", "\n")
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & c", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "zwei é"}}}


def draw_template(rng: random.Random) -> str:
    heads = "".join(rng.sample(HEADS, rng.randrange(4)))
    body = rng.choice(BODIES)
    return f"{heads}{{% for m in messages %}}{body}{{% endfor %}}{rng.choice(TAILS)}"


def draw_message(rng: random.Random) -> dict[str, Any]:
    roles = ["system", "user", "assistant", "tool", "developer", "ipython", "critic"]
    message: dict[str, Any] = {"role": rng.choice(roles)}
    kind = rng.randrange(6)
    if kind < 3:
        message["content"] = rng.choice([" hi ", "1 < 2 & é", "", "<s>", "{{ 1 }}"])
    elif kind == 3:
        message["content"] = [{"type": "text", "text": "see"}, {"type": "image"}]
    elif kind == 4:
        message["tool_calls"] = [CALL]
        if rng.random() < 0.5:
            message["content"] = None
    else:
        message[rng.choice(["reasoning_content", "thinking", "reasoning"])] = "because"
        message["content"] = "so"
    return message


def draw_tokens(rng: random.Random, whole_names: tuple[str, ...]) -> dict[str, Any]:
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
        chat["tools"] = [TOOL]
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
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    OUT.write_text(f'{{"transformers": "{transformers.__version__}", "seed": {SEED}, "cases": [\n{lines}\n]}}\n')
    refused = sum(text is None for case in cases for text in case["texts"])
    print(f"{OUT}: {len(cases)} folders of {CHATS} chats, {refused} chats refused")
