"""What of a user's file became a data set, and what of it did not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pyrofl.data.preparation import Preparation
from pyrofl.data.wording import listed


@dataclass(frozen=True, eq=False)  # a federation has to be hashable
class Source:
    """Where x and y come from: columns of a table, arrays of a file."""

    target: str
    features: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # column -> why it is no feature
    dropped: int = 0  # rows that were left out, as they lack a value
    lacking: Mapping[str, int] = field(default_factory=dict)  # column -> how many of them lack it
    lost: tuple[str, ...] = ()  # groups that have no other rows than those
    reordered: tuple[str, ...] = ()  # files whose columns come in another order
    unseen: Mapping[str, str] = field(default_factory=dict)  # column -> categories nobody trains on
    scales: str = ""  # what to say where features are on very different ones
    preparation: Preparation | None = None  # how columns became features; None: it is to come

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that features are made of."""
        made = self.preparation
        return self.features if made is None else tuple(column.name for column in made.columns)

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
        if self.reordered:
            told["columns in another order"] = listed(self.reordered)
        if self.preparation and (became := self.preparation.summary()):
            told["prepared"] = became
        if self.unseen:
            unseen = listed([f"{name} {what}" for name, what in self.unseen.items()])
            told["categories that nobody trains on, taken for none"] = unseen
        if self.scales:
            told["scales"] = self.scales
        return told

    def to_json(self) -> dict[str, Any]:
        """Tell all fields, as JSON has them."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found |= {n: list(v) for n, v in found.items() if isinstance(v, tuple)}
        found |= {n: dict(v) for n, v in found.items() if isinstance(v, Mapping)}
        made = self.preparation
        return found | {"preparation": None if made is None else json.loads(made.to_json())}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Source:
        """Read what `to_json` told.

        Raises:
            ValueError: if its preparation is none.
        """
        found: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in told.items()}
        if (made := found.get("preparation")) is not None:
            found["preparation"] = Preparation.from_json(json.dumps(made))
        return cls(**found)
