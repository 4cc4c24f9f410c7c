"""Every notebook runs from top to bottom, in a process of its own and an empty folder, and shows its pictures."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
from python_process import python

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# The cells are plain Python; of IPython they use display(Image(file)) only, which is checked here without it.
_RUN = """
import json, sys, types, warnings
from pathlib import Path
warnings.simplefilter("error")
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
plt.show = lambda: print("shown: figure") or plt.close("all")
ipython = types.ModuleType("IPython.display")
ipython.Image = lambda file, width: Path(file)
ipython.display = lambda file: print("shown:", file.read_bytes()[1:4].decode(), file.stat().st_size)
sys.modules["IPython.display"] = ipython
cells = json.loads(Path(sys.argv[1]).read_text())["cells"]
names = {"__name__": "__main__"}
for number, cell in enumerate(cells):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
"""


def test_there_is_one_for_each_story():
    assert [path.stem for path in NOTEBOOKS] == [
        "1-adapt-a-model",
        "2-choose-layers-and-heads",
        "3-continue-into-swiattn",
        "4-swat-from-scratch",
        "5-inside-the-kernels",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_says_whom_it_is_for_and_how_to_open_it(path):
    """Its saved outputs hold no error, and name no folder of the machine that made them."""
    text = path.read_text()
    cells = json.loads(text)["cells"]
    first = "".join(cells[0]["source"])
    assert re.match(r"# [^\n]+\n\n\*For [^*]+ After this notebook ", first)
    assert "`jupyter lab notebooks`. On Colab: " in first
    assert not re.search(r"/(root|home|Users|tmp|work)/", text)
    assert "error" not in [output.get("output_type") for cell in cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_imports_is_there(path):
    cells = json.loads(path.read_text())["cells"]
    code = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
    ours = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.ImportFrom) and n.module.startswith("swa_jax")]
    assert ours
    for node in ours:
        module = importlib.import_module(node.module)
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    said = python("-c", _RUN, path, cwd=tmp_path, timeout=900, JAX_PLATFORMS="cpu")
    cells = json.loads(path.read_text())["cells"]
    code = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    pictures = re.findall(r"shown: (?:PNG (\d+)|figure)", said)
    assert len(pictures) >= len(re.findall(r"display\(|plt\.show\(", code))
    assert all(int(size or 10_000) > 3000 for size in pictures)
