"""Sections of the HTML report: texts, tables and figures read from the files of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyrofl.choices import RowScore
from pyrofl.cli.output.received_tables import comparison, read_search
from pyrofl.experiments import rows
from pyrofl.experiments.comparison import compare_lines
from pyrofl.experiments.experiment import Experiment
from pyrofl.experiments.rows import has_crps, rows_of_model
from pyrofl.experiments.saved_runs import SavedRun
from pyrofl.files import run_folder
from pyrofl.reports.first_page import score_of, score_table
from pyrofl.reports.model_report import fitting
from pyrofl.reports.page import Section

TRAVELED = ("bytes_down", "bytes_up", "seconds")  # of each round, in run.json
BY_CLASS = (
    "Recall of all is the balanced accuracy; AUROC and average precision are those of a class's "
    "probability against all other rows, by scikit-learn, and of all their means over classes."
)
CAPTIONS = {
    "partition": "Who holds how many training rows of which class",
    "curves": "Scores after rounds of training",
    "convergence": "How far the model still moves in each round",
    "watched": "Numbers that the method watches",
    "comparison": "All methods: means and standard errors over seeds",
    "reliability": "How often predictions are right, by how sure they are: ideally as often",
    "clients": "Every client: score against training rows",
    "confidence": "How much each client counts at the server",
}


def verdicts(saved: Sequence[SavedRun]) -> Section:
    """Return the report section with the convergence status of every run."""
    lines = ((one.path.name, one.facts["rounds"], one.facts["status"]["text"]) for one in saved)
    section = Section("Convergence").table(("run", "rounds", "status"), lines)
    for one in saved:
        for note in one.facts.get("warnings", []):
            if note != one.facts["status"]["text"]:  # which the table has
                section.note(f"{one.path.name}: {note}.")
    return section


def score_section(folder: Path, saved: Sequence[SavedRun], several: bool) -> Section:
    """Return the report section with the models' scores and standard errors or intervals."""
    section = Section("Scores")
    if several and (folder / "compare.csv").is_file():
        of = comparison(folder / "compare.csv", saved)
        seen = {(method, seed) for method, seed, *_ in of}
        if lacks := [one.path.name for one in saved if (one.method, one.seed) not in seen]:
            section.note(f"compare.csv lacks the scores of {', '.join(lacks)}.")
        open_runs = {(one.method, one.seed) for one in saved if not one.converged}
        head, laid, notes = compare_lines(of, open_runs)
        section.table(head, laid)
        for note in notes:
            section.note(note)
        section.note("Clients weigh the same; ±: one standard error over seeds.")
        return section.figure(folder / "figures/comparison.png", CAPTIONS["comparison"])
    for one in saved:
        try:
            section.table(("model", "adaptation", "score", "mean", "95% interval"), _means(one))
        except ValueError as error:
            section.note(f"No intervals: {error}.")
            last = run_folder.read_csv(one.path / "metrics.csv")
            end = [r for r in last if r["round"] == last[-1]["round"]]
            names = run_folder.METRICS[1:-1]
            lines = [(*(r[n] for n in names), float(r["value"])) for r in end]
            section.table((*names, "mean of clients"), lines)
    return section.note("All test rows of clients that train weigh the same.")


def _means(saved: SavedRun) -> list[tuple[Any, ...]]:
    """Return mean test scores of every model of a run, with confidence intervals."""
    lines = []
    for model, part in rows.read(saved.path).groupby(["model", "adaptation"], sort=False):
        numbers: list[RowScore] = ["accuracy"] if rows.classes_of(part) else ["error"]
        numbers += ["log_score", *(("crps",) if has_crps(part) else ())]
        for by in numbers:
            interval_of_score = score_of(part, by)
            ends = f"{interval_of_score.low:.4g} to {interval_of_score.high:.4g}"
            lines.append((*model, by.replace("_", " "), interval_of_score.mean, ends))
    return lines


def classes(saved: Sequence[SavedRun]) -> Section:
    """Return the report section with scores per class over the test rows of all clients."""
    from pyrofl.inference.checks.by_class import scores_by_class

    section = Section("Classes")
    for one in saved:
        try:
            table = rows.read(one.path)
        except ValueError as error:
            section.note(f"No scores by class: {error}.")
            continue
        names, main = rows.classes_of(table), tuple(one.facts["tested"].get("main", ()))
        mine = rows_of_model(table, (one.method, *main))
        if names and len(mine):
            found = scores_by_class(*rows.class_probabilities(mine), names).astype({"rows": int})
            head = ("class", *(name.replace("_", " ") for name in found.columns))
            section.table(head, (_plain(line) for line in found.itertuples()))
            section.note(f"{one.path.name}: its {main[0]} model.")
    return section.note(BY_CLASS if section.has("table") else "There are no scores by class.")


def _plain(line: Sequence[Any]) -> list[Any]:
    """Convert a data-frame row to plain Python values, with "-" for missing values."""
    return [
        "-" if value != value else getattr(value, "item", lambda v=value: v)() for value in line
    ]


def tuning_section(folder: Path, saved: Sequence[SavedRun]) -> list[Section]:
    """Return the report section on tuned settings in a list, which is empty without tuning."""
    section, lines = Section("How settings were chosen"), []
    for one in saved:
        path = folder / f"{one.method}-tune"
        if (path / "tune.json").is_file():
            had = read_search(path / "tune.json")
            chosen, about = _words(had["chosen"]) or "defaults", had["about"]
            count, share = len(about["settings"]), about["validation fraction"]
            cost = (had["rounds"], float(had["seconds"]))
            first = next(iter(had["margins"]), None)
            margin = "-" if first is None else f"{first['behind']:.4f}"
            if first and first["error"] is not None:
                margin += f" ± {first['error']:.4f}"
            lines.append((one.method, chosen, count, had["metric"], had["score"], margin, *cost))
            section.figure(path / "figures/tune.png", f"{one.method}: all settings, by rounds")
    if not lines:
        return []
    head = ("method", "chosen", "settings", "by", "score", "margin", "rounds", "seconds")
    note = f"Chosen on a fraction of {share:g} of the training rows; test rows were not used. "
    note += "The margin over the runner-up is a mean over seeds, with its standard error."
    section.table(head, lines).note(note)
    return [section]


def _words(value: Any) -> str:
    """Format a value from run.json as text."""
    if isinstance(value, dict):
        return ", ".join(f"{n} {v}" for n, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def partition_section(saved: Sequence[SavedRun]) -> Section:
    """Return the report section on the partition: each client's number of rows, and a figure."""
    one = saved[0]
    section, facts = Section("Who holds what"), one.facts["data"]
    plain = {n: v for n, v in facts.items() if not isinstance(v, dict) and v not in (None, [], "")}
    section.table((), [(n, _words(v)) for n, v in plain.items()])
    sizes = sorted(sizes_of(one).items(), key=lambda item: item[1])
    section.table(("client", "training rows"), sizes)
    return section.figure(one.path / "figures/partition.png", CAPTIONS["partition"])


def _clients(saved: SavedRun) -> list[dict[str, str]]:
    path = saved.path / "clients.csv"
    lines = run_folder.read_csv(path) if path.is_file() else []
    if lines and not {"client", "size"} <= set(lines[0]):
        raise ValueError(f"{path} lacks column client or size; expected those that pyrofl writes")
    return lines


def curve_section(folder: Path, saved: Sequence[SavedRun], several: bool) -> Section:
    """Return the report section with curves of scores and of parameter changes over rounds."""
    section = Section("Learning curves")
    section.figure(folder / "figures/curves.png", CAPTIONS["curves"])
    return _each(section, saved, "convergence", "watched")


def _each(section: Section, saved: Sequence[SavedRun], *names: str) -> Section:
    """Add the figures with the given names to a report section; missing files are skipped."""
    for one in saved:
        for name in names:
            path = one.path / f"figures/{name}.png"
            if path.is_file():
                section.figure(path, f"{one.path.name}: {CAPTIONS[name]}")
    section_with_figure = section.has("figure")
    return section if section_with_figure else section.note(f"No figure: {', '.join(names)}.")


def calibration_section(saved: Sequence[SavedRun]) -> Section:
    """Return the report section with reliability diagrams, which show the calibration."""
    return _each(Section("Calibration"), saved, "reliability")


def clients(saved: Sequence[SavedRun]) -> Section:
    """Return the report section with every client's score, the smallest client first."""
    section = Section("Clients")
    for one in saved:
        try:
            section.table(*score_table(main_rows(one), sizes_of(one)))
        except ValueError:
            main = tuple(one.facts["tested"].get("main", ()))
            own = [r for r in _clients(one) if (r["model"], r["adaptation"]) == main]
            first = next((r["metric"] for r in own), "")
            lines = [
                (r["client"], int(r["size"]), float(r["value"]))
                for r in own
                if r["metric"] == first
            ]
            section.table(("client", "training rows", first), sorted(lines, key=lambda r: r[1]))
            section.note("No intervals: predictions of single rows are not in this folder.")
        section.note(f"{one.path.name}: its {one.facts['tested'].get('main', [''])[0]} model.")
    return _each(section, saved, "clients", "confidence")


def main_rows(saved: SavedRun) -> Any:
    """Return the predictions of single rows by the main model of a run.

    Raises:
        ValueError: if they were not saved.
    """
    table = rows_of_model(
        rows.read(saved.path), (saved.method, *saved.facts["tested"].get("main", ()))
    )
    if not len(table):
        raise ValueError(f"{saved.path / rows.ROWS_FILE} has no rows of the main model")
    return table


def sizes_of(saved: SavedRun) -> dict[str, int]:
    """Return the number of training rows of every client of a run."""
    return {r["client"]: int(r["size"]) for r in _clients(saved)}


def posteriors(saved: Sequence[SavedRun]) -> Section:
    """Return the report section with ArviZ summaries of the runs' posteriors."""
    section = Section("Posterior")
    for one in saved:
        path = one.path / "posterior.nc"
        if not path.is_file():
            section.note(f"{one.path.name} has no posterior.nc.")
            continue
        try:
            _summarize(section, one, path)
        except Exception as error:  # whatever the file or the library says
            section.note(f"{path} cannot be summarized: {error}.")
    return section


def _summarize(section: Section, saved: SavedRun, path: Path) -> None:
    from pyrofl.inference.posteriors import export

    data = export.load(path)
    shown, left = fitting(data["posterior"])
    if shown:
        table = export.import_arviz().summary(data, var_names=shown, kind="stats")
        numbers = zip(table.index, table.to_numpy(), strict=True)
        lines = [(str(name), *map(float, values)) for name, values in numbers]
        section.table((saved.path.name, *map(str, table.columns)), lines)
    if left:
        section.note(f"{saved.path.name}: no room here for {', '.join(left)}; see {path.name}.")


def bytes_sent(saved: Sequence[SavedRun]) -> Section:
    """Return the report section with the bytes sent and the training time of every run."""
    lines = [
        (one.path.name, one.facts["message_scalars"], *(sum(one.facts[n]) for n in TRAVELED))
        for one in saved
    ]
    head = ("run", "numbers in a message", "bytes down", "bytes up", "seconds of training")
    return Section("Communication").table(head, lines)


def faults(saved: Sequence[SavedRun]) -> Section:
    """Return the report section with the clients that were rejected or dropped out."""
    section = Section("Faults and rejections")
    for one in saved:
        silent = Counter(name for some in one.facts["silent"] for name in some)
        rejected = [reason for some in one.facts["rejected"] for reason in some]
        if rejected:
            kinds = _words(one.facts.get("rejected_by_kind", {}))
            section.note(f"{one.path.name}: {len(rejected)} messages were rejected ({kinds}).")
            section.table(("reason", "times"), Counter(rejected).most_common())
        if silent:
            section.note(f"{one.path.name}: trained, but dropped out:")
            section.table(("client", "rounds"), silent.most_common())
    return section if section.parts else section.note("No message was rejected, and none was lost.")


def command_section(saved: Sequence[SavedRun], several: bool) -> Section:
    """Return the report section with the command line that reproduces the runs."""
    section = Section("Command").note(command_line(saved, several), "command")
    section.note("In the same folder, with the same files and the same versions:")
    return section.note(f"{_words(saved[0].facts.get('versions', {}))}.")


def command_line(saved: Sequence[SavedRun], several: bool) -> str:
    """Return the `pyrofl` command line that reproduces a run or a comparison."""
    methods, seeds = (sorted({getattr(one, n) for one in saved}) for n in ("method", "seed"))
    command = ["compare" if several else "run", *methods]
    text = Experiment.of(saved[0].facts["experiment"]).command(command, seeds[0])
    return f"{text} --seeds {len(seeds)}" if several else text
