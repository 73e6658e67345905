"""What a method's own tests tell those of all methods about it; a method that says nothing passes.

PROMISES = {"fedavg": Promises(message=(toys.ALL, toys.ALL))}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import toys

from pyrofl.inference.definition.programs import Prior

# One method of each kind: what is dear runs on these, and on all when slow.
ARCHETYPES = ("fedavg", "scaffold", "pfedvem", "pvi", "metavd", "fedbe", "ifca", "fedpop")


def others_slow(values: Iterable[Any], kept: Collection[Any] = ARCHETYPES) -> list[Any]:
    """Return parameters of a test; those that are not to be kept are marked slow."""
    slow = pytest.mark.slow
    return [v if v in kept else pytest.param(*_several(v), marks=slow) for v in values]


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class Promises:
    """What nobody can know who has not read the paper.

    Attributes:
        message: scalars that go up and down per client and round, for `toys.net()`.
        settings: what it cannot be built without, and less work where it is dear.
        unordered: settings without which its server's state is in the order of who reported.
        sent: private names that the paper sends up.
        rises: steps whose loss is a divergence that is 0 before round one, or grows with weights.
        any_number: patterns of what it sends that may be any number, beside the usual roles.
        numbers: whether it predicts numbers, too.
        prior: one to be tried where the usual ones do not fit.
        sites: latent sites and their own axes, for `toys.net()`.
        together: patterns of sites of which all clients have one value together.
        random: whether draws differ; otherwise the posterior is a point.
        statistics: statistics of each client, and their own axes.
    """

    message: tuple[int, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    unordered: Mapping[str, Any] = field(default_factory=dict)
    sent: frozenset[str] = frozenset()
    rises: frozenset[str] = frozenset()
    any_number: str = ""
    numbers: bool = True
    prior: Prior | None = None
    sites: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: toys.AXES)
    together: str = ""
    random: bool = False
    statistics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@cache
def told() -> dict[str, Promises]:
    """Return what tests in tests/models promise: method -> promises."""
    found: dict[str, Promises] = {}
    for path in sorted((Path(__file__).parent / "models").rglob("test_*.py")):
        if "\nPROMISES" not in path.read_text():
            continue
        spec = spec_from_file_location(f"promises_of_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= module.PROMISES
    return found


def of(name: str) -> Promises:
    """Return what is promised of a method."""
    return told().get(name, Promises())
