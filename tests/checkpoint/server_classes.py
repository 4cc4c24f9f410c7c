"""What the classes of inference servers do with a `config.json`, as their sources have it, class by class.

Each function follows one class and gives the window of every layer, None for full attention. It knows nothing of
`swa_jax.checkpoint.servers`, whose table says the same in another way.
"""

import functools
import runpy
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm" / "swa_jax_vllm"


def _by_layer_types(hf, surplus=0):
    types = hf.get("layer_types") or ["full_attention"] * hf["num_hidden_layers"]
    assert len(types) == hf["num_hidden_layers"]
    return [hf["sliding_window"] + surplus if kind == "sliding_attention" else None for kind in types]


def _full(hf):
    return [None] * hf["num_hidden_layers"]


def _even(hf):
    return [hf["sliding_window"] if layer % 2 == 0 else None for layer in range(hf["num_hidden_layers"])]


def transformers(hf):
    """transformers 5.23; these classes make the mask of windows also where no layer has one, and fail without one."""
    (architecture,) = hf["architectures"]
    wants = ["Gemma2", "Gemma3", "Ministral", "Olmo3", "Cohere2", "GptOss", "Cwm", "GraniteSWA", "VaultGemma"]
    if architecture.removesuffix("ForCausalLM") in wants:
        assert isinstance(hf["sliding_window"], int), "the class fails at its first token"


# Classes that vLLM runs as TransformersForCausalLM.
BY_TRANSFORMERS = {"Olmo2", "Olmo3", "SmolLM3", "Ministral", "Mellum", "Cwm", "SeedOss", "Starcoder2", "VaultGemma"}
BY_TRANSFORMERS |= {"GraniteSWA"}


def _vllm_cache_window(hf):
    """vllm 0.33.0, engine/arg_utils.py: one window for all layers that have none of their own."""
    types = hf.get("layer_types")
    if hf["model_type"] in ("qwen2", "qwen3", "qwen3_moe") and not hf.get("use_sliding_window"):
        return None  # transformers' configuration class
    if types is None and hf["model_type"] in ("qwen2", "qwen3"):  # which it makes itself
        first = hf.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(hf["num_hidden_layers"])]
    if types is None or all(kind == "sliding_attention" for kind in types):
        return hf.get("sliding_window")
    return None


def vllm(hf):
    (architecture,) = hf["architectures"]
    common = _vllm_cache_window(hf)
    name = architecture.removesuffix("ForCausalLM")
    native = ["Llama", "Mistral", "Phi3", "Gemma2", "Gemma3", "Gemma4", "Exaone4", "Granite", "Apertus"]
    native += ["Afmoe", "ExaoneMoe", "GraniteMoeSWA", "Laguna"]
    if name in native or name in BY_TRANSFORMERS:
        windows = _by_layer_types(hf)
    elif name in ["Cohere", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral"]:
        windows = _full(hf)
    else:
        cohere = functools.partial(_by_layer_types, surplus=1)
        windows = {"Cohere2": cohere, "Cohere2Moe": cohere, "GptOss": _even}[name](hf)
    if name == "Afmoe":
        assert not hf.get("attention_bias")
        assert not hf["tie_word_embeddings"], "nothing is loaded into the output matrix"
    if name in ("Cohere2Moe", "ExaoneMoe", "Laguna"):
        assert len(hf["mlp_layer_types"]) == hf["num_hidden_layers"]
    if name == "Cohere2Moe" and hf["prefix_dense_sliding_window_pattern"] == 1:
        kinds = "".join(kind[0] for kind in hf["mlp_layer_types"])
        assert "sd" not in kinds, "dense layers are rotated where they come first"
    if architecture == "GraniteForCausalLM" and hf.get("layer_types") is not None:
        assert hf.get("attention_sinks") is False, "the class would want sink logits"
    if architecture == "Qwen2ForCausalLM" and len(set(hf.get("layer_types") or [])) > 1:
        assert hf["max_window_layers"] == hf["num_hidden_layers"], "the class refuses to start"
    if architecture == "LlamaForCausalLM" and hf["model_type"] == "qwen2":
        assert hf["qkv_bias"]
        assert not hf.get("attention_bias")
    return [window or common for window in windows]


def vllm_plugin(hf):
    """The plug-in's own reading of the pattern; of a layer with single full KV heads the window of the others."""
    (architecture,) = hf["architectures"]
    assert f"class {architecture}(" in (PLUGIN / "models.py").read_text()
    kv_heads = hf["num_key_value_heads"]
    pattern = runpy.run_path(PLUGIN / "pattern.py")["Pattern"].read(
        hf["swa_pattern"], hf["num_hidden_layers"], kv_heads
    )
    layers = [pattern.rules(layer, kv_heads) for layer in range(hf["num_hidden_layers"])]
    return [next((rule.window for rule in rules if rule.window), None) for rules in layers]


def tpu_inference(hf):
    """tpu-inference 0.32.0 with MODEL_IMPL_TYPE=vllm: vLLM's classes; models of transformers are not among them."""
    assert hf["architectures"][0].removesuffix("ForCausalLM") not in BY_TRANSFORMERS - {"GraniteSWA"}
    return vllm(hf)


def sglang(hf):
    """sglang 0.5.23. Windows count the query's own key."""
    (architecture,) = hf["architectures"]
    if architecture in ("Olmo3ForCausalLM", "Olmo2ForCausalLM") and hf["model_type"] == "olmo3":
        architecture = "Olmo2ForCausalLM"  # configs/olmo3.py
        rope, windowed = (hf["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
        # It reads RoPE from elsewhere: one theta, and its scaling in full layers alone.
        assert rope["rope_theta"] == windowed["rope_theta"] == hf["rope_theta"]
        assert rope["rope_type"] == (hf["rope_scaling"] or windowed)["rope_type"]
        assert windowed["rope_type"] == "default"
    plain = ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Granite", "Phi3", "Cohere", "Starcoder2", "Apertus"]
    native = dict.fromkeys((f"{name}ForCausalLM" for name in plain), _full) | {
        "Olmo2ForCausalLM": lambda hf: _by_layer_types(hf) if "sliding_window" in hf else _full(hf),
        "Gemma2ForCausalLM": lambda hf: _even(hf) if hf.get("sliding_window") else _full(hf),
        "Gemma3ForCausalLM": _by_layer_types,
        "GptOssForCausalLM": _by_layer_types,
        "MellumForCausalLM": _by_layer_types,
        "GraniteSWAForCausalLM": _by_layer_types,
        "Cohere2ForCausalLM": lambda hf: _by_layer_types(hf, surplus=1),
        "TransformersForCausalLM": lambda hf: _by_layer_types(hf, surplus=1),
        "MixtralForCausalLM": _full,
        "AfmoeForCausalLM": _by_layer_types,
        "GraniteMoeSWAForCausalLM": _by_layer_types,
        "LagunaForCausalLM": _by_layer_types,
    }
    if architecture == "Phi3ForCausalLM":
        assert (hf.get("partial_rotary_factor") or 1) == hf["rope_parameters"].get("partial_rotary_factor", 1)
    if architecture == "GraniteMoeSWAForCausalLM":
        assert hf["head_dim"] * hf["num_attention_heads"] == hf["hidden_size"]
    if architecture.removesuffix("ForCausalLM") in ("Qwen3Moe", "Mellum", "GptOss", "Afmoe", "Mixtral"):
        assert not hf.get("tie_word_embeddings"), "nothing is loaded into the output matrix"
    return native[architecture](hf)


def sglang_jax(hf):
    """sglang-jax of 2026-08-21: srt/models, with transformers 4.57, whose configurations have `rope_theta`."""
    (architecture,) = hf["architectures"]
    assert hf["rope_theta"]
    assert (hf.get("rope_scaling") or {"rope_type": "default"})["rope_type"] == "default"
    if architecture == "Gemma2ForCausalLM":
        return _by_layer_types(hf)
    assert architecture.removesuffix("ForCausalLM") in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
    assert not hf.get("sliding_window"), "it makes a pool for windowed layers"
    return _full(hf)


def mlx_lm(hf):
    """mlx-lm 0.32.2: models/NAME.py, by the model type; `mistral` is llama."""
    name = {"mistral": "llama"}.get(hf["model_type"], hf["model_type"])
    scaling = hf.get("rope_scaling") or {"rope_type": "default"}
    assert "tie_word_embeddings" in hf, "which is true by default"
    if name == "gemma4_text":
        full = hf["layer_types"].index("full_attention")
        assert hf["global_head_dim"] == hf["per_layer_config"][str(full)].get("head_dim", hf["head_dim"])
        return _by_layer_types(hf)
    if name == "laguna":
        assert hf["gating"] in (True, "per-head")
        assert not hf.get("qkv_bias")
        assert not hf["attention_bias"]
    elif name == "mellum":
        assert hf["num_experts"]
        assert set(hf["mlp_layer_types"]) == {"sparse"}
        assert {hf["rope_parameters"][kind]["rope_type"] for kind in hf["layer_types"]} <= {"default", "yarn", "llama3"}
    else:
        assert hf["rope_theta"]
        assert scaling["rope_type"] in ("default", "yarn", "llama3")
    if name in ("olmo2", "qwen2", "qwen3", "smollm3"):
        return _full(hf)
    kinds = set(hf.get("layer_types") or ["full_attention"])
    assert "full_attention" in kinds, "layer_types.index fails"
    if name == "olmo3":
        assert "sliding_attention" in kinds, "layer_types.index fails"
        assert len({rope["rope_theta"] for rope in hf["rope_parameters"].values()} | {hf["rope_theta"]}) == 1
    assert name in ("llama", "mellum", "olmo3", "afmoe", "laguna")
    return _by_layer_types(hf)


def sglang_pools(hf, command):
    """The layers of the short pool and of the other one; None where there is one pool (configs/model_config.py)."""
    (architecture,) = hf["architectures"]
    if architecture.removesuffix("ForCausalLM") in ("Gemma2", "Gemma3", "Olmo2", "Olmo3", "Exaone4"):
        return None  # arg_groups/model_overrides
    named = architecture.removesuffix("ForCausalLM") in ("GptOss", "GraniteSWA", "GraniteMoeSWA", "Mellum", "Laguna")
    if "--disable-hybrid-swa-memory" in command or not (named or hf.get("is_hybrid_swa")):
        return None
    if named:
        short = [kind == "sliding_attention" for kind in hf["layer_types"]]
    else:
        short = [kind == 1 for kind in hf["hybrid_layer_pattern"]]
    assert any(short), "Hybrid SWA model must have at least one SWA layer"
    return [i for i, one in enumerate(short) if one], [i for i, one in enumerate(short) if not one]
