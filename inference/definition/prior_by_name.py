"""Priors that depend on the parameter's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyro.distributions import TorchDistribution
from torch import Size

from pyrofl.data import Batch
from pyrofl.tensors import Tensors, matches


@dataclass(frozen=True)
class ByName:
    """Priors of network parameters, chosen by the first name pattern that matches.

    See `priors.by_name`.

    Attributes:
        priors: patterns -> prior, as a function.
        families: patterns -> prior as it was passed, for methods that need location-scale families.
    """

    priors: Mapping[str, Any]
    families: Mapping[str, Any]

    def __call__(
        self, name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        """Return the prior distribution of the network parameter `name`."""
        fn: TorchDistribution = self.of(name)(name, shape, received, local, batch)
        return fn

    def of(self, name: str) -> Any:
        """Return the prior of the first pattern that matches a parameter's name."""
        return self.priors[self.pattern_of(name)]

    def pattern_of(self, name: str) -> str:
        """Return the first patterns that match a parameter's name; raise ValueError if none do."""
        for patterns in self.priors:
            if matches(name, patterns):
                return patterns
        raise ValueError(
            f"parameter {name} has no prior: it matches none of the patterns "
            f"{', '.join(self.priors)}; add a pattern such as '*'"
        )

    def refuse_unused(self, names: Iterable[str]) -> None:
        """Raise ValueError if a pattern matches no parameter, or earlier ones match all of its."""
        names = list(names)
        deciding = {self.pattern_of(name) for name in names}
        for patterns in self.priors:
            for pattern in patterns.split() or [patterns]:
                if not any(matches(name, pattern) for name in names):
                    raise ValueError(
                        f"prior has the pattern {pattern!r}, which matches no parameter; expected "
                        f"patterns of {', '.join(names)}"
                    )
            if patterns not in deciding and patterns != "*":  # '*' may stand for "all others"
                raise ValueError(
                    f"prior has the pattern {patterns!r}, but earlier patterns match all of its "
                    "parameters; move it before them, as the first pattern decides: expected "
                    "'*' last"
                )
