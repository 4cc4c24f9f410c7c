"""What the launchers are told: one YAML file for TPU VMs and GKE, and what follows from it.

`launch/example.yaml` is an example. `swa_jax.base.settings` reads it, which needs PyYAML and no JAX: a laptop will do.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from swa_jax.base.chips import CLOUD, Cloud
from swa_jax.base.errors import ConfigError, UserError, sentence
from swa_jax.base.settings import load_config, nearest

Overrides = Annotated[list[str] | None, Argument(metavar="[a.b=c]...", help="Settings that replace those of the file.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the commands, run nothing.")]
SAVED = 143  # status of a run that was told to stop, has saved, and is to be started again


@dataclasses.dataclass(frozen=True)
class TpuVm:
    """For `launch.tpu_vm`: where, and how a machine gets the program."""

    project: str
    zone: str
    repository: str  # of this program: what `git clone` takes
    revision: str = "main"
    runtime_version: str | None = None  # default: the generation's
    spot: bool = False
    reserved: bool = False
    network: str | None = None  # the project's default network
    subnetwork: str | None = None
    service_account: str | None = None  # the address of the one that the machines act as
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict)  # WANDB_API_KEY: its name in Secret Manager
    prepare: str = ""  # shell command on every machine before each start, such as a mount
    folder: str = "swa-jax"  # of the clone, under the home folder
    install: str = (
        "python3 -m pip install --user --quiet uv && ~/.local/bin/uv venv --quiet --clear --python 3.12 .venv && "
        "~/.local/bin/uv pip install --quiet --python .venv/bin/python -c constraints.txt -e '.[tpu]'"
    )

    def __post_init__(self) -> None:
        if self.spot and self.reserved:
            raise ConfigError("'tpu_vm.spot' and 'tpu_vm.reserved' are both set: capacity is one or the other")
        for name in self.secrets:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError(f"'tpu_vm.secrets' has '{name}', which is no name of an environment variable")


@dataclasses.dataclass(frozen=True)
class Gke:
    """For `launch.gke`: the image, and the shared folder that every pod mounts."""

    image: str  # has swa-jax with the extra [tpu], and the configurations under its working folder
    volume_claim: str  # a PersistentVolumeClaim of access mode ReadWriteMany
    mount_path: str = "/shared"
    namespace: str = "default"
    service_account: str | None = None  # of Kubernetes
    secret: str | None = None  # a Kubernetes Secret: each of its keys, such as WANDB_API_KEY, becomes a variable
    gcs_fuse: bool = False  # the volume is a bucket: pods get the sidecar that mounts it
    queue: str | None = None  # a Kueue LocalQueue
    spot: bool = False
    max_restarts: int = 3  # after failures; preemptions are not counted
    cluster: str | None = None  # for xpk
    project: str | None = None  # for xpk
    zone: str | None = None  # for xpk


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run on a pod."""

    name: str
    config: str  # a path as the machines see it
    topology: str  # of one slice, as `swa-jax compile` takes it: v5p:4x4x8
    overrides: tuple[str, ...] = ()
    slices: int = 1
    timeout: int = 300  # seconds for all machines to come, and after which a silent one is lost
    tpu_vm: TpuVm | None = None
    gke: Gke | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise ConfigError(
                f"'name' is '{self.name}': it must be 1 to 40 small letters, digits and hyphens, from a letter on"
            )
        if self.slices < 1:
            raise ConfigError(f"'slices' must be at least 1, got {self.slices}")
        for override in self.overrides:
            if "=" not in override:
                raise ConfigError(f"'overrides' has '{override}', which has not the form a.b=value")
        output = self.override("output")
        if self.machines * self.slices > 1 and not (output or "").startswith("/"):
            found = "no output" if output is None else f"output={output}"
            raise ConfigError(
                f"'overrides' has {found}: {self.slices * self.machines} machines need one folder that all of them "
                "mount, as output=/shared/runs/NAME"
            )
        sized = self.override("mesh.slices")
        if sized is not None and sized != str(self.slices):
            raise ConfigError(f"'overrides' has mesh.slices={sized}, but 'slices' is {self.slices}: drop one")

    def override(self, key: str) -> str | None:
        """What `overrides` set a key to, if they do."""
        return next((o.partition("=")[2] for o in self.overrides if o.partition("=")[0] == key), None)

    @property
    def generation(self) -> str:
        return self.topology.partition(":")[0]

    @property
    def shape(self) -> str:
        return self.topology.partition(":")[2]

    @property
    def chip(self) -> Cloud:
        if self.generation not in CLOUD:
            known = nearest(self.generation, list(CLOUD))
            raise ConfigError(f"'topology' is '{self.topology}': unknown TPU '{self.generation}'{known}")
        return CLOUD[self.generation]

    @property
    def chips(self) -> int:
        """How many one slice has."""
        sizes = self.shape.split("x")
        if len(sizes) != self.chip.dimensions or not all(size.isdigit() and int(size) for size in sizes):
            example = "x".join(["4"] * self.chip.dimensions)
            raise ConfigError(f"'topology' is '{self.topology}': it must be as in {self.generation}:{example}")
        return math.prod(map(int, sizes))

    @property
    def chips_per_machine(self) -> int:
        chips = self.chips
        if chips <= self.chip.single:
            return chips
        if chips % self.chip.machine:
            raise ConfigError(f"'topology' is '{self.topology}': {chips} chips are no whole machines of 4")
        return self.chip.machine

    @property
    def machines(self) -> int:
        """How many one slice has."""
        return self.chips // self.chips_per_machine

    @property
    def accelerator_type(self) -> str:
        """As gcloud and xpk name the slice, without its shape where the count says it all."""
        return f"{self.chip.type}-{self.chips * self.chip.cores}" if self.chip.type else f"tpu7x-{self.shape}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """What `swa-jax` is called with on every machine, which finds its process number by itself."""
        sized = self.slices > 1 and self.override("mesh.slices") is None
        slices = (f"mesh.slices={self.slices}",) if sized else ()
        return ("train", self.config, *self.overrides, *slices, f"--timeout={self.timeout}")


def check_run(settings: Settings, source: str) -> None:
    """Read the training configuration as the machines will, and say on standard error where they have it from.

    Args:
      source: where that is, in words.

    Raises:
      ConfigError: the file is not there, or a key or a value in it or in the overrides is wrong.
    """
    file = Path(settings.config)
    if file.is_absolute() and not file.exists():
        print(f"{file} was not checked: it is not on this machine", file=sys.stderr)
        return
    if not file.exists():
        raise ConfigError(
            f"'config' is '{file}', and there is no such file here: run this in the root of the repository"
        )
    try:
        from swa_jax.train.config import TrainConfig
    except ImportError as error:
        print(f"{file} was not checked: {error.name} is not installed here", file=sys.stderr)
    else:
        _, _, *overrides, _ = settings.arguments
        try:
            load_config(TrainConfig, file, overrides)
        except ConfigError as error:
            raise ConfigError(f"{file} with 'overrides': {error}") from None
    if not file.is_absolute():
        print(f"the machines read {file} from {source}", file=sys.stderr)


class Runner:
    """Runs commands, or with `dry_run` only prints them, quoted for a shell."""

    def __init__(self, dry_run: bool = False):
        self.dry_run = dry_run

    def note(self, text: str) -> None:
        print(f"# {text}" if self.dry_run else text, flush=True)

    def __call__(self, command: Sequence[str], *, input: str | None = None) -> None:
        """Raises `CommandError` when the command fails."""
        if self.dry_run:
            here = "" if input is None else f" <<'END'\n{input}END"
            print(shlex.join(command) + here, flush=True)
            return
        status = self._run(command, input=input).returncode
        if status:
            raise CommandError(f"{shlex.join(command)} failed with status {status}; what it said is above")

    def read(self, command: Sequence[str]) -> tuple[int, str, str]:
        """Status, standard output and error output; in a dry run, after printing the command, (0, "", "")."""
        if self.dry_run:
            print(shlex.join(command), flush=True)
            return 0, "", ""
        done = self._run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return done.returncode, done.stdout.strip(), done.stderr.strip()

    def _run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(command, text=True, check=False, **options)
        except FileNotFoundError:
            raise CommandError(f"{command[0]} is not installed, or not on PATH") from None


class CommandError(UserError):
    """A command that a launcher ran has failed."""


def main(
    verbs: Mapping[str, Callable[[Settings, Runner], int | None]],
    description: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """The command line `VERB SETTINGS [a.b=c ...] [--dry-run]`; expected errors are one sentence and status 2."""
    app = typer.Typer(help=as_help(description), add_completion=False)
    app.callback()(lambda: None)  # so that one verb alone is named, too
    for name, verb in verbs.items():
        app.command(name, help=as_help(verb.__doc__ or ""))(_command(verb))
    try:
        return run_app(app, arguments)
    except KeyboardInterrupt:
        print("interrupted here; what was started on the pod goes on", file=sys.stderr)
        return 130


def _command(verb: Callable[[Settings, Runner], int | None]) -> Callable[..., None]:
    def run(
        settings: Annotated[Path, Argument(help="A YAML file; see launch/example.yaml.")],
        changes: Overrides = None,
        dry_run: DryRun = False,
    ) -> None:
        raise typer.Exit(verb(load_config(Settings, settings, changes or []), Runner(dry_run)) or 0)

    return run


def as_help(text: str) -> str:
    """A docstring as `--help` shows it: paragraphs in one piece, nothing in it read as markup."""
    return escape(re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text)))


def run_app(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """The status of a command line. Wrong arguments and expected errors are one sentence, and status 2."""
    try:
        given = None if arguments is None else list(arguments)
        return typer.main.get_command(app).main(args=given, standalone_mode=False) or 0
    except Exception as error:
        usage = getattr(error, "format_message", None)  # Typer's errors of arguments
        message = sentence(error) if usage is None else f"{usage().rstrip('.')}; --help says more"
        if message is None:
            raise
        print(message, file=sys.stderr)
        return 2
