"""Which lines of the packages each test runs: a plugin of pytest, for `draw.py`.

    TRACE_TO=lines.jsonl python -m pytest -p scripts.faults.trace tests/data

Adds to the file TRACE_TO a line of JSON for each test that passes: its `test` (node id), its `seconds`, and its
`lines`: by file of a package, the numbers of those that ran, as bits in hexadecimal. Processes that a test starts count
as the test's. JAX's caches are cleared between files: a function that is compiled already does not run.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("swa_jax", "pallas_kernels", "launch")
TOOL = sys.monitoring.COVERAGE_ID
EVENTS = sys.monitoring.events

ran: dict[str, int] = {}  # by file: bit n is line n


def started(code, _):
    """At the first start of a function in a test: notes its lines from then on, if it is ours."""
    if file := file_of(code.co_filename):
        ran.setdefault(file, 0)
        sys.monitoring.set_local_events(TOOL, code, EVENTS.LINE)
    return sys.monitoring.DISABLE


def line(code, number):
    file = file_of(code.co_filename)
    ran[file] = ran.get(file, 0) | 1 << number
    return sys.monitoring.DISABLE  # until `restart_events`


def file_of(name: str, known: dict[str, str] = {}) -> str:  # noqa: B006
    if name not in known:
        path = Path(name)
        inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
        known[name] = str(path.relative_to(ROOT)) if inside else ""
    return known[name]


def start() -> None:
    sys.monitoring.use_tool_id(TOOL, "trace")
    sys.monitoring.register_callback(TOOL, EVENTS.PY_START, started)
    sys.monitoring.register_callback(TOOL, EVENTS.LINE, line)
    sys.monitoring.set_events(TOOL, EVENTS.PY_START)


def in_child() -> None:
    """In a process that a test starts: what ran goes into a file of its own, which the test's process takes up."""
    import atexit

    def leave() -> None:
        (Path(os.environ["TRACE_CHILDREN"]) / f"{os.getpid()}-{time.time_ns()}.json").write_text(json.dumps(ran))

    start()
    atexit.register(leave)


class Plugin:
    def __init__(self, out: Path, children: Path):
        self.out, self.children = out, children
        self.passed, self.file = False, None
        self.began = time.monotonic()

    def pytest_runtest_logstart(self, nodeid):
        import jax

        file = nodeid.partition("::")[0]
        if self.file not in (None, file):
            jax.clear_caches()
        self.file, self.passed, self.began = file, True, time.monotonic()
        sys.monitoring.restart_events()

    def pytest_runtest_logreport(self, report):
        self.passed &= report.passed

    def pytest_runtest_logfinish(self, nodeid):
        for file in self.children.glob("*.json"):
            for name, lines in json.loads(file.read_text()).items():
                ran[name] = ran.get(name, 0) | lines
            file.unlink()
        if self.passed:
            row = {
                "test": nodeid,
                "seconds": round(time.monotonic() - self.began, 2),
                "lines": {file: f"{lines:x}" for file, lines in sorted(ran.items()) if lines},
            }
            with self.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
        ran.clear()


def pytest_configure(config):
    start()
    children = Path(tempfile.mkdtemp(prefix="trace-"))
    (children / "sitecustomize.py").write_text("from scripts.faults.trace import in_child\nin_child()\n")
    os.environ["TRACE_CHILDREN"] = str(children)
    os.environ["PYTHONPATH"] = f"{children}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    config.pluginmanager.register(Plugin(Path(os.environ["TRACE_TO"]), children))
