"""Quantised weights in `config.json`: blocks of FP8 are read, and gpt-oss's MXFP4; all else is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swa_jax.base.errors import ConfigError

KEY = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"  # where NVIDIA's ModelOpt says it, if not in config.json


def fp8_blocks(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of a matrix that share a scale (DeepSeek-V3's FP8); None: not quantised.

    Raises:
      ConfigError: another way of quantising; the sentence names it.
    """
    settings = hf.get(KEY)
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(f"config.json: {KEY} must be a mapping, got {settings!r}")
    method, blocks = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8":
        found = f"quant_method '{method}'" if method else f"{KEY} without a quant_method"
    elif blocks is None:
        found = "quant_method 'fp8' without weight_block_size (one scale for a whole tensor)"
    elif not _are_sizes(blocks):
        raise ConfigError(f"config.json: {KEY}.weight_block_size must be two whole numbers above 0, got {blocks!r}")
    elif settings.get("fmt", "e4m3") != "e4m3":
        found = f"quant_method 'fp8' with fmt '{settings['fmt']}'"
    else:
        return (blocks[0], blocks[1])
    raise unsupported(f"config.json: {found}")


def is_mxfp4(hf: Mapping[str, Any]) -> bool:
    """Whether the experts are in MXFP4, which gpt-oss alone may have."""
    settings = hf.get(KEY)
    return isinstance(settings, Mapping) and settings.get("quant_method") == "mxfp4"


def unsupported(found: str) -> ConfigError:
    """The error for weights that are quantised in another way; `found` says where and how."""
    return ConfigError(
        f"{found} is not supported; supported: fp8 with weight_block_size and fmt e4m3, mxfp4 in gpt_oss, or "
        "weights that are not quantised (float16, bfloat16, float32)"
    )


def _are_sizes(blocks: Any) -> bool:
    whole = isinstance(blocks, list | tuple) and all(type(size) is int and size > 0 for size in blocks)
    return whole and len(blocks) == 2


def without_quantization(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of the same model with plain weights."""
    return {key: value for key, value in hf.items() if key != KEY}
