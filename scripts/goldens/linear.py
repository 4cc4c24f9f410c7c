"""Tiny random hybrids with linear layers, and what transformers computes with them: tests/golden/linear.

Each folder is one model as `save_pretrained` writes it. `golden.safetensors`: tokens int32 [2, 90], more than one chunk
of the delta rule; logits f32 [2, 90, 131]; and logits_window, the same weights with a window of 8 in every attention
layer: their class knows no windows, that mask is made here and given to it. `generation.safetensors`: tokens int32
[2, 19] of a left-padded batch, attention_mask (0 = padding), and new_tokens int32 [2, 32], the greedy continuation.
"""

import shutil
import zlib
from pathlib import Path

import torch
import transformers

from scripts.goldens.cases import GOLDEN, LINEAR, MIN_MARGIN, settings_of, some
from scripts.goldens.models import BATCH, VOCAB, WINDOW, make_model, read_config, run, save

LENGTH = 90
PROMPT_LENGTHS, NEW_TOKENS = (11, 19), 32  # left-padded to 19; four windows of new tokens


@torch.no_grad()
def windowed(model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] with windows in the attention layers; fails unless these attend to what is in them alone."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    visible = (j <= i) & (j > i - WINDOW)
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min).expand(BATCH, 1, LENGTH, LENGTH)
    masks = {"full_attention": mask, "linear_attention": None}
    out = model(tokens, attention_mask=masks, output_attentions=True, use_cache=False)
    assert len(out.attentions) == model.config.layer_types.count("full_attention")
    assert all(((weights > 0) == visible).all() for weights in out.attentions)
    return out.logits


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
    return dict(tokens=prompt, attention_mask=mask, new_tokens=new_tokens)


def write_case(name: str) -> None:
    first, folder = zlib.crc32(name.encode()), GOLDEN / "linear" / name
    for seed in range(first, first + 100):
        try:
            return write_drawn(folder, make_model(read_config(settings_of(name)), seed), seed)
        except AssertionError as error:
            print(f"{name}, drawn again: {error}", flush=True)
    raise SystemExit(f"{name}: no draw tells windows and tokens apart")


@torch.no_grad()
def write_drawn(folder: Path, model, seed: int) -> None:
    # It multiplies with 1 + weight: smaller logits, of which f32 rounds less than tests allow.
    model.model.norm.weight.copy_(0.15 * (1 + model.model.norm.weight) - 1)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    golden = dict(tokens=tokens, logits=run(model, tokens), logits_window=windowed(model, tokens))
    difference = (golden["logits_window"] - golden["logits"]).abs().amax(-1)
    assert difference[:, :WINDOW].max() < 1e-5
    assert difference[:, WINDOW:].min() > 1e-2, "windows change too little"
    generated = generate(model, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    save(folder / "golden.safetensors", golden)
    save(folder / "generation.safetensors", generated)
    print(folder.name, model.config.layer_types, f"std of logits {float(golden['logits'].std()):.2f}", flush=True)


def write_linear(given) -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the order of sums must not depend on the machine's cores
    for name in some(given.only, LINEAR):
        write_case(name)
