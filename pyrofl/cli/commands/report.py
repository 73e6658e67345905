"""The command `pyrofl report`: HTML page about a run or a comparison, the result first."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyrofl.cli.commands import benefit
from pyrofl.cli.output.sections import (
    CAPTIONS,
    bytes_sent,
    calibration_section,
    classes,
    clients,
    command_section,
    curve_section,
    faults,
    main_rows,
    partition_section,
    posteriors,
    score_section,
    sizes_of,
    tuning_section,
    verdicts,
)
from pyrofl.experiments.console import show
from pyrofl.experiments.results import PAGE
from pyrofl.experiments.saved_runs import SavedRun, runs
from pyrofl.files.link_safe_files import refuse_link
from pyrofl.files.lock import lock_folder
from pyrofl.reports import first_page as words
from pyrofl.reports.page import Section, page, write


def report(args: Namespace) -> None:
    """Write an HTML report, report.html, about a saved run or comparison into its folder."""
    folder = Path(args.folder)
    saved_runs = runs(folder)
    if "formula" in saved_runs[0].facts["experiment"]:
        if not (folder / PAGE).is_file():
            raise ValueError(f"{folder} holds a regression without {PAGE}; run it again")
        show(f"{folder / PAGE} is the page of this regression, as it was written with its results")
        return
    for one in saved_runs:
        _refuse_facts(one)
    with lock_folder(folder):
        refuse_link((folder / benefit.BENEFIT_FIGURE).parent)
        location = write(folder / PAGE, html(folder, saved_runs, args.question))
    show(location)


def _refuse_facts(saved: SavedRun) -> None:
    """Raise ValueError if run.json lacks what the report states."""
    for name in ("bytes_down", "bytes_up", "seconds", "silent", "rejected"):
        if not isinstance(saved.facts.get(name), list):
            raise ValueError(
                f"{saved.path / 'run.json'} lacks the list {name}; expected a run's facts, as "
                "pyrofl writes them"
            )


def html(folder: Path, saved: Sequence[SavedRun], question: str | None = None) -> str:
    """Return the report about saved runs as an HTML page."""
    methods, facts = list(dict.fromkeys(one.method for one in saved)), saved[0].facts
    kind = "classes" if facts["data"].get("classes") else "response"
    data = str(facts["experiment"].get("data", "the data")).removeprefix("csv:")
    target = facts["experiment"].get("target") or f"the {kind} of {data}"
    title = question or words.how_well(methods, target, facts["clients"])
    return page(title, sections(folder, saved))


def sections(folder: Path, saved: Sequence[SavedRun]) -> list[Section]:
    """Return all sections of the HTML report; with several seeds, figures show the first one."""
    first = list({one.method: one for one in reversed(saved)}.values())[::-1]
    several = folder != saved[0].path
    front, more = summary(folder, saved, first, several)
    return [
        front,
        *more,
        score_section(folder, saved, several),
        clients(first),
        classes(first),
        *tuning_section(folder, first),
        verdicts(saved),
        partition_section(first),
        curve_section(folder, first, several),
        calibration_section(first),
        posteriors(first),
        bytes_sent(saved),
        faults(saved),
        command_section(saved, several),
    ]


def summary(
    folder: Path, saved: Sequence[SavedRun], first: Sequence[SavedRun], several: bool
) -> tuple[Section, list[Section]]:
    """Return the first page, and the section on the benefit over local models, if any."""
    experiment, sizes = saved[0].facts["experiment"], sizes_of(saved[0])
    drawn: tuple[Any, str] | None = None
    results, problems, more = list[str](), list[str](), list[Section]()
    try:
        answer = benefit.compare_with_local(folder, saved, None)
        benefit.write(folder, answer)
        results, more = answer.results, [benefit_section(answer)]
        drawn = (
            folder / benefit.BENEFIT_FIGURE,
            "Difference from each client's own model, smallest first",
        )
    except ValueError as error:
        problems += [f"Benefit not computed: {error}."] if several else []
    parts = {}
    for one in first:
        whose = f"the {one.facts['tested'].get('main', ['main'])[0]} model of {one.method}"
        try:
            parts[one.method] = part = main_rows(one)
        except ValueError as error:
            results.append(f"{whose.capitalize()}: no intervals, as {error}.")
            continue
        if not more:
            kind = one.facts["tested"].get("rows", "test")
            results += words.score_sentences(part, sizes_of(one), whose, kind)
            drawn = drawn or _figure(one, part)
    for one in saved:
        start = f"{one.path.name}: " if several else ""
        problems += [f"{start}{note}." for note in one.facts.get("warnings", [])]
        for name, what in (("rejected", "messages were rejected"), ("silent", "drop-outs")):
            count = sum(map(len, one.facts.get(name, ())))
            problems += [f"{start}{count} {what}; see Faults."] if count else []
    runs = (f"{o.method}, {o.facts['rounds']} rounds, seed {o.seed}" for o in saved)
    about = [("Method", "; ".join(runs))]
    if sizes:
        data = str(experiment.get("data", ""))
        size_text = words.size_of([*sizes], [*sizes.values()], data, "training rows")
        about.insert(0, ("Data", size_text))
    options = [f"{n} {v}" for n in ("net", "partition") if (v := experiment.get(n))]
    options += experiment.get("settings") or []
    about += [("Settings", ", ".join(options))] if options else []
    all_status = ((one.path.name, one.facts["status"]) for one in saved)
    statuses = [(name, had["kind"], had.get("why", had["text"])) for name, had in all_status]
    certain = words.score_certainty(parts) if parts else []
    return words.first_page(about, results, drawn, statuses, certain, problems), more


def _figure(saved: SavedRun, part: Any) -> tuple[Any, str]:
    """Return the figure of the first page of a run: scores of clients, or for one, calibration."""
    sizes, path = sizes_of(saved), saved.path / "figures/reliability.png"
    return (path, CAPTIONS["reliability"]) if len(sizes) == 1 else words.score_figure(part, sizes)


def benefit_section(answer: benefit.Answer) -> Section:
    """Return the report section on the benefit over local models, client by client."""
    section = Section("Benefit of federation").table(answer.head, answer.table())
    if answer.calibration:
        section.table(benefit.CALIBRATED, answer.calibrated())
    for note in answer.notes:
        section.note(note)
    return section
