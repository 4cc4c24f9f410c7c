"""The models of `make_goldens.py`: tiny ones of every family, and settings of RoPE at the sizes of released models."""

import zlib

WINDOW = 8
BATCH, LENGTH, VOCAB = 2, 45, 131  # LENGTH is more than five windows
PADDING = 12  # of the tokens that the load-balancing loss of experts leaves out
PROMPT_LENGTHS, NEW_TOKENS = (11, 19), 32  # left-padded to 19; four windows of new tokens
MIN_MARGIN = 1e-3  # between the two best tokens of a greedy step, so that rounding cannot change the continuation

SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=36,
    intermediate_size=52,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)
WIDE_HEADS = dict(head_dim=16)  # hidden_size / num_attention_heads would be 6
HYBRID = dict(num_hidden_layers=5, sliding_window=WINDOW)

# Wavelengths at head_dim 16 and theta 1e4 are 6, 20, 63, 199, ...: with an original context of 32, the llama3
# and yarn rules leave the first alone, blend the next and stretch the others, all of it inside LENGTH positions.
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)


def mixed_layers(*full: int, layers: int = 5) -> list[str]:
    """`layer_types` with full attention in the named layers and windows elsewhere."""
    return ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]


# A case's place is its seed: new ones go last.
CASES = {
    "llama3-rope": dict(model_type="llama", **WIDE_HEADS, rope_parameters=LLAMA3_ROPE),
    "llama-plain": dict(
        model_type="llama", num_key_value_heads=6
    ),  # multi-head, head_dim = hidden_size / heads, untied
    "llama-yarn": dict(model_type="llama", **WIDE_HEADS, rope_parameters=YARN_ROPE),
    "mistral-full": dict(model_type="mistral", **WIDE_HEADS, sliding_window=None),
    "qwen2-full": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3-full": dict(model_type="qwen3", **WIDE_HEADS, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "mistral-window": dict(model_type="mistral", **WIDE_HEADS, sliding_window=WINDOW),
    # No `layer_types`: Qwen2 derives them from max_window_layers (layers from that index on are windowed).
    "qwen2-hybrid": dict(model_type="qwen2", **HYBRID, use_sliding_window=True, max_window_layers=2),
    "qwen3-hybrid": dict(
        model_type="qwen3",
        **WIDE_HEADS,
        **HYBRID,
        use_sliding_window=True,
        layer_types=mixed_layers(1, 3),
        tie_word_embeddings=True,
    ),
    "ministral-hybrid": dict(model_type="ministral", **WIDE_HEADS, **HYBRID, layer_types=mixed_layers(0, 4)),
    "llama-bias": dict(model_type="llama", num_hidden_layers=2, attention_bias=True, mlp_bias=True),
    "olmo2-full": dict(model_type="olmo2"),
    # Layers 1 (full) and 4 (windowed) have no rotary embeddings.
    "smollm3-hybrid": dict(
        model_type="smollm3",
        **HYBRID,
        use_sliding_window=True,
        layer_types=mixed_layers(1, 3),
        no_rope_layers=[1, 0, 1, 1, 0],
    ),
    "olmo3-hybrid": dict(
        model_type="olmo3",
        **HYBRID,
        layer_types=mixed_layers(1, 4),
        rope_parameters=dict(
            full_attention=dict(YARN_ROPE, rope_theta=5e5), sliding_attention=dict(rope_type="default", rope_theta=5e5)
        ),
    ),
    # Caps that bite, and a scale that is not that of head_dim.
    "gemma2-hybrid": dict(
        model_type="gemma2",
        **WIDE_HEADS,
        **HYBRID,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=24,
    ),
    "gemma3-hybrid": dict(
        model_type="gemma3_text",
        **WIDE_HEADS,
        **HYBRID,
        layer_types=mixed_layers(2),
        query_pre_attn_scalar=24,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
        ),
    ),
    "granite-full": dict(
        model_type="granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=2.5,
    ),
    "cohere-full": dict(model_type="cohere", logit_scale=0.3),
    "cohere2-hybrid": dict(model_type="cohere2", **HYBRID, layer_types=mixed_layers(1, 3), logit_scale=0.3),
    "exaone4-full": dict(
        model_type="exaone4", **WIDE_HEADS, sliding_window=None, layer_types=mixed_layers(0, 1, 2, 3, layers=4)
    ),
    "exaone4-hybrid": dict(model_type="exaone4", **WIDE_HEADS, **HYBRID, layer_types=mixed_layers(1, 4)),
    # 6 of 8 channels are turned; the text is longer than the first training's, so that the long factors count.
    "phi3-window": dict(
        model_type="phi3",
        hidden_size=48,
        sliding_window=WINDOW,
        original_max_position_embeddings=32,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.2, 1.5],
            long_factor=[1.0, 2.5, 8.0],
        ),
    ),
    # And shorter here.
    "phi3-full": dict(
        model_type="phi3",
        original_max_position_embeddings=64,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.5, 2.0], long_factor=[4.0, 8.0, 9.0]
        ),
    ),
    "mellum-hybrid": dict(
        model_type="mellum",
        **WIDE_HEADS,
        **HYBRID,
        layer_types=mixed_layers(0, 3),
        mlp_layer_types=["dense"] * 5,
        rope_parameters=dict(
            full_attention=dict(YARN_ROPE, rope_theta=5e5),
            sliding_attention=dict(rope_type="default", rope_theta=100.0),
        ),
    ),
}
NOPE_IN_FULL_LAYERS = ("cohere2", "exaone4", "afmoe", "exaone_moe", "cohere2_moe")
# Transformers 4 never knew these.
ONE_SPELLING = (
    "mellum", "afmoe", "exaone_moe", "cohere2_moe", "granite_swa", "ministral3", "gemma4_text", "laguna",
    "mimo_v2_flash", "granitemoe_swa",
)  # fmt: skip
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32)
# Mixtures of experts, whose seeds count from 100.
SPARSE_CASES = {
    "qwen3-moe-full": dict(model_type="qwen3_moe", **WIDE_HEADS, **EXPERTS),
    # Layers 1 and 5 have experts.
    "qwen3-moe-window": dict(
        model_type="qwen3_moe",
        **WIDE_HEADS,
        **EXPERTS,
        num_hidden_layers=6,
        use_sliding_window=True,
        sliding_window=WINDOW,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "mixtral-window": dict(
        model_type="mixtral", intermediate_size=32, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=3
    ),
    # A limit that bites.
    "gpt-oss-hybrid": dict(
        model_type="gpt_oss",
        **WIDE_HEADS,
        intermediate_size=20,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=1.0,
        swiglu_alpha=1.5,
        rope_parameters=dict(YARN_ROPE, truncate=False),
    ),
    "mellum-moe-hybrid": dict(
        model_type="mellum",
        **WIDE_HEADS,
        **HYBRID,
        **EXPERTS,
        layer_types=mixed_layers(1, 4),
        mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"],
        rope_parameters=dict(full_attention=YARN_ROPE, sliding_attention=dict(rope_type="default", rope_theta=100.0)),
    ),
}
GEMMA4 = dict(
    model_type="gemma4_text",
    **WIDE_HEADS,
    sliding_window=WINDOW,
    global_head_dim=24,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.5),
        sliding_attention=dict(rope_type="default", rope_theta=100.0),
    ),
)
# Cases whose seed is a sum of their name, so that they may be added in any order.
NAMED_CASES = {
    "afmoe-hybrid": dict(
        model_type="afmoe",
        **WIDE_HEADS,
        **HYBRID,
        **EXPERTS,
        layer_types=mixed_layers(1, 4),
        num_dense_layers=2,
        num_shared_experts=2,
        route_scale=1.7,
        mup_enabled=True,
    ),
    # Of 6 experts the 2 best of the 2 best groups.
    "exaone-moe-hybrid": dict(
        model_type="exaone_moe",
        **WIDE_HEADS,
        **HYBRID,
        **EXPERTS | dict(num_experts=6),
        layer_types=mixed_layers(1, 4),
        mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"],
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
    ),
    # A dense full layer in front, which is turned; sigmoids, the mean of chosen experts and the shared one, RMS norms.
    "cohere2-moe-hybrid": dict(
        model_type="cohere2_moe",
        **WIDE_HEADS,
        **HYBRID,
        layer_types=mixed_layers(0, 3),
        mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse"],
        intermediate_size=16,
        prefix_dense_intermediate_size=32,
        num_experts=5,
        num_shared_experts=2,
        expert_selection_fn="sigmoid",
        rms_norm_eps=1e-5,
        logit_scale=0.3,
    ),
    # Probabilities, what chosen and shared experts give together, LayerNorms, dense layers that are not turned.
    "cohere2-moe-softmax": dict(
        model_type="cohere2_moe",
        **WIDE_HEADS,
        **HYBRID,
        layer_types=mixed_layers(1, 4),
        mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse"],
        intermediate_size=32,
        num_experts=5,
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
        prefix_dense_sliding_window_pattern=2,
        logit_scale=0.3,
    ),
    # Layers with RoPE of either theta, and one with none, in full and in windowed layers.
    "granite-swa-hybrid": dict(
        model_type="granite_swa",
        **WIDE_HEADS,
        **HYBRID,
        layer_types=mixed_layers(0, 4),
        layer_rope_theta=[1e4, 100.0, 0, 1e4, 100.0],
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=2.5,
    ),
    "cwm-hybrid": dict(
        model_type="cwm", **WIDE_HEADS, **HYBRID, layer_types=mixed_layers(0, 4), rope_parameters=LLAMA3_ROPE
    ),
    "seed-oss-full": dict(model_type="seed_oss", **WIDE_HEADS),
    # Caps that bite, and a scale that is not that of head_dim.
    "vaultgemma-hybrid": dict(
        model_type="vaultgemma",
        **WIDE_HEADS,
        **HYBRID,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=64,
    ),
    # Queries are scaled from position 16 on, and more from 32 on.
    "ministral3-window": dict(
        model_type="ministral3",
        **WIDE_HEADS,
        sliding_window=WINDOW,
        rope_parameters=dict(
            YARN_ROPE, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5
        ),
    ),
    "starcoder2-window": dict(model_type="starcoder2", sliding_window=WINDOW),
    "apertus-full": dict(model_type="apertus", **WIDE_HEADS, rope_parameters=LLAMA3_ROPE),
    # Layers with RoPE of either theta, and one with none; a shared expert.
    "granitemoe-swa-hybrid": dict(
        model_type="granitemoe_swa",
        **WIDE_HEADS,
        **HYBRID,
        intermediate_size=16,
        shared_intermediate_size=24,
        num_local_experts=5,
        num_experts_per_tok=2,
        layer_types=mixed_layers(0, 4),
        layer_rope_theta=[1e4, 100.0, 0, 1e4, 100.0],
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=2.5,
    ),
    # Full layers have heads of another shape, whose keys are their values.
    "gemma4-31b-hybrid": dict(
        **GEMMA4,
        num_hidden_layers=5,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=5.0,
        layer_types=mixed_layers(2, 4),
    ),
    # Experts beside the MLPs.
    "gemma4-26b-a4b-hybrid": dict(
        **GEMMA4,
        num_hidden_layers=4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=16,
        layer_types=mixed_layers(1, 3, layers=4),
    ),
    # Layers have inputs of their own; the last four read the keys of the second (windowed) and the third (full).
    "gemma4-e2b-hybrid": dict(
        **GEMMA4,
        num_hidden_layers=7,
        intermediate_size=48,
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        tie_word_embeddings=False,
        layer_types=mixed_layers(2, 4, 6, layers=7),
    ),
    # Full layers have 4 query heads, the others 6, and turn half of a head by YaRN; a softcap of the router that bites.
    "laguna-hybrid": dict(
        model_type="laguna",
        **WIDE_HEADS,
        **HYBRID,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        layer_types=mixed_layers(0, 3),
        num_attention_heads_per_layer=[4, 6, 6, 4, 6],
        mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"],
        moe_routed_scaling_factor=1.7,
        moe_router_logit_softcapping=1.0,
        rope_parameters=dict(
            full_attention=dict(YARN_ROPE, partial_rotary_factor=0.5),
            sliding_attention=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=1.0),
        ),
    ),
    # A gate for each channel, and as many heads everywhere.
    "laguna-channels": dict(
        model_type="laguna",
        **WIDE_HEADS,
        **HYBRID,
        **EXPERTS,
        shared_expert_intermediate_size=16,
        layer_types=mixed_layers(1, 4),
        gating="per-element",
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=0.25),
            sliding_attention=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
        ),
    ),
    # Two KV heads in windowed layers, one in full ones; values of 10 channels, keys of 16, of which 6 are turned.
    "mimo-v2-flash-hybrid": dict(
        model_type="mimo_v2_flash",
        **WIDE_HEADS,
        **HYBRID,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_key_value_heads=1,
        num_experts_per_tok=2,
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
        v_head_dim=10,
        layer_types=mixed_layers(0, 4),
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=0.4),
            sliding_attention=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.4),
        ),
    ),
}
ALL_CASES = CASES | SPARSE_CASES | NAMED_CASES
SEEDS = {
    **{name: seed for seed, name in enumerate(CASES)},
    **{name: seed for seed, name in enumerate(SPARSE_CASES, start=100)},
    **{name: zlib.crc32(name.encode()) for name in NAMED_CASES},
}
SHARDED = "qwen3-full"
GENERATED = (
    "qwen3-full",
    "ministral-hybrid",
    "cohere2-hybrid",
    "exaone4-hybrid",
    "gpt-oss-hybrid",
    "gemma4-e2b-hybrid",
)

LONG_ROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    original_max_position_embeddings=4096,
    short_factor=[1 + i / 64 for i in range(64)],
    long_factor=[1 + i * i / 64 for i in range(64)],
)

# RoPE settings of released models, at their real sizes: only frequencies are kept, so they cost nothing.
ROPE_SETTINGS = {
    "default": dict(rope_type="default", rope_theta=1e6),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "llama-3.1": dict(LLAMA3_ROPE, rope_theta=500000.0, original_max_position_embeddings=8192),
    "llama-3.2": dict(LLAMA3_ROPE, rope_theta=500000.0, factor=32.0, original_max_position_embeddings=8192),
    "qwen-yarn": dict(YARN_ROPE, rope_theta=1e6, original_max_position_embeddings=32768),
    "yarn-untruncated": dict(
        YARN_ROPE, original_max_position_embeddings=4096, truncate=False, beta_fast=16.0, beta_slow=2.0
    ),
    "yarn-attention-factor": dict(YARN_ROPE, original_max_position_embeddings=4096, attention_factor=1.25),
    "yarn-mscale": dict(YARN_ROPE, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.5),
    "longrope-short": LONG_ROPE,
    "longrope-long": LONG_ROPE,
    "longrope-attention-factor": dict(LONG_ROPE, attention_factor=1.25, factor=8.0),
}
ROPE_LENGTHS = {"longrope-short": 4096, "longrope-long": 4097, "longrope-attention-factor": 1}
