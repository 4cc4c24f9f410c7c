"""The plainest tokenizer, for tests of how prompts are put together."""


class Characters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))
