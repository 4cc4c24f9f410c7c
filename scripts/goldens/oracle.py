"""What `exports.py` runs in a Python with torch, transformers and peft: these, on what was written in a folder."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import numpy as np

from scripts.goldens.cases import GOLDEN, eager

LOGITS = "logits.npz"


def read_export(folder: Path, model: str) -> dict:
    """What transformers computes with an export, and its `check_server.py` says."""
    loaded, info = eager(folder, output_loading_info=True)
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    row = {"weights not matched": [key for key in keys if info[key]], "difference": difference(loaded, folder)}
    if (folder / "check_server.py").exists():
        check = runpy.run_path(str(folder / "check_server.py"))["main"]
        for dtype in ("float32", "bfloat16"):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = check(["--transformers", "--json", "--dtype", dtype])
            sentence = json.loads(out.getvalue())["sentence"].replace(str(folder), "the folder")
            row[f"canary, {dtype}"] = [code, sentence]
    return row


def read_adapter(folder: Path, model: str) -> dict:
    """What PEFT computes with an adapter on a golden model."""
    import peft

    tuned = peft.get_peft_model(eager(GOLDEN / model), peft.PeftConfig.from_pretrained(str(folder)))
    loaded = peft.set_peft_model_state_dict(tuned, peft.utils.load_peft_weights(str(folder), device="cpu"))
    missing = [name for name in loaded.missing_keys if "lora_" in name]
    return {"tensors not matched": [*missing, *loaded.unexpected_keys], "difference": difference(tuned, folder)}


def difference(model, folder: Path) -> float:
    """Between a model's logits and those that were stored, at most."""
    import torch

    stored = np.load(folder / LOGITS)
    with torch.no_grad():
        logits = model.eval()(torch.tensor(stored["tokens"], dtype=torch.long), use_cache=False).logits
    return float(np.abs(logits.numpy() - stored["logits"]).max())


def main(kind: str, folder: str, model: str) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    versions = transformers.__version__
    if kind == "peft":
        import peft

        versions = f"peft {peft.__version__}, transformers {versions}"
    rows: dict[str, dict] = {}
    for file in sorted(Path(folder).glob(f"*/{LOGITS}")):
        try:
            rows[file.parent.name] = (read_adapter if kind == "peft" else read_export)(file.parent, model)
        except Exception as error:  # from within a model's class
            rows[file.parent.name] = {"fails": f"{type(error).__name__}: {error}"}
    print(json.dumps({"versions": versions, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
