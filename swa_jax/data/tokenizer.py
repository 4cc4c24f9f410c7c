"""Reading a `tokenizer.json`, and learning the small byte-level BPE of the recall model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from swa_jax.base.errors import ConfigError
from swa_jax.data.special_tokens import named_tokens, read_beside, reply_ends

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
      end_ids: the tokens that end a reply: `eos_id` and what the model's files name. Ids of no token are left out.
      num_ids: ids from this one on are not to be used; see `within`.
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
            raise ConfigError(f"the tokenizer has no token {eos_token[:80]!r}, named as its end-of-text token")
        self.bos_id: int | None = None if bos_token is None else backend.token_to_id(bos_token)
        own = () if self.eos_id is None else (self.eos_id,)
        ends = dict.fromkeys((*own, *end_ids))
        self.end_ids: tuple[int, ...] = tuple(token for token in ends if 0 <= token < self.vocab_size)
        # What the model expects before a text: Llama's and Mistral's tokenizers put a <bos> there, Qwen's nothing.
        probe = backend.encode(PROBE)
        added = sum(itertools.takewhile(bool, probe.special_tokens_mask))
        self.start_ids: list[int] = probe.ids[:added]
        self.num_ids = self.vocab_size

    def within(self, num_embeddings: int) -> Tokenizer:
        """The same for a model with so many embeddings, which may be fewer than there are tokens: Gemma 3's tokenizer
        has one for pictures. Only a text that holds such a token is refused."""
        other = copy.copy(self)
        other.num_ids = min(self.vocab_size, num_embeddings)
        other.end_ids = tuple(token for token in self.end_ids if token < num_embeddings)
        around = [*self.start_ids, *([] if self.eos_id is None else [self.eos_id])]
        if over := [token for token in around if token >= num_embeddings]:
            raise ConfigError(
                f"the tokenizer's {self.backend.id_to_token(over[0])!r} has the id {over[0]}, but the model has "
                f"{num_embeddings} embeddings: it is the tokenizer of another model"
            )
        return other

    def encode(self, text: str) -> list[int]:
        return self.checked(self.backend.encode(text, add_special_tokens=False).ids, text)

    def checked(self, ids: list[int], text: str) -> list[int]:
        """The ids of a text. Raises `ConfigError` where there is one that may not be used."""
        if self.num_ids < self.vocab_size and max(ids, default=0) >= self.num_ids:
            whole = self.backend.encode(text, add_special_tokens=False)
            wrong = next(i for i, token in enumerate(whole.ids) if token >= self.num_ids)
            place = whole.offsets[wrong][0]
            raise ConfigError(
                f"the text has {whole.tokens[wrong]!r} (id {whole.ids[wrong]}) at character {place}, in "
                f"{text[max(place - 20, 0) : place + 40]!r}: the model has embeddings for ids below {self.num_ids} only"
            )
        return ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The characters of `text`, from and to, that each token of `encode(text)` stands for."""
        return self.backend.encode(text, add_special_tokens=False).offsets

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special tokens are left out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read `tokenizer.json` at `path` or inside the folder `path`.

    The files beside it name the end-of-text token (`special_tokens.named_tokens`); failing that, it is `<eos>` if there
    is one. They also say what else ends a reply (`special_tokens.reply_ends`).
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {file}; expected a tokenizer.json")
    return read_tokenizer(file.read_bytes(), file, read_beside(file.parent), file.parent)


def read_tokenizer(data: bytes, file: object, beside: Mapping[str, bytes], folder: object) -> Tokenizer:
    """The tokenizer of a `tokenizer.json` and of the files beside it (`special_tokens.FILES`).

    Args:
      data, beside: what the files hold.
      file, folder: what to call them in sentences.
    """
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
        backend.no_padding()
        backend.no_truncation()
        backend.encode(PROBE)
    except Exception as error:  # what the library raises is an Exception and no more
        sentence = " ".join(str(error).split())
        raise ConfigError(f"{file} cannot be read as a tokenizer: {sentence}") from None
    named = named_tokens(beside, folder)
    eos_token = named.get("eos_token")
    if eos_token is None and backend.token_to_id(END_OF_TEXT) is not None:
        eos_token = END_OF_TEXT
    return Tokenizer(backend, eos_token, reply_ends(beside, folder), named.get("bos_token"))


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
