"""Answers that are numbers: what an answer settles on, and whether it is right."""

from __future__ import annotations

import re
from decimal import Decimal

# Thousands may stand between commas. A hyphen behind a word or a number is no minus sign: "item-3", "10-3".
_NUMBER = re.compile(r"(?:(?<![\w).])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)-?\.\d+")


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without its unit; None if there is none. Fractions and powers are not read."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-").replace("-$", "$-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def same_number(answer: str, reference: str) -> float:
    """1 if the answer ends with the number that the reference ends with; 42, 42.0 and $42 are the same."""
    said = last_number(answer)
    return float(said is not None and said == last_number(reference))
