"""A small stand-in for RULER's data: files in the same form, of words that are made up."""

import json
import random
from pathlib import Path


def write_ruler_data(folder: Path) -> Path:
    """All six files; the same each time."""
    rng = random.Random(7)

    def words(count: int) -> list[str]:
        return ["".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)) for _ in range(count)]

    def sentences(count: int) -> list[str]:
        return [" ".join(words(rng.randint(4, 12))) + rng.choice([". ", ". ", ". ", "!"]) for _ in range(count)]

    def text(count: int) -> str:
        return "".join(sentences(count)).strip()

    squad = [
        {"paragraphs": [
            {"context": text(4), "qas": [
                {"question": f"What is {a} {p}?", "answers": [{"text": f"gold {a}{p}"}] * 2 + [{"text": f"{a}{p}"}],
                 "is_impossible": False},
                {"question": "What is not said?", "answers": [], "is_impossible": True},
            ]} for p in range(12)
        ]} for a in range(8)
    ]  # fmt: skip
    hotpot = [
        {
            "question": f"Which of {q}?",
            "answer": f"silver {q}",
            "supporting_facts": [[f"Title {q}1", 0], [f"Title {q}3", 1]],
            "context": [[f"Title {q}{p}", sentences(3)] for p in range(10)],
        }
        for q in range(12)
    ]
    # "blue-eyed" and "cat" make the same pair as "blue" and "eyed-cat".
    files = {
        "essays.txt": "".join(f"{line}\n" for line in sentences(900)),
        "squad.json": json.dumps({"data": squad}),
        "hotpotqa.json": json.dumps(hotpot),
        "nouns.txt": "\n".join(["eyed-cat", "cat ", *words(300)]),
        "adjectives.txt": "\n".join(["blue", "blue-eyed", "Blue", *words(80)]),
        "verbs.txt": "\n".join(["cat", *words(90)]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder
