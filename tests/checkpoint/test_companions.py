"""What an import says of the files beside the weights."""

import shutil

import pytest
import tokenizers
from golden_models import GOLDEN, change_json
from tokenizers import models, processors

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.hf_import import check_source


@pytest.fixture
def source(tmp_path):
    folder = shutil.copytree(GOLDEN / "llama-plain", tmp_path / "source")  # 131 embeddings
    (folder / "generation_config.json").unlink()
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<turn>": 3, "<image>": 131}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.add_special_tokens(["<s>", "</s>", "<turn>", "<image>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_an_import_says_what_starts_a_text_and_what_ends_a_reply(source):
    change_json(source / "special_tokens_map.json", eos_token="</s>")
    change_json(source / "config.json", eos_token_id=[2, 3])
    notes = check_source(source).notes
    assert notes[0] == "texts begin with '<s>' (id 1); replies end with '</s>' (id 2) or '<turn>' (id 3)"
    assert notes[1] == (
        f"{source}/tokenizer.json has ids up to 131, the model embeddings for ids below 131 only: texts with the "
        "others cannot be read"
    )
    change_json(source / "generation_config.json", eos_token_id=[131, 2])  # what cannot be drawn ends nothing
    assert check_source(source).notes[0].endswith("replies end with '</s>' (id 2)")


def test_an_import_says_which_settings_of_generation_replies_do_not_take(source):
    """As of Qwen2.5, whose greedy replies in transformers have a penalty, too."""
    settings = {"top_k": 20, "top_p": 1.0, "temperature": 0.7, "repetition_penalty": 1.05}
    change_json(source / "generation_config.json", do_sample=True, **settings)
    said = "generation_config.json asks for temperature = 0.7, top_k = 20: repeat that as options, else "
    penalty = "generation_config.json asks for repetition_penalty = 1.05, which is not applied here"
    assert check_source(source).notes[1:3] == [said + "replies take the likeliest tokens", penalty]
    change_json(source / "generation_config.json", do_sample=False)
    assert penalty == check_source(source).notes[1]


@pytest.mark.parametrize(
    ("text", "special", "said"),
    [
        ("$A", [], "no token begins a text; no token ends a reply"),
        ("<image> $A", [("<image>", 131)], "'<image>' has the id 131, but the model has 131 embeddings"),
    ],
)
def test_how_texts_begin(source, text, special, said):
    change_json(source / "config.json", eos_token_id=None)
    backend = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single=text, special_tokens=special)
    backend.save(str(source / "tokenizer.json"))
    if not special:
        assert check_source(source).notes[0] == said
        return
    with pytest.raises(ConfigError, match=said):
        check_source(source)
