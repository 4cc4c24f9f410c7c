"""Write tests/golden/generated.json: 64 greedy tokens of transformers after prompts of every golden model.

In the environment that `scripts/make_goldens.py` names, after it:

    /tmp/oracle/bin/python scripts/make_generation_goldens.py [NAME...]

Each prompt is continued alone, in float32 with eager attention on the CPU. The two likeliest tokens of a step are never
closer than `MIN_MARGIN`, so that rounding cannot change a reply; prompts are drawn until that holds.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from golden_cases import MIN_MARGIN, VOCAB
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
NEW_TOKENS = 64
SHARED, ENDS = 13, (6, 17)  # two prompts begin alike
OTHERS = (1, 40)  # their lengths


def continue_prompt(model, prompt: list[int]) -> tuple[list[int], float]:
    """The reply, and the least distance between the two likeliest tokens of a step."""
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
    return out.sequences[0, len(prompt) :].tolist(), float((best[..., 0] - best[..., 1]).min())


def replies_of(model) -> dict:
    rope = model.config.rope_parameters
    # transformers turns a sequence by other frequencies, from its first token on, once it has grown past this length.
    # A cache of swa-jax has one set of them, so that these prompts are longer from the start.
    more = rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else 0
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        start = rng.integers(1, VOCAB, more + SHARED).tolist()
        prompts = [start + rng.integers(1, VOCAB, length).tolist() for length in ENDS]
        prompts += [rng.integers(1, VOCAB, more + length).tolist() for length in OTHERS]
        replies = []
        for prompt in prompts:
            reply, margin = continue_prompt(model, prompt)
            if margin < MIN_MARGIN:
                break
            replies.append(reply)
        if len(replies) == len(prompts):
            return {"seed": seed, "prompts": prompts, "replies": replies}
    raise SystemExit("no prompts whose replies are clear")


def main() -> None:
    written = GOLDEN / "generated.json"
    found = json.loads(written.read_text())["models"] if sys.argv[1:] else {}
    for folder in sorted(path.parent for path in GOLDEN.glob("*/config.json")):
        if sys.argv[1:] and folder.name not in sys.argv[1:]:
            continue
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        found[folder.name] = replies_of(model)
        different = len({tuple(reply) for reply in found[folder.name]["replies"]})
        print(folder.name, "seed", found[folder.name]["seed"], "different replies", different, flush=True)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    text = f'{{"transformers": "{transformers.__version__}",\n "models": {{\n{lines}\n}}}}\n'
    written.write_text(text)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
