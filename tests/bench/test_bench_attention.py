"""`swa-jax bench attention`: candidates agree before they are timed, take turns, and leave reasons where they fail."""

import dataclasses
import functools
import importlib.util
import json

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocks import FIELDS, choose_tiles, table_rows
from swa_jax.base.errors import ConfigError
from swa_jax.bench import attention as timing
from swa_jax.bench import candidates, search
from swa_jax.bench.attention import Result, distance, grid, interleaved, measure
from swa_jax.bench.candidates import BenchCase, peers, splash
from swa_jax.report.bench_tables import attention_table

SMALL = BenchCase("forward+backward", 128, 48, heads=4, kv_heads=2, head_dim=16, batch=1, dtype="float32")
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 1, "decode_batch": 3, "dtype": "float32"}


def candidate(name, function):
    """A candidate of `function(case, q, k, v)`."""
    return candidates._in_jax(name, function)


def exact(case, q, k, v):
    return candidates._jax_nn("xla", case, q, k, v)


def refusing(case, q, k, v):
    raise NotImplementedError("no\nsuch kernel")


# ---- cases and candidates ----


@pytest.mark.parametrize(
    ("which", "window", "documents"),
    [("forward+backward", 48, 50), ("forward+backward", None, None), ("decode", 48, None)],
)
def test_candidates_agree_on_a_cpu(which, window, documents):
    (case,) = grid([which], [128], [window], **SIZES, documents=documents)
    row = measure(case, timing.candidates(case), rounds=2)
    assert [result.name for result in row.results] == ["xla", "jax.nn (xla)"]
    assert all(result.missing is None and result.seconds > 0 for result in row.results)
    assert row.results[0].ratio == 1
    if documents:
        packed, unpacked = (dataclasses.replace(case, documents=of, which="forward") for of in (documents, None))
        results = [candidates.jax_program(c, exact)(*case.draw()) for c in (packed, unpacked)]
        assert distance(*(list(map(np.asarray, x)) for x in results)) > 0.1  # the documents are seen
        assert [c.documents for c in grid(["decode", which], [128], [window], **SIZES, documents=50)] == [None, 50]


@functools.cache
def ours_of(case):
    return np.asarray(
        candidates.jax_program(case, functools.partial(candidates._our_attention, "xla"))(*case.draw())[0]
    )


def test_documents_of_all_rows_end_one_after_the_other():
    case = BenchCase("forward", 100, None, 2, 1, 16, 2, "float32", documents=40)
    assert candidates.document_ends(case).tolist() == [0, 40, 80, 100, 140, 180, 200]
    assert candidates.document_ends(dataclasses.replace(case, documents=None)).tolist() == [0, 100, 200]


def test_full_rows_are_the_last_of_each_document(monkeypatch):
    case = BenchCase("forward", 1000, 48, 2, 1, 16, 2, "float32", documents=400, variant="full-rows")
    given = {}
    monkeypatch.setattr(candidates, "attention", lambda *_, **options: given.update(options))
    candidates._our_attention("xla", case, *case.draw()[:3])
    assert given["full_from"].tolist() == [[144, 144, 144]] * 2


@pytest.mark.parametrize("variant", candidates.VARIANTS[1:])
def test_variants_are_calls_of_their_own(variant):
    """They run, differ from a plain window, and no peer takes part."""
    (case,) = grid(["forward"], [128], [48], **SIZES, documents=100, variant=variant)
    assert [one.name for one in timing.candidates(case)] == ["xla"]
    assert f"  {variant}" in str(case)
    plain = dataclasses.replace(case, variant="plain")
    assert 0.01 < distance([ours_of(case)], [ours_of(plain)]) < np.inf
    expected = {"routed": "routed_attention"}.get(variant, "attention")
    assert case.request().op == expected
    assert list(grid(["decode"], [128], [48], **SIZES, variant=variant)) == []


@pytest.mark.parametrize(("window", "documents"), [(64, None), (None, 100)])
def test_splash_computes_the_same(window, documents):
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 128, "batch": 1, "dtype": "float32"}
    case = BenchCase("forward+backward", 256, window, **sizes, documents=documents)
    interpreted = candidate("splash", functools.partial(splash, interpret=True))
    _, theirs = measure(case, [candidate("dense", exact), interpreted], rounds=1).results
    assert theirs.missing is None


def test_peers_follow_the_device_and_the_length(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "tokamax" else None)
    long = BenchCase("forward", 65536, 1024, heads=4, kv_heads=2, head_dim=16, batch=1, dtype="bfloat16")
    step = BenchCase("decode", 65536, 1024, heads=4, kv_heads=2, head_dim=16, batch=1, dtype="bfloat16")

    def names(device, case):
        return [peer.name for peer in peers(device, case)]

    assert names("cpu", SMALL) == ["jax.nn (xla)"]
    assert names("cpu", long) == []
    assert names("tpu", long) == ["jax splash", "tokamax"]
    assert names("gpu", long) == ["jax.nn (cudnn)", "tokamax"]
    assert names("gpu", step) == ["jax.nn (xla)", "jax.nn (cudnn)"]


# ---- measuring ----


def test_what_disagrees_or_fails_is_not_timed():
    """Ratios are to the first that runs; of several results the one that is furthest away counts."""

    def wrong_gradients(case, q, k, v):
        out = exact(case, q, k, v)
        return 1.1 * out - 0.1 * jax.lax.stop_gradient(out)

    contestants = [
        candidate("refusing", refusing),
        candidate("ours", exact),
        candidate("wrong", wrong_gradients),
        candidate("leaky", lambda case, q, k, v: exact(dataclasses.replace(case, window=49), q, k, v)),
        candidate("nan", lambda case, q, k, v: exact(case, q, k, v) * jnp.nan),
        candidate("same", exact),
    ]
    refused, ours, wrong, leaky, nan, same = measure(SMALL, contestants, rounds=3).results
    assert refused == Result("refusing", missing="NotImplementedError: no such kernel")
    assert ours.ratio == 1
    for result, by in ((wrong, "1.0e-01"), (leaky, ""), (nan, "inf")):
        assert result.seconds is None
        assert f"differs from ours by {by}" in result.missing
    assert same.low <= same.ratio <= same.high


def test_candidates_take_turns():
    log = []
    runners = {name: lambda count, name=name: log.extend([name] * count) for name in "abc"}
    timing_seconds = interleaved(runners, rounds=3)
    assert {name: len(samples) for name, samples in timing_seconds.items()} == {"a": 3, "b": 3, "c": 3}
    turns = [name for i, name in enumerate(log) if i == 0 or log[i - 1] != name]
    assert turns == list("abc" + "abc" + "bca" + "cab")  # warm-up, then three rounds


def test_table_shows_ratios_and_reasons():
    results = (Result("ours", 0.002, 1.0, 1.0, 1.0), Result("flex", missing="Error: no"))
    table = attention_table(timing.Row(SMALL, results).to_dict(), "a device")
    assert table.rows == [("ours", "2.000", "1.00", "1.00 – 1.00", ""), ("flex", "–", "–", "–", "Error: no")]
    assert table.columns[2].title == "Time over ours's"


# ---- the search for tiles ----


def test_rows_to_try_have_every_field():
    for platform, key in (
        ("tpu", {"chip": "TPU v6 lite", "head_dim": 128, "window": 1024}),
        ("gpu", {"capability": 90, "head_dim": 128, "itemsize": 2}),
    ):
        for kernel in {k for kernels in search.KERNELS[platform].values() for k in kernels}:
            rows = search.rows_to_try(platform, kernel, key)
            assert len(rows) > 10
            assert all(set(row) == {name for names in FIELDS[platform] for name in names} for row in rows)


def test_a_row_is_in_force_while_its_candidate_is_traced():
    seen = []

    def watching(case, q, k, v):
        seen.append(choose_tiles("TPU v6 lite", 4096, 4096, 16, window=48).strip)
        return exact(case, q, k, v)

    key = {"chip": "TPU v6 lite", "head_dim": 16, "window": 48}
    rows = [row for row in search.rows_to_try("tpu", "forward", key) if row["block"] == row["tile"] == 512]
    tried = [search.with_row(candidate("ours", watching), "tpu", row) for row in rows]
    results = measure(SMALL, tried, rounds=2).results
    assert [result.name for result in results] == [f"block=512 strip={row['strip']} tile=512" for row in rows]
    assert set(seen) == {row["strip"] for row in rows}
    assert not [row for row in table_rows("tpu") if row["window"] == 48]


def test_a_tile_that_is_refused_is_told_when_its_turn_comes():
    def refuse(case):
        raise NotImplementedError("no such tile")

    (bad,) = search.compiled([candidate("bad", exact)._replace(prepare=refuse)], SMALL)
    with pytest.raises(NotImplementedError, match="no such tile"):
        bad.prepare(SMALL)


def test_search_on_a_device(monkeypatch, tmp_path):
    """The whole path, on a platform that is said to be a GPU with two tiles to try, timed by a played clock."""
    monkeypatch.setattr(search.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(search, "ours", lambda platform: [candidate("ours", exact)])
    key = {"capability": 90, "head_dim": 16, "itemsize": 4}
    monkeypatch.setattr(search, "device_key", lambda platform, case: key)
    monkeypatch.setitem(
        search.TRIED, "gpu", {"q_block": (32, 64), "kv_block": (16,), "num_warps": (4,), "num_stages": (2,)}
    )

    def played(runners, rounds):
        return {name: [0.5 if "q_block=64" in name else 1.0] * rounds for name in runners}

    monkeypatch.setattr(timing, "interleaved", played)
    found = list(search.search(SMALL, rounds=2))
    assert [row["pass"] for row, _ in found] == ["dq", "dkv"]
    assert [row["q_block"] for row, _ in found] == [64, 64]
    file = tmp_path / "tiles.json"
    search.write_rows(file, "gpu", [row for row, _ in found])
    search.write_rows(file, "gpu", [found[0][0] | {"kv_block": 99}])
    table = json.loads(file.read_text())
    assert [(row["pass"], row["kv_block"]) for row in table["gpu"]] == [("dq", 99), ("dkv", 16)]
    assert table["tpu"] == []
    assert "bench attention --search, " in table["gpu"][1]["source"]
    assert ", T=128 window=48 H=4 K=2 batch=1: 0.500 of the time before" in table["gpu"][1]["source"]
    with pytest.raises(ConfigError, match=r"no tile sizes ran for forward.*: no"):
        search.winner([{}], [Result("1", missing="no")], SMALL, "a chip")


# ---- the command ----


def run(*arguments: object, status: int = 0) -> str:
    return command_line.run("bench", "attention", *arguments, status=status)


TINY = ["--length", 64, "--heads", 2, "--kv-heads", 1, "--head-dim", 8, "--rounds", 1]


def test_command_writes_json_and_a_table(tmp_path):
    out = tmp_path / "new" / "times.json"
    table = run(*TINY, "--pass", "forward", "--window", 16, "--dtype", "float32", "--out", out)
    assert "forward  T=64  window=16" in table
    assert "jax.nn (xla)" in table
    report = json.loads(out.read_text())
    assert report["device"] == jax.devices()[0].device_kind
    (row,) = report["results"]
    assert row["window"] == 16
    assert row["results"][0]["name"] == "xla"
    (row,) = json.loads(run(*TINY, "--pass", "decode", "--window", 0, "--json"))["results"]
    assert row["batch"] == 8
    assert [result["missing"] for result in row["results"]] == [None, None]


def test_what_was_timed_outlives_a_case_that_ends_the_run(monkeypatch, tmp_path):
    timed = []

    def measure(case, contestants, rounds):
        timed.append(case)
        if len(timed) == 2:
            raise KeyboardInterrupt
        return timing.Row(case, ())

    monkeypatch.setattr("swa_jax.bench.attention.measure", measure)
    with pytest.raises(AssertionError):
        run(*TINY, "--pass", "forward", "--window", 16, "--window", 0, "--out", tmp_path / "results.json")
    (kept,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert (kept["window"], len(timed)) == (16, 2)


def test_dry_run_lists_every_case_and_runs_nothing(monkeypatch):
    monkeypatch.setattr(timing, "measure", None)
    lines = run("--dry-run", "--length", 512, "--length", 16384, "--window", 1024, "--window", 0).splitlines()
    cases = [line for line in lines if not line.startswith(" ")]
    assert len(cases) == 3 * (1 + 2)
    assert sum("jax.nn (xla)" in line for line in cases) == 2 + 3  # T=512, and all of decode
    assert sum(line.startswith("    xla: no kernel, blocks of ") for line in lines) == len(cases)  # its plan


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--pass", "back"], "--pass is 'back'; the choices are: forward, forward+backward, decode"),
        (["--heads", 3, "--kv-heads", 2], "--heads is 3, which is no multiple of --kv-heads 2"),
        (["--length", 64, "--window", 64], "nothing to time: no --window is shorter than a --length"),
        (["--variant", "routed", "--length", 64, "--window", 0], "nothing to time: --variant routed is for forward"),
        (["--write", "x.json"], "--write is for the winners of --search"),
        ([*TINY, "--window", 16, "--search"], "--search has tile sizes to try on TPUs and GPUs, but JAX runs on cpu"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence):
    output = run(*arguments, status=2)
    assert sentence in output
    assert len(output.strip().splitlines()) == 1
