"""Memory as served: vLLM's own planner as the judge, the cliff of its groups, and what `swa-jax pattern` says."""

import dataclasses
import json
from pathlib import Path

import pytest
from command_line import run
from golden_models import GOLDEN, hf_of

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import hf_pattern, model_config
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.served_cache import BudgetError, Memory, most_within
from swa_jax.checkpoint.servers import SERVERS
from swa_jax.checkpoint.servers.allocation import Blocks, better_grouping, group_layers, grouped_entries
from swa_jax.model.cache import cache_bytes
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

CASES = json.loads((Path(__file__).parent / "vllm_groups.json").read_text())["cases"]


def test_entries_are_those_of_vllms_planner():
    assert len(CASES) == 200
    devices = SERVERS["vllm"].cache.devices
    for case in CASES:
        assert devices[case["device"]].batched_tokens == case["batched"]
        blocks = memory_of("llama-plain", case["length"], "vllm", case["batched"], case["device"]).blocks
        assert blocks.in_flight == case["in_flight"]
        blocks, groups = blocks._replace(tokens=case["block"]), group_layers(case["full"], case["windowed"])
        entries = grouped_entries(case["full"], case["windowed"], case["window"], case["length"], blocks)
        assert (entries, groups.layers, groups.full + groups.windowed) == (
            case["entries"],
            case["layers_of_a_group"],
            case["groups"],
        )
    assert group_layers(36, 0) == (36, 1, 0)  # of one kind: one group
    assert group_layers(0, 36) == (36, 0, 1)
    assert grouped_entries(36, 0, None, 1000, Blocks(16, 1)) == 36 * 1008
    assert {case["device"] for case in CASES} == set(devices)


def test_one_full_layer_more_may_cost_much():
    """36 layers at 128K tokens: the ratios that vLLM's sizes of groups give."""
    length, blocks = 131072, Blocks(16, 8192)
    full = grouped_entries(36, 0, None, length, blocks)
    saved = {n: full / grouped_entries(n, 36 - n, 1024, length, blocks) for n in (9, 14, 15)}
    assert saved[14] > 2.2 > 1.8 > saved[15]
    assert saved[9] > 3.2
    assert better_grouping(15, 21, 1024, length, blocks) == 14
    assert better_grouping(9, 27, 1024, length, blocks) is None


def test_the_verb_prints_bytes_here_and_as_served(tmp_path):
    checkpoint = import_model(GOLDEN / "qwen3-full", tmp_path / "checkpoint")
    text = run("pattern", "interleave-1-in-2", "--model", checkpoint, "--length", "100000")
    for name in ("here", "vllm 0.33.0", "sglang 0.5.23", "tpu-inference 0.32.0"):
        assert name in text
    assert "cannot run this pattern" in text  # tpu-inference: Qwen 3 in part
    sinks = run("pattern", "streaming", "--model", checkpoint, "--length", "100000")
    assert "vllm 0.33.0 cannot run this pattern: num_sink_tokens" in sinks
    assert "here" not in run("pattern", "interleave-1-in-2", "--layers", 8)


def test_the_verb_warns_at_the_cliff(tmp_path):
    checkpoint = import_model(GOLDEN / "llama-plain", tmp_path / "checkpoint")
    for full in (1, 3):
        pattern = AttentionPattern((FULL,) * full + (WINDOW,) * (4 - full), 5)
        pattern.to_json(tmp_path / "pattern.json")
        text = run("pattern", tmp_path / "pattern.json", "--model", checkpoint, "--length", "100000")
        better = better_grouping(full, 4 - full, 5, 100000, memory_of("llama-plain", 100000, "vllm").blocks)
        assert (f"{better} full layers" in text) == (better is not None)


@pytest.mark.parametrize(("length", "batched"), [(500, 31), (64, 16), (10**6, 8192)])
def test_a_prompt_takes_sixteen_steps_at_least(length, batched):
    """By one default, wherever memory is counted, and the share is never printed without it."""
    memory = memory_of("llama-plain", length, "vllm")
    assert memory.batched_tokens == batched
    pattern = AttentionPattern.from_full_layers([0], memory.config.num_hidden_layers, 16)
    steps = -(-length // batched)
    said = (
        f"On h100 (--device), at {batched} batched tokens (--batched-tokens), a prompt of {length} takes {steps} steps"
    )
    assert said in memory.describe(pattern)
    assert f"{memory.share(pattern):.1%} of what full attention takes, counted in vllm" in memory.describe(pattern)
    assert "a prompt of 64 takes 1 step;" in memory_of("llama-plain", 64, "vllm", 64).steps
    assert memory_of("llama-plain", length).steps == ""
    with pytest.raises(ConfigError, match=f"--batched-tokens is of {', '.join(SERVERS)}"):
        memory_of("llama-plain", length, None, 64)


def test_the_verb_counts_as_a_budget_does(tmp_path):
    """adapt, select and compare go by `Memory`; `pattern` prints its shares, whatever the batched tokens."""
    checkpoint = import_model(GOLDEN / "llama-plain", tmp_path / "checkpoint")
    pattern = AttentionPattern.from_full_layers([0], memory_of("llama-plain", 1).config.num_hidden_layers, 5)
    pattern.to_json(tmp_path / "pattern.json")
    words = ("pattern", tmp_path / "pattern.json", "--model", checkpoint, "--length", 1024)
    for batched in (None, 256, 8192):
        text = run(*words, *(() if batched is None else ("--batched-tokens", batched)))
        for server in ("vllm", "sglang", None):
            memory = memory_of("llama-plain", 1024, server, batched if server else None)
            line = next(line for line in text.splitlines() if line.strip().startswith(server or "here"))
            assert line.endswith(f"{memory.share(pattern):.1%}")
        assert f"at {batched or 64} batched tokens" in text


# ---- SGLang's two pools ----


@pytest.mark.parametrize(
    ("device", "batched", "held"),
    [("h100", 256, 63 + 128 + 3 + 512), ("b200", 256, 63 + 128 + 3 * 64 + 512), ("l4", 4096, 4096), (None, None, 706)],
)
def test_a_sequence_takes_what_the_pools_grant(device, batched, held):
    """By hand from `compute_swa_request_cap` and `_solve_pool_sizes` of SGLang 0.5.23."""
    memory = memory_of("llama-plain", 4096, "sglang", batched, device)
    layers = memory.config.num_hidden_layers
    pattern = AttentionPattern.from_full_layers([0], layers, 64)
    said = memory.command(memory.served(pattern), "folder")
    assert f"--context-length 4096 --chunked-prefill-size {memory.batched_tokens} --swa-full" in said
    ratio = float(said.split("--swa-full-tokens-ratio ")[1])
    assert 4096 * (ratio - 0.001) < held <= 4096 * ratio
    assert memory.share(pattern) == pytest.approx((1 + (layers - 1) * ratio) / layers, abs=1 / 4096)
    every = AttentionPattern((WINDOW,) * layers, 64)  # a sequence is let in when all of it would fit
    assert memory.share(every) == 1


def test_what_sglang_jax_holds():
    """By hand from `swa_eviction_peak_tokens` and `_swa_budget_for_req` of sglang-jax of 2026-08-21."""
    memory = memory_of("gemma2-hybrid", 4096, "sglang-jax", 32)
    layers = memory.config.num_hidden_layers
    pattern = AttentionPattern.from_full_layers([0], layers, 64)
    share = (1 + (layers - 1) * (64 + 2 + 64) / 4096) / layers
    assert memory.share(pattern) == pytest.approx(share, abs=0.001)
    assert "--swa-full-tokens-ratio 0.032" in memory.command(memory.served(pattern), "folder")
    more = memory_of("gemma2-hybrid", 4096, "sglang-jax", 256)
    assert more.share(pattern) == pytest.approx((1 + (layers - 1) * (64 + 2 + 512) / 4096) / layers, abs=0.001)


def test_rings_hold_a_part_of_a_prompt():
    """By hand from `RotatingKVCache._update_concat` of MLX-LM 0.32.2: the window but one, and the part."""
    memory = memory_of("llama-plain", 4096, "mlx-lm", 512)
    layers = memory.config.num_hidden_layers
    pattern = AttentionPattern.from_full_layers([0], layers, 64)
    assert memory.share(pattern) == pytest.approx((4096 + (layers - 1) * (63 + 512)) / (layers * 4096))
    assert memory.share(AttentionPattern.from_full_layers([0], layers, 4090)) == 1
    assert memory.command(memory.served(pattern), "x") == "mlx_lm.server --model x --prefill-step-size 512"


def test_whole_pages_are_computed_at_once():
    assert memory_of("llama-plain", 5000, "sglang", device="b200").batched_tokens == 256


def test_a_class_that_keeps_whole_caches_says_so():
    memory = memory_of("gemma3-hybrid", 4096, "sglang")
    pattern = hf_pattern(hf_of("gemma3-hybrid"))
    assert memory.share(pattern) == 1
    assert "whole" in memory.served(pattern).describe("sglang")
    assert "steps" not in memory.describe(pattern)
    assert "--swa-full" not in memory.command(memory.served(pattern), "folder")
    with pytest.raises(BudgetError, match="keeps the caches of windowed layers whole"):
        most_within(memory, 0.5, 0, lambda _: pattern)


# ---- a budget ----


def memory_of(name, length, server=None, chunk=None, device=None):
    return Memory(model_config(hf_of(name)), hf_of(name), length, server, chunk, device)


def test_memory_counts_as_the_server_does():
    memory = memory_of("llama-plain", 4096, "vllm", 256)
    layers = memory.config.num_hidden_layers
    pattern = AttentionPattern.from_full_layers([0], layers, 64)
    entries = grouped_entries(1, layers - 1, 64, 4096, Blocks(16, 2 * 256))
    assert memory.bytes(pattern) == entries * memory.config.num_key_value_heads * 2 * memory.config.head_dim * 2
    assert memory.bytes(pattern) < memory_of("llama-plain", 4096, "vllm", 8192).bytes(pattern)
    padded = memory_of("llama-plain", 16, "tpu-inference")  # heads of 6 channels take 128
    assert 6 * padded.full == 128 * memory_of("llama-plain", 16, "vllm").full
    assert memory_of("llama-plain", 4096, "vllm") == memory  # which is the 16th part
    assert memory_of("llama-plain", 4096, "vllm", 256, "cpu").blocks == Blocks(128, 256)  # of one batch
    assert memory.full == layers * 4096 * memory.config.num_key_value_heads * 2 * memory.config.head_dim * 2
    assert memory.share(AttentionPattern((FULL,) * layers)) == 1
    here, transformers = (memory_of("llama-plain", 4096, server) for server in (None, "transformers"))
    assert here.bytes(pattern) == transformers.bytes(pattern) == cache_bytes(here.config, pattern, 1, 4096, 2)
    sinks = AttentionPattern.from_full_layers([0], layers, 64, num_sink_tokens=4)
    assert here.bytes(sinks) > here.bytes(pattern)
    with pytest.raises(ConfigError, match="num_sink_tokens = 4"):
        transformers.bytes(sinks)
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        memory_of("llama-plain", 4096, "vlm")


@pytest.mark.parametrize(
    ("length", "tokens"), [(200, 16), (2048, 128), (8000, 256), (8193, 32), (32768, 64), (131072, 256), (200_000, 512)]
)
def test_pages_on_a_tpu_grow_with_the_sequence(length, tokens):
    """By hand from `get_page_size` and `get_min_page_size` of tpu-inference 0.32.0, for 256 sequences."""
    assert memory_of("llama-plain", length, "tpu-inference").blocks.tokens == tokens


def test_a_device_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="--device is 'v6e'; vllm runs on: h100, "):
        memory_of("llama-plain", 4096, "vllm", device="v6e")
    with pytest.raises(ConfigError, match=f"--device is of {', '.join(SERVERS)}"):
        memory_of("llama-plain", 4096, device="h100")


def test_the_first_that_fits_is_taken_and_refused_ones_are_passed_over():
    memory = memory_of("llama-plain", 4096)
    layers = memory.config.num_hidden_layers
    asked = []

    def make(full):
        asked.append(full)
        return AttentionPattern.from_full_layers(range(full), layers, 64)

    assert len(most_within(memory, 1.0, layers, make).full_layers) == layers
    one = memory.share(make(1))
    assert len(most_within(memory, one, layers, make).full_layers) == 1
    assert len(most_within(memory, one - 1e-9, layers, make).full_layers) == 0
    none = memory.share(make(0))
    with pytest.raises(BudgetError) as caught:
        most_within(memory, none / 2, layers, make)
    assert caught.value.smallest == none
    assert set(asked) == set(range(layers + 1))

    def with_sinks(full):
        return AttentionPattern.from_full_layers(range(full), layers, 64, num_sink_tokens=4)

    served = memory_of("llama-plain", 4096, "vllm", 64)
    assert most_within(served, 1.0, layers, with_sinks).full_layers == tuple(range(layers))
    with pytest.raises(ConfigError, match="num_sink_tokens = 4"):
        most_within(served, 0.5, layers, with_sinks)


def test_the_plugins_caches_by_hand():
    """Blocks of 128 tokens: 1000 tokens are 8, a window of 100 with a batch of 128 takes 3. Heads of 6 take 32."""
    memory = memory_of("llama-plain", 1000, "vllm-plugin", 128)
    heads, layers = memory.config.num_key_value_heads, memory.config.num_hidden_layers
    assert (memory.config.head_dim, layers) == (6, 4)
    said = "Heads of 6 channels take the memory of 32 in vllm-plugin, with zeros at their ends."
    assert memory.padding == said
    assert memory_of("llama-plain", 1000, "vllm", 128).padding == memory_of("llama-plain", 1000).padding == ""
    block = 128 * 32 * 2 * 2  # bytes, for one KV head
    windows = AttentionPattern((WINDOW, FULL) * 2, 100)
    assert memory.bytes(windows) == block * heads * 2 * (8 + 3)
    sinks = dataclasses.replace(windows, num_sink_tokens=4)
    assert memory.bytes(sinks) == block * heads * 2 * (8 + 3 + 1)
    assert memory.bytes(dataclasses.replace(windows, num_sink_tokens=129)) == block * heads * 2 * (8 + 3 + 2)
    assert memory.bytes(dataclasses.replace(sinks, full_attention_decode=True)) == memory.full
    # One full head in each of 2 layers: 2 modules with whole caches and 6 with windows, in groups of 2.
    single = AttentionPattern((HYBRID, HYBRID, WINDOW, WINDOW), 100, full_kv_heads=((0,), (heads - 1,), (), ()))
    modules = layers * heads - 2
    assert memory.bytes(single) == block * (2 * 8 + modules * 3)
    assert memory.full == block * heads * layers * 8
    assert memory.describe(single).startswith("The cache of a sequence of 1000 tokens takes ")
    with pytest.raises(ConfigError, match="--for vllm-plugin runs it"):
        memory_of("llama-plain", 1000, "vllm").bytes(sinks)
