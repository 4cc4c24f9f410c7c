"""An option is not lost on its way: a function reads those that it has, and gives them on to what has them too."""

import ast
import functools
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# (function, option): what a caller's protocol gives, and this function does not need.
NOT_READ = {
    ("_options", "version"),  # Typer: its callback reads it
    ("open", "mode"),  # fsspec
    ("draw", "out_sharding"),  # Flax's initializers
    ("_decoding", "H"),  # swa_jax/bench/tpu_kernels.py: all cases have it
    ("run", "attend_small"),
}
# (callee, option): of one name in its callers, but another thing.
ANOTHER = {
    ("Elapsed", "work"),
    ("Progress", "at_once"),  # rich's
    ("Progress", "clock"),
    ("Progress", "interval"),
    ("Progress", "quiet"),
    ("Table", "rows"),
    ("make_mesh", "devices"),  # a list of them
    ("run", "dry_run"),
    ("run", "overrides"),
}
# (function, callee, option): the function decides.
DECIDED = {
    ("wrap", "chat_wrap", "answers_at_once"),  # --thinking says more
    ("first_rows", "make_batches", "rows"),
    ("static_scores", "answer_batches", "window"),  # under full attention
    ("train_flops_per_token", "attention_flops", "full_ratio"),
    ("_linear", "Parameter", "matrix"),
    ("_linear", "Parameter", "output"),
    ("scheduled_backward", "order_pairs", "num_active"),
    ("order_pairs", "PairSchedule", "listed"),
    ("_folded", "PairSchedule", "packed"),
    ("masked", "_Scores", "value_sum"),
}


class Signature(NamedTuple):
    positional: list[str]
    options: set[str]  # what has a default


def signature(arguments: ast.arguments, bound: int = 0) -> Signature:
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][bound:]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    with_default = positional[len(positional) - len(arguments.defaults) :] if arguments.defaults else []
    return Signature(positional, {*with_default, *(a.arg for a, default in named if default is not None)})


def signature_of_class(node: ast.ClassDef) -> Signature:
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return signature(inner.args, bound=1)
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return Signature([n.target.id for n in fields], {n.target.id for n in fields if n.value is not None})


def not_read(tree: ast.AST) -> set[tuple[str, str]]:
    """(function, option) of each option that its function's body does not name. That of a stub names nothing."""
    found = set()
    for node in functions(tree):
        named = {n.id for line in node.body for n in ast.walk(line) if isinstance(n, ast.Name)}
        options = signature(node.args).options | {a.arg for a in node.args.kwonlyargs}
        if named:
            found |= {(node.name, option) for option in options - named}
    return found


def not_given(tree: ast.AST, signatures: dict[str, list[Signature]]) -> set[tuple[str, str, str]]:
    """(function, callee, option) where both have the option, and the call says nothing of it."""
    found = set()
    for node in functions(tree):
        own = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            starred = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
            if starred or len(signatures.get(name, ())) != 1:  # a name of several functions says nothing
                continue
            (called,) = signatures[name]
            given = {*called.positional[: len(call.args)], *(k.arg for k in call.keywords)}
            found |= {(node.name, name, option) for option in (called.options & own) - given}
    return found


def not_used(tree: ast.AST) -> set[tuple[str, str]]:
    """(function, name) of each name that a `with` binds, such as the count of what is done, and nothing reads."""
    found = set()
    for node in functions(tree):
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
        bound = {item.optional_vars for n in ast.walk(node) if isinstance(n, ast.With) for item in n.items}
        found |= {(node.name, n.id) for n in names if n in bound and n.id not in read}
    return found


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def signatures_of(trees: list[ast.Module]) -> dict[str, list[Signature]]:
    found = defaultdict(list)
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.FunctionDef):
            found[node.name].append(signature(node.args))
        elif isinstance(node, ast.ClassDef):
            found[node.name].append(signature_of_class(node))
    return found


@functools.cache
def trees() -> list[ast.Module]:
    files = [file for name in ("swa_jax", "pallas_kernels", "launch") for file in sorted((ROOT / name).rglob("*.py"))]
    return [ast.parse(file.read_text()) for file in files]


def test_every_option_is_read():
    found = set().union(*map(not_read, trees()))
    assert found - NOT_READ == set(), "read it, remove it, or list it above with its reason"
    assert NOT_READ - found == set(), "these are read"


def test_every_option_is_given_on():
    signatures = signatures_of(trees())
    found = set().union(*(not_given(tree, signatures) for tree in trees()))
    lost = {one for one in found if one[1:] not in ANOTHER}
    assert lost - DECIDED == set(), "give it on, or list it above"
    assert DECIDED - lost == ANOTHER - {one[1:] for one in found} == set(), "these are given on"


def test_what_a_with_binds_is_used():
    assert set().union(*map(not_used, trees())) == set()
    assert not_used(ast.parse("def f(x):\n with x as a, x as b, x:\n  print(b)")) == {("f", "a")}


@pytest.mark.parametrize(
    ("text", "unread", "ungiven"),
    [
        ("def f(a, b=1): return g(a, b=b)\ndef g(a, b=1): return a + b", set(), set()),
        ("def f(a, *, b): return g(a, b=1)\ndef g(a, b=1): return a + b", {("f", "b")}, set()),
        ("def f(a, b=1): return g(a) + b\ndef g(a, b=1): return a + b", set(), {("f", "g", "b")}),
        ("def f(a, b=1): return G(a) + b\nclass G:\n a: int\n b: int = 1", set(), {("f", "G", "b")}),
        ("def f(a, b=1): return g(a, b)\ndef g(a, b=1): ...", set(), set()),
        ("def f(a, b=1): return g(*a, **b)\ndef g(a, b=1): return a + b", set(), set()),
    ],
)
def test_what_is_lost(text, unread, ungiven):
    tree = ast.parse(text)
    assert not_read(tree) == unread
    assert not_given(tree, signatures_of([tree])) == ungiven
