"""Kaplan-Meier curves by client and of all clients, from counts on a grid of times.

A site sends how many of its rows have an event, and how many are censored, between the bounds of
a grid that all sites share; no time of a row leaves. Times are rounded up to the next bound, and
rows that are censored there are at risk of its events. With d events of n rows at risk at a bound,

    S(t) = product of (1 - d / n) over bounds up to t
    variance of log S(t) = sum of d / (n (n - d))

(Kaplan and Meier, JASA 1958; Greenwood 1926). Bands are those of log(-log S), as of lifelines and
of conf.type = "log-log" in R's survival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pyrofl.arguments import ProperShare, check_name, checked
from pyrofl.data.frames import Tables, number_rows, place_of
from pyrofl.data.tables.wording import listed
from pyrofl.inference.transport.message_checks import MAX_SHOWN_CHARACTERS, one_line
from pyrofl.inference.transport.site_rules import BrokenRuleError, SiteRules
from pyrofl.models.regression.rows import kind_of
from pyrofl.user_warnings import warn_user

Floats = NDArray[np.float64]
Counts = dict[str, list[float]]

ALL = "all"
DEFAULT_RULES = SiteRules()
MAX_BOUNDS = 10_000


@checked
def survival_counts(
    tables: Tables,
    time: str,
    event: str,
    bounds: Sequence[float] | np.ndarray,
    *,
    rules: SiteRules | None = DEFAULT_RULES,
) -> dict[str, Counts]:
    """Return what a site sends for Kaplan-Meier curves: counts of its clients' rows between bounds.

    Rows without time or event are left out.

    Args:
        tables: tables of the clients that are here.
        time: column of times of at least 0.
        event: column with 1 for an event and 0 for a censored time.
        bounds: increasing times, the same at all sites, such as [30, 90, 180, 365].
        rules: rules of the site: every count must be 0 or at least `min_events`, and a client has
            at least `min_rows` rows. None checks nothing.

    Returns:
        Client -> bounds, events and censored (numbers of rows above the bound before and up to each
        bound), and beyond (number of rows above the last bound, which are censored there), which
        JSON can hold.

    Raises:
        BrokenRuleError: if a count is too small to leave; its text has wider bounds.
        ValueError: if a column is missing, or a cell or the bounds are invalid.

    Warns:
        UserWarning: if rows are left out.

    Examples:
        >>> import pandas as pd
        >>> from pyrofl import federations
        >>> table = pd.DataFrame({"days": [3, 8, 9, 20, 50], "died": [1, 0, 1, 1, 0]})
        >>> tables = federations.from_frames({"bern": table})
        >>> survival_counts(tables, "days", "died", [10, 30], rules=None)["bern"]["events"]
        [2, 1]
    """
    grid = _grid(bounds)
    counts = {}
    for name, frame in tables.frames.items():
        times, events = _cells(name, frame, time, event)
        counts[name] = _counts(times, events, grid)
        if rules is not None:
            rules.check_rows(name, len(times))
            _check_counts(rules, name, counts[name])
    return counts


@checked
def kaplan_meier(
    counts: Mapping[str, Mapping[str, Any]], *, prob: ProperShare = 0.95
) -> pd.DataFrame:
    """Return the Kaplan-Meier curve of each client and of all rows, from counts of the sites.

    `pyrofl.figures.survival` plots the result.

    Args:
        counts: client -> what `survival_counts` returned for it.
        prob: probability of the band at each time, which Greenwood's variance gives.

    Returns:
        A row for each client, and for "all", and each bound, from time 0: client, time, at_risk and
        events at the bound, survival, and the ends of the band. Numbers are NaN where they are not
        determined: the survival where no row is at risk any more, unless it is 0, and the band
        where the survival is 0 or no event was seen.

    Raises:
        ValueError: if counts are invalid, with the name of the client, or of other bounds.

    Examples:
        >>> import pandas as pd
        >>> from pyrofl import federations
        >>> bern = pd.DataFrame({"days": [3, 8, 9, 20, 50], "died": [1, 0, 1, 1, 0]})
        >>> basel = pd.DataFrame({"days": [5, 12, 28, 31, 40], "died": [1, 0, 1, 0, 1]})
        >>> tables = federations.from_frames({"bern": bern, "basel": basel})
        >>> counts = survival_counts(tables, "days", "died", [10, 30], rules=None)
        >>> kaplan_meier(counts).query("client == 'all'")["survival"].round(3).tolist()
        [1.0, 0.7, 0.467]
    """
    if not counts or ALL in counts:
        raise ValueError(
            f"counts are of {listed([*counts]) or 'no client'}; expected some clients, none of "
            f"them with the name {ALL!r}, which is that of all rows"
        )
    received = {name: _read(name, one) for name, one in counts.items()}
    first, *others = received
    for name in others:
        if received[name]["bounds"] != received[first]["bounds"]:
            raise ValueError(f"{name}: counts have other bounds than those of {first}")
    pooled = {
        part: np.sum([one[part] for one in received.values()], 0).tolist()
        for part in ("events", "censored", "beyond")
    }
    received[ALL] = {"bounds": received[first]["bounds"], **pooled}
    tables = [_curve(one, prob).assign(client=name) for name, one in received.items()]
    table = pd.concat(tables, ignore_index=True)
    table = table[["client", *(name for name in table.columns if name != "client")]]
    about = {"column": "time", "by": "client", "response": "survival probability", "steps": True}
    table.attrs |= about
    return table


def _curve(counts: Counts, prob: float) -> pd.DataFrame:
    """Return time, rows at risk, events, survival and band of one client, from time 0."""
    events, censored = (
        np.array([0, *counts[part]], dtype=float) for part in ("events", "censored")
    )
    gone = events + censored
    at_risk = gone.sum() + counts["beyond"][0] - np.cumsum(gone) + gone
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(at_risk > 0, 1 - events / at_risk, np.nan)
        survival = np.cumprod(parts, dtype=np.float64)
        survival = np.where(at_risk == 0, _after(survival), survival)
        steps = np.where(events > 0, events / (at_risk * (at_risk - events)), 0.0)
        width = np.sqrt(np.cumsum(steps)) / np.log(survival)
        width *= NormalDist().inv_cdf((1 + prob) / 2)
        low, high = (np.exp(np.log(survival) * np.exp(sign * width)) for sign in (-1, 1))
    low, high = (np.where((survival > 0) & (survival < 1), end, np.nan) for end in (low, high))
    ends = [f"{100 * end:.4g}%" for end in ((1 - prob) / 2, (1 + prob) / 2)]
    columns = {"time": [0.0, *counts["bounds"]], "at_risk": at_risk.astype(int)}
    columns |= {"events": events.astype(int), "survival": survival, ends[0]: low, ends[1]: high}
    return pd.DataFrame(columns)


def _after(survival: Floats) -> Floats:
    """Return 0 after the last known survival if that is 0, and NaN otherwise."""
    return np.where(np.minimum.accumulate(np.nan_to_num(survival, nan=1.0)) == 0, 0.0, np.nan)


def _cells(name: str, frame: pd.DataFrame, time: str, event: str) -> tuple[Floats, Floats]:
    """Return times and events [N] of the rows that have both; raise ValueError for other cells."""
    for column in (time, event):
        try:
            check_name(column, [str(one) for one in frame.columns], "column")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if kind_of(frame[column]) != "numbers":
            raise ValueError(f"{name}: column {column} holds text; expected numbers")
    whole = number_rows(frame)[[time, event]].dropna()
    if len(whole) < len(frame):
        warn_user(f"{name}: {len(frame) - len(whole)} of {len(frame)} rows have no time or event")
    times, events = (whole[column].to_numpy(dtype=np.float64) for column in (time, event))
    for column, values, fits, words in (
        (time, times, np.isfinite(times) & (times >= 0), "times of at least 0"),
        (event, events, np.isin(events, (0, 1)), "1 for an event and 0 for a censored time"),
    ):
        if not fits.all():
            row = int((~fits).argmax())
            place = place_of(whole, row)
            raise ValueError(f"{name}: {column} is {values[row]:g} in {place}; expected {words}")
    return times, events


def _counts(times: Floats, events: Floats, grid: Floats) -> Counts:
    """Return the numbers of events and censored times up to each bound, and of rows beyond."""
    place = np.searchsorted(grid, times, side="left")  # a time at a bound is up to it
    seen, other = (
        np.bincount(place[events == value], minlength=len(grid) + 1)[: len(grid)].tolist()
        for value in (1, 0)
    )
    beyond = [int((place == len(grid)).sum())]
    return {"bounds": grid.tolist(), "events": seen, "censored": other, "beyond": beyond}


def _check_counts(rules: SiteRules, name: str, counts: Counts) -> None:
    """Raise BrokenRuleError if a count is small, with wider bounds whose counts are not."""
    parts = {part: counts[part] for part in ("events", "censored", "beyond")}
    small = sum(0 < count < rules.min_events for part in parts.values() for count in part)
    if not small:
        return
    wider = _wider(rules.min_events, counts)
    cure = f"use wider bounds, such as {', '.join(f'{bound:g}' for bound in wider)}"
    raise BrokenRuleError(
        name,
        "min-events",
        f"{small} of the counts of events and censored times between bounds are small; expected "
        f"each to be 0 or at least {rules.min_events}: {cure if wider else 'leave the study'}",
    )


def _wider(least: int, counts: Counts) -> list[float]:
    """Return some of the bounds, between which no count is small; none if there are no such."""
    parts = np.array([counts["events"], counts["censored"]])
    chosen: list[int] = []
    for place in range(len(counts["bounds"])):
        begin = chosen[-1] + 1 if chosen else 0
        inside = parts[:, begin : place + 1].sum(1)
        if inside.any() and not ((inside > 0) & (inside < least)).any():
            chosen.append(place)
    while chosen:
        beyond = parts[:, chosen[-1] + 1 :].sum() + counts["beyond"][0]
        if not 0 < beyond < least:
            break
        chosen.pop()
    return [counts["bounds"][place] for place in chosen]


def _grid(bounds: Any) -> Floats:
    """Return bounds as an array [K]; raise ValueError if they are invalid."""
    try:
        grid = np.asarray(bounds, dtype=np.float64)
    except (TypeError, ValueError):
        grid = np.zeros(0)
    is_grid = grid.ndim == 1 and 0 < len(grid) <= MAX_BOUNDS and np.isfinite(grid).all()
    if not is_grid or not grid[0] > 0 or not (np.diff(grid) > 0).all():
        raise ValueError(
            f"bounds are {bounds!r:.60}; expected up to {MAX_BOUNDS:,} increasing times above 0, "
            "such as [30, 90, 180, 365]"
        )
    return grid


def _read(name: str, counts: Any) -> Counts:
    """Return the received counts of a client; raise ValueError if they are invalid."""
    parts = ("bounds", "events", "censored", "beyond")
    if not isinstance(counts, Mapping) or {*counts} != {*parts}:
        kind = type(counts).__name__
        got = ", ".join(map(str, counts)) if isinstance(counts, Mapping) else f"a {kind}"
        raise ValueError(
            f"{name}: counts are {one_line(got, MAX_SHOWN_CHARACTERS)}; expected {', '.join(parts)}"
        )
    try:
        grid = _grid(counts["bounds"])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for part, length in (("events", len(grid)), ("censored", len(grid)), ("beyond", 1)):
        values = counts[part]
        if not isinstance(values, list | tuple) or len(values) != length:
            raise ValueError(f"{name}: {part} are no list of {length}; expected a count each")
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
                raise ValueError(
                    f"{name}: {part} have {value!r:.40}; expected whole numbers of at least 0"
                )
    return {"bounds": grid.tolist(), **{part: [*counts[part]] for part in parts[1:]}}
