"""Wrong command lines, each answered by one sentence with a way out, as all other errors are."""

from __future__ import annotations

import re
from typing import Any

import typer

from swa_jax.base.settings import nearest

UsageError: Any = typer.BadParameter.__base__  # of the click that typer has inside

# What pydantic calls a wrong value, and what would be right.
_WANTED = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:.15g}",
}


def usage_sentence(error: Any) -> str:
    """What a user should read of a command line that cannot be parsed; "" where typer has printed the help."""
    kind, context = type(error).__name__, error.ctx
    if kind == "NoArgsIsHelpError":
        error.show()
        return ""
    command = "swa-jax" if context is None else _name(context)
    if kind == "NoSuchOption":
        options = [p for p in context.command.params if p.param_type_name == "option"]
        known = [name for option in options for name in (*option.opts, *option.secondary_opts)]
        return f"{error.option_name} is not an option of `{command}`{nearest(error.option_name, known)}"
    if kind == "BadOptionUsage":
        takes = "takes no value" if "does not take" in error.message else "needs a value"
        return f"{error.option_name} {takes}"
    if kind == "MissingParameter":
        return f"`{command}` needs {_label(error.param)}: {error.param.help}"
    if kind == "BadParameter" and error.param is not None:
        return f"{_label(error.param)} {_wrong_value(error)}"
    if found := re.match(r"No such command '(.*?)'\.", error.message):
        return f"'{found[1]}' is not a command of `{command}`{nearest(found[1], [*context.command.commands])}"
    if found := re.fullmatch(r"Got unexpected extra argument\(?s?\)? \((.*)\)", error.message):
        return f"`{command}` takes no further argument, got '{found[1]}': see `{command} --help`"
    return f"`{command}`: {error.format_message()[:300]}"


def without_types_of_flags(command: Any) -> None:
    """Help says `--force`, not `--force <bool>`."""
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_bool_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        without_types_of_flags(inner)


def _name(context: Any) -> str:
    """The command as a user writes it, whatever started the program."""
    words: list[str] = []
    while context.parent is not None:
        words.insert(0, context.info_name)
        context = context.parent
    return " ".join(["swa-jax", *words]).replace("pattern print", "pattern")


def _label(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.name).upper()


def _wrong_value(error: Any) -> str:
    """Such as "must be at least 1, got 0"."""
    details: list[Any] = getattr(error.__cause__, "errors", list)()
    if not details:
        return f"cannot be used: {error.message}"
    first = details[0]
    given = str(first["input"])
    got = f"got {given:.100}" if re.fullmatch(r"-?[\d.]+", given) else f"got '{given:.100}'"
    if choices := error.param.type_descriptor.choices:
        *most, last = map(str, choices)
        return f"must be {', '.join(most)} or {last}, {got}"
    if first["type"] in _WANTED:
        return f"must be {_WANTED[first['type']].format(**first.get('ctx', {}))}, {got}"
    return f"cannot be used: {first['msg']}, {got}"
