"""GGUF files for tests, made of Hugging Face folders as llama.cpp's conversion makes them.

What is written follows llama.cpp's conversion/ and src/models/; tensors get their names from the `gguf` package's own
table of Hugging Face's names, so that nothing here comes from the code that is tested.
"""

import json
import math
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, TokenType
from golden_models import tensors_of

ARCHITECTURES = {
    "mistral": "llama", "mixtral": "llama", "ministral": "llama", "qwen3_moe": "qwen3moe", "olmo3": "olmo2",
    "gemma3_text": "gemma3", "cohere": "command-r", "gpt_oss": "gpt-oss", "exaone_moe": "exaone-moe",
    "granite_swa": "granite_swa", "granitemoe_swa": "granite_swa", "ministral3": "mistral3", "gemma4_text": "gemma4",
    "cohere2_moe": "cohere2moe",
}  # fmt: skip
# What llama.cpp keeps joined, and the package's table has no names for.
GRANITE_EXPERTS = {
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "shared_mlp.input_linear.weight": "ffn_up_shexp",
    "shared_mlp.output_linear.weight": "ffn_down_shexp",
    "router.weight": "ffn_gate_inp",
}
PERMUTED = ("llama", "granite", "granite_swa", "mistral3", "smollm3")
WITHOUT_WINDOWS = ("llama", "qwen2", "qwen3", "qwen3moe", "smollm3", "mistral3", "seed_oss", "starcoder2")

# What llama.cpp fixes and goldens have otherwise, so that every number of theirs is seen.
FIXED = {
    "gemma2-hybrid": {"query_pre_attn_scalar": 16},
    "gemma3-hybrid": {"query_pre_attn_scalar": 16},
    "granite-swa-hybrid": {"layer_rope_theta": [10000.0, 10000.0, 0, 10000.0, 0]},
    "qwen3-moe-full": {"norm_topk_prob": True},
    "smollm3-hybrid": {"no_rope_layers": None},
}


def architecture_of(hf: dict) -> str:
    return ARCHITECTURES.get(hf["model_type"], hf["model_type"])


def write_gguf(
    file: Path,
    folder: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tokenizer=None,
    split_tensors: int = 0,
    edit=lambda tensors: tensors,
    **changes,
) -> Path:
    """Write a Hugging Face folder as a GGUF file.

    Args:
      kind: of all matrices that can have it; the others, and vectors, are F32.
      tokenizer: writes the tokenizer's keys with a GGUFWriter, and the embedding grows to 300 rows; None: without.
      split_tensors: tensors a file at most, for a model in parts.
      edit: changes the tensors, {name: array}; an array of bytes stands for itself, with its type: (bytes, type).
      changes: keys of metadata, less the architecture's name, with "__" for dots; they are written last.
    """
    hf, tensors = json.loads((folder / "config.json").read_text()), tensors_of(folder)
    architecture = architecture_of(hf)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split_tensors)
    write_hyperparameters(writer, hf, architecture)
    if tokenizer is not None:
        tokenizer(writer)
    for key, value in changes.items():
        write = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        write.get(type(value), writer.add_array)(f"{architecture}.{key.replace('__', '.')}", value)
    if tokenizer is not None:  # as many rows as the tokenizers of tests have tokens
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
            tensors[name] = np.resize(tensors[name], (300, tensors[name].shape[1]))
    for name, array in edit(gguf_tensors(hf, tensors, architecture)).items():
        if isinstance(array, tuple):
            writer.add_tensor(name, array[0], raw_dtype=array[1])
            continue
        block = gguf.GGML_QUANT_SIZES[kind][0]
        own = kind if array.ndim > 1 and array.shape[-1] % block == 0 else GGMLQuantizationType.F32
        data = gguf.quantize(array.astype(np.float32), own)
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rope_of(hf: dict) -> tuple[dict, dict]:
    """RoPE parameters of full and of windowed layers."""
    rope = hf["rope_parameters"]
    return (rope["full_attention"], rope["sliding_attention"]) if "full_attention" in rope else (rope, rope)


def write_hyperparameters(writer: gguf.GGUFWriter, hf: dict, architecture: str) -> None:
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf.get("prefix_dense_intermediate_size", hf["intermediate_size"]))
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    if "head_dim" in hf:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, add in (
        ("layer_norm_eps", writer.add_layer_norm_eps),
        ("norm_epsilon", writer.add_layer_norm_eps),
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("logit_scale", writer.add_logit_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("num_shared_experts", writer.add_expert_shared_count),
        ("shared_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("route_scale", writer.add_expert_weights_scale),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("norm_topk_prob", writer.add_expert_weights_norm),
    ):
        if hf.get(key) is not None:
            add(hf[key])
    if "layer_rope_theta" in hf:
        writer.add_array(f"{architecture}.attention.rope_pattern", [theta != 0 for theta in hf["layer_rope_theta"]])
    if "expert_selection_fn" in hf:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[hf["expert_selection_fn"].upper()])
    if architecture in ("gemma2", "gemma3"):  # which no released model needs: the scale follows from the shape
        writer.add_attention_scale(hf["query_pre_attn_scalar"] ** -0.5)
    if "num_experts_per_tok" in hf and hf["model_type"] not in ("mixtral", "granitemoe_swa"):
        writer.add_expert_feed_forward_length(hf.get("moe_intermediate_size", hf["intermediate_size"]))
    if architecture not in WITHOUT_WINDOWS and hf.get("sliding_window"):
        writer.add_sliding_window(hf["sliding_window"])
        if architecture != "phi3":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in hf["layer_types"]])
    if architecture == "gemma4":
        write_gemma4(writer, hf)
    write_rope(writer, hf, head_dim)


def write_gemma4(writer: gguf.GGUFWriter, hf: dict) -> None:
    [(_, full), *_] = hf["per_layer_config"].items()
    windowed = [kind == "sliding_attention" for kind in hf["layer_types"]]
    for add in (writer.add_key_length, writer.add_value_length):
        add(full["head_dim"])
    writer.add_key_length_swa(hf["head_dim"])
    writer.add_value_length_swa(hf["head_dim"])
    heads = hf["num_key_value_heads"]
    writer.add_head_count_kv([heads if one else full.get("num_key_value_heads", heads) for one in windowed])
    writer.add_shared_kv_layers(hf["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(hf["hidden_size_per_layer_input"])
    if hf.get("top_k_experts"):
        writer.add_expert_used_count(hf["top_k_experts"])
        writer.add_expert_feed_forward_length(hf["moe_intermediate_size"])
    if hf["use_double_wide_mlp"]:
        first, width = len(windowed) - hf["num_kv_shared_layers"], hf["intermediate_size"]
        writer.add_feed_forward_length([width if i < first else 2 * width for i in range(len(windowed))])


def write_rope(writer: gguf.GGUFWriter, hf: dict, head_dim: int) -> None:
    full, windowed = rope_of(hf)
    writer.add_rope_freq_base(full["rope_theta"])
    if windowed is not full:
        writer.add_rope_freq_base_swa(windowed["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1)))
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in full:
        writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"])
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if full["rope_type"] == "longrope":
        original = full["original_max_position_embeddings"]
        stretch = math.log(hf["max_position_embeddings"] / original) / math.log(original)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + stretch))


def rope_factors(hf: dict) -> dict[str, np.ndarray]:
    if hf["model_type"] == "gemma4_text":  # what does not turn has a factor so large that it never does
        [(_, heads), *_] = hf["per_layer_config"].items()
        pairs, share = heads["head_dim"] // 2, rope_of(hf)[0]["partial_rotary_factor"]
        rotated = int(pairs * share)
        return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)}
    rope, head_dim = rope_of(hf)[0], hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{n}.weight": np.array(rope[f"{n}_factor"], np.float32) for n in ("long", "short")}
    if rope["rope_type"] != "llama3":
        return {}
    factors = []
    for channel in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (channel / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """Channels c and c + half a head become neighbours."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def gguf_tensors(hf: dict, tensors: dict[str, np.ndarray], architecture: str) -> dict[str, np.ndarray]:
    known = {name: key for key, name in MODEL_ARCH_NAMES.items()}
    layers = hf["num_hidden_layers"]
    # An architecture's own table, or those of others for what the package does not know yet.
    kinds = [known[architecture]] if architecture in known else [MODEL_ARCH.EXAONE_MOE, MODEL_ARCH.GPT_OSS]
    tables = [gguf.get_tensor_name_map(kind, layers) for kind in (*kinds, MODEL_ARCH.QWEN3)]
    out = rope_factors(hf)

    def add(name: str, array: np.ndarray, suffix: str) -> None:
        found = next((found for one in tables if (found := one.get_name(name))), None)
        assert found is not None, f"the gguf package has no name for {name}"
        out[f"{found}.{suffix}"] = array

    for name, array in _stacked(tensors).items():
        stem, _, suffix = name.rpartition(".")
        if architecture == "granite_swa":
            for end, joined in GRANITE_EXPERTS.items():
                if name.endswith(end):
                    out[f"blk.{name.split('.')[2]}.{joined}.weight"] = array
            if name.endswith(tuple(GRANITE_EXPERTS)):
                continue
        if name.endswith(("sinks", "layer_scalar")):
            stem, suffix = name, "weight"
        if name.endswith(("router.scale", "per_expert_scale")):
            layer = name.split(".")[2]
            out[f"blk.{layer}.{'ffn_down_exps' if 'per_expert' in name else 'ffn_gate_inp'}.scale"] = array
            continue
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")) and architecture == "gemma4":
            stem, suffix = name, "weight"
        if name.endswith(("expert_bias", "e_score_correction_bias")):
            stem, suffix = name.removesuffix("_bias" if "e_score" in name else ""), "bias"
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            array = array + 1
        if architecture in PERMUTED and stem.endswith("q_proj"):
            array = permute(array, hf["num_attention_heads"])
        if architecture in PERMUTED and stem.endswith("k_proj"):
            array = permute(array, hf["num_key_value_heads"])
        if architecture == "gpt-oss" and "experts" in name:
            base, part = stem, suffix.removesuffix("_bias")
            suffix = "bias" if suffix.endswith("_bias") else "weight"
            rotated = array.swapaxes(1, 2) if suffix == "weight" else array
            if part == "gate_up_proj":
                add(f"{base}.gate_proj", rotated[:, 0::2], suffix)
                add(f"{base}.up_proj", rotated[:, 1::2], suffix)
            else:
                add(f"{base}.{part}", rotated, suffix)
        else:
            add(stem, array, suffix)
    return {name: np.ascontiguousarray(array) for name, array in out.items()}


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Queries, keys and values as one tensor, and gate and up projections of experts, as llama.cpp can join them."""
    out = dict(tensors)
    for name in tensors:
        layer = name.rpartition(".attn_q.")[0]
        if layer and name.startswith(f"{layer}.attn_q."):
            parts = [out.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            out[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
        if "ffn_gate_exps" in name:
            parts = [out.pop(name), out.pop(name.replace("gate", "up"))]
            out[name.replace("gate", "gate_up")] = np.concatenate(parts, axis=1)
    return out


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors with those of single experts as one."""
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        before, _, behind = name.partition(".experts.")
        number, _, rest = behind.partition(".")
        if number.isdigit():
            if "block_sparse_moe" in before:
                before = before.replace("block_sparse_moe", "feed_forward").removeprefix("model.")
            stacks.setdefault(f"{before}.experts.{rest}", {})[int(number)] = array
        else:
            out[name] = array
    return out | {name: np.stack([stack[i] for i in range(len(stack))]) for name, stack in stacks.items()}


def write_sentencepiece(writer: gguf.GGUFWriter) -> None:
    """A small vocabulary of SentencePiece's kind."""
    words = ["\u2581", "a", "b", "c", "ab", "\u2581a", "abc", "\u2581ab"]
    special = ["<unk>", "<s>", "</s>"]
    letters = [f"<0x{i:02X}>" for i in range(256)]
    tokens = [*special, *letters, *words]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (len(special) + len(letters)) + [-float(i) for i in range(len(words))])
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(words)]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_byte_level(writer: gguf.GGUFWriter, pre: str = "gpt-2", template: str | None = None) -> None:
    """A vocabulary of the 256 bytes, a few words, one that no merges make, a control token and an added one."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "ab", "abc", "Ġa", "zzz", "<|end|>", "<think>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * (len(tokens) - 2) + [TokenType.CONTROL, TokenType.USER_DEFINED])
    writer.add_token_merges(["a b", "ab c", "Ġ a"])
    writer.add_eos_token_id(len(tokens) - 2)
    if template is not None:
        writer.add_chat_template(template)
