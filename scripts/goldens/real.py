"""What transformers, and lm-evaluation-harness, make of a text with the real models of `make models`.

tests/golden/real has `text.txt`, a text of ours with code, numbers, other scripts and signs, and NAME.safetensors:

- `ids` int32 [T]: the tokens of the text; those of the start stand before them where the tokenizer puts some.
- `log_probs` float32 [T - 1]: of each next token.
- `columns` int32 [C], `logits` float32 [T / 50, C]: at every 50th position, for some tokens of the vocabulary.

tests/golden/text_losses.json has the mean loss of LICENSE, cut into sequences that begin with the tokenizer's start
token where its own post-processor puts one, and the harness's rolling log-likelihoods of that file's first paragraphs.
For these the tokenizer is that of `swa-jax import models/FILE models/NAME`, as transformers reads it: from SmolLM2's
GGUF file itself it makes another one, which does not part digits.
"""

import json

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from scripts.goldens.cases import GOLDEN, ROOT, eager, some, write_json

MODELS = ROOT / "models"
FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3-270m": "gemma-3-270m-q4_k_m.gguf"}
EVERY, COLUMNS = 50, 256
LENGTHS = (256, 512)
PARAGRAPHS = 6


@torch.no_grad()
def golden(file: str, text: str) -> dict[str, np.ndarray]:
    ids = AutoTokenizer.from_pretrained(MODELS, gguf_file=file)(text)["input_ids"]
    logits = eager(MODELS, gguf_file=file)(torch.tensor([ids])).logits[0]
    log_probs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    columns = np.sort(np.random.default_rng(0).choice(logits.shape[-1], COLUMNS, replace=False)).astype(np.int32)
    return {
        "ids": np.array(ids, np.int32),
        "log_probs": log_probs.numpy(),
        "columns": columns,
        "logits": np.ascontiguousarray(logits[::EVERY].numpy()[:, columns]),
    }


def write_real(given) -> None:
    for name in some(given.only, FILES):
        found = golden(FILES[name], (GOLDEN / "real" / "text.txt").read_text())
        assert len(found["ids"]) >= 2000, f"{name}: {len(found['ids'])} tokens"
        save_file(found, GOLDEN / "real" / f"{name}.safetensors")
        print(name, {key: array.shape for key, array in found.items()})


@torch.no_grad()
def text_loss(model, tokenizer, text: str, length: int) -> dict:
    """Nats a token. A sequence reads `length` tokens and scores those after the first, and the one that follows it."""
    ids = tokenizer(text).input_ids
    start = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    ids, more = ids[len(start) :], 0 if start else 1
    rows = [start + ids[i : i + length + more] for i in range(0, len(ids) - more, length)]
    total, count = 0.0, 0
    for row in rows:
        logits = model(torch.tensor([row])).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum").item()
        count += len(row) - 1
    return {"length": length, "nll": total / count, "num_tokens": count}


def rolling(model, tokenizer, texts: list[str]) -> list[float]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=2048)
    return lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)])


def write_losses(given) -> None:
    file, text = GOLDEN / "text_losses.json", (ROOT / "LICENSE").read_text()
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()][:PARAGRAPHS]
    found = json.loads(file.read_text()) if given.only else {}
    for name in some(given.only, FILES):
        model = eager(MODELS, gguf_file=FILES[name], attn_implementation=None)
        tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
        losses = [text_loss(model, tokenizer, text, length) for length in LENGTHS]
        found[name] = {"text": losses, "rolling": rolling(model, tokenizer, paragraphs)}
        write_json(file, found)
