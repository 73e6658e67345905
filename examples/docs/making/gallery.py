"""A page with every figure function: a picture, and the ten lines that draw it."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from pyrofl import figures


def gallery_pages(folder: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the pictures, and the page that shows them."""
    shown, names = [], [script.stem for script in sorted(folder.glob("*.py"))]
    for script in sorted(folder.glob("*.py")):
        found = runpy.run_path(str(script))
        file = BytesIO()
        found["figure"].savefig(file, dpi=130, facecolor="white")
        yield f"gallery/{script.stem}.png", file.getvalue()
        shown.append(entry(script.stem, script.read_text()))
    small = (f"[![{n}](made/gallery/{n}.png){{.small}}](#{n})" for n in names)
    yield "gallery_entries.md", "\n\n".join([" ".join(small), *shown]) + "\n"


def entry(name: str, code: str) -> str:
    """Write what the page says of a figure."""
    about, _, lines = code.removeprefix('"""').partition('"""')
    what = (getattr(figures, name).__doc__ or "").split("\n")[0]
    return (
        f"({name})=\n## {name}\n\n{what} {' '.join(about.split())}\n\n"
        f"![{name}](made/gallery/{name}.png)\n\n"
        f"```python\n{lines.strip()}\n```\n\n"
        f"Arguments: {{py:func}}`pyrofl.figures.{name}`."
    )
