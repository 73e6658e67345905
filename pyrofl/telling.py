"""What objects say of themselves, in a terminal and in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from html import escape


class Told:
    """Tells what it is: a title, and a line for each fact."""

    @abstractmethod
    def _told(self) -> tuple[str, dict[str, str]]:
        """Return the title and the facts by name."""

    def __repr__(self) -> str:
        """Tell it in lines."""
        title, facts = self._told()
        width = max(map(len, facts))
        return "\n".join([title, *(f"  {name:<{width}}  {fact}" for name, fact in facts.items())])

    def _repr_html_(self) -> str:
        """Tell it as a table."""
        title, facts = self._told()
        rows = "".join(
            f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in facts.items()
        )
        return f"<table><caption>{escape(title)}</caption>{rows}</table>"
