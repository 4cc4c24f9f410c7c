"""vLLM: its own classes, and those of transformers that it runs where it has none."""

from swa_jax.checkpoint.servers.allocation import grouped_entries
from swa_jax.checkpoint.servers.common import Cache, Device, Reads, Server, as_afmoe, native

# Qwen 2 is Llama with biases for q, k and v alone, and vLLM's Llama reads both `qkv_bias` and `layer_types`. A model
# that came as a Seed-OSS says `attention_bias`, which is that of all four there.
_QWEN2_AS_LLAMA = native(
    "LlamaForCausalLM", keys={"architectures": ["LlamaForCausalLM"], "qkv_bias": True, "attention_bias": False}
)
NATIVE = {
    "llama": native("LlamaForCausalLM", alone=True),
    "mistral": native("MistralForCausalLM", alone=True),
    "phi3": native("Phi3ForCausalLM", alone=True),
    "qwen2": native("Qwen2ForCausalLM", Reads.ALIKE) + _QWEN2_AS_LLAMA,
    "qwen3": native("Qwen3ForCausalLM", Reads.ALIKE),
    "gemma2": native("Gemma2ForCausalLM"),
    "gemma3_text": native("Gemma3ForCausalLM"),
    "cohere": native("CohereForCausalLM", Reads.NEVER),
    "cohere2": native("CohereForCausalLM", surplus=1),
    "exaone4": native("Exaone4ForCausalLM"),
    # With `layer_types` this class expects learned sink logits unless it is told that there are none.
    "granite": native("GraniteForCausalLM", alone=True, keys={"attention_sinks": False}),
    "granite_swa": native("GraniteForCausalLM"),
    "apertus": native("ApertusForCausalLM", alone=True),
    "gpt_oss": native("GptOssForCausalLM", Reads.EVEN),
    # Whether these have a window in every layer where `sliding_window` says so was not found out.
    "qwen3_moe": native("Qwen3MoeForCausalLM", Reads.NEVER),
    "mixtral": native("MixtralForCausalLM", Reads.NEVER),
}
BY_TRANSFORMERS = {
    "olmo2": native("TransformersForCausalLM", Reads.NEVER),
    "olmo3": native("TransformersForCausalLM"),
    "smollm3": native("TransformersForCausalLM"),
    "ministral": native("TransformersForCausalLM"),
    "cwm": native("TransformersForCausalLM"),
    "seed_oss": native("TransformersForCausalLM"),
    "starcoder2": native("TransformersForCausalLM", Reads.ALIKE),
    "vaultgemma": native("TransformersForCausalLM"),
    "mellum": native("TransformersMoEForCausalLM"),
}
EXPERTS = {
    # transformers' class always routes so, and has no keys for it.
    "afmoe": native(
        "AfmoeForCausalLM",
        keys={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
        only=as_afmoe,
    ),
    "cohere2_moe": native("Cohere2MoeForCausalLM", surplus=1),
    "exaone_moe": native("ExaoneMoeForCausalLM"),
    "granitemoe_swa": native("GraniteMoeSharedForCausalLM"),
    "laguna": native("LagunaForCausalLM"),
    "gemma4_text": native("Gemma4ForCausalLM"),
}
NO_CLASS = {
    "ministral3": "its class finds the factor on queries under a key that transformers does not write",
    "mimo_v2_flash": "its class reads hybrid_layer_pattern and swa_ keys, which transformers does not write",
}
GROUPS = "blocks, to groups of equally many layers"
SIZES = "--max-model-len {length} --max-num-batched-tokens {batched}"
# `EngineArgs.get_batch_defaults` and `VllmConfig.max_in_flight_tokens`. A GPU that is not here: of 160 GiB or more as
# b200, of 70 or more as h100, of less as l4.
CPU = Device(2048, batches=1, block_tokens=128)
SERVER = Server(
    "vLLM",
    "vllm",
    "0.33.0",
    "2026-11-02",
    "vllm serve {folder}",
    SIZES,
    NATIVE | EXPERTS | BY_TRANSFORMERS,
    Cache(
        GROUPS,
        grouped_entries,
        {
            "h100": Device(8192),
            "h200": Device(8192),
            "a100": Device(2048),
            "gb10": Device(2048),
            "l4": Device(2048),
            "l40s": Device(2048),
            "b200": Device(16384),
            "mi300x": Device(16384),
            "cpu": CPU,
        },
    ),
    no_class=NO_CLASS,
    port=8000,
)
