"""Bad input on the command line: one sentence that names what is wrong, status 2, and nothing written or lost."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml
from command_line import fails, run
from flax import nnx
from tiny_models import BYTES, make

import swa_jax.train.loop
import swa_jax.train.records
from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config, to_dict
from swa_jax.checkpoint.folder import save_model
from swa_jax.cli.options import check_window
from swa_jax.data.tokenizer import Tokenizer, check_same_tokens, load_tokenizer, train_byte_bpe
from swa_jax.model.decoder import Decoder
from swa_jax.model.sharding import AXES, mesh_shape
from swa_jax.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
MODEL = dataclasses.replace(BYTES, vocab_size=260, num_hidden_layers=1)
TEXT = "the quick brown fox jumps over a lazy dog. " * 40


@pytest.fixture
def file(tmp_path, byte_tokenizer):
    """A configuration that could be trained, in a folder with its text."""
    (tmp_path / "text.txt").write_text(TEXT)
    data = [{"files": [str(tmp_path / "text.txt")]}]
    config = {
        "output": str(tmp_path / "run"),
        "tokenizer": str(byte_tokenizer),
        "model": to_dict(MODEL),
        "stages": [{"steps": 2, "sequence_length": 16, "batch_size": 6, "data": data}],
    }
    return _write(tmp_path / "config.yaml", config)


def _write(file: Path, config: dict) -> Path:
    file.write_text(yaml.safe_dump(config))
    return file


# ---- the command line: drawn from the wrong calls that were tried ----


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("traim x", "'traim' is not a command of `swa-jax`; did you mean 'train'?"),
        ("--frobnicate", "--frobnicate is not an option of `swa-jax`; known: --compile-anew, "),
        ("pattern full --layerz 4", "--layerz is not an option of `swa-jax pattern`; did you mean '--layers'?"),
        ("pattern full --layers", "--layers needs a value"),
        ("pattern full --layers four", "--layers must be a whole number, got 'four'"),
        ("pattern full --layers " + "5" * 5000, f"--layers must be a whole number of fewer digits, got {'5' * 100}\n"),
        ("pattern full --layers " + "x" * 5000, f"--layers must be a whole number, got '{'x' * 100}'\n"),
        (f"pattern {'z' * 5000} --layers 2", f"'{'z' * 100}' is neither a recipe nor a .json file"),
        ("pattern full --layers 0", "--layers must be at least 1, got 0"),
        ("pattern full --layers 999999999", "--layers must be at most 10000, got 999999999"),
        ("pattern full --model recal", "recal is no model; did you mean 'recall'?"),
        (
            "pattern interleav-1-in-4 --layers 8",
            "'interleav-1-in-4' is neither a recipe nor a .json file; did you mean",
        ),
        ("pattern full", "give one of --layers N and --model DIR: a recipe needs to know how deep the model is"),
        ("pattern absent.json", "pattern file absent.json does not exist"),
        ("pattern layers:9 --layers 8", "full layer 9 does not exist: the model has layers 0 to 7"),
        ("pattern README.md --layers 4", "'README.md' is neither a recipe nor a .json file; known: "),
        ("pattern bad.json", "bad.json has no 'layer_types': it is not an attention pattern"),
        ("pattern diff a b c --layers 3", "`swa-jax pattern diff` takes no further argument, got 'c'"),
        ("adapt m", "`swa-jax adapt` needs OUT: A new folder, or that of an interrupted run to go on with."),
        ("adapt m out --force=1", "--force takes no value"),
        ("adapt m out --effort max", "--effort must be quick, normal or full, got 'max'"),
        ("adapt m out --window 4000", "a window of 4000 holds whole examples of 2048 tokens, "),
        ("adapt m bad.json/out", "OUT bad.json/out cannot be written: "),
        ("evaluate efficiency m --full-ratio 2", "--full-ratio must be at most 1, got 2"),
        ("evaluate needles m --depths 5", "--depths is '5': give fractions from 0 to 1 with commas between, such as"),
        ("evaluate needles m --examples 99999999999", "--examples must be at most 100000, got 99999999999"),
        ("compare m --out a --seeds 99999999999", "--seeds must be at most 1000, got 99999999999"),
        ("train empty.yaml", "empty.yaml is empty: it must have keys with values, as the files of configs/ have"),
        ("evaluate needles m --out bad.json", "--out bad.json/results.json cannot be written: bad.json is a file"),
        ("compile run.yaml", "`swa-jax compile` needs --topology: A TPU slice, such as "),
        ("train a.yaml --devices 3", "--devices is for --dry-run: give both, or neither"),
        ("import m .", "{here} is there already: name a new folder, or remove that one first"),
        ("data inspect absent", "absent does not exist: name a training configuration, or a folder of tokens"),
    ],
)
def test_a_wrong_call(call, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"a": 1}')
    (tmp_path / "empty.yaml").touch()
    assert f"{fails(*call.split())}\n".startswith(sentence.format(here=tmp_path))


def test_an_interruption_before_a_verb_has_begun_is_no_traceback():
    """While modules come in, and after that."""
    code = """if True:
        import sys, builtins, swa_jax.cli.__main__
        def interrupted(name, *rest, load=builtins.__import__, **named):
            if name == "typer":
                raise KeyboardInterrupt
            return load(name, *rest, **named)
        builtins.__import__ = interrupted
        swa_jax.cli.__main__.main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_prompts_of_another_order_of_length_are_refused_at_once(checkpoint):
    for kind in (("needles",), ("chains",), ("efficiency",)):
        option = "--length" if kind == ("needles",) else "--lengths"
        assert "times as long as the model's context of 2048: at most 262144 are run" in fails(
            "evaluate", *kind, checkpoint, option, 9999999
        )
    with pytest.raises(ConfigError, match="--window 64 holds whole prompts of 64 tokens"):
        check_window(64, 64)
    check_window(63, 64)


# ---- the configuration ----


def test_a_dry_run_looks_at_everything_and_writes_nothing(file, tmp_path):
    said = run("train", file, "--dry-run", "mesh.fsdp=2", "mesh.tensor=1")
    assert "begins, 2 steps" in said
    assert "mesh: data 1, fsdp 2, expert 1, context 1, tensor 1" in said
    assert "nothing was trained" in said
    sentence = "batch_size / accumulate = 6 cannot be split in 4 (data 1 x fsdp 4)"
    assert sentence in fails("train", file, "--dry-run", "--devices", 4, "mesh.fsdp=-1")
    assert f"to be chosen on TPUs; as it stands, 'stages.0': {sentence}" in run(
        "train", file, "--dry-run", "--devices", 4
    )
    assert fails("train", file, "--dry-run", "stages.0.data.0.files=[absent]").startswith("data files 'absent'")
    again = _write(tmp_path / "again.yaml", yaml.safe_load(run("train", file, "--print-config", "seed=7")))
    assert load_config(TrainConfig, again) == load_config(TrainConfig, file, ["seed=7"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["optimiser.name=muon"], "unknown key 'optimiser'; did you mean 'optimizer'?"),
        (["optimizer.clip_norm=0"], "'optimizer.clip_norm' must be above 0, or null for no clipping, got 0"),
        (["optimizer.learning_rate=-1"], "'optimizer.learning_rate' must be above 0, got -1"),
        (["optimizer.warmup_steps=-5"], "'optimizer.warmup_steps' must be 0 or more, got -5"),
        (["optimizer.b2=1"], "'optimizer.b2' must be from 0 to below 1, got 1"),
        (["stages.0.sliding_window=0"], "'stages.0.sliding_window' must be at least 1, or left out, got 0"),
        (["model.num_key_value_heads=0"], "num_key_value_heads must be above 0, got 0"),
        (["model.num_key_value_heads=3"], "num_attention_heads (2) must be a multiple of num_key_value_heads (3)"),
        (["pattern=interleave-1-in-0"], "recipe 'interleave-1-in-0': "),
        (["pattern=absent.json"], "pattern file absent.json does not exist"),
        (["tokenizer=''"], "missing key 'tokenizer' (a tokenizer.json, or a folder that has one) in "),
        (["tokenizer=absent"], "absent is no model: give a checkpoint folder"),
        (["model=null", "init_from=absent"], "absent is no model: give a checkpoint folder"),
        (["stages.0.accumulate=4"], "'stages.0.batch_size' = 6 must be a multiple of 'accumulate' = 4"),
    ],
)
def test_a_wrong_setting(file, tmp_path, overrides, sentence):
    assert fails("train", file, *overrides).startswith(sentence)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["mesh.fsdp=4"],
            "'stages.0': batch_size / accumulate = 6 cannot be split in 4 (data 1 x fsdp 4): make it a "
            "multiple of 4, or change 'mesh'",
        ),
        (
            ["mesh.context=4", "mesh.fsdp=1", "stages.0.sequence_length=18"],
            "'stages.0': sequence_length = 18 cannot be split in 4 (context 4): make it a multiple of 4, or change",
        ),
        (["mesh.fsdp=3"], "'mesh' (slices 1, data 1, fsdp 3, context 1, tensor 1) asks for 3 devices, but there are 4"),
        (["mesh.tensor=4", "mesh.fsdp=1"], "num_attention_heads is 2, which 'mesh.tensor' = 4 does not divide"),
    ],
)
def test_a_mesh_that_does_not_divide(file, tmp_path, monkeypatch, overrides, sentence):
    """On four devices that are only thought of: nothing is computed before it is refused."""

    def four(config):
        return jax.sharding.AbstractMesh(mesh_shape(config, 4), AXES)

    monkeypatch.setattr(swa_jax.train.loop, "make_mesh", four)
    monkeypatch.setattr(swa_jax.plan.choose, "settled", lambda config, say: config)  # for the device that is here
    assert fails("train", file, *overrides).startswith(sentence)
    assert not (tmp_path / "run").exists()


def claimed(folder, file, *overrides):
    config = load_config(TrainConfig, file, overrides)
    return swa_jax.train.records.claimed(folder, config, swa_jax.train.records.records_of(config, []))


def test_two_runs_in_one_folder(file, tmp_path):
    """The second would drop lines of the first one's log, and write over its checkpoints."""
    with claimed(tmp_path / "run", file):
        before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        sentence = fails("train", file, "log.every=2")
        assert sentence == f"another process is training in {tmp_path / 'run'}: wait for it, or name another folder"
        assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    with claimed(tmp_path / "run", file):
        pass


def test_a_run_that_goes_on_may_change_its_mesh_and_nothing_that_it_learns(file, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def claim(*overrides, folder=run):
        with claimed(folder, file, *overrides):
            pass

    claim()
    monkeypatch.setattr(swa_jax.train.records, "has_checkpoint", lambda folder: True)
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    claim(f"output={moved}", folder=moved)
    before = (run / "config.yaml").read_text()
    for name, change in (
        ("seed", "seed=1"),
        ("optimizer", "optimizer.learning_rate=0.5"),
        ("z_loss", "z_loss=0.5"),
        ("stages", "stages.0.steps=77"),
    ):
        sentence = f"{run} holds a run whose '{name}' differs: set 'output' to a new folder"
        with pytest.raises(ConfigError, match=sentence):
            claim(change, "mesh.fsdp=2")
    assert (run / "config.yaml").read_text() == before
    harmless = ["mesh.fsdp=2", "log.every=5", "checkpoint_every=7", "keep_checkpoints=3", "keep_checkpoint_period=14"]
    harmless += ["validate_every=7", "validation_batches=2"]
    claim(*harmless)
    assert load_config(TrainConfig, run / "config.yaml") == load_config(TrainConfig, file, harmless)


def test_a_run_replaces_nothing_that_is_not_of_a_run(file, tmp_path):
    own = tmp_path / "run" / "config.yaml"
    own.parent.mkdir()
    own.write_text(f"# mine\n{file.read_text()}")
    before = own.read_text()
    assert fails("train", own).startswith(f"the run would write all its settings to {own}, which holds something else")
    assert own.read_text() == before
    own.unlink()
    for _ in range(2):  # a run that ended before its first checkpoint
        with claimed(own.parent, file):
            pass
    (own.parent / "manifest.json").write_text("{}")
    assert fails("train", file).startswith(f"{own.parent} holds a model ({own.parent}/manifest.json): set 'output' to")


# ---- data ----


def test_missing_data(file, tmp_path):
    for kind, what in (
        ("text", "no such file, and no folder or glob with text in it"),
        ("prompts", "no such file, and no folder or glob"),
        ("tokens", "no such folder, which is what kind 'tokens' reads"),
    ):
        data = f"stages.0.data=[{{kind: {kind}, files: [{tmp_path}/absent]}}]"
        for verb in (["train"], ["data", "inspect"]):
            assert fails(*verb, file, data).startswith(f"data files '{tmp_path}/absent': {what}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["shard.txt", "shard.jsonl", "shard.parquet", "shard.array_record"])
def test_an_empty_shard_among_others(file, tmp_path, name):
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "good.jsonl").write_text('{"text": "' + TEXT + '"}\n')
    (folder / name).touch()
    listed = [str(folder / "good.jsonl"), str(folder / name)] if name == "shard.txt" else [str(folder)]
    sentence = fails("train", file, f"stages.0.data=[{{files: {listed}}}]")
    assert sentence == f"data file {folder / name} is empty: make it again, or leave it out"
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "array_record"])
@pytest.mark.parametrize("kind", ["text", "prompts"])
def test_a_shard_without_records(file, tmp_path, suffix, kind):
    shard = tmp_path / f"shard.{suffix}"
    if suffix == "jsonl":
        shard.write_text("\n\n")
    elif suffix == "parquet":
        pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
        fields = {name: pyarrow.array([], pyarrow.string()) for name in ("text", "prompt", "answer")}
        parquet.write_table(pyarrow.table(fields), shard)
    else:
        from array_record.python.array_record_module import ArrayRecordWriter

        ArrayRecordWriter(str(shard), "group_size:1").close()
    good = tmp_path / "good.jsonl"
    good.write_text(f'{{"text": "{TEXT}", "prompt": "a", "answer": "b"}}\n')
    sentence = fails("train", file, f"stages.0.data=[{{kind: {kind}, files: [{good}, {shard}]}}]")
    reason = f"{shard} is empty: it has no records; make it again, or leave it out"
    assert sentence == f"'stages.0.data': {reason}"


def test_shards_of_tokens_that_are_empty_missing_or_cut(file, tmp_path, byte_tokenizer):
    run("data", "tokenize", tmp_path / "text.txt", "--tokenizer", byte_tokenizer, "--out", tmp_path / "tokens")
    shard = tmp_path / "tokens" / "00000.tokens"
    data, source = shard.read_bytes(), f"stages.0.data=[{{kind: tokens, files: [{tmp_path / 'tokens'}]}}]"
    for damaged, how in ((b"", "is empty"), (data[:-2], f"is {len(data) - 2} bytes long"), (None, "is missing")):
        shard.unlink()
        if damaged is not None:
            shard.write_bytes(damaged)
        assert fails("train", file, source).startswith(f"{shard} {how}")
        shard.write_bytes(data)
    assert not (tmp_path / "run").exists()


# ---- the tokenizer ----


@pytest.fixture
def checkpoint(tmp_path, byte_tokenizer):
    model = Decoder(MODEL, make("w", sliding_window=8), rngs=nnx.Rngs(0))
    return save_model(model, tmp_path / "checkpoint", tokenizer_from=byte_tokenizer.parent)


def test_another_tokenizer_than_the_checkpoints(file, tmp_path, checkpoint):
    other = tmp_path / "other.json"
    train_byte_bpe([TEXT], 260).backend.save(str(other))
    start = ["model=null", f"init_from={checkpoint}"]
    assert f"tokenizer: {checkpoint}, 257 tokens" in run("train", file, "--dry-run", *start, "tokenizer=''")
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    sentence = fails("train", file, *start, f"tokenizer={other}")
    assert sentence == (
        f"tokenizer {other} (260 tokens) is not the one that {checkpoint} was trained with (257 tokens): set "
        f"'tokenizer' to {checkpoint}"
    )
    assert not (tmp_path / "run").exists()
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before
    # The same vocabulary under other merges gives other ids, too.
    spoiled = (checkpoint / "tokenizer.json").read_text().replace('"use_regex":false', '"use_regex":true')
    spoiled = spoiled.replace('"add_prefix_space": false', '"add_prefix_space": true')
    other.write_text(spoiled)
    assert "is not the one that" in fails("train", file, *start, f"tokenizer={other}")


def test_the_checkpoints_own_tokenizer_may_lie_anywhere_and_name_no_end(checkpoint, byte_tokenizer):
    for path in (checkpoint, checkpoint / "tokenizer.json", byte_tokenizer):
        check_same_tokens(load_tokenizer(path), path, checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    check_same_tokens(Tokenizer(tokenizer.backend, None), "a file", checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    check_same_tokens(train_byte_bpe([TEXT], 260), "a file", checkpoint)  # nothing to compare with


def test_a_tokenizer_that_cannot_be_read(file, tmp_path):
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    assert fails("train", file, f"tokenizer={broken}").startswith(f"{broken} cannot be read as a tokenizer: ")


# ---- the disk ----


@pytest.mark.slow
def test_a_disk_that_is_full_during_a_save(file, tmp_path):
    """A real file system of 6 MB, on which a second checkpoint has no room; then it grows, and the run goes on."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", str(small)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this kernel lets no one mount a small file system")
    size = ["stages.0.steps=6", "checkpoint_every=2", "keep_checkpoints=9", "model.vocab_size=12000"]
    train = [sys.executable, "-m", "swa_jax.cli", "train", str(file), f"output={small}/run", *size]
    script = f"""
        mount -t tmpfs -o size=6m none {small} || exit 9
        {shlex.join(train)} 2> {tmp_path}/error; echo status $?
        ls {small}/run/checkpoints
        mount -o remount,size=60m {small}
        {shlex.join(train)}; echo status $?
        cp {small}/run/metrics.jsonl {tmp_path}
    """
    command = ["unshare", "--mount", "--map-root-user", "bash", "-c", script]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=400)
    assert re.findall(r"status (\d+)", done.stdout) == ["2", "0"], done.stdout + done.stderr
    *told, error = (tmp_path / "error").read_text().splitlines()
    assert [line for line in told if line.startswith("step ")]
    assert re.search(
        "the checkpoint of step 4 could not be written: the disk is full .*; the previous one, of step 2, is "
        "untouched, and the run can go on from it",
        error,
    )
    assert "\n2\n" in done.stdout  # of the listing: the checkpoint of step 2 under its own name, and step 4 not
    assert "\n4\n" not in done.stdout
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 7))


# ---- outputs ----


def test_an_output_that_cannot_be_written_is_refused_before_the_work(file, tmp_path):
    taken, folder = tmp_path / "taken", tmp_path / "folder.json"
    taken.write_text("")
    folder.mkdir()
    for verb in (
        ("pattern", "full", "--layers", 2),
        ("select", "random", "absent", "--ratio", 0.5, "--window", 8),
        ("compile", file, "--topology", "v5e:2x2"),
        ("bench", "attention"),
        ("bench", "generation", "absent"),
    ):
        assert fails(*verb, "--out", folder) == f"--out is {folder}, a folder: name a file in it"
        assert "cannot be written: " in fails(*verb, "--out", taken / "x.json")
    assert sorted(path.name for path in tmp_path.iterdir() if path != file) == ["folder.json", "taken", "text.txt"]
    assert fails("train", file, f"output={taken}").startswith(f"{taken} is there already")
    assert fails("train", file, f"output={taken}/run").startswith(f"{taken}/run is a file, or in one")
