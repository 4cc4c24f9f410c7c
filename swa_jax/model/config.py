"""The configuration of a decoder and of the scaling of its rotary embeddings."""

from __future__ import annotations

import dataclasses
from typing import Literal

from swa_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings; the field names are Hugging Face's."""

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range outwards to whole channels


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder for Llama, Mistral, Qwen2, Qwen3 and SWAT; field names are Hugging Face's where it has one.

    `position_embedding`, `attention_activation` and the ALiBi fields are SWAT's (Eq. 4 and 5): "alirope" means
    balanced ALiBi and RoPE together. `alibi_negative_heads` + `alibi_positive_heads` must be all query heads.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    model_type: str = "llama"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False  # on o (Llama's attention_bias sets both)
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None  # factor on q.k; None is 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # c in c * tanh(x / c) on attention logits
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    attention_activation: Literal["softmax", "sigmoid"] = "softmax"
    position_embedding: Literal["rope", "alibi", "alirope", "none"] = "rope"
    alibi_negative_heads: int = 0
    alibi_positive_heads: int = 0
    slope_schedule: Literal["swat", "press", "reference"] = "swat"
    sigmoid_bias: float = 0.0
    router_bias_init: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
            "attention_scale", "attention_softcap",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if (
            self.uses_alibi
            and self.alibi_negative_heads + self.alibi_positive_heads != self.num_attention_heads
        ):
            raise ConfigError(
                f"alibi_negative_heads ({self.alibi_negative_heads}) + alibi_positive_heads "
                f"({self.alibi_positive_heads}) must equal num_attention_heads ({self.num_attention_heads})"
            )
        if self.uses_rope and self.head_dim % 2:
            raise ConfigError(f"head_dim ({self.head_dim}) must be even for rotary embeddings")

    @property
    def uses_rope(self) -> bool:
        return self.position_embedding in ("rope", "alirope")

    @property
    def uses_alibi(self) -> bool:
        return self.position_embedding in ("alibi", "alirope")

    def with_yarn(self, factor: float) -> ModelConfig:
        """The same model with its context stretched `factor` times by YaRN (arXiv:2309.00071); no weight changes.

        Raises:
          ConfigError: a factor that is not above 1, a model without RoPE, or one that scales its RoPE already.
        """
        if not factor > 1:
            raise ConfigError(f"YaRN stretches the context: its factor must be above 1, got {factor:g}")
        if not self.uses_rope:
            raise ConfigError(
                f"position_embedding is '{self.position_embedding}': YaRN needs rotary embeddings"
            )
        if self.rope_scaling is not None:
            raise ConfigError(
                f"the model scales its rotary embeddings already ({self.rope_scaling.rope_type}, factor "
                f"{self.rope_scaling.factor:g}): change rope_scaling in its config.json instead"
            )
        original = self.max_position_embeddings
        scaling = RopeScaling("yarn", factor, original_max_position_embeddings=original)
        return dataclasses.replace(
            self, max_position_embeddings=round(original * factor), rope_scaling=scaling
        )
