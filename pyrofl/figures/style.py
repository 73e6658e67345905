"""Shared style of the figures: colors, axis labels, curves, legends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from pyrofl.arguments import check_name

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

Row = Mapping[str, Any]  # a line of metrics.csv or compare.csv, by column
Look = Mapping[str, Any]
Summary = tuple[Any, Any, Any]
"""Means [J], and the lower and upper ends [J] of 95% intervals."""

# Okabe and Ito's, which color-blind readers tell apart; shapes differ as well.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
LINES = ("-", "--", ":", "-.")
GRAY = "#999999"
MAX_WIDTH, MAX_HEIGHT, MIN_WIDTH = 14.0, 9.0, 5.0  # inches of the panels of a figure
MAX_COLORED_CURVES = 14  # that have looks of their own
PALE_COLOR = "#cccccc"  # of further curves
LEGEND = 0.55  # inches of a legend that figures have room for

Theme = Literal["page", "slides"]
THEMES: dict[str, dict[str, Any]] = {
    "page": {},
    "slides": {
        "font.size": 14.0,
        "axes.prop_cycle": f"cycler('color', {[*COLORS]})",  # of a user's own lines
        "lines.linewidth": 2.2,
        "lines.markersize": 8.0,
        "axes.linewidth": 1.1,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    },
}

METRICS = {
    "accuracy": "accuracy (fraction of rows)",
    "nll": "negative log likelihood (nats per row)",
    "brier": "Brier score",
    "ece": "expected calibration error",
    "mce": "maximum calibration error",
    "ece_classwise": "expected calibration error over all classes",
    "mce_classwise": "maximum calibration error over all classes",
    "entropy": "entropy of the prediction (nats)",
    "rmse": "root mean squared error (units of y)",
    "crps": "continuous ranked probability score (units of y)",
}
POPULATIONS = {"training": "training clients", "held_out": "new clients"}
POPULATIONS["pooled"] = "all test rows"
MODELS = {"global": "Global model", "personal": "Personal models", "ensemble": "Ensemble"}
SHARES = {"smallest_": "smallest 10% of clients", "pooled_": POPULATIONS["pooled"]}
ADAPTED = {"none": "", "fine_tune": ", fine-tuned", "train": ", trained again"}


def plain(name: str) -> str:
    r"""Escape $ in a name, so that matplotlib does not typeset it as mathematics.

    >>> print(plain("$x_1$"))
    \$x_1\$
    """
    return name.replace("$", r"\$")


def short(name: str, most: int = 36) -> str:
    """Shorten a name to at most `most` characters for a figure.

    >>> short("the hospital at the end of the long road", 20)
    'the hospita...g road'
    """
    return name if len(name) <= most else f"{name[: most // 2 + 1]}...{name[-(most // 3) :]}"


def pt(size: float) -> float:
    """Return a size of type in points, scaled by the theme: 10 is the size of ordinary text."""
    from matplotlib import rcParams

    return size * float(rcParams["font.size"]) / 10


@contextmanager
def theme(name: Theme) -> Iterator[None]:
    """Draw the figures inside the `with` block for slides: larger type, no background.

    Args:
        name: "slides", or "page" for the default.

    Raises:
        ValueError: if there is no such theme.

    Examples:
        >>> from pyrofl import figures
        >>> with figures.theme("slides"):
        ...     figure = figures.coverage({"mu": {"pvi": [0.1, 0.5, 0.7]}})
        >>> figures.save(figure, "coverage.png")  # doctest: +SKIP
    """
    from matplotlib import rc_context

    check_name(name, THEMES, "theme")
    settings: Any = THEMES[name]
    with rc_context(settings):
        yield


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, not managed by pyplot; larger for large type."""
    from matplotlib.figure import Figure

    more = pt(1) ** 0.5
    return Figure(figsize=(more * width, more * height), layout="constrained")


def panels(
    count: int,
    columns: int,
    wide: float,
    tall: float,
    room: tuple[float, float] = (0.0, 0.0),
    grid: Literal["both", "x", "y"] | None = "both",
    across: str = "",
    up: str = "",
    **shared: Any,
) -> tuple[Figure, list[Axes]]:
    """Return a new figure with `count` panels in at most `columns` columns; sizes are in inches.

    No figure is wider than a page: it has fewer columns then. A few small panels are enlarged.
    """
    from matplotlib.ticker import MaxNLocator

    columns = min(columns, count, max(1, int((MAX_WIDTH - room[0]) / wide)))
    rows = -(-count // columns)
    if rows == 1:
        tall = max(tall, 1.8)
    if columns * wide < MIN_WIDTH:
        tall = max(tall, min(2.6, tall * MIN_WIDTH / (columns * wide)))
        wide = MIN_WIDTH / columns
    figure = canvas(wide * columns + room[0], tall * rows + room[1])
    panels_of_figure = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for axes in panels_of_figure[count:]:
        axes.remove()
    for axes in panels_of_figure[max(0, count - columns) : count]:  # the last panel of each column
        axes.tick_params(labelbottom=True)
    for axes in panels_of_figure[:count]:
        axes.xaxis.set_major_locator(MaxNLocator(max(4, int(1.5 * wide)), steps=[1, 2, 5, 10]))
        if grid:
            axes.grid(axis=grid, alpha=0.3)
    if across:
        figure.supxlabel(across, fontsize=pt(10))
    if up:
        figure.supylabel(up, fontsize=pt(10))
    return figure, list(panels_of_figure[:count])


def one_panel(
    wide: float, tall: float, ax: Axes | None, grid: Literal["both", "x", "y"] | None = "both"
) -> tuple[Figure, Axes]:
    """Return the user's axes and their figure, or new ones of the given size in inches."""
    if ax is None:
        figure, (axes,) = panels(1, 1, wide, tall, grid=grid)
        return figure, axes
    if grid:
        ax.grid(axis=grid, alpha=0.3)
    return cast("Figure", ax.figure), ax


def styles(names: Iterable[str], most: int = MAX_COLORED_CURVES) -> dict[str, dict[str, Any]]:
    """Assign a color, marker and line style to every name: name -> style.

    Those of the first `most` names differ; further curves are thin and pale.
    """
    looks: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(dict.fromkeys(names)):
        if i >= most:
            looks[name] = {"color": PALE_COLOR, "marker": ".", "linestyle": "-", "zorder": 1}
            continue
        again, k = divmod(i, len(COLORS))  # a second round has other lines and markers
        kind = LINES[(k + again) % len(LINES)]
        mark = MARKERS[(k + again) % len(MARKERS)]
        looks[name] = {"color": COLORS[k], "marker": mark, "linestyle": kind}
    return looks


def about(metric: str, rows: Iterable[Row] | pandas.DataFrame) -> pandas.DataFrame:
    """Return a metric's rows of a score table, with adaptations named as in legends."""
    import pandas

    table = pandas.DataFrame(rows)
    metrics = sorted(set(table["metric"])) if len(table) else []
    if metric not in metrics:
        metrics_text = ", ".join(metrics) or "no rows"
        raise ValueError(f"no row is about metric {metric!r}; found {metrics_text}")
    adaptation = table["adaptation"].map(lambda how: ADAPTED.get(how, f", {how}"))
    return table.assign(adaptation=adaptation)[table["metric"] == metric].astype({"value": float})


def axis_label(metric: str) -> str:
    """Return the axis label of a metric, with its unit."""
    for prefix, whose in SHARES.items():
        if metric.startswith(prefix):
            return f"{axis_label(metric.removeprefix(prefix))}, {whose}"
    return METRICS.get(metric, plain(metric))


def line(axes: Axes, at: Any, middle: Any, ends: Any, name: str, style: Look) -> None:
    """Plot a line and, if `ends` (low, high) are given, a band between these ends."""
    every = max(1, len(at) // 10)
    axes.plot(at, middle, label=name, markersize=4, markevery=every, **style)
    if ends is not None:
        axes.fill_between(at, *ends, color=style["color"], alpha=0.2, linewidth=0)


def band(axes: Axes, points: pandas.DataFrame, name: str, style: Look) -> None:
    """Plot means over seeds with a band of one standard error (columns mean and sem)."""
    at, mean, error = points.index, points["mean"], points["sem"].fillna(0.0)
    ends = (mean - error, mean + error) if len(at) > 1 and error.any() else None
    line(axes, at, mean, ends, name, style)
    if len(at) == 1 and error.any():  # too narrow for a band
        axes.errorbar(at, mean, error, fmt="none", color=style["color"], capsize=3)


def bubbles(axes: Axes, x: Any, y: Any, rows: Any, joined: Any, name: str, style: Look) -> None:
    """Plot points, larger for more rows; fill the `joined` points and connect them by lines."""
    color, area, layer = (
        style["color"],
        12 + 90 * rows / max(1, rows.max()),
        style.get("zorder", 3),
    )
    line = {"linestyle": style["linestyle"], "color": color, "zorder": min(2, layer)}
    axes.plot(x, np.where(joined, y, np.nan), **line)
    look: dict[str, Any] = {"edgecolors": color, "alpha": 0.85, "clip_on": False, "zorder": layer}
    look["facecolors"] = [color if full else "white" for full in joined]
    axes.scatter(x, y, area, marker=style["marker"], **look)
    axes.plot([], [], label=name, **style)


def whole_numbers(most: int) -> MaxNLocator:
    """Return a tick locator for whole numbers, with at most the given number of steps."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def mark_rounds(axis: Axis) -> None:
    """Label an axis as training rounds, with ticks at whole numbers only."""
    axis.set_label_text("round")
    axis.set_major_locator(whole_numbers(8))


def mark_sizes(axis: Axis, size: Any) -> None:
    """Label an axis as numbers of training rows, on a log scale if they vary widely."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_label_text("training rows of the client")
    if not size.max() > 20 * size.min() > 0:  # a logarithm cannot show clients without rows
        axis.set_major_locator(whole_numbers(8))
        return
    axis.axes.set_xscale("log")
    decades = np.log10(size.max() / size.min())
    axis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,))
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def label_places(
    axis: Axis, names: Sequence[str], places: int, title: str, room: float = np.inf
) -> None:
    """Label positions 0, 1, ... on an axis by name, or by number if there are too many."""
    axis.set_label_text(title)
    # "client 3" is 3 on an axis of clients.
    labels = [plain(short(name.removeprefix(f"{title} "), 20)) for name in names]
    if len(names) != places or places > 20:
        if labels != [str(place) for place in range(len(labels))]:
            axis.set_label_text(f"{title} (by number; {len(names):,} names not shown)")
        axis.set_major_locator(whole_numbers(10))
        return
    axis.set_ticks(range(places), labels)
    if 0.1 * max(map(len, labels)) > room:
        axis.set_tick_params(labelrotation=90)


def with_legend(
    figure: Figure,
    panels: Iterable[Axes],
    order: Iterable[str] | Mapping[str, Look] = (),
    note: str = "",
    ax: Axes | None = None,
    title: str = "",
) -> Figure:
    """Add a title and one legend above all panels, or to the user's axes; return the figure.

    Curves that are pale in `order` (name -> look) are counted. A new figure grows by the height of
    a long legend, so that the panels keep their size.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    handle_by_label: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        handle_by_label |= dict(zip(labels, handles, strict=True))
    looks = order if isinstance(order, Mapping) else {}
    pale = [name for name in handle_by_label if looks.get(name, {}).get("color") == PALE_COLOR]
    if pale:
        note = f"{note}; gray: {len(pale)} more" if note else f"gray: {len(pale)} more"
    handle_by_label = {
        n: handle_by_label[n]
        for n in dict.fromkeys([*order, *handle_by_label])
        if n in handle_by_label and n not in pale
    }
    titled(figure, title, ax)
    if ax is not None:
        ax.legend(
            handle_by_label.values(),
            handle_by_label.keys(),
            title=note or None,
            frameon=False,
            fontsize=pt(8),
        )
        return figure
    if not handle_by_label and not note:
        return figure
    letters = int((figure.get_figwidth() - 0.7) / (0.0085 * pt(10)))
    named = [_wrapped(name, letters) for name in handle_by_label]
    note = "\n".join(_wrapped(line, int(1.15 * letters)) for line in note.split("\n"))
    wide = 0.7 + 0.0085 * pt(10) * min(letters, max(map(len, handle_by_label), default=0))
    look: dict[str, Any] = {"frameon": False, "title_fontsize": pt(9), "fontsize": pt(10)}
    look["ncols"] = min(len(handle_by_label), max(1, int(figure.get_figwidth() / wide)))
    look |= {"loc": "upper left", "alignment": "left", "borderaxespad": 0.1}
    legend = figure.legend(handle_by_label.values(), named, title=note or None, **look)
    canvas: Any = FigureCanvasAgg(figure)
    tall = legend.get_window_extent(canvas.get_renderer()).height / figure.dpi  # inches
    engine = cast("ConstrainedLayoutEngine", figure.get_layout_engine())
    above = (1 - engine.get()["rect"][3]) * figure.get_figheight()  # of the title
    _grow(figure, max(0.0, tall - LEGEND * pt(1) ** 0.5))
    top = 1 - above / figure.get_figheight()
    legend.set_bbox_to_anchor((0, 0, 1, top))
    engine.set(rect=(0, 0, 1, top - (tall + 0.05) / figure.get_figheight()))
    return figure


def _wrapped(text: str, letters: int) -> str:
    from textwrap import fill

    return text if len(text) <= letters else fill(text, max(20, letters))


def _grow(figure: Figure, inches: float) -> None:
    """Make a figure taller; its title keeps its distance from the upper edge."""
    wide, tall = figure.get_size_inches()
    figure.set_size_inches(wide, tall + inches)
    for text in figure.texts:
        text.set_y(1 - (1 - text.get_position()[1]) * tall / (tall + inches))


def titled(figure: Figure, title: str, ax: Axes | None = None) -> Figure:
    """Add a title above a new figure, which grows by its height, or above the user's axes."""
    from textwrap import fill

    if not title:
        return figure
    if ax is not None:
        text = fill(title, max(20, int(130 / pt(1) * _inches(ax) / 10)))
        ax.set_title(plain(text), loc="left", fontsize=pt(10))
        return figure
    wide, tall = figure.get_size_inches()
    text = fill(title, max(20, int(10 * wide / pt(1))))
    room = pt(0.08) + pt(0.19) * (text.count("\n") + 1)
    figure.set_size_inches(wide, tall + room)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, tall / (tall + room)))
    look: dict[str, Any] = {
        "ha": "left",
        "va": "top",
        "weight": "bold",
        "fontsize": pt(11),
        "gid": "title",
    }
    # A suptitle outside of the layout would be cut off by bbox_inches="tight".
    figure.text(0.1 / wide, 1 - 0.08 / (tall + room), plain(text), **look)
    return figure


def _inches(axes: Axes) -> float:
    """Return the width of axes in inches."""
    figure = cast("Figure", axes.figure)
    return float(axes.get_position().width * figure.get_figwidth())


def heading(metric: str) -> str:
    """Return the name of a metric for the beginning of a title, without its unit.

    >>> heading("accuracy"), heading("smallest_nll")
    ('Accuracy', 'Negative log likelihood, smallest 10% of clients')
    """
    name, _, rest = axis_label(metric).partition(" (")
    return name[:1].upper() + name[1:] + rest.partition(")")[2]
