"""Has Hugging Face's PEFT load the adapters that we write for every golden model, and compares its logits with ours.

    python scripts/check_peft.py --oracle /path/to/python     # a Python with torch, transformers and peft

An adapter of random numbers is put on each model of tests/golden, written by `swa_jax.checkpoint.peft`, and loaded by
`peft.PeftModel` over the same model in transformers: every tensor must find its place, and the logits must be equal to
1e-4. The table goes to tests/checkpoint/adapters.json; a test compares it with what is written now.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
GOLDEN, OUT = ROOT / "tests" / "golden", ROOT / "tests" / "checkpoint" / "adapters.json"
TOLERANCE = 1e-4
LOGITS = "logits.npz"
# PEFT 0.21 takes the adapters of these families' dense MLPs for adapters of experts, and loads none.
NOT_LOADED = tuple(
    (model, case)
    for model in (
        "mellum-hybrid",
        "mellum-moe-hybrid",
        "qwen3-moe-window",
        "afmoe-hybrid",
        "exaone-moe-hybrid",
        "cohere2-moe-hybrid",
        "cohere2-moe-softmax",
    )
    for case in ("all, rsLoRA", "some")
)


def export_all(model: str, folder: Path) -> dict[str, dict]:
    """An adapter of every case on one golden model: {case: what was written}, beside it what our decoder computes."""
    sys.path.insert(0, str(ROOT / "tests" / "checkpoint"))
    from written_adapters import CASES, adapted, written

    from swa_jax.checkpoint.folder import load_model
    from swa_jax.checkpoint.hf_import import import_model
    from swa_jax.checkpoint.peft import save_adapter

    plain = load_model(import_model(GOLDEN / model, folder / "imported"))
    tokens = np.random.default_rng(0).integers(1, plain.config.vocab_size, (2, 40), np.int32)
    before, rows = np.asarray(plain(tokens)), {}
    for case in CASES:
        tuned = adapted(plain, case)
        to = save_adapter(tuned, folder / case)
        logits = np.asarray(tuned(tokens))
        np.savez(to / LOGITS, tokens=tokens, logits=logits)
        change = float(np.abs(logits - before).max())
        rows[case] = {"fingerprint": written(to), "changes logits by": change}
    return rows


def compare(folder: Path, model: str) -> dict[str, dict]:
    """In the oracle's Python: what peft makes of each adapter in a folder."""
    import peft
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    rows: dict[str, dict] = {}
    for file in sorted(folder.glob(f"*/{LOGITS}")):
        stored = np.load(file)
        try:
            base = transformers.AutoModelForCausalLM.from_pretrained(
                GOLDEN / model, dtype=torch.float32, attn_implementation="eager"
            )
            tuned = peft.get_peft_model(base, peft.PeftConfig.from_pretrained(str(file.parent)))
            tensors = peft.utils.load_peft_weights(str(file.parent), device="cpu")
            loaded = peft.set_peft_model_state_dict(tuned, tensors)
            missing = [name for name in loaded.missing_keys if "lora_" in name]
            with torch.no_grad():
                logits = tuned.eval()(torch.tensor(stored["tokens"], dtype=torch.long), use_cache=False).logits
            rows[file.parent.name] = {
                "tensors not matched": [*missing, *loaded.unexpected_keys],
                "difference": float(np.abs(logits.numpy() - stored["logits"]).max()),
            }
        except Exception as error:  # from within a model's class
            rows[file.parent.name] = {"fails": f"{type(error).__name__}: {error}"}
    versions = f"peft {peft.__version__}, transformers {transformers.__version__}"
    return {"versions": versions, "rows": rows}


def problems_of(row: dict) -> list[str]:
    """Why a row of the table is not as it should be."""
    if "fails" in row:
        return [row["fails"]]
    found = [f"tensor: {name}" for name in row["tensors not matched"]]
    if not row["difference"] <= TOLERANCE:
        found.append(f"logits differ by {row['difference']:.2g}")
    if not row["changes logits by"] > 100 * TOLERANCE:
        found.append("the adapter changes nothing")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--oracle", type=Path, help="a Python with torch, transformers and peft")
    parser.add_argument("--models", nargs="+", help="some of tests/golden: only their rows are made anew")
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)  # what this script runs the oracle with
    options = parser.parse_args()
    if options.compare:
        print(json.dumps(compare(Path(options.compare[0]), options.compare[1])))
        return 0
    names = options.models or sorted(f.name for f in GOLDEN.iterdir() if (f / "config.json").exists())
    kept = json.loads(OUT.read_text()) if options.models and OUT.exists() else {"versions": {}, "adapters": {}}
    versions, table = kept["versions"], kept["adapters"]
    bad = checked = 0
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            rows = export_all(name, Path(temporary))
            command = [str(options.oracle), __file__, "--compare", temporary, name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                return 1
            found = json.loads(done.stdout.splitlines()[-1])
        for case, row in rows.items():
            row |= found["rows"][case]
            problems = problems_of(row)
            bad += bool(problems) != ((name, case) in NOT_LOADED)
            print(f"{name}, {case}: {'; '.join(problems) or 'the same'}", flush=True)
        checked += len(rows)
        table[name], versions[name] = rows, found["versions"]
        whole = {"versions": dict(sorted(versions.items())), "adapters": dict(sorted(table.items()))}
        OUT.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"{checked} adapters, {bad} not as they should be")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
