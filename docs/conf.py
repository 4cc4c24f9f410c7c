"""The documentation site: `make docs`. Pages are Markdown (MyST). References are made from the code (reference.py)."""

import importlib
import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

project = "swa-jax"
author = "The swa-jax authors"
copyright = author
release = importlib.metadata.version("swa-jax")
html_title = f"swa-jax {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3  # so that page.md#heading works here as it does on GitHub

html_theme = "furo"
exclude_patterns = ["plans/*", "data/*"]
nitpicky = False

# Docstrings quote names in single backticks, and have "Args:", "Returns:" and "Raises:".
default_role = "code"
napoleon_numpy_docstring = False
autodoc_typehints = "none"  # the signature keeps them; the text says shapes and types itself
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
add_module_names = False

PUBLIC = (
    "pallas_kernels",
    "swa_jax",
    "swa_jax.checkpoint",
    "swa_jax.evaluate",
    "swa_jax.checkpoint.families",
    "swa_jax.model",
    "swa_jax.select",
    "swa_jax.train",
)


def load_public_names() -> None:
    """Load what the packages load only when it is asked for: autodoc lists the names that a module has."""
    for package in map(importlib.import_module, PUBLIC):
        for name in getattr(package, "__all__", ()):
            setattr(package, name, getattr(package, name))


def link_outside(app: Any, page: str, source: list[str]) -> None:
    """Links to files that are no pages go to the repository where its address is known (GitHub's workflows say it).

    These are files outside docs/ and the tables of docs/data/. Elsewhere they become downloads.
    """
    repository = os.environ.get("GITHUB_REPOSITORY")

    def link(match: re.Match[str]) -> str:
        text, file, heading = match.groups()
        if repository is None:
            return f"{{download}}`{text} <{file}>`"
        path = file.removeprefix("../") if file.startswith("../") else f"docs/{file}"
        return f"[{text}](https://github.com/{repository}/blob/main/{path}{heading or ''})"

    source[0] = re.sub(r"\[([^]]+)\]\(((?:\.\./|data/)[^)#\s]+)(#[^)\s]*)?\)", link, source[0])


# {page: the function of reference.py}
REFERENCES = {"commands": "commands", "training-keys": "training_keys", "servers": "servers"}


def insert_reference(app: Any, page: str, source: list[str]) -> None:
    """Put what reference.py makes of the code at the end of its page."""
    if page in REFERENCES:
        source[0] += "\n" + getattr(importlib.import_module("reference"), REFERENCES[page])()


def setup(app: Any) -> None:
    load_public_names()
    app.connect("source-read", link_outside)
    app.connect("source-read", insert_reference)
    app.connect("env-get-outdated", lambda *_: list(REFERENCES))  # their source is the code, which may have changed
