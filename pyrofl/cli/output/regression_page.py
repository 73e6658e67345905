"""Sections of the HTML page of a regression."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyrofl import figures
from pyrofl.cli.output.sections import Section
from pyrofl.experiments.regressions import RegressionExperiment
from pyrofl.inference.checks import predictive_checks
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models.regression import effects
from pyrofl.models.regression.columns import variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

SHOWN = 6  # columns with a conditional effect, and terms with a forest plot
CONTINUOUS, DISCRETE = ("mean", "sd", "max"), ("mean", "sd", "zeros")
REPLICAS, CELLS = 1000, 5_000_000  # posterior predictive draws; numbers in all of them

Made = Callable[[], "Figure"]


def estimates(run: Run, found: Any) -> tuple[DataFrame, DataFrame | None]:
    """Return the table of estimates, and that of ratios if exp(b) has a meaning."""
    from pyrofl.inference.posteriors.summary import summarize

    table = summarize(found, names=run.method.variables())
    method: Any = run.method
    has_ratios = method.design.family.ratio.get(method.link) and method.design.terms
    return table, effects.ratios(run) if has_ratios else None


def drawings(run: Run) -> Iterator[tuple[str, str, Made]]:
    """Yield file name, caption and plot function of each figure of a regression."""
    method: Any = run.method
    terms = dict.fromkeys(label for one in method.design.groups for label in one.labels)
    for k, term in enumerate(list(terms)[:SHOWN]):
        text = f"{term} of each client or level, with 95% intervals"
        yield f"forest-{k}", text, partial(effects.forest, run, term)
    names = variables(method.design.formula.population)[0]
    columns = [name for name in method.design.needed if name in names]
    for k, column in enumerate(columns[:SHOWN]):
        text = f"Expected response by {column}; other columns at their means or first levels"
        yield f"conditional-{k}", text, partial(_conditional, run, column)
    if method.design.family.kind == "rows":
        text = "Statistics of each client's responses, observed and predicted (95%)"
        yield "predictive", text, partial(_predictive, run)


def _conditional(run: Run, column: str) -> Figure:
    return figures.conditional(effects.conditional(run, column))


def _predictive(run: Run) -> Figure:
    method: Any = run.method
    is_discrete = method.design.family.support in ("count", "trials", "binary")
    draws = min(REPLICAS, max(CELLS // len(run.data.y), 100))
    table = predictive_checks(run, DISCRETE if is_discrete else CONTINUOUS, draws, progress=False)
    return figures.predictive_checks(table)


def sections(
    experiment: RegressionExperiment,
    run: Run,
    tables: tuple[DataFrame, DataFrame | None],
    drawn: Sequence[tuple[Path, str]],
    problems: Sequence[str],
) -> list[Section]:
    """Return all sections of the page; `problems` are the warnings of the build and the fit."""
    method: Any = run.method
    model = Section("Model").table(
        (),
        [
            ("formula", experiment.formula),
            ("family", f"{experiment.family}, link {method.link}"),
            ("data", experiment.data),
            ("clients", run.data.clients),
            ("rows", len(run.data.y)),
        ],
    )
    model.note("Priors:").note(method.priors(), "command")
    clients = Section("Clients and rows")
    sizes = zip(run.data.names, run.data.sizes.tolist(), strict=True)
    clients.table(("client", "rows"), [(name, int(size)) for name, size in sizes])
    state = Section("Convergence and warnings").note(str(run.status), "said")
    for text in problems:
        state.note(f"Warning: {text}")
    if not problems:
        state.note("No warnings.")
    found = [model, clients, _estimates(*tables), state]
    titles = {"forest": "Clients", "conditional": "Conditional effects"}
    titles["predictive"] = "Posterior predictive check"
    for kind, title in titles.items():
        of_kind = [(path, text) for path, text in drawn if path.stem.startswith(kind)]
        section = Section(title)
        for path, text in of_kind:
            section.figure(path, text)
        if not of_kind:
            section.note("No figure applies to this formula and family.")
        found.append(section)
    found.append(_costs(run))
    program = Section("Program").note("The Pyro program that was fitted:")
    found.append(program.note(method.program(), "command"))
    return found


def _estimates(table: DataFrame, ratios: DataFrame | None) -> Section:
    section = Section("Estimates")
    shown = table.drop(columns=["r_hat", "importance_ess"], errors="ignore").dropna(axis=1)
    section.table(("parameter", *shown.columns), _lines(shown))
    section.note("Intervals are central 95% intervals of the posterior.")
    if ratios is not None:
        section.table((str(ratios.index.name), *ratios.columns), _lines(ratios))
    return section


def _lines(table: DataFrame) -> list[tuple[Any, ...]]:
    return [(str(name), *map(float, values)) for name, values in table.iterrows()]


def _costs(run: Run) -> Section:
    down, up = (sum(getattr(r, name) for r in run.records) for name in ("bytes_down", "bytes_up"))
    lines = [(run.state.number, down, up, sum(r.seconds for r in run.records))]
    head = ("rounds", "bytes down", "bytes up", "seconds of training")
    return Section("Communication").table(head, lines)
