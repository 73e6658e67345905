"""Where features and target come from in a user's file, and what was dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pyrofl.data.tables.wording import listed
from pyrofl.extensions import required

if TYPE_CHECKING:
    from pyrofl.data.tables.preprocessor import Preprocessor

LEARNED = "normal:learned"  # name of the likelihood of numbers with noise of a learned scale


@dataclass(frozen=True, eq=False)  # a federation has to be hashable
class Source:
    """Where features and target come from, and what was dropped."""

    target: str
    features: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # column -> reason
    dropped: int = 0  # number of rows dropped because of missing values
    lacking: Mapping[str, int] = field(default_factory=dict)  # column -> its missing values
    lost: tuple[str, ...] = ()  # groups without any row left
    reordered: tuple[str, ...] = ()  # files whose columns come in another order
    unseen: Mapping[str, str] = field(default_factory=dict)  # column -> untrained categories
    scales: str = ""  # warning about very different scales of features
    center: float = 0.0  # training mean of a numeric target, if it is standardized
    scale: float = 1.0  # its training standard deviation; both are from sums over clients
    preparation: Preprocessor | None = None  # None: not yet known
    client_column: str = ""  # column that identifies the client, if clients are its groups

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that the features are computed from."""
        preprocessor = self.preparation
        return (
            self.features
            if preprocessor is None
            else tuple(column.name for column in preprocessor.columns)
        )

    @property
    def is_standardized(self) -> bool:
        """Whether the target was standardized for training."""
        return (self.center, self.scale) != (0.0, 1.0)

    def units(self) -> dict[str, str | float]:
        """Return metadata on the units of a posterior; empty unless the target is standardized."""
        if not self.is_standardized:
            return {}
        return {
            "target": self.target,
            "target_center": self.center,
            "target_scale": self.scale,
            "target_unit": f"observed_data, posterior_predictive and log_likelihood have the unit "
            f"of {self.target}; the outputs of the network, and so its weights and "
            "noise.log_scale, are of (target - target_center) / target_scale",
        }

    def summary(self) -> dict[str, str]:
        """Return a summary of target, features and omitted rows and columns as label -> text."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why, []).append(name)
        lacking = listed([f"{name} lacks {count}" for name, count in self.lacking.items()])
        gone = f"; no row is left of {listed(self.lost)}" if self.lost else ""
        inside = f"mean {self.center:.6g}, standard deviation {self.scale:.6g} over the training "
        inside += "rows; predictions and scores are in its own unit"
        unseen = listed([f"{name} {what}" for name, what in self.unseen.items()])
        texts = {
            "target": self.target,
            "features": f"{len(self.features)} ({listed(self.features)})",
            "left out": listed([f"{listed(names)} ({why})" for why, names in reasons.items()]),
            "rows dropped": f"{self.dropped} ({lacking}{gone})" if self.dropped else "",
            "columns in another order": listed(self.reordered),
            "prepared": self.preparation.summary() if self.preparation else "",
            "target standardized internally": inside if self.is_standardized else "",
            "categories absent from all training rows, treated as missing": unseen,
            "scales": self.scales,
        }
        return {name: text for name, text in texts.items() if text}

    def to_json(self) -> dict[str, Any]:
        """Return the record of the data's origin as JSON-compatible values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {n: list(v) for n, v in values.items() if isinstance(v, tuple)}
        values |= {n: dict(v) for n, v in values.items() if isinstance(v, Mapping)}
        preprocessor = self.preparation
        return values | {
            "preparation": None if preprocessor is None else json.loads(preprocessor.to_json())
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Source:
        """Restore the record of the data's origin from the values that `to_json` returned."""
        values: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in told.items()
        }
        if (made := values.get("preparation")) is not None:
            preprocessor = required("preprocessor", "a prepared table")
            values["preparation"] = preprocessor.from_json(json.dumps(made))
        return cls(**values)
