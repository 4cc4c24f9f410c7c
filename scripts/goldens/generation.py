"""64 greedy tokens of transformers after prompts of every golden model.

Each prompt is continued alone. The two likeliest tokens of a step are never closer than `MIN_MARGIN`, so that rounding
cannot change a reply; prompts are drawn until that holds.
"""

import json

import numpy as np
import torch
import transformers

from scripts.goldens.cases import GOLDEN, MIN_MARGIN, SHAPE, eager, golden_folders, merged, some

NEW_TOKENS = 64
SHARED, ENDS = 13, (6, 17)  # two prompts begin alike
OTHERS = (1, 40)  # their lengths


def continue_prompt(model, prompt: list[int]) -> list[int] | None:
    """The reply; None where two tokens of a step are too close."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits).topk(2, dim=-1).values
    margin = float((best[..., 0] - best[..., 1]).min())
    return None if margin < MIN_MARGIN else out.sequences[0, len(prompt) :].tolist()


def replies_of(model) -> dict:
    rope = model.config.rope_parameters
    # transformers rotates a sequence by other frequencies, from its first token on, once it has grown past this length.
    # A cache of swa-jax has one set of them, so that these prompts are longer from the start.
    more = rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else 0
    for seed in range(1000):
        rng = np.random.default_rng(seed)

        def drawn(length: int, rng=rng) -> list[int]:
            return rng.integers(1, SHAPE["vocab_size"], length).tolist()

        start = drawn(more + SHARED)
        prompts = [start + drawn(length) for length in ENDS] + [drawn(more + length) for length in OTHERS]
        replies = []
        while len(replies) < len(prompts) and (reply := continue_prompt(model, prompts[len(replies)])) is not None:
            replies.append(reply)
        if len(replies) == len(prompts):
            return {"seed": seed, "prompts": prompts, "replies": replies}
    raise SystemExit("no prompts whose replies are clear")


def write_generation(given) -> None:
    torch.manual_seed(0)
    file = GOLDEN / "generated.json"
    found = merged(file, given.only, "models")
    for name in some(given.only, golden_folders()):
        found[name] = replies_of(eager(GOLDEN / name))
        different = len({tuple(reply) for reply in found[name]["replies"]})
        print(name, "seed", found[name]["seed"], "different replies", different, flush=True)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    file.write_text(f'{{"transformers": "{transformers.__version__}",\n "models": {{\n{lines}\n}}}}\n')
