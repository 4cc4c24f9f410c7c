"""One of vLLM's attention backends, made to attend by a rule."""

import functools
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

from swa_jax_vllm import sinks
from swa_jax_vllm.pattern import Rule
from swa_jax_vllm.split import answers_of, prompts_of, queries_of

TRIED = ("CPU_ATTN",)


class Piece(NamedTuple):
    """Some queries of a batch that attend alike."""

    windowed: bool
    tokens: torch.Tensor | None  # which, int [N]; None: all
    metadata: Any  # of the backend


@functools.cache
def backend_for(base: type[AttentionBackend], rule: Rule) -> type[AttentionBackend]:
    """`base` for a rule. The same class for the same rule: vLLM plans for all layers of a class at once."""
    if rule.is_stock:
        return base
    if base.get_name() not in TRIED:
        raise NotImplementedError(
            f"swa-jax-vllm: sink tokens and full-attention decode run with {', '.join(TRIED)}, not with "
            f"{base.get_name()}: serve this export on a CPU, or export a pattern without them"
        )
    implementation = _sinks(base, rule) if rule.num_sink_tokens else _two_calls(base, rule)
    builder = _answers_known(base) if rule.num_sink_tokens else _split(base)
    members = {"get_builder_cls": staticmethod(lambda: builder), "get_impl_cls": staticmethod(lambda: implementation)}
    if not rule.full_answers:
        members["get_builder_cls"] = base.get_builder_cls
    name = f"{base.__name__}_{rule.window}_{rule.num_sink_tokens}_{'answers' if rule.full_answers else 'windows'}"
    return type(name, (base,), members)


def _prompt_lengths(common: CommonAttentionMetadata) -> torch.Tensor:
    """Of each request, int [R]."""
    if common.rswa_prefix_lens is None:
        raise RuntimeError("swa-jax-vllm: this model runner of vLLM does not say where prompts end")
    return common.rswa_prefix_lens[: common.num_reqs].to(common.seq_lens.dtype)


def _answers_known(base: type[AttentionBackend]) -> type:
    class Builder(base.get_builder_cls()):
        supports_update_block_table = False

        def build(self, common_prefix_len, common, fast_build=False):
            metadata = super().build(common_prefix_len, common.replace(rswa_prefix_lens=None), fast_build)
            metadata.prompt_lengths = _prompt_lengths(common)
            return metadata

    return Builder


def _split(base: type[AttentionBackend]) -> type:
    class Builder(base.get_builder_cls()):
        """Plans the queries of prompts and those of answers one by one."""

        supports_update_block_table = False

        def build(self, common_prefix_len, common, fast_build=False):
            lengths = _prompt_lengths(common)
            common = common.replace(rswa_prefix_lens=None)
            metadata = super().build(common_prefix_len, common, fast_build)
            pieces = {True: prompts_of(common, lengths), False: answers_of(common, lengths)}
            pieces = {windowed: span for windowed, span in pieces.items() if len(span.rows)}
            if len(pieces) < 2:  # of a batch without queries, too
                metadata.pieces = [Piece(windowed, None, metadata) for windowed in pieces]
            else:
                metadata.pieces = []
                for windowed, span in pieces.items():
                    tokens, some = queries_of(common, span)
                    metadata.pieces.append(Piece(windowed, tokens, super().build(0, some, fast_build)))
            return metadata

    return Builder


def _two_calls(base: type[AttentionBackend], rule: Rule) -> type:
    kernels = base.get_impl_cls()

    class Implementation(kernels):
        """Full attention for answers; a second object with the window for prompts. Both read one cache."""

        def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, *rest, **named):
            super().__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, None, *rest, **named)
            self.windows = kernels(num_heads, head_size, scale, num_kv_heads, alibi_slopes, rule.window, *rest, **named)

        def forward(self, layer, query, key, value, kv_cache, metadata, output, *rest, **named):
            if metadata is None:  # vLLM measures its memory
                return output
            for windowed, tokens, plan in metadata.pieces:
                attend = self.windows.forward if windowed else super().forward
                if tokens is None:
                    attend(layer, query, key, value, kv_cache, plan, output, *rest, **named)
                else:
                    some = torch.empty_like(output[tokens])
                    attend(layer, query[tokens], key[tokens], value[tokens], kv_cache, plan, some, *rest, **named)
                    output[tokens] = some
            return output

    return Implementation


def _sinks(base: type[AttentionBackend], rule: Rule) -> type:
    class Implementation(base.get_impl_cls()):
        """PyTorch in place of the kernels, with a cache whose numbers lie in its own order."""

        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            if self.kv_cache_dtype != "auto":
                raise NotImplementedError(f"swa-jax-vllm: sink tokens with --kv-cache-dtype {self.kv_cache_dtype}")

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            sinks.write(kv_cache, key, value, slot_mapping)

        def forward(self, layer, query, key, value, kv_cache, metadata, output, *rest, **named):
            if metadata is not None:
                if not hasattr(metadata, "rows"):  # the first layer of a group finds them for all
                    prompts = metadata.prompt_lengths if rule.full_answers else None
                    metadata.rows = sinks.rows_of(metadata, prompts, rule, kv_cache.shape[2])
                sinks.attend(query, kv_cache, metadata.rows, self.scale, output)
            return output

    return Implementation
