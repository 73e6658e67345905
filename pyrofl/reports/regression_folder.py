"""Results of a regression in a folder: tables, posterior, checkpoint, figures and page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyrofl.experiments import results
from pyrofl.files import run_folder, run_json, text_tables
from pyrofl.inference.fitted_run import saving
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors import export
from pyrofl.reports import model_report
from pyrofl.reports.page import page, write

ESTIMATES, RATIOS, POSTERIOR = "estimates.csv", "ratios.csv", "posterior.nc"

Facts = Mapping[str, Any]


def write_regression(
    folder: Path,
    run: Run,
    posterior: Callable[[], Any],
    facts: Facts,
    problems: list[str],
    *,
    data: str,
    question: str | None,
    units: Mapping[str, str] | None = None,
    guard: AbstractContextManager[Any] | None = None,
) -> tuple[list[str], list[str], str]:
    """Write tables, posterior, checkpoint, figures and the page of a run.

    Args:
        folder: an existing folder, with a folder figures.
        run: a fitted run of a regression.
        posterior: function without arguments that returns its draws as ArviZ data.
        facts: content of run.json.
        problems: warnings, to which those of the run are added.
        data: name of the data.
        question: title of the page; None asks what the model states.
        units: column -> its unit, for page and tables.
        guard: context manager in which files are written.

    Returns:
        The tables as text, the reasons for lacking figures, and the line on the page.
    """
    with guard or nullcontext():
        draws = posterior()
        own = replace(model_report.estimates(run, draws), units=dict(units or {}))
        _csv(folder / ESTIMATES, "parameter", own.table)
        if own.ratios is not None:
            _csv(folder / RATIOS, str(own.ratios.index.name), own.ratios)
        export.save(draws, folder / POSTERIOR)
        saving.save(run, folder / run_folder.CHECKPOINT)
        run_json.write(folder, facts, (ESTIMATES, RATIOS, POSTERIOR))
        drawings = list(model_report.drawings(run, own))
        lacking = results.drawn(folder, [(name, make) for name, _, make in drawings])
    problems += [text for text in run.warnings if text not in problems]
    drawn = [(name, text, folder / f"figures/{name}.png") for name, text, _ in drawings]
    drawn = [one for one in drawn if one[2].is_file()]
    sections_of_page = model_report.sections(run, own, drawn, problems, data)
    title = question or model_report.question(run)
    end = write(folder / results.PAGE, page(title, sections_of_page))
    tables = [_text("parameter", own.table.iloc[:, [0, 1, 3, 4]], own.units)]
    if own.ratios is not None:
        tables.append(_text(str(own.ratios.index.name), own.ratios, own.units))
    return tables, lacking, end


def _csv(path: Path, first: str, table: Any) -> None:
    run_folder.write_csv(path, (first, *table.columns), [(n, *v) for n, v in _lines(table)])


def _text(first: str, table: Any, units: Mapping[str, str]) -> str:
    rows = [(n, *v) for n, v in _lines(table)]
    return text_tables.table(*model_report.with_units((first, *table.columns), rows, units))


def _lines(table: Any) -> list[tuple[str, list[float]]]:
    return [(str(name), [float(v) for v in values]) for name, values in table.iterrows()]
