"""Sections of the HTML report: texts, tables and figures read from the files of runs."""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from pyrofl.cli.output.comparison_table import compare_lines
from pyrofl.cli.output.model_comparison import LOSSES, By, has_crps, of_model
from pyrofl.cli.output.model_comparison import scored as with_score
from pyrofl.experiments import rows
from pyrofl.experiments.experiment import Experiment
from pyrofl.experiments.saved_runs import SavedRun
from pyrofl.files import run_folder
from pyrofl.paired import Interval, interval

MOST = 60  # lines of a table
UNTOLD = (
    *("methods", "seed", "seeds", "out", "overwrite", "resume", "quiet", "tune", "over", "tries"),
    *("metric", "hold_back", "tune_seeds"),  # of the choice of settings
)
TRAVELLED = ("bytes_down", "bytes_up", "seconds")  # of each round, in run.json
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


@dataclass
class Section:
    """Section of a report: a title, and parts such as notes, commands, figures and tables."""

    title: str
    parts: list[dict[str, Any]] = field(default_factory=list)

    def note(self, text: str, kind: str = "note") -> Section:
        """Add a text, such as a note, a sentence or a command line, to the report section."""
        self.parts.append({"kind": kind, "text": text})
        return self

    def has(self, kind: str) -> bool:
        """Return whether the report section has a part of the given kind, such as "figure"."""
        return any(part["kind"] == kind for part in self.parts)

    def figure(self, path: Path, text: str = "") -> Section:
        """Add a figure with its caption to the report section, or a note if its file is missing."""
        if not path.is_file():
            return self.note(f"No figure {path.name} in {path.parent.parent.name}.")
        image = b64encode(path.read_bytes()).decode("ascii")
        self.parts.append({"kind": "figure", "text": text, "image": image})
        return self

    def table(self, head: Sequence[str], lines: Iterable[Sequence[Any]]) -> Section:
        """Add a table to the report section; only the first lines of a long table are shown."""
        found = list(lines)
        shown = [[_cell(value) for value in line] for line in found[:MOST]]
        self.parts.append({"kind": "table", "head": head, "rows": shown})
        return self.note(f"{len(found) - MOST} more lines.") if len(found) > MOST else self


def _cell(value: Any) -> tuple[str, str]:
    """Return the text and the CSS class of a table cell in the HTML report."""
    if isinstance(value, float):
        return f"{value:.4g}", "number"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}", "number"
    return str(value), "long" if len(str(value)) > 40 else ""


def verdicts(made: Sequence[SavedRun]) -> Section:
    """Return the report section with the convergence status of every run."""
    lines = ((one.path.name, one.facts["rounds"], one.facts["status"]["text"]) for one in made)
    section = Section("Convergence").table(("run", "rounds", "status"), lines)
    for one in made:
        for note in one.facts.get("warnings", []):
            section.note(f"{one.path.name}: {note}.")
    return section


def scored(folder: Path, made: Sequence[SavedRun], several: bool) -> Section:
    """Return the report section with the models' scores and standard errors or intervals."""
    section = Section("Scores")
    if several and (folder / "compare.csv").is_file():
        read = run_folder.read_csv(folder / "compare.csv")
        of: Any = [(*(r | {"value": float(r["value"])}).values(),) for r in read]
        open_runs = {(one.method, one.seed) for one in made if not one.converged}
        head, laid, notes = compare_lines(of, open_runs)
        section.table(head, laid)
        for note in notes:
            section.note(note)
        section.note("Clients weigh the same; ±: one standard error over seeds.")
        return section.figure(folder / "figures/comparison.png", CAPTIONS["comparison"])
    for one in made:
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


def _means(made: SavedRun) -> list[tuple[Any, ...]]:
    """Return mean test scores of every model of a run, with confidence intervals."""
    from scipy.stats import binomtest

    lines = []
    for (model, adaptation), part in rows.read(made.path).groupby(
        ["model", "adaptation"], sort=False
    ):
        if rows.classes_of(part):
            right = with_score(part, "accuracy")["score"]
            ends = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
            lines.append((model, adaptation, "accuracy", float(right.mean()), _ends(ends)))
        numbers: list[By] = [] if rows.classes_of(part) else ["error"]
        numbers += ["log_score", *(("crps",) if has_crps(part) else ())]
        for by in numbers:
            found = interval(with_score(part, by)["score"].to_numpy())
            if by in LOSSES:
                found = Interval(-found.mean, -found.high, -found.low)
            lines.append((model, adaptation, by.replace("_", " "), found.mean, _ends(found)))
    return lines


def _ends(of: Any) -> str:
    return f"{of.low:.4g} to {of.high:.4g}"


def classes(made: Sequence[SavedRun]) -> Section:
    """Return the report section with scores per class over the test rows of all clients."""
    from pyrofl.inference.checks.by_class import scores_by_class

    section = Section("Classes")
    for one in made:
        try:
            table = rows.read(one.path)
        except ValueError as error:
            section.note(f"No scores by class: {error}.")
            continue
        names, main = rows.classes_of(table), tuple(one.facts["tested"].get("main", ()))
        mine = of_model(table, (one.method, *main))
        if names and len(mine):
            found = scores_by_class(*rows.probabilities(mine), names).astype({"rows": int})
            head = ("class", *(name.replace("_", " ") for name in found.columns))
            section.table(head, (_plain(line) for line in found.itertuples()))
            section.note(f"{one.path.name}: its {main[0]} model.")
    return section.note(BY_CLASS if section.has("table") else "There are no scores by class.")


def _plain(line: Sequence[Any]) -> list[Any]:
    """Convert a data-frame row to plain Python values, with "-" for missing values."""
    return [
        "-" if value != value else getattr(value, "item", lambda v=value: v)() for value in line
    ]


def tuned(folder: Path, made: Sequence[SavedRun]) -> list[Section]:
    """Return the report section on tuned settings in a list, which is empty without tuning."""
    section, lines = Section("How settings were chosen"), []
    for one in made:
        path = folder / f"{one.method}-tune"
        if (path / "tune.json").is_file():
            had = json.loads((path / "tune.json").read_text(encoding="utf-8"))
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
    told = f"Chosen on a fraction of {share:g} of the training rows; test rows were not used. "
    told += "The margin over the runner-up is a mean over seeds, with its standard error."
    section.table(head, lines).note(told)
    return [section]


def asked(made: Sequence[SavedRun]) -> Section:
    """Return the report section with the command-line options of the runs."""
    facts = made[0].facts
    section = Section("Command")
    same = {n: v for n, v in facts["experiment"].items() if n not in UNTOLD and v not in (None, [])}
    told = [(n.replace("_", " "), _words(v)) for n, v in same.items() if v is not False]
    return section.table((), told).note(f"Versions: {_words(facts.get('versions', {}))}.")


def _words(value: Any) -> str:
    """Format a value from run.json as text."""
    if isinstance(value, dict):
        return ", ".join(f"{n} {v}" for n, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def held(made: Sequence[SavedRun]) -> Section:
    """Return the report section on the partition: each client's number of rows, and a figure."""
    one = made[0]
    section, told = Section("Who holds what"), one.facts["data"]
    plain = {n: v for n, v in told.items() if not isinstance(v, dict) and v not in (None, [], "")}
    section.table((), [(n, _words(v)) for n, v in plain.items()])
    sizes = {r["client"]: int(r["size"]) for r in _clients(one)}
    section.table(("client", "training rows"), sorted(sizes.items(), key=lambda item: item[1]))
    return section.figure(one.path / "figures/partition.png", CAPTIONS["partition"])


def _clients(made: SavedRun) -> list[dict[str, str]]:
    path = made.path / "clients.csv"
    return run_folder.read_csv(path) if path.is_file() else []


def learned(folder: Path, made: Sequence[SavedRun], several: bool) -> Section:
    """Return the report section with curves of scores and of parameter changes over rounds."""
    section = Section("Learning curves")
    section.figure(folder / "figures/curves.png", CAPTIONS["curves"])
    return _each(section, made, "convergence", "watched")


def _each(section: Section, made: Sequence[SavedRun], *names: str) -> Section:
    """Add the figures with the given names to a report section; missing files are skipped."""
    for one in made:
        for name in names:
            path = one.path / f"figures/{name}.png"
            if path.is_file():
                section.figure(path, f"{one.path.name}: {CAPTIONS[name]}")
    found = section.has("figure")
    return section if found else section.note(f"No figure: {', '.join(names)}.")


def calibrated(made: Sequence[SavedRun]) -> Section:
    """Return the report section with reliability diagrams, which show the calibration."""
    return _each(Section("Calibration"), made, "reliability")


def clients(made: Sequence[SavedRun]) -> Section:
    """Return the report section with every client's scores, the smallest client first."""
    section = Section("Clients")
    for one in made:
        main = tuple(one.facts["tested"].get("main", ()))
        own = [r for r in _clients(one) if (r["model"], r["adaptation"]) == main]
        metrics = list(dict.fromkeys(r["metric"] for r in own))[:4]
        found: dict[tuple[int, str], dict[str, float]] = {}
        for r in own:
            found.setdefault((int(r["size"]), r["client"]), {})[r["metric"]] = float(r["value"])
        lines = [(c, n, *(v.get(m, "-") for m in metrics)) for (n, c), v in sorted(found.items())]
        if lines:
            section.table(("client", "training rows", *metrics), lines)
            section.note(f"{one.path.name}: its {main[0]} model.")
    return _each(section, made, "clients", "confidence")


def posteriors(made: Sequence[SavedRun]) -> Section:
    """Return the report section with ArviZ summaries of the runs' posteriors."""
    section = Section("Posterior")
    for one in made:
        path = one.path / "posterior.nc"
        if not path.is_file():
            section.note(f"{one.path.name} has no posterior.nc.")
            continue
        try:
            _summarise(section, one, path)
        except Exception as error:  # whatever the file or the library says
            section.note(f"{path} cannot be summarised: {error}.")
    return section


def _summarise(section: Section, made: SavedRun, path: Path) -> None:
    from pyrofl.inference.posteriors import export

    data = export.load(path)
    sizes = {str(n): prod(v.shape[2:]) for n, v in data["posterior"].data_vars.items()}
    shown, room = list[str](), MOST
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        if size <= room:
            shown, room = [*shown, name], room - size
    if shown:
        table = export.import_arviz().summary(data, var_names=shown, kind="stats")
        numbers = zip(table.index, table.to_numpy(), strict=True)
        lines = [(str(name), *map(float, values)) for name, values in numbers]
        section.table((made.path.name, *map(str, table.columns)), lines)
    if left := [f"{n} ({size:,} numbers)" for n, size in sizes.items() if n not in shown]:
        section.note(f"{made.path.name}: no room here for {', '.join(left)}; see {path.name}.")


def bytes_sent(made: Sequence[SavedRun]) -> Section:
    """Return the report section with the bytes sent and the training time of every run."""
    lines = [
        (one.path.name, one.facts["message_scalars"], *(sum(one.facts[n]) for n in TRAVELLED))
        for one in made
    ]
    head = ("run", "numbers in a message", "bytes down", "bytes up", "seconds of training")
    return Section("Communication").table(head, lines)


def faults(made: Sequence[SavedRun]) -> Section:
    """Return the report section with the clients that were rejected or dropped out."""
    section = Section("Faults and rejections")
    for one in made:
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


def repeated(made: Sequence[SavedRun], several: bool) -> Section:
    """Return the report section with the command line that reproduces the runs."""
    section = Section("To repeat it").note(repeating(made, several), "command")
    return section.note("In the same folder, with the same versions and the same files.")


def repeating(made: Sequence[SavedRun], several: bool) -> str:
    """Return the `pyrofl` command line that reproduces a run or a comparison."""
    methods, seeds = (sorted({getattr(one, n) for one in made}) for n in ("method", "seed"))
    command = ["compare" if several else "run", *methods]
    text = spelled(command, Experiment.of(made[0].facts["experiment"]), seeds[0])
    return f"{text} --seeds {len(seeds)}" if several else text


def spelled(command: Sequence[str], experiment: Experiment, seed: int) -> str:
    """Return a `pyrofl` command line with the options of an experiment and a seed."""
    return shlex.join(["pyrofl", *command, *experiment.words(UNTOLD), "--seed", str(seed)])
