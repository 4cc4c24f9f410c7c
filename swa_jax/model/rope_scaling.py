"""The scaling of rotary embeddings."""

from __future__ import annotations

import dataclasses
from typing import Literal

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import check_choices

_BOUNDS = {
    "factor": (1, 1e4),
    "original_max_position_embeddings": (1, 2**31 - 1),
    "low_freq_factor": (1e-3, 1e4),
    "high_freq_factor": (1e-3, 1e4),
    "beta_fast": (1e-3, 1e4),
    "beta_slow": (1e-3, 1e4),
    "attention_factor": (1e-2, 1e2),
    "partial_rotary_factor": (0, 1),
    "mscale": (0, 1e2),
    "mscale_all_dim": (0, 1e2),
    "llama_4_scaling_beta": (0, 1e2),
}


def check_bounds(config: object, bounds: dict[str, tuple[float, float]], prefix: str = "") -> None:
    for name, (least, most) in bounds.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{prefix}{name} must be from {least:g} to {most:g}, got {value}")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings; the field names are Hugging Face's.

    "longrope" (Ding et al., arXiv:2402.13753) divides each frequency by a factor of its own: one of `long_factor` where
    rows, or a cache, are longer than `original_max_position_embeddings`, else one of `short_factor`. "proportional"
    (Gemma 4) has the frequencies of a whole head, of which the lowest are 0.
    """

    rope_type: Literal["linear", "llama3", "yarn", "longrope", "proportional"]
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    # yarn; None = 0.1 ln(factor) + 1. longrope; None = sqrt(1 + ln(factor) / ln(original_max_position_embeddings))
    attention_factor: float | None = None
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range outwards to whole channels
    # yarn; queries are multiplied by 1 + beta ln(1 + floor(position / original_max_position_embeddings)) (Ministral 3)
    llama_4_scaling_beta: float = 0.0
    short_factor: tuple[float, ...] = ()  # longrope, one a frequency
    long_factor: tuple[float, ...] = ()  # longrope, one a frequency
    partial_rotary_factor: float = 1.0  # proportional: the share of frequencies, from the highest on, that are not 0

    def __post_init__(self) -> None:
        check_choices(self)
        check_bounds(self, _BOUNDS, "rope_scaling.")
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling.low_freq_factor ({self.low_freq_factor:g}) must be below high_freq_factor "
                f"({self.high_freq_factor:g})"
            )
        if self.rope_type == "yarn" and not self.beta_slow < self.beta_fast:
            raise ConfigError(
                f"rope_scaling.beta_slow ({self.beta_slow:g}) must be below beta_fast ({self.beta_fast:g})"
            )
        if self.llama_4_scaling_beta and (self.rope_type != "yarn" or not self.original_max_position_embeddings):
            raise ConfigError(
                "rope_scaling.llama_4_scaling_beta needs rope_type yarn with original_max_position_embeddings"
            )
