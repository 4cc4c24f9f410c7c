"""SGLang."""

import dataclasses

from swa_jax.checkpoint.families import inexpressible
from swa_jax.checkpoint.servers.allocation import Blocks, Pools
from swa_jax.checkpoint.servers.common import (
    Cache,
    Device,
    Reads,
    Server,
    ServerClass,
    as_afmoe,
    native,
    rotated_as_olmo3,
    unbiased,
    untied,
)
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.pattern import AttentionPattern


def _as_granitemoe(config: ModelConfig) -> bool:
    """Heads that divide the hidden channels, and RoPE without scaling."""
    divided = config.head_dim * config.num_attention_heads == config.hidden_size
    return divided and unbiased(config) and config.rope_scaling is None


# SGLang counts the keys before the query's own. Most of its classes take one off; Cohere's, and the one that runs
# models of transformers, take `sliding_window` as it is. The latter runs by its own name, without a flag that may be
# forgotten; it leaves VaultGemma's softcap out. Qwen3-MoE's class, which Mellum's follows, and gpt-oss's always have an
# output matrix of their own. A model that SGLang knows by its name as one with windows does not start without one,
# unless it is told so. Gemma's and OLMo's caches it keeps whole by their names, whatever `config.json` says.
_BY_TRANSFORMERS = ServerClass(
    "TransformersForCausalLM",
    Reads.LAYER_TYPES,
    surplus=1,
    keys={"architectures": ["TransformersForCausalLM"]},
    pooled=True,
)
NO_POOL = "--disable-hybrid-swa-memory"
_CLASSES = {
    "llama": native("LlamaForCausalLM", Reads.NEVER),
    "mistral": native("MistralForCausalLM", Reads.NEVER),
    "qwen2": (*native("Qwen2ForCausalLM", Reads.NEVER), _BY_TRANSFORMERS),
    # With a matrix of its own it runs as Mellum, in a class of SGLang's own.
    "qwen3": (
        *native("Qwen3ForCausalLM", Reads.NEVER),
        dataclasses.replace(_BY_TRANSFORMERS, only=lambda config: config.tie_word_embeddings),
    ),
    "qwen3_moe": native("Qwen3MoeForCausalLM", Reads.NEVER, only=untied),
    "mellum": native("MellumForCausalLM", only=untied, full_flags=NO_POOL),
    "gemma2": native("Gemma2ForCausalLM", Reads.EVEN, frees=False),
    "gemma3_text": native("Gemma3ForCausalLM", frees=False),
    "granite": native("GraniteForCausalLM", Reads.NEVER, only=unbiased),
    "granite_swa": native("GraniteSWAForCausalLM", only=unbiased, full_flags=NO_POOL),
    "phi3": native("Phi3ForCausalLM", Reads.NEVER),
    "cohere": native("CohereForCausalLM", Reads.NEVER),
    "cohere2": native("Cohere2ForCausalLM", surplus=1, pooled=True),
    "olmo2": native("Olmo2ForCausalLM", Reads.NEVER),
    "olmo3": native("Olmo2ForCausalLM", only=rotated_as_olmo3, spelled=True, frees=False),
    "starcoder2": native("Starcoder2ForCausalLM", Reads.NEVER),
    "apertus": native("ApertusForCausalLM", Reads.NEVER),
    "mixtral": native("MixtralForCausalLM", Reads.NEVER, only=untied),
    "afmoe": native("AfmoeForCausalLM", only=as_afmoe, pooled=True),
    "granitemoe_swa": native("GraniteMoeSWAForCausalLM", only=_as_granitemoe, full_flags=NO_POOL),
    "laguna": native("LagunaForCausalLM", full_flags=NO_POOL),
    "gpt_oss": native("GptOssForCausalLM", only=untied, full_flags=NO_POOL),
}
# EXAONE 4's own class reads another form of `sliding_window_pattern`, by which it rotates, too.
_CLASSES |= dict.fromkeys(("exaone4", "smollm3", "ministral", "cwm", "seed_oss"), (_BY_TRANSFORMERS,))
_NO_CLASS = {
    "vaultgemma": "the class that runs models of transformers leaves its softcap out",
    "ministral3": "its class takes the factor on queries from another key than transformers writes",
    "gemma4_text": "it reads the heads of full layers only beside those of images",
    "exaone_moe": "its class reads is_moe_layer, which transformers does not write",
    "cohere2_moe": "its class reads first_k_dense_replace, which transformers does not write",
    "mimo_v2_flash": "its class reads hybrid_layer_pattern and swa_ keys, which transformers does not write",
}


def _lacks(pattern: AttentionPattern) -> str | None:
    """It counts the keys before the query's own, and some of its kernels take 0 of them for no window."""
    if pattern.sliding_window == 1 and WINDOW in pattern.layer_types:
        return "windows of the query's own key alone"
    return inexpressible(pattern)


POOLS = "two pools of one proportion"
SIZES = "--context-length {length} --chunked-prefill-size {batched} --swa-full-tokens-ratio {ratio:g}"
_EVICTS = 128  # tokens that have left the window before they are freed: `SGLANG_SWA_EVICTION_INTERVAL`


def _held(window: int, blocks: Blocks) -> int:
    """The window before the query, what is not freed yet, three pages, and the batches (`compute_swa_request_cap`)."""
    return window - 1 + _EVICTS + 3 * blocks.tokens + blocks.in_flight


# `memory_hook.py`
SERVER = Server(
    "SGLang",
    "sglang",
    "0.5.23",
    "2026-10-30",
    "python -m sglang.launch_server --model-path {folder}",
    SIZES,
    _CLASSES,
    Cache(
        POOLS,
        Pools(_held),
        {
            **dict.fromkeys(("h100", "h200", "a100", "gb10"), Device(8192, block_tokens=1)),
            **dict.fromkeys(("l4", "l40s"), Device(4096, block_tokens=1)),
            "b200": Device(16384, block_tokens=64),  # where attention is TensorRT-LLM's
            "mi300x": Device(16384, block_tokens=1),
        },
        whole_pages=True,
    ),
    no_class=_NO_CLASS,
    port=30000,
    lacks=_lacks,
)
