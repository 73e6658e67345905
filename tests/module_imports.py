"""Which modules of the package import which others, as their sources state."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pyrofl

PACKAGE = Path(pyrofl.__file__).parent
FILES = sorted(
    f
    for top in (PACKAGE, PACKAGE / "models", PACKAGE / "inference")
    for f in top.rglob("*.py")
    if "models" not in f.relative_to(top).parts and "inference" not in f.relative_to(top).parts
)


def part(file: Path) -> str:
    """Return the file's module, "pyrofl.inference.engine.round"."""
    names = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("pyrofl", *names)).removesuffix(".__init__")


def imported(file: Path, types: bool = True) -> set[str]:
    """Return the modules that a file imports, anywhere in it, perhaps not those for types alone."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        only_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        nodes += [] if only_types and not types else ast.iter_child_nodes(node)
    return found


PACKAGES = {part(f) for f in FILES if f.name == "__init__.py"}


@cache
def read(types: bool) -> dict[str, set[str]]:
    """Return the modules of the package that each of its modules imports."""
    found = {part(f): imported(f, types) for f in FILES}
    return {
        name: {m for n in names for m in (n, n.rpartition(".")[0]) if m in found} - {name}
        for name, names in found.items()
    }


def folder(module: str) -> str:
    """Return the folder of a module."""
    return module if module in PACKAGES else module.rpartition(".")[0]


def reached(arrows: dict[str, set[str]], *starts: str) -> set[str]:
    """Return what follows from some starts by arrows, directly or not."""
    seen, left = set[str](), [*starts]
    while left:
        new = arrows.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen
