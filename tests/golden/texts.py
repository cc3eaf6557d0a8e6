"""What the product says: each text of its errors, of its log and of its output, as it stands in the source.

`texts` yields one line for each. The line begins with what the text is for, and has nothing of the place where it
stands: code may move without a change here. What is filled in at run time is `{}`.

    error REASON    the message of an error of this reason
    hint            the hint of an error, where that is not the reason's
    log LEVEL       a line of the log
    text            any other text of several words: a part of those above, or what a command prints

A message may have been given a name before, in the same function or for the whole module, or stand in a tuple after
its reason. Docstrings are no texts
here, nor is what `--help` shows, which help.txt has, nor SQL and patterns.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

PRODUCT = ("seqdedupe", "broker_sidecar", "spark")
GENERATED = "seqdedupe/v1/"

_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
_LOGGER = re.compile("log(ger)?$")
_REASON = re.compile("[A-Z_]{4,}")
_FIELD = re.compile(r"\{\w+\}")
_OF_HELP = ("help", "short_help", "about", "metavar")
_SQL = re.compile(
    r"(\W|\\n)*(SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|DROP|WITH|WHERE|FROM|AND|OR|ON|ORDER|SET|PRAGMA|LOCK|VALUES|"
    r"PRIMARY|UNION|RETURNING|BEGIN|COLLATE|NOT NULL|SAVEPOINT|RELEASE|ROLLBACK|LIMIT|GROUP|EXISTS|MERGE|AS|DO|SHOW)\b"
    r"|.*\b(SELECT|EXISTS) "
)


def texts(root: Path) -> Iterator[str]:
    """Yield the texts of the product, sorted; one that is there N times ends with (xN)."""
    counts: Counter[str] = Counter()
    for package in PRODUCT:
        for path in (root / package).rglob("*.py"):
            if not path.relative_to(root).as_posix().startswith(GENERATED):
                counts.update(of_module(ast.parse(path.read_text())))
    for text, count in sorted(counts.items()):
        yield text if count == 1 else f"{text} (x{count})"


def of_module(module: ast.Module) -> Iterator[str]:
    """Yield the lines of one module, in any order."""
    parents = {child: node for node in ast.walk(module) for child in ast.iter_child_nodes(node)}
    uses: dict[ast.expr, set[str]] = defaultdict(set)
    for node in ast.walk(module):
        for use, expression in _uses(node):
            for text in _meant(expression, parents):
                uses[text].add(use)
    for node in ast.walk(module):
        if _is_text(node) and not _is_part(node, parents) and not _is_for_others(node, parents):
            yield from _lines(_shown(node), uses[node])


def _lines(text: str, uses: set[str]) -> Iterator[str]:
    if uses:
        yield from (f"{use}: {text}" for use in uses if text != "{}")
    elif " " in text.strip() and re.search("[a-z]{2}", text) and not _SQL.match(text):
        yield f"text: {text}"


def _uses(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a call says with what is given to it."""
    match node:
        case ast.Call(func=ast.Name("error"), args=[reason, message, *_]):
            for one in reason, *_branches(reason):
                if _is_text(one):
                    yield f"error {_shown(one)}", message
            if not any(map(_is_text, (reason, *_branches(reason)))):
                yield "error {}", message
        case ast.Tuple([ast.Constant(str(reason)), message]) if _REASON.fullmatch(reason):
            yield f"error {reason}", message
        case ast.Call(func=ast.Attribute(ast.Name(logger), level)) if _LOGGER.search(logger) and level in _LEVELS:
            at = int(level == "log")
            yield f"log {'{}' if at else level}", node.args[at]
    if isinstance(node, ast.Call):
        yield from (("hint", keyword.value) for keyword in node.keywords if keyword.arg == "hint")


def _branches(expression: ast.expr) -> list[ast.expr]:
    match expression:
        case ast.IfExp(_, first, second):
            return [first, second]
        case ast.BoolOp(_, values):
            return values
    return []


def _meant(
    expression: ast.expr, parents: dict[ast.AST, ast.AST], names: frozenset[str] = frozenset()
) -> Iterator[ast.expr]:
    """Yield the texts that an expression may be, also by a name; `names` led here."""
    if _is_text(expression):
        yield expression
    for branch in _branches(expression):
        yield from _meant(branch, parents, names)
    if isinstance(expression, ast.Name) and expression.id not in names:
        for value in _values(expression, parents):
            yield from _meant(value, parents, names | {expression.id})


def _values(name: ast.Name, parents: dict[ast.AST, ast.AST]) -> list[ast.expr]:
    """What a name is given in the nearest function around it that gives it anything, or in the module."""
    scope: ast.AST = name
    while scope in parents:
        scope = parents[scope]
        is_scope = isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module)
        if is_scope and (values := [value for assigned, value in _assigned(scope) if assigned == name.id]):
            return values
    return []


def _assigned(scope: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield names and what becomes theirs in a function, or outside of any."""
    inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, inner):
            continue
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.NamedExpr(ast.Name(name), value):
                yield name, value
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                yield from (
                    (name.id, value) for name, value in zip(names, values, strict=False) if isinstance(name, ast.Name)
                )
            case ast.AugAssign(ast.Name(name), _, value):
                yield name, value
        yield from _assigned(node)


def _is_text(node: ast.AST | None) -> TypeGuard[ast.expr]:
    match node:
        case ast.Constant(str()) | ast.JoinedStr():
            return True
        case ast.BinOp(left, ast.Add(), right):
            return _is_text(left) or _is_text(right)
    return False


def _is_part(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a text is a piece of a larger one."""
    return _is_text(parents.get(node))


def _is_for_others(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a text is a docstring, an annotation, a pattern, or what `--help` shows."""
    below, above = node, parents[node]
    while not isinstance(below, ast.stmt):
        match above:
            case ast.Expr(value):
                if value is node:
                    return True
            case ast.keyword(arg) if arg in _OF_HELP:
                return True
            case ast.Call(ast.Attribute(ast.Name("re"))):
                return True
            case ast.arg():
                return True
            case ast.AnnAssign(annotation=annotation) if annotation is below:
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() if above.returns is below:
                return True
        below, above = above, parents.get(above, above)
    return False


def _shown(node: ast.expr) -> str:
    match node:
        case ast.Constant(str(value)):
            return _FIELD.sub("{}", value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r"))
        case ast.JoinedStr(values):
            return "".join(_shown(value) for value in values)
        case ast.BinOp(left, _, right):
            return _shown(left) + _shown(right)
    return "{}"
