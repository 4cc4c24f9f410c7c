"""`swa-jax evaluate CHECKPOINT --ruler TASK --text FILE …`: the one command of before, as the commands by kind.

It works for one release. All of this file goes then, with `in-old-form` and the spellings in `OLD_SPELLINGS`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from swa_jax.errors import ConfigError
from swa_jax.settings import nearest

# Of each kind: what an option was called, and its name now.
OLD_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "needles": {"--needles": "--examples"},
    "ruler": {"--length": "--lengths"},
    "text": {"--windows": "--eval-windows", "--contexts": "--lengths", "--context": "--lengths"},
    "routing": {"--length": "--lengths", "--needles": "--examples", "--context": "--text-length"},
    "harness": {"--harness-folder": "--folder"},
}
# Options that named a kind; the kinds of questions are options as before.
_QUESTIONS = ("--longbench", "--longbench-v2", "--longmemeval")
_NAMED = ("--needles", "--ruler", "--text", "--harness", "--routing")
_WITHOUT_VALUE = ("--routing", "--cut-middle", "--fa-decode", "--no-fa-decode", "--chat", "--thinking", "--no-thinking")


def in_old_form(ctx: typer.Context) -> None:
    """Run the commands by kind that options of the one command ask for."""
    assert ctx.parent is not None
    kinds: Any = ctx.parent.command
    commands = translate(ctx.args, _options(kinds))
    out = commands[0][commands[0].index("--out") + 1] if "--out" in commands[0] else None
    if out is not None and (Path(out) / "results.json").exists():
        raise ConfigError(f"{out} has results already: name another folder with --out, or move it away")
    new = "; ".join(shlex.join(["swa-jax", "evaluate", *command]) for command in commands)
    typer.echo(f"the next release has `evaluate` by kind only; this command is now: {new}", err=True)
    # All are parsed before the first one runs.
    for context in [
        kinds.commands[name].make_context(name, arguments, parent=ctx.parent) for name, *arguments in commands
    ]:
        with context:
            context.command.invoke(context)


def translate(arguments: list[str], options: Mapping[str, set[str]]) -> list[list[str]]:
    """The commands by kind.

    Args:
      arguments: those of the old form.
      options: the options of each kind, by its name.

    Raises:
      ConfigError: an unknown option or kind, no checkpoint, or nothing to measure.
    """
    checkpoint, given = _read(arguments, options)
    values: dict[str, list[str]] = {}
    for name, value in given:
        values.setdefault(name, []).append(value)
    sweep = "--windows" in values or "--contexts" in values
    if sweep and "--text" not in values:
        raise ConfigError("--windows and --contexts ask for the perplexity of a text: name it with --text")
    asks = any(name in values for name in _QUESTIONS)
    others = sweep or asks or "--ruler" in values or "--harness" in values
    needles = values.get("--needles", ["0" if others else ""])[-1]  # "": as many as is the default
    if needles == "0" and "--needles" not in values:
        given.append(("--needles", "0"))  # for routing, which then looks at the text alone
    positional = {"ruler": values.get("--ruler", []), "harness": values.get("--harness", []), "text": []}
    positional["text"] = values.get("--text", [])[-1:]
    wanted = {
        "routing": "--routing" in values,  # which refuses patterns without routers, before all the rest
        "needles": needles != "0",
        "ruler": "--ruler" in values,
        "text": "--text" in values,
        "questions": asks,
        "harness": "--harness" in values,
    }
    if not any(wanted[kind] for kind in wanted if kind != "routing"):
        raise ConfigError(
            "nothing to measure: --needles is 0, and no --ruler, --text, --harness or set of questions is given"
        )
    return [
        [kind, checkpoint, *positional.get(kind, ()), *_options_of(kind, given, values, options[kind])]
        for kind, asked in wanted.items()
        if asked
    ]


def _options_of(kind: str, given: list[tuple[str, str]], values: Mapping[str, list[str]], known: set[str]) -> list[str]:
    """The options that go to a kind, by their new spellings."""
    without = {
        "needles": {"--examples"},  # was RULER's alone
        "ruler": {"--length"} if "--lengths" in values else set(),
        "text": {"--lengths", *({"--context"} if "--contexts" in values else ())},
        "routing": {
            *({"--length"} if "--lengths" in values and "--ruler" in values else ()),
            *({"--needles"} if "--ruler" in values else {"--examples", "--lengths"}),
        },
    }.get(kind, set())
    renamed = OLD_SPELLINGS.get(kind, {})
    words: list[str] = []
    for name, value in given:
        new = renamed.get(name, name)
        positional = name in _NAMED and new == name and not (kind == "routing" and name in ("--ruler", "--text"))
        if name not in without and not positional and new in known:
            words += [new] if name in _WITHOUT_VALUE else [new, value]
    return words


def _read(arguments: list[str], options: Mapping[str, set[str]]) -> tuple[str, list[tuple[str, str]]]:
    """The checkpoint, and (option, value) of each option."""
    known = {name for names in options.values() for name in names} | set(_NAMED)
    known |= {old for renamed in OLD_SPELLINGS.values() for old in renamed}
    checkpoints: list[str] = []
    given: list[tuple[str, str]] = []
    left = iter(arguments)
    for word in left:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            checkpoints.append(word)
        elif name not in known:
            raise ConfigError(f"evaluate has no option '{name}'{nearest(name, sorted(known))}")
        elif equals or name in _WITHOUT_VALUE:
            given.append((name, value))
        else:
            value = next(left, "")
            if not value:
                raise ConfigError(f"{name} needs a value")
            given.append((name, value))
    misspelled = checkpoints and not Path(checkpoints[0]).exists() and get_close_matches(checkpoints[0], options)
    if len(checkpoints) != 1 or misspelled:
        first = checkpoints[0] if checkpoints else ""
        raise ConfigError(
            f"evaluate needs a kind of measurement and a checkpoint, got '{first}'{nearest(first, list(options))}"
        )
    return checkpoints[0], given


def _options(kinds: Any) -> dict[str, set[str]]:
    """The options of each kind."""
    return {
        name: {
            spelling
            for parameter in command.params
            if parameter.param_type_name == "option"
            for spelling in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command in kinds.commands.items()
        if not command.hidden
    }
