"""`swa-jax bench cycles`: what is read from libtpu's files, how it is added up, and what goes wrong in one sentence."""

import dataclasses
import importlib.util
import json
import subprocess
from pathlib import Path

import command_line
import pytest

from swa_jax.base.chips import TARGETS
from swa_jax.base.errors import ConfigError
from swa_jax.bench import cycles
from swa_jax.bench.bundles import BundleBlock, Code, read_code, sort_blocks, split_blocks
from swa_jax.bench.cycles import COUNTED, SIMULATED, Op, combine, count_cycles
from swa_jax.bench.tpu_kernels import FUNCTIONS, Executions
from swa_jax.report.bench_tables import cycles_table

LISTING = """\
= control target key start
LH: loop header
= control target key end

     0   :  { %s1 = inlined_call_operand.hbm [shape: bf16[1,128], index: 0, kind: input] }
   0x1   :  { %9 = sbr.rel (%p4) target = $region9 }
   0x2 LB: > { %s5 = sphi %s8, %s3 /* phi copy */ }
   0x3   : > { %20 = vst [vmem:[%s2] sm:$0xff] %v1 }
   0x4   : > { %21 = vmatmul.mubr.bf16.gmra.mxu0 %v5  ;;  %22 = vmatmul.mubr.bf16.gmra.mxu1 %v6 }
   0x5   : >> { %23 = vmatmul.mubr.bf16.gmra.mxu0 %v7  ;;  %24 = sbr.rel (%p7) target = $region8 }
   0x6   : > { %25 = vadd.f32 %v1, %v2 }
   0x7 PF: > { %26 = sld [smem:[#allocation4]] }
"""
USES = """\
== CAPACITY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
0 0 0 0 0 0 0 0 0 2
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 1 0 0
2 0 0 0 0 0 0 0 0 0
1 0 0 0 0 0 0 0 0 1
0 0 3 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 1
"""
BLOCKS = [BundleBlock(2, 0, False), BundleBlock(4, 3, True), BundleBlock(1, 0, True), BundleBlock(1, 0, False)]


def profile(folder: Path, **ops: int) -> None:
    for name, count in ops.items():
        text = f'hlo_op_estimate {{\n  hlo_op_name: "{name}"\n  estimated_cycles: {count}\n}}\n'
        (folder / f"{name}_TPU v6 lite_static_llo_profile.textproto").write_text(text)


def listing(folder: Path, op: str) -> None:
    (folder / f"123-{op}-02-final_bundles.txt").write_text(LISTING)
    (folder / f"123-{op}-01-schedule-analysis_final_bundles.txt").write_text("other")
    (folder / f"123-{op}-00-final_hlo-static-per-bundle-utilization.txt").write_text(USES)


# ---- reading ----


def test_code_is_sorted_by_what_decides_its_runs(tmp_path):
    """Blocks end at labels and branches."""
    assert split_blocks(LISTING, USES) == BLOCKS
    assert sort_blocks([*BLOCKS, BundleBlock(9, 1, True)]) == Code((4, 9), other_vector=1, scalar=3)
    listing(tmp_path, "scheduled_forward.1")
    listing(tmp_path, "<late-initialization>")
    (tmp_path / "123-TLP-hlo.txt").write_text("no listing")
    (tmp_path / "9-no uses-02-final_bundles.txt").write_text(LISTING)
    known, no_uses = Code((4,), 1, 3), Code((4,), 0, 4)
    assert read_code(tmp_path) == {"scheduled_forward.1": known, "<late-initialization>": known, "no uses": no_uses}


def test_cycles_are_bundles_times_runs():
    code = Code((100, 10), other_vector=7, scalar=1)
    assert count_cycles(code, Executions((3, 5), rows=2, heads=1), 8) == 300 + 50 + 14 + 8
    # The compiler made one body of two, or more bodies than are counted.
    assert count_cycles(Code((100,), 0, 0), Executions((3, 5), 0, 1), 9) == 800
    assert count_cycles(code, Executions((3,), 0, 1), 0) == 300
    # Bodies that do again what the one before them did are not counted, and the others go by length.
    assert count_cycles(Code((10, 12, 100, 140), 0, 0), Executions((3, 5), 0, 1, replays=True), 0) == 300 + 50


def test_each_op_takes_the_figure_that_can_be_right():
    code = Code((100,), 0, 1)
    ops = combine(
        simulated={"jvp_window_forward_.1": 50, "scheduled_forward.2": 9, "fusion": 3},
        code=dict.fromkeys(("scheduled_forward.2", "scheduled_backward_keys", "copy.1", "TLP", "<x>"), code),
        kernels={"window_forward": False, "scheduled_forward": True, "scheduled_backward_keys": True, "window": False},
        steps={"scheduled_forward": (5, 1)},
        counts={"scheduled_forward": Executions((4,), 0, 2), "window_forward": Executions((1,), 0, 1)},
    )
    assert ops == (
        Op("copy.1", None, "not simulated"),
        Op("scheduled_backward_keys", None, "the data decide its visits; bodies of 100 bundles"),
        Op("scheduled_forward.2", 400 + 5 * 2, COUNTED),
        Op("jvp_window_forward_.1", 50, SIMULATED),
        Op("fusion", 3, SIMULATED),
    )


# ---- measuring, with libtpu's part played ----


@pytest.fixture
def compiler(monkeypatch):
    """A function that plays the compiler: `play(abort, kernels, ...)` sets what the next compilations leave behind."""

    def play(*, abort=None, reads_scalars=False, failure=None, simulated=None):
        flags_seen = []

        def compile_(function, chip, settings, flags):
            assert chip in TARGETS
            flags_seen.append(flags)
            folder = Path(flags.split("=")[1].split(" ")[0])
            program = {
                "queries": [1, 2, 4096, 128],
                "kernels": {"window_forward": reads_scalars},
                "steps": {"window_forward": [2, 0]},
                "executions": {"window_forward": {"bodies": [10], "rows": 0, "heads": 1}},
            }
            if failure:
                return cycles._Compilation(None, None, failure)
            if "static_llo_profile" in flags:
                profile(folder, **(simulated or {}))
                return cycles._Compilation(program, None if abort else 512, abort)
            listing(folder, "window_forward.1")
            return cycles._Compilation(program, 512, None)

        monkeypatch.setattr(cycles, "_compile", compile_)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        return flags_seen

    return play


def test_a_simulated_kernel_is_compiled_once(compiler):
    flags = compiler(simulated={"window_forward.1": 7000, "fusion": 1000})
    measured = cycles.measure("window_forward", "v6e", {"T": 4096})
    assert len(flags) == 1
    assert measured.cycles == 8000
    assert measured.cycles_per_1024 == 1000
    assert measured.milliseconds == pytest.approx(8000 / 1.75e6)
    assert measured.temp_bytes == 512
    assert measured.notes == ()


@pytest.mark.parametrize("why", ["aborted", "scalar memory", "a kernel in no time"])
def test_bundles_are_counted_where_the_simulator_does_not_do(compiler, why):
    aborted = "signal 6" if why == "aborted" else None
    known = {"fusion": 1} if aborted else {"fusion": 1, "window_forward.1": 99_999 * (why == "scalar memory")}
    flags = compiler(abort=aborted, reads_scalars=why == "scalar memory", simulated=known)
    measured = cycles.measure("window_forward", "v7x", {})
    assert len(flags) == 2
    assert measured.ops[0] == Op("window_forward.1", 10 * 4 + 2 * 3, COUNTED)
    assert measured.cycles == 46 + 1
    assert measured.temp_bytes == 512
    assert measured.notes == (("the simulator stopped (signal 6)",) if aborted else ())


def test_a_program_that_does_not_compile_is_one_sentence(compiler):
    compiler(failure="ValueError: no such head_dim")
    with pytest.raises(ConfigError, match=r"does not compile for v6e with \{'D': 7\}: ValueError: no such"):
        cycles.measure("window_forward", "v6e", {"D": 7})


def test_a_slow_simulation_leaves_what_was_known_before_it(monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"], output=b'{"queries": [1]}\n')

    monkeypatch.setattr(subprocess, "run", run)
    found = cycles._compile("decode", "v6e", {}, "")
    assert found == cycles._Compilation({"queries": [1]}, None, f"no answer within {cycles.TIMEOUT} seconds")


# ---- the command ----


def run(*arguments: str, status: int = 0) -> str:
    return command_line.run("bench", "cycles", *arguments, status=status)


def test_command_prints_a_table_or_json(compiler):
    compiler(simulated={"window_forward.1": 7000, "fusion": 1000})
    table = run("window_forward", "decode", "--chip", "v5e", "--set", "T=4096", "--ops", "1")
    for text in ("window_forward T=4096", "v5e", "8,000", "1,000", "0.0053", "512", "simulated", "1 more"):
        assert text in table
    (measured,) = json.loads(run("window_forward", "--json"))
    assert measured["cycles"] == 8000
    assert measured["chip"] == "v6e"
    assert [op["name"] for op in measured["ops"]] == ["window_forward.1", "fusion"]


def test_what_has_no_figure(compiler):
    """A total with a gap; and few rows have none a 1024."""
    compiler(abort="signal 6", simulated={"fusion": 1000})
    measured = cycles.measure("window_forward", "v6e", {})
    partial = dataclasses.replace(measured, ops=(Op("copy", None, "not simulated"), *measured.ops))
    assert partial.cycles is None
    assert cycles_table(partial.to_dict(), 4).rows[0][1] == "> 1,046"
    assert measured.cycles_per_1024 is not None
    assert dataclasses.replace(measured, queries=8).cycles_per_1024 is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["windw_forward"], "unknown function 'windw_forward'; did you mean 'window_forward'?"),
        (["--chip", "v8"], "unknown chip 'v8'; known: v5e, v5p, v6e, v7x"),
        (["decode", "--set", "T=many"], "--set T must be a number, true or false, got 'many'"),
        (["decode", "--set", "strip=64"], "unknown setting of decode 'strip'; known: B, D, H, K, T"),
        (["decode", "--set", "T"], "--set is 'T'; it must be NAME=VALUE, such as T=8192"),
    ],
)
def test_mistakes_are_one_sentence(compiler, arguments, sentence):
    compiler()
    output = run(*arguments, status=2)
    assert sentence in output
    assert len(output.strip().splitlines()) == 1


def test_without_libtpu_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    output = run("window_forward", status=2)
    assert "libtpu is not installed" in output
    assert "-m pip install 'jax[tpu]'" in output
    assert len(output.strip().splitlines()) == 1


def test_settings_are_json_where_they_can_be():
    read = cycles.read_settings(["T=8192", "dtype=float32", "packed=true", "window=null"])
    assert read == {"T": 8192, "dtype": "float32", "packed": True, "window": None}


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the `tpu` extra) to compile"
)


@pytest.mark.slow
@needs_libtpu
def test_a_row_of_one_document_is_simulated_since_its_scalars_are_zero():
    measured = cycles.measure("full_forward", "v6e", {"T": 2048, "packed": True})
    assert {op.source for op in measured.ops} == {SIMULATED}


@pytest.mark.long
@needs_libtpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_compiles_for_a_chip(name):
    measured = cycles.measure(name, "v6e", {"T": 2048})
    kernels = [op for op in measured.ops if any(part in op.name for part in ("window_", "scheduled_", "branches_"))]
    assert measured.temp_bytes is not None
    assert kernels or name == "decode"
    if name not in ("routed_backward", "head_hybrid_forward", "decode"):
        assert {op.source for op in measured.ops} == {SIMULATED}
        assert 2000 < measured.cycles_per_1024 < 20_000
