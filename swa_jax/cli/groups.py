"""Options that belong together, declared once: a command that names a group has the group's options."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any


class Options:
    """The base of groups, which are dataclasses: each field is an option, as the parameters of a command are."""


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a group in place of each parameter that is one.

    Arguments that must be given come first, whichever group they are of.
    """
    own = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: one.annotation
        for name, one in own.items()
        if isinstance(one.annotation, type) and issubclass(one.annotation, Options)
    }
    fields = {name: _options(group) for name, group in groups.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: group(**{one.name: given.pop(one.name) for one in fields[name]}) for name, group in groups.items()
        }
        command(**made, **given)

    parameters: list[inspect.Parameter] = []
    for name, one in own.items():
        parameters += fields[name] if name in groups else [one]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    )
    return run


def _options(group: type[Options]) -> list[inspect.Parameter]:
    """What the constructor takes; the annotation of an inherited field is read where that stands."""
    hints = typing.get_type_hints(group, include_extras=True)
    return [one.replace(annotation=hints[one.name]) for one in inspect.signature(group).parameters.values()]
