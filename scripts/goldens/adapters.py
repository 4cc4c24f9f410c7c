"""Adapters as Hugging Face's PEFT saves them, and what PEFT computes with them.

A test merges them by `swa_jax.checkpoint.adapter` and compares the logits.
"""

import shutil

import numpy as np
import peft
import torch

from scripts.goldens.cases import GOLDEN, ROOT, eager, some

OUT = ROOT / "tests" / "checkpoint" / "peft_adapters"
JOINED = {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 3, "lora_alpha": 9}
PATTERNS = {"target_modules": "all-linear", "r": 3, "lora_alpha": 5, "use_rslora": True, "modules_to_save": ["lm_head"]}
PATTERNS["rank_pattern"] = {"down_proj": 2}
PATTERNS["alpha_pattern"] = {"layers.1.self_attn.q_proj": 40, "up_proj": 1}
CASES = {  # the golden model, and settings of PEFT that change what the adapters mean
    "plain": ("qwen3-hybrid", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 6}),
    "patterns": ("llama-plain", PATTERNS),
    "joined": ("phi3-full", JOINED),
}


def write_adapters(given) -> None:
    wanted = some(given.only, CASES)
    torch.manual_seed(0)  # PEFT draws too
    generator = torch.Generator().manual_seed(0)
    for name, (base, settings) in CASES.items():  # all are drawn, so that one alone is drawn as it is among all
        model = eager(GOLDEN / base)
        model.name_or_path = f"tests/golden/{base}"
        tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        with torch.no_grad():
            for parameter in (one for one in tuned.parameters() if one.requires_grad):
                parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
            tokens = torch.randint(1, model.config.vocab_size, (2, 24), generator=generator)
            logits = tuned(tokens, use_cache=False).logits.numpy()
        if name not in wanted:
            continue
        shutil.rmtree(OUT / name, ignore_errors=True)
        tuned.save_pretrained(OUT / name)
        (OUT / name / "README.md").unlink(missing_ok=True)
        np.savez(OUT / name / "logits.npz", tokens=tokens.numpy().astype(np.int32), logits=logits)
        print(f"{name}: {base}, {sum(file.stat().st_size for file in (OUT / name).iterdir())} bytes")
