"""Tile sizes: rows of the table where they hold, the rule elsewhere, and a user's own table before both."""

import itertools
import json
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import blocks, gpu
from pallas_kernels.blocks import FIELDS, TABLE, Tiles, backward_tiles, choose_tiles, preferring, table_rows
from pallas_kernels.gpu.operands import Tile

V6E = "TPU v6 lite"


def row(**changes):
    fields = {"chip": "v6 lite", "pass": "forward", "head_dim": 128, "window": 1024}
    return fields | {"block": 512, "strip": 64, "tile": 32} | changes


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    """A function that makes given rows the user's table."""
    file = tmp_path / "tiles.json"
    monkeypatch.setenv("PALLAS_KERNELS_TILES", str(file))

    def write(tpu=(), gpu=()):
        file.write_text(json.dumps({"tpu": list(tpu), "gpu": list(gpu)}))
        blocks._read.cache_clear()

    return write


def test_every_committed_row_names_its_source_and_is_found_by_its_key():
    table = json.loads(TABLE.read_text())
    assert set(table) == set(FIELDS)
    for platform, rows in table.items():
        key, value = FIELDS[platform]
        keys = [tuple(r[name] for name in key) for r in rows]
        assert len(set(keys)) == len(keys)
        for r in rows:
            assert set(r) == {*key, *value, "source"}
            assert "bench" in r["source"]
    for r in table["tpu"]:
        if r["pass"] == "forward":
            shape = f"TPU {r['chip']}", 16384, 16384, r["head_dim"]
            tiles = choose_tiles(*shape, window=r["window"])
            assert (tiles.q_block, tiles.strip, tiles.tile) == (r["block"], r["strip"], r["tile"])


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", V6E, "TPU7x", "cpu"])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_tiles_fit_any_call(kind, head_dim):
    lengths = [1, 16, 50, 128, 300, 1025, 2049, 5000, 16384]
    for length, window in itertools.product(lengths, [None, 7, 1024, 2048, 100_000]):
        tiles = choose_tiles(kind, length, length, head_dim, window=window)
        assert tiles.q_block == tiles.kv_block
        assert tiles.q_block % (16 if length <= 128 else 128) == 0
        padded = -(-length // tiles.q_block) * tiles.q_block
        assert padded - length < 1024 or window is not None
        backward = backward_tiles(tiles, kind, head_dim, window or 1)
        assert tiles.q_block % backward.q_block == 0
        assert backward.q_block == backward.kv_block


def test_blocks_above_1024_do_not_pad_a_sequence_to_twice_its_length():
    with preferring("tpu", [row(block=2048)]):
        lengths = {2048: 2048, 2100: 1024, 3072: 1024, 4096: 2048, 5000: 1024, 16384: 2048}
        chosen = {n: choose_tiles(V6E, n, n, 128, window=1024).q_block for n in lengths}
    assert chosen == lengths


def test_without_a_row_the_rule_decides():
    rule = {"q_block": 1024, "kv_block": 1024}
    assert choose_tiles(V6E, 8192, 8192, 128) == Tiles(**rule, strip=256, tile=256, sum_on_mxu=True)
    old = Tiles(**rule, strip=128, tile=128, sum_on_mxu=False)
    assert choose_tiles("TPU v5", 8192, 8192, 128, window=2048) == old
    assert choose_tiles(V6E, 8192, 8192, 256).q_block == 512
    assert not choose_tiles(V6E, 8192, 8192, 256).sum_on_mxu
    assert choose_tiles(V6E, 8192, 8192, 128, window=99_999) == choose_tiles(V6E, 8192, 8192, 128)


def test_the_nearest_head_dim_above_wins_then_the_nearest_window_above(own_table):
    own_table(
        [
            row(window=4096, strip=1),
            row(window=8192, strip=2),
            row(window=8192, head_dim=64, strip=3),
            row(**{"pass": "backward", "window": 8192, "block": 768, "strip": 4}),
            row(chip="v5 lite", window=8192, strip=5),
        ]
    )

    def strip(window, head_dim=128):
        return choose_tiles(V6E, 16384, 16384, head_dim, window=window).strip

    assert strip(3000) == 1
    assert strip(4096) == 1
    assert strip(4097) == 2
    assert strip(8192, head_dim=64) == 3
    assert strip(8192, head_dim=80) == 2  # a table measured on narrower rows says nothing of the VMEM that it needs
    assert strip(8193) == 256
    assert choose_tiles("TPU v5 lite", 16384, 16384, 128, window=8192).strip == 5
    forward = Tiles(512, 512, strip=7, sum_on_mxu=False)
    assert backward_tiles(forward, V6E, 128, 8192) == Tiles(512, 512, strip=4, tile=32, sum_on_mxu=False)
    assert backward_tiles(Tiles(1536, 1536), V6E, 128, 8192).q_block == 768  # it divides the forward's
    assert backward_tiles(forward, V6E, 128, 8193) == forward


def test_own_rows_win_ties_and_those_of_a_search_win_over_them(own_table):
    own_table([row(strip=32)])
    assert choose_tiles(V6E, 8192, 8192, 128, window=1024).strip == 32
    with preferring("tpu", [row(strip=16)]):
        assert choose_tiles(V6E, 8192, 8192, 128, window=1024).strip == 16
    assert choose_tiles(V6E, 8192, 8192, 128, window=1024).strip == 32


def test_gpu_rows_replace_the_tile_of_their_kernel(own_table):
    own_table()
    rule = gpu.tile_sizes(128, 2, 90)
    tile = {"q_block": 32, "kv_block": 16, "num_warps": 4, "num_stages": 1}
    key = {"capability": 90, "pass": "dq", "head_dim": 128, "itemsize": 2}
    own_table(gpu=[key | tile, key | tile | {"head_dim": 256, "kv_block": 32}])
    assert gpu.tile_sizes(128, 2, 90) == rule._replace(dq=Tile(32, 16, 4, 1))
    assert gpu.tile_sizes(96, 2, 90).dq == Tile(32, 16, 4, 1)
    assert gpu.tile_sizes(256, 2, 90).dq == Tile(32, 32, 4, 1)
    assert gpu.tile_sizes(128, 2, 80).dq != Tile(32, 16, 4, 1)
    assert gpu.tile_sizes(128, 4, 90).dq != Tile(32, 16, 4, 1)
    assert table_rows("tpu") == json.loads(TABLE.read_text())["tpu"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no json", "Expecting value"),
        ("[]", "has no attribute 'get'"),
        ('{"tpu": [{"chip": "v6 lite"}]}', "a row for tpu lacks pass, head_dim"),
    ],
)
def test_a_table_that_is_none_is_named(own_table, tmp_path, text, why):
    own_table()
    (tmp_path / "tiles.json").write_text(text)
    with pytest.raises(ValueError, match=rf"tiles.json is no table of tiles: .*{why}"):
        choose_tiles(V6E, 8192, 8192, 128, window=1024)
    blocks._read.cache_clear()


def test_a_missing_table_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLAS_KERNELS_TILES", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none.json is no table of tiles: .*No such file"):
        table_rows("tpu")


def test_the_device_is_the_default_one(monkeypatch):
    """A CPU may be asked for beside a GPU."""
    cpu, h200 = jax.devices("cpu")[0], SimpleNamespace(platform="cuda", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda platform=None: [cpu if platform == "cpu" else h200])
    assert (blocks.platform(), blocks.device_kind()) == ("gpu", "NVIDIA H200")
    for default in ("cpu", cpu):
        with jax.default_device(default):
            assert (blocks.platform(), blocks.device_kind()) == ("cpu", cpu.device_kind)
