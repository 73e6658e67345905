"""What is asked of a round: said once, checked once, and passed along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from pyrofl.arguments import Count, check_fields, known
from pyrofl.inference.method import Method, Phase
from pyrofl.inference.seeds import Seed

Adapted = Literal["none", "fine_tune", "train"]
Population = Literal["training", "held_out", "pooled"]
Part = Literal["test", "train"]


class ModelAsked(TypedDict, total=False):
    """Fields of `EvaluationSpec` that say which model, as keyword arguments."""

    model: str | None
    adaptation: Adapted
    seed: Seed
    chunk_size: int | None


class EvaluationFields(ModelAsked, total=False):
    """All fields of `EvaluationSpec`, as keyword arguments."""

    population: Population
    part: Part
    draws: int | None


@dataclass(frozen=True)
class EvaluationSpec:
    """Which model is asked, adapted how, of which clients, about which rows.

    Attributes:
        model: one of the method's views, "personal", "global" or "ensemble"; None is its main one.
        adaptation: what is run first on the client's training rows: "none", the method's "adapt",
            or all its "phases".
        population: "training" or "held_out" clients (these join and no more), or "pooled": one
            client with all test rows, unadapted.
        part: "test" or "train" rows.
        draws: of the guide, whose predicted probabilities are averaged; None is the guide's mean.
        seed: of the run.
        chunk_size: clients side by side; None goes by the size of their state.
    """

    model: str | None = None
    adaptation: Adapted = "none"
    population: Population = "training"
    part: Part = "test"
    draws: Count | None = None
    seed: Seed = 0
    chunk_size: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.population == "pooled" and (self.part, self.adaptation) != ("test", "none"):
            raise ValueError(
                f"population is 'pooled', part {self.part!r}, adaptation {self.adaptation!r}; "
                "expected part='test' and adaptation='none' for the pooled population"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any], without: str = "") -> EvaluationSpec:
        """Take keyword arguments; a question may go `without` some, which are refused then."""
        names = {f.name: f for f in fields(EvaluationSpec) if f.name not in without.split()}
        for name in given:
            known(name, names, "argument")
        return EvaluationSpec(**given)

    def view(self, method: Method) -> str:
        """Return the name of the view that is asked."""
        view = method.main_view if self.model is None else self.model
        if view not in method.views:
            raise ValueError(f"no {view!r} model; this method has {', '.join(method.views)}")
        return view

    def phases(self, method: Method) -> tuple[Phase, ...]:
        """Return what is run first."""
        if self.adaptation == "fine_tune" and not method.adapt:
            raise ValueError("adaptation is 'fine_tune'; this method runs nothing before its test")
        return {"none": (), "fine_tune": method.adapt, "train": method.phases}[self.adaptation]


def default_model(method: Method) -> tuple[str, Adapted]:
    """Return the model that a method is about, and adapted how: a personal one if it can be."""
    view = method.main_view
    return view, "fine_tune" if view == "personal" and method.adapt else "none"
