"""The calls that a lent GPU is asked to make: they go on where they stopped, end at their limits, and run in small."""

import gzip
import json
import sys

import pytest

from scripts import device
from scripts.device import DeviceCall, device_calls, run, where_time_goes


def said(name: str, code: str, seconds: int = 60, **options) -> DeviceCall:
    return DeviceCall(name, seconds, (sys.executable, "-c", code, "{folder}"), **options)


def test_calls_that_ended_well_are_not_made_again(tmp_path):
    count = "import sys; open(sys.argv[1] + '/count', 'a').write('x')"
    well = said("well", count, read=lambda folder: (folder / "count").read_text())
    broken = said("broken", "import sys; print('why'); sys.exit(3)")
    slow = said("slow", "import time; time.sleep(60)", seconds=1)
    unprepared = said("unprepared", count, prepare=lambda folder: 1 / 0)
    calls = [broken, slow, unprepared, well]
    assert not run(tmp_path, True, calls)
    assert not run(tmp_path, True, calls)
    assert run(tmp_path, True, [well])
    lines = (tmp_path / "results.jsonl").read_text().splitlines()[1:]
    found = {record["key"]: record for record in map(json.loads, lines)}
    assert {name: record["status"] for name, record in found.items()} == {
        "broken": 3, "slow": 124, "unprepared": 1, "well": 0
    }  # fmt: skip
    assert found["broken"]["said"] == "why\n"
    assert "ZeroDivisionError" in found["unprepared"]["said"]
    assert found["well"]["found"] == "x"


def test_the_limits_add_up_to_twelve_minutes():
    assert sum(call.seconds for call in device_calls(False)) == 12 * 60
    names = [call.name for call in device_calls(True)]
    assert names == [call.name for call in device_calls(False)]


def test_time_is_that_of_the_streams_by_kind_of_kernel(tmp_path):
    def named(kind, name, **where):
        return {"ph": "M", "name": kind, "args": {"name": name}} | where

    events = [
        named("process_name", "/device:GPU:0", pid=1),
        named("process_name", "/host:CPU", pid=2),
        named("thread_name", "Stream #13(Compute)", pid=1, tid=1),
        named("thread_name", "XLA Ops", pid=1, tid=2),
        named("thread_name", "main", pid=2, tid=1),
    ]
    times = [
        (1, 1, "forward_kernel", 2e6),
        (1, 1, "nvjet_gemm", 3e6),
        (1, 1, "loop_fusion", 1e6),
        (1, 1, "nvjet_gemm", 1e6),
    ]
    times += [(1, 2, "forward_kernel", 9e6), (2, 1, "python", 9e6)]
    events += [{"ph": "X", "pid": pid, "tid": tid, "name": name, "dur": dur} for pid, tid, name, dur in times]
    folder = tmp_path / "step" / "profile"
    folder.mkdir(parents=True)
    (folder / "host.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    (tmp_path / "step" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    found = where_time_goes(tmp_path)
    assert found["kinds"] == {"matrix products": 4.0, "attention": 2.0, "other": 1.0}
    assert found["kernels"] == {"nvjet_gemm": 4.0, "forward_kernel": 2.0, "loop_fusion": 1.0}
    assert found["last_step"] == {"step": 2}


@pytest.mark.long
def test_the_dry_run_ends_well(tmp_path):
    with pytest.raises(SystemExit) as ended:
        device.main([str(tmp_path / "results"), "--dry-run"])
    assert ended.value.code == 0
    records = (tmp_path / "results" / "results.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["key"] for line in records] == [call.name for call in device_calls(True)]
