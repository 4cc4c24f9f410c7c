"""Public names: loaded when they are asked for, and still found under their earlier paths."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

# Modules that have moved, and where their names are now. `swa_jax.` is left out on both sides.
MOVED: dict[str, tuple[str, ...]] = {
    "attention": ("model.attention",),
    "cache": ("model.cache",),
    "cluster": ("train.cluster",),
    "compare": ("select.compare", "report"),
    "compile": ("plan.plan",),
    "config": ("errors", "settings", "model.config"),
    "decode": ("model.cached_attention",),
    "distributed": ("train.processes",),
    "evaluate.accuracy": ("evaluate.generated_answers",),
    "evaluate.answers": ("evaluate.question_scores",),
    "evaluate.bootstrap": ("estimates",),
    "evaluate.metrics": ("evaluate.longbench_metrics",),
    "evaluate.ruler_scoring": ("evaluate.ruler_scores",),
    "evaluate.words": ("evaluate.ruler_words",),
    "flops": ("model.flops",),
    "generation": ("model.generate",),
    "hlo": ("plan.hlo",),
    "huggingface": ("checkpoint.hf_import", "checkpoint.hf_export", "families"),
    "huggingface.adapter": ("checkpoint.peft",),
    "huggingface.config": ("families",),
    "huggingface.export": ("checkpoint.hf_export",),
    "huggingface.importing": ("checkpoint.hf_import",),
    "huggingface.names": ("checkpoint.tensor_names",),
    "huggingface.weights": ("checkpoint.safetensors_files", "errors"),
    "layers": ("model.layers",),
    "lora": ("model.lora",),
    "objectives": ("train.objectives", "model.loss"),
    "optimizer": ("train.optimizer",),
    "parallel_attention": ("model.mesh_attention",),
    "pattern": ("model.pattern", "model.layer_types", "families.pattern_files"),
    "plan_text": ("plan.text",),
    "preemption": ("train.preemption",),
    "recall_data": ("data.lessons",),
    "recipes": ("model.recipes",),
    "run_checkpoint": ("train.run_checkpoints",),
    "run_log": ("train.run_log",),
    "sharding": ("model.sharding",),
    "tokenizer": ("data.tokenizer",),
    "train_config": ("train.config",),
    "train_step": ("train.step",),
}


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that imports a name from its home, a module of `package`, when it is first used.

    A name whose home is "" is a module itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get


class OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module of `MOVED` under its old path, as a module that looks its names up where they are now."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if fullname.removeprefix("swa_jax.") not in MOVED:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        homes = [importlib.import_module(f"swa_jax.{home}") for home in MOVED[old.removeprefix("swa_jax.")]]

        def get(name: str) -> Any:
            for home in homes:
                if hasattr(home, name):
                    return getattr(home, name)
            raise AttributeError(f"module '{old}' has no attribute '{name}'")

        module.__dict__["__getattr__"] = get


def install_old_paths() -> None:
    """Makes the old paths importable; once is enough."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(OldPaths())
