"""Figures of posteriors, such as shrinkage and the comparison of federated fits with pooled rows.

A `Summary` is what `pyrofl.reference.compare_posteriors` has in its columns mean, low and high.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.figures import many, style
from pyrofl.figures.style import COLORS, GRAY, Summary, panels, with_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "conditional",
    "forest",
    "lines",
    "parameters_by_covariate",
    "pooling",
    "posterior_differences",
    "shrinkage",
    "survival",
]

MAX_READABLE_ROWS = 30  # that can be read one by one
MAX_LETTERS = 16  # of the name of a dot
ENDS = ("mean", "low", "high")
TARGETS = {"difference": (0.0, 0.2), "ratio": (1.0, 0.15)}  # what is equal, and what is near it
GOLDEN = 0.618034  # multiples of it, less their whole parts, keep apart
GRAY_NOTE = "gray: differences below 0.2 sds, ratios within 15%"


def posterior_differences(
    table: Any, names: tuple[str, str] = ("federated", "pooled rows")
) -> Figure:
    """Plot how a federated posterior differs from a reference: differences of means, ratios of SDs.

    Args:
        table: what `pyrofl.reference.compare_posteriors` returns, or some of its rows. Several
            variables are drawn in standard deviations, one in its own unit. Where there are more
            than 30 rows, posteriors are left out, and every variable gets a lane, in which a dot is
            a row.
        names: of the two fits.
    """
    if len(table) > MAX_READABLE_ROWS:
        return _lanes(table, names)
    figure = style.canvas(8.4, many.height(len(table)))
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1))
    interval_ends, other = (
        tuple(table[w + c].to_numpy() for c in ENDS) for w in ("", "reference_")
    )
    left.set_xlabel("mean and 95% interval")
    if table["variable"].nunique() > 1:  # of different units, perhaps
        center, unit = (table[c].to_numpy() for c in ("reference_mean", "reference_sd"))
        interval_ends, other = (
            tuple((v - center) / unit for v in fit) for fit in (interval_ends, other)
        )
        left.set_xlabel(f"mean and 95% interval\n(around the mean of {names[1]}, in its sds)")
    _intervals(left, many.rows(table["mean"]), {names[0]: interval_ends, names[1]: other})
    many.rows(table["mean"]).label(left, list(map(str, table.index)), "mean", "")
    places = np.arange(len(table))
    for axes, column in ((middle, "difference"), (right, "ratio")):
        _apart(axes, column, table[column].to_numpy(), places, names)
    return with_legend(figure, [left], note=_note(table), title=_compared(names))


def _compared(names: tuple[str, str]) -> str:
    return f"Posterior means and standard deviations: {names[0]} compared with {names[1]}"


def _note(table: Any) -> str:
    """Describe how many parameters agree between two posteriors, and the Monte Carlo error."""
    near = [(table[c] - target).abs() <= within for c, (target, within) in TARGETS.items()]
    agree = f"{sum(near[0] & near[1])} of {len(table)} rows agree: difference and ratio in gray"
    if "error" not in table:
        return f"{agree}\n{GRAY_NOTE}"
    error = float(table["error"].median())
    few = "too few draws: " if error > TARGETS["difference"][1] else ""
    agree = "" if few else f"{agree}\n"
    return f"{agree}{GRAY_NOTE}\n{few}Monte Carlo error of a difference: {error:.2g} sds"


def _lanes(table: Any, names: tuple[str, str]) -> Figure:
    """Plot differences of means and ratios of SDs of many parameters, one line for each variable.

    The parameter that differs most has a label.
    """
    lanes = dict(list(table.groupby("variable", sort=False)))
    shown, some = many.worst(
        [*lanes], [_farthest(part) for part in lanes.values()], 1, 0.3, "variables"
    )
    lanes = {variable: lanes[variable] for variable in shown}
    tall = min(max(1.6, 0.8 * len(lanes)), style.MAX_HEIGHT)
    figure, grid = panels(2, 2, 4.2, tall, (0, 1.4), grid=None, sharey=True)
    for axes, column in zip(grid, TARGETS, strict=True):
        target, longest = TARGETS[column][0], 0
        for lane, (variable, part) in enumerate(lanes.items()):
            values = part[column].to_numpy()
            places = lane + 0.7 * (GOLDEN * np.arange(1, len(part) + 1) % 1 - 0.5) * (len(part) > 1)
            _apart(axes, column, values, places, names)
            worst = int(np.abs(values - target).argmax())
            if len(part) > 1:
                label = str(part.index[worst])
                if len(label) > MAX_LETTERS:  # then without what all of the lane have in common
                    inner = label.removeprefix(f"{variable}[").removesuffix("]")
                    label = style.short(inner, MAX_LETTERS)
                longest = max(longest, len(label))
                _name(axes, label, values[worst], places[worst], target)
        farthest = float(np.abs(table[column] - target).max())
        _reach(axes, column, farthest / (1 - 0.045 * longest))  # with room for the names
        counted = ((name, len(part)) for name, part in lanes.items())
        labels = [f"{name} ({n})" if n > 1 else name for name, n in counted]
        many.rows(range(len(lanes))).label(axes, labels, "", " variables")
    grid[0].lines[1].set_label("a coordinate of the variable; the farthest has its name")
    return with_legend(figure, grid[:1], note=_note(table), title=_compared(names) + some)


def _farthest(table: Any) -> float:
    """Return how far rows are from agreement, in tolerances."""
    return max(float((table[c] - near).abs().max()) / w for c, (near, w) in TARGETS.items())


def _name(axes: Axes, name: str, value: float, place: float, target: float) -> None:
    """Label a point of a plot with a name, on the side that has space."""
    right = value < target
    look: dict[str, Any] = {
        "fontsize": style.pt(8),
        "va": "center",
        "ha": "right" if right else "left",
    }
    look |= {"xytext": (-6 if right else 6, 0), "textcoords": "offset points"}
    axes.annotate(style.plain(name), (value, place), **look)


def _apart(axes: Axes, column: str, values: Any, places: Any, names: tuple[str, str]) -> None:
    """Plot differences of means or ratios of SDs of two posteriors, with the tolerance in gray."""
    target, near = TARGETS[column]
    if not axes.lines:
        axes.axvspan(target - near, target + near, color=GRAY, alpha=0.2, linewidth=0)
        axes.axvline(target, color=GRAY, linewidth=0.8)
    axes.plot(values, places, "o", color=COLORS[0], markersize=3.5)
    _reach(axes, column, float(np.abs(values - target).max()))
    words = {"difference": f"difference of means\n(in sds of {names[1]})"}
    axes.set_xlabel(words.get(column, f"ratio of sds\n({names[0]} / {names[1]})"))


def _reach(axes: Axes, column: str, farthest: float) -> None:
    """Set the limits of an axis from the tolerance and the largest value."""
    target, near = TARGETS[column]
    reach = 1.1 * max(2 * near, farthest)
    axes.set_xlim(max(target - reach, 0.0) if column == "ratio" else -reach, target + reach)


def forest(
    fits: Mapping[str, Summary],
    labels: Sequence[str],
    title: str,
    truth: Any = None,
    ax: Axes | None = None,
) -> Figure:
    """Plot the posterior intervals of several fits below each other (forest plot).

    Args:
        fits: name -> summary of its J rows; NaN leaves a gap.
        labels: of the J rows, from top to bottom. Of more than 60 rows, which are then sorted by
            the mean of the first fit, those at both ends have their labels.
        title: of the axis, with its unit.
        truth: values [J] that all fits are about.
        ax: where to draw; None makes a figure.
    """
    many.refuse_lengths(fits=fits)
    for name, (mean, low, high) in fits.items():
        ends = {f"{part} of {name}": v for part, v in zip(ENDS, (mean, low, high), strict=True)}
        many.refuse_lengths(labels=labels, truth=truth, **ends)
        many.refuse_swapped(name, low, high)
    rows = many.rows(next(iter(fits.values()))[0])
    height = many.height(len(labels), 0.55 * len(fits))
    figure, axes = style.one_panel(6.4, height, ax, grid=None)
    _intervals(axes, rows, fits)
    rows.label(axes, labels, "mean", "")
    if truth is not None:
        _stars(axes, rows, truth)
    axes.set_xlabel(title)
    note = many.missing(*(values for fit in fits.values() for values in fit))
    about = "Posterior means and 95% intervals" + (" of each fit" if len(fits) > 1 else "")
    return with_legend(figure, [axes], note=note, ax=ax, title=about)


def shrinkage(
    names: Sequence[str],
    raw: Any,
    posterior: Summary,
    center: float,
    title: str,
    truth: Any = None,
    ax: Axes | None = None,
) -> Figure:
    """Plot the shrinkage of each client's local estimate towards the population mean.

    Args:
        names: of the J clients; they are sorted by their own estimate.
        raw: [J], the clients' own estimates.
        posterior: of the clients.
        center: mean of the population.
        title: of the axis, with its unit.
        truth: [J], what turned out later.
        ax: where to draw; None makes a figure.
    """
    mean, low, high = posterior
    many.refuse_lengths(names=names, raw=raw, mean=mean, low=low, high=high, truth=truth)
    order = np.argsort(-np.asarray(raw), kind="stable")
    raw, mean, low, high = (np.asarray(v, dtype=float)[order] for v in (raw, *posterior))
    rows = many.rows(raw)
    figure, axes = style.one_panel(6.4, many.height(len(raw)), ax, grid=None)
    axes.axvline(center, color=GRAY, linestyle="--", label="population mean")
    for places, size in rows.parts():
        at, own = rows.at[places], raw[rows.order][places]
        axes.hlines(at, own, mean[rows.order][places], color=GRAY, linewidth=0.8 * size**2)
        look: dict[str, Any] = {"mfc": "white", "ms": 6 * size, "color": COLORS[1]}
        axes.plot(own, at, "o", label="own estimate", **look)
    _intervals(axes, rows, {"posterior": (mean, low, high)})
    rows.label(axes, [names[i] for i in order], "own estimate")
    if truth is not None:
        _stars(axes, rows, np.asarray(truth)[order])
    axes.set_xlabel(title)
    about = "Estimates of clients, alone and from the hierarchical model (95% intervals)"
    return with_legend(figure, [axes], note=many.missing(raw, mean), ax=ax, title=about)


def pooling(
    size: Any,
    raw: tuple[Any, Any],
    partial: tuple[Any, Any],
    center: float,
    title: str,
    unit: str = "rows of the client",
) -> Figure:
    """Plot clients' local and partially pooled estimates against their numbers of rows.

    Small clients scatter on their own, and lean on the population in a hierarchical model (Gelman
    and Hill, "Data Analysis Using Regression and Multilevel/Hierarchical Models", 2007, fig. 12.1).

    Args:
        size: [J], rows of every client.
        raw: own estimates [J] and their standard errors [J]; NaN where a client has none.
        partial: posterior means [J] and standard deviations [J].
        center: mean of the population.
        title: of the estimates, with their unit.
        unit: what is counted by size.
    """
    figure, grid = panels(2, 2, 4.2, 3.6, grid=None, sharey=True)
    size = np.asarray(size, dtype=float)
    # Clients of one size would hide each other.
    beside = size * np.exp(0.04 * np.sin(2.4 * np.arange(len(size))))
    many.refuse_lengths(size=size, raw=raw[0], errors=raw[1], partial=partial[0], sds=partial[1])
    fits = {"each on its own": (raw, COLORS[1]), "hierarchical": (partial, COLORS[0])}
    dot = many.dots(len(size))
    look: dict[str, Any] = {"fmt": "o", "ms": 0.65 * dot["s"] ** 0.5, "lw": 1.2 * dot["alpha"]}
    for axes, (name, ((mean, sd), color)) in zip(grid, fits.items(), strict=True):
        axes.axhline(center, color=GRAY, linestyle="--", label="population mean")
        axes.errorbar(beside, mean, sd, color=color, label=name, alpha=dot["alpha"], **look)
        style.mark_sizes(axes.xaxis, size)
        axes.set_xlabel(unit)
    grid[0].set_ylabel(title)
    about = "Estimates of small clients move towards the population mean"
    gaps = many.missing(*(values for fit, _ in fits.values() for values in fit))
    note = many.notes("bars: one standard error or deviation", gaps)
    return with_legend(figure, grid, note=note, title=about)


def parameters_by_covariate(
    at: Sequence[float], posterior: Summary, labels: Sequence[str], across: str, up: str
) -> Figure:
    """Plot clients' parameters against a covariate such as years, one panel for each parameter.

    Args:
        at: places of the J clients.
        posterior: means and ends of intervals, each [J, P].
        labels: of the P parameters.
        across: label of the places.
        up: label of the parameters, with their unit.
    """
    columns = 4 if len(labels) <= 16 else 6
    many.refuse_lengths(
        labels=labels,
        **{n: np.asarray(v).T for n, v in zip(ENDS, posterior, strict=True)},
    )
    many.refuse_lengths(at=at, mean=posterior[0])
    look: dict[str, Any] = {"grid": None, "across": across, "up": up, "sharex": True}
    shown, some = many.fitting(range(len(labels)), columns, 1.8, "parameters")
    figure, grid = panels(len(shown), columns, 2.1, 1.8, (0, 0.6), **look)
    for axes, k in zip(grid, shown, strict=True):
        mean, low, high = (np.asarray(v)[:, k] for v in posterior)
        axes.axhline(0, color=GRAY, linewidth=0.8)
        axes.errorbar(at, mean, (mean - low, high - mean), fmt="o", ms=3.5, color=COLORS[0])
        axes.set_title(style.plain(style.short(labels[k], 24)), fontsize=style.pt(9))
        axes.tick_params(labelsize=style.pt(8))
    return style.titled(figure, f"Posterior means and 95% intervals by {across}{some}")


def lines(clients: Mapping[str, tuple[Any, Any, Any, Any]], across: str, up: str) -> Figure:
    """Plot every client's data, its least-squares line and its posterior regression lines.

    Args:
        clients: name -> x [N] and y [N] of its rows, places [P], and draws [S, P] of its line.
        across: label of x, with its unit.
        up: label of y, with its unit.
    """
    many.refuse_lengths(clients=clients)
    columns = 6 if len(clients) <= 24 else 8
    shown, some = many.fitting(clients, columns, 1.25, "clients")
    clients = {name: clients[name] for name in shown}
    look: dict[str, Any] = {"grid": None, "across": across, "up": up, "sharex": True}
    figure, grid = panels(len(clients), columns, 1.35, 1.25, (0.6, 0.8), **look, sharey=True)
    for axes, (name, (x, y, at, draws)) in zip(grid, clients.items(), strict=True):
        x, y, at, draws = (np.asarray(v, dtype=float) for v in (x, y, at, draws))
        low, high = np.quantile(draws, [0.025, 0.975], 0)
        axes.fill_between(at, low, high, color=COLORS[0], alpha=0.25, lw=0, label="95% interval")
        axes.plot(at, draws.mean(0), color=COLORS[0], label="posterior mean")
        if len(np.unique(x)) > 1:
            own = np.polynomial.Polynomial.fit(x, y, 1)(at)
            axes.plot(at, own, "--", color=COLORS[1], lw=1, label="least squares, alone")
        axes.plot(x, y, ".", color="black", markersize=3)
        axes.set_title(style.plain(style.short(name, 16)), fontsize=style.pt(8), pad=2)
        axes.tick_params(labelsize=style.pt(7))
    return with_legend(figure, grid, title=f"Regression line of each client{some}")


def _intervals(axes: Axes, rows: many.FigureRows, fits: Mapping[str, Summary]) -> None:
    """Plot the mean and interval of each row for every fit, from top to bottom."""
    shift = 0.6 / len(fits)
    for i, (name, summary) in enumerate(fits.items()):
        mean, low, high = (np.asarray(v, dtype=float)[rows.order] for v in summary)
        at = rows.at + shift * rows.step * (i - (len(fits) - 1) / 2)
        color, marker = COLORS[i % len(COLORS)], style.MARKERS[i % len(style.MARKERS)]
        for places, size in rows.parts():
            look: dict[str, Any] = {"fmt": marker, "color": color, "label": name}
            look |= {"lw": 1.2 * size, "ms": 3.5 * size, "ecolor": (color, size)}
            ends = (mean - low, high - mean)
            axes.errorbar(mean[places], at[places], xerr=[v[places] for v in ends], **look)


def _stars(axes: Axes, rows: many.FigureRows, truth: Any) -> None:
    """Plot what turned out later of each row."""
    for places, size in rows.parts():
        truths = np.asarray(truth)[rows.order][places]
        look: dict[str, Any] = {"ms": 7 * size, "label": "later known", "zorder": 5}
        axes.plot(truths, rows.at[places], "k*", **look)


def conditional(table: Any, title: str = "", ax: Axes | None = None) -> Figure:
    """Plot a conditional effect with its band, one color for each value of the second column.

    Args:
        table: what `pyrofl.effects.conditional` returns.
        title: of the response's axis, with its unit; by default its name.
        ax: where to draw; None makes a figure.
    """
    column, by = table.attrs["column"], table.attrs["by"]
    low, high = (c for c in table.columns if str(c).endswith("%"))
    keys = [name for name in (by, "class" if "class" in table else None) if name]
    parts: list[tuple[Any, Any]] = [((), table)]
    if keys:
        parts = [(key, part) for key, part in table.groupby(keys, sort=False)]
    figure, axes = style.one_panel(5.4, 3.8, ax)
    is_number = table[column].dtype.kind in "fiu"
    named: dict[str, Any] = {}
    for key, part in parts:
        words = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in key]
        named[", ".join(f"{n} {v}" for n, v in zip(keys, words, strict=True)) or "mean"] = part
    looks = style.styles(named)
    for k, (label, part) in enumerate(named.items()):
        mean, ends = part["mean"].to_numpy(), (part[low].to_numpy(), part[high].to_numpy())
        look = looks[label] | {"label": label}
        if is_number:
            at = part[column].to_numpy()
            axes.fill_between(at, *ends, color=look["color"], alpha=0.2, linewidth=0)
            axes.plot(at, mean, **look | {"marker": None})
        else:
            at = np.arange(len(part)) + min(0.1, 0.8 / len(parts)) * (k - (len(parts) - 1) / 2)
            axes.errorbar(
                at, mean, (mean - ends[0], ends[1] - mean), **look | {"linestyle": "none"}
            )
    axes.set_xlabel(style.plain(column))
    if not is_number:
        levels = [str(v) for v in parts[0][1][column]]
        style.label_places(axes.xaxis, levels, len(levels), style.plain(column), 4.5 / len(levels))
    axes.set_ylabel(style.plain(title or table.attrs["response"]))
    note = f"{'band' if is_number else 'bar'}s: {low} to {high}"
    about = f"Expected {title or table.attrs['response']} by {' and '.join([column, *keys])}"
    return with_legend(figure, [axes], looks, note, ax, about)


def survival(table: Any, title: str = "", ax: Axes | None = None) -> Figure:
    """Plot survival curves with their bands, one color for each curve.

    Curves of Cox models and of Kaplan and Meier are steps; others are straight between the times.

    Args:
        table: what `pyrofl.effects.survival` or `pyrofl.kaplan_meier` returns, or some of its rows.
        title: of the axis of times, with its unit; by default "time".
        ax: where to draw; None makes a figure.
    """
    by, low, high = table.attrs["by"], *(c for c in table.columns if str(c).endswith("%"))
    names, groups = table.attrs.get("names", {}), table.groupby(by, sort=False) if by else ()
    curves = {names.get(key) or f"{by} {key}": part for key, part in groups}
    if len(curves) < len(groups):  # equal rows
        curves = {f"{by} {key}": part for key, part in groups}
    curves = curves or {"survival": table}
    figure, axes = style.one_panel(5.4, 3.8, ax)
    looks = {
        name: {**look, "marker": None, "label": name} for name, look in style.styles(curves).items()
    }
    is_step, value = table.attrs["steps"], "survival" if "survival" in table else "mean"
    for name, part in curves.items():
        look, at = looks[name], part["time"].to_numpy()
        band: dict[str, Any] = {"step": "post"} if is_step else {}
        low_end, high_end = part[low].to_numpy(), part[high].to_numpy()
        axes.fill_between(
            at, low_end, high_end, **band, color=look["color"], alpha=0.2, linewidth=0
        )
        draw = "steps-post" if is_step else "default"
        axes.plot(at, part[value].to_numpy(), drawstyle=draw, **look)
    axes.set_xlabel(style.plain(title or "time"))
    axes.set_ylabel("survival probability")
    axes.set_ylim(-0.02, 1.02)
    note = f"bands: {low} to {high}"
    return with_legend(figure, [axes], looks, note, ax, "Survival probability by time")
