"""Settings of an evaluation: model, adaptation, clients, rows and posterior draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from pyrofl.arguments import Count, check_fields, check_name
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.definition.seeds import Seed

Adaptation = Literal["none", "fine_tune", "train"]
Population = Literal["training", "held_out", "pooled"]
Part = Literal["test", "train"]


class ModelOptions(TypedDict, total=False):
    """Optional keyword arguments that select the evaluated model, its adaptation and the seed."""

    model: str | None
    adaptation: Adaptation
    seed: Seed
    chunk_size: int | None


class EvaluationFields(ModelOptions, total=False):
    """Keyword arguments of an evaluation: all fields of `EvaluationSpec`."""

    population: Population
    part: Part
    draws: int | None


@dataclass(frozen=True)
class EvaluationSpec:
    """Settings of an evaluation: model, adaptation, clients, rows and posterior draws.

    Attributes:
        model: a view of the method, "personal", "global" or "ensemble"; None is its main view.
        adaptation: training before the evaluation: "none", "fine_tune" (the method's `adapt`
            phases) or "train" (all its `phases`).
        population: "training" or "held_out" clients (only initialized, unless adapted), or
            "pooled": one client with all test rows, unadapted.
        part: "test" or "train" rows.
        draws: posterior draws to average predictions over; None uses the mean of the guide.
        seed: seed of the run.
        chunk_size: clients per vectorized batch; None chooses it by the size of their state.
    """

    model: str | None = None
    adaptation: Adaptation = "none"
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
                "the pooled population needs part='test' and adaptation='none'"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any], excluded: Sequence[str] = ()) -> EvaluationSpec:
        """Create the settings from keyword arguments; reject those named in `excluded`."""
        names = {f.name: f for f in fields(EvaluationSpec)}
        for name in excluded:
            del names[name]
        for name in options:
            check_name(name, names, "argument")
        return EvaluationSpec(**options)

    def view_name(self, method: Method) -> str:
        """Return the name of the requested model; raise ValueError if the method lacks it."""
        view = method.main_view if self.model is None else self.model
        if view not in method.views:
            raise ValueError(
                f"no {view!r} model in this method; expected one of {', '.join(method.views)}"
            )
        return view

    def phases(self, method: Method) -> tuple[Phase, ...]:
        """Return the training phases that adapt clients before an evaluation, as requested."""
        if self.adaptation == "fine_tune" and not method.adapt:
            raise ValueError(
                "adaptation is 'fine_tune', but this method has no adapt phases; use 'none' or "
                "'train'"
            )
        return {"none": (), "fine_tune": method.adapt, "train": method.phases}[self.adaptation]


def default_evaluation(method: Method) -> tuple[str, Adaptation]:
    """Return the name of a method's main model, and its default adaptation."""
    view = method.main_view
    return view, "fine_tune" if view == "personal" and method.adapt else "none"
