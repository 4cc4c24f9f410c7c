"""Exports every golden model under eleven patterns for transformers, and has transformers run each of them.

    python scripts/check_exports.py --oracle /path/to/python     # a Python with torch and transformers

Each export must be refused, or load with every weight in its place, give our decoder's logits to 1e-4 over more than
four windows, and pass its own `check_server.py --transformers`. Importing it again must give the same weights and
pattern, bit by bit. The table goes to tests/checkpoint/exports.json; a test compares it with what is exported now.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
GOLDEN, OUT = ROOT / "tests" / "golden", ROOT / "tests" / "checkpoint" / "exports.json"
TOLERANCE = 1e-4
LOGITS = "logits.npz"


# ---- here: export ----


def export_all(model: str, folder: Path, canary: bool) -> dict[str, dict]:
    """Export a golden model under every pattern; {pattern: what was written, or why not}."""
    sys.path.insert(0, str(ROOT / "tests" / "checkpoint"))
    from exported_patterns import fingerprint, patterns

    from swa_jax.checkpoint.folder import PATTERN_FILE, load_model, open_checkpoint
    from swa_jax.checkpoint.hf_export import export_model
    from swa_jax.checkpoint.hf_import import import_model
    from swa_jax.checkpoint.safetensors_files import read_headers
    from swa_jax.errors import ConfigError

    rows = {}
    plain = open_checkpoint(import_model(GOLDEN / model, folder / "imported"))
    for name, pattern in patterns(plain.config.num_hidden_layers).items():
        checkpoint = shutil.copytree(plain.folder, folder / f"{name} checkpoint")
        pattern.to_json(checkpoint / PATTERN_FILE)
        try:
            exported = export_model(checkpoint, folder / name, server="transformers", canary=canary)
        except ConfigError as error:
            rows[name] = {"refused": str(error)}
            continue
        again = open_checkpoint(import_model(exported, folder / f"{name} again"))
        first = open_checkpoint(checkpoint)
        config = dataclasses.replace(again.config, model_type=first.config.model_type)
        same = (again.pattern, config) == (first.pattern, first.config) and all(
            np.array_equal(a.view(np.uint8), b.view(np.uint8))
            for (_, a), (_, b) in zip(first.read([*first.tensors]), again.read([*first.tensors]), strict=True)
        )
        tokens = np.random.default_rng(0).integers(1, first.config.vocab_size, (2, 40), np.int32)
        np.savez(exported / LOGITS, tokens=tokens, logits=np.asarray(load_model(checkpoint)(tokens)))
        written = json.loads((exported / "config.json").read_text())
        rows[name] = {
            "class": written["architectures"][0],
            "fingerprint": fingerprint(written, {n: t.shape for n, t in read_headers(exported).items()}),
            "same bits when imported again": same,
        }
    return rows


# ---- in the oracle's Python: compare ----


def compare(folder: Path) -> dict[str, dict]:
    """What transformers makes of each export in a folder."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    rows: dict[str, dict] = {}
    for file in sorted(folder.glob(f"*/{LOGITS}")):
        try:
            rows[file.parent.name] = compare_one(file.parent)
        except Exception as error:  # from within a model's class
            rows[file.parent.name] = {"fails": f"{type(error).__name__}: {error}"}
    return {"transformers": transformers.__version__, "rows": rows}


def compare_one(folder: Path) -> dict:
    import torch
    import transformers

    stored = np.load(folder / LOGITS)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor(stored["tokens"], dtype=torch.long), use_cache=False).logits.numpy()
    row = {
        "weights not matched": [k for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[k]],
        "difference": float(np.abs(logits - stored["logits"]).max()),
    }
    if (folder / "check_server.py").exists():
        check = runpy.run_path(str(folder / "check_server.py"))["main"]
        for dtype in ("float32", "bfloat16"):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = check(["--transformers", "--json", "--dtype", dtype])
            sentence = json.loads(out.getvalue())["sentence"].replace(str(folder), "the folder")
            row[f"canary, {dtype}"] = [code, sentence]
    return row


def problems_of(row: dict) -> list[str]:
    """Why a row of the table is not as it should be."""
    if "refused" in row:
        return []
    if "fails" in row:
        return [row["fails"]]
    found = [f"weights: {key}" for key in row["weights not matched"]]
    if not row["difference"] <= TOLERANCE:
        found.append(f"logits differ by {row['difference']:.2g}")
    if not row["same bits when imported again"]:
        found.append("other bits when imported again")
    if row.get("canary, float32", [0])[0] != 0:
        found.append(f"canary: {row['canary, float32'][1]}")
    if row.get("canary, bfloat16", [0])[0] == 1:  # 2: too coarse to tell, which is no error
        found.append(f"canary in bfloat16: {row['canary, bfloat16'][1]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--oracle", type=Path, help="a Python with torch and transformers")
    parser.add_argument("--models", nargs="+", help="some of tests/golden: only their rows are made anew")
    parser.add_argument("--no-canary", action="store_true", help="compare logits only; the table is not written")
    parser.add_argument("--compare", type=Path, help=argparse.SUPPRESS)  # what this script runs the oracle with
    options = parser.parse_args()
    if options.compare:
        print(json.dumps(compare(options.compare)))
        return 0
    names = options.models or sorted(f.name for f in GOLDEN.iterdir() if (f / "config.json").exists())
    kept = json.loads(OUT.read_text()) if options.models and OUT.exists() else {"transformers": {}, "exports": {}}
    versions, table = kept["transformers"], kept["exports"]
    bad = checked = 0
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            rows = export_all(name, Path(temporary), not options.no_canary)
            command = [str(options.oracle), __file__, "--compare", temporary]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                return 1
            found = json.loads(done.stdout.splitlines()[-1])
        for pattern, row in rows.items():
            row |= found["rows"].get(pattern, {})
            problems = problems_of(row)
            bad += bool(problems)
            print(f"{name}, {pattern}: {'; '.join(problems) or row.get('class', 'refused')}", flush=True)
        checked += len(rows)
        table[name], versions[name] = rows, found["transformers"]
        if not options.no_canary:
            whole = {"transformers": dict(sorted(versions.items())), "exports": dict(sorted(table.items()))}
            OUT.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"{checked} exports, {bad} not as they should be")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
