"""Results of the clients of a regression: standardized ratios, and ratios of their effects."""

from __future__ import annotations

from typing import Any

from pandas import DataFrame

from pyrofl.inference.fitted_run.run import Run
from pyrofl.models.regression import effects
from pyrofl.models.regression.averages import EVENTS
from pyrofl.nouns import nouns
from pyrofl.reports.first_page import format_interval, number
from pyrofl.reports.page import Section

ENDS = ["2.5%", "97.5%"]
HEAD = ("rows", "observed", "expected", "raw", "ratio", "2.5%", "97.5%", "p_above_1")


def standardized(run: Run, posterior: Any) -> DataFrame | None:
    """Return the standardized ratios of the clients whose rows are here; None if there are none.

    Args:
        run: of a regression.
        posterior: its draws, with the effects of these clients.
    """
    design: Any = run.method.design  # type: ignore[attr-defined]
    own = [one for one in design.groups if one.kind != "shared" and not one.parameter]
    has_draws = own and all(f"r_{one.name}" in posterior for one in own)
    if not has_draws or design.family.support not in EVENTS or not design.clients.frames:
        return None
    return effects.standardize(run)


def effect_ratios(run: Run, posterior: Any) -> DataFrame | None:
    """Return exp of each effect of clients, if it has a meaning for the link; else None."""
    method: Any = run.method
    kinds = [one for one in method.design.groups if not one.parameter]
    has_draws = kinds and all(f"r_{one.name}" in posterior for one in method.design.groups)
    if not has_draws or method.design.family.ratio.get(method.link) is None:
        return None
    return effects.groups(run, ratio=True)


def client_sections(run: Run, posterior: Any) -> list[Section]:
    """Return the section on the clients' results, if there are any that have a ratio."""
    ratios, table = effect_ratios(run, posterior), standardized(run, posterior)
    section = Section(f"Results of {nouns().client.many}")
    if table is not None:
        section.list("Standardized ratios", sentences(table))
        section.table(
            (str(nouns().client), *HEAD), [(str(n), *map(float, v)) for n, v in _of(table)]
        )
        section.note(
            "Expected events are those of the same rows with an effect of 0; the ratio divides "
            "the events that the model predicts by these, and raw the observed ones."
        )
    if ratios is not None:
        name = ratios.attrs["ratio"]
        head = ("group", "level", "term", name, *ratios.columns[1:])
        section.table(head, [(*map(str, n), *map(float, v)) for n, v in _of(ratios)])
        section.note(f"Each {name} compares with an effect of 0, at equal columns.")
    return [section] if section.parts else []


def sentences(table: DataFrame) -> list[str]:
    """Return a sentence on the standardized ratio of each client.

    >>> sentences(DataFrame(
    ...     {"observed": 12.0, "expected": 10.0, "median": 1.1, "2.5%": 0.8, "97.5%": 1.5},
    ...     index=["bern"],
    ... ))
    ['bern: 12 observed, 10 expected; standardized ratio 1.1 (95% interval 0.8 to 1.5).']
    """
    return [
        f"{name}: {number(row['observed'])} observed, {number(row['expected'])} expected; "
        f"standardized ratio {number(row['median'])} ({format_interval(*row[ENDS])})."
        for name, row in table.iterrows()
    ]


def _of(table: DataFrame) -> list[tuple[Any, Any]]:
    """Return labels and values of the lines of a table."""
    return [
        (name if isinstance(name, tuple) else str(name), values)
        for name, values in table.iterrows()
    ]
