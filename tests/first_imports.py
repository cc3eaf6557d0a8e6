"""What programs import, in which order: kernels are compiled when their modules are imported, and kept only after
`kernels.prepare()`."""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNNER = "python -m tests.kernels"
"""Runs what imports kernels at once."""

_SPARK = "spark/"


def sources() -> dict[str, str]:
    """The repository's modules by name, as text."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split()
    return {_module(file): (ROOT / file).read_text() for file in files if (ROOT / file).exists()}


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").removeprefix(_SPARK).replace("/", ".")


class Imports:
    """Who has kernels when its module has been imported, of these modules."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules
        self._trees = {name: ast.parse(text) for name, text in modules.items() if "import " in text}
        imported = {name: set(self._names_in(_at_once(tree.body))) for name, tree in self._trees.items()}
        self._reaching = {name for name, text in modules.items() if re.search(r"^@kernel\(", text, re.MULTILINE)}
        while more := {name for name in self._trees if imported[name] & self._reaching} - self._reaching:
            self._reaching |= more

    def programs(self) -> list[str]:
        return [name for name, tree in self._trees.items() if any(map(_is_of_main, tree.body))]

    def all_too_early(self) -> list[str]:
        """The programs, and the functions of modules without kernels, that import kernels before `prepare()`."""
        return [one for name in self._trees for one in self.too_early(name, self._modules[name])]

    def too_early(self, name: str, text: str) -> list[str]:
        """Those of one module with this text; it may be another one."""
        if not re.search(r"^(?: +(?:from|import) |if __name__)", text, re.MULTILINE):
            return []
        tree = ast.parse(text)
        has_main = any(map(_is_of_main, tree.body))
        if self._reaching.intersection(self._names_in(_at_once(tree.body))):
            by_runner = f"{RUNNER} {name} " in (ast.get_docstring(tree) or "")
            return [f"{name} as a whole"] if has_main and not by_runner else []
        nodes = list(ast.walk(tree))
        # A program's functions are called after its main part has called `prepare`.
        is_prepared = has_main and any(map(_is_prepare, nodes))
        return [f"{name}, line {line}" for node in nodes for line in self._early_lines(node, is_prepared=is_prepared)]

    def _early_lines(self, part: ast.AST, *, is_prepared: bool) -> Iterator[int]:
        """For a function, or of a program's main part."""
        is_main = _is_of_main(part)
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            is_main = part.name == "main"
        elif not is_main:
            return
        nodes = list(ast.walk(part))
        calls = [node.lineno for node in nodes if isinstance(node, ast.Call) and _is_prepare(node)]
        if is_prepared and not is_main and not calls:
            return
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom) and self._reaching.intersection(self._names_in([node])):
                yield from [] if calls and min(calls) < node.lineno else [node.lineno]

    def _names_in(self, nodes: Iterable[ast.AST]) -> Iterator[str]:
        """The modules that these import, their packages among them."""
        for node in nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                parts = name.split(".")
                whole = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
                yield from (module for module in whole if module in self._modules)


def _is_of_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _is_prepare(node: ast.AST) -> bool:
    """Whether kernels are kept after this call, or not compiled at all."""
    if not isinstance(node, ast.Call):
        return False
    return (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in ("prepare", "compile_later")


def _at_once(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """The imports that are made when the module is."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and not _is_of_main(node) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _at_once([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _at_once([*node.body, *(one for handler in node.handlers for one in handler.body)])
        elif isinstance(node, ast.With | ast.ClassDef):
            yield from _at_once(node.body)
