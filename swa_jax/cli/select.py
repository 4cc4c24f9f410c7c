"""The verbs `swa-jax select METHOD`: choose the layers or KV heads that keep full attention."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import check_store
from swa_jax.base.settings import nearest
from swa_jax.cli.groups import expand
from swa_jax.cli.options import (
    Mesh,
    Model,
    PromptKind,
    WindowGiven,
    check_window,
    find_model,
    find_tokenizer,
    in_pattern,
    panel,
    parse_mesh,
)
from swa_jax.cli.select_options import Budget, Examples, Running, Written, write_choice
from swa_jax.select.methods import BY_PLACE, DEFAULT, METHODS, Method, choose
from swa_jax.select.task import Task

if TYPE_CHECKING:
    from swa_jax.model.decoder import Decoder


class Methods(typer.core.TyperGroup):
    """`select MODEL` is `select METHOD MODEL` by the default method."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        if name not in self.commands:
            if rest and not rest[0].startswith("-"):
                raise ConfigError(f"method '{name}' is not known{nearest(name, list(METHODS))}")
            args = [DEFAULT["layers"], *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Methods,
    no_args_is_help=True,
    help="Choose the layers or KV heads that keep full attention. `select MODEL` takes the default method, "
    f"{DEFAULT['layers']}; of single heads, {DEFAULT['heads']} does the same.",
)


def select(
    method: Method,
    model: Model,
    written: Written,
    budget: Budget,
    examples: Examples,
    kind: PromptKind,
    window: WindowGiven,
    running: Running,
    heads_in: Annotated[int, in_pattern(metavar="N", help="KV heads that stay together, as 2 or 4.", min=1)] = 1,
    mesh: Mesh = None,
    **own: Any,
) -> None:
    """Write a pattern chosen by a method, and a picture beside it; `own` are the method's own options."""
    from swa_jax.checkpoint.folder import load_model, open_checkpoint, weights_sum
    from swa_jax.report.progress import Progress

    budget.check(method.chooses)
    written.check(method.name)
    if method.keeps:
        check_store(written.scores, "scores of a search")
    if method.name not in BY_PLACE and not written.force:
        check_window(window.as_window.size, kind.length)
    partition = parse_mesh(mesh)
    folder = find_model(model)
    source = open_checkpoint(folder)
    config = source.config
    whole = window.as_window.of(source.pattern.window)
    bare = cast("Decoder", source)  # its config is what methods by place read
    task = Task(bare, [], whole, running.batch_size, examples.seed, heads_in, partition=partition, force=written.force)
    ratio = budget.ratio_of(method.chooses, config, source.hf_config, kind.length, whole, heads_in)
    if ratio in (0, 1):
        every, recipe = ("is windowed", "window") if ratio else ("stays full", "full")
        unit = method.chooses.removesuffix("s")
        raise ConfigError(f"there is nothing to choose where every {unit} {every}: take the recipe '{recipe}'")
    task.report = functools.partial(typer.echo, err=True)
    if method.name not in BY_PLACE:
        task.examples, task.data = examples.draw(kind, folder, find_tokenizer(source), config)
        task.model = load_model(source, dtype=running.dtype, partition=partition)
    if method.keeps:
        task.file, task.weights = written.scores, weights_sum(folder)
    with Progress("steps") as progress:
        task.progress = progress.update
        (chosen,) = choose(method.name, task, [ratio], **own)
    write_choice(chosen, config, written)


def _command(method: Method) -> Callable[..., None]:
    """`select` by this method, with the options of its own; without those that mean nothing to it."""
    general = expand(select)

    @functools.wraps(general)
    def run(**given: Any) -> None:
        general(method=method, **given)

    parameters = dict(inspect.signature(general).parameters)
    idle = {"mesh": method.meshes, "heads_in": method.chooses == "KV heads"}
    for name in ("method", "own", *(name for name, used in idle.items() if not used)):
        del parameters[name]
    own = map(_option, method.options.values())
    run.__signature__ = inspect.Signature([*parameters.values(), *own])  # type: ignore[attr-defined]
    return run


def _option(parameter: inspect.Parameter) -> inspect.Parameter:
    """A runner's keyword argument as an option of the command line."""
    kind, about = get_args(parameter.annotation)
    more = {} if about.least is None else {"min": about.least, "metavar": "N"}
    return parameter.replace(annotation=Annotated[kind, panel("Method")(help=about.help, **more)])


for _method in METHODS.values():
    app.command(_method.name, help=f"Choose {_method.chooses} by this: {_method.by}. It costs {_method.costs}.")(
        _command(_method)
    )
