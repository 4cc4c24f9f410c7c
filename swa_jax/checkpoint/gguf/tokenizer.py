"""The tokenizer of a GGUF file, as the files that a Hugging Face folder has for it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.base.settings import nearest
from swa_jax.checkpoint.companions import GENERATION, TOKENIZER
from swa_jax.checkpoint.gguf.hyperparameters import Metadata
from swa_jax.checkpoint.gguf.pretokenizers import RULES, WordRule
from swa_jax.data.special_tokens import SETTINGS

SPACE = "\u2581"  # SentencePiece's sign for a space
PREFIX = "tokenizer.ggml."
NONE = ("none", "no_vocab")
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where a file does not say
ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # tokens by their names in both files
# What ends a turn in chat templates. Files often name the end of a text only; llama.cpp knows the others by these.
TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "[|endofturn|]",
)
MOST_LETTERS = 256  # of a token that merges make


class Vocabulary:
    """What a file says of its tokens. Raises `CheckpointError` for lists that do not fit each other."""

    def __init__(self, metadata: Metadata):
        self.metadata, self.file = metadata, metadata.file
        self.tokens: list[str] = self._list("tokens")
        self.kinds = self._numbers("token_type")
        self.template = metadata.values.get("tokenizer.chat_template")
        if not isinstance(self.template, str | None):
            raise CheckpointError(f"{self.file}: tokenizer.chat_template must be a text")

    def get(self, key: str) -> Any:
        return self.metadata.values.get(PREFIX + key)

    def wrong(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {PREFIX}{key} {what}")

    def _list(self, key: str) -> list[str]:
        found = self.get(key)
        if not isinstance(found, list) or not found:
            raise self.wrong(key, "must be a list of texts")
        return found

    def _numbers(self, key: str) -> np.ndarray | None:
        found = self.get(key)
        if found is not None and (not isinstance(found, np.ndarray) or len(found) != len(self.tokens)):
            raise self.wrong(key, f"must be {len(self.tokens)} numbers, one a token")
        return found

    def scores(self) -> np.ndarray:
        scores = self._numbers("scores")
        if scores is None or not np.isfinite(scores).all():
            raise self.wrong("scores", "must be numbers, which give the order of merges")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        """The pairs of a file's list; each stands there with a space between its halves."""
        pairs = []
        for merge in self._list("merges"):
            at = merge.find(" ", 1)  # a half may be a space itself
            if at < 0:
                raise self.wrong("merges", f"has {merge[:100]!r}, which is no pair of tokens")
            pairs.append((merge[:at], merge[at + 1 :]))
        return pairs

    def of_kind(self, kind: TokenType) -> list[str]:
        if self.kinds is None:
            return []
        return [token for token, one in zip(self.tokens, self.kinds.tolist(), strict=True) if one == kind and token]

    def id_of(self, role: str) -> int | None:
        """The id of the "bos", "eos", "unknown", "padding", "eot" or "eom" token."""
        by_default = SENTENCEPIECE_IDS.get(role) if self.get("model") == "llama" else None
        value = self.get(f"{role}_token_id")
        value = by_default if value is None else value
        if value is None or value == 0xFFFFFFFF:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self.wrong(f"{role}_token_id", f"is {str(value)[:40]}, of {len(self.tokens)} tokens")
        return value

    def switch(self, key: str, by_default: bool) -> bool:
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.wrong(key, f"must be true or false, got {str(value)[:40]!r}")
        return by_default if value is None else value


def tokenizer_files(metadata: Metadata) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The tokenizer's files by name, and the keys that `config.json` has of its tokens; none of a file without one.

    Raises:
      ConfigError: a kind of tokenizer, or a rule for cutting words, that is not known.
      CheckpointError: lists and ids that do not fit each other.
    """
    kind = metadata.values.get(f"{PREFIX}model")
    if kind is None or kind in NONE:
        return {}, {}
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ConfigError(
            f"{metadata.file}: a tokenizer of kind {str(kind)[:40]!r} is not supported; supported: gpt2 (byte-level "
            "BPE), llama (SentencePiece) and gemma4"
        )
    vocabulary = Vocabulary(metadata)
    rule = _rule(vocabulary) if kind == "gpt2" else WordRule((), start=kind == "llama")
    starts = vocabulary.switch("add_bos_token", rule.start) and vocabulary.id_of("bos") is not None
    try:
        backend = _byte_level(vocabulary, rule) if kind == "gpt2" else _sentencepiece(vocabulary, kind)
        _add_tokens(backend, vocabulary)
        if starts:
            index = vocabulary.id_of("bos") or 0
            token = vocabulary.tokens[index]
            backend.post_processor = processors.TemplateProcessing(
                single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, index)]
            )
        whole = backend.to_str().encode()
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # what the library raises is an Exception and no more
        raise CheckpointError(
            f"{metadata.file}: its tokenizer cannot be made: {' '.join(str(error).split())[:300]}"
        ) from None
    ids = {ours: value for theirs, ours in ROLES.items() if (value := vocabulary.id_of(theirs)) is not None}
    ends = _ends(vocabulary)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": starts,
        **{f"{role}_token": vocabulary.tokens[token] for role, token in ids.items()},
    }
    if vocabulary.template is not None:
        settings["chat_template"] = vocabulary.template
    tokens: dict[str, Any] = {f"{role}_token_id": token for role, token in ids.items() if role != "unk"}
    if len(ends) > 1:
        tokens["eos_token_id"] = ends
    files = {TOKENIZER: whole, SETTINGS: _json(settings), GENERATION: _json(tokens)}
    return files, tokens


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def _rule(vocabulary: Vocabulary) -> WordRule:
    name = vocabulary.get("pre")
    if not isinstance(name, str) or name not in RULES:
        hint = nearest(str(name), list(RULES), listed=False)
        raise ConfigError(
            f"{vocabulary.file}: how its tokenizer cuts words is called {str(name)[:40]!r} ({PREFIX}pre), which is not "
            f"known{hint}; take a file that a newer llama.cpp made, or the model's "
            "Hugging Face folder"
        )
    return RULES[name]


def _vocab(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: index for index, token in enumerate(vocabulary.tokens)}


def _byte_level(vocabulary: Vocabulary, rule: WordRule) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=_vocab(vocabulary), merges=vocabulary.merges(), ignore_merges=rule.whole_words)
    )
    backend.pre_tokenizer = word_splitter(rule)
    backend.decoder = decoders.ByteLevel()
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def word_splitter(rule: WordRule) -> pre_tokenizers.PreTokenizer:
    """What cuts a text into words by a rule, and spells these in bytes."""
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rule.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])


def _sentencepiece(vocabulary: Vocabulary, kind: str) -> tokenizers.Tokenizer:
    """BPE over letters, with bytes for letters that are no token."""
    # Files spell tokens of several spaces with spaces, and texts reach the merges without any.
    vocabulary.tokens = [
        token.replace(" ", SPACE) if token.isspace() and " " in token else token for token in vocabulary.tokens
    ]
    vocab = _vocab(vocabulary)
    unknown = vocabulary.id_of("unknown")
    merges = vocabulary.merges() if vocabulary.get("merges") is not None else _merges(vocabulary, vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "llama" and vocabulary.switch("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = spaces
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(vocabulary: Vocabulary, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary stands for: two tokens whose joint text is a token, that of the best
    score first. SentencePiece takes user-defined tokens, such as Gemma's runs of spaces, before all others."""
    ranks = -vocabulary.scores().astype(np.float64)
    user_defined = {vocab[token] for token in vocabulary.of_kind(TokenType.USER_DEFINED)}
    control = {vocab[token] for token in vocabulary.of_kind(TokenType.CONTROL)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, index in vocab.items():
        if index in control or len(token) > MOST_LETTERS:
            continue
        rank = index - float(len(vocab)) - 1e9 if index in user_defined else float(ranks[index])
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in vocab and right in vocab:
                found.append((rank, i, vocab[left], (left, right)))
    found.sort(key=lambda merge: merge[:3])
    return [pair for *_, pair in found]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Tokens that stand whole in a text: control tokens, which decoding leaves out, and those that users have added."""
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in vocabulary.of_kind(TokenType.CONTROL)]
    )
    added = [token for token in vocabulary.of_kind(TokenType.USER_DEFINED) if token.strip(SPACE)]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])


def _ends(vocabulary: Vocabulary) -> list[int]:
    """The tokens that end a reply, that of a text first."""
    named = [vocabulary.id_of(role) for role in ("eos", "eot", "eom")]
    control: Sequence[str] = vocabulary.of_kind(TokenType.CONTROL)
    template = vocabulary.template or ""
    turns = [token for token in TURN_ENDS if token in control and token in template]
    if "<|return|>" in control and "<|call|>" in control:  # gpt-oss, where <|end|> ends a message and not the reply
        turns = ["<|return|>", "<|call|>"]
    known = [vocabulary.tokens.index(token) for token in turns]
    return [token for token in dict.fromkeys(itertools.chain(named, known)) if token is not None]
