"""Write the golden files under tests/golden: tiny random Hugging Face models and what they compute.

The test suite reads these files and needs neither torch nor transformers. To write them again, in an
environment of their own:

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch transformers
    /tmp/oracle/bin/python scripts/make_goldens.py                        # all of them
    /tmp/oracle/bin/python scripts/make_goldens.py --cases granite-full   # one, and its line of the README

Every model is float32 with eager attention on the CPU. tests/golden/README.md says what each file holds.
"""

import argparse
import copy
import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from golden_cases import (
    ALL_CASES,
    BATCH,
    GENERATED,
    LENGTH,
    MIN_MARGIN,
    NEW_TOKENS,
    NOPE_IN_FULL_LAYERS,
    ONE_SPELLING,
    PADDING,
    PROMPT_LENGTHS,
    ROPE_LENGTHS,
    ROPE_SETTINGS,
    SEEDS,
    SHAPE,
    SHARDED,
    SPARSE_CASES,
    VOCAB,
    WINDOW,
)
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def build(config, weights: dict[str, torch.Tensor] | None = None):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(weights)
    return model


def make_model(config, seed: int):
    """Random weights, large enough to matter: the usual 0.02 would leave attention nearly uniform."""
    model = build(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if ("norm" in name or name.endswith("scale")) and name.endswith("weight"):
                tensor.copy_(1 + 0.2 * noise)
            elif "sinks" in name:
                tensor.copy_(2 * noise)
            elif "embed_tokens" in name:
                tensor.copy_(0.5 * noise)
            else:
                tensor.copy_(0.25 * noise)
        for name, tensor in model.named_buffers():
            if "correction_bias" in name:
                tensor.copy_(0.25 * torch.randn(tensor.shape, generator=generator))
            elif "layer_scalar" in name:
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return model


def with_layers(model, layer_types: list[str]):
    """The same weights with other attention kinds (Mistral, which has one kind only, reads `sliding_window`)."""
    config = copy.deepcopy(model.config)
    if types_choose_rope(config):
        # The layers' types choose their RoPE as well: a window that nothing reaches stands for full attention.
        assert set(layer_types) == {"full_attention"}
        config.sliding_window = LENGTH
    elif hasattr(config, "layer_types"):
        config.layer_types = layer_types
    elif set(layer_types) == {"full_attention"}:
        config.sliding_window = None
    return build(config, model.state_dict())


def types_choose_rope(config) -> bool:
    return config.model_type in NOPE_IN_FULL_LAYERS or by_layer_type(config.rope_parameters)


def by_layer_type(rope: dict) -> bool:
    return "full_attention" in rope


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
    for layer, (kind, weights) in enumerate(zip(layer_types_of(model.config), out.attentions, strict=True)):
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


@torch.no_grad()
def generate(model, seed: int) -> dict[str, torch.Tensor]:
    """Greedy continuation of a left-padded batch with a cache, checked against a forward pass without one."""
    rng = torch.Generator().manual_seed(seed)
    width = max(PROMPT_LENGTHS)
    mask = torch.stack([torch.arange(width) >= width - length for length in PROMPT_LENGTHS]).long()  # [B, P]
    prompt = torch.randint(1, VOCAB, mask.shape, generator=rng) * mask
    model.generation_config.eos_token_id = None  # always NEW_TOKENS tokens
    tokens = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
    full_mask = torch.cat([mask, torch.ones(len(mask), NEW_TOKENS, dtype=torch.long)], dim=1)
    step_logits = run(model, tokens, full_mask)[:, width - 1 : -1]  # [B, N, V]
    new_tokens = tokens[:, width:]
    assert torch.equal(step_logits.argmax(-1), new_tokens), "cached generation differs from the forward pass"
    best = step_logits.topk(2, dim=-1).values
    margin = float((best[..., 0] - best[..., 1]).min())
    assert margin > MIN_MARGIN, f"two tokens are within {margin:.1e} of each other: choose another seed"
    assert all(len(set(row.tolist())) > 4 for row in new_tokens), "the continuation repeats itself: choose another seed"
    return dict(tokens=prompt, attention_mask=mask, new_tokens=new_tokens, step_logits=step_logits)


def read_config(config: dict):
    return AutoConfig.for_model(**copy.deepcopy(config))  # a copy, because reading adds keys to the RoPE settings


def legacy_config(config: dict) -> dict:
    """The settings as transformers 4 spelled them, less the keys whose default says the same."""
    legacy = dict(config)
    rope = dict(legacy.pop("rope_parameters"))
    nested = by_layer_type(rope)
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
    legacy["rope_scaling"] = (
        {"type" if kind == "yarn" and not nested else "rope_type": kind, **rope} if kind != "default" else None
    )
    legacy["torch_dtype"] = legacy.pop("dtype")
    legacy["transformers_version"] = "4.46.0"
    wanted = read_config(config)
    for key in ("head_dim", "num_key_value_heads", "layer_types"):
        if key == "layer_types" and config["model_type"] == "exaone4" and config["sliding_window"] is None:
            continue  # its class divides by zero without
        without = {other: value for other, value in legacy.items() if other != key}
        if getattr(read_config(without), key, None) == getattr(wanted, key, None):
            legacy = without
    reread = read_config(legacy)
    reread.rope_parameters.pop("type", None)  # transformers adds rope_type and keeps this one
    for key in (
        "rope_parameters",
        "sliding_window",
        "layer_types",
        "head_dim",
        "num_key_value_heads",
        "tie_word_embeddings",
    ):
        old, new = getattr(reread, key, None), getattr(wanted, key, None)
        assert old == new, f"legacy_config.json changes {key} from {new} to {old}"
    return legacy


def write_case(folder: Path, name: str, seed: int) -> str:
    """Write one case; return its line of the README table."""
    config = read_config({**SHAPE, **ALL_CASES[name]})
    model = make_model(config, seed)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 + seed))
    logits = run(model, tokens)
    golden = dict(tokens=tokens, logits=logits)
    kinds = layer_types_of(config)
    if "sliding_attention" in kinds:
        golden["logits_full"] = run(with_layers(model, ["full_attention"] * len(kinds)), tokens)
        if "full_attention" in kinds and not types_choose_rope(config):
            golden["logits_window"] = run(with_layers(model, ["sliding_attention"] * len(kinds)), tokens)
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

    if name in SPARSE_CASES:
        golden["aux_loss"] = balance(model, tokens)
    generated = generate(model, seed) if name in GENERATED else None
    model.save_pretrained(folder, max_shard_size="100KB" if name == SHARDED else "1GB")
    save(folder / "golden.safetensors", golden)
    if generated is not None:
        save(folder / "generation.safetensors", generated)

    if config.model_type not in ONE_SPELLING:
        legacy = legacy_config(json.loads((folder / "config.json").read_text()))
        (folder / "legacy_config.json").write_text(json.dumps(legacy, indent=2, sort_keys=True) + "\n")

    letters = "".join("w" if kind == "sliding_attention" else "F" for kind in kinds)
    tied = "tied" if config.tie_word_embeddings else "untied"
    first = model.model.layers[0].self_attn  # full layers may have other heads
    queries = getattr(first, "num_heads", config.num_attention_heads)
    heads = f"{queries}/{queries // first.num_key_value_groups} x {first.head_dim}"
    rope = config.rope_parameters
    by_type = [rope["full_attention"], rope["sliding_attention"]] if by_layer_type(rope) else [rope]
    rope = " / ".join(f"{one['rope_type']}, theta {one['rope_theta']:g}" for one in by_type)
    cells = [f"`{name}`", config.model_type, f"`{letters}`", heads, rope, tied, f"{float(logits.std()):.2f}"]
    return f"| {' | '.join(cells)} |"


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    save_file(
        {n: np.ascontiguousarray(a.astype(np.int32 if a.dtype == np.int64 else a.dtype)) for n, a in arrays.items()},
        path,
    )


def rope_goldens() -> dict:
    """By setting: rope_parameters, head_dim, inv_freq [head_dim / 2] and attention_factor."""
    goldens = {}
    for name, rope in ROPE_SETTINGS.items():
        config = read_config(
            dict(model_type="llama", head_dim=128, max_position_embeddings=131072, rope_parameters=rope)
        )
        if rope["rope_type"] == "default":
            model = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
            inv_freq, factor = model.inv_freq, model.attention_scaling
        else:
            rule = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
            inv_freq, factor = rule(config, device="cpu", seq_len=ROPE_LENGTHS.get(name))
        goldens[name] = dict(
            rope_parameters=rope, head_dim=128, inv_freq=[float(f) for f in inv_freq], attention_factor=float(factor)
        )
        if name in ROPE_LENGTHS:
            goldens[name]["length"] = ROPE_LENGTHS[name]
    return goldens


README = """# Golden files

What tiny random Hugging Face models compute, for the parity tests. Written by `scripts/make_goldens.py` with
torch {torch} (CPU, float32, eager attention) and the transformers that each `config.json` names; do not edit by hand.

Each folder is one model as `save_pretrained` writes it, and beside it:

- `golden.safetensors`: `tokens` int32 [{batch}, {length}], `logits` float32 [{batch}, {length}, {vocab}]. Models with
  windowed layers (w = {window}, counting the query's own key) also have `logits_full`, the same weights with full
  attention in every layer. Those that mix both kinds have `logits_window` too, with windows in every layer, unless
  their rotary embeddings go by layer type. Mixtures of experts have `aux_loss` float32 [1], the load-balancing
  loss where the last {padding} tokens of the second row are padding.
- `legacy_config.json`, where transformers 4 knew the family: the same settings as it spelled them (`rope_theta`,
  `rope_scaling`, `torch_dtype`).
- `generation.safetensors` (in {generated}): a left-padded batch `tokens` int32
  [2, {prompt}] with `attention_mask` (0 = padding), its greedy continuation `new_tokens` int32 [2, {new}], and the
  logits it was taken from, `step_logits` float32 [2, {new}, {vocab}].

`{sharded}` is split into several safetensors files with an index. `rope.json` holds inverse frequencies and
attention factors of RoPE settings of released models and some rarer ones, by name.

The script fails unless every layer's attention weights are positive exactly at the visible keys, windowed logits
differ from full ones after the first window (and agree inside it), RoPE scaling changes the logits, and cached
generation equals the forward pass.

| folder | model_type | layers (F full, w window) | heads/KV x head_dim | RoPE | embeddings | std of logits |
|---|---|---|---|---|---|---|
{table}
"""


def rows_of(readme: Path) -> dict[str, str]:
    """The lines of the table by their case; none without the file."""
    lines = readme.read_text().splitlines() if readme.exists() else []
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "tests" / "golden")
    parser.add_argument("--cases", nargs="+", choices=ALL_CASES, help="write these alone")
    options = parser.parse_args()
    out = options.out
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the order of sums must not depend on the machine's cores
    rows = rows_of(out / "README.md") if options.cases else {}
    for name in options.cases or ALL_CASES:
        shutil.rmtree(out / name, ignore_errors=True)
        rows[name] = write_case(out / name, name, SEEDS[name])
        print(rows[name])
    if not options.cases:
        (out / "rope.json").write_text(json.dumps(rope_goldens(), indent=1) + "\n")
    text = README.format(
        torch=torch.__version__.split("+")[0],
        batch=BATCH,
        length=LENGTH,
        padding=PADDING,
        vocab=VOCAB,
        window=WINDOW,
        generated=", ".join(f"`{name}`" for name in GENERATED),
        prompt=max(PROMPT_LENGTHS),
        new=NEW_TOKENS,
        sharded=SHARDED,
        table="\n".join(rows[name] for name in ALL_CASES if name in rows),
    )
    (out / "README.md").write_text(text)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{len(rows)} models, {size / 1e6:.2f} MB in {out}")


if __name__ == "__main__":
    main()
