"""What is kept of a sequence, and what of it another request may take over."""

from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from swa_jax_vllm.config import NO_WINDOW

KVCacheSpecRegistry._ensure_registered()  # vLLM's own kinds come in only while none is known


class PromptOnlyManager(FullAttentionManager):
    """Keeps everything; only blocks of the prompt serve other requests.

    The keys of an answer come from queries that saw everything. In a later prompt the same tokens see windows.
    """

    def cache_blocks(self, request, num_tokens, *args, **kwargs):
        super().cache_blocks(request, min(num_tokens, request.num_prompt_tokens), *args, **kwargs)


@register_kv_cache_spec(manager_class=PromptOnlyManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class PromptOnlySpec(FullAttentionSpec):
    """The whole sequence, of a model with full-attention decode."""


class SinkWindowManager(SlidingWindowManager):
    """Keeps the blocks of the first tokens and those of the window, and frees what lies between."""

    def __init__(self, kv_cache_spec, **options):
        super().__init__(kv_cache_spec, **options)
        self.sink_blocks = kv_cache_spec.sink_blocks

    def _skipped_sinks(self, blocks, num_computed_tokens):
        """The blocks of sinks, of `blocks` from the first on, that lie before the window of the next token."""
        skipped = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        return blocks[: min(skipped, self.sink_blocks)]

    def remove_skipped_blocks(self, request_id, processed_computed_tokens, num_prompt_tokens=None):
        skipped = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        self._remove_blocks_in_range(request_id, self.sink_blocks, skipped)

    def get_num_blocks_to_allocate(self, request_id, num_tokens, new_blocks, total_computed_tokens, *args, **kwargs):
        number = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_blocks, total_computed_tokens, *args, **kwargs
        )
        return number + self._get_num_evictable_blocks(self._skipped_sinks(new_blocks, total_computed_tokens))

    def add_local_computed_blocks(self, request_id, new_blocks, num_local_tokens, num_external_tokens):
        if num_external_tokens:
            raise NotImplementedError("swa-jax-vllm: sink tokens do not run with a KV connector")
        super().add_local_computed_blocks(request_id, new_blocks, num_local_tokens, num_external_tokens)
        sinks = list(self._skipped_sinks(new_blocks, num_local_tokens))
        self.block_pool.touch(sinks)
        self.req_to_blocks[request_id][: len(sinks)] = sinks

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
    ):
        found, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, *args, **kwargs
        )
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size)
        for number in range(min(kv_cache_spec.sink_blocks, len(found[0]))):
            cached = block_pool.get_cached_block(hashes[number], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in found), 0
            for blocks, block in zip(found, cached, strict=True):
                blocks[number] = block
        return found, length

    @classmethod
    def reachable_block_mask(cls, start_block, end_block, alignment_tokens, kv_cache_spec, *args, **kwargs):
        mask = super().reachable_block_mask(start_block, end_block, alignment_tokens, kv_cache_spec, *args, **kwargs)
        if mask is not None:
            sinks = range(start_block, min(end_block, kv_cache_spec.sink_blocks))
            mask[: len(sinks)] = [True] * len(sinks)
        return mask


@register_kv_cache_spec(manager_class=SinkWindowManager)
@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """The last tokens of a sequence, and the first ones."""

    num_sink_tokens: int

    @property
    def sink_blocks(self) -> int:
        return cdiv(self.num_sink_tokens, self.block_size)

    @property
    def num_retained_tokens(self) -> int:
        """All of them: a worker of vLLM 0.33 would take what lies before the window out of its tables, sinks too."""
        return NO_WINDOW

    def max_admission_blocks_per_request(self, *args, **kwargs) -> int:
        return super().max_admission_blocks_per_request(*args, **kwargs) + self.sink_blocks
