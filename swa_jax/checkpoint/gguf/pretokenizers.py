"""How a text is cut into words before byte-level BPE, by the name that a GGUF file has for it.

A file does not say the rule itself. The names and what they stand for are llama.cpp's (src/llama-vocab.cpp), which took
the rules from the `tokenizer.json` of the models; here they stand as those files have them, and not in llama.cpp's
rewriting where the two differ.
"""

from __future__ import annotations

from typing import NamedTuple


class WordRule(NamedTuple):
    """How a text is cut into words."""

    splits: tuple[str, ...]  # regular expressions; each cuts the pieces that the one before it left
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    start: bool = False  # whether a text begins with the start token, where the file does not say
    nfc: bool = False  # texts are brought into Unicode's composed form first


_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}", marks: str = r"[\r\n]*", spaces: str = _SPACES) -> str:
    """The rule of GPT-4 (cl100k) and its many children, which differ in how many digits make a word."""
    return rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{marks}|{spaces}"


def _cased(digits: str, ending: str = "") -> str:
    """The rule of GPT-4o (o200k): a word is capitals, then small letters."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{_UPPER}*{_LOWER}+{ending}|{before}{_UPPER}+{_LOWER}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = _words(r"\p{N}", r"[\p{L}\p{M}]").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_GPT4O = _cased(r"\p{N}{1,3}", f"{_ENDING}?")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_SPACES}",
)
_ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_GPT2_NAMES = (
    "gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "trillion", "granite-docling", "mellum", "modern-bert",
    "a.x-4.0", "gigachat", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de",
)  # fmt: skip
_DIGIT_NAMES = ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2")
_LLAMA3_NAMES = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
)  # fmt: skip

RULES: dict[str, WordRule] = {
    **dict.fromkeys(_GPT2_NAMES, WordRule((_GPT2,))),
    **dict.fromkeys(_DIGIT_NAMES, WordRule((r"\p{N}", _GPT2))),
    "command-r": WordRule((r"\p{N}", _GPT2), nfc=True),
    **dict.fromkeys(_LLAMA3_NAMES, WordRule((_LLAMA3,), whole_words=True, start=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), WordRule((_LLAMA3,))),
    "glm4": WordRule((_LLAMA3,), whole_words=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), WordRule((_QWEN2,), nfc=True)),
    **dict.fromkeys(("kormo", "f2llmv2", "stablelm2", "hunyuan", "grok-2", "solar-open"), WordRule((_QWEN2,))),
    "qwen35": WordRule((_QWEN35,), nfc=True),
    "tekken": WordRule((_cased(r"\p{N}"),), whole_words=True, start=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), WordRule((_GPT4O,))),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), WordRule((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    "exaone-moe": WordRule(
        (_words(r"\p{N}", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)", r"[\r\n/]?", r"\s*[\r\n]|\s+(?!\S)|\s+"),)
    ),
    "seed-coder": WordRule(
        (rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "bailingmoe": WordRule(
        (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
    "laguna": WordRule((r"[^\n]+|[\n]+", _QWEN2)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), WordRule(_DEEPSEEK3)),
    "afmoe": WordRule((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3[2])),
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "falcon": WordRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
}
