"""Links in Markdown files lead to files and headings that exist; pages are on the site and say whom they are for."""

import functools
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer
from python_process import python

from swa_jax.cli.main import app

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("swa_jax/**/*.md")])
PAGES = sorted(ROOT.glob("docs/*.md"))
TABLES = sorted(ROOT.glob("docs/data/*.md"))  # not on the site: long tables, with the commands that make them
UsageError = typer.BadParameter.__base__  # of the click that typer has inside
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(file: Path) -> set[str]:
    """Of the headings, as GitHub makes them: lower case, punctuation dropped, blanks to hyphens."""
    text = re.sub(r"(?ms)^```.*?^```", "", file.read_text())
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands_of(text: str) -> list[list[str]]:
    """The words of each `swa-jax` command in a page's shell blocks; 1 stands for what a shell would put in."""
    found = []
    for block in re.findall(r"(?m)^ *```sh\n([\s\S]*?)^ *```", text):
        block = re.sub(r"\$\(printf .*?\)", "", block.replace("\\\n", " "))  # options, made by a loop
        block = re.sub(r"\$\(.*\)|\$\w+", "1", block)
        found += re.findall(r"(?m)(?:^|do )\s*swa-jax ([^;&|\n]*)", block)
    return [shlex.split(words, comments=True) for words in found]


@functools.cache
def command_line():
    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Parse a command as the command line would, and run nothing. Raises `UsageError` where it is refused."""
    command, context = command_line(), None
    name, arguments = "swa-jax", words
    while True:
        context = command.make_context(name, list(arguments), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    """Out of the docs to files alone: the site offers them as downloads or in the repository."""
    for link in LINK.findall(file.read_text()):
        if re.match(r"[a-z]+:", link):
            continue  # another site's
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"{file.name} links to {link}: there is no {target}"
        assert target.is_file() or file not in PAGES or not link.startswith("../"), f"{link} is no file"
        if anchor:
            assert anchor in anchors(target), f"{file.name} links to {link}: no such heading"


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *PAGES, *TABLES, *(ROOT / f"swa_jax/{model}/README.md" for model in ("chains", "recall"))],
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_the_command_line_knows_the_commands(page):
    for words in commands_of(page.read_text()):
        if words == ["--help"]:
            continue
        try:
            parse(words)
        except UsageError as error:
            pytest.fail(f"{page.name}: swa-jax {shlex.join(words)}: {error.format_message()}")


def test_commands_are_found_and_unknown_options_refused():
    text = "```sh\nfor i in 0; do swa-jax demo \\\n  --out x; done  # more\n```\n"
    assert commands_of(text) == [["demo", "--out", "x"]]
    parse(["pattern", "full", "--layers", "4"])
    for wrong in (["demo", "--outt", "x"], ["select", "nll", "model"], ["nothing"]):
        with pytest.raises(UsageError):
            parse(wrong)


def test_every_page_is_in_the_table_of_contents():
    trees = re.findall(r"(?ms)^```\{toctree\}\n(.*?)^```", (ROOT / "docs/index.md").read_text())
    entries = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert sorted(entries) == sorted(page.stem for page in PAGES if page.stem != "index")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_page_says_whom_it_is_for(page):
    """After the title, in italics: for whom the page is, and what they can do or know after it."""
    assert re.match(r"# [^\n]+\n\n\*For [^*]+\s(After|On) this\spage [^*]+\*\n\n", page.read_text())


def test_links_out_of_the_docs_on_the_site(monkeypatch):
    link_outside = runpy.run_path(str(ROOT / "docs/conf.py"))["link_outside"]
    page = ["See [a run](../configs/swat-tiny.yaml), [plants](data/plants.md#a) and [data](data.md)."]
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    link_outside(None, "page", downloads := list(page))
    files = "{download}`a run <../configs/swat-tiny.yaml>`, {download}`plants <data/plants.md>`"
    assert downloads == [f"See {files} and [data](data.md)."]
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    link_outside(None, "page", addresses := list(page))
    for file in ("configs/swat-tiny.yaml", "docs/data/plants.md#a"):
        assert f"(https://github.com/owner/name/blob/main/{file})" in addresses[0]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="sphinx comes with the docs extra: make docs")
    options = ["-W", "--keep-going", "-q", "-b", "html"]
    python("-m", "sphinx", *options, ROOT / "docs", tmp_path)
    made_of = {"api": "routed_attention", "commands": "--kv-budget", "training-keys": "warmup_steps"}
    for name, made in {**made_of, "servers": "sglang-jax"}.items():
        assert made in (tmp_path / f"{name}.html").read_text()


def test_references_have_every_command_and_key(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import reference

    page = reference.commands()
    for title in ("## swa-jax\n", "### swa-jax adapt\n", "#### swa-jax evaluate needles\n", "#### swa-jax select kl\n"):
        assert title in page
    assert "| `--length N` | Tokens, the answer included. | `1024` |" in page
    assert "| `sglang` | `l4` | 4096 | 2 | 1 |" in reference.servers()
    assert "| mimo_v2_flash | its class reads hybrid_layer_pattern" in reference.servers()
    keys = reference.training_keys()
    assert "\n## stages[].data[]\n" in keys
    assert "| `batch_size` | whole number | must be given | rows a step" in keys
    assert re.search(r"\| `qk_norm` \| true or false \| `false` \| whether queries and keys are normed", keys)
