"""Tiny models and one pattern of every kind, shared by the tests of the model and of generation."""

import dataclasses
import functools
import shutil

import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jax.sharding import AbstractMesh
from layer_letters import types_of
from tokenizers import processors

from swa_jax.checkpoint.folder import save_model
from swa_jax.model.attention import cast_parameters
from swa_jax.model.config import ModelConfig, RopeScaling
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import AXES, Partition

WINDOW_SIZE = 6
LAYERS = 4

PLAIN = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
WIDER = dataclasses.replace(PLAIN, vocab_size=64, hidden_size=32, intermediate_size=48)
# Large initial weights: attention that is far from uniform, and gates of both kinds.
SOFTMAX = dataclasses.replace(PLAIN, qk_norm=True, attention_bias=True, tie_word_embeddings=True, initializer_range=0.3)
# All that other families do: norms on both sides, RoPE by layer, queries scaled by position, softcaps, scales and
# multipliers.
SANDWICH = dataclasses.replace(
    SOFTMAX,
    attention_bias=False,
    hidden_act="gelu_tanh",
    rope_layers=("local", "none", "global", "local"),
    local_rope_theta=50.0,
    rope_scaling=RopeScaling("yarn", 2.0, 4, llama_4_scaling_beta=0.5),
    norm_placement="sandwich",
    norm_unit_offset=True,
    qk_norm_over="projection",
    attention_scale=0.6,
    attention_softcap=2.0,
    logit_softcap=3.0,
    embedding_multiplier=4.0,
    residual_multiplier=0.7,
    logit_multiplier=1.3,
)
# Attention and MLP side by side, LayerNorm with biases, MLPs without a gate and with xIELU, and rotary embeddings of
# neighbouring channels, of half of a head.
PARALLEL = dataclasses.replace(
    SOFTMAX,
    attention_bias=False,
    gated_mlp=False,
    hidden_act="xielu",
    norm_type="layer",
    norm_bias=True,
    norm_placement="parallel",
    rope_interleaved=True,
    partial_rotary_factor=0.5,
    rope_layers=("global", "none", "global", "global"),
    rope_scaling=RopeScaling("longrope", 4.0, 4, short_factor=(1.0, 9.0), long_factor=(2.0, 3.0)),
    logit_multiplier=0.7,
)
EXPERTS = dataclasses.replace(
    PLAIN, initializer_range=0.3, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True
)
MIXED = dataclasses.replace(EXPERTS, mlp_layer_types=("dense", "sparse", "sparse", "dense"))
# As AFMoE and others: gated attention, sigmoid routing among groups with a bias for the choice, and a shared expert.
SHARED_EXPERTS = dataclasses.replace(
    MIXED,
    norm_placement="sandwich",
    attention_gate="channel",
    num_experts=6,
    router_scores="sigmoid",
    router_choice_bias=True,
    expert_groups=3,
    expert_groups_per_tok=2,
    expert_multiplier=1.7,
    mixture_multiplier=0.8,
    shared_expert_intermediate_size=10,
)
# As gpt-oss: sink logits, biases, and experts whose gate and up projections are one tensor.
FUSED_EXPERTS = dataclasses.replace(
    EXPERTS,
    sink_logits=True,
    attention_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    fused_experts=True,
    swiglu_limit=0.7,
)
# Layers whose heads have two shapes, some without a value projection (Gemma 4, 31B).
TWO_SHAPES = dataclasses.replace(
    SOFTMAX,
    attention_bias=False,
    rope_layers=("local", "global", "local", "global"),
    rope_scaling=RopeScaling("proportional", 1.0, partial_rotary_factor=0.5),
    num_global_key_value_heads=1,
    global_head_dim=12,
    attention_k_eq_v=True,
    v_norm=True,
)
# The last layers read the keys of others, and every layer an input of its own (Gemma 4, E2B).
SHARED_KEYS = dataclasses.replace(
    TWO_SHAPES,
    num_global_key_value_heads=None,
    attention_k_eq_v=False,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=6,
    vocab_size_per_layer_input=61,
    layer_scalar=True,
    use_double_wide_mlp=True,
)
# As Laguna and MiMo-V2: full layers have fewer heads, which turn more of their channels and have no sink logits; values
# are narrower than keys.
LAYER_KINDS = dataclasses.replace(
    SHARED_EXPERTS,
    norm_placement="pre",
    rope_layers=("global", "local", "local", "global"),
    partial_rotary_factor=0.5,
    global_partial_rotary_factor=1.0,
    num_global_attention_heads=2,
    num_global_key_value_heads=1,
    sink_logits=True,
    global_sink_logits=False,
    v_head_dim=5,
    value_multiplier=0.7,
    attention_gate="head",
    attention_gate_act="softplus",
    router_logit_softcap=1.0,
)
# Its tokens are bytes: those of conftest's `byte_tokenizer`.
BYTES = ModelConfig(
    vocab_size=257,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    initializer_range=0.3,
)
SIGMOID = dataclasses.replace(
    PLAIN,
    initializer_range=0.3,
    attention_activation="sigmoid",
    position_embedding="alirope",
    alibi_negative_heads=2,
    alibi_positive_heads=2,
    sigmoid_bias=-1.0,
)


def make(types: str, heads: tuple[tuple[int, ...], ...] = (), **fields) -> AttentionPattern:
    """A pattern from the letters of its layers."""
    window = fields.pop("sliding_window", WINDOW_SIZE)
    return AttentionPattern(types_of(types), window, full_kv_heads=heads, **fields)


_HYBRID_HEADS = ((0,), (1,), (), (0, 1))
PATTERNS = {
    "full": (SOFTMAX, make("FFFF", sliding_window=None)),
    "window": (SOFTMAX, make("wwww")),
    "window-1": (SOFTMAX, make("wwFw", sliding_window=1)),
    "streaming": (SOFTMAX, make("wwww", num_sink_tokens=3)),
    "interleave": (SOFTMAX, make("wFwF")),
    "chunked": (SOFTMAX, make("cFcc", num_sink_tokens=1)),
    "head-hybrid": (SOFTMAX, make("hhwh", _HYBRID_HEADS, num_sink_tokens=2)),
    "switch": (SOFTMAX, make("SSwS")),
    "every-kind": (SOFTMAX, make("FwhS", ((), (), (1,), ()), num_sink_tokens=1)),
    "window+fa-decode": (SOFTMAX, make("wwww", num_sink_tokens=2, full_attention_decode=True)),
    "every-kind+fa-decode": (SOFTMAX, make("FwhS", ((), (), (1,), ()), num_sink_tokens=1, full_attention_decode=True)),
    "every-kind+last-tokens": (
        SOFTMAX,
        make(*("FwhS", ((), (), (1,), ())), num_sink_tokens=1, full_attention_decode=True, num_last_tokens=4),
    ),
    "nope-every-kind": (
        SOFTMAX,
        make("FwhS", ((), (), (1,), ()), num_sink_tokens=1, full_attention_decode=True, nope_full_layers=True),
    ),
    "sandwich-every-kind": (SANDWICH, make("FwhS", ((), (), (1,), ()), num_sink_tokens=1)),
    "parallel-every-kind": (PARALLEL, make("FwhS", ((), (), (1,), ()), num_sink_tokens=1)),
    "experts": (SHARED_EXPERTS, make("wFSh", ((), (), (), (1,)))),
    "sink-logits-every-kind": (FUSED_EXPERTS, make("FwhS", ((), (), (1,), ()), num_sink_tokens=1)),
    "layer-kinds": (LAYER_KINDS, make("FwSw", num_sink_tokens=1)),
    "two-shapes": (TWO_SHAPES, make("wFwF")),
    "two-shapes-every-kind": (TWO_SHAPES, make("FwhS", ((), (), (1,), ()), num_sink_tokens=1)),
    "shared-keys": (SHARED_KEYS, make("wFwF", num_sink_tokens=1)),
    "shared-keys-every-kind": (SHARED_KEYS, make("hSFh", ((1,), (), (), (0,)))),
    "shared-keys-heads": (SHARED_KEYS, make("hhhh", ((1,), (), (1,), (0,)), num_sink_tokens=1)),
    "swat": (SIGMOID, make("wwww")),
    "swat-every-kind": (SIGMOID, make("FwhS", ((), (), (0,), ()), num_sink_tokens=2)),
}


@functools.cache
def base_model(config: ModelConfig) -> Decoder:
    """One routed model a configuration, whose weights all patterns share."""
    return Decoder(config, make("SSSS"), rngs=nnx.Rngs(0))


@nnx.jit
def logits_of(model: Decoder, tokens, **options):
    """A forward pass as one program; op by op it would be compiled as dozens."""
    return model(tokens, **options)


@functools.cache
def model_of(name: str) -> Decoder:
    config, pattern = PATTERNS[name]
    return base_model(config).with_pattern(pattern)


def abstract_partition(**sizes: int) -> Partition:
    """Over a mesh without devices: enough to look at shapes."""
    return Partition(AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES))


def in_bfloat16(model: Decoder) -> Decoder:
    graph, state = nnx.split(model)
    return nnx.merge(graph, cast_parameters(state, jnp.bfloat16))


def random_prompts(lengths=(1, 5, 19, 40), seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SOFTMAX.vocab_size, length).tolist() for length in lengths]


def byte_checkpoint(folder, byte_tokenizer, pattern, **changes):
    """A checkpoint folder of a random byte-level model and its tokenizer; `changes` are to `BYTES`."""
    model = Decoder(dataclasses.replace(BYTES, **changes), pattern, rngs=nnx.Rngs(0))
    return save_model(model, folder / "checkpoint", tokenizer_from=byte_tokenizer.parent)


def start_tokenizer(byte_tokenizer, folder):
    """A copy of the byte tokenizer, inside `folder`, that puts the token <bos> (257) before every text."""
    backend = tokenizers.Tokenizer.from_file(str(byte_tokenizer))
    backend.add_special_tokens(["<bos>"])
    special = [("<bos>", backend.token_to_id("<bos>"))]
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=special)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def with_template(checkpoint, folder, template):
    """A copy of a checkpoint, inside `folder`, that has a chat template."""
    copy = shutil.copytree(checkpoint, folder / "model")
    (copy / "chat_template.jinja").write_text(template)
    return copy
