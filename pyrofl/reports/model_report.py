"""Pages of runs with named parameters: regressions from a formula, and programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl import figures
from pyrofl.data.outlines import Hidden
from pyrofl.data.tables.wording import listed, number_of
from pyrofl.inference.checks import predictive_checks
from pyrofl.inference.definition.seeds import separate
from pyrofl.inference.definition.table_method import variables_of
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.export import SAMPLE_DIMS
from pyrofl.inference.posteriors.summary import ADDED, summarize
from pyrofl.models.regression import effects
from pyrofl.models.regression.columns import variables
from pyrofl.nouns import nouns
from pyrofl.reports.client_results import client_sections
from pyrofl.reports.first_page import (
    correction,
    first_page,
    format_interval,
    number,
    ratio_numbers,
    size_of,
)
from pyrofl.reports.page import MAX_TABLE_LINES, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

MAX_ENTRIES = 1000  # of a program's variables that are summarized
MAX_SHOWN = 6  # columns with a conditional effect, terms with a forest plot, sentences of one kind
CONTINUOUS, DISCRETE = ("mean", "sd", "max"), ("mean", "sd", "zeros")
NUM_REPLICAS, MAX_CELLS = 1000, 5_000_000  # posterior predictive draws; numbers in all of them
ENDS = ["2.5%", "97.5%"]
TITLES = {
    "forest": "",  # the clients, as the study calls them
    "conditional": "Conditional effects",
    "predictive": "Posterior predictive check",
    "convergence": "Parameter changes",
}

Drawing = tuple[str, str, Callable[[], "Figure"]]
"""File name, caption, and plot function of a figure."""


@dataclass(frozen=True)
class ParameterTables:
    """Posterior of a run, its table of parameters, and its table of ratios, if they have any."""

    found: Any
    table: DataFrame
    names: tuple[str, ...] = ()  # variables of a program in the table
    ratios: DataFrame | None = None
    left: tuple[str, ...] = ()  # variables that have too many entries for the table
    units: Mapping[str, str] = field(default_factory=dict)  # column -> its unit


def unit_of(term: str, units: Mapping[str, str]) -> str:
    """Return the units of a coefficient's columns; "" if they have none, or are scaled.

    >>> unit_of("age", {"age": "years"}), unit_of("log(crp):sex[m]", {"crp": "mg/L"})
    ('years', 'crp in mg/L')
    """
    if plain := re.fullmatch(r"(?:center\()?(\w+)\)?", term):
        return units.get(plain[1], "")
    names = re.findall(r"[^\W\d]\w*", re.sub(r"\[.*?\]|scale\(.*?\)", "", term))
    return ", ".join(f"{name} in {units[name]}" for name in dict.fromkeys(names) if name in units)


def with_units(
    head: Sequence[str], rows: Sequence[tuple[Any, ...]], units: Mapping[str, str]
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return head and rows of a table of coefficients with a column of their units, if any."""
    texts = [unit_of(re.sub(r"^b\[(.+)\]$", r"\1", str(row[0])), units) for row in rows]
    if not any(texts):
        return (*head,), [*rows]
    lines = [(row[0], unit, *row[1:]) for row, unit in zip(rows, texts, strict=True)]
    return (head[0], "unit", *head[1:]), lines


def is_regression(run: Run) -> bool:
    """Return whether a run is one of `pyrofl.regression`."""
    return getattr(run.method, "design", None) is not None


def estimates(run: Run, idata: Any, var_names: Sequence[str] | None = None) -> ParameterTables:
    """Return the table of estimates, and that of ratios if exp(b) has a meaning.

    Args:
        run: of a regression or a program.
        idata: its posterior, as `to_arviz` returns it.
        var_names: variables of the table, in their order; None is all that have room.
    """
    method: Any = run.method
    if is_regression(run):
        has_ratios = method.design.family.ratio.get(method.link) and method.design.terms
        table = summarize(idata, names=variables_of(method))
        return ParameterTables(idata, table, ratios=effects.ratios(run) if has_ratios else None)
    every = idata["posterior"]
    shown, left = fitting(every, MAX_ENTRIES) if var_names is None else (var_names, [])
    table = summarize(idata, names={n: n for n in shown})
    return ParameterTables(idata, table, tuple(shown), left=tuple(left))


def fitting(posterior: Any, room: int = MAX_TABLE_LINES) -> tuple[list[str], list[str]]:
    """Return the variables that have room in a table, smallest first, and those that have not."""
    sizes = {str(n): prod(v.shape[2:]) for n, v in posterior.data_vars.items()}
    shown = list[str]()
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        if size <= room and not name.endswith(ADDED):
            shown, room = [*shown, name], room - size
    return shown, [n for n in sizes if n not in shown and not n.endswith(ADDED)]


def drawings(run: Run, parameter_tables: ParameterTables) -> Iterator[Drawing]:
    """Yield all figures of a run; the first one belongs on the first page."""
    if not is_regression(run):
        yield from _of_program(run, parameter_tables)
        return
    method: Any = run.method
    if method.design.terms:
        yield "effects", _caption(parameter_tables), partial(_effects, parameter_tables)
    posterior = parameter_tables.found["posterior"]  # of a server, it has no effects of clients
    groups = [one for one in method.design.groups if f"r_{one.name}" in posterior]
    terms = dict.fromkeys(label for one in groups for label in one.labels)
    for k, term in enumerate(list(terms)[:MAX_SHOWN]):
        text = f"{term} of each {nouns().client} or level, with 95% intervals"
        yield f"forest-{k}", text, partial(effects.forest, run, term)
    names = variables(method.design.formula.population)[0]
    columns = [name for name in method.design.needed if name in names]
    for k, column in enumerate(columns[:MAX_SHOWN]):
        text = f"Expected response by {column}; other columns at their means or first levels"
        yield f"conditional-{k}", text, partial(_conditional, run, column)
    if method.design.family.kind == "rows" and not isinstance(run.data, Hidden):
        text = f"Statistics of each {nouns().client}'s responses, observed and predicted (95%)"
        yield "predictive", text, partial(_predictive, run)


def _caption(parameter_tables: ParameterTables) -> str:
    if parameter_tables.ratios is None:
        return "Change of the response with each term, with 95% intervals; 0 is no effect."
    ratio = str(parameter_tables.ratios.index.name).capitalize()
    return f"{ratio} of each term, with 95% intervals; 1 is no effect."


def _effects(parameter_tables: ParameterTables) -> Figure:
    """Plot ratios on a logarithmic axis, or coefficients, with a line at no effect."""
    if parameter_tables.ratios is None:
        table = parameter_tables.table[parameter_tables.table.index.str.startswith("b[")]
        labels = [name[2:-1] for name in table.index]
    else:
        table, labels = parameter_tables.ratios, [*parameter_tables.ratios.index]
    summary = table[["median", *ENDS]].to_numpy().T
    drawn = figures.forest({"95% interval": summary}, labels, str(table.index.name or "change"))
    axes = drawn.axes[0]
    axes.axvline(0.0 if parameter_tables.ratios is None else 1.0, color="black", linewidth=0.8)
    if parameter_tables.ratios is not None:
        axes.set_xscale("log")
        ends = 10.0 ** np.arange(-6, 7)
        low, high = axes.get_xlim()
        every = np.sort(np.outer(ends, [1, 2, 5]).ravel())
        ticks = [tick for tick in every if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    return drawn


def _of_program(run: Run, parameter_tables: ParameterTables) -> Iterator[Drawing]:
    posterior, whole = parameter_tables.found["posterior"], list[str]()
    shown = [n for n in parameter_tables.names if posterior[n].dims == (*SAMPLE_DIMS, "client")]
    for name in shown[:MAX_SHOWN] if run.data.clients > 1 else ():
        whole.append(name)
        draw = partial(_clients, posterior[name])
        text = f"{name} of each {nouns().client}, with 95% intervals."
        yield f"forest-{len(whole)}", text, draw
    if not whole and len(parameter_tables.table):
        yield "forest-0", "Parameters with 95% intervals.", partial(_table, parameter_tables.table)
    if not run.parameter_changes().empty:
        text = "How far the posterior still moved in each round"
        yield "convergence", text, partial(figures.convergence, run)


def _clients(value: Any) -> Figure:
    draws = value.stack(draws=SAMPLE_DIMS).transpose("draws", "client").values
    summary = np.stack([draws.mean(0), *np.quantile(draws, [0.025, 0.975], axis=0)])
    labels = [str(c) for c in value["client"].values]
    return figures.forest({"95% interval": tuple(summary)}, labels, str(value.name))


def _table(table: DataFrame) -> Figure:
    summary = table[["mean", *ENDS]].to_numpy().T
    return figures.forest({"95% interval": summary}, [*map(str, table.index)], "parameter")


def _conditional(run: Run, column: str) -> Figure:
    return figures.conditional(effects.conditional(run, column))


def _predictive(run: Run) -> Figure:
    method: Any = run.method
    is_discrete = method.design.family.support in ("count", "trials", "binary")
    draws = min(NUM_REPLICAS, max(MAX_CELLS // len(run.data.y), 100))
    table = predictive_checks(run, DISCRETE if is_discrete else CONTINUOUS, draws, progress=False)
    return figures.predictive_checks(table)


def question(run: Run) -> str:
    """Return the question that a run answers, as far as its model states it."""
    n, method = run.data.clients, run.method
    at = f"one {nouns().client}" if n == 1 else nouns().client.count(n)
    if not is_regression(run):
        shared = method.metadata.sites.partition(";")[0].removeprefix("shared by all clients: ")
        return f"What do the rows of {at} show about {shared or 'the model'}?"
    design: Any = getattr(method, "design", None)
    names = variables(design.formula.population)[0]
    columns = [name for name in design.needed if name in names]
    named = " and ".join(columns) if len(columns) < 3 else listed(columns)
    by = f"depend on {named} at" if columns else "differ between"
    return f"How does {design.formula.response} {by} {at}?"


def results(run: Run, parameter_tables: ParameterTables) -> list[str]:
    """Return the results of a run in sentences."""
    if not is_regression(run):
        return _parameters(parameter_tables)
    method: Any = run.method
    sentences = [*_terms(run, parameter_tables)]
    at = f"on the scale of the link {method.link}" if method.link != "identity" else ""
    for name, row in parameter_tables.table[parameter_tables.table.index.str.startswith("sd_")][
        :MAX_SHOWN
    ].iterrows():
        level = str(name).removeprefix("sd_")
        text = f"The standard deviation between levels of {level} is {number(row['median'])}"
        sentences.append(" ".join(f"{text} ({format_interval(*row[ENDS])}) {at}".split()) + ".")
    if method.design.terms:
        sentences.append(
            "An effect compares rows that are equal in all other columns of the formula."
        )
    if any(":" in term for term in method.design.terms):
        sentences.append(
            "A column with interactions: its effect alone is that at 0, or the reference."
        )
    return sentences


def _terms(run: Run, parameter_tables: ParameterTables) -> Iterator[str]:
    """Yield a sentence for each coefficient: its direction, size and interval."""
    method: Any = run.method
    response, ratio = method.design.event, parameter_tables.ratios is not None
    if parameter_tables.ratios is not None:
        table, nothing = parameter_tables.ratios, 1.0
        kind = str(table.index.name).removesuffix(" ratio").replace("ratio of means", "mean")
    else:
        table, nothing = (
            parameter_tables.table[parameter_tables.table.index.str.startswith("b[")],
            0.0,
        )
        kind = "mean" if method.link == "identity" else f"{method.link} of the mean"
    for label, row in table[: 2 * MAX_SHOWN].iterrows():
        term = str(label) if ratio else str(label)[2:-1]
        term, _, answer = term.partition(" (")
        versus = f" = {answer[:-1]} against {method.design.answers[0]}" if answer else ""
        what = f"the {kind} of {response}{versus}"
        low, high, middle = row["2.5%"], row["97.5%"], row["median"]
        middle_text, range_text = number(abs(middle)), f"({format_interval(low, high)})"
        if ratio:
            middle_text, *ends = ratio_numbers(middle, low, high)
            range_text = f"(95% interval {' to '.join(ends)})"
        how = (
            f"by a factor of {middle_text} {range_text}"
            if ratio
            else f"by {middle_text} {range_text}"
        )
        compared = _subject(method, term, parameter_tables.units)
        if low <= nothing <= high:
            size = (
                f"{f'factor {middle_text}' if ratio else f'change {number(middle)}'} {range_text}"
            )
            up = f", probability of an increase {row['p_above_1']:.0%}" if ratio else ""
            yield f"Whether {compared} changes {what} is uncertain: {size}{up}."
            continue
        verb = "raises" if low > nothing else "lowers"
        if not ratio and verb == "lowers":
            how = f"by {number(abs(middle))} ({format_interval(-high, -low)})"
        subject = re.sub("^(one|the) ", lambda m: m[0].capitalize(), compared)
        yield f"{subject} {verb} {what} {how}."


def _subject(method: Any, term: str, units: Mapping[str, str]) -> str:
    """Return what a coefficient compares, in words."""
    unit = f" ({text})" if (text := unit_of(term, units)) else ""
    if ":" in term:
        return f"the interaction {term}{unit}"
    if not (level := re.fullmatch(r"([^\[\]]+)\[(.+)\]", term)):
        return f"one unit more of {term}{unit}"
    column, value = level.groups()
    used = {t[len(column) + 1 : -1] for t in method.design.terms if t.startswith(f"{column}[")}
    every = [str(v) for v in method.design.clients.levels.get(column, ())]
    rest = [v for v in every if v not in used]
    return f"{column} = {value}, compared with {rest[0] if len(rest) == 1 else 'the reference'},"


def _parameters(parameter_tables: ParameterTables) -> list[str]:
    """Return sentences on shared parameters, and on the range over clients of the others."""
    posterior, sentences = parameter_tables.found["posterior"], list[str]()
    for name in parameter_tables.names:
        value, labels = posterior[name], parameter_tables.table.index
        rows = parameter_tables.table[(labels == name) | labels.str.startswith(f"{name}[")]
        if "client" not in value.dims:
            for label, row in rows[: MAX_SHOWN + 1 - len(sentences)].iterrows():
                text = f"{label} is {number(row['mean'])} ({format_interval(*row[ENDS])})."
                sentences.append(text)
        elif value.dims == (*SAMPLE_DIMS, "client") and len(rows) > 1:
            ends = (rows.loc[rows["mean"].idxmin()], rows.loc[rows["mean"].idxmax()])
            told = (
                f"{number(row['mean'])} at {str(row.name)[len(name) + 1 : -1]} "
                f"({format_interval(*row[ENDS])})"
                for row in ends
            )
            sentences.append(f"{name} goes from {' to '.join(told)}.")
    return sentences[: 2 * MAX_SHOWN]


def sections(
    run: Run,
    parameter_tables: ParameterTables | None,
    drawn: Sequence[tuple[str, str, Path | Figure]],
    problems: Sequence[str],
    data: str = "",
) -> list[Section]:
    """Return all sections of the page of a regression or a program.

    Args:
        run: a fitted run.
        parameter_tables: its estimates; None if it diverged.
        drawn: name, caption and figure or PNG file; the first is shown on the first page.
        problems: warnings of the build and the fit.
        data: name of the data set.
    """
    method: Any = run.method
    sizes = run.data.sizes[: run.data.clients].tolist()
    names = run.data.names[: run.data.clients]
    about = [
        ("Data", f"{size_of(names, sizes, data)}; the rows stayed at the {nouns().client.many}")
    ]
    model = Section("Model")
    if is_regression(run):
        family = next(n for n, f in _families().items() if f is method.design.family)
        priors = method.priors().splitlines()
        about.append(("Model", f"{method.design.formula.text}; {family}, link {method.link}"))
        more = f"; {len(priors) - 4} more: see Model" if len(priors) > 4 else ""
        about.append(("Priors", "; ".join(priors[:4]) + more))
        model.note("Priors:").note(method.priors(), "command")
        model.note("The Pyro program that was fitted:").note(method.program(), "command")
    elif method.metadata.sites:
        about.append(("Model", method.metadata.sites.partition("; method:")[0]))
    rounds, seed = number_of(run.state.number, "round"), separate(run.seed).noise
    about.append(("Method", f"{method.name}, {rounds}, seed {seed}"))
    if run.privacy:
        about.append(("Privacy", str(run.privacy)))
    certain, certain_sections = list[str](), list[Section]()
    if parameter_tables is not None:
        stats = parameter_tables.found.get("sample_stats", {})
        worst = [
            float(of(stats[n])) if n in stats else np.nan
            for n, of in (("pareto_k", np.max), ("importance_ess", np.min))
        ]
        certain.append(correction(parameter_tables.table.attrs["corrected"], *worst))
        certain_sections = [_estimates(parameter_tables)]
    first = [(figure, text) for _, text, figure in drawn[:1]]
    words = results(run, parameter_tables) if parameter_tables else []
    statuses = [("", run.status.kind, run.status.why)]
    page = first_page(about, words, first[0] if first else None, statuses, certain, problems)
    clients = Section(f"{nouns().client.title} and rows")
    clients.table(
        (str(nouns().client), "rows"), [(n, int(s)) for n, s in zip(names, sizes, strict=True)]
    )
    for kind, title in TITLES.items():
        of_kind = [one for one in drawn[1:] if one[0].startswith(kind)]
        if of_kind:
            section = Section(title or nouns().client.title)
            for _, text, figure in of_kind:
                section.figure(figure, text)
            certain_sections.append(section)
    if is_regression(run) and parameter_tables is not None:
        certain_sections += client_sections(run, parameter_tables.found["posterior"])
    certain_sections += [clients, *([model] if model.parts else []), costs(run)]
    return [page, *certain_sections]


def _families() -> Any:
    from pyrofl.models.regression.families import FAMILIES

    return FAMILIES


def _estimates(parameter_tables: ParameterTables) -> Section:
    section = Section("Estimates")
    shown = parameter_tables.table.drop(
        columns=["r_hat", "importance_ess"], errors="ignore"
    ).dropna(axis=1)
    units = parameter_tables.units
    section.table(*with_units(("parameter", *shown.columns), _lines(shown), units))
    note = "Intervals are central 95% intervals of the posterior. ess_bulk and ess_tail: effective "
    note += "numbers of draws, of ArviZ, and at most that of the importance sample."
    section.note(f"{note} pareto_k: at most 0.7 is reliable." if "pareto_k" in shown else note)
    if parameter_tables.ratios is not None:
        head = (str(parameter_tables.ratios.index.name), *parameter_tables.ratios.columns)
        section.table(*with_units(head, _lines(parameter_tables.ratios), units))
    return (
        section.note(f"No room here for {', '.join(parameter_tables.left)}.")
        if parameter_tables.left
        else section
    )


def _lines(table: DataFrame) -> list[tuple[Any, ...]]:
    return [(str(name), *map(float, values)) for name, values in table.iterrows()]


def costs(run: Run) -> Section:
    """Return the section on the bytes sent, the time, and the status of a run."""
    down, up = (sum(getattr(r, name) for r in run.records) for name in ("bytes_down", "bytes_up"))
    lines = [(run.state.number, down, up, sum(r.seconds for r in run.records), str(run.status))]
    head = ("rounds", "bytes down", "bytes up", "seconds of training", "status")
    return Section("Rounds and communication").table(head, lines)
