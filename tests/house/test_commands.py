"""Every command of the pages is run, page by page and in the page's order, in a copy of the repository.

bash runs each shell block. `swa-jax`, `python`, `make` and `pip` are, while it does, shrunk_command.py, which has the
tables of what is made smaller and of what is not run, with the reasons. Files of the reader's own (texts, data sets, a
judge) are made by `own_files`.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruler_files import write_ruler_data
from shrunk_command import ADDED, INSTEAD, MOST, NOT_RUN, ONCE, lower, reason_not_to_run, shrink, starts

from swa_jax.model.recipes import PUBLISHED, read_recipe

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "swa_jax/chains/README.md",
    "swa_jax/recall/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/data/*.md")]),
]
PROGRAMS = ("swa-jax", "python", "make", "pip")
FEWER_TURNS = {"for seed in 0 1 2;": "for seed in 0;", "--seeds 0 1 2": "--seeds 0"}
# By the time on two idle cores: pages of a few seconds, and of up to a minute. The others take longer, or have none.
QUICK = ("CONTRIBUTING.md", "docs/commands.md", "docs/training-keys.md")
SLOW = ("docs/data.md", "docs/serving.md")


def blocks_of(text: str) -> list[str]:
    """The shell blocks of a page, and what stands in its text as `command`, in the page's order.

    A command in the text has options or arguments; one with a placeholder, such as CONFIG, is not to be copied.
    """
    found = []
    for match in re.finditer(r"(?m)^ *```sh\n([\s\S]*?)^ *```|^ *```[\s\S]*?^ *```|`([^`\n]+)`", text):
        block, words = match[1], (match[2] or "").split()
        if block:
            found.append(block)
        elif words and words[0] in PROGRAMS and is_whole(words):
            found.append(match[2])
    return found


def is_whole(words: list[str]) -> bool:
    """Whether a command in the text can be copied as it stands: `swa-jax import` alone is a name."""
    placeholder = any(re.fullmatch(r"\[.*|\.\.\.|([A-Z]+:)?[A-Z]+(\.yaml)?", word) for word in words)
    if placeholder or len(words) == 1:
        return False
    return words[0] == "make" or any(re.search(r"[-/.=_\d]", word) for word in words[1:])


def commands_in(block: str) -> list[list[str]]:
    """The first words of the commands of a block, up to what a shell would put in: how often they should be run."""
    programs = "|".join(PROGRAMS)
    words = r"(?: [^\s#$;&|'\"*]+(?=\s|$))*"
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    found = [re.match(rf"(?:.*\bdo |[A-Z_]+=\S+ )?\s*((?:{programs})\b{words})", line) for line in lines]
    return [match[1].split() for match in found if match]


# ---- a reader's folder ----


def own_files(folder: Path) -> None:
    """What the pages say is the reader's: an environment, settings of a pod, texts, data sets, a judge."""
    files = {
        ".venv/bin/activate": "",
        "pod.yaml": (ROOT / "launch/example.yaml").read_text(),
        "book.txt": "All that is gold does not glitter, not all those who wander are lost. " * 100,
        "essays/one.txt": "An essay is an attempt. One tries, and sees what comes of it. " * 200,
        "data/web/one.jsonl": "".join(json.dumps({"text": f"Page {i} of the web. " * 30}) + "\n" for i in range(9)),
        "LongBench/data/hotpotqa.jsonl": json.dumps(
            {"context": "Ann came first.", "input": "Who?", "answers": ["Ann"], "all_classes": None}
        ),
        "LongBench/dataset2prompt.json": json.dumps({"hotpotqa": "Read {context} Question: {input}"}),
        "longmemeval_s.json": json.dumps([{
            "question_id": "7", "question_type": "multi-session", "question": "When?", "answer": "May",
            "question_date": "2024/05/01", "haystack_dates": ["2024/04/01"],
            "haystack_sessions": [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]],
        }]),
        "questions.jsonl": "".join(
            json.dumps({"prompt": f"def add_{i}(a, b):\n    return a +", "answer": "b"}) + "\n" for i in range(3)
        ),
        "problems.jsonl": json.dumps({"question": "How much is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}),
        "keep.py": "import json, sys\nsys.exit(len(json.load(sys.stdin)['text']) < 2)\n",
        "judge.py": "import sys\nfor line in sys.stdin:\n    print('yes')\n",
    }  # fmt: skip
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    write_ruler_data(folder / "data/ruler")
    (folder / "models/mine").mkdir(parents=True)
    shutil.copy(ROOT / "swa_jax/recall/tokenizer.json", folder / "models/mine")


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository, with a reader's own files."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "checkpoints", "build", "dist")
    folder = shutil.copytree(ROOT, tmp_path / "swa-jax", ignore=left_out)
    own_files(folder)
    return folder


@pytest.fixture
def programs(tmp_path):
    """A folder with the programs that a page calls; each runs shrunk_command.py."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = Path(__file__).with_name("shrunk_command.py")
    for name in PROGRAMS:
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(script), name])} "$@"\n')
        file.chmod(0o755)
    return folder


def run_page(page: str, text: str, clone: Path, programs: Path) -> tuple[list[dict], list[str]]:
    """Runs a page's commands: one line for each, from shrunk_command.py, and what went wrong, a string for each."""
    log = clone.parent / "commands.jsonl"
    environment = os.environ | {
        "PATH": f"{programs}:/usr/bin:/bin",
        "PYTHONPATH": str(clone),
        "COMMANDS": str(log),
        "PAGE": page,
        "COLUMNS": "120",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling takes longer than running here
    }
    lines: list[dict] = []
    problems = []
    for block in blocks_of(text):
        for loop, shorter in FEWER_TURNS.items():
            block = block.replace(loop, shorter)
        shell = subprocess.run(["bash", "-e", "-c", block], cwd=clone, env=environment, capture_output=True, text=True)
        new = [json.loads(line) for line in log.read_text().splitlines()][len(lines) :] if log.exists() else []
        lines += new
        problems += [f"{line['ran']}\n{line['problem']}:\n{line['end']}" for line in new if line.get("problem")]
        for words in commands_in(block):
            if not any(shlex.split(line["command"])[: len(words)] == words for line in new):
                problems.append(f"{shlex.join(words)}: was not reached")
        if shell.returncode and not problems:
            problems.append(f"{block}\nexit status {shell.returncode}:\n{shell.stderr}")
    return lines, problems


# ---- tests ----


def marked(page: str):
    return pytest.param(page, marks=() if page in QUICK else pytest.mark.slow if page in SLOW else pytest.mark.long)


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if blocks_of((ROOT / page).read_text())])
def test_commands_of_a_page(page, clone, programs):
    lines, problems = run_page(page, (ROOT / page).read_text(), clone, programs)
    for line in lines:
        print(f"{line.get('seconds', 0):6.1f} s of CPU  {line.get('ran') or line['command'] + ': ' + line['not run']}")
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("swa-jax pattern full --layers 4", None),
        ("swa-jax pattern full --layerz 4", "is not an option of"),
        ("swa-jacks --help", "swa-jacks: command not found"),
        ("python -c 'print(1 / 0)' || true", "ZeroDivisionError"),
        ("python -c 'pass'", "prints nothing"),
        ("make demmo", "No rule to make target"),
        ("python -c 'print(1)' --out runs/x.json", "there is no runs/x.json"),
        ("for i in 0 1; do\n  python -c 'exit(3)' &\ndone; wait", "exit status 3"),
        ("[ -e nowhere ] && python -c 'print(1)'", "exit status 1"),
        ("if [ -e nowhere ]; then\npython -c 'print(1)'\nfi", "was not reached"),
    ],
)
def test_a_broken_command_is_found(block, problem, tmp_path, programs):
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("configs", "swa_jax", "pallas_kernels", "scripts", "Makefile"):
        (clone / name).symlink_to(ROOT / name)
    _, problems = run_page("page.md", f"# Title\n\n```sh\n{block}\n```\n", clone, programs)
    if problem is None:
        assert problems == []
    else:
        assert problem in "\n".join(problems)


def test_commands_are_found_in_the_text():
    text = "`make`, `swa-jax import`, `swa-jax train CONFIG --x`, `make demo`, `swa-jax pattern full --layers 4`.\n\n"
    text += " ```sh\n P=x\n swa-jax demo \\\n   --out $P/y  # more\n for i in 0; do swa-jax train a; done\n ```\n"
    blocks = blocks_of(text + "```python\nswa-jax no\n```\n")
    assert blocks[:2] == ["make demo", "swa-jax pattern full --layers 4"]
    assert [commands_in(block) for block in blocks[2:]] == [[["swa-jax", "demo", "--out"], ["swa-jax", "train"]]]


def test_every_rule_is_still_needed():
    """A replacement, or a command that is left out, names something that stands in a page."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    commands = [words for block in blocks_of(text) for words in commands_in(block)]
    for beginning in [*ADDED, *NOT_RUN, *ONCE]:
        assert any(starts(words, beginning) for words in commands), f"no page has '{beginning}'"
    homes = [ONCE.get(" ".join(words[:2]), "") for words in commands]
    small = [
        words
        for words, home in zip(commands, homes, strict=True)
        if words[-1] != "for" and reason_not_to_run(words, home) is None
    ]
    options = set().union(*(shrink(words) for words in small if len(words) > 2 and "train" not in words))
    assert options >= MOST.keys(), f"no page needs {sorted(MOST.keys() - options)}"
    for part in [*INSTEAD.keys() - {*PUBLISHED}, *FEWER_TURNS]:
        assert part in text, f"no page has '{part}'"
    assert set(PAGES) >= {*SLOW, *QUICK}


def test_recipes_of_the_pages_exist():
    """Where a command names many patterns, the first ones are run; the others are read here."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    recipes = {name for name in re.findall(r"--pattern ([^\s`]+)", text) if not name.endswith(".json")}
    assert len(recipes) > 10
    for recipe in recipes - {*PUBLISHED}:
        read_recipe(recipe, range(8), seed=0)


def test_a_command_is_shrunk():
    words = shlex.split("swa-jax evaluate ruler Qwen/Qwen3-0.6B --lengths 4096,8192 --examples 50 --window 2048")
    small = "swa-jax evaluate ruler swa_jax/recall --lengths 512 --examples 2 --window 48 --lengths 1536"
    assert shrink(words)[:12] == shlex.split(small)
    assert lower("128,512,full", 256) == "128,256,full"
    words = shlex.split("swa-jax train configs/recall.yaml output=runs/x stages.0.steps=300")
    assert shlex.join(shrink(words)) == (
        "swa-jax train configs/recall.yaml stages.0.steps=1 stages.1.steps=1 stages.2.steps=1 stages.3.steps=1 "
        "stages.4.steps=1 output=runs/x"
    )
