"""What an import says of the files beside the weights."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, processors

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.hf_import import check_source

GOLDEN = Path(__file__).parents[1] / "golden"  # of models with 131 embeddings


@pytest.fixture
def source(tmp_path):
    folder = shutil.copytree(GOLDEN / "llama-plain", tmp_path / "source")
    (folder / "generation_config.json").unlink()
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<turn>": 3, "<image>": 131}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.add_special_tokens(["<s>", "</s>", "<turn>", "<image>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def change(folder: Path, name: str, **keys) -> None:
    file = folder / name
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(held | keys))


def test_an_import_says_what_starts_a_text_and_what_ends_a_reply(source):
    change(source, "special_tokens_map.json", eos_token="</s>")
    change(source, "config.json", eos_token_id=[2, 3])
    notes = check_source(source).notes
    assert notes[0] == "texts begin with '<s>' (id 1); replies end with '</s>' (id 2) or '<turn>' (id 3)"
    assert notes[1] == (
        f"{source}/tokenizer.json has ids up to 131, the model embeddings for ids below 131 only: texts with the "
        "others cannot be read"
    )
    change(source, "generation_config.json", eos_token_id=[131, 2])  # what cannot be drawn ends nothing
    assert check_source(source).notes[0].endswith("replies end with '</s>' (id 2)")


def test_a_tokenizer_that_names_nothing(source):
    change(source, "config.json", eos_token_id=None)
    backend = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    backend.save(str(source / "tokenizer.json"))
    assert check_source(source).notes[0] == "no token begins a text; no token ends a reply"


def test_a_tokenizer_whose_texts_cannot_begin(source):
    backend = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<image> $A", special_tokens=[("<image>", 131)])
    backend.save(str(source / "tokenizer.json"))
    with pytest.raises(ConfigError, match="the tokenizer's '<image>' has the id 131, but the model has 131 embeddings"):
        check_source(source)
