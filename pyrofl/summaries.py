"""Short summaries of objects for terminals and notebooks."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Summarized(ABC):
    """Base class of objects with a summary as their repr and notebook output."""

    @abstractmethod
    def overview(self) -> Mapping[str, object]:
        """Return a summary of the object: about five labels with their texts."""

    @property
    def title(self) -> str:
        """Title of the object's summary."""
        return type(self).__name__

    def __repr__(self) -> str:
        """Return the title and the summary of the object as text."""
        facts = self.overview()
        width = max(map(len, facts))
        lines = (f"\n  {name:<{width}}  {fact}" for name, fact in facts.items())
        return self.title + "".join(lines)

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>"
            for name, fact in self.overview().items()
        )
        table = f"<table><caption>{escape(self.title)}</caption>{''.join(rows)}</table>"
        return table + self._more_html()

    def _more_html(self) -> str:
        """Return additional HTML to show below the summary in a notebook."""
        return ""


def picture(figure: Figure, about: str) -> str:
    """Return a figure as a self-contained HTML image; `about` is the alternative text."""
    file = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure.savefig(file, format="png", dpi=80, facecolor="white")
    data = b64encode(file.getvalue()).decode()
    return f'<img alt="{escape(about)}" src="data:image/png;base64,{data}">'
