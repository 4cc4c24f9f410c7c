"""Exports to a named server: what the server's own class makes of them, or a sentence that refuses."""

import dataclasses
import re
from datetime import date

import pytest
import server_classes
from command_line import fails, run
from exported_patterns import patterns
from golden_models import GOLDEN, MODELS, bits_of, contents, hf_of

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import read_json, write_json
from swa_jax.checkpoint.families import FAMILIES, hf_pattern, model_config
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.servers import SERVERS, TARGETS, find_served, served_config
from swa_jax.model.layer_types import FULL, WINDOW

NO_CLASS = {
    ("mlx-lm", "mellum-hybrid"),  # dense
    ("mlx-lm", "mellum-moe-hybrid"),
    ("mlx-lm", "olmo3-hybrid"),  # full layers that keep the RoPE of windowed ones
    ("mlx-lm", "mistral-window"),
    ("sglang-jax", "llama-yarn"),
    ("sglang-jax", "llama3-rope"),
    ("mlx-lm", "laguna-channels"),  # a gate for each channel
    # Numbers, RoPE or windows that llama.cpp fixes otherwise, or full attention where it wants a window.
    *(("llama.cpp", f"{name}-hybrid") for name in ("gemma2", "gemma3", "cohere2", "exaone4", "granite-swa", "olmo3")),
    *(("llama.cpp", f"{name}-hybrid") for name in ("mellum", "mellum-moe", "smollm3")),
    *(("llama.cpp", f"qwen3-moe-{name}") for name in ("full", "window")),
    ("sglang", "granitemoe-swa-hybrid"),  # heads that do not divide the hidden channels
}


def computed(server: str, served) -> list[int | None]:
    """The windows that the server's class gives the layers."""
    if served.file is not None:
        said, name = served.file.metadata, f"{served.file.architecture}.attention.sliding_window"
        windowed = said.get(f"{name}_pattern", [False] * served.pattern.num_layers)
        return [said[name] if one else None for one in windowed]
    if server == "vllm-plugin":
        return server_classes.vllm_plugin(served.hf)
    return getattr(server_classes, server.replace("-", "_"))(served.hf)


def check_pools(served) -> None:
    """SGLang frees the layers with a window, and no other, where the table says so; no backend ignores a window."""
    pools = server_classes.sglang_pools(served.hf, served.command)
    windowed = [i for i, kind in enumerate(served.pattern.layer_types) if kind == WINDOW]
    full = [i for i, kind in enumerate(served.pattern.layer_types) if kind != WINDOW]
    assert pools == ((windowed, full) if windowed and served.runs.frees else None)


@pytest.mark.parametrize("server", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_a_server_computes_the_pattern_or_the_export_is_refused(model, server):
    hf = hf_of(model)
    tried = patterns(hf["num_hidden_layers"])
    if (own := hf_pattern(hf)).sliding_window:
        tried["own"] = dataclasses.replace(own, sliding_window=5)
    answers = {name: find_served(server, hf, pattern) for name, pattern in tried.items()}
    for name, pattern in tried.items():
        if (served := answers[name]) is None:
            continue
        wanted = [None if kind == FULL else pattern.sliding_window for kind in pattern.layer_types]
        if server == "transformers":
            assert hf_pattern(served.hf) == pattern
            server_classes.transformers(served.hf)
        else:
            context = hf["max_position_embeddings"]  # a window as long as that is none
            windows = computed(server, served)
            assert [None if w is None or w >= context else w for w in windows] == wanted, name
            if server == "sglang":
                check_pools(served)
        family = served.model_type if served.file is None else served.hf["model_type"]
        again = model_config({**served.hf, "model_type": family})
        assert again.hidden_size == model_config(hf).hidden_size
    known = server == "transformers" or hf["model_type"] in SERVERS[server].classes
    assert (answers["full"] is not None) or not known or (server, model) in NO_CLASS
    for name in ("sink tokens", "full-attention decode", "heads", "routed"):
        plugin = server == "vllm-plugin" and name != "routed"
        assert (answers[name] is not None) == (plugin and answers["full"] is not None), name


@pytest.mark.parametrize(
    ("model", "server", "name", "runs"),
    [
        ("qwen3-full", "vllm", "odd", "TransformersMoEForCausalLM"),
        ("qwen3-full", "vllm", "window", "Qwen3ForCausalLM"),
        ("qwen3-full", "tpu-inference", "odd", None),
        ("qwen3-moe-full", "vllm", "odd", "TransformersMoEForCausalLM"),
        ("qwen3-moe-full", "vllm", "full", "Qwen3MoeForCausalLM"),
        ("qwen3-moe-full", "tpu-inference", "odd", None),
        ("mixtral-window", "vllm", "window", None),
        ("mixtral-window", "vllm", "full", "MixtralForCausalLM"),
        ("gpt-oss-hybrid", "vllm", "even", "GptOssForCausalLM"),
        ("gpt-oss-hybrid", "vllm", "odd", None),
        ("qwen2-full", "vllm", "last", "LlamaForCausalLM"),
        ("llama-plain", "vllm", "odd", "LlamaForCausalLM"),
        ("llama-plain", "tpu-inference", "odd", "LlamaForCausalLM"),
        ("llama-plain", "transformers", "odd", "MinistralForCausalLM"),
        ("llama-plain", "sglang", "odd", "TransformersForCausalLM"),
        ("qwen3-full", "sglang", "odd", "MellumForCausalLM"),
        ("qwen3-full", "sglang", "full", "Qwen3ForCausalLM"),
        ("qwen3-hybrid", "sglang", "odd", "TransformersForCausalLM"),  # whose embeddings are tied
        ("qwen3-moe-full", "sglang", "odd", "MellumForCausalLM"),
        ("granite-swa-hybrid", "sglang", "odd", "GraniteSWAForCausalLM"),
        ("olmo2-full", "sglang", "odd", "Olmo2ForCausalLM"),
        ("vaultgemma-hybrid", "sglang", "even", None),
        ("llama-plain", "mlx-lm", "odd", "llama.Model"),
        ("llama-plain", "mlx-lm", "window", None),  # which wants a full layer
        ("phi3-full", "mlx-lm", "odd", None),  # whose LongRoPE differs there
        ("qwen3-full", "mlx-lm", "odd", None),
        ("qwen3-moe-full", "mlx-lm", "odd", "mellum.Model"),
        ("olmo2-full", "mlx-lm", "odd", "olmo3.Model"),
        ("cohere2-hybrid", "vllm", "own key only", None),  # this class sees a key more than it is told
        ("gemma2-hybrid", "sglang", "odd", None),
        ("gemma2-hybrid", "sglang", "even", "Gemma2ForCausalLM"),
        ("granite-full", "vllm", "odd", "GraniteForCausalLM"),
        ("granite-full", "transformers", "odd", None),
        ("exaone-moe-hybrid", "vllm", "full", "ExaoneMoeForCausalLM"),
        ("laguna-hybrid", "sglang", "full", "LagunaForCausalLM"),
        ("afmoe-hybrid", "tpu-inference", "full", None),
    ],
)
def test_which_class_runs_it(model, server, name, runs):
    hf = hf_of(model)
    pattern = patterns(hf["num_hidden_layers"])[name]
    if runs is None:
        with pytest.raises(ConfigError, match=rf"^{server}.* cannot run this pattern: [^\n]*$"):
            served_config(server, hf, pattern)
    else:
        assert served_config(server, hf, pattern).runs.name == runs


def test_a_dense_model_is_written_as_mellum_without_experts():
    served = served_config("vllm", hf_of("qwen3-full"), patterns(hf_of("qwen3-full")["num_hidden_layers"])["odd"])
    assert served.hf["mlp_layer_types"] == ["dense"] * served.hf["num_hidden_layers"]
    assert not {"num_experts", "num_local_experts", "moe_intermediate_size"} & served.hf.keys()


@pytest.mark.parametrize("server", [None, "transformers", "vllm"])
def test_a_model_with_linear_layers_is_not_exported(tmp_path, server):
    source = import_model(GOLDEN / "linear" / "qwen3-5-four", tmp_path / "imported")
    with pytest.raises(ConfigError, match="export is not made yet for models with linear layers, such as qwen3_5_text"):
        export_model(source, tmp_path / "exported", server=server)
    assert not (tmp_path / "exported").exists()


def test_every_family_is_decided_on_every_server():
    """A class runs it, or a sentence says why none does, which the refusal repeats."""
    found: dict[str, list[dict]] = {}
    for hf in map(hf_of, MODELS):
        found.setdefault(hf["model_type"], []).append(hf)
    # This library's own, which no server runs, and hybrids, which are not exported.
    assert set(FAMILIES) - set(found) == {"swat", "qwen3_5_text"}
    for name, server in SERVERS.items():
        assert not set(server.classes) & set(server.no_class), name
        assert set(server.classes) | set(server.no_class) <= set(FAMILIES), name
        for family, models in found.items():
            kinds = [(hf, [*patterns(hf["num_hidden_layers"]).values(), hf_pattern(hf)]) for hf in models]
            if any(find_served(name, hf, pattern) is not None for hf, tried in kinds for pattern in tried):
                continue
            if family in server.classes:
                assert all((name, model) in NO_CLASS for model in MODELS if hf_of(model)["model_type"] == family)
                continue
            hf, (full, *_) = kinds[0]
            why = re.escape(server.no_class[family])
            with pytest.raises(ConfigError, match=f"cannot run this pattern: {why}"):
                served_config(name, hf, full)
            with pytest.raises(ConfigError, match=f"does not run model_type '{family}': {why}"):
                served_config(name, hf, full, as_full=True)


def test_a_window_that_a_class_counts_otherwise_is_written_one_shorter():
    hf = hf_of("cohere2-hybrid")
    served = served_config("vllm", hf, patterns(hf["num_hidden_layers"])["even"])
    assert served.hf["sliding_window"] == 4
    assert "4 is written for a window of 5" in served.describe("vllm")


def test_a_refusal_names_who_can():
    hf = hf_of("granite-full")
    with pytest.raises(ConfigError, match=r"--for vllm or tpu-inference or llama\.cpp runs it"):
        served_config("transformers", hf, patterns(hf["num_hidden_layers"])["odd"])
    with pytest.raises(ConfigError, match="--for is 'vlm'; did you mean 'vllm'"):
        served_config("vlm", hf, patterns(hf["num_hidden_layers"])["odd"])


@pytest.mark.parametrize("name", ["sink tokens", "full-attention decode", "heads"])
def test_what_vllm_cannot_run_its_plugin_can(name, tmp_path):
    hf = hf_of("qwen2-hybrid")
    pattern = patterns(hf["num_hidden_layers"])[name]
    with pytest.raises(ConfigError, match=r"cannot run this pattern: .*; --for vllm-plugin runs it; --as-full"):
        served_config("vllm", hf, pattern)
    checkpoint = import_model(GOLDEN / "qwen2-hybrid", tmp_path / "checkpoint", pattern=pattern)
    export = export_model(checkpoint, tmp_path / "export", server="vllm-plugin", canary=False)
    said = read_json(export / "config.json")
    assert (said["model_type"], said["architectures"]) == ("swa_jax_qwen2", ["SwaJaxQwen2ForCausalLM"])
    with pytest.raises(ConfigError, match="model_type 'swa_jax_qwen2' is not supported"):
        model_config(said)
    (export / "pattern.json").unlink()
    assert open_checkpoint(import_model(export, tmp_path / "again")).pattern == pattern


def test_a_damaged_pattern_for_the_plugin_is_one_sentence(tmp_path):
    checkpoint = import_model(GOLDEN / "qwen2-hybrid", tmp_path / "checkpoint")
    export = export_model(checkpoint, tmp_path / "export", server="vllm-plugin", canary=False)
    said = read_json(export / "config.json")
    for pattern, sentence in ((None, "swa_pattern must be a pattern"), ({}, "swa_pattern has no 'layer_types'")):
        write_json(export / "config.json", said | {"swa_pattern": pattern})
        with pytest.raises(ConfigError, match=sentence):
            import_model(export, tmp_path / "again")


@pytest.mark.parametrize("server", [name for name in TARGETS if name != "llama.cpp"])  # see test_gguf_export.py
def test_import_of_an_export_gives_the_same_bits(tmp_path, server):
    checkpoint = import_model(GOLDEN / "qwen2-hybrid", tmp_path / "checkpoint")
    export_model(checkpoint, tmp_path / "export", server=server, as_full=True, canary=False)
    again = import_model(tmp_path / "export", tmp_path / "again")
    one, other = open_checkpoint(checkpoint), open_checkpoint(again)
    assert (other.pattern, other.config) == (one.pattern, one.config)
    assert bits_of(contents(again)) == bits_of(contents(checkpoint))


def test_the_verb_says_how_to_start_the_server(tmp_path):
    checkpoint = import_model(GOLDEN / "qwen2-hybrid", tmp_path / "checkpoint")
    said = run("export", checkpoint, tmp_path / "a", "--no-canary", "--for", "vllm", "--serve-length", 640)
    sizes = "--max-model-len 640 --max-num-batched-tokens 40"
    assert f"Start it with: vllm serve {tmp_path / 'a'} {sizes}\n" in said
    assert "at 40 batched tokens (--batched-tokens), a prompt of 640 takes 16 steps" in said
    assert "are for a server" in fails("export", checkpoint, tmp_path / "b", "--batched-tokens", 64)
    assert f"known: {', '.join(TARGETS)}" in fails(
        "export", checkpoint, tmp_path / "b", "--no-canary", "--for", "ollama"
    )
    assert not (tmp_path / "b").exists()
    assert "MODEL_IMPL_TYPE=vllm vllm serve" in run(
        "export", checkpoint, tmp_path / "c", "--no-canary", "--for", "tpu-inference"
    )
    assert "--as-full needs --for" in fails("export", checkpoint, tmp_path / "d", "--no-canary", "--as-full")


def test_the_servers_are_listed_with_their_versions():
    """By every verb that has `--for`, whatever else is missing."""
    listed = run("export", "--for", "help")
    assert listed == run("adapt", "--for", "help") == run("select", "nll", "--for", "help")
    assert [line.split()[0] for line in listed.splitlines()] == ["--for", *TARGETS]
    for name, server in SERVERS.items():
        assert [name, server.version, str(date.fromisoformat(server.released))] in map(str.split, listed.splitlines())


def test_a_window_of_one_key_is_refused_where_a_kernel_takes_it_for_none():
    hf = hf_of("olmo3-hybrid")
    own = hf_pattern(hf)
    with pytest.raises(ConfigError, match=r"sglang .* cannot run this pattern: windows of the query's own key alone"):
        served_config("sglang", hf, dataclasses.replace(own, sliding_window=1))
    assert find_served("sglang", hf, dataclasses.replace(own, sliding_window=2)) is not None


def test_full_attention_is_written_only_where_it_is_asked_for(tmp_path):
    checkpoint = import_model(GOLDEN / "granite-full", tmp_path / "checkpoint", pattern="interleave-1-in-2")
    assert "--as-full exports it" in fails("export", checkpoint, tmp_path / "a", "--no-canary", "--for", "sglang")
    assert "a window in no layer" in run(
        "export", checkpoint, tmp_path / "a", "--no-canary", "--for", "sglang", "--as-full"
    )
