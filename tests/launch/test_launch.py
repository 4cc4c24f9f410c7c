"""The launchers for pods: what they would run, what they refuse, and what they do when machines come and go."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import EXAMPLE, HOSTILE, dry, flag, settings
from timing import wait_until

from launch import gke, tpu_vm
from launch.settings import Runner, Settings, TpuVm, main
from swa_jax.base.settings import from_dict, load_config
from swa_jax.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
# ---- errors ----


def test_only_what_is_expected_is_a_sentence(capsys):
    def absent(*_):
        Path("absent.yaml").read_text()

    def broken(*_):
        list(zip([1], [1, 2], strict=True))

    assert main({"up": absent}, "", ["up", str(EXAMPLE)]) == 2
    assert capsys.readouterr().err == "absent.yaml does not exist: name one that does\n"
    with pytest.raises(ValueError, match="argument 2 is longer"):
        main({"up": broken}, "", ["up", str(EXAMPLE)])


# ---- settings ----


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["nam=x"], "unknown key 'nam'; did you mean 'name'?"),
        (["name=Big Run"], "'name' is 'Big Run': it must be 1 to 40 small letters"),
        (["topology=v5q:4x4x4"], "'topology' is 'v5q:4x4x4': unknown TPU 'v5q'; did you mean 'v5p'?"),
        (["topology=v5p:4x4"], "'topology' is 'v5p:4x4': it must be as in v5p:4x4x4"),
        (["topology=v6e"], "'topology' is 'v6e': it must be as in v6e:4x4"),
        (["topology=v5e:3x3"], "'topology' is 'v5e:3x3': 9 chips are no whole machines of 4"),
        (["slices=0"], "'slices' must be at least 1, got 0"),
        (["overrides=[seed=1]"], "'overrides' has no output: 32 machines need one folder that all of them mount"),
        (["overrides=[output=runs/x]"], "'overrides' has output=runs/x: 32 machines need one folder"),
        (["overrides=[seed]"], "'overrides' has 'seed', which has not the form a.b=value"),
        (["slices=2", "overrides=[output=/s, mesh.slices=4]"], "'overrides' has mesh.slices=4, but 'slices' is 2"),
        (["tpu_vm=null"], "missing key 'tpu_vm': project, zone and repository"),
        (["tpu_vm={zone: a, repository: b}"], "missing key 'tpu_vm.project'"),
        (["tpu_vm.reserved=true"], "'tpu_vm.spot' and 'tpu_vm.reserved' are both set"),
        (["tpu_vm.secrets={WANDB-KEY: a}"], "'tpu_vm.secrets' has 'WANDB-KEY', which is no name of an environment"),
        (["config=configs/no.yaml"], "'config' is 'configs/no.yaml', and there is no such file here: run this in"),
        (
            ["overrides=[output=/s, stages.0.stps=5]"],
            "configs/bosch/qwen3-8b.yaml with 'overrides': unknown key 'stages.0.stps'; did you mean 'steps'?",
        ),
        (["topology=tpu7x:4x4x4"], "'topology' is 'tpu7x:4x4x4', which Google offers through GKE only"),
    ],
)
def test_what_is_missing_or_wrong_is_one_sentence(capsys, changes, sentence):
    assert main(tpu_vm.VERBS, "", ["up", str(EXAMPLE), *changes, "--dry-run"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(sentence)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("topology", "machines", "chips", "name"),
    [
        ("v5p:2x2x1", 1, 4, "v5p-8"),
        ("v5p:4x4x8", 32, 4, "v5p-256"),
        ("v4:4x4x4", 16, 4, "v4-128"),
        ("v5e:2x4", 1, 8, "v5litepod-8"),
        ("v5e:16x16", 64, 4, "v5litepod-256"),
        ("v6e:16x16", 64, 4, "v6e-256"),
        ("tpu7x:4x4x4", 16, 4, "tpu7x-4x4x4"),
    ],
)
def test_machines_of_a_slice(topology, machines, chips, name):
    slice = settings(f"topology={topology}")
    assert (slice.machines, slice.chips_per_machine, slice.accelerator_type) == (machines, chips, name)


def test_the_run_that_the_example_starts_can_be_read(monkeypatch):
    monkeypatch.chdir(ROOT)
    verb, file, *overrides, timeout = settings("slices=2").arguments
    assert timeout == "--timeout=300"
    config = load_config(TrainConfig, file, overrides)
    assert (verb, config.output, config.mesh.slices) == ("train", "/shared/runs/bosch-8b", 2)
    assert config.stages[0].data[0].files == ("/shared/data/prolong",)


def test_it_says_where_the_machines_read_the_configuration(capsys, monkeypatch):
    """It cannot look there, nor at what only they have."""
    monkeypatch.chdir(ROOT)
    assert main(tpu_vm.VERBS, "", ["up", str(EXAMPLE), "--dry-run"]) == 0
    said = "the machines read configs/bosch/qwen3-8b.yaml from my-repository.git, revision main: push it there first\n"
    assert capsys.readouterr().err == said
    assert main(gke.VERBS, "", ["render", str(EXAMPLE)]) == 0
    assert capsys.readouterr().err.endswith("from the image my-image:1: build and push it again after a change\n")
    assert main(gke.VERBS, "", ["render", str(EXAMPLE), "config=/shared/a.yaml"]) == 0
    assert capsys.readouterr().err == "/shared/a.yaml was not checked: it is not on this machine\n"
    monkeypatch.setitem(sys.modules, "swa_jax.train.config", None)  # a laptop without JAX
    assert main(gke.VERBS, "", ["apply", str(EXAMPLE), "--dry-run"]) == 0
    assert "configs/bosch/qwen3-8b.yaml was not checked: swa_jax.train.config is not" in capsys.readouterr().err


def test_without_its_packages_a_launcher_says_so_in_a_sentence():
    code = "import importlib.util as u, runpy; real = u.find_spec\n"
    code += "u.find_spec = lambda name, *more: None if name == 'typer' else real(name, *more)\n"
    code += "runpy.run_module('launch.gke', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "the launchers need typer: pip install rich typer PyYAML\n")


# ---- TPU VMs ----


def test_one_slice_is_asked_for(capsys):
    (command,) = dry(capsys, tpu_vm.VERBS, "create")
    assert command[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "bosch-8b"]
    assert set(command[6:]) == {
        "--project=my-project",
        "--zone=us-east5-a",
        "--type=v5p",
        "--topology=4x4x8",
        "--runtime-version=v2-alpha-tpuv5",
        "--node-id=bosch-8b",
        "--spot",
    }
    changes = ["tpu_vm.network=net", "tpu_vm.subnetwork=sub", "tpu_vm.service_account=me@p.iam.gserviceaccount.com"]
    (command,) = dry(capsys, tpu_vm.VERBS, "create", *changes)
    assert {"--network=net", "--subnetwork=sub", "--service-account=me@p.iam.gserviceaccount.com"} < set(command)
    assert flag(command, "scopes") == "https://www.googleapis.com/auth/cloud-platform"


def test_secrets_are_read_on_the_machine(tmp_path, capsys):
    """The command for ssh, run here with a gcloud that knows one secret."""
    known = "secrets versions access latest --secret=wandb-key --project=my-project"
    programs = {
        "gcloud": f'[ "$*" = "{known}" ] && echo s3cret',
        "swa-jax/.venv/bin/swa-jax": 'echo "key $WANDB_API_KEY"',
    }
    for name, script in programs.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def started(secret: str) -> int:
        changes = ["tpu_vm.prepare=''", f"tpu_vm.secrets={{WANDB_API_KEY: {secret}}}"]
        (command,) = dry(capsys, tpu_vm.VERBS, "start", *changes)
        assert "s3cret" not in " ".join(command)
        run = ["bash", "-c", flag(command, "command")]
        return subprocess.run(run, cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}).returncode

    log = tmp_path / "swa-jax" / "train.log"
    log.write_text("why the last start ended\n")
    assert started("wandb-key") == 0
    wait_until(lambda: log.read_text().count("\n") == 2)
    assert log.read_text() == "why the last start ended\nkey s3cret\n"
    assert started("another") != 0, "a run without its key would fail later"


def test_several_slices_are_asked_for(capsys):
    (command,) = dry(capsys, tpu_vm.VERBS, "create", "slices=4", "topology=v6e:16x16", "tpu_vm.spot=false")
    assert set(command[6:]) == {
        "--project=my-project",
        "--zone=us-east5-a",
        "--accelerator-type=v6e-256",
        "--runtime-version=v2-alpha-tpuv6e",
        "--node-count=4",
        "--node-prefix=bosch-8b",
    }
    (command,) = dry(capsys, tpu_vm.VERBS, "start", "slices=4")
    assert (flag(command, "node"), flag(command, "worker")) == ("all", "all")
    assert "mesh.slices=4" in flag(command, "command")


def test_the_whole_of_up_is_printed_and_nothing_is_run(capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    commands = dry(capsys, tpu_vm.VERBS, "up")
    verbs = [command[4] for command in commands]
    assert verbs == ["describe", "create", "describe", "ssh", "ssh", "describe", "ssh"]


def test_what_is_started_on_a_machine_says_its_status_and_gets_its_arguments(tmp_path, capsys):
    """The command for ssh, run here in place of a TPU VM."""
    folder = tmp_path / "swa-jax"
    (folder / ".venv" / "bin").mkdir(parents=True)
    program = folder / ".venv" / "bin" / "swa-jax"
    program.write_text(
        f"#!{sys.executable}\nimport json, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print(json.dumps(sys.argv[1:]), flush=True)\ntime.sleep(60)\n"
    )
    program.chmod(0o755)
    (folder / "train.status").write_text("2\n")  # of an earlier start
    changes = [f"overrides={json.dumps([HOSTILE])}", "tpu_vm.prepare=touch ../prepared && true"]
    start, stop = (dry(capsys, tpu_vm.VERBS, verb, *changes)[0] for verb in ("start", "stop"))
    question = dry(capsys, tpu_vm.VERBS, "watch", *changes)[-1]

    def shell(command: list[str]) -> subprocess.CompletedProcess[str]:
        script = ["bash", "-c", flag(command, "command")]
        return subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=30)

    assert shell(question).stdout == "2\n"
    assert subprocess.run(["bash", "-n", "-c", flag(start, "command")]).returncode == 0
    assert shell(start).returncode == 0
    log, status = folder / "train.log", folder / "train.status"
    wait_until(lambda: log.exists() and log.read_text())
    assert json.loads(log.read_text()) == ["train", "configs/bosch/qwen3-8b.yaml", HOSTILE, "--timeout=300"]
    assert (tmp_path / "prepared").exists()
    assert shell(question).stdout == "running\n"
    twice = shell(start)
    assert (twice.returncode, twice.stderr) == (1, "a run is going here: stop it first\n")
    assert shell(stop).returncode == 0
    wait_until(status.exists)
    assert shell(question).stdout == "143\n"
    status.unlink()  # the machine went down before it could say
    assert shell(question).stdout == "lost\n"

    # A process that is frozen does not keep a lost run from being started again.
    settings = load_config(Settings, EXAMPLE, changes)
    tpu_vm.begin(settings, Runner(dry_run=True), lost=True)
    again = shlex.split(capsys.readouterr().out)
    assert shell(start).returncode == 0
    frozen = int((folder / "train.pid").read_text())
    os.kill(frozen, signal.SIGSTOP)
    assert shell(start).returncode == 1
    assert shell(again).returncode == 0
    assert int((folder / "train.pid").read_text()) != frozen
    assert not Path(f"/proc/{frozen}").exists()
    assert shell(question).stdout == "running\n"
    assert shell(stop).returncode == 0
    wait_until(status.exists)


def test_the_install_command_is_a_shell_command(capsys):
    (command,) = dry(capsys, tpu_vm.VERBS, "install", "tpu_vm.repository=it's/a repo.git")
    assert subprocess.run(["bash", "-n", "-c", flag(command, "command")]).returncode == 0
    assert "'it'\"'\"'s/a repo.git'" in flag(command, "command")


GCLOUD = """#!/bin/bash
cd {folder}
next_of() {{ sed -n 1p "$1"; sed -i 1d "$1"; }}
echo "$*" >> calls
case "$4 $*" in
    describe*)
        state=$(next_of states)
        case $state in NOT_FOUND | offline) echo "ERROR: (gcloud) $state" >&2; exit 1 ;; esac
        echo $state ;;
    *"cat train.status "*)
        answer=$(next_of answers)
        test "$answer" != "no answer" || exit 255
        echo $answer ;;
    *"/train.pid ||"*) cat started 2> /dev/null || echo never ;;
    ssh*"$(cat broken 2> /dev/null || echo whole)"*) test ! -e once || rm once broken; exit 1 ;;
esac
"""


def test_logs_are_those_of_the_first_machine(capsys):
    (command,) = dry(capsys, tpu_vm.VERBS, "logs", "slices=2")
    assert {"--node=0", "--worker=0"} <= set(command)


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A `gcloud` that answers from two lists; gives `play(states, answers)`: status of `up` and the verbs it ran."""
    program = tmp_path / "gcloud"
    program.write_text(GCLOUD.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(tpu_vm, "POLL", 0)

    def play(states, answers):
        (tmp_path / "states").write_text("\n".join(states))
        (tmp_path / "answers").write_text("\n".join(answers))
        (tmp_path / "calls").write_text("")
        status = main(tpu_vm.VERBS, "", ["up", str(EXAMPLE)])
        assert (tmp_path / "states").read_text() == "", "not all states were asked for"
        return status, [_kind(call) for call in (tmp_path / "calls").read_text().splitlines()]

    return play


def _kind(call: str) -> str:
    for part, name in (("git clone", "install"), ("setsid", "start"), ("cat train.status ", "ask"), ("tail", "logs")):
        if part in call:
            return name
    return call.split()[3]


def _steps(kinds: list[str]) -> list[str]:
    return [kind for kind in kinds if kind not in ("describe", "ask")]


THERE = ["NOT_FOUND", "ACTIVE", "ACTIVE"]  # machines that are asked for, come, and are still there
FIRST = ["create", "install", "start"]
UPS = {  # states of the machines, answers of the run; the status of `up`, its steps, and what it says
    "the run starts": (
        ["NOT_FOUND", "WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "ACTIVE"],
        ["running", "0"],
        (0, FIRST, "the run has finished"),
    ),
    "a saved run starts again on the same machines": (
        [*THERE, "ACTIVE", "ACTIVE"],
        ["143", "0"],
        (0, [*FIRST, "start"], "the run was told to stop and has saved: once more"),
    ),
    "new machines after a preemption": (
        [*THERE, "SUSPENDED", "SUSPENDED", "PROVISIONING", "ACTIVE", "ACTIVE"],
        ["running", "running", "0"],
        (0, [*FIRST, "delete", *FIRST], "the run or its machines are gone: once more"),
    ),
    "machines that are taken away before all have come": (
        ["NOT_FOUND", "PROVISIONING", *["SUSPENDED"] * 3, "ACTIVE", "ACTIVE"],
        ["0"],
        (0, ["create", "delete", *FIRST], ""),
    ),
    "a run that is gone from machines that were started anew": (
        [*THERE, "ACTIVE", "ACTIVE"],
        ["lost", "0"],
        (0, [*FIRST, "install", "start"], ""),
    ),
    "a run that lost a process": ([*THERE, "ACTIVE", "ACTIVE"], ["75", "0"], (0, [*FIRST, "install", "start"], "")),
    "a failure keeps the machines": (
        [*THERE, "ACTIVE"],
        ["1"],
        (1, [*FIRST, "logs"], "the run failed with status 1; the machines are kept"),
    ),
    "a failure because a machine was taken away": (
        [*THERE, "SUSPENDING", "SUSPENDED", "ACTIVE", "ACTIVE"],
        ["2", "0"],
        (0, [*FIRST, "delete", *FIRST], ""),
    ),
}


@pytest.mark.parametrize(("states", "answers", "expected"), UPS.values(), ids=UPS)
def test_up(cloud, capfd, states, answers, expected):
    status, kinds = cloud(states, answers)
    assert (status, _steps(kinds)) == expected[:2]
    assert expected[2] in capfd.readouterr().out


def test_up_takes_up_the_watch_of_a_run_that_it_had_started(cloud, tmp_path, capfd):
    (tmp_path / "started").write_text("swa-jax/train.pid")
    status, kinds = cloud(["ACTIVE", "ACTIVE", "ACTIVE"], ["running", "0"])
    assert status == 0
    assert _steps(kinds) == ["ssh"]
    (tmp_path / "started").write_text("")  # gcloud has not reached the machine, which it only says in a warning
    status, kinds = cloud(["ACTIVE"], [])
    assert status == 2
    assert _steps(kinds) == ["ssh"]
    assert "the first machine of bosch-8b does not answer" in capfd.readouterr().err


def test_up_bears_a_network_that_is_away_for_a_while(cloud, capfd):
    states = ["NOT_FOUND", "ACTIVE", *["offline"] * 15, "ACTIVE"]
    status, _ = cloud(states, ["0"])
    assert status == 0
    away = ["offline"] * (tpu_vm.SILENT - 1)  # while it waits for machines, after it has ended, and before a new start
    states = ["NOT_FOUND", *away, "PROVISIONING", *away, "ACTIVE", "ACTIVE", *away, "SUSPENDED", *away, "SUSPENDED"]
    status, _ = cloud([*states, "ACTIVE", "ACTIVE"], ["2", "0"])
    assert status == 0
    for silence in ("no answer", ""):  # gcloud's status is 0 where it cannot prepare a machine
        states = ["NOT_FOUND", "ACTIVE", *["ACTIVE"] * tpu_vm.SILENT, "ACTIVE"]
        status, _ = cloud(states, [silence] * tpu_vm.SILENT)
        assert status == 2
        assert f"has not answered {tpu_vm.SILENT} times" in capfd.readouterr().err


def test_up_gives_up_where_no_machines_will_come(cloud, capfd):
    status, _ = cloud(["NOT_FOUND", "FAILED", "FAILED"], [])
    assert status == 2
    assert "bosch-8b is FAILED: no machines will come" in capfd.readouterr().err
    status, _ = cloud(["offline"], [])
    assert status == 2
    assert "gcloud does not say how bosch-8b is: ERROR: (gcloud) offline" in capfd.readouterr().err


@pytest.mark.parametrize(("step", "sign"), [("install", "git clone"), ("start", "setsid")])
def test_a_failed_step_is_tried_again_and_is_no_preemption(cloud, tmp_path, capfd, step, sign):
    before = FIRST[: FIRST.index(step)]
    (tmp_path / "broken").write_text(sign)
    status, kinds = cloud(["NOT_FOUND", *["ACTIVE"] * 4], [])
    assert status == 2
    assert _steps(kinds) == [*before, step, step, step]
    assert "failed with status 1" in capfd.readouterr().err
    (tmp_path / "once").touch()
    status, kinds = cloud(["NOT_FOUND", "ACTIVE", "ACTIVE", "ACTIVE"], ["0"])
    assert status == 0
    assert _steps(kinds) == [*before, step, *FIRST[FIRST.index(step) :]]
    assert f"the {step} failed on a machine: once more" in capfd.readouterr().out
    ends = ["kill -KILL" in call for call in (tmp_path / "calls").read_text().splitlines() if "setsid" in call]
    assert ends == [False, True][: 1 + (step == "start")], "what the first try has started is ended"


def test_ssh_gives_up_a_machine_that_is_gone(capsys):
    (command,) = dry(capsys, tpu_vm.VERBS, "logs")
    assert flag(command, "ssh-flag") == "-oServerAliveInterval=30 -oConnectTimeout=20"


def test_a_program_that_is_not_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(tpu_vm.VERBS, "", ["create", str(EXAMPLE)]) == 2
    assert capsys.readouterr().err == "gcloud is not installed, or not on PATH\n"


def test_the_manual_mounts_a_bucket(tmp_path):
    """Its settings are settings; its command installs what mounts a bucket where it is not there, and mounts once."""
    blocks = re.findall(r"```yaml\n(tpu_vm:.*?)```", (ROOT / "docs" / "pods.md").read_text(), re.DOTALL)
    for block in blocks:
        from_dict(TpuVm, {"project": "p", "zone": "z", "repository": "r", **yaml.safe_load(block)["tpu_vm"]})
    prepare = yaml.safe_load(blocks[0])["tpu_vm"]["prepare"]
    said = tmp_path / "said"
    stub = f'#!/bin/sh\necho "$(basename $0) $*" >> {said}\n'
    for name in ("curl", "sudo", "lsb_release"):
        (tmp_path / name).write_text(stub + ("cat > /dev/null; exit 0" if name == "sudo" else ""))
    (tmp_path / "mountpoint").write_text("#!/bin/sh\ntest -e mounted")

    def run() -> list[str]:
        for file in tmp_path.iterdir():
            file.chmod(0o755)
        said.write_text("")
        command = ["bash", "-c", f"({prepare}) && true"]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "USER": "me"}
        subprocess.run(command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, check=False)
        return said.read_text().splitlines()

    assert "sudo apt-get -o DPkg::Lock::Timeout=300 install -y gcsfuse" in run()  # Ubuntu updates itself after boot
    (tmp_path / "gcsfuse").write_text(stub)
    assert run() == ["sudo mkdir -p /shared", "sudo chown me /shared", "gcsfuse --implicit-dirs my-bucket /shared"]
    (tmp_path / "mounted").touch()
    assert run() == ["sudo mkdir -p /shared"]
