"""Tiny random Hugging Face models, declared in cases.yaml, and what they compute: see tests/golden/README.md."""

import copy
import json
import shutil

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from scripts.goldens.cases import (
    DECLARED,
    GOLDEN,
    LETTERS,
    NAMES,
    SHAPE,
    rope_settings,
    seed_of,
    settings_of,
    some,
    write_json,
)

WINDOW = 8
BATCH, LENGTH, VOCAB = 2, 45, SHAPE["vocab_size"]  # LENGTH is more than five windows
PADDING = 12  # of the tokens that the load-balancing loss of experts leaves out


def build(config, weights=None):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(weights)
    return model


@torch.no_grad()
def make_model(config, seed: int):
    """Random weights, large enough to matter: the usual 0.02 would leave attention nearly uniform."""
    model = build(config)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if ("norm" in name or name.endswith("scale")) and name.endswith("weight"):
            tensor.copy_(1 + 0.2 * noise)
        else:
            tensor.copy_((2 if "sinks" in name else 0.5 if "embed_tokens" in name else 0.25) * noise)
    for name, tensor in model.named_buffers():
        if "correction_bias" in name:
            tensor.copy_(0.25 * torch.randn(tensor.shape, generator=generator))
        elif "layer_scalar" in name:
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return model


def with_layers(model, kind: str):
    """The same weights with one kind of attention in every layer."""
    config = copy.deepcopy(model.config)
    if types_choose_rope(config):
        # The layers' types choose their RoPE as well: a window that nothing reaches stands for full attention.
        assert kind == "full_attention"
        config.sliding_window = LENGTH
    elif hasattr(config, "layer_types"):
        config.layer_types = [kind] * config.num_hidden_layers
    elif kind == "full_attention":  # Mistral has one kind only, and reads `sliding_window`
        config.sliding_window = None
    return build(config, model.state_dict())


def types_choose_rope(config) -> bool:
    return config.model_type in DECLARED["nope_in_full_layers"] or "full_attention" in config.rope_parameters


def layer_types_of(config) -> list[str]:
    if getattr(config, "layer_types", None):
        return config.layer_types
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return [kind] * config.num_hidden_layers


@torch.no_grad()
def run(model, tokens, attention_mask=None) -> torch.Tensor:
    """Logits [B, T, V]; fails unless every layer attends to its visible keys and to nothing else."""
    positions = None if attention_mask is None else (attention_mask.cumsum(1) - 1).clamp(min=0)
    out = model(tokens, attention_mask=attention_mask, position_ids=positions, output_attentions=True, use_cache=False)
    i, j = torch.arange(tokens.shape[1])[:, None], torch.arange(tokens.shape[1])[None, :]
    real = torch.ones_like(tokens) if attention_mask is None else attention_mask
    kinds = [kind for kind in layer_types_of(model.config) if kind != "linear_attention"]
    for layer, (kind, weights) in enumerate(zip(kinds, out.attentions, strict=True)):
        visible = (j <= i) & (j > i - model.config.sliding_window) if kind == "sliding_attention" else j <= i
        visible = visible[None, None] & real[:, None, None, :].bool()
        # Queries that are padding themselves see whatever eager attention gives them.
        wrong = ((weights > 0) != visible) & real[:, None, :, None].bool()
        assert not wrong.any(), f"layer {layer} ({kind}): {int(wrong.sum())} attention weights do not follow the mask"
    return out.logits


@torch.no_grad()
def balance(model, tokens) -> torch.Tensor:
    """The load-balancing loss [1] where the last `PADDING` tokens of the second row are padding."""
    mask = torch.ones_like(tokens)
    mask[1, -PADDING:] = 0
    return model(tokens, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss.reshape(1)


def read_config(config: dict):
    return AutoConfig.for_model(**copy.deepcopy(config))  # a copy, because reading adds keys to the RoPE settings


def legacy_config(config: dict) -> dict:
    """The settings as transformers 4 spelled them, less the keys whose default says the same."""
    legacy = dict(config)
    rope = dict(legacy.pop("rope_parameters"))
    nested = "full_attention" in rope
    if nested:
        if config["model_type"] == "gemma3_text":
            legacy["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    legacy["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if "partial_rotary_factor" in rope:
        legacy["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    # Both spellings of the key are common: Llama 3.1 says rope_type, Qwen2.5's page on YaRN says type. Where RoPE goes
    # by layer type, transformers 5 does not read the second.
    key = "type" if kind == "yarn" and not nested else "rope_type"
    legacy["rope_scaling"] = {key: kind, **rope} if kind != "default" else None
    legacy["torch_dtype"] = legacy.pop("dtype")
    legacy["transformers_version"] = "4.46.0"
    wanted = read_config(config)
    may_follow = ("head_dim", "num_key_value_heads", "layer_types")
    for key in may_follow:
        if key == "layer_types" and config["model_type"] == "exaone4" and config["sliding_window"] is None:
            continue  # its class divides by zero without
        without = {other: value for other, value in legacy.items() if other != key}
        if getattr(read_config(without), key, None) == getattr(wanted, key, None):
            legacy = without
    reread = read_config(legacy)
    reread.rope_parameters.pop("type", None)  # transformers adds rope_type and keeps this one
    for key in ("rope_parameters", "sliding_window", *may_follow, "tie_word_embeddings"):
        old, new = getattr(reread, key, None), getattr(wanted, key, None)
        assert old == new, f"legacy_config.json changes {key} from {new} to {old}"
    return legacy


def logits_of(name: str, model, tokens) -> dict[str, torch.Tensor]:
    """Logits of a case, and under other attention or without RoPE scaling; fails where the difference is none."""
    config, logits = model.config, run(model, tokens)
    golden = dict(tokens=tokens, logits=logits)
    kinds = layer_types_of(config)
    if "sliding_attention" in kinds:
        golden["logits_full"] = run(with_layers(model, "full_attention"), tokens)
        if "full_attention" in kinds and not types_choose_rope(config):
            golden["logits_window"] = run(with_layers(model, "sliding_attention"), tokens)
        for other in golden.keys() - {"tokens", "logits"}:
            # The first window sees the same keys either way; everything after it must differ.
            assert torch.allclose(golden[other][:, :WINDOW], logits[:, :WINDOW], atol=1e-5), other
            difference = (golden[other] - logits)[:, WINDOW:].abs().amax(-1)  # [B, T - w]
            assert difference.min() > 1e-2, f"{name}: {other} differs from logits by {difference.min():.1e} only"
    elif config.rope_parameters["rope_type"] != "default":
        plain = copy.deepcopy(config)
        plain.rope_parameters = dict(rope_type="default", rope_theta=config.rope_parameters["rope_theta"])
        unscaled = build(plain, model.state_dict())
        assert (run(unscaled, tokens) - logits).abs().max() > 1e-1, f"{name}: RoPE scaling changes nothing"
    return golden


def write_case(name: str) -> str:
    """Write one case; return its line of the README table."""
    folder, seed, config = GOLDEN / name, seed_of(name), read_config(settings_of(name))
    shutil.rmtree(folder, ignore_errors=True)
    model = make_model(config, seed)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 + seed))
    golden = logits_of(name, model, tokens)
    if name in DECLARED["sparse"]:
        golden["aux_loss"] = balance(model, tokens)
    model.save_pretrained(folder, max_shard_size="100KB" if name == DECLARED["sharded"] else "1GB")
    save(folder / "golden.safetensors", golden)
    if config.model_type not in DECLARED["one_spelling"]:
        legacy = legacy_config(json.loads((folder / "config.json").read_text()))
        (folder / "legacy_config.json").write_text(json.dumps(legacy, indent=2, sort_keys=True) + "\n")

    letter = {kind: letter for letter, kind in LETTERS.items()}
    first = model.model.layers[0].self_attn  # full layers may have other heads
    queries = getattr(first, "num_heads", config.num_attention_heads)
    rope = config.rope_parameters
    by_type = [rope["full_attention"], rope["sliding_attention"]] if "full_attention" in rope else [rope]
    cells = [
        f"`{name}`",
        config.model_type,
        f"`{''.join(letter[kind] for kind in layer_types_of(config))}`",
        f"{queries}/{queries // first.num_key_value_groups} x {first.head_dim}",
        " / ".join(f"{one['rope_type']}, theta {one['rope_theta']:g}" for one in by_type),
        "tied" if config.tie_word_embeddings else "untied",
        f"{float(golden['logits'].std()):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def save(path, tensors: dict[str, torch.Tensor]) -> None:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    save_file(
        {n: np.ascontiguousarray(a.astype(np.int32 if a.dtype == np.int64 else a.dtype)) for n, a in arrays.items()},
        path,
    )


def rope_goldens() -> dict:
    """By setting: rope_parameters, head_dim, inv_freq [head_dim / 2] and attention_factor."""
    goldens, lengths = {}, DECLARED["rope_lengths"]
    for name, rope in rope_settings().items():
        config = read_config(
            dict(model_type="llama", head_dim=128, max_position_embeddings=131072, rope_parameters=rope)
        )
        if rope["rope_type"] == "default":
            model = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
            inv_freq, factor = model.inv_freq, model.attention_scaling
        else:
            rule = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
            inv_freq, factor = rule(config, device="cpu", seq_len=lengths.get(name))
        frequencies = dict(inv_freq=[float(f) for f in inv_freq], attention_factor=float(factor))
        goldens[name] = dict(rope_parameters=rope, head_dim=128, **frequencies)
        if name in lengths:
            goldens[name]["length"] = lengths[name]
    return goldens


def write_models(given) -> None:
    """The cases, RoPE frequencies, and the rows of the README's table."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the order of sums must not depend on the machine's cores
    readme = GOLDEN / "README.md"
    before, *rows = readme.read_text().split("\n| `")
    known = {row.split("`")[0]: f"| `{row.strip()}" for row in rows}
    for name in some(given.only, NAMES):
        known[name] = write_case(name)
        print(known[name], flush=True)
    if not given.only:
        write_json(GOLDEN / "rope.json", rope_goldens())
    readme.write_text("\n".join([before, *(known[name] for name in NAMES if name in known)]) + "\n")
