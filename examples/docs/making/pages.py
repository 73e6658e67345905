"""Write `made/`, the pages that come from code, where they are not there as they should be."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cached_property
from io import BytesIO, StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pyrofl
from making.cards import capital, card_pages
from making.gallery import card, gallery_pages, grid
from pyrofl.cli.output import notebooks

LESSON = re.compile(r"(?m)^\d+\. \[(.+)\]\(\.\./tutorials/(\w+)\.py\): (.+)$")
FEW = 8  # names in a table without headings
HEADINGS = {  # of names whose file is about more than them
    "pyrofl.inference.definition.programs": "Building blocks",
    "pyrofl.inference.definition.prior_conversion": "Conversion of an argument `prior`",
}
PICTURES = (  # of the gallery, one for each lesson
    "partition shrinkage plates narrowing entropies ranks confidence simplex watched after_epochs "
    "alphas clients convergence predictive_checks conditional"
)


def make(docs: Path) -> None:
    """Make all pages anew; files that are the same stay, so that Sphinx reads them not again."""
    made = docs / "made"
    written = set[Path]()
    for pages in (
        landing(docs / "index.md"),
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
        notebook = notebooks.read(script)
        for i, cell in enumerate(notebook.cells):
            cell["id"] = f"{script.stem}-{i}"
        yield f"tutorials/{script.stem}.ipynb", notebooks.write(notebook)
    for helper in sorted(folder.glob("[a-z]*.py")):
        yield f"tutorials/{helper.name}", helper.read_text()
    listed = (folder.parent / "docs" / "tutorials.md").read_text()
    yield "tutorials_cards.md", tutorial_cards(folder, listed)


def tutorial_cards(folder: Path, listed: str) -> str:
    """Write a card for each lesson of a list: what it shows, and minutes, as the lesson states."""
    cards, toctree = [], ["```{toctree}", ":hidden:", ""]
    for (title, stem, text), picture in zip(LESSON.findall(listed), PICTURES.split(), strict=True):
        minutes = re.findall(r"about (\d+) minutes", (folder / f"{stem}.py").read_text())[0]
        toctree.append(f"made/tutorials/{stem}")
        name = f"{int(stem[:2])}. {title}"
        cards.append(card(name, f"{capital(text)}\n\n{minutes} minutes", toctree[-1], picture))
    return "\n\n".join([grid(cards), "\n".join([*toctree, "```"])]) + "\n"


def landing(page: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the figure of the program on the first page."""
    names: dict[str, Any] = {}
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        exec(re.findall(r"(?s)```python\n(.*?)```", page.read_text())[0], names)
    file = BytesIO()
    names["figure"].savefig(file, dpi=130, facecolor="white")
    yield "landing.png", file.getvalue()


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
    text = text.replace("(../../NUMBERS.md)", "(../../numbers.md)").replace("(../docs/", "(../../")
    text = re.sub(r"\]\((?:\.\./)?(\w+)/README\.md(#[\w-]+)?\)", r"](\1.md\2)", text)
    return re.sub(r"\]\((\w+\.png)\)", rf"]({folder}/\1)", text)


def references() -> Iterator[tuple[str, str]]:
    """Yield a page for each module that is one dot away from `pyrofl`."""
    for name in sorted(pyrofl.MODULES.keys() - {"models"}):  # its functions are on cards
        yield f"reference/{name}.md", reference(f"pyrofl.{name}", getattr(pyrofl, name))


def reference(title: str, module: ModuleType) -> str:
    """Write the page of a module: a summary table of its functions and classes, and its values."""
    first = inspect.cleandoc(module.__doc__ or "").split("\n\n")[0]
    listed, values = dict[str, list[str]](), []
    for name in offered(module):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            home = "pyrofl" if value is getattr(pyrofl, name, None) else title
            listed.setdefault(value.__module__, []).append(f"   ~{home}.{name}")
        elif isinstance(value, dict):
            values.append(f"`{title}.{name}` has the names {', '.join(f'`{n}`' for n in value)}.")
        elif get_args(value):
            short = re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", str(value))
            values.append(f"`{title}.{name}` is the type `{short}`.")
        else:
            values.append(f"`{title}.{name}`: {(value.__doc__ or '').splitlines()[0]}")
    parts = [f"# {title}", " ".join(first.split())]
    for heading, names in grouped(listed).items():
        table = [".. autosummary::", "   :toctree: ../api", "   :nosignatures:", "", *names]
        parts += [f"## {heading}"] * bool(heading)
        parts += ["\n".join(["```{eval-rst}", *table, "```"])]
    return "\n\n".join([*parts, *values]) + "\n"


def grouped(listed: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the names of a module by heading: the subject of the file that defines them.

    A table of few names has no headings. Names that are alone in their file are under "Other".
    """
    names = [name for some in listed.values() for name in some]
    large = {home: some for home, some in listed.items() if len(some) > 1}
    if len(names) <= FEW or len(large) < 2:
        return {"": names}
    groups: dict[str, list[str]] = {}
    for home, some in large.items():
        first = (sys.modules[home].__doc__ or "").splitlines()[0]
        groups.setdefault(HEADINGS.get(home, re.split(r"[:,.]", first)[0]), []).extend(some)
    alone = [some[0] for some in listed.values() if len(some) == 1]
    return groups | ({"Other": alone} if alone else {})


def summaries() -> dict[str, list[tuple[str, list[str]]]]:
    """Return the names of the methods and properties of each public class, by heading."""
    homes = {"pyrofl": pyrofl}
    homes |= {f"pyrofl.{n}": getattr(pyrofl, n) for n in pyrofl.MODULES.keys() - {"models"}}
    return {
        f"{home}.{name}": members(value)
        for home, module in homes.items()
        for name in (pyrofl.FUNCTIONS if home == "pyrofl" else offered(module))
        if inspect.isclass(value := getattr(module, name))
    }


def members(value: type) -> list[tuple[str, list[str]]]:
    """Return the names of the methods and the properties of a class, by heading."""
    public = {n: v for n, v in vars(value).items() if n[0] != "_" and inspect.getdoc(v)}
    properties = [n for n, v in public.items() if isinstance(v, property | cached_property)]
    methods = [n for n in public if inspect.isroutine(getattr(value, n))]
    return [(k, v) for k, v in (("Methods", methods), ("Properties", properties)) if v]


def offered(module: ModuleType) -> list[str]:
    """Name what a module offers: its `__all__`, or its functions and classes as defined."""
    named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = [
        n for n, v in named.items() if str(getattr(v, "__module__", "")).startswith(module.__name__)
    ]
    return list(getattr(module, "__all__", own))
