"""The pages of all commands, training keys and servers, made of the code while the site is built: conf.py calls it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any

NOT_SHOWN = {"help", "install_completion", "show_completion"}


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    escaped = [[cell.replace("|", r"\|").replace("\n", " ") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


# ---- commands ----

COLUMNS = ("option", "meaning", "default")


def commands() -> str:
    """Every command of `swa-jax`: what it does, its arguments, its options with their defaults."""
    import typer

    from swa_jax.cli.main import app

    return "\n".join(_command("swa-jax", typer.main.get_command(app), known=frozenset()))


def _command(name: str, command: Any, known: frozenset[tuple[str, ...]]) -> Iterator[str]:
    """A command, and the commands of a group; what all commands of a group have is said once."""
    verbs = {verb: one for verb, one in getattr(command, "commands", {}).items() if not one.hidden}
    rows = _parameters(command)
    yield f"{'#' * min(name.count(' ') + 2, 4)} {name}\n\n{_plain(command.help)}\n"
    if not verbs:
        arguments = [row[0].strip("`") for row in rows if not row[0].startswith("`-")]
        yield f"```text\n{' '.join([name, *arguments, '[OPTIONS]'])}\n```\n"
    if own := [row for row in rows if row not in known]:
        yield table(COLUMNS, own)
    in_all = frozenset(set.intersection(*(set(_parameters(one)) for one in verbs.values()))) if verbs else frozenset()
    if in_all:
        yield f"Every `{name}` command has:\n"
        yield table(COLUMNS, [row for row in _parameters(next(iter(verbs.values()))) if row in in_all])
    for verb, one in verbs.items():
        yield from _command(f"{name} {verb}", one, in_all)


def _parameters(command: Any) -> list[tuple[str, str, str]]:
    return [_parameter(p) for p in command.params if p.name not in NOT_SHOWN and not getattr(p, "hidden", False)]


def _parameter(parameter: Any) -> tuple[str, str, str]:
    """Name, meaning and default of an option or an argument."""
    meaning, value = _plain(parameter.help), parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        return f"`{value}`", meaning, "" if parameter.required else "may be left out"
    names = [f"`{one}`" if parameter.is_flag else f"`{one} {value}`" for one in parameter.opts]
    names += [f"`{one}`" for one in parameter.secondary_opts]
    if parameter.required:
        return ", ".join(names), meaning, "must be given"
    default, off = parameter.default, parameter.is_flag and not parameter.secondary_opts
    shown = parameter.show_default and not (off or default is None or default == [] or callable(default))
    if parameter.is_flag and shown:
        default = (parameter.opts if default else parameter.secondary_opts)[0]
    return ", ".join(names), meaning, f"`{_value(default)}`" if shown else ""


def _value(default: Any) -> str:
    return ", ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


def _plain(text: str | None) -> str:
    """Help without the terminal's colours; names of options as code."""
    plain = re.sub(r"\[/?(bold|dim|italic|green|cyan|yellow|red)\]", "", inspect.cleandoc(text or ""))
    return re.sub(r"`[^`]*`|(?<![\w-])--[a-z][a-z-]*", lambda found: f"`{found[0].strip('`')}`", plain)


# ---- training keys ----


def training_keys() -> str:
    """Every key of a training file: its type, its default and what it means."""
    from swa_jax.train.config import TrainConfig

    return "\n".join(_section("", TrainConfig, seen=set()))


def _section(path: str, cls: type, seen: set[type]) -> Iterator[str]:
    seen.add(cls)
    hints, nested, rows = typing.get_type_hints(cls), [], []
    first, meanings = _documented(cls)
    for field in dataclasses.fields(cls):
        inner = _dataclass_in(hints[field.name])
        if inner is not None and inner not in seen:
            nested.append((path + field.name + ("[]." if "tuple" in str(hints[field.name]) else "."), inner))
        meaning = meanings.get(field.name) or (_documented(inner)[0].split("\n")[0] if inner else "")
        rows.append((f"`{field.name}`", _type(hints[field.name]), _default(field), meaning))
    title = path.rstrip(".") or "The run"
    yield f"## {title}\n\n{first}\n"
    yield table(("key", "value", "default", "meaning"), rows)
    for name, inner in nested:
        if inner not in seen:
            yield from _section(name, inner, seen)


def _documented(cls: type) -> tuple[str, dict[str, str]]:
    """The docstring without its attributes, and the meaning of each field: from there, and from comments beside it."""
    text, _, attributes = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    meanings: dict[str, str] = {}
    for names, meaning in re.findall(r"(?ms)^  (\w[\w, \n]*?): (.*?)(?=^  \w|\Z)", attributes):
        first, *others = re.findall(r"\w+", names)
        meanings |= {first: " ".join(meaning.split())} | dict.fromkeys(others, f"see `{first}`")
    lines = inspect.getsource(cls).splitlines()
    for node in ast.parse(inspect.cleandoc("\n".join(lines))).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = lines[node.lineno - 2].strip()
            comment = re.search(r"  # (.*)", lines[(node.end_lineno or node.lineno) - 1])
            found = [above[2:]] if above.startswith("# ") else []
            meanings[node.target.id] = " ".join([*found, *([comment[1]] if comment else [])]) or meanings.get(
                node.target.id, ""
            )
    return text.strip(), meanings


def _dataclass_in(hint: Any) -> type | None:
    if dataclasses.is_dataclass(hint):
        return hint if isinstance(hint, type) else None
    return next((found for part in typing.get_args(hint) if (found := _dataclass_in(part))), None)


def _type(hint: Any) -> str:
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    if _dataclass_in(hint) is not None:
        return "list of mappings" if "tuple" in str(hint) else "mapping"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if typing.get_origin(hint) is tuple:
        return "list of " + _type(arguments[0])
    if typing.get_origin(hint) is not None and "Mapping" in str(hint):
        return "mapping"
    if arguments:  # a union, None left out
        return " or ".join(map(_type, arguments))
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}.get(hint, str(hint))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "must be given" if field.default_factory is dataclasses.MISSING else ""
    value = field.default
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "" if any(map(dataclasses.is_dataclass, value)) else f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# ---- servers ----


def servers() -> str:
    """Every server: the version that was read, what it reads at once on which device, and what runs each family."""
    from swa_jax.checkpoint.families import FAMILIES
    from swa_jax.checkpoint.servers import SERVERS

    versions = ((f"`{name}`", s.title, s.version, s.released) for name, s in SERVERS.items())
    devices = (
        (
            f"`{name}`",
            f"`{device}`",
            str(own.batched_tokens),
            str(own.batches),
            str(own.block_tokens) if s.cache.pages is None else f"{s.cache.pages(32768)} at 32768 tokens",
        )
        for name, s in SERVERS.items()
        for device, own in s.cache.devices.items()
    )
    page = ["## Versions\n", table(("`--for`", "server", "version", "released"), versions), "## Devices\n"]
    columns = ("`--for`", "`--device`", "own batched tokens", "batches at once", "tokens of a block")
    page += ["What a server does there unless it is told otherwise.\n", table(columns, devices)]
    for server in SERVERS.values():
        rows = [(family, _runs(server, family)) for family in FAMILIES if _runs(server, family)]
        page += [f"## Families on {server.title}\n", table(("model_type", "windows"), rows)]
    return "\n".join(page)


def _runs(server: Any, family: str) -> str:
    """What a server does with a family; "" where it runs it as another one alone."""
    classes = server.classes.get(family, ())
    found = [f"{one.name}: {one.reads.value}" + (" (caches kept whole)" if not one.frees else "") for one in classes]
    return "; ".join(found) or server.no_class.get(family, "")
