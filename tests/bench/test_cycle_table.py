"""`swa-jax bench cycles --write`: rows of the table that plans read."""

import json

import pytest
from command_line import fails, run

from swa_jax.bench import cycle_table, cycles
from swa_jax.bench.cycles import COUNTED, SIMULATED, CycleCount, Op
from swa_jax.plan import kernel_cycles
from swa_jax.plan.kernel_cycles import Cost, MeasuredCall, find_cost

OPS = (
    Op("copy.1", 4000, SIMULATED),
    Op("window_backward.2", 6000, SIMULATED),
    Op("window_backward_ends", 2000, SIMULATED),
)
KERNELS = ("window_backward.2", "window_backward_ends")


def measurement(chip="v6e", ops=OPS, **settings) -> CycleCount:
    shape = {"T": 4096, "window": 512, "packed": True} | settings
    return CycleCount("window_backward", chip, shape, 2 * 4096, ops, 0, (), KERNELS)


def test_a_row_has_the_kernels_alone_and_its_command(tmp_path):
    file = tmp_path / "table.json"
    assert cycle_table.write_row(file, measurement()) is None
    (row,) = json.loads(file.read_text())["rows"]
    command = row.pop("source")
    call = {"head_dim": 128, "window": 512, "packed": True, "num_sink_tokens": 0, "group": 1, "length": 4096}
    assert row == call | {"chip": "v6e", "function": "window_backward", "cycles": 1000.0, "how": "simulated"}
    start = "swa-jax bench cycles window_backward --chip v6e --set T=4096 --set window=512 --set packed=true (libtpu"
    assert command.startswith(start)


def test_a_call_measured_again_replaces_its_row_only(tmp_path):
    """A row says how many query heads a KV head has."""
    file = tmp_path / "table.json"
    for window, heads, count in ((1024, 2, 6000), (512, 2, 6000), (1024, 8, 6000), (1024, 2, 9000)):
        ops = (Op("window_backward.2", count, SIMULATED),)
        cycle_table.write_row(file, measurement(window=window, H=heads, K=2, ops=ops))
    rows = json.loads(file.read_text())["rows"]
    assert [(r["window"], r["group"], r["cycles"]) for r in rows] == [(512, 1, 750), (1024, 1, 1125), (1024, 4, 750)]


def test_what_has_no_figure_makes_no_row(tmp_path):
    file = tmp_path / "table.json"
    unknown = measurement(ops=(Op("window_backward.2", None, "the data decide its visits"),))
    assert "makes no row: the data decide its visits" in cycle_table.write_row(file, unknown)
    assert "counted as if an edge of a document crossed each" in cycle_table.write_row(
        file, measurement(ops=(Op("window_backward.2", 6000, COUNTED),))
    )
    assert not file.exists()


def test_the_command_writes_rows_and_says_what_it_cannot(tmp_path, monkeypatch):
    monkeypatch.setattr(cycles, "measure", lambda name, chip, settings: measurement(chip))
    file = tmp_path / "table.json"
    run("bench", "cycles", "window_backward", "--chip", "v6e", "--chip", "v5e", "--write", file)
    assert [row["chip"] for row in json.loads(file.read_text())["rows"]] == ["v5e", "v6e"]
    for arguments, words in (
        (["decode"], "--write takes no decode: the table is of window_forward"),
        (["window_forward", "--set", "cut=1"], "--write takes no --set cut"),
    ):
        assert words in fails("bench", "cycles", *arguments, "--write", file)


def rows(*cells, **same):
    call = MeasuredCall("v6e", "window_forward", 128)._asdict() | same
    return [call | {"window": window, "cycles": cycles, "length": length} for window, cycles, length in cells]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (512, Cost(2000, 8192)),
        (640, Cost(2250, 8192)),
        (1024, Cost(3000, 16384)),
        (2048, Cost(6000, 16384)),  # as many cycles a key as at 1024
        (64, Cost(2000, 8192)),  # no less than at the smallest
    ],
)
def test_cycles_are_interpolated_in_the_window(window, expected):
    table = [
        *rows((1024, 3000, 16384), (512, 2000, 8192)),
        *rows((640, 1, 1), packed=True),
        *rows((640, 1, 1), chip="v5e"),
    ]
    assert find_cost(MeasuredCall("v6e", "window_forward", 128), window, table) == expected


def test_what_was_not_measured_has_no_cost():
    table = [*rows((512, 2000, 8192)), *rows((None, 9000, 8192), function="full_forward")]
    call = MeasuredCall("v6e", "window_forward", 128)
    assert find_cost(call._replace(head_dim=64), 512, table) is None
    assert find_cost(call._replace(num_sink_tokens=4), 512, table) is None
    assert find_cost(call, None, table) is None
    assert find_cost(call._replace(function="full_forward"), None, table) == Cost(9000, 8192)
    assert find_cost(call, 512, []) is None


def test_rows_of_the_nearest_call_that_is_no_faster_stand_in():
    table = [
        *rows((512, 2000, 8192)),
        *rows((512, 2100, 8192), packed=True),
        *rows((512, 1800, 8192), group=4),
        *rows((512, 1700, 8192), group=8),
    ]
    call = MeasuredCall("v6e", "window_forward", 128)
    for change, cycles_ in (
        ({}, 2000),
        ({"packed": True}, 2100),
        ({"group": 2, "packed": True}, 2100),
        ({"group": 4}, 1800),
        ({"group": 6, "packed": True}, 1800),
        ({"group": 16}, 1700),
    ):
        assert find_cost(call._replace(**change), 512, table) == Cost(cycles_, 8192)
    assert find_cost(call, 512, table[1:]) is None


def test_the_shipped_table_can_be_read():
    for row in kernel_cycles.read_table():
        assert row["source"].startswith(f"swa-jax bench cycles {row['function']} --chip {row['chip']}")
        call = MeasuredCall(**{name: row[name] for name in MeasuredCall._fields})
        assert find_cost(call, row["window"]) == (row["cycles"], row["length"])
