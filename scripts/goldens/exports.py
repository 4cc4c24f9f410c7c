"""What others make of what we write: transformers of exports, PEFT of adapters, for every golden model.

`exports`: each of eleven patterns must be refused, or load with every weight in its place, give our decoder's logits to
1e-4 over more than four windows, and pass its own `check_server.py --transformers`. Importing it again must give the
same weights and pattern, bit by bit. `peft`: an adapter of random numbers, loaded by `peft.PeftModel` over the same
model in transformers, must find a place for every tensor and give our logits. Tests compare the tables with what is
written now.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from scripts.goldens.cases import GOLDEN, ROOT, golden_folders, merged, some, write_json
from scripts.goldens.oracle import LOGITS

TESTS = ROOT / "tests" / "checkpoint"
TOLERANCE = 1e-4
# PEFT 0.21 takes the adapters of these families' dense MLPs for adapters of experts, and loads none.
EXPERTS = ("mellum", "mellum-moe", "afmoe", "exaone-moe", "cohere2-moe")
NOT_LOADED = {
    (model, case)
    for model in (*(f"{name}-hybrid" for name in EXPERTS), "qwen3-moe-window", "cohere2-moe-softmax")
    for case in ("all, rsLoRA", "some")
}


def write_all_exports(model: str, folder: Path) -> dict[str, dict]:
    """Export a golden model under every pattern; {pattern: what was written, or why not}."""
    from exported_patterns import fingerprint, patterns

    from swa_jax.base.errors import ConfigError
    from swa_jax.checkpoint.folder import PATTERN_FILE, load_model, open_checkpoint
    from swa_jax.checkpoint.hf_export import export_model
    from swa_jax.checkpoint.hf_import import import_model
    from swa_jax.checkpoint.safetensors_files import read_headers

    rows = {}
    plain = open_checkpoint(import_model(GOLDEN / model, folder / "imported"))
    for name, pattern in patterns(plain.config.num_hidden_layers).items():
        checkpoint = shutil.copytree(plain.folder, folder / f"{name} checkpoint")
        pattern.to_json(checkpoint / PATTERN_FILE)
        try:
            exported = export_model(checkpoint, folder / name, server="transformers", canary=True)
        except ConfigError as error:
            rows[name] = {"refused": str(error)}
            continue
        again, first = open_checkpoint(import_model(exported, folder / f"{name} again")), open_checkpoint(checkpoint)
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


def write_all_adapters(model: str, folder: Path) -> dict[str, dict]:
    """An adapter of every case on a golden model; {case: what was written}."""
    from written_adapters import CASES, adapted, written

    from swa_jax.checkpoint.folder import load_model
    from swa_jax.checkpoint.hf_import import import_model
    from swa_jax.checkpoint.peft import save_adapter

    plain = load_model(import_model(GOLDEN / model, folder / "imported"))
    tokens = np.random.default_rng(0).integers(1, plain.config.vocab_size, (2, 40), np.int32)
    before, rows = np.asarray(plain(tokens)), {}
    for case in CASES:
        tuned = adapted(plain, case)
        to, logits = save_adapter(tuned, folder / case), np.asarray(tuned(tokens))
        np.savez(to / LOGITS, tokens=tokens, logits=logits)
        rows[case] = {"fingerprint": written(to), "changes logits by": float(np.abs(logits - before).max())}
    return rows


def problems_of(row: dict) -> list[str]:
    """Why a row of a table is not as it should be."""
    if "refused" in row:
        return []
    if "fails" in row:
        return [row["fails"]]
    found = [f"not matched: {name}" for key in ("weights", "tensors") for name in row.get(f"{key} not matched", ())]
    if not row["difference"] <= TOLERANCE:
        found.append(f"logits differ by {row['difference']:.2g}")
    if not row.get("same bits when imported again", True):
        found.append("other bits when imported again")
    if not row.get("changes logits by", 1) > 100 * TOLERANCE:
        found.append("the adapter changes nothing")
    if row.get("canary, float32", [0])[0] != 0:
        found.append(f"canary: {row['canary, float32'][1]}")
    if row.get("canary, bfloat16", [0])[0] == 1:  # 2: too coarse to tell, which is no error
        found.append(f"canary in bfloat16: {row['canary, bfloat16'][1]}")
    return found


def write_exports(given) -> int:
    return check(given, "exports", "exports", "transformers", write_all_exports)


def write_peft(given) -> int:
    return check(given, "peft", "adapters", "versions", write_all_adapters, NOT_LOADED)


def check(
    given, kind: str, key: str, version: str, write: Callable[..., dict], failing: Collection[tuple[str, str]] = ()
) -> int:
    """Write, have the oracle read, and put both into the table under `key`; 1 if a row is not as it should be."""
    sys.path.insert(0, str(TESTS))
    file, bad, checked = TESTS / f"{key}.json", 0, 0
    versions, table = merged(file, given.only, version), merged(file, given.only, key)
    for name in some(given.only, golden_folders()):
        with tempfile.TemporaryDirectory() as temporary:
            rows = write(name, Path(temporary))
            command = [str(given.oracle), "-m", "scripts.goldens.oracle", kind, temporary, name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                return 1
            found = json.loads(done.stdout.splitlines()[-1])
        for case, row in rows.items():
            row |= found["rows"].get(case, {})
            problems = problems_of(row)
            bad += bool(problems) != ((name, case) in failing)
            print(f"{name}, {case}: {'; '.join(problems) or row.get('class', 'as it should be')}", flush=True)
        checked += len(rows)
        table[name], versions[name] = rows, found["versions"]
        write_json(file, {version: dict(sorted(versions.items())), key: dict(sorted(table.items()))})
    print(f"{checked} {key}, {bad} not as they should be")
    return int(bad > 0)
