"""Censored and left-truncated times of survival analysis: likelihood terms and checks.

With hazard h, cumulative hazard H and survival function S = exp(-H), the likelihood of a row is
(Klein and Moeschberger, Survival Analysis, Springer 2003, section 3.5)

    h(time) S(time) / S(entry)              an event at a time
    S(time) / S(entry)                      a time that is censored
    (S(time) - S(upper)) / S(entry)         an event after a time and up to a bound

where S(entry) is 1 for rows that are observed from time 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyrofl.data.frames import place_of
from pyrofl.models.regression.rows import kind_of

Floats = NDArray[np.float64]

BOUNDS = ("upper", "entry")  # columns of bounds of times, after the event
NARROWEST = 1e-9  # width of an interval relative to its time, whose probability is precise
EXPONENT = 40.0  # logarithm of parts of an integral that are left out
SMALLEST_BOUND = "1e-300"  # of a time, whose logarithm is finite


def log_within(within: Tensor, hazard: Tensor) -> Tensor:
    """Return log(1 - exp(-hazard)), the log probability of an event before a bound.

    Args:
        within: 1 for rows with an event between two times, and 0 for others, whose value is 0.
        hazard: cumulative hazard between the two times.
    """
    is_within = within > 0
    between = torch.where(is_within, hazard, 1.0).clamp(min=float(SMALLEST_BOUND))
    return torch.where(is_within, (-torch.expm1(-between)).log(), 0.0)


def log_gamma_survival(shape: Tensor, x: Tensor) -> Tensor:
    """Return log Q(shape, x), the log probability that a gamma variable of rate 1 is above x.

    torch has no derivative of Q by the shape. Q is the integral of exp(a s - e^s) / Gamma(a) over s
    from log x on, whose logarithm is smooth: by Gauss-Legendre quadrature of the part within
    `EXPONENT` of its maximum, in two intervals with 24 points each.

    Args:
        shape: a, positive, [...].
        x: values above 0, [...].

    Returns:
        Logarithms with an error below 1e-8 for shapes from 0.01 to 10,000.
    """
    shape, start = torch.broadcast_tensors(shape, x.log())
    peak = torch.maximum(shape.log(), start)
    height = shape * peak - peak.exp()
    # Distances at which a s - e^s is at least `EXPONENT` below its maximum.
    slope, bend = peak.exp() - shape, peak.exp()
    near = ((slope.square() + 2 * EXPONENT * bend).sqrt() - slope) / bend
    right = peak + torch.minimum(near, torch.log1p((EXPONENT + shape * near) / bend))
    left = torch.maximum(start, peak - EXPONENT / shape - (2 * EXPONENT / shape).sqrt())
    nodes, weights = (torch.as_tensor(v).to(shape) for v in np.polynomial.legendre.leggauss(24))
    parts = []
    for low, high in ((left, peak), (peak, right)):
        half = (high - low)[..., None] / 2
        s = low[..., None] + half * (nodes + 1)
        parts.append(weights * half * (shape[..., None] * s - s.exp() - height[..., None]).exp())
    return height + torch.cat(parts, -1).sum(-1).log() - shape.lgamma()


def refuse_open_bounds(frames: Mapping[str, pd.DataFrame], name: str) -> None:
    """Raise ValueError if a column of upper bounds has missing or infinite cells.

    Rows with missing cells would be dropped, which are mostly those of censored times.
    """
    for site, frame in frames.items():
        if name not in frame or kind_of(frame[name]) != "numbers":
            continue
        bad = ~np.isfinite(frame[name].to_numpy(dtype=np.float64))
        if bad.any():
            raise ValueError(
                f"{site}: column {name} has {int(bad.sum())} missing or infinite upper bounds; "
                "expected numbers: write event 0 and the time itself where there is no bound"
            )


def check_times(
    site: str,
    frame: pd.DataFrame,
    y: Floats,
    columns: Mapping[str, Any],
    names: Mapping[str, str],
) -> None:
    """Raise ValueError if bounds do not fit the times of a client.

    Args:
        site: name of the client.
        frame: its rows.
        y: times [N].
        columns: "event", "upper" and "entry", if there are bounds -> values [N].
        names: "time", and the same names -> names of columns.
    """
    upper, event = columns.get("upper", y), columns["event"]
    narrow = (upper > y) & (upper <= y * (1 + NARROWEST))
    is_within = (upper > y) & (event > 0)
    checks = [
        (
            "upper",
            upper < y,
            "expected bounds of at least the time",
        ),
        (
            "upper",
            (upper > y) & (event == 0),
            f"where {names['event']} is 0; expected the time itself for censored times",
        ),
        (
            "upper",
            narrow,
            f"expected the time itself, or an interval of at least {NARROWEST:g} of the time",
        ),
        (
            "entry",
            columns.get("entry", y - 1) >= np.where(is_within, np.nextafter(y, np.inf), y),
            "expected entries before the time",
        ),
    ]
    for role, bad, words in checks:
        if role in columns and bad.any():
            row, joint = int(bad.argmax()), " " if words.startswith("where") else "; "
            raise ValueError(
                f"{site}: {names[role]} is {columns[role][row]:g} and {names['time']} is "
                f"{y[row]:g} in {place_of(frame, row)}{joint}{words}"
            )
