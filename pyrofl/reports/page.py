"""HTML pages of sections: texts, lists, tables and figures, in one file that needs no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyrofl.experiments.console import ending
from pyrofl.files.run_folder import replacing
from pyrofl.files.text_tables import is_mostly_numeric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TABLE_LINES = 60  # lines of a table


@dataclass
class Section:
    """Section of a report: a title, and parts such as notes, lists, figures and tables."""

    title: str
    parts: list[dict[str, Any]] = field(default_factory=list)

    def note(self, text: str, kind: str = "note") -> Section:
        """Add a text, such as a note, a heading, a sentence or a command line."""
        self.parts.append({"kind": kind, "text": text})
        return self

    def has(self, kind: str) -> bool:
        """Return whether the report section has a part of the given kind, such as "figure"."""
        return any(part["kind"] == kind for part in self.parts)

    def list(self, heading: str, texts: Sequence[str]) -> Section:
        """Add a list of sentences under a heading; nothing without sentences."""
        if texts:
            self.note(heading, "heading").parts.append({"kind": "list", "texts": [*texts]})
        return self

    def figure(self, source: Path | Figure, text: str = "") -> Section:
        """Add a figure, or its PNG file, with a caption; a note if the file is missing."""
        if isinstance(source, Path):
            if not source.is_file():
                return self.note(f"No figure {source.name} in {source.parent.parent.name}.")
            data = source.read_bytes()
        else:
            file = BytesIO()
            source.savefig(file, format="png", dpi=150, facecolor="white")
            data = file.getvalue()
        self.parts.append({"kind": "figure", "text": text, "image": b64encode(data).decode()})
        return self

    def table(self, head: Sequence[str], lines: Iterable[Sequence[Any]]) -> Section:
        """Add a table to the report section; only the first lines of a long table are shown."""
        found = [*lines]
        shown = found[:MAX_TABLE_LINES]
        right = [is_mostly_numeric(values) for values in zip(*shown, strict=True)]
        rows = [
            [(_cell(v), _kind(v, is_right)) for v, is_right in zip(line, right, strict=True)]
            for line in shown
        ]
        self.parts.append({"kind": "table", "head": head, "rows": rows})
        return (
            self.note(f"{len(found) - MAX_TABLE_LINES} more lines.")
            if len(found) > MAX_TABLE_LINES
            else self
        )


def _cell(value: Any) -> str:
    """Return the text of a table cell in the HTML report."""
    if isinstance(value, float):
        return f"{value:.4g}".replace("nan", "-")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _kind(value: Any, is_number: bool) -> str:
    """Return the CSS class of a table cell in a column of numbers or texts."""
    return "number" if is_number else "long" if len(str(value)) > 40 else ""


def page(title: str, sections: Sequence[Section]) -> str:
    """Return an HTML page of sections, in which all texts are escaped.

    Raises:
        ValueError: if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ValueError(
            "a report is written by jinja2; expected pip install -e '.[report]' in the clone"
        ) from error
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = pages.from_string(files("pyrofl.reports").joinpath("page.html").read_text("utf-8"))
    return template.render(title=title, sections=sections)


def write(path: Path, text: str) -> str:
    """Write a page to a file, and return a line about it for the user."""
    message = partial("{} cannot be written: {}".format, path)
    with ending(message), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return f"{path} is one file of {len(text) / 1e6:.1f} MB; it opens without a network"
