"""The keys by which a GGUF file has the tokenizer of a Hugging Face folder: the inverse of `tokenizer`.

What is written is read again, and stands only if it cuts texts as the folder's own tokenizer does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from gguf.constants import GGMLQuantizationType, TokenType

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.base.files import parse_json
from swa_jax.checkpoint.companions import TOKENIZER
from swa_jax.checkpoint.gguf.header import GgufTensor, Header
from swa_jax.checkpoint.gguf.hyperparameters import Metadata
from swa_jax.checkpoint.gguf.pretokenizers import RULES
from swa_jax.checkpoint.gguf.tokenizer import PREFIX, ROLES, SPACE, tokenizer_files, word_splitter
from swa_jax.data.chat import TEMPLATE_FILE
from swa_jax.data.special_tokens import SETTINGS, named_tokens
from swa_jax.data.tokenizer import read_tokenizer

# Contractions, digits, capitals, accents composed and not, other scripts, signs, and spaces of all kinds.
PROBE = (
    "Hello, World! It's we'LL DON'T isn't 1 12 123 1234 12345.67 x_1=3e-5; camelCaseWORDSand ÄÖÜ café e\u0301a "
    "naïve résumé 你好,世界。 こんにちは 한국어 Привет, мир! שלום العربية हिन्दी ไทย ~~~ ??? .,;: (a)[b]{c} <tag/> "
    "#$%&*+ \U0001f600\U0001f680 a\u00a0b\n\n  indented\n\tTab\t\tTabs\r\nend  of   line    \n \n\n   last 'word' \n"
)

# Any model, to read a tokenizer from.
_MODEL = {"general.architecture": "llama", "llama.block_count": 1}
_ANY = GgufTensor(Path(), GGMLQuantizationType.F32, (1,), 0)


def tokenizer_keys(files: Mapping[str, bytes], folder: object, vocab_size: int) -> dict[str, Any]:
    """The keys of the tokenizer that is among the files beside the weights.

    `folder` is what to call theirs in sentences.

    Raises:
      ConfigError: there is none, without which llama.cpp does not run, or none of llama.cpp's cuts texts in the same
        way.
    """
    if TOKENIZER not in files:
        raise ConfigError(f"llama.cpp needs a tokenizer, and {folder} has no {TOKENIZER}: add the model's")
    own = read_tokenizer(files[TOKENIZER], f"{folder}/{TOKENIZER}", files, folder)
    backend, table = own.backend, json.loads(own.backend.to_str())
    model = table["model"]
    pairs = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model.get("merges", ())]
    pieces = bool(model.get("byte_fallback"))
    named, added = named_tokens(files, folder), {token["id"]: token for token in table["added_tokens"]}
    texts = [backend.id_to_token(token) or f"[unused {token}]" for token in range(vocab_size)]
    keys: dict[str, Any] = {
        "model": "llama" if pieces else "gpt2",
        "pre": "default" if pieces else _rule(backend, bool(model.get("ignore_merges"))),
        "tokens": texts,
        "token_type": np.array([_kind(i, text, added, named, pieces) for i, text in enumerate(texts)], np.int32),
        "add_bos_token": bool(own.start_ids),
        "add_eos_token": False,
    }
    if pieces:
        ranks = dict[str, int]()
        for rank, pair in enumerate(pairs):
            ranks.setdefault("".join(pair), rank)
        own_words = (
            rank for text, rank in ranks.items() if text.strip(SPACE) and backend.token_to_id(text) not in added
        )
        first = min(own_words, default=0)
        spaces = {i for i, text in enumerate(texts) if not text.strip(SPACE) and ranks.get(text, first) < first}
        keys["token_type"][list(spaces)] = TokenType.USER_DEFINED  # Gemma's, before all that was learned
        keys["tokens"] = [text.replace(SPACE, " ") if i in spaces else text for i, text in enumerate(texts)]
        keys["scores"] = np.array([-float(ranks.get(text, len(pairs))) for text in texts], np.float32)
        keys["add_space_prefix"] = backend.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE)
    else:
        keys["merges"] = [" ".join(pair) for pair in pairs]
    ids = {role: backend.token_to_id(named.get(f"{ours}_token", "")) for role, ours in ROLES.items()}
    ids |= dict(zip(("eos", "eot", "eom"), own.end_ids, strict=False))
    keys |= {f"{role}_token_id": token for role, token in ids.items() if token is not None and token < vocab_size}
    written = {PREFIX + key: value for key, value in keys.items()}
    template = parse_json(files.get(SETTINGS, b"{}"), SETTINGS).get("chat_template")
    if isinstance(template, list):  # the file has room for one of those with names, as of Cohere's models
        named_ones = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named_ones.get("default")
    if TEMPLATE_FILE in files:
        template = files[TEMPLATE_FILE].decode()
    if isinstance(template, str):
        written["tokenizer.chat_template"] = template
    try:
        read, _ = tokenizer_files(Metadata(Header(_MODEL | written, {"": _ANY}), folder))
        again = tokenizers.Tokenizer.from_buffer(read[TOKENIZER])
        text = PROBE + " a".join(token["content"] for token in added.values() if token["id"] < vocab_size)
        merges = json.loads(again.to_str())["model"]["merges"]
        alike = [_order(each) for each in (pairs, merges)] if pieces else [pairs, [*map(tuple, merges)]]
        same = again.encode(text).ids == backend.encode(text).ids and alike[0] == alike[1]
    except (CheckpointError, ConfigError):
        same = False
    if not same:
        raise ConfigError(
            f"{folder}/{TOKENIZER} cuts texts in a way that no tokenizer known of llama.cpp does, so that no GGUF file "
            "can hold it: take another server"
        )
    return written


def _order(pairs: list[tuple[str, ...]]) -> tuple[list[str], set[tuple[str, ...]]]:
    """What merges make, the first first, and which there are: with scores, all that make one text come together."""
    return list(dict.fromkeys("".join(pair) for pair in pairs)), {tuple(pair) for pair in pairs}


def _kind(token: int, text: str, added: Mapping[int, Any], named: Mapping[str, str], pieces: bool) -> TokenType:
    if token in added:
        return TokenType.CONTROL if added[token]["special"] else TokenType.USER_DEFINED
    if pieces and text == named.get("unk_token"):
        return TokenType.UNKNOWN
    if pieces and len(text) == 6 and text.startswith("<0x"):
        return TokenType.BYTE
    return TokenType.UNUSED if text == f"[unused {token}]" else TokenType.NORMAL


def _rule(backend: tokenizers.Tokenizer, whole_words: bool) -> str:
    """The first name of the rule that cuts words as a tokenizer does; any where none does."""
    brought = backend.normalizer.normalize_str(PROBE) if backend.normalizer else PROBE
    composed = brought != PROBE
    words = backend.pre_tokenizer.pre_tokenize_str(brought) if backend.pre_tokenizer else None
    for name, rule in RULES.items():
        if (rule.whole_words, rule.nfc) == (whole_words, composed) and word_splitter(rule).pre_tokenize_str(
            brought
        ) == words:
            return name
    return next(iter(RULES))
