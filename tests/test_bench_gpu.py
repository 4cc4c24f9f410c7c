"""scripts/bench_gpu.py without a GPU: what it would run, and how it prints."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def bench():
    file = Path(__file__).parents[1] / "scripts" / "bench_gpu.py"
    spec = importlib.util.spec_from_file_location("bench_gpu", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dry_run_lists_every_case(bench, capsys):
    bench.main(["--dry-run", "--lengths", "512", "16384", "--windows", "256", "1024"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * (2 + 3)  # 1024 is no window of 512 tokens
    assert all("triton, cudnn" in line for line in lines)
    dense = [line for line in lines if "xla" in line]
    assert all("T=512" in line or "decode" in line for line in dense)


def test_without_a_gpu_it_says_so(bench):
    with pytest.raises(SystemExit, match="this measures on a GPU"):
        bench.main([])


def test_a_row_gives_ratios_and_gaps(bench):
    case = bench.Case("forward", 4096, None, 32, 8, 128)
    assert bench.row(case, {"triton": 0.002, "cudnn": 0.001, "flex": "Error: no"}) == (
        "| forward | 4096 | full | 2.000 | 0.50 | – | – |"
    )
    assert "| failed | – | – | – |" in bench.row(case, {"triton": "Error: no", "cudnn": 0.001})


def test_a_failing_peer_does_not_end_the_run(bench, monkeypatch):
    def seconds(case, name, repeats):
        if name == "cudnn":
            raise RuntimeError("no such kernel\nmore")
        return 0.5

    monkeypatch.setattr(bench, "seconds_jax", seconds)
    monkeypatch.setattr(bench, "peers", lambda case: ["triton", "cudnn"])
    results = bench.measure(bench.Case("forward", 4096, None, 32, 8, 128), 1)
    assert results == {"triton": 0.5, "cudnn": "RuntimeError: no such kernel"}
