"""Write tests/golden/text_losses.json: what transformers and lm-evaluation-harness say of a text under real models.

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch transformers gguf lm-eval
    swa-jax import FILE.gguf FOLDER
    /tmp/oracle/bin/python scripts/make_text_losses.py NAME FILE.gguf FOLDER

The name is smollm2 or gemma3-270m. The tokenizer is that of FOLDER, as transformers reads it: from SmolLM2's GGUF
file itself it makes another one, which does not part digits. Kept are the mean loss of LICENSE, cut into sequences that
begin with the tokenizer's start token where its own post-processor puts one, and the harness's rolling log-likelihoods
of that file's first paragraphs.
"""

import argparse
import json
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests" / "golden" / "text_losses.json"
LENGTHS = (256, 512)
PARAGRAPHS = 6


@torch.no_grad()
def text_loss(model, tokenizer, text: str, length: int) -> dict:
    """Nats a token. A sequence reads `length` tokens and scores those after the first, and the one that follows it."""
    ids = tokenizer(text).input_ids
    start = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    text_ids = ids[len(start) :]
    rows = (
        [start + text_ids[i : i + length] for i in range(0, len(text_ids), length)]
        if start
        else [text_ids[i : i + length + 1] for i in range(0, len(text_ids) - 1, length)]
    )
    total, count = 0.0, 0
    for row in rows:
        logits = model(torch.tensor([row])).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum").item()
        count += len(row) - 1
    return {"length": length, "nll": total / count, "num_tokens": count}


def rolling(model, tokenizer, texts: list[str]) -> list[float]:
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=2048)
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    return lm.loglikelihood_rolling(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    text = (ROOT / "LICENSE").read_text()
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()][:PARAGRAPHS]
    model = AutoModelForCausalLM.from_pretrained(
        asked.file.parent, gguf_file=asked.file.name, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(asked.folder)
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    found[asked.name] = {
        "text": [text_loss(model, tokenizer, text, length) for length in LENGTHS],
        "rolling": rolling(model, tokenizer, paragraphs),
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
