"""Slips that a program can make in Python code: one operator, constant, argument, key or condition is another.

`slips(source)` lists them all, as changes of the text. Left out by rule is what no result follows from: strings,
annotations, decorators, assertions, what an error or a line of progress says, and hints to the compiler.
"""

import ast
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


def _table(text: str) -> dict[type, tuple[str, str]]:
    """By class of an operator, how it is written, and what it becomes; `_` stands for a space."""
    rows = (row.split() for row in text.split(", "))
    return {getattr(ast, name): (old.replace("_", " "), new.replace("_", " ")) for name, old, new in rows}


ARITHMETIC = _table("Add + -, Sub - +, Mult * +, Div / *, FloorDiv // /, Mod % //, Pow ** *, BitAnd & |, BitOr | &")
COMPARISONS = _table(
    "Lt < <=, LtE <= <, Gt > >=, GtE >= >, Eq == !=, NotEq != ==, In in not_in, NotIn not_in in, Is is is_not, "
    "IsNot is_not is"
)
# Calls that say something, or whose two arguments may change places.
SAY = {"print", "warn", "say", "echo", "log", "info", "debug", "progress", "Option", "Argument", "TypeVar", "cast"}
SYMMETRIC = {"max", "min", "maximum", "minimum", "swapaxes", "logical_and", "logical_or", "add", "multiply", "gcd"}
SYMMETRIC |= {"isclose", "array_equal", "promote_types", "allclose"}
# Keywords that change how fast something is, or how it reads, and no result.
HINTS = {"name", "cost_estimate", "compiler_params", "donate_argnums", "donate_argnames", "progress", "unroll"}
HINTS |= {"encoding", "indent", "stacklevel", "daemon", "help", "metavar", "rich_help_panel", "flush", "file_name"}
HINTS |= {"ensure_ascii", "description", "strict", "errors", "check_vma", "precision", "mode", "exist_ok"}


class Slip(NamedTuple):
    kind: str
    line: int  # from 1
    start: int  # in the text, in characters
    old: str
    new: str


def slips(source: str) -> list[Slip]:
    """Every slip that the rules make in a file, in the order of its lines."""
    return sorted(set(_Slips(source)), key=lambda slip: (slip.start, slip.kind, slip.new))


class _Slips:
    def __init__(self, source: str):
        self.source = source
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.text = source.splitlines()

    def __iter__(self) -> Iterator[Slip]:
        yield from self._inside(ast.parse(self.source), {})

    def _at(self, line: int, column: int) -> int:
        """The place in the text; Python counts columns in bytes of UTF-8."""
        return self.lines[line - 1] + len(self.text[line - 1].encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _slip(self, kind: str, start: int, end: int, new: str) -> Slip:
        return Slip(kind, self.source.count("\n", 0, start) + 1, start, self.source[start:end], new)

    def _inside(self, node: ast.AST, defaults: dict[str, str]) -> Iterator[Slip]:
        """Slips in a node and what it holds; `defaults`: those of the arguments of the function around it."""
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            defaults = defaults | self._defaults(node.args)
        if not _for_types(node):
            yield from self._of(node, defaults)
        for child in self._children(node):
            yield from self._inside(child, defaults)

    def _children(self, node: ast.AST) -> list[ast.AST]:
        match node:
            case ast.Assert() | ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
                return []
            case ast.Call() if _name(node.func) in SAY:
                return []
            case ast.Call():
                return [node.func, *node.args, *(k.value for k in node.keywords if k.arg not in HINTS)]
            case ast.FunctionDef():
                return [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
            case ast.ClassDef():
                return list(node.body)
            case ast.AnnAssign():
                return [node.value] if node.value else []
        return [] if _for_types(node) else list(ast.iter_child_nodes(node))

    def _of(self, node: ast.AST, defaults: dict[str, str]) -> Iterator[Slip]:
        match node:
            case ast.BinOp(op=op) if type(op) in ARITHMETIC:
                yield from self._operator("operator", node.left, node.right, *ARITHMETIC[type(op)])
                if isinstance(op, ast.BitAnd):
                    yield from self._without(node, "&", (node.left, node.right))
            case ast.Compare(ops=ops):
                sides = [node.left, *node.comparators]
                for left, op, right in zip(sides[:-1], ops, node.comparators, strict=True):
                    yield from self._operator("comparison", left, right, *COMPARISONS[type(op)])
            case ast.BoolOp(op=op, values=values):
                word = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                if len(values) == 2:
                    yield from self._operator("and, or", *values, *word)
                yield from self._without(node, word[0], values)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                start, _ = self._span(node)
                inner, _ = self._span(node.operand)
                if "(" not in self.source[start:inner]:
                    yield self._slip("sign", start, inner, "")
            case ast.If(test=test) | ast.IfExp(test=test):
                for value in ("True", "False"):
                    yield self._slip("condition removed", *self._span(test), value)
            case ast.comprehension(ifs=[test]):
                yield self._slip("condition removed", *self._span(test), "True")
            case ast.Constant(value=bool() as value):
                yield self._slip("constant", *self._span(node), str(not value))
            case ast.Constant(value=int() as value):
                yield self._slip("constant", *self._span(node), str(value + 1))
                if value > 0:
                    yield self._slip("constant", *self._span(node), str(value - 1))
            case ast.Constant(value=float() as value):
                yield self._slip("constant", *self._span(node), f"({self.source[slice(*self._span(node))]} * 2 + 1)")
            case ast.Call() if _name(node.func) not in SAY:
                yield from self._call(node, defaults)
            case ast.Dict(values=[_, _, *_] as values):
                ends = [self._span(key or value) for key, value in zip(node.keys, values, strict=True)]
                items = [(start, self._span(value)[1]) for (start, _), value in zip(ends, values, strict=True)]
                if None not in node.keys:
                    yield from self._one_less("key removed", items)
            case ast.Set(elts=[_, _, *_] as items):
                yield from self._one_less("element removed", [self._span(item) for item in items])

    def _operator(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Slip]:
        (_, end), (start, _) = self._span(left), self._span(right)
        place = self.source.find(old, end, start)
        comment = self.source.find("#", end, start)
        if place >= 0 and comment < 0:
            yield self._slip(kind, place, place + len(old), new)

    def _without(self, node: ast.AST, word: str, conditions: Sequence[ast.AST]) -> Iterator[Slip]:
        """`a and b` is `b`."""
        texts = [f"({self.source[slice(*self._span(condition))]})" for condition in conditions]
        for i in range(len(texts)):
            kept = texts[:i] + texts[i + 1 :]
            new = kept[0] if len(kept) == 1 else f"({f' {word} '.join(kept)})"
            yield self._slip("condition removed", *self._span(node), new)

    def _one_less(self, kind: str, items: list[tuple[int, int]]) -> Iterator[Slip]:
        """Each item but the last goes, with the comma behind it."""
        for (start, _), (after, _) in itertools.pairwise(items):
            if "#" not in self.source[start:after] and "(" not in self.source[start - 1 : start]:
                yield self._slip(kind, start, after, "")

    def _call(self, node: ast.Call, defaults: dict[str, str]) -> Iterator[Slip]:
        items = [*node.args, *node.keywords]
        for before, keyword in zip([None, *items], [*items, None], strict=True):
            if isinstance(keyword, ast.keyword) and keyword.arg not in (None, *HINTS) and before is not None:
                end_before, (start, end) = self._span(before)[1], self._span(keyword)
                if not set("()#") & set(self.source[end_before:start]):
                    yield self._slip("argument dropped", end_before, end, "")
        plain = [arg for arg in node.args if isinstance(arg, ast.Name | ast.Attribute | ast.Constant)]
        if len(node.args) >= 2 and node.args[:2] == plain[:2] and _name(node.func) not in SYMMETRIC:
            (a, b), (c, d) = self._span(node.args[0]), self._span(node.args[1])
            first, second, between = self.source[a:b], self.source[c:d], self.source[b:c]
            if first != second and "#" not in between:
                yield self._slip("arguments swapped", a, d, second + between + first)
        for value in (*node.args, *(k.value for k in node.keywords if k.arg not in HINTS)):
            if isinstance(value, ast.Name) and value.id in defaults:
                yield self._slip("default for an argument", *self._span(value), defaults[value.id])

    def _defaults(self, args: ast.arguments) -> dict[str, str]:
        positional = [*args.posonlyargs, *args.args]
        pairs = [
            *zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True),
            *zip(args.kwonlyargs, args.kw_defaults, strict=True),
        ]
        return {
            arg.arg: self.source[slice(*self._span(value))]
            for arg, value in pairs
            if isinstance(value, ast.Constant) and arg.arg not in HINTS
        }


def _for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`, and the script's `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).startswith(("TYPE_CHECKING", "__name__"))


def _name(function: ast.AST) -> str:
    """`f` of a call of f or of x.f."""
    return getattr(function, "id", getattr(function, "attr", ""))
