"""What stands around a question: the model's chat template, or a text of the user's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swa_jax.base.errors import ConfigError
from swa_jax.cli.generate_options import Thinking
from swa_jax.cli.groups import Options
from swa_jax.cli.options import Chat, in_chat

if TYPE_CHECKING:
    from swa_jax.data.chat import Wrap

THINKING_WITHOUT_CHAT = "--thinking and --no-thinking switch the checkpoint's chat template: add --chat"


@dataclasses.dataclass
class Around(Options):
    """The options; without any of them a question stands in the model's chat template, if it has one."""

    chat: Chat = None
    thinking: Thinking = None
    template: Annotated[
        Path | None, in_chat(help="In place of a chat template: a file with {prompt} in the text around it.")
    ] = None

    def wrap(self, checkpoint: Path, answers_at_once: str | None = None) -> Wrap:
        """What stands around a question to this model.

        Args:
          answers_at_once: whose prompts these are, if the answer is to follow them directly.

        Raises:
          ConfigError: options that do not go together, no template in the checkpoint, or no thinking to switch.
        """
        from swa_jax.data.chat import Wrap, chat_wrap, find_wrap
        from swa_jax.data.haystack import read_text

        if self.chat and self.template is not None:
            raise ConfigError(
                "--chat takes the checkpoint's own template, and --template names another: give one of them"
            )
        plain = self.chat is False or self.template is not None
        if self.thinking is not None and plain:
            raise ConfigError(THINKING_WITHOUT_CHAT)
        if self.thinking and answers_at_once is not None:
            raise ConfigError(
                f"--thinking leaves no answer to measure, because the answer follows {answers_at_once} at once: leave "
                "it out"
            )
        if self.template is not None:
            try:
                return Wrap.of(read_text([self.template]))
            except ConfigError as error:
                raise ConfigError(f"--template {self.template}: {error}") from None
        if self.thinking is not None:
            return chat_wrap(checkpoint, self.thinking)
        return find_wrap(checkpoint, self.chat, answers_at_once is not None) or Wrap()
