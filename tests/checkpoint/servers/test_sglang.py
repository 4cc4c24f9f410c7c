"""SGLang's own classes on our exports: the windows of the layers, and which layers have the short pool.

Every golden model, with every kind of pattern that the table says SGLang runs. Nothing is computed: that wants a GPU.
"""

import dataclasses
import itertools

import pytest
from exported_patterns import patterns
from golden_models import MODELS, hf_of
from line_process import line_process

from swa_jax.base.files import write_json
from swa_jax.checkpoint.families import hf_pattern
from swa_jax.checkpoint.servers import find_served
from swa_jax.model.layer_types import FULL


@pytest.fixture(scope="session")
def sglang(tmp_path_factory):
    """A function from an export's `config.json` to what `sglang_reading.py` says of it."""
    folder, numbers = tmp_path_factory.mktemp("sglang"), itertools.count()
    with line_process("sglang_reading.py", folder / "log", str(folder / "store")) as ask:

        def read(config: dict, disable: bool = False) -> dict:
            export = folder / str(next(numbers))  # it remembers what it has read
            export.mkdir()
            write_json(export / "config.json", config)
            return ask(folder=str(export), disable=disable)

        yield read


@pytest.mark.parametrize("model", MODELS)
def test_sglang_reads_windows_and_pools_as_the_table_says(model, sglang):
    hf = hf_of(model)
    tried = patterns(hf["num_hidden_layers"])
    if (own := hf_pattern(hf)).sliding_window:
        tried["own"] = dataclasses.replace(own, sliding_window=5)
    for name, pattern in tried.items():
        if (served := find_served("sglang", hf, pattern)) is None:
            continue
        said = sglang(served.hf, "--disable-hybrid-swa-memory" in served.command)
        assert "refused" not in said, (name, said)
        # A window as long as the context is none.
        keys = [
            None if before < 0 or before + 1 >= hf["max_position_embeddings"] else before + 1
            for before in said["windows"]
        ]
        assert keys == [None if kind == FULL else pattern.sliding_window for kind in pattern.layer_types], name
        windowed = [layer for layer, kind in enumerate(pattern.layer_types) if kind != FULL]
        assert said["short"] == (windowed if windowed and served.runs.frees else None), name
        assert said["class"] == served.runs.name, name


def test_another_window_is_noticed(sglang):
    hf = hf_of("mellum-hybrid")
    served = find_served("sglang", hf, dataclasses.replace(hf_pattern(hf), sliding_window=5))
    before = sglang(served.hf)["windows"]
    assert max(sglang(served.hf | {"sliding_window": 6})["windows"]) == max(before) + 1
    full = served.hf | {"layer_types": ["full_attention"] * hf["num_hidden_layers"]}
    assert set(sglang(full, disable=True)["windows"]) == {-1}
