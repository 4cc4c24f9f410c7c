"""Reading a `tokenizer.json`, and learning the small byte-level BPE of the recall model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from swa_jax.errors import ConfigError
from swa_jax.files import parse_json

END_OF_TEXT = "<eos>"
PROBE = "Café  naïve 你好,\n\tx_1 = 3.14159; <eos> \U0001f600 it's"  # notices merges and rules that differ

# One digit a piece; a word carries the blank or hyphen before it, punctuation the blanks around it. A needle
# sentence thus becomes few tokens: " brave" "-otter" " is" ": " "1" "2" ...
_PIECES = r"\p{N}|[ \-]?\p{L}+| ?[^\s\p{L}\p{N}]+ ?|\s+"


class Tokenizer:
    """Text to ids and back; ids never include special tokens unless the text spells them out.

    Attributes:
      eos_id: the token that stands between documents, None if there is none.
      bos_id: the start token that the tokenizer names, None if there is none; whether it stands before a text is what
        `start_ids` says.
      end_ids: the tokens that end a reply: `eos_id` and what `generation_config.json` names. Ids of no token are left
        out.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token: str | None = None,
        end_ids: Sequence[int] = (),
        bos_token: str | None = None,
    ):
        self.backend = backend
        # Ids may leave gaps: what a model needs is room for the largest.
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        if eos_token is not None and self.eos_id is None:
            raise ConfigError(f"the tokenizer has no token {eos_token!r}, named as its end-of-text token")
        self.bos_id: int | None = None if bos_token is None else backend.token_to_id(bos_token)
        own = () if self.eos_id is None else (self.eos_id,)
        ends = dict.fromkeys((*own, *end_ids))
        self.end_ids: tuple[int, ...] = tuple(token for token in ends if 0 <= token < self.vocab_size)
        # What the model expects before a text: Llama's and Mistral's tokenizers put a <bos> there, Qwen's nothing.
        probe = backend.encode(PROBE)
        added = sum(itertools.takewhile(bool, probe.special_tokens_mask))
        self.start_ids: list[int] = probe.ids[:added]

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters of `text`, from and to, that each token of `encode(text)` stands for."""
        return self.backend.encode(text, add_special_tokens=False).offsets

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens are left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(path: str | Path, eos_token: str | None = None) -> Tokenizer:
    """Read `tokenizer.json` at `path` or inside the folder `path`.

    Without `eos_token`, the folder's `tokenizer_config.json` names it; failing that, `<eos>` if there is one. What else
    ends a reply is read from the folder's `generation_config.json`.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {file}; expected a tokenizer.json")
    settings = file.with_name("tokenizer_config.json")
    named = settings.read_bytes() if settings.is_file() else None
    ends = _configured_ends(file.with_name("generation_config.json"))
    return read_tokenizer(file.read_bytes(), file, named, settings, eos_token, ends)


def read_tokenizer(
    data: bytes,
    file: object,
    settings: bytes | None = None,
    settings_file: object = "",
    eos_token: str | None = None,
    end_ids: Sequence[int] = (),
) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` and, if there is one, a `tokenizer_config.json`.

    Args:
      data, settings: what the two files hold.
      file, settings_file: what to call them in sentences.
    """
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
        backend.no_padding()
        backend.no_truncation()
        backend.encode(PROBE)
    except Exception as error:  # what the library raises is an Exception and no more
        sentence = " ".join(str(error).split())
        raise ConfigError(f"{file} cannot be read as a tokenizer: {sentence}") from None
    if eos_token is None and settings is not None:
        eos_token = _configured("eos_token", settings, settings_file)
    if eos_token is None and backend.token_to_id(END_OF_TEXT) is not None:
        eos_token = END_OF_TEXT
    bos_token = None if settings is None else _configured("bos_token", settings, settings_file)
    return Tokenizer(backend, eos_token, end_ids, bos_token)


def check_same_tokens(tokenizer: Tokenizer, path: str | Path, checkpoint: str | Path) -> None:
    """Raise `ConfigError` if a checkpoint folder has a tokenizer, and it gives a text other ids than `tokenizer` does.

    Start and end tokens may differ: `path`, where `tokenizer` is from, may leave them open.
    """
    if not (Path(checkpoint) / "tokenizer.json").is_file():
        return
    learned = load_tokenizer(checkpoint)
    vocabularies = [t.backend.get_vocab(with_added_tokens=True) for t in (tokenizer, learned)]
    if vocabularies[0] != vocabularies[1] or tokenizer.encode(PROBE) != learned.encode(PROBE):
        raise ConfigError(
            f"tokenizer {path} ({tokenizer.vocab_size} tokens) is not the one that {checkpoint} was trained with "
            f"({learned.vocab_size} tokens): set 'tokenizer' to {checkpoint}"
        )


def train_byte_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE of `vocab_size` tokens, `<eos>` (id 0) and the 256 bytes included.

    Every digit is a token of its own. Equal texts in equal order give an equal vocabulary.
    """
    if vocab_size < 257:
        raise ConfigError(f"vocab_size is {vocab_size}; the 256 bytes and {END_OF_TEXT} alone are 257")
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, END_OF_TEXT)


def _configured(name: str, settings: bytes, file: object) -> str | None:
    """A special token that a `tokenizer_config.json` names."""
    token = parse_json(settings, file).get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str | None) or (text is None and token is not None):
        raise ConfigError(
            f"{file}: {name} must be a text, or an object with its content; got {str(token)[:200]!r}"
        )
    return text


def _configured_ends(file: Path) -> list[int]:
    """`eos_token_id` of a `generation_config.json`: one id, several, or none."""
    value = parse_json(file.read_bytes(), file).get("eos_token_id") if file.is_file() else None
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise ConfigError(f"eos_token_id in {file} must be a token id or a list of them, got {value!r:.40}")
    return ids
