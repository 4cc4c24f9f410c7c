"""Public names of a package, each loaded when it is first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__`, which imports a name from its home when it is first used, and its `__dir__`.

    Args:
      homes: for each name the module of `package` that has it; "" for a name that is a module itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*homes, *own["__all__"], *(name for name in own if name.startswith("__"))})

    return get, names
