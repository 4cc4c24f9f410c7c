"""Damage model folders at random, import them, and check that nothing bad follows.

Small models of several families (the goldens of the tests, with a tokenizer; in shards, in blocks of FP8, in MXFP4)
are damaged in their configuration, RoPE, companions, headers, payloads, indexes and by links
(`mutations.py`), and imported. Checkpoint folders are damaged too, and their manifests made to fit, so that the
checks behind the sums are reached. It is an error if

- anything but one sentence that a user may read is raised, or a process hangs,
- a model is accepted whose configuration is absurd, or that gives logits which are no numbers,
- a file outside the destination is changed, or its content is copied into the destination,
- something half-written is left.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file

from scripts.torture import mutations
from swa_jax.base.errors import sentence
from swa_jax.base.files import sum_of_file, sum_of_json
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.folder import load_model, open_checkpoint
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.tensor_names import expected_tensors
from swa_jax.model.config import ModelConfig

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
SECRET = b'{"api_key": "hunter2 hunter2 hunter2"}'
SECONDS = 60  # for one import


# ---- what is damaged ----


def make_bases(folder: Path) -> list[Path]:
    """The whole models that copies are made of."""
    bases = []
    for case in mutations.KEYS["models"]:
        base = folder / case
        ignore = shutil.ignore_patterns("golden.safetensors", "legacy_config.json")
        bases.append(shutil.copytree(GOLDEN / case, base, ignore=ignore))
        words = tokenizers.models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2}, unk_token="<unk>")
        tokenizers.Tokenizer(words).save(str(base / "tokenizer.json"))
        (base / "tokenizer_config.json").write_text('{"eos_token": "<eos>", "model_max_length": 512}')
        (base / "special_tokens_map.json").write_text('{"eos_token": {"content": "<eos>"}}')
        (base / "vocab.json").write_text('{"a": 2}')
    bases.append(in_fp8(shutil.copytree(folder / "llama3-rope", folder / "fp8")))
    bases.append(in_mxfp4(shutil.copytree(folder / "gpt-oss-hybrid", folder / "mxfp4")))
    return bases


def in_fp8(base: Path) -> Path:
    tensors = load_file(base / "model.safetensors")
    for name, array in list(tensors.items()):
        if name.endswith("proj.weight"):
            tensors[name] = array.astype(ml_dtypes.float8_e4m3fn)
            rows, columns = (-(-size // 16) for size in array.shape)
            tensors[f"{name}_scale_inv"] = np.ones((rows, columns), np.float32)
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    return rewritten(base, tensors, settings)


def in_mxfp4(base: Path) -> Path:
    tensors = load_file(base / "model.safetensors")
    hf = json.loads((base / "config.json").read_text())
    hf |= {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    hf |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    (base / "config.json").write_text(json.dumps(hf))
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in expected_tensors(model_config(hf)).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16))
            tensors[f"{name}_blocks"] = blocks.astype(np.uint8)
            tensors[f"{name}_scales"] = np.full(blocks.shape[:3], 120, np.uint8)
        else:
            tensors[name] = (0.1 * rng.normal(size=shape)).astype(ml_dtypes.bfloat16)
    return rewritten(base, tensors, {"quant_method": "mxfp4"})


def rewritten(base: Path, tensors: dict[str, np.ndarray], settings: dict[str, Any]) -> Path:
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    hf = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(hf | {"quantization_config": settings}))
    return base


# ---- what must not follow ----


class Bad(Exception):
    """Something that must not be."""


def one_sentence(error: BaseException) -> None:
    said = sentence(error)
    if said is None:
        lines = traceback.format_exception(error)
        raise Bad("a traceback: " + "".join(lines)[-3000:])
    if "\n" in said or not 10 < len(said) < 1500:
        raise Bad(f"no sentence: {said[:2000]!r}")


def check_sane(config: ModelConfig, pattern: Any) -> None:
    """Bounds that have nothing to do with how the library checks them."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not (math.isfinite(value) and abs(value) < 1e12):
            raise Bad(f"accepted {field.name} = {value}")
    scaling = config.rope_scaling
    bounds = {
        "rope_theta": (config.rope_theta, 1, 1e12),
        "local_rope_theta": (config.local_rope_theta, 1, 1e12),
        "rms_norm_eps": (config.rms_norm_eps, 1e-20, 0.5),
        "vocab_size": (config.vocab_size, 1, 1e7),
        "max_position_embeddings": (config.max_position_embeddings, 1, 2**31 - 1),
        "sliding_window": (pattern.sliding_window or 1, 1, 2**31 - 1),
        "factor": (1 if scaling is None else scaling.factor, 1, 1e4),
        "initializer_range": (config.initializer_range, 0, 10),
    }
    if scaling is not None:
        bounds["attention_factor"] = (scaling.attention_factor or 1, 1e-3, 1e3)
        bounds["low to high"] = (scaling.high_freq_factor / scaling.low_freq_factor, 1, 1e6)
        bounds["betas"] = (scaling.beta_fast / scaling.beta_slow, 1, 1e6)
        factors = scaling.short_factor + scaling.long_factor or (1.0,)
        bounds["short and long"] = (min(factors), 1e-3, max(factors))
        bounds["long and short"] = (max(factors), min(factors), 1e4)
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:
            raise Bad(f"accepted {name} = {value}")


class Fuzz:
    """The folders of a run, and what it has seen."""

    def __init__(self, folder: Path, rng: random.Random, logits: bool):
        self.rng, self.logits = rng, logits
        self.bases = make_bases(folder / "bases")
        self.room = folder / "room"
        self.counts: collections.Counter[str] = collections.Counter()
        self.what = ""  # was done to the last folder
        self.seen: set[tuple[Any, Any]] = set()

    def fresh(self, base: Path) -> tuple[Path, Path]:
        """A copy of a folder in an empty room, and a secret beside it."""
        shutil.rmtree(self.room, ignore_errors=True)
        copy = shutil.copytree(base, self.room / "source")
        secret = self.room / "secret.safetensors"
        secret.write_bytes(SECRET)
        return copy, secret

    def once(self) -> None:
        base = self.rng.choice(self.bases)
        if self.rng.random() < 0.2:
            self.damage_checkpoint(base)
            return
        source, secret = self.fresh(base)
        mutation = self.rng.choice(mutations.SOURCE)
        self.what = f"{base.name}, {mutation(source, self.rng, secret)}"
        before = contents(self.room)
        destination = self.room / "out" / "checkpoint"
        try:
            import_model(source, destination)
        except Exception as error:
            one_sentence(error)
            if destination.parent.exists() and any(destination.parent.iterdir()):
                raise Bad(f"left {sorted(destination.parent.rglob('*'))[:5]}") from None
            self.counts[f"{mutation.__name__}: refused"] += 1
        else:
            if [path.name for path in destination.parent.iterdir()] != ["checkpoint"]:
                raise Bad("more than the checkpoint is there")
            self.judge(destination)
            self.counts[f"{mutation.__name__}: accepted"] += 1
        if before != {name: data for name, data in contents(self.room).items() if not name.startswith("out")}:
            raise Bad("something outside the destination changed")

    def damage_checkpoint(self, base: Path) -> None:
        """Damage behind the sums: a checkpoint folder whose manifest is made to fit."""
        source, secret = self.fresh(base)
        folder = import_model(source, self.room / "checkpoint")
        parts = {
            "config": (folder, mutations.config),
            "rope": (folder, mutations.rope),
            "links": (folder, mutations.links),
            "header": (folder / "weights", mutations.header),
            "payload": (folder / "weights", mutations.payload),
            "manifest": (folder, manifest),
        }
        kind, (place, mutation) = self.rng.choice(list(parts.items()))
        self.what = f"{base.name}, checkpoint: {mutation(place, self.rng, secret)}"
        if kind != "manifest":
            sums = {f"weights/{f.name}": sum_of_file(f) for f in (folder / "weights").iterdir() if f.is_file()}
            config = folder / "config.json"
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if config.is_file():  # reading a pipe would never end
                    sums["config.json"] = sum_of_json(json.loads(config.read_text()))
            (folder / "manifest.json").write_text(json.dumps({"sha256": sums}))
        try:
            opened = open_checkpoint(folder)
        except Exception as error:
            one_sentence(error)
            self.counts[f"checkpoint, {kind}: refused"] += 1
        else:
            check_sane(opened.config, opened.pattern)
            load_model(folder)
            self.counts[f"checkpoint, {kind}: accepted"] += 1

    def judge(self, destination: Path) -> None:
        """An import that went well gives a model that is one."""
        for name, data in contents(destination).items():
            if SECRET in data:
                raise Bad(f"{name} is a copy of a file outside the source")
        opened = open_checkpoint(destination)
        check_sane(opened.config, opened.pattern)
        largest = 0.0
        for name, array in opened.read(list(opened.tensors)):
            if not np.isfinite(values := array.astype(np.float32)).all():
                raise Bad(f"tensor {name} is not finite")
            largest = max(largest, float(np.abs(values).max()))
        key = (opened.config, opened.pattern)
        if self.logits and key not in self.seen:
            self.seen.add(key)
            logits = np.asarray(jax.jit(load_model(destination))(np.arange(12)[None] % 7))
            self.counts["models run"] += 1
            if largest < 1e4 and not np.isfinite(logits).all():  # a flipped bit may make a weight as large as it can be
                raise Bad("the logits are not finite")


def manifest(folder: Path, rng: random.Random, secret: Path) -> str:
    """The manifest itself, or files beside those that it lists."""
    if rng.random() < 0.5:
        names = ["model-00009-of-00009.safetensors", ".x", "model.safetensors.index.json"]
        file = folder / "weights" / rng.choice(names)
        if not file.exists():
            file.write_bytes(secret.read_bytes())
        return f"{file.name} is there too"
    return mutations.mutate_json(folder / "manifest.json", rng, ["sha256", "../secret.safetensors", "import"])


def contents(folder: Path) -> dict[str, bytes]:
    def data(path: Path) -> bytes:
        return os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""

    return {path.relative_to(folder).as_posix(): data(path) for path in sorted(folder.rglob("*"))}


# ---- the run ----


def fuzz(
    count: int, seed: int, *, first: int = 0, logits: bool = True, stop: bool = False
) -> tuple[dict[str, int], list[str]]:
    """Damage so many folders; what was seen, by kind, and what must not have been.

    Args:
      first: the number of the first folder: each is damaged in its own way, whatever came before.
      logits: run the models that are accepted.
      stop: after the first folder from which something bad followed.
    """
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        run = Fuzz(Path(name), random.Random(seed), logits)
        for number in range(first, first + count):
            run.rng = random.Random(f"{seed} {number}")
            previous = signal.signal(signal.SIGALRM, too_long)
            signal.alarm(SECONDS)
            try:
                run.once()
            except Exception as problem:
                told = problem if isinstance(problem, Bad) else traceback.format_exc()[-3000:]
                bad.append(f"{number}: {run.what}: {told}")
                if stop:
                    break
            finally:
                if number % 250 == 249:
                    print(f"{number + 1 - first} of {count}", file=sys.stderr, flush=True)
                signal.alarm(0)
                signal.signal(signal.SIGALRM, previous)
        return dict(sorted(run.counts.items())), bad


def too_long(*_: Any) -> None:
    raise Bad("no answer in time")
