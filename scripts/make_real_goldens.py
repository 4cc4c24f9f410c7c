"""Write tests/golden/real: what transformers makes of a text with the real models of `make models`.

Run in the environment of `make_goldens.py`, with the package `gguf` beside it; takes minutes and 6 GB:

    python scripts/make_real_goldens.py

`text.txt` is a text of ours with code, numbers, other scripts and signs. NAME.safetensors holds, of transformers' own
loading of the GGUF file in f32 with eager attention:

- `ids` int32 [T]: the tokens of the text; those of the start stand before them where the tokenizer puts some.
- `log_probs` float32 [T - 1]: of each next token.
- `columns` int32 [C], `logits` float32 [T / 50, C]: at every 50th position, for some tokens of the vocabulary.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "tests" / "golden" / "real"
FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3-270m": "gemma-3-270m-q4_k_m.gguf"}
EVERY, COLUMNS = 50, 256


@torch.no_grad()
def golden(file: str, text: str) -> dict[str, np.ndarray]:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models", gguf_file=file)
    ids = tokenizer(text)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(
        ROOT / "models", gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    logits = model(torch.tensor([ids])).logits[0]
    log_probs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    columns = np.sort(np.random.default_rng(0).choice(logits.shape[-1], COLUMNS, replace=False)).astype(np.int32)
    return {
        "ids": np.array(ids, np.int32),
        "log_probs": log_probs.numpy(),
        "columns": columns,
        "logits": np.ascontiguousarray(logits[::EVERY].numpy()[:, columns]),
    }


if __name__ == "__main__":
    for name, file in FILES.items():
        found = golden(file, (REAL / "text.txt").read_text())
        assert len(found["ids"]) >= 2000, f"{name}: {len(found['ids'])} tokens"
        save_file(found, REAL / f"{name}.safetensors")
        print(name, {key: array.shape for key, array in found.items()})
