"""Write `made/`, the pages that come from code, where they are not there as they should be."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

import jupytext

import pyrofl
from making.cards import card_pages
from making.gallery import gallery_pages

CHECKOUT = Path(__file__).parents[3]


def make(docs: Path) -> None:
    """Make all pages anew; files that are the same stay, so that Sphinx reads them not again."""
    made = docs / "made"
    written = set[Path]()
    for pages in (
        tutorials(docs.parent / "tutorials"),
        papers(docs.parent / "papers"),
        card_pages(),
        gallery_pages(docs / "gallery"),
        references(),
    ):
        for name, content in pages:
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else content.encode()
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
            written.add(path)
    for path in made.rglob("*"):
        if path.is_file() and path not in written and "_" not in path.parent.name[:1]:
            path.unlink()


def tutorials(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the tutorials as notebooks, without outputs, and what lies beside them."""
    for script in sorted(folder.glob("[0-9]*.py")):
        notebook = jupytext.read(script)
        for i, cell in enumerate(notebook.cells):
            cell["id"] = f"{script.stem}-{i}"
        yield f"tutorials/{script.stem}.ipynb", jupytext.writes(notebook, fmt="ipynb")
    for helper in sorted(folder.glob("[a-z]*.py")):
        yield f"tutorials/{helper.name}", helper.read_text()
    names = "\n".join(
        f"made/tutorials/{script.stem}" for script in sorted(folder.glob("[0-9]*.py"))
    )
    yield (
        "tutorials_list.md",
        f"```{{toctree}}\n:hidden:\n\n{names}\n```\n" if names else "None yet.\n",
    )


def papers(folder: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the pages about papers and their pictures; links lead to pages of the site."""
    names = [page.parent.name for page in sorted(folder.glob("*/README.md"))]
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *names, "```"])
    yield "papers/index.md", f"{linked((folder / 'README.md').read_text())}\n{toctree}\n"
    for name in names:
        yield f"papers/{name}.md", linked((folder / name / "README.md").read_text(), name)
        for picture in sorted((folder / name).glob("*.png")):
            yield f"papers/{name}/{picture.name}", picture.read_bytes()


def linked(text: str, folder: str = "") -> str:
    """Return a page whose links to other pages and pictures are those of the site."""
    text = text.replace("(../../NUMBERS.md)", "(../../numbers.md)")
    text = re.sub(r"\]\((\w+)/README\.md\)", r"](\1.md)", text)
    return re.sub(r"\]\((\w+\.png)\)", rf"]({folder}/\1)", text)


def references() -> Iterator[tuple[str, str]]:
    """Yield a page for `pyrofl` and for each module that is one dot away."""
    yield "reference/pyrofl.md", reference("pyrofl", pyrofl, [*pyrofl.__all__, *pyrofl.FUNCTIONS])
    for name in pyrofl.MODULES:
        if name != "models":  # whose functions are on the methods' cards
            module = getattr(pyrofl, name)
            yield f"reference/{name}.md", reference(f"pyrofl.{name}", module, offered(module))


def offered(module: ModuleType) -> list[str]:
    """Name the functions and classes of a module, in the order of their definition."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    home = module.__name__
    own = {n: v for n, v in vars(module).items() if not n.startswith("_") and _is_ours(v, home)}
    return list(own)


def _is_ours(value: Any, home: str) -> bool:
    place = getattr(value, "__module__", "") or ""
    kinds = inspect.isclass(value) or inspect.isfunction(value)
    return kinds and (place == home or place.startswith(f"{home}."))


def reference(title: str, module: ModuleType, names: list[str]) -> str:
    """Write the page of a module."""
    first = inspect.cleandoc(module.__doc__ or "").split("\n\n")[0]
    parts = [f"# `{title}`\n\n{' '.join(first.split())}"]
    for name in names:
        value = getattr(module, name)
        if not inspect.isclass(value) and not callable(value):
            continue  # modules, and tables of names, which `pyrofl list` prints
        if isinstance(value, GenericAlias):
            parts.append(f"(pyrofl.{name})=\n`{title}.{name}` is a type: `{value}`.")
            continue
        if module is not pyrofl and value is vars(pyrofl).get(name):
            parts.append(f"{{py:obj}}`pyrofl.{name}` is on [the page of pyrofl](pyrofl.md).")
            continue
        parts.append("\n".join(["```{eval-rst}", *_directive(f"{title}.{name}", value), "```"]))
    return "\n\n".join(parts) + "\n"


def _directive(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        return [f".. autoclass:: {name}", "   :members:"]
    return [f".. auto{'function' if inspect.isroutine(value) else 'data'}:: {name}"]
