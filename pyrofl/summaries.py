"""Values that tell what they are in a few lines, in a terminal and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from html import escape


class Summarised(ABC):
    """A value with a summary; dataclasses need `repr=False`."""

    @abstractmethod
    def summary(self) -> Mapping[str, object]:
        """Tell what the value is, in about five named facts."""

    @property
    def title(self) -> str:
        """What the value is, above the facts."""
        return type(self).__name__

    def __repr__(self) -> str:
        """Tell what the value is."""
        facts = self.summary()
        width = max(map(len, facts))
        lines = (f"\n  {name:<{width}}  {fact}" for name, fact in facts.items())
        return self.title + "".join(lines)

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>"
            for name, fact in self.summary().items()
        )
        return f"<table><caption>{escape(self.title)}</caption>{''.join(rows)}</table>"
