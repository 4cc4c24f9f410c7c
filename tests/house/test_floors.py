"""Who may import whom: a room imports only rooms that stand below it, and no files import each other in a circle."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# The rooms of `pallas_kernels`, ground floor first; what stands in a subfolder of `tpu` is a room of its own.
KERNEL_FLOORS = (
    {"math"},
    {"blocks", "request"},
    {"tpu.tile", "gpu", "xla", "cudnn"},
    {"tpu.schedule", "tpu.decode"},
    {"tpu.window"},
    {"tpu.calls"},
    {"tpu", "dispatch"},
    {"api", "pools"},
)


def floors():
    """{room: floor}, from the map in docs/architecture.md."""
    table = re.findall(r"(?m)^\| (\d+) \| (.+?) \|", (ROOT / "docs" / "architecture.md").read_text())
    return {room: int(floor) for floor, rooms in table for room in re.findall(r"`([\w.]+)`", rooms)}


FLOOR = floors()


def modules():
    """{dotted name: file} of everything that is shipped."""
    files = [file for package in ("pallas_kernels", "swa_jax", "launch") for file in (ROOT / package).rglob("*.py")]
    names = [file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for file in files]
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


def imported(name, known):
    """The project's modules that a module imports, wherever in the file, also those imported for types only."""
    found = set()
    for node in ast.walk(ast.parse(known[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name} imports relatively: write the whole path"
            # `from package import module` imports the module, `from module import name` the module before it.
            found |= {f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}.{alias.name}" in known}
            if any(f"{node.module}.{alias.name}" not in known for alias in node.names):
                found.add(node.module)
    return {module for module in found if module in known and module != name}


def room(module):
    """The room that a module stands in: a package of the top level, or of `swa_jax`."""
    parts = module.split(".")
    return parts[0] if parts[0] != "swa_jax" or len(parts) == 1 else ".".join(parts[:2])


@pytest.fixture(scope="module")
def graph():
    known = modules()
    return {name: imported(name, known) for name in known}


def test_every_room_has_a_floor(graph):
    rooms = {room(module) for module in graph} - {"swa_jax"}
    assert rooms == set(FLOOR), "docs/architecture.md names every room that there is, and no other"
    for floor in sorted(set(FLOOR.values()), reverse=True):
        print(f"floor {floor}:", *(room for room in FLOOR if FLOOR[room] == floor))


def test_imports_run_downwards(graph):
    upward = sorted(
        f"{module} (floor {FLOOR[room(module)]}) imports {other} (floor {FLOOR[room(other)]})"
        for module, others in graph.items()
        for other in others
        if room(module) != room(other)
        and "swa_jax" not in (room(module), room(other))
        and FLOOR[room(other)] >= FLOOR[room(module)]
    )
    assert not upward, "\n".join(upward)


def kernel_room(module):
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["tpu"] else parts[:1])


def test_imports_among_the_kernels_run_downwards(graph):
    inside = {name for name in graph if name.startswith("pallas_kernels.")}
    floor = {room: i for i, rooms in enumerate(KERNEL_FLOORS) for room in rooms}
    assert {kernel_room(name) for name in inside} == set(floor)
    upward = sorted(
        f"{module} imports {other}"
        for module in inside
        for other in graph[module] & inside
        if kernel_room(module) != kernel_room(other) and floor[kernel_room(other)] >= floor[kernel_room(module)]
    )
    assert not upward, "\n".join(upward)


def test_no_circles(graph):
    """Packages' `__init__` are left out: their names are loaded when they are asked for."""
    packages = {name for name, file in modules().items() if file.name == "__init__.py"}
    files = {name: others - packages for name, others in graph.items() if name not in packages}
    try:
        tuple(graphlib.TopologicalSorter(files).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_house_is_small(graph):
    arrows = {(room(module), room(other)) for module, others in graph.items() for other in others}
    arrows = {(one, other) for one, other in arrows if one != other and "swa_jax" not in (one, other)}
    assert len(FLOOR) <= 14
    assert max(FLOOR.values()) <= 5
    assert len(arrows) <= 55, sorted(arrows)


def test_nobody_imports_the_command_line(graph):
    importers = {module for module, others in graph.items() if any(room(o) == "swa_jax.cli" for o in others)}
    assert {room(module) for module in importers} <= {"swa_jax.cli"}


def test_the_checks_see_what_they_forbid():
    """The reader of imports finds each way of writing one."""
    known = dict.fromkeys(("a.b", "a.c", "a.d", "a"), None)
    for text, expected in (
        ("from a.b import x", {"a.b"}),
        ("import a.c as y", {"a.c"}),
        ("def f():\n    from a import d", {"a.d"}),
        ("from a import d, name", {"a.d", "a"}),
    ):
        known["a.z"] = type("File", (), {"read_text": lambda self, text=text: text})()
        assert imported("a.z", known) == expected


def test_the_model_asks_for_no_device():
    """Which kernel runs where is `pallas_kernels`' to know."""
    asking = [name for name, file in modules().items() if "on_tpu" in file.read_text()]
    assert asking, "the reader finds who asks"
    assert {room(name) for name in asking} == {"pallas_kernels"}
