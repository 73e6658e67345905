"""Figures of runs: learning curves, tuning results and calibration."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.figures import many, style
from pyrofl.figures.style import GRAY, panels, styles, theme, with_legend
from pyrofl.files.run_folder import replacing
from pyrofl.metrics import Bins

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["comparison", "convergence", "curves", "reliability", "save", "try_out", "tuning"]
__all__ += ["theme", "watched"]

# A share of 25 rows has a standard error of at most 0.5 / sqrt(25). Clients may test the same rows,
# and then a bin of hundreds can be a handful of different ones: it must hold 2% of all as well.
MIN_BIN_ROWS, MIN_BIN_FRACTION = 25, 0.02

MAX_METHODS_IN_ORDER = 12  # methods that are drawn in the order of their scores
# Sites with a color of their own: those that moved most in the last rounds.
MAX_COLORED_SITES, LATE_ROUNDS = 6, 5
PARTS = {  # what moved -> its unit and its kind of line
    "mean": ("standard deviations", "-"),
    "sd": ("standard deviations", "--"),
    "norm": ("fraction of its norm", "-"),
}
CONVERGED_RANGE = "converged range"
MAX_CHANGE = 1e9  # that is drawn: what is not finite has moved by the largest number there is


def curves(rows: Iterable[style.Row] | pandas.DataFrame, metric: str = "accuracy") -> Figure:
    """Plot a metric against the round, with a band of one standard error over seeds.

    Args:
        rows: of metrics.csv, each with its "method" and "seed" as well. Every model and population
            in them gets a panel, every method and adaptation a line. Populations whose curves are
            those of a panel, to 1% of the range, are named in the legend only. Of over 14 lines,
            the best have colors.
        metric: the one to draw.

    Raises:
        ValueError: if no row is about the metric.
    """
    table = style.about(metric, rows).astype({"round": int})
    table["line"] = table["method"] + table["adaptation"]
    parts, alike = _apart(table)
    lines = table["line"].unique()
    if len(lines) > style.MAX_COLORED_CURVES:
        last = table.sort_values("round", kind="stable").groupby(["line", "model"])["value"].last()
        lines = _best_first(last.groupby("line"), metric)
    looks = styles(lines)
    columns = min(3, len(parts))
    figure, grid = panels(len(parts), 3, max(3.6, 6 / columns), 3.1, (0, 0.5), sharey=True)
    for axes, (title, part) in zip(grid, parts.items(), strict=True):
        axes.set_title(fill(title, 36), fontsize=style.pt(10))
        for name, points in part.groupby("line", sort=False):
            means = points.groupby("round")["value"].agg(["mean", "sem"])
            style.band(axes, means, name, looks[name])
        style.mark_rounds(axes.xaxis)
    for axes in grid[::columns]:
        axes.set_ylabel(style.axis_label(metric))
    note = "mean ± one standard error over seeds" if any(a.collections for a in grid) else ""
    note = many.notes(note, *alike, many.missing(table["value"]))
    title = f"{style.heading(metric)} by round of training"
    return with_legend(figure, grid, looks, note, title=title)


def _best_first(values: Any, metric: str) -> list[str]:
    """Return the names of groups of scores, those with the best score first."""
    if "accuracy" in metric:
        return list(values.max().sort_values(ascending=False, kind="stable").index)
    return list(values.min().sort_values(kind="stable").index)


def _apart(table: pandas.DataFrame) -> tuple[dict[str, pandas.DataFrame], list[str]]:
    """Return each panel's curves by title, and notes on populations with nearly equal curves."""
    near = 0.01 * float(np.ptp(table["value"]))
    groups: dict[str, tuple[str, Any, pandas.DataFrame]] = {}
    notes = []
    for (model, population), part in table.groupby(["model", "population"], sort=False):
        title = f"{style.MODELS.get(model, model)}, {style.POPULATIONS.get(population, population)}"
        means = part.groupby(["line", "round"])["value"].mean()
        like = (
            other_title
            for other_title, (other, curves, _) in groups.items()
            if other == model and curves.index.equals(means.index)
            if float(np.abs(curves - means).max()) <= near
        )
        if next(like, ""):
            notes.append(f"{title.partition(', ')[2]}: the same curves")
        else:
            groups[title] = (model, means, part)
    return {title: part for title, (_, _, part) in groups.items()}, [*dict.fromkeys(notes)]


def convergence(run: Any) -> Figure:
    """Plot how much parameters change per round, and the convergence threshold, on a log scale.

    Args:
        run: a `Run`, or `Chains`, whose seeds are lines that look the same. Its status is the
            title, and the sites that moved most in the last rounds have colors.

    Raises:
        ValueError: if no round moved anything that is compared.
    """
    table, verdict = run.parameter_changes(), run.status
    moved = table.melt(["round", "site"] + ["seed"] * ("seed" in table), [*PARTS], "part").dropna()
    if moved.empty:
        why = f"the run moved nothing that is known ({verdict})"
        raise ValueError(f"{why}; expected an aggregation")
    moved["small"] = moved["part"].map(verdict.small)
    late = moved[moved["round"] > moved["round"].max() - LATE_ROUNDS]
    far = (late["value"] / late["small"]).groupby(late["site"], sort=False).mean()
    first = list(far.sort_values(ascending=False, kind="stable").index[:MAX_COLORED_SITES])
    looks = {n: look | {"marker": None} for n, look in styles(map(style.plain, first)).items()}
    units = moved["part"].map(lambda part: PARTS[part][0])
    figure, grid = panels(units.nunique(), 2, 5.8 if units.nunique() == 1 else 4.6, 3.8, (0, 0.5))
    of = ["site", "part"] + ["seed"] * ("seed" in table)
    for axes, (unit, part) in zip(grid, moved.groupby(units, sort=False), strict=True):
        for (site, what, *_), points in part.groupby(of, sort=False):
            look = looks.get(
                style.plain(site), {"color": style.PALE_COLOR, "linewidth": 0.8, "zorder": 1}
            )
            look = look | {"linestyle": PARTS[what][1]}
            seen = np.where(points["value"] > 0, points["value"].clip(upper=MAX_CHANGE), np.nan)
            name = style.plain(site) if what != "sd" and site in first else ""
            axes.plot(points["round"], seen, label=name, **look)
        axes.set_yscale("log")
        small, low = part["small"].iloc[0], min(axes.get_ylim()[0], part["small"].iloc[0] / 2)
        axes.axhspan(low, small, color=style.COLORS[2], alpha=0.12, lw=0, label=CONVERGED_RANGE)
        axes.set_ylim(low, None)
        axes.set_ylabel(f"change per round\n({unit})")
        style.mark_rounds(axes.xaxis)
    notes = ["solid: means; dashed: standard deviations"] * ("sd" in set(moved["part"]))
    notes += [f"gray: {len(far) - MAX_COLORED_SITES} that moved less"] * (
        len(far) > MAX_COLORED_SITES
    )
    return with_legend(figure, grid, looks, "; ".join(notes), title=_capital(str(verdict)))


def overview(run: Any) -> Figure | None:
    """Draw scores by round, or parameter changes if there are none, or nothing."""
    if {row["round"] for row in run.history} - {0}:
        table = run.metrics.assign(method=run.method.name or "run", seed=0)
        return curves(table, run.history[0]["metric"])
    return None if run.parameter_changes().empty else convergence(run)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def watched(run: Any) -> Figure:
    """Plot a method's monitored quantities against the round, such as dropout rates.

    A dotted line is the limit above which a method warns, where it states one.

    Args:
        run: a `Run`, or `Chains`, whose seeds are lines that look the same.

    Raises:
        ValueError: if the method watches nothing.
    """
    runs = getattr(run, "runs", [run])
    each = [one.records for one in runs]
    names = dict.fromkeys(n for records in each for record in records for n in record.watched)
    if not names:
        raise ValueError("the method watches no number; expected one that does, such as metavd")
    facts = {name: fact for one in runs for name, fact in one.monitors.items() if name in names}
    words = {n: style.plain((n in facts and facts[n].words) or n.replace("_", " ")) for n in names}
    looks = {n: look | {"marker": None} for n, look in styles(words.values()).items()}
    figure, (axes,) = panels(1, 1, 5.8, 3.4, (0, 0.3))
    for records in each:
        for name in names:
            at = [(r.number, r.watched[name]) for r in records if name in r.watched]
            axes.plot(*zip(*at, strict=True), label=words[name], **looks[words[name]])
    for name, fact in facts.items():
        if fact.high is not None:
            last = (records[-1].watched.get(name, 0.0) for records in each if records)
            state = "too high" if any(value > fact.high for value in last) else "not too high"
            label = f"limit {fact.high:g}: {state} after the last round"
            axes.axhline(fact.high, color=looks[words[name]]["color"], linestyle=":", label=label)
    axes.set_ylabel(fill(next(iter(words.values())), 30) if len(words) == 1 else "value")
    style.mark_rounds(axes.xaxis)
    quantities = (
        ", ".join(words.values()) if len(words) <= 3 else f"{len(words)} monitored quantities"
    )
    title = _capital(f"{quantities}, by round")
    return with_legend(figure, [axes], looks, title=title)


def comparison(
    rows: Iterable[style.Row] | pandas.DataFrame, metric: str = "accuracy", ax: Axes | None = None
) -> Figure:
    """Plot every method's final metric: each seed, and the mean with its standard error.

    Args:
        rows: of compare.csv. Every method gets a lane, in the order of the rows, and of more than
            twelve methods the best one first; every model and adaptation a color.
        metric: the one to draw.
        ax: where to draw; None makes a figure.

    Raises:
        ValueError: if no row is about the metric.
    """
    table = style.about(metric, rows)
    labels = {one: f"{one} model" for one in style.MODELS}
    table["mark"] = table["model"].map(lambda one: labels.get(one, one)) + table["adaptation"]
    lanes = {
        name: list(part.groupby("mark", sort=False)["value"])
        for name, part in table.groupby("method", sort=False)
    }
    if len(lanes) > MAX_METHODS_IN_ORDER:
        means = table.groupby(["method", "mark"])["value"].mean()
        lanes = {name: lanes[name] for name in _best_first(means.groupby("method"), metric)}
    looks = styles(name for marks in lanes.values() for name, _ in marks)
    seeds = max(len(values) for marks in lanes.values() for _, values in marks)
    most = max(map(len, lanes.values()))
    each = (0.26 if len(lanes) < 10 else 0.13) * max(2, most)  # inches for a method
    if seeds == 1:
        each = 0.26
    tall = min(1.1 + each * len(lanes), 1.4 * style.MAX_HEIGHT)
    figure, axes = style.one_panel(6.4, tall, ax, grid="x")
    step = (0.8 if seeds > 1 else 0.4) / most
    for lane, marks in enumerate(lanes.values()):
        if lane % 2:
            axes.axhspan(lane - 0.5, lane + 0.5, color="#f2f2f2", lw=0, zorder=0)
        means = [values.mean() for _, values in marks]
        if seeds == 1 and len(marks) > 1:
            axes.hlines(lane, min(means), max(means), color=GRAY, lw=1, zorder=1)
        for i, (name, values) in enumerate(marks):
            height = lane + step * (i - (len(marks) - 1) / 2)
            error = np.nan_to_num(values.sem())
            look = looks[name] | {"linestyle": "none", "label": name}
            axes.errorbar(values.mean(), height, xerr=error or None, capsize=3, **look)
            if seeds > 1:
                # Two seeds lie at the very ends of their bar, so they are drawn below it.
                below = [height + 0.3 * step] * len(values)
                axes.plot(values, below, ".", markersize=5, color=look["color"], alpha=0.5)
    names = [style.plain(style.short(name, 30)) for name in lanes]
    axes.set_yticks(range(len(lanes)), names)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_axisbelow(True)
    axes.set_xlabel(style.axis_label(metric))
    note = f"mean ± one standard error; dots: {seeds} seeds" if seeds > 1 else ""
    note = many.notes(note, many.missing(table["value"]))
    methods = f"{len(lanes)} methods" if len(lanes) > 1 else next(iter(lanes))
    title = f"{style.heading(metric)} of {methods} after training"
    title += ", best first" if len(lanes) > MAX_METHODS_IN_ORDER else ""
    return with_legend(figure, [axes], looks, note, ax=ax, title=title)


def tuning(rows: Iterable[style.Row] | pandas.DataFrame, metric: str) -> Figure:
    """Plot validation scores of all settings in tuning against the rounds of their trials.

    Args:
        rows: of tune.csv. The chosen setting and the best of the others have colors. Scores of
            several seeds are drawn as their mean.
        metric: that they were compared by.
    """
    import pandas

    table = pandas.DataFrame(rows).astype({"rounds": int, "score": float})
    every = table.groupby(["setting", "rounds", "chosen"], sort=False)["score"]
    table = every.mean().reset_index().sort_values("rounds", kind="stable")
    figure, (axes,) = panels(1, 1, 6.5, 3.8, (0, 0.5))
    last = table.groupby("setting", sort=False).last()
    order = last.sort_values(["rounds", "score"], ascending=[False, metric != "accuracy"])
    first = sorted(order.index, key=lambda name: not bool(last.loc[name, "chosen"]))
    looks = styles(map(style.plain, first), MAX_COLORED_SITES)
    for name, points in table.groupby("setting", sort=False):
        label = style.plain(name)
        axes.plot(points["rounds"], points["score"], label=label, **looks[label])
    axes.set_xscale("log")
    axes.set_xticks(sorted(set(table["rounds"])), sorted(set(table["rounds"])))
    axes.minorticks_off()
    axes.set_xlabel("rounds of training")
    axes.set_ylabel(f"{style.axis_label(metric)}\non validation rows")
    title = f"{style.heading(metric)} of {len(last)} settings on validation rows"
    chosen = sum(map(bool, last["chosen"]))
    note = "the first one is chosen" if chosen == 1 else f"{chosen or 'none'} of them chosen"
    return with_legend(figure, [axes], looks, note, title=title)


def reliability(bins: Mapping[str, Bins]) -> Figure:
    """Plot a reliability diagram and a histogram of confidence for each model.

    The area of a point grows with the rows of its bin. A line joins neighboring bins that hold
    enough rows; the others are hollow: there a line would show noise as a trend.

    Args:
        bins: name -> `pyrofl.metrics.calibration_bins` of one axis, [bins].
    """
    figure = style.canvas(5.7, 5.8)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], color=GRAY, linewidth=1, label="calibrated")
    notes = ["area: rows of the bin"]
    looks = styles(bins)
    for name, look in looks.items():
        rows, sure, right = (np.asarray(value.cpu()) for value in bins[name])
        enough = rows >= max(MIN_BIN_ROWS, MIN_BIN_FRACTION * rows.sum())
        if (rows[~enough] > 0).any():
            notes[1:] = [f"hollow: under {MIN_BIN_ROWS} rows or {MIN_BIN_FRACTION:.0%} of them"]
        style.bubbles(upper, sure, right, rows, enough, name, look)
        thin = {"color": look["color"], "linestyle": look["linestyle"], "linewidth": 1.5}
        lower.stairs(100 * rows / max(1, rows.sum()), np.linspace(0, 1, len(rows) + 1), **thin)
    upper.set(ylabel="accuracy (fraction of rows)", xlim=(0, 1), ylim=(-0.03, 1.03))
    lower.set(xlabel="confidence (probability of the predicted class)", ylabel="rows (%)")
    lower.set_ylim(0, None)
    upper.grid(alpha=0.3)
    title = "Accuracy of predictions by their confidence: equal if calibrated"
    return with_legend(figure, [upper], looks, "; ".join(notes), title=title)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to a file atomically, completely or not at all.

    Raises:
        ValueError: if the name has no ending, such as .png, .pdf or .svg.
    """
    with replacing(path) as temporary, warnings.catch_warnings():
        if not Path(path).suffix:
            raise ValueError(f"{str(path)!r} has no ending; expected a name such as figure.png")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        # Fonts have no pictures, and few alphabets; then there is a box instead.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure.savefig(temporary, dpi=150)


def try_out() -> None:
    """Draw a test figure, to check that matplotlib's fonts and cache folder work."""
    figure = style.canvas(1, 1)
    figure.text(0, 0, "a")
    figure.savefig(BytesIO())
