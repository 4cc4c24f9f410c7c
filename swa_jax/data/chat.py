"""Chat templates: messages to the prompt that a model was trained with, by the template that its folder carries."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swa_jax.data.prompt_file import Prompt
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.errors import ConfigError
from swa_jax.files import read_json

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
THINKING = "enable_thinking"  # what Qwen3's template and others call it
PROMPT = "{prompt}"  # where the question stands in a text around it
ROLES = ("system", "user", "assistant", "tool")


class ChatTemplate:
    """A template of Hugging Face's kind, run in Jinja's sandbox: it can reach neither files nor Python."""

    def __init__(self, source: str, special_tokens: dict[str, str], where: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
        self._tokens, self._where = special_tokens, where
        try:
            self._template = environment.from_string(source)
            self._read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {where} cannot be read: {error}") from None

    def reads(self, option: str) -> bool:
        """Whether the template asks for an option of that name."""
        return option in self._read

    def render(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The prompt for the next reply. `options` are the template's own, such as `enable_thinking`.

        Raises:
          ConfigError: a message is not of the form {"role": …, "content": …}, or the template refuses the messages.
        """
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
                raise ConfigError(
                    f'messages[{i}] must be {{"role": one of {", ".join(ROLES)}, "content": text}}, got {message!r:.80}'
                )
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **{"tools": None} | self._tokens | options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise ConfigError(f"the chat template of {self._where} refuses these messages: {error}") from None


def load_chat_template(folder: str | Path) -> ChatTemplate | None:
    """The chat template of a model's folder, None if it has none.

    `chat_template.jinja` comes before the entry `chat_template` of `tokenizer_config.json`; of several named templates
    the one named "default" is taken.
    """
    folder = Path(folder)
    config_file, template_file = folder / "tokenizer_config.json", folder / TEMPLATE_FILE
    config = read_json(config_file) if config_file.is_file() else {}
    source, where = config.get("chat_template"), str(config_file)
    if template_file.is_file():
        source, where = template_file.read_text(encoding="utf-8"), str(template_file)
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"chat_template in {where} must be a text, got {source!r:.40}")
    tokens = {name: token for name in SPECIAL_TOKENS if (token := _text_of(config.get(name))) is not None}
    return ChatTemplate(source, tokens, where)


def chat_tokens(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[dict[str, Any]], **options: Any
) -> list[int]:
    """The tokens of the prompt for the next reply. The template writes the start token itself, where there is one."""
    return tokenizer.encode(template.render(messages, **options))


def prompt_tokens(
    folder: str | Path,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    chat: bool,
    thinking: bool | None = None,
) -> list[list[int]]:
    """The tokens of the prompts; messages, and with `chat` texts, go through the chat template of a model's folder.

    Args:
      thinking: whether the model is to think before it answers (the template's `enable_thinking`); None leaves that to
        the template.

    Raises:
      ConfigError: the folder has no template, though one is wanted; it refuses a prompt; or it cannot switch thinking.
    """
    wanted = chat or any(prompt.messages is not None for prompt in prompts)
    template = _wanted_template(folder, "give prompts as plain text") if wanted else None
    options = _thinking_options(folder, template, thinking)

    def encode(prompt: Prompt) -> list[int]:
        if template is None or (prompt.messages is None and not chat):
            assert prompt.text is not None
            return tokenizer.start_ids + tokenizer.encode(prompt.text)
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        return chat_tokens(tokenizer, template, messages, **options)

    return [encode(prompt) for prompt in prompts]


@dataclass(frozen=True)
class Wrap:
    """What stands around a question, as a chat model wants it.

    Attributes:
      start_tokens: the tokenizer's start tokens come first; a chat template writes them itself, where there are any.
      strips: blanks at the ends of the question are left out.
    """

    before: str = ""
    after: str = ""
    start_tokens: bool = True
    strips: bool = False

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
    """The chat template of a model's folder around a question of the user.

    Args:
      thinking: as of `prompt_tokens`.
      answers_at_once: the answer follows the template directly, so that a template which can switch thinking switches
        it off.

    Raises:
      ConfigError: the folder has no template, or one that cannot switch thinking or does not repeat a question once.
    """
    template = _wanted_template(
        folder, "leave out --chat, or name what stands around a question with --template"
    )
    if thinking is None and answers_at_once and template.reads(THINKING):
        thinking = False
    options = _thinking_options(folder, template, thinking)
    plain, spaced = (
        template.render([{"role": "user", "content": content}], **options)
        for content in (PROMPT, f"\n{PROMPT}\n")
    )
    if plain.count(PROMPT) != 1:
        raise ConfigError(
            f"the chat template of {folder} does not write a question exactly once: ask without it (--no-chat), "
            f"or name a file that holds {PROMPT} with --template, where there is that option"
        )
    before, _, after = plain.partition(PROMPT)
    return Wrap(before, after, start_tokens=False, strips=plain == spaced)


def chat_text(folder: str | Path, thinking: bool | None = None) -> Callable[..., str]:
    """The text of a chat by the template of a model's folder: of messages, and whether the next reply is to begin.

    `add_generation_prompt=False` ends the text with the last message, which is then the beginning of a reply.
    `thinking` and errors are as of `prompt_tokens`.
    """
    template = _wanted_template(folder, "leave out --chat")
    options = _thinking_options(folder, template, thinking)

    def text(messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        whole = template.render(messages, add_generation_prompt=add_generation_prompt, **options)
        if add_generation_prompt:
            return whole
        last = str(messages[-1]["content"]).strip()
        return whole[: whole.rindex(last) + len(last)] if last in whole else whole

    return text


def _wanted_template(folder: str | Path, instead: str) -> ChatTemplate:
    template = load_chat_template(folder)
    if template is None:
        raise ConfigError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): {instead}"
        )
    return template


def _thinking_options(
    folder: str | Path, template: ChatTemplate | None, thinking: bool | None
) -> dict[str, bool]:
    """The template's options that switch thinking. Raises `ConfigError` if there is no such switch."""
    if thinking is None:
        return {}
    if template is None or not template.reads(THINKING):
        raise ConfigError(
            "thinking cannot be switched on or off: "
            + (
                "it is the chat template that does so, and none is used; add --chat"
                if template is None
                else f"the chat template of {folder} does not read '{THINKING}'"
            )
        )
    return {THINKING: thinking}


def _text_of(token: Any) -> str | None:
    """A special token as `tokenizer_config.json` has it: a text, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as templates expect it: characters as they are, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for training; a prompt has its content alone."""

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
