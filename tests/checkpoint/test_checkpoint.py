"""The checkpoint folder: what is saved comes back, and damage is noticed and named."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_models import GOLDEN, change_json, hf_of, logits
from tiny_models import PLAIN, SOFTMAX, base_model, make, model_of

import swa_jax
from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.folder import load_model, save_model, weights_sum, written_from
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.model.decoder import Decoder


@pytest.fixture
def saved(tmp_path) -> Path:
    """A small routed model with every kind of layer, saved."""
    return save_model(model_of("every-kind"), tmp_path / "saved")


def parameters(model: Decoder) -> dict:
    return {path: np.asarray(variable[...]) for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def assert_same_parameters(one: Decoder, other: Decoder) -> None:
    ours, theirs = parameters(one), parameters(other)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        assert array.dtype == theirs[path].dtype
        np.testing.assert_array_equal(array, theirs[path], err_msg=str(path))


@pytest.mark.parametrize("name", ["full", "streaming", "every-kind+fa-decode", "swat-every-kind"])
def test_what_is_saved_comes_back(tmp_path, name):
    model = model_of(name)
    again = load_model(save_model(model, tmp_path / "saved"))
    assert again.pattern == model.pattern
    # These models are no Llama, whatever they say: no Hugging Face family expresses them.
    assert again.config == dataclasses.replace(model.config, model_type="swat")
    assert_same_parameters(model, again)


def test_a_familys_model_stays_in_its_family_under_any_pattern(tmp_path):
    model = Decoder(PLAIN, make("wFww"), rngs=nnx.Rngs(0))  # Llama has no windows, the pattern file has
    again = load_model(save_model(model, tmp_path / "saved"))
    assert (again.config, again.pattern) == (PLAIN, model.pattern)


def test_the_pattern_may_be_another(saved, tmp_path):
    model = model_of("every-kind")
    other = make("wwFw", num_sink_tokens=1)
    other.to_json(tmp_path / "other.json")
    for given in (other, tmp_path / "other.json", str(tmp_path / "other.json")):
        again = swa_jax.load_model(saved, given)
        assert again.pattern == other
        assert_same_parameters(again, model.with_pattern(other))  # without routers: no layer is routed
    assert load_model(saved, "interleave-1-in-2").pattern.full_layers == (1, 3)
    with pytest.raises(ConfigError, match="pattern has 2 layers, the model 4"):
        load_model(saved, make("Fw"))


def test_window_sinks_and_decode_mode_may_be_given_beside_the_pattern(saved, tmp_path):
    given = {"window": 5, "sink_tokens": 2, "full_decode": True}
    expected = make("FwFw", sliding_window=5, num_sink_tokens=2, full_attention_decode=True)
    for pattern in ("interleave-1-in-2@0", make("FwFw")):
        assert swa_jax.load_model(saved, pattern, **given).pattern == expected
    own = load_model(saved).pattern
    assert swa_jax.load_model(saved, window=5).pattern == dataclasses.replace(own, sliding_window=5)
    with pytest.warns(UserWarning, match="a window of 4000 holds the model's whole context of 2048.*give a smaller"):
        swa_jax.load_model(saved, "window", window=4000)
    full = save_model(load_model(saved, "full"), tmp_path / "full")
    with pytest.raises(ConfigError, match="have no effect: the model's own pattern has full attention"):
        swa_jax.load_model(full, window=5)


def test_routers_come_from_the_disk_or_from_a_fixed_seed(saved, tmp_path):
    switch = make("SSwS")
    assert_same_parameters(load_model(saved, switch), base_model(SOFTMAX))
    plain = save_model(model_of("window"), tmp_path / "plain")
    one, two = load_model(plain, switch), load_model(plain, switch)
    assert_same_parameters(one, two)
    kernel, bias = (
        np.asarray(p[...]) for p in (one.layers.attention.router.proj.kernel, one.layers.attention.router.proj.bias)
    )
    assert kernel.shape == (4, SOFTMAX.hidden_size, 1)
    assert kernel.std() == pytest.approx(SOFTMAX.initializer_range, rel=0.3)
    assert len(np.unique(kernel)) == kernel.size  # every layer its own
    np.testing.assert_array_equal(bias, np.full((4, 1), SOFTMAX.router_bias_init))
    assert_same_parameters(one.with_pattern(make("wwww")), model_of("window"))


def test_a_dtype_can_be_asked_for(saved):
    model = load_model(saved, dtype=jnp.bfloat16)
    assert_same_parameters(load_model(saved, dtype="bfloat16"), model)
    for path, array in parameters(model).items():
        assert array.dtype == (jnp.float32 if "router" in path else jnp.bfloat16), path
    expected = np.asarray(model_of("every-kind").layers.mlp.up_proj.kernel[...]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(model.layers.mlp.up_proj.kernel[...]), expected)
    assert logits(model, jnp.zeros((1, 4), jnp.int32)).dtype == jnp.float32  # it runs


def test_no_initial_weights_are_drawn_for_a_model_that_is_loaded(saved, monkeypatch):
    def shapes_only(stddev):
        def init(key, shape, dtype):
            assert isinstance(key, jax.core.Tracer), "an initial weight was drawn"
            return jnp.zeros(shape, dtype)

        return init

    monkeypatch.setattr(nnx.initializers, "normal", shapes_only)
    model = load_model(saved)
    with pytest.raises(AssertionError, match="an initial weight was drawn"):
        Decoder(model.config, model.pattern, rngs=nnx.Rngs(0))


def test_a_given_config_is_kept_if_it_describes_the_model(tmp_path):
    hf = hf_of("qwen3-hybrid") | {"note": "mine", "torch_dtype": "float32"}
    model = load_model(import_model(GOLDEN / "qwen3-hybrid", tmp_path / "imported"), dtype=jnp.bfloat16)
    saved = save_model(model, tmp_path / "saved", hf_config=hf, tokenizer_from=tmp_path / "imported")
    written = json.loads((saved / "config.json").read_text())
    assert written == {key: value for key, value in hf.items() if key != "torch_dtype"} | {"dtype": "bfloat16"}
    assert (saved / "generation_config.json").is_file()
    assert_same_parameters(load_model(saved), model)
    with pytest.raises(ConfigError, match=r"another model: rope_theta is 10.0 there, 10000.0 in the model"):
        save_model(model, tmp_path / "other", hf_config=hf | {"rope_parameters": {"rope_theta": 10.0}})
    with pytest.raises(ConfigError, match="is there already"):
        save_model(model, saved)
    assert not (tmp_path / "other").exists()


def test_a_tokenizer_file_may_have_any_name(tmp_path):
    (tmp_path / "mine.json").write_text("of this model")
    (tmp_path / "tokenizer.json").write_text("of another one")
    saved = save_model(base_model(PLAIN), tmp_path / "saved", tokenizer_from=tmp_path / "mine.json")
    assert (saved / "tokenizer.json").read_text() == "of this model"


def test_a_flipped_byte_is_named_by_file(saved):
    file = saved / "weights" / "model.safetensors"
    whole, middle = file.read_bytes(), file.stat().st_size // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged: its SHA-256 .*: import it again"):
        load_model(saved)


def test_a_saved_model_was_imported_from_nothing(saved, tmp_path):
    assert written_from(saved) is None
    assert written_from(tmp_path / "absent") is None


def test_a_folder_that_is_not_whole_is_refused(saved, tmp_path):
    file = saved / "weights" / "model.safetensors"
    kept = file.rename(tmp_path / "kept")
    with pytest.raises(ConfigError, match=r"model.safetensors is missing: the checkpoint is not complete"):
        load_model(saved)
    kept.rename(file)
    for name in ("config.json", "manifest.json", "pattern.json"):
        text = (saved / name).read_text()
        (saved / name).unlink()
        with pytest.raises(ConfigError, match=f"{name} (is missing|does not exist)"):
            load_model(saved)
        (saved / name).write_text(text[:-5])
        with pytest.raises(ConfigError, match=f"{name} is not valid JSON"):
            load_model(saved)
        (saved / name).write_text(text)
    change_json(saved / "config.json", intermediate_size=41)
    with pytest.raises(ConfigError, match=r"weights are not those that config.json asks for"):
        load_model(saved)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"is not a checkpoint folder: it holds no weights/"):
        load_model(tmp_path)
    folder = shutil.copytree(GOLDEN / "qwen2-full", tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"is a Hugging Face folder, .* with: swa-jax import .*hf DST"):
        load_model(folder)


def test_the_sum_of_the_weights_is_of_what_the_files_hold(tmp_path):
    """Orbax names files at random, so other weights have other names too: here the names are alike."""
    found = []
    for name, content in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"sha256": {"weights/d": content}}))
        found.append(weights_sum(tmp_path / name))
    assert found[0] == found[2] != found[1]


def test_a_pattern_of_another_depth_names_the_files(saved):
    make("w" * 9, sliding_window=8).to_json(saved / "pattern.json")
    with pytest.raises(ConfigError, match=r"pattern.json does not fit .*config.json: the pattern has 9 layers"):
        load_model(saved)
