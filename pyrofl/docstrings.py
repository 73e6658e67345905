"""Parser of docstrings: parts of a method's documentation, and descriptions of arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

DEPARTURES, USE = "Departures from ", "Use it "


@dataclass(frozen=True)
class Paper:
    """Parts of a method's module docstring: headline, paper, equations, when to use the method."""

    name: str  # of the method, as its paper writes it
    headline: str  # what it does, in a line
    source: str  # who wrote it up, and where
    parts: tuple[str | tuple[str, ...], ...]  # in order: a text, or lines of a block of equations
    use: str  # where to use it, and what it assumes
    departures: str  # what is not as in the paper; "" where all is

    @property
    def equations(self) -> tuple[tuple[str, ...], ...]:
        """Blocks of equations in the docstring of a method's module."""
        return tuple(part for part in self.parts if not isinstance(part, str))


def paper(text: str) -> Paper:
    r"""Parse the docstring of a method's module into headline, paper, equations and use.

    >>> found = paper("A: averages.\n\nB 2020.\n\n    w = 1\n\nUse it always.")
    >>> found.name, found.headline, found.source, found.equations, found.use
    ('A', 'averages', 'B 2020.', (('w = 1',),), 'Use it always.')
    """
    first, *blocks = re.split(r"\n\s*\n", inspect.cleandoc(text))
    name, _, headline = first.partition(": ")
    parts: list[str | tuple[str, ...]] = []
    use = departures = source = ""
    for block in blocks:
        if block.startswith(" "):
            parts.append(tuple(inspect.cleandoc(" \n" + block).splitlines()))
            continue
        description, cut, more = " ".join(block.split()).partition(DEPARTURES)
        departures = cut + more or departures
        if description.startswith(USE):
            use = description
        elif not source and not parts:
            source = description
        elif description:
            parts.append(description.strip())
    return Paper(name, headline.rstrip("."), source, tuple(parts), use, departures)


def arguments(function: Callable[..., Any]) -> dict[str, str]:
    """Parse a function's docstring, and return its arguments' descriptions: name -> text.

    >>> def f(a): '''Do.
    ...
    ...     Args:
    ...         a: what is done,
    ...             and how.
    ...     '''
    >>> arguments(f)
    {'a': 'what is done, and how.'}
    """
    _, _, after = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    return dict(_entries(re.split(r"\n(?=\S)", after)[0]))


def _entries(section: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n(?=    \w)", section.rstrip()):
        name, colon, text = entry.strip().partition(":")
        if colon:
            yield name, " ".join(text.split())
