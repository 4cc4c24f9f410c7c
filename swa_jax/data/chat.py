"""Chat templates: messages to the prompt that a model was trained with, by the template that its folder carries."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import parse_json, read_utf8
from swa_jax.data import template_process
from swa_jax.data.prompt_file import Prompt
from swa_jax.data.special_tokens import SETTINGS, named_tokens, read_beside
from swa_jax.data.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"  # a folder of the other templates, each in the file NAME.jinja
SECONDS, MEMORY = 10.0, 1 << 30  # what one rendering may take: processor time, and bytes of its process
THINKING = "enable_thinking"  # what Qwen3's template and others call it
# Of what is measured: prompts that hold today's date would be others tomorrow, and what is kept of them of no use.
MEASURED_DAY = "2024-07-26"
PROMPT = "{prompt}"  # where the question stands in a text around it
REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what most templates read
SAID = ("content", "tool_calls", *REASONING)  # a message has one of them


class ChatTemplate:
    """Templates of Hugging Face's kind, run in Jinja's sandbox by a process of their own (`template_process.py`).

    Args:
      sources: the template "default" and, for messages with tools, "tool_use".
      special_tokens: texts by the name that templates call them.
      where: the file, for sentences.

    Raises `ConfigError`: a template is none, or takes too much time or memory.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], where: str):
        self._tokens, self._where, self._names = special_tokens, where, sources.keys()
        command = [sys.executable, "-P", template_process.__file__, str(SECONDS), str(MEMORY)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        weakref.finalize(self, _end, self._process)
        self._reads = self._ask(dict(sources), "cannot be read")["reads"]

    def reads(self, option: str) -> bool:
        """Whether the template asks for an option of that name."""
        return option in self._reads

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        day: str | None = None,
        **options: Any,
    ) -> str:
        """The prompt for the next reply, as `apply_chat_template` of transformers makes it.

        Args:
          messages: objects with a role, and content, tool calls or reasoning.
          tools: what may be called, as JSON schemas.
          documents: what may be read, each with a title and a text.
          day: the date that the template is told, such as 2024-07-26; None: today's.
          options: the template's own, such as `enable_thinking`.

        Raises `ConfigError`: a message, tool or document has another form, or the template refuses them.
        """
        for i, message in enumerate(messages):
            if not (isinstance(message, dict) and isinstance(message.get("role"), str) and message.keys() & SAID):
                raise ConfigError(
                    f'messages[{i}] must be {{"role": text, "content": text}}, or have one of '
                    f"{', '.join(SAID[1:])} in place of the content; got {message!r:.80}"
                )
        for name, given in (("tools", tools), ("documents", documents)):
            if given is not None and not (isinstance(given, list) and all(isinstance(x, dict) for x in given)):
                raise ConfigError(f"{name} must be a list of objects, got {given!r:.80}")
        values = {
            "messages": [_without_nulls(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": documents,
            **self._tokens,
            **options,
        }
        template = "tool_use" if tools is not None and "tool_use" in self._names else "default"
        return self._ask({"template": template, "values": values, "day": day}, "refuses these messages")["text"]

    def _ask(self, question: dict[str, Any], verdict: str) -> dict[str, Any]:
        """The answer of the process; what it refuses ends the sentence that `verdict` begins."""
        asking, answering = self._process.stdin, self._process.stdout
        assert asking is not None
        assert answering is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: then it gives no answer either
            asking.write(json.dumps(question).encode() + b"\n")
            asking.flush()
        if line := answering.readline():
            answer: dict[str, Any] = json.loads(line)
        elif self._process.wait() == -signal.SIGPROF:
            answer = {"refused": f"it takes longer than {SECONDS:g} s"}
        else:
            answer = {"refused": f"its process has ended with status {self._process.returncode}"}
        if "refused" in answer:
            raise ConfigError(f"the chat template of {self._where} {verdict}: {answer['refused']}")
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """A message without keys that have no value, and its reasoning under the two names that templates know."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {REASONING[0]: reasoning}


def load_chat_template(folder: str | Path) -> ChatTemplate | None:
    """The chat template of a model's folder, None if it has none.

    `chat_template.jinja` and `additional_chat_templates/NAME.jinja` come before the entry `chat_template` of
    `tokenizer_config.json`, which may be a list of named templates.

    Raises `ConfigError`: a file cannot be read, or none of several templates is named "default".
    """
    folder = Path(folder)
    files = read_beside(folder)
    config_file, template_file = folder / SETTINGS, folder / TEMPLATE_FILE
    source = parse_json(files[SETTINGS], config_file).get("chat_template") if SETTINGS in files else None
    where = config_file
    own = {"default": template_file} if template_file.is_file() else {}
    if own := own | {file.stem: file for file in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}:
        where = template_file
        source = [{"name": name, "template": read_utf8(file)} for name, file in own.items()]
    if source is None:
        return None
    named = source if isinstance(source, list) else [{"name": "default", "template": source}]
    sources: dict[Any, Any] = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
    if not all(isinstance(part, str) for one in sources.items() for part in one):
        raise ConfigError(f"chat_template in {where} must be a text, or a list of named ones, got {source!r:.80}")
    if "default" not in sources:
        raise ConfigError(
            f"chat_template in {where} must have one template named 'default', got {', '.join(sources) or 'none'}"
        )
    return ChatTemplate(sources, named_tokens(files, folder), str(where))


def chat_tokens(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[dict[str, Any]], **options: Any
) -> list[int]:
    """The tokens of the prompt for the next reply. The template writes the start token itself, where there is one."""
    return tokenizer.encode(template.render(messages, **options))


def prompt_tokens(
    folder: str | Path, tokenizer: Tokenizer, prompts: Sequence[Prompt], chat: bool, thinking: bool | None = None
) -> list[list[int]]:
    """The tokens of the prompts; messages, and with `chat` texts, go through the chat template of a model's folder.

    Args:
      thinking: whether the model is to think before it answers (the template's `enable_thinking`); None leaves that to
        the template.

    Raises:
      ConfigError: the folder has no template, though one is wanted; it refuses a prompt; or it cannot switch thinking.
    """
    wanted = chat or any(prompt.messages is not None for prompt in prompts)
    template = (
        _wanted_template(folder, "leave out --chat" if chat else "give prompts as plain text") if wanted else None
    )
    options = thinking_options(template, thinking)

    def encode(prompt: Prompt) -> list[int]:
        if template is None or (prompt.messages is None and not chat):
            assert prompt.text is not None
            return tokenizer.start_ids + tokenizer.encode(prompt.text)
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        record = prompt.record or {}
        given = {key: record[key] for key in ("tools", "documents") if key in record}
        return chat_tokens(tokenizer, template, messages, **given, **options)

    found = []
    for number, prompt in enumerate(prompts, 1):
        try:
            found.append(encode(prompt))
        except ConfigError as error:
            where = prompt.where or (f"prompt {number}" if len(prompts) > 1 else "")
            raise ConfigError(f"{where}: {error}" if where else str(error)) from None
    return found


@dataclass(frozen=True)
class Wrap:
    """What stands around a question, as a chat model wants it."""

    before: str = ""
    after: str = ""
    start_tokens: bool = True  # the tokenizer's come first; a chat template writes them itself, where there are any
    strips: bool = False  # blanks at the ends of the question are left out

    @classmethod
    def of(cls, text: str | Wrap) -> Wrap:
        """From a text that holds {prompt} once. Raises `ConfigError` if it does not."""
        if isinstance(text, Wrap):
            return text
        if text.count(PROMPT) != 1:
            raise ConfigError(f"the template around a prompt must hold {PROMPT} exactly once")
        before, _, after = text.partition(PROMPT)
        return cls(before, after)

    def opening(self, tokenizer: Any) -> list[int]:
        """The start tokens before the text, if any."""
        return list(getattr(tokenizer, "start_ids", [])) if self.start_tokens else []

    def inside(self, question: str) -> str:
        """The question as it stands between `before` and `after`."""
        return question.strip() if self.strips else question

    def around(self, question: str, prefix: str = "") -> str:
        """The whole text; `prefix`, the beginning of the answer, loses its first blanks behind a template's end."""
        return self.before + self.inside(question) + self.after + self.begun(prefix)

    def begun(self, answer: str) -> str:
        """An answer, or its beginning, as it follows the text."""
        return answer.lstrip() if self.after else answer


def find_wrap(folder: str | Path, chat: bool | None, answers_at_once: bool = True) -> Wrap | None:
    """`chat_wrap` where `chat` says so or, where it says nothing, where the folder has a template; else None."""
    if chat is False or (chat is None and load_chat_template(folder) is None):
        return None
    return chat_wrap(folder, answers_at_once=answers_at_once)


def chat_wrap(folder: str | Path, thinking: bool | None = None, answers_at_once: bool = False) -> Wrap:
    """The chat template of a model's folder around a question of the user, on the day `MEASURED_DAY`.

    Args:
      thinking: as of `prompt_tokens`.
      answers_at_once: the answer follows the template directly, so that a template which can switch thinking switches
        it off.

    Raises:
      ConfigError: the folder has no template, or one that cannot switch thinking or does not repeat a question once.
    """
    template = _wanted_template(folder, "leave out --chat, or name what stands around a question with --template")
    if thinking is None and answers_at_once and template.reads(THINKING):
        thinking = False
    options = thinking_options(template, thinking)
    plain, spaced = (
        template.render([{"role": "user", "content": content}], day=MEASURED_DAY, **options)
        for content in (PROMPT, f"\n{PROMPT}\n")
    )
    if plain.count(PROMPT) != 1:
        raise ConfigError(
            f"the model's chat template does not write a question exactly once: ask without it (--no-chat), "
            f"or name a file that holds {PROMPT} with --template, where there is that option"
        )
    before, _, after = plain.partition(PROMPT)
    return Wrap(before, after, start_tokens=False, strips=plain == spaced)


def chat_text(folder: str | Path, thinking: bool | None = None) -> Callable[..., str]:
    """The text of a chat by the template of a model's folder: of messages, and whether the next reply is to begin.

    The day is `MEASURED_DAY`. `add_generation_prompt=False` ends the text with the last message, which is then the
    beginning of a reply. `thinking` and errors are as of `prompt_tokens`.
    """
    template = _wanted_template(folder, "leave out --chat")
    options = thinking_options(template, thinking)

    def text(messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        whole = template.render(messages, add_generation_prompt=add_generation_prompt, day=MEASURED_DAY, **options)
        if add_generation_prompt:
            return whole
        last = str(messages[-1].get("content", "")).strip()
        return whole[: whole.rindex(last) + len(last)] if last in whole else whole

    return text


def _wanted_template(folder: str | Path, instead: str) -> ChatTemplate:
    template = load_chat_template(folder)
    if template is None:
        raise ConfigError(
            "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
            + instead
        )
    return template


def thinking_options(template: ChatTemplate | None, thinking: bool | None) -> dict[str, Any]:
    """The template's options that switch thinking. Raises `ConfigError` if there is no such switch."""
    if thinking is None:
        return {}
    if template is None or not template.reads(THINKING):
        raise ConfigError(
            "thinking cannot be switched on or off: "
            + (
                "it is the chat template that does so, and none is used; add --chat"
                if template is None
                else f"the model's chat template does not read '{THINKING}'"
            )
        )
    return {THINKING: thinking}
