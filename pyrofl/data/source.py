"""What of a user's file became a data set, and what of it did not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, Protocol

MOST = 8  # names that are listed before the rest is counted


class Preparation(Protocol):
    """How x is made of a table's columns; a class of pyrofl.data that has `from_json` too."""

    def to_json(self) -> Any:
        """Tell all that it has learned, as JSON has it; `from_json` of its class reads that."""
        ...

    def apply(self, table: Mapping[str, Any]) -> Any:
        """Make x [N, *x] of columns by name, `columns.Column` each."""
        ...


@dataclass(frozen=True, eq=False)  # a federation has to be hashable
class Source:
    """Where x and y come from: columns of a table, arrays of a file."""

    target: str
    features: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # column -> why it is no feature
    dropped: int = 0  # rows that were left out, as they lack a value
    lacking: Mapping[str, int] = field(default_factory=dict)  # column -> how many of them lack it
    lost: tuple[str, ...] = ()  # groups that have no other rows than those
    preparation: Preparation | None = None  # None: columns of x are the features as they are

    def summary(self) -> dict[str, str]:
        """Tell what y and x are, and what was left out."""
        told = {"target": self.target}
        told["features"] = f"{len(self.features)} ({listed(self.features)})"
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        if reasons:
            told["left out"] = listed([f"{listed(n)} ({why})" for why, n in reasons.items()])
        if self.dropped:
            lacking = listed([f"{name} lacks {count}" for name, count in self.lacking.items()])
            gone = f"; no row is left of {listed(self.lost)}" if self.lost else ""
            told["rows dropped"] = f"{self.dropped} ({lacking}{gone})"
        return told

    def to_json(self) -> dict[str, Any]:
        """Tell all fields, as JSON has them."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found |= {n: list(v) for n, v in found.items() if isinstance(v, tuple)}
        found |= {n: dict(v) for n, v in found.items() if isinstance(v, Mapping)}
        if (made := found.pop("preparation")) is not None:
            name = f"{type(made).__module__}:{type(made).__qualname__}"
            found["preparation"] = {"class": name, "learned": made.to_json()}
        return found

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Source:
        """Read what `to_json` told.

        Raises:
            ValueError: if the preparation is of no class of pyrofl.data.
        """
        found: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in told.items()}
        if made := found.get("preparation"):
            module, _, name = made["class"].partition(":")
            if not module.startswith("pyrofl.data."):
                raise ValueError(f"preparation is {made['class']!r}; expected one of pyrofl.data")
            found["preparation"] = getattr(import_module(module), name).from_json(made["learned"])
        return cls(**found)


def listed(words: Sequence[str], most: int = MOST) -> str:
    """List some words, and say how many more there are.

    >>> listed("abcd", 3), listed("abc", 3)
    ('a, b, c and 1 more', 'a, b, c')
    """
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def refuse_no_file(path: str) -> None:
    """Refuse what would be waited for or read without end: a pipe, a device.

    Raises:
        ValueError: if there is something that is neither a file nor a directory.
    """
    if "\0" in path:
        raise ValueError(f"{path!r} has a NUL in it; expected the path of a file")
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is a pipe or a device; expected a file, which can be read twice")
