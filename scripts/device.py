"""What a lent GPU is asked, in 12 minutes and one command: `python -m scripts.device runs/device`.

| part | minutes | what |
|---|---|---|
| tests | 2 | kernels that never ran on hardware since they changed |
| attention | 3 | forward and backward as trained: T 8192, documents of 4096; beside whatever peers are installed |
| step | 3 | a profiled training step of SWAT 340M, and where its time goes |
| generation | 2 | at the shapes of Qwen3-1.7B, random weights |
| tiles | 2 | the fastest tiles for full rows |

Each call is a process of its own with a limit of time; its output goes to NAME.log in the folder, and what it found to
`results.jsonl` there. The same command goes on after an interruption: calls that ended well are not made again.
`--dry-run` makes the same calls in small, on a CPU.
"""

import argparse
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.random_model import write_random_model
from swa_jax.base.files import Store, read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ("plain", "sink-tokens", "full-rows", "routed", "full")
KINDS = {  # of a GPU's kernels, by what their names have; the first that fits
    "attention": ("forward_kernel", "dq_kernel", "dkv_kernel", "flash", "fmha", "sdpa"),
    "matrix products": ("gemm", "cutlass", "cublas", "nvjet", "xmma", "dot"),
    "copies": ("memcpy", "memset", "copy", "transpose", "concatenate"),
}


class DeviceCall(NamedTuple):
    """A process. `{folder}` in a command is the folder of results; `read` gives what it found."""

    name: str
    seconds: int  # at most
    command: tuple[str, ...]
    read: Callable[[Path], Any] = lambda folder: None
    prepare: Callable[[Path], None] = lambda folder: None


def device_calls(dry: bool) -> list[DeviceCall]:
    """All calls, in order; the limits add up to 12 minutes."""
    python, swa_jax = sys.executable, (sys.executable, "-m", "swa_jax.cli")
    tests = ("-m", "pytest", "-q", "-o", "filterwarnings=default", "tests/kernels")
    chosen = (
        ("--collect-only", "-k", "on_gpu")
        if dry
        else ("-n", "8", "-k", "(triton or on_gpu) and (decod or drawn or pool)")
    )
    calls = [DeviceCall("tests", 120, (python, *tests, *chosen))]
    small = ("--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--rounds", "1")
    length, window, size = ("256", "32", "128") if dry else ("8192", "1024", "4096")
    for variant in VARIANTS:
        seen = ("--window", "0") if variant == "full" else ("--window", window, "--variant", variant)
        shape = ("--pass", "forward+backward", "--length", length, "--documents", size, *seen)
        rounds = small if dry else ("--rounds", "6")
        name = f"attention-{variant}"
        out = f"{{folder}}/{name}.json"
        command = (*swa_jax, "bench", "attention", *shape, *rounds, "--out", out)
        calls.append(DeviceCall(name, 36, command, reader(f"{name}.json")))
    train = (*swa_jax, "train", "{folder}/step.yaml")
    calls.append(DeviceCall("step", 180, train, where_time_goes, lambda folder: write_step(folder, dry)))
    prompts = ("--length", "64", "--new-tokens", "4", "--window", "16", "--rounds", "1", "--ratio", "0.5")
    prompts = prompts if dry else ("--length", "8192", "--window", "1024", "--rounds", "2", "--dtype", "bfloat16")
    model = (*swa_jax, "bench", "generation", "{folder}/model", *prompts, "--out", "{folder}/generation.json")
    calls.append(
        DeviceCall("generation", 120, model, reader("generation.json"), lambda folder: write_model(folder, dry))
    )
    # A CPU has no tiles to look for: what would run is listed.
    search = ("--dry-run", *small) if dry else ("--search", "--rounds", "4", "--write", "{folder}/tiles.json")
    full = ("--pass", "forward+backward", "--length", length, "--documents", size, "--window", "0")
    calls.append(DeviceCall("tiles", 120, (*swa_jax, "bench", "attention", *full, *search)))
    return calls


def reader(name: str) -> Callable[[Path], Any]:
    return lambda folder: read_json(folder / name)


# ---- what the calls need ----


def write_step(folder: Path, dry: bool) -> None:
    """SWAT 340M on text that every Python has, with a profile of three steps; or the tiny one."""
    config = yaml.safe_load((ROOT / "configs" / ("swat-tiny.yaml" if dry else "swat/340m.yaml")).read_text())
    steps, rows = (4, 2) if dry else (12, 16)
    length = 128 if dry else 4096
    stage = {"steps": steps, "sequence_length": length, "batch_size": rows}
    changes = {"output": str(folder / "step"), "tokenizer": str(ROOT / "swa_jax" / "recall"), "stages": [stage]}
    config |= changes | {"log": {"profile_from": steps - 3, "profile_steps": 3}, "checkpoint_every": steps}
    write_text(folder / "step.yaml", yaml.safe_dump(config))


def write_model(folder: Path, dry: bool) -> None:
    """A model of random weights with the shapes of Qwen3-1.7B, or with small ones."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    config = yaml.safe_load((ROOT / "configs" / "models" / "qwen3-1.7b.yaml").read_text())
    del config["qk_norm"]  # the family has it
    if dry:
        config |= {
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "head_dim": 16,
        }
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    write_random_model(folder / "model", config | {"dtype": "float32" if dry else "bfloat16"})
    shutil.copy(ROOT / "swa_jax" / "recall" / "tokenizer.json", folder / "model")


def where_time_goes(folder: Path) -> dict[str, Any]:
    """Seconds of the profiled steps on the device, by kind of kernel and by name; and the run's own line of speed."""
    traces = sorted((folder / "step").rglob("*.trace.json.gz"))
    events = json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"] if traces else []
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    # A GPU's other lines tell the same time again, by operation and by module.
    streams = {where for where, name in threads.items() if "GPU" in processes[where[0]] and name.startswith("Stream")}
    names: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X" and (not streams or (event["pid"], event["tid"]) in streams):
            names[event["name"]] += event["dur"] / 1e6
    kinds: Counter[str] = Counter()
    for name, seconds in names.items():
        fits = (kind for kind, words in KINDS.items() if any(word in name.lower() for word in words))
        kinds[next(fits, "other")] += seconds
    log = (folder / "step" / "metrics.jsonl").read_text().splitlines()
    return {
        "kinds": dict(kinds.most_common()),
        "kernels": dict(names.most_common(25)),
        "last_step": json.loads(log[-1]),
    }


# ---- running ----


def run(folder: Path, dry: bool, calls: Sequence[DeviceCall] | None = None) -> bool:
    """Makes the calls that are left; whether all of them have ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "results.jsonl", "results of a device", {"dry_run": dry})
    calls = device_calls(dry) if calls is None else calls
    for call in calls:
        if store.records.get(call.name, {}).get("status") == 0:
            print(f"{call.name}: done before", flush=True)
            continue
        begun = time.monotonic()
        record = make(call, folder, dry)
        record["seconds"] = round(time.monotonic() - begun, 1)
        store.add(call.name, **record)
        print(f"{call.name}: status {record['status']}, {record['seconds']} s", flush=True)
    return all(store.records[call.name]["status"] == 0 for call in calls)


def make(call: DeviceCall, folder: Path, dry: bool) -> dict[str, Any]:
    """One call's status, the end of what it said, and what it found; its processes are ended at its limit."""
    environment = os.environ | {"SWA_JAX_CACHE": str(folder / "cache")} | ({"JAX_PLATFORMS": "cpu"} if dry else {})
    command = [word.replace("{folder}", str(folder)) for word in call.command]
    log = folder / f"{call.name}.log"
    found = None
    try:
        call.prepare(folder)
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(timeout=call.seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = 124
        found = call.read(folder) if status == 0 else None
    except Exception as error:  # one part must not cost the others
        return {"status": 1, "said": f"{type(error).__name__}: {error}", "found": None}
    return {"status": status, "said": log.read_text(errors="replace")[-2000:], "found": found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where results go")
    parser.add_argument("--dry-run", action="store_true", help="in small, on a CPU")
    options = parser.parse_args(arguments)
    sys.exit(0 if run(options.folder.resolve(), options.dry_run) else 1)


if __name__ == "__main__":
    main()
