"""Links in the Markdown files lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("swa_jax/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(file: Path) -> set[str]:
    """Of the headings, as GitHub makes them: lower case, punctuation dropped, blanks to hyphens."""
    text = re.sub(r"(?ms)^```.*?^```", "", file.read_text())
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    for link in LINK.findall(file.read_text()):
        if re.match(r"[a-z]+:", link):
            continue  # another site's
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"{file.name} links to {link}: there is no {target}"
        if anchor:
            assert anchor in anchors(target), f"{file.name} links to {link}: no such heading"
