"""Public names of a package, each loaded when it is first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`, which imports a name from its home when it is first used; `dir` shows the names.

    Args:
      homes: for each name the module of `package` that has it; "" for a name that is a module itself.
    """
    own = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    own["__dir__"] = lambda: sorted({*homes, *own["__all__"], *(name for name in own if name.startswith("__"))})
    return get
