"""What of a user's file became a data set, and what of it did not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pyrofl.data.tables.preprocessor import Preprocessor
from pyrofl.data.tables.wording import listed

LEARNED = "normal:learned"  # name of the likelihood of numbers with noise of a learned scale


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
    centre: float = 0.0  # mean of a numeric target over the training rows, if it is standardised
    scale: float = 1.0  # its standard deviation there; both are by sums over clients
    preparation: Preprocessor | None = None  # how columns became features; None: it is to come

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that features are made of."""
        made = self.preparation
        return self.features if made is None else tuple(column.name for column in made.columns)

    @property
    def is_standardised(self) -> bool:
        """Whether the likelihood reads network outputs as those of a standardised target."""
        return (self.centre, self.scale) != (0.0, 1.0)

    def units(self) -> dict[str, str | float]:
        """Return attributes that state the units of a posterior, of a standardised target alone."""
        if not self.is_standardised:
            return {}
        return {
            "target": self.target,
            "target_centre": self.centre,
            "target_scale": self.scale,
            "target_unit": f"observed_data, posterior_predictive and log_likelihood have the unit "
            f"of {self.target}; the outputs of the network, and so its weights and "
            "noise.log_scale, are of (target - target_centre) / target_scale",
        }

    def summary(self) -> dict[str, str]:
        """Tell what y and x are, and what was left out."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        lacking = listed([f"{name} lacks {count}" for name, count in self.lacking.items()])
        gone = f"; no row is left of {listed(self.lost)}" if self.lost else ""
        inside = f"mean {self.centre:.6g}, standard deviation {self.scale:.6g} over the training "
        inside += "rows; predictions and scores are in its own unit"
        unseen = listed([f"{name} {what}" for name, what in self.unseen.items()])
        told = {
            "target": self.target,
            "features": f"{len(self.features)} ({listed(self.features)})",
            "left out": listed([f"{listed(names)} ({why})" for why, names in reasons.items()]),
            "rows dropped": f"{self.dropped} ({lacking}{gone})" if self.dropped else "",
            "columns in another order": listed(self.reordered),
            "prepared": self.preparation.summary() if self.preparation else "",
            "target standardised inside": inside if self.is_standardised else "",
            "categories that nobody trains on, taken for none": unseen,
            "scales": self.scales,
        }
        return {name: text for name, text in told.items() if text}

    def to_json(self) -> dict[str, Any]:
        """Tell all fields, as JSON has them."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found |= {n: list(v) for n, v in found.items() if isinstance(v, tuple)}
        found |= {n: dict(v) for n, v in found.items() if isinstance(v, Mapping)}
        made = self.preparation
        return found | {"preparation": None if made is None else json.loads(made.to_json())}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Source:
        """Read what `to_json` told."""
        found: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in told.items()}
        if (made := found.get("preparation")) is not None:
            found["preparation"] = Preprocessor.from_json(json.dumps(made))
        return cls(**found)
