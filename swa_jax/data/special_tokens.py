"""What the files beside a `tokenizer.json` say of tokens: which have a name, and which end a reply."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import parse_json

SETTINGS, TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
ENDS = ("generation_config.json", "config.json")  # the first that names end tokens is believed, as in transformers
FILES = (SETTINGS, TOKENS_MAP, *ENDS)
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_beside(folder: Path) -> dict[str, bytes]:
    """Those of the `FILES` that a folder has."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


def named_tokens(files: Mapping[str, bytes], folder: object) -> dict[str, str]:
    """The texts of the tokens that have a name: `bos_token`, `eos_token` ..., and a model's own, such as `image_token`.

    What `tokenizer_config.json` does not say is read from `special_tokens_map.json`. Where they differ in one of the
    `NAMES`, the first is believed if it lists its added tokens, and else the second, as in transformers.

    Args:
      folder: what to call the files' folder in sentences.

    Raises `ConfigError`: a file is no JSON, or names something else than a text.
    """
    settings, tokens_map = (
        parse_json(files[name], f"{folder}/{name}") if name in files else {} for name in (SETTINGS, TOKENS_MAP)
    )
    old = "added_tokens_decoder" not in settings
    found: dict[str, str | None] = {}
    for file, values in ((SETTINGS, settings), (TOKENS_MAP, tokens_map)):
        extra = values.get("extra_special_tokens")
        own = {key: value for key, value in values.items() if key.endswith("_token")}
        for key, value in (own | (extra if isinstance(extra, dict) else {})).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key in NAMES and not (isinstance(text, str) or value is None):
                raise ConfigError(
                    f"{folder}/{file}: {key} must be a text, or an object with its content; got {str(value)[:200]!r}"
                )
            if isinstance(text, str | None) and (key not in found or (old and key in NAMES)):
                found[key] = text
    return {key: text for key, text in found.items() if text is not None}


def reply_ends(files: Mapping[str, bytes], folder: object) -> list[int]:
    """The ids that end a reply, by the first of the files that names any.

    Raises `ConfigError`: a file is no JSON, or names something else than ids.
    """
    for name in ENDS:
        settings = parse_json(files[name], f"{folder}/{name}") if name in files else {}
        inner = settings.get("text_config")  # of a model that also sees or hears
        for values in (settings, inner if isinstance(inner, dict) else {}):
            value: Any = values.get("eos_token_id")
            ids = [] if value is None else value if isinstance(value, list) else [value]
            if any(type(token) is not int for token in ids):
                raise ConfigError(
                    f"eos_token_id in {folder}/{name} must be a token id or a list of them, got {value!r:.40}"
                )
            if ids:
                return ids
    return []
