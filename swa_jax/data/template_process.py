"""A process of its own that runs chat templates: one may loop, or ask for more memory than there is.

`ChatTemplate` starts this file and speaks to it in lines of JSON. First come the templates by name, then what each
rendering is given. An answer holds a `text`, or why there is none (`refused`).
"""

import contextlib
import datetime
import json
import resource
import signal
import sys
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 1 << 26  # characters


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for training; a prompt has its content alone."""

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as templates expect it: characters as they are, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def read(sources: dict[str, str]) -> tuple[dict[str, jinja2.Template], list[str]]:
    """The templates by name, in a sandbox that reaches neither files nor Python; and which variables they read."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    templates = {name: environment.from_string(source) for name, source in sources.items()}
    parsed = map(environment.parse, sources.values())
    return templates, sorted(set().union(*map(jinja2.meta.find_undeclared_variables, parsed)))


def rendered(template: jinja2.Template, values: dict[str, Any], day: str | None) -> str:
    if day is not None:
        values = values | {"strftime_now": datetime.date.fromisoformat(day).strftime}
    text = template.render(values)
    if len(text) > LONGEST:
        raise ValueError(f"it writes {len(text)} characters")
    text.encode()  # half a character is refused here
    return text


def main(seconds: float, memory: int) -> None:
    # Ctrl-C is for the program that asks; the end of the processor time ends this one, whatever it is doing.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # a system without such a limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    templates: dict[str, jinja2.Template] | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer: dict[str, Any]
        try:
            asked = json.loads(line)
            if templates is None:
                templates, reads = read(asked)
                answer = {"reads": reads}
            else:
                answer = {"text": rendered(templates[asked["template"]], asked["values"], asked["day"])}
            data = json.dumps(answer)
        except MemoryError:
            data = json.dumps({"refused": f"it needs more than {memory >> 20} MB of memory"})
        except Exception as error:
            words = " ".join(str(error).split())[:300] or type(error).__name__
            data = json.dumps({"refused": words})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(data + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
