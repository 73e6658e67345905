"""The command `pyrofl report`: HTML page with all figures of a run or a comparison."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

from pyrofl.cli.commands import benefit
from pyrofl.cli.output.sections import (
    Section,
    asked,
    bytes_sent,
    calibrated,
    classes,
    clients,
    faults,
    held,
    learned,
    posteriors,
    repeated,
    scored,
    tuned,
    verdicts,
)
from pyrofl.experiments.console import ending, show
from pyrofl.experiments.results import PAGE
from pyrofl.experiments.saved_runs import SavedRun, runs
from pyrofl.files.lock import locked
from pyrofl.files.run_folder import replacing


def report(args: Namespace) -> None:
    """Write an HTML report, report.html, about a saved run or comparison into its folder."""
    folder = Path(args.folder)
    made = runs(folder)
    if "formula" in made[0].facts["experiment"]:
        raise ValueError(f"{folder} holds a regression; pyrofl regress wrote {folder / PAGE}")
    with locked(folder):
        told = write_page(folder, html(folder, made))
    show(told)


def write_page(folder: Path, text: str) -> str:
    """Write a page to report.html in a folder, and return a line about it for the user."""
    told = partial("{} cannot be written: {}".format, folder / PAGE)
    with ending(told), replacing(folder / PAGE) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return f"{folder / PAGE} is one file of {len(text) / 1e6:.1f} MB; it opens without a network"


def html(folder: Path, made: Sequence[SavedRun]) -> str:
    """Return the report about saved runs as an HTML page."""
    methods = ", ".join(dict.fromkeys(one.method for one in made))
    title = f"{methods} on {made[0].facts['experiment'].get('data', 'data')}"
    return page(title, sections(folder, made))


def page(title: str, sections: Sequence[Section]) -> str:
    """Return an HTML page of sections, in which all texts are escaped."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ValueError(
            "a report is written by jinja2; expected pip install 'pyrofl[report]'"
        ) from error
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = pages.from_string(
        files("pyrofl.cli.output").joinpath("page.html").read_text("utf-8")
    )
    return template.render(title=title, sections=sections)


def sections(folder: Path, made: Sequence[SavedRun]) -> list[Section]:
    """Return all sections of the HTML report; with several seeds, figures show the first one."""
    first = list({one.method: one for one in reversed(made)}.values())[::-1]
    several = folder != made[0].path
    found = [bought(folder, made)] if several else []
    found += [
        verdicts(made),
        scored(folder, made, several),
        classes(first),
        *tuned(folder, first),
        asked(made),
        held(first),
        learned(folder, first, several),
        calibrated(first),
        clients(first),
        posteriors(first),
        bytes_sent(made),
        faults(made),
        repeated(made, several),
    ]
    return found


def bought(folder: Path, made: Sequence[SavedRun]) -> Section:
    """Return the report section on the benefit over local models; a note if it is unavailable."""
    section = Section("What did federation buy?")
    try:
        found = benefit.compare_with_local(folder, made, None)
        benefit.write(folder, found)
    except ValueError as error:
        return section.note(f"Benefit not computed: {error}.")
    for sentence in found.sentences:
        section.note(sentence, "said")
    section.table(found.head, found.table())
    section.figure(
        folder / benefit.FIGURE, "Difference from each site's own model, smallest site first"
    )
    if found.calibration:
        section.table(benefit.CALIBRATED, found.calibrated())
    for note in found.notes:
        section.note(note)
    return section
