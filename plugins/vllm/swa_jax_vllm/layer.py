"""Attention of a layer: one of vLLM's modules for each part of its KV heads."""

import torch
from torch import nn
from torch.nn.functional import pad
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, replace_as

from swa_jax_vllm.backend import backend_for
from swa_jax_vllm.cache import PromptOnlySpec, SinkWindowSpec
from swa_jax_vllm.pattern import Pattern, Rule


class PatternAttention(nn.Module):
    """Attention of one layer by the pattern, in place of the `attn` of a layer's attention.

    Its KV heads lie module by module (`Pattern.rules`, `Pattern.order`). Where the kernels take no heads of that size,
    queries, keys and values have zeros at their ends, which change nothing that is computed.
    """

    def __init__(self, attention: nn.Module, pattern: Pattern, layer: int, vllm_config: VllmConfig):
        super().__init__()
        stock = attention.attn
        rules = pattern.rules(layer, attention.total_num_kv_heads)
        self.head_size = stock.head_size
        sizes = stock.attn_backend.get_supported_head_sizes() or [stock.head_size]
        fitting = [size for size in sizes if size >= self.head_size]
        self.zeros = min(fitting, default=self.head_size) - self.head_size
        self.attentions = nn.ModuleList(
            RuledAttention(
                rule,
                stock.num_heads // len(rules),
                self.head_size + self.zeros,
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
        whole = query, key, value
        if self.zeros:
            whole = tuple(pad(x.unflatten(-1, (-1, self.head_size)), (0, self.zeros)).flatten(-2) for x in whole)
        pieces = zip(*(x.chunk(len(self.attentions), -1) for x in whole), strict=True)
        parts = [attend(*piece) for attend, piece in zip(self.attentions, pieces, strict=True)]
        seen = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if self.zeros:
            seen = seen.unflatten(-1, (-1, self.head_size + self.zeros))[..., : self.head_size].flatten(-2)
        return seen


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
