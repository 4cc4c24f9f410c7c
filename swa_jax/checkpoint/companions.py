"""The files beside the weights, checked before an import writes: the tokenizer's and `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.base.files import parse_json
from swa_jax.checkpoint.families.grammar import MOST, NUMBER, SWITCH, TOKENS, Grammar, check_keys
from swa_jax.checkpoint.sources import ModelFolder
from swa_jax.data.tokenizer import Tokenizer, read_tokenizer

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"

_WHOLE = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences", "top_k")
_NUMBERS = (
    "diversity_penalty", "epsilon_cutoff", "eta_cutoff", "length_penalty", "min_p", "repetition_penalty", "temperature",
    "top_p", "typical_p",
)  # fmt: skip
_GENERATION: Grammar = (
    (_WHOLE, "a whole number", lambda value: type(value) is int and -MOST <= value <= MOST),
    (_NUMBERS, *NUMBER),
    (("do_sample", "use_cache", "output_scores"), *SWITCH),
    (("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"), *TOKENS),
)
# What transformers takes from there of itself, with the value that changes nothing: of sampling, and of every reply.
_SAMPLING = {"temperature": 1, "top_k": 0, "top_p": 1}
_PENALTIES = {"repetition_penalty": 1, "no_repeat_ngram_size": 0}


def check_companions(folder: ModelFolder, files: Mapping[str, bytes], vocab_size: int) -> list[str]:
    """What a user should know of the tokenizer of a model with so many embeddings, in sentences.

    Args:
      files: what the files beside the weights hold, `config.json` among them.

    Raises:
      ConfigError: a tokenizer that is there and cannot be read.
      CheckpointError: a file of JSON that is none, or holds what its keys cannot.
    """
    notes = []
    for name, data in files.items():
        if name.endswith(".json") and name != TOKENIZER:
            settings = parse_json(data, folder / name, CheckpointError, finite=name == GENERATION)
            if name == GENERATION:
                check_keys(settings, _GENERATION, f"{folder / name}", CheckpointError)
                notes = _not_taken(settings)
    if TOKENIZER not in files:
        return [f"without a tokenizer.json in {folder}, this model takes token ids only"]
    file = folder / TOKENIZER
    try:
        tokenizer = read_tokenizer(files[TOKENIZER], file, files, folder)
    except ConfigError as error:
        raise ConfigError(f"{error}; fetch the file again, or remove it to use the model with token ids only") from None
    notes = [starts_and_ends(tokenizer.within(vocab_size)), *notes]
    if tokenizer.vocab_size > vocab_size:
        notes.append(
            f"{file} has ids up to {tokenizer.vocab_size - 1}, the model embeddings for ids below {vocab_size} only: "
            "texts with the others cannot be read"
        )
    return notes


def _not_taken(settings: Mapping[str, Any]) -> list[str]:
    """What `generation_config.json` asks for that replies do not take from there, in sentences."""

    def asked(neutral: Mapping[str, int]) -> str:
        found = [key for key, value in neutral.items() if settings.get(key) not in (None, value)]
        return ", ".join(f"{key} = {settings[key]}" for key in found)

    notes = []
    if settings.get("do_sample") and (wanted := asked(_SAMPLING)):
        notes.append(f"{GENERATION} asks for {wanted}: repeat that as options, else replies take the likeliest tokens")
    if wanted := asked(_PENALTIES):
        notes.append(f"{GENERATION} asks for {wanted}, which is not applied here")
    return notes


def starts_and_ends(tokenizer: Tokenizer) -> str:
    """Which tokens are put before a text, and which end a reply."""

    def names(ids: Sequence[int], between: str) -> str:
        return between.join(f"{tokenizer.backend.id_to_token(token)!r} (id {token})" for token in ids)

    start = (
        f"texts begin with {names(tokenizer.start_ids, ' and ')}" if tokenizer.start_ids else "no token begins a text"
    )
    end = f"replies end with {names(tokenizer.end_ids, ' or ')}" if tokenizer.end_ids else "no token ends a reply"
    return f"{start}; {end}"
