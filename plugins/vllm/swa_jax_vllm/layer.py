"""Attention of a layer: one of vLLM's modules for each part of its KV heads."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, replace_as

from swa_jax_vllm.backend import backend_for
from swa_jax_vllm.cache import PromptOnlySpec, SinkWindowSpec
from swa_jax_vllm.pattern import Pattern, Rule


class PatternAttention(nn.Module):
    """Attention of one layer by the pattern, in place of the `attn` of a layer's attention.

    Its KV heads lie module by module (`Pattern.rules`, `Pattern.order`).
    """

    def __init__(self, attention: nn.Module, pattern: Pattern, layer: int, vllm_config: VllmConfig):
        super().__init__()
        stock = attention.attn
        rules = pattern.rules(layer, attention.total_num_kv_heads)
        self.attentions = nn.ModuleList(
            RuledAttention(
                rule,
                stock.num_heads // len(rules),
                stock.head_size,
                attention.scaling,
                num_kv_heads=stock.num_kv_heads // len(rules),
                cache_config=vllm_config.cache_config,
                quant_config=stock.quant_config,
                prefix=stock.layer_name if len(rules) == 1 else f"{stock.layer_name}_{i}",
            )
            for i, rule in enumerate(rules)
        )

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Of rotated queries [T, H D] with keys and values [T, K D]; as the queries."""
        if len(self.attentions) == 1:
            return self.attentions[0](query, key, value)
        pieces = zip(*(x.chunk(len(self.attentions), -1) for x in (query, key, value)), strict=True)
        return torch.cat([attend(*piece) for attend, piece in zip(self.attentions, pieces, strict=True)], -1)


class RuledAttention(Attention):
    """Attention by one rule, with the cache that it needs."""

    def __init__(self, rule: Rule, num_heads: int, head_size: int, scale: float, *, cache_config, **options):
        self.rule = rule
        short = None if rule.full_answers else rule.window  # of the cache
        backend = get_attn_backend(
            head_size, torch.get_default_dtype(), cache_config.cache_dtype, has_sliding_window=short is not None
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            cache_config=cache_config,
            per_layer_sliding_window=short,
            attn_backend=backend_for(backend, rule),
            **options,
        )

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec = super().get_kv_cache_spec(vllm_config)
        if self.rule.full_answers:
            return replace_as(spec, PromptOnlySpec)
        if isinstance(spec, SlidingWindowSpec) and self.rule.num_sink_tokens:
            if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
                # vLLM makes a full cache of it, but knows only its own kinds.
                return replace_as(spec, FullAttentionSpec, drop=("sliding_window", "extra_retained_tokens"))
            return replace_as(spec, SinkWindowSpec, num_sink_tokens=self.rule.num_sink_tokens)
        return spec
