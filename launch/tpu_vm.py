"""Training on TPU VMs, one slice or several, requested as a queued resource.

    python -m launch.tpu_vm up SETTINGS.yaml [a.b=c ...] [--dry-run]

`up` does it all: create, wait until the machines are there, install, start, watch; and again after a preemption, until
the run has finished. The other verbs are its parts. Ctrl-C ends the watching, not the run; `up` or `watch` takes it up.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence

from launch.settings import SAVED, CommandError, Runner, Settings, TpuVm, check_run, main
from swa_jax.base.errors import ConfigError

POLL = 30.0  # seconds between two questions
TAKEN = ("SUSPENDING", "SUSPENDED")  # states of a queued resource whose machines were taken away
LOST = (*TAKEN, "FAILED")  # and of one that never has any
SILENT = 20  # questions in a row without an answer until it is given up
TRIES = 3  # of an install, and of a start
SSH = "-oServerAliveInterval=30 -oConnectTimeout=20"  # ssh itself would wait hours for a machine that is gone
# Status of `watch` when the machines, or the run on them, are gone without a word, and of a run that lost a process
# that way (EX_TEMPFAIL).
GONE = 75
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"  # the scope that Secret Manager asks for
GOING = "kill -0 $(cat train.pid 2> /dev/null) 2> /dev/null"  # on a machine, in the folder
# What a lost run has left there, such as a process that is frozen, with the shell that would write its status.
END_LEFTOVER = f"while {GOING}; do kill -KILL -- -$(ps -o pgid= -p $(cat train.pid) | tr -d ' '); sleep 0.1; done"


def place(settings: Settings) -> TpuVm:
    if settings.tpu_vm is None:
        raise ConfigError("missing key 'tpu_vm': project, zone and repository of a run on TPU VMs")
    if settings.chip.runtime is None:
        raise ConfigError(f"'topology' is '{settings.topology}', which Google offers through GKE only")
    return settings.tpu_vm


def gcloud(settings: Settings, verb: str, *flags: str) -> list[str]:
    vm = place(settings)
    where = [f"--project={vm.project}", f"--zone={vm.zone}"]
    return ["gcloud", "compute", "tpus", "queued-resources", verb, settings.name, *where, *flags]


def on_machines(settings: Settings, command: str, *, all_of_them: bool = True) -> list[str]:
    which = "all" if all_of_them else "0"
    return gcloud(settings, "ssh", f"--node={which}", f"--worker={which}", f"--ssh-flag={SSH}", f"--command={command}")


def on_all(settings: Settings, run: Runner, what: str, commands: Sequence[str]) -> None:
    """Run the first command on every machine, or the next one, a while later, where it fails though the machines are
    there: one that has just come may refuse connections, and the network may be away."""
    try:
        return run(on_machines(settings, commands[0]))
    except CommandError:
        if not commands[1:] or state(settings, run, SILENT) != "ACTIVE":
            raise
    run.note(f"the {what} failed on a machine: once more")
    time.sleep(POLL)
    on_all(settings, run, what, commands[1:])


# ---- the parts ----


def create(settings: Settings, run: Runner) -> None:
    """Ask for the slices; they come when there is room."""
    vm = place(settings)
    if settings.chip.dimensions == 3:  # a count of cores leaves the shape open
        flags = [f"--type={settings.chip.type}", f"--topology={settings.shape}"]
    else:
        flags = [f"--accelerator-type={settings.accelerator_type}"]
    flags.append(f"--runtime-version={vm.runtime_version or settings.chip.runtime}")
    if settings.slices == 1:
        flags.append(f"--node-id={settings.name}")
    else:
        flags += [f"--node-count={settings.slices}", f"--node-prefix={settings.name}"]
    flags += ["--spot"] if vm.spot else ["--reserved"] if vm.reserved else []
    for name in ("network", "subnetwork", "service_account"):
        if value := getattr(vm, name):
            flags.append(f"--{name.replace('_', '-')}={value}")
    flags += [f"--scopes={CLOUD_PLATFORM}"] if vm.service_account or vm.secrets else []
    run(gcloud(settings, "create", *flags))


def state(settings: Settings, run: Runner, tries: int = 1) -> str:
    """The state of the queued resource; "" where there is none. Raises `CommandError` where gcloud does not say, having
    been asked so many times: the network may be away for a while."""
    for left in reversed(range(tries)):
        status, text, errors = run.read(gcloud(settings, "describe", "--format=value(state.state)"))
        if status == 0:
            return text
        if "NOT_FOUND" in errors:
            return ""
        if left:
            time.sleep(POLL)
    raise CommandError(f"gcloud does not say how {settings.name} is: {errors}")


def wait(settings: Settings, run: Runner) -> None:
    """Until the machines are there."""
    run.note(f"every {POLL:.0f} s, until the state is ACTIVE:")
    before = None
    while (now := state(settings, run, SILENT)) != "ACTIVE" and not run.dry_run:
        if now in (*LOST, ""):
            raise CommandError(f"{settings.name} is {now or 'not known'}: no machines will come; delete and create it")
        if now != before:
            run.note(f"{settings.name} is {now}")
        before = now
        time.sleep(POLL)


def install(settings: Settings, run: Runner, tries: int = 1) -> None:
    """Clone the program on every machine, at the revision named, with an environment of its own."""
    vm = place(settings)
    folder, revision = shlex.quote(vm.folder), shlex.quote(vm.revision)
    steps = [
        f"(test -d {folder} || git clone --quiet {shlex.quote(vm.repository)} {folder})",
        f"cd {folder}",
        f"git fetch --quiet origin {revision}",
        "git checkout --quiet --detach FETCH_HEAD",
        vm.install,
    ]
    on_all(settings, run, "install", [" && ".join(steps)] * tries)  # a second try takes up the first


def start(settings: Settings, run: Runner) -> None:
    """Start the run on every machine. It outlives the connection; `train.log` and at last `train.status` tell of it."""
    check(settings)
    begin(settings, run)


def check(settings: Settings) -> None:
    """Read the configuration of the run, before machines are asked for."""
    vm = place(settings)
    check_run(settings, f"{vm.repository}, revision {vm.revision}: push it there first")


def begin(settings: Settings, run: Runner, *, lost: bool = False, tries: int = 1) -> None:
    """Start the run on every machine.

    A machine where a run is going is refused, unless that run is `lost`, or of an earlier try that failed on another
    machine: then what is left of it is ended.
    """
    vm = place(settings)
    script = shlex.join([".venv/bin/swa-jax", *settings.arguments])
    # The status is moved into its place, so that nobody reads half of it.
    script += " & echo $! > train.pid; wait $!; echo $? > train.status.new; mv train.status.new train.status"
    steps = [f"if {GOING}; then echo 'a run is going here: stop it first' >&2; exit 1; fi"]
    steps.append("rm -f train.pid train.status")
    steps += [f"({vm.prepare})"] if vm.prepare else []
    for name, secret in vm.secrets.items():  # read on the machine, so that no command line has it
        access = ["gcloud", "secrets", "versions", "access", "latest", f"--secret={secret}", f"--project={vm.project}"]
        steps.append(f'{name}="$({shlex.join(access)})" && export {name}')
    # Behind what an earlier start has said of its end.
    steps.append(f"(setsid nohup bash -c {shlex.quote(script)} >> train.log 2>&1 < /dev/null &)")
    steps.append("until test -e train.pid; do sleep 0.1; done")
    enter = f"cd {shlex.quote(vm.folder)}"
    first, again = (" && ".join([enter, *end, *steps]) for end in ([], [END_LEFTOVER]))
    on_all(settings, run, "start", [again if lost else first] + [again] * (tries - 1))


def stop(settings: Settings, run: Runner) -> None:
    """Tell the run to save and end, as a preemption would."""
    folder = shlex.quote(place(settings).folder)
    run(on_machines(settings, f"cd {folder} && kill -TERM $(cat train.pid)"))


def logs(settings: Settings, run: Runner) -> None:
    """The log's end of the first machine."""
    log = f"{shlex.quote(place(settings).folder)}/train.log"
    run(on_machines(settings, f"tail -n 50 {log}", all_of_them=False))


def watch(settings: Settings, run: Runner) -> int:
    """Wait for the run's end; its status, or `GONE` if the machines were taken away or started anew."""
    ended = "cat train.status 2> /dev/null"
    answers = f"{ended} || ({GOING} && echo running) || (sleep 1; {ended}) || echo lost"
    question = on_machines(settings, f"cd {shlex.quote(place(settings).folder)} && ({answers})", all_of_them=False)
    run.note(f"every {POLL:g} s, until there is a status (0 finished, {SAVED} saved) or the machines are gone:")
    silent = 0
    while True:
        try:
            gone = state(settings, run) in (*LOST, "")
            status, answer, errors = run.read(question)
            if run.dry_run:
                return 0
            if gone or answer == "lost":
                return GONE
            if status == 0 and answer.isdigit():
                return int(answer)
        except CommandError as error:
            status, answer, errors = 1, "", str(error)
        # The network may be away for a while; where gcloud cannot reach a machine, its status may be 0 all the same.
        silent = 0 if status == 0 and answer else silent + 1
        if silent == SILENT:
            raise CommandError(f"the first machine of {settings.name} has not answered {SILENT} times: {errors}")
        time.sleep(POLL)


def delete(settings: Settings, run: Runner) -> None:
    """Give the machines back, whatever runs on them."""
    run(gcloud(settings, "delete", "--force", "--quiet"))


def up(settings: Settings, run: Runner) -> int:
    """Until the run has finished: have the machines, run, and once more after each preemption."""
    check(settings)
    installed = started = lost = False
    first = True
    while True:
        now = state(settings, run, 1 if first else SILENT)
        if now in LOST:
            delete(settings, run)
            now = ""
        if not now:
            create(settings, run)
        if now != "ACTIVE":
            try:
                wait(settings, run)
            except CommandError:
                if state(settings, run, SILENT) not in TAKEN:
                    raise
                time.sleep(POLL)  # they were taken away before all of them were there
                continue
            installed = False
        elif first:
            installed = started = _was_started(settings, run)
        try:
            if not installed:
                install(settings, run, TRIES)
            if not started:
                begin(settings, run, lost=lost, tries=TRIES)
            ended = watch(settings, run)
            if ended not in (0, SAVED, GONE):  # perhaps because one of the machines has just been taken away
                time.sleep(POLL)
                ended = ended if state(settings, run, SILENT) == "ACTIVE" else GONE
        except CommandError:
            if state(settings, run, SILENT) == "ACTIVE":
                raise
            ended = GONE  # in the middle of it
        if run.dry_run:
            run.note(f"after {SAVED} or when the machines are gone, all of it again; after any other status, no more")
            return 0
        if ended == 0:
            run.note("the run has finished; `delete` gives the machines back")
            return 0
        if ended not in (SAVED, GONE):
            logs(settings, run)
            run.note(f"the run failed with status {ended}; the machines are kept: `install` and `start`, or `delete`")
            return ended
        what = "the run was told to stop and has saved" if ended == SAVED else "the run or its machines are gone"
        run.note(f"{what}: once more")
        installed, started, lost, first = ended == SAVED, False, ended == GONE, False
        time.sleep(POLL)  # a notice comes before the machines go


def _was_started(settings: Settings, run: Runner) -> bool:
    """Whether these machines have been given the run before, by an `up` that was interrupted."""
    folder = shlex.quote(place(settings).folder)
    question = f"ls {folder}/train.pid || echo never"
    _, answer, errors = run.read(on_machines(settings, question, all_of_them=False))
    if not answer:  # an install would take the program away from a run that is going
        raise CommandError(f"the first machine of {settings.name} does not answer: {errors}")
    return answer != "never"


VERBS = {verb.__name__: verb for verb in (up, create, wait, install, start, watch, logs, stop, delete)}

if __name__ == "__main__":
    sys.exit(main(VERBS, __doc__))
