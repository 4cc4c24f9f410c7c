"""The errors that a user reads as one sentence; every other error keeps its traceback."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class UserError(ValueError):
    """A mistake or an accident that a user can mend; the message is one sentence that says how."""


class ConfigError(UserError):
    """An option, a setting or a file that cannot be used; the message names it and what would be right."""


class CheckpointError(ConfigError):
    """Weights or a folder of them that cannot be used; the message names the file or tensor and what would be right."""


class UnreachableError(CheckpointError):
    """Files in another place that cannot be read now; what was read of them before need not be read again."""


class NotFiniteError(UserError, FloatingPointError):
    """A training whose loss or gradient is no longer a number."""


def not_installed(need: str, *, extra: str) -> ConfigError:
    """The error of an optional package that is missing.

    Args:
      need: who needs which package, such as "--harness needs lm-evaluation-harness".
      extra: the extra of pyproject.toml that brings the package.
    """
    return ConfigError(
        f"{need}, which is not installed: run pip install -e '.[{extra}]' in the folder of the swa-jax repository"
    )


def import_optional(module: str, missing: ConfigError) -> Any:
    """A module that may not be installed; then `missing` is raised."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing from None


# What the system says where a disk takes no more: what that means, and what helps.
_FULL_DISK = {
    "No space left on device": ("the disk is full", "make room"),
    "Not enough free space to write": ("the disk is full", "make room"),  # NumPy's words
    "Disk quota exceeded": ("the disk is full", "make room"),
    "File too large": ("a file reaches the largest size that is allowed here", "raise it (ulimit -f unlimited)"),
}

_FULL_MEMORY = "RESOURCE_EXHAUSTED: "
_LESS_MEMORY = (
    "take fewer sequences at once (--batch-size or --slots, in training stages[].accumulate), a shorter length or "
    "--dtype bfloat16, whichever the command has; docs/start-gpu.md says more"
)

_OF_A_FILE = {
    FileNotFoundError: "does not exist: name one that does",
    FileExistsError: "is there already: name another, or remove it first",
    NotADirectoryError: "is a file, or in one, where a folder is needed: name a folder",
    IsADirectoryError: "is a folder: name a file",
    PermissionError: "may not be read or written by you",
}


def sentence(error: BaseException) -> str | None:
    """What a user should read of an error that is expected; None for one that needs its traceback.

    Expected are `UserError`, the kernels' `ArgumentError`, a full disk or device, and what the system says of a file.
    """
    if isinstance(error, UserError):
        return str(error)
    if sign := full_disk(error):
        state, help = _FULL_DISK[sign]
        if file := getattr(error, "filename", None):
            state = state.replace("the disk", f"the disk of {file}").replace("a file", f"the file {file}")
        return f"{state} ({sign}): {help}, and start the same command again"
    of_a_kernel = "memory space vmem" in str(error)  # no fewer sequences would help: a defect of ours
    if isinstance(error, RuntimeError) and str(error).startswith(_FULL_MEMORY) and not of_a_kernel:  # JAX's
        first = str(error).removeprefix(_FULL_MEMORY).split("\n")[0].strip(" .")
        return f"the memory of the device does not suffice ({first}): {_LESS_MEMORY}"
    if isinstance(error, OSError) and error.filename is not None:
        what = _OF_A_FILE.get(type(error), f"cannot be read or written ({error.strerror}): name another")
        return f"{error.filename} {what}"
    kernels = sys.modules.get("pallas_kernels.math.spec")  # not imported for this: with it would come JAX
    return str(error) if kernels is not None and isinstance(error, kernels.ArgumentError) else None


def reason(error: Exception) -> str:
    """Why something could not be written, in few words."""
    if sign := full_disk(error):
        return f"{_FULL_DISK[sign][0]} ({sign})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def full_disk(error: BaseException) -> str | None:
    """The system's words for a full disk, or None; TensorStore says them in a `ValueError`."""
    if not isinstance(error, OSError | ValueError):
        return None
    return next((sign for sign in _FULL_DISK if sign in str(error)), None)
