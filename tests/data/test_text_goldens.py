"""Chat templates, named and end tokens of drawn folders, against transformers (`python -m scripts.goldens texts`)."""

import json
from pathlib import Path

import pytest

from swa_jax.base.errors import ConfigError
from swa_jax.data.chat import ChatTemplate, load_chat_template
from swa_jax.data.special_tokens import named_tokens, read_beside, reply_ends

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "texts.json").read_text())


def rendered(template: ChatTemplate, conversation: list, **options) -> str | None:
    try:
        return template.render(conversation, **options)
    except ConfigError:
        return None


def differences(folder: Path, case: dict) -> dict:
    """What of a case is not as transformers has it."""
    for name, content in case["files"].items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    files = read_beside(folder)
    found = {"tokens": named_tokens(files, folder), "ends": reply_ends(files, folder)}
    template = load_chat_template(folder)
    assert template is not None
    found["texts"] = [rendered(template, **chat) for chat in case["chats"]]
    return {key: (value, case[key]) for key, value in found.items() if value != case[key]}


@pytest.mark.parametrize("part", range(4))
def test_as_in_transformers(tmp_path_factory, part):
    cases = GOLDEN["cases"][part::4]
    wrong = [differences(tmp_path_factory.mktemp("case"), case) for case in cases]
    assert not any(wrong), [w for w in wrong if w]
