"""Posteriors of the benchmark: each is data, a partition, a program and a reference posterior.

As in posteriordb, a JSON file describes each posterior, problems/NAME.json, and its reference is
stored apart: references/NAME.json has statistics, references/NAME.npz has draws.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import grouped_tables

from pyrofl import Federation
from pyrofl.inference.definition.programs import Program

HERE = Path(__file__).parent


@dataclass(frozen=True, eq=False)
class Problem:
    """A posterior, and how methods are run on it.

    Attributes:
        name: of the posterior.
        data: function of `grouped_tables` that returns the federation.
        model: MODULE.FUNCTION of the Pyro program, (received, local, batch).
        shared: sites that all clients share.
        responses: family of the responses.
        partition: of the rows among clients, see `grouped_tables.partitioned`.
        own: sites of each client that are compared, too.
        also: deterministic functions of the shared sites that are compared.
        hidden: shared sites that are not compared.
        pvi: arguments of `pvi.hierarchical`.
        pvi_rounds: rounds of PVI.
        likelihood: of a linear network, for methods that fit networks; "" for other programs.
        made_by: how the reference is made, see `references`.
        reference: name of the reference; problems that differ in the partition may share one.
        sums: program and data with the same posterior, and few rows, for the reference.
        box: limits of each unconstrained shared variable, for the reference "grid".
        rounds: of any method; None leaves the number to it.
        seed: of the method.
    """

    name: str
    data: str
    model: str
    shared: str
    responses: str
    partition: str = "natural"
    own: str = ""
    also: str = ""
    hidden: str = ""
    pvi: Mapping[str, Any] = field(default_factory=dict)
    pvi_rounds: int = 30
    likelihood: str = ""
    made_by: Literal["quadrature", "normal", "hmc", "grid"] = "quadrature"
    reference: str = ""
    sums: tuple[str, str] | None = None
    box: tuple[tuple[float, float], ...] = ()
    rounds: int | None = None
    seed: int = 0

    @cached_property
    def federation(self) -> Federation:
        """The data set, with its rows partitioned among clients."""
        return grouped_tables.partitioned(getattr(grouped_tables, self.data)(), self.partition)

    @property
    def program(self) -> Program:
        """The Pyro program."""
        return _function(self.model)

    @property
    def population(self) -> tuple[str, ...]:
        """Compared sites without a client axis."""
        shown = [n for n in self.shared.split() if n not in self.hidden.split()]
        return (*shown, *self.also.split())

    @property
    def compared(self) -> tuple[str, ...]:
        """Compared sites, those of the population first."""
        return (*self.population, *self.own.split())

    def pooled(self) -> tuple[Program, Federation]:
        """Return program and data of the reference."""
        if self.sums is None:
            return self.program, self.federation
        return _function(self.sums[0]), getattr(grouped_tables, self.sums[1])()


def load(name: str) -> Problem:
    """Return the problem with the given name; raise ValueError if there is none."""
    path = HERE / "problems" / f"{name}.json"
    if not path.exists():
        raise ValueError(f"problem {name!r} does not exist; expected one of {', '.join(NAMES)}")
    return Problem(**json.loads(path.read_text()))


def _function(spec: str) -> Any:
    module, _, name = spec.rpartition(".")
    return getattr(import_module(module), name)


NAMES = sorted(path.stem for path in (HERE / "problems").glob("*.json"))
