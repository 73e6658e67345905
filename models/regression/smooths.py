"""Terms with several columns whose coefficients have one prior: s(x), gp(x), mo(x) and cs(x).

**Smooth functions** s(x) are splines whose wiggliness is learned. A cubic spline f with evenly
spaced knots has the penalty J(f) = int f''(x)^2 dx over its range, as in O'Sullivan (Statistical
Science 1986), which is 0 for straight lines only. Its coefficients are transformed as in Wood,
"Stable and efficient multiple smoothing parameter estimation for generalized additive models" (JASA
2004), and by `smooth2random` of mgcv:

    f(x) = b (x - mean x) + sum_k r_k z_k(x)      r_k ~ Normal(0, sd)

so that sum_k r_k^2 is J(f) up to a factor, and f has mean 0 over the rows of all clients. The
factor makes sd the standard deviation of the part that is not a line, over the same rows: columns
z_k have sum_k mean(z_k^2) = 1. The server needs the range of x, the sums of the spline's columns
and one sum of squares.

**Gaussian processes** gp(x) with the covariance sd^2 exp(-(x - x')^2 / (2 l^2)) are sums of sines
on an interval [m - L, m + L], L = c (max x - min x) / 2 around the middle m of the range of x
(Solin and Sarkka, Statistics and Computing 2020; Riutort-Mayol et al., ibid. 2023):

    f(x) = sum_j g_j sin(w_j (x - m + L))        w_j = j pi / (2 L),    j = 1 ... k
    g_j ~ Normal(0, sd (sqrt(2 pi) l / L)^1/2 exp(-l^2 w_j^2 / 4))

minus its mean over the rows of all clients. k sines represent length scales of 1.75 c / k half
ranges and more, below which the prior of l has 1% of its mass.

**Monotonic effects** mo(x) of ordered levels 0 ... D (Buerkner and Charpentier, British Journal of
Mathematical and Statistical Psychology 2020) change by b zeta_i D at step i, where zeta sums to 1,
so that b is the mean change of a step:

    mo(x) = b D sum_{i <= x} zeta_i = b x + b sum_i (D zeta_i - 1) [x >= i]

**Category-specific effects** cs(x) have a coefficient for each threshold of an ordinal response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
DEGREE = 3
MIN_DF, MAX_DF = 5, 100  # at least three functions are no lines
USUAL_DF = 10
USUAL_SINES, MAX_SINES = 20, 100
MARGIN, MIN_MARGIN, MAX_MARGIN = 1.5, 1.2, 10.0  # c of gp(x)
SHORTEST = 1.75  # length scale of k sines, in c half ranges / k (Riutort-Mayol et al.)
MAX_STEPS = 50  # of a monotonic effect


class Smooth:
    """Columns of a smooth function: first the line, then those with effects of one scale.

    Attributes:
        name: function in formulas.
        plain: number of columns, the first ones, with coefficients of their own.
        df: number of B-splines; there are df - 1 columns, as their sums over all rows are 0.
        low, high: range of the variable, with evenly spaced knots; lines continue it.
        to_columns: map from B-splines to columns, [df, df - 1].
    """

    name: ClassVar[str] = "s"
    plain: ClassVar[int] = 1

    def __init__(self, low: float, high: float, df: int) -> None:
        """Place the knots.

        Raises:
            ValueError: if the range is empty, or df is invalid.
        """
        _refuse_number("df", df, int, MIN_DF, MAX_DF)
        _refuse_constant(low, high)
        self.df, self.low, self.high = int(df), low, high
        inner = np.linspace(low, high, df - DEGREE + 1)
        self.knots = np.concatenate([[low] * DEGREE, inner, [high] * DEGREE])
        self.to_columns: Floats = np.eye(df)[:, 1:]

    def basis(self, x: Floats) -> Floats:
        """Return the B-splines of values [N], continued by lines: [N, df]."""
        splines = self._splines()
        inside = np.clip(x, self.low, self.high)
        slope: Floats = splines.derivative()(inside)
        values: Floats = splines(inside)
        return values + slope * (x - inside)[:, None]

    def _splines(self) -> Any:
        from scipy.interpolate import BSpline

        return BSpline(self.knots, np.eye(self.df), DEGREE)

    def penalty(self) -> Floats:
        """Return the integrals of the products of the second derivatives, [df, df]."""
        ends = np.unique(self.knots)
        middle, half = (ends[1:] + ends[:-1]) / 2, (ends[1:] - ends[:-1]) / 2
        # Two Gauss points integrate the squares of lines exactly.
        points = (middle[:, None] + half[:, None] * np.array([-1.0, 1.0]) / 3**0.5).ravel()
        second: Floats = self._splines().derivative(2)(points)
        integrals: Floats = second.T @ (second * np.repeat(half, 2)[:, None])
        return integrals

    def centered(self, sums: Floats, rows: int) -> Floats:
        """Return the map from B-splines to columns that are 0 on average: [df, df - 1].

        Args:
            sums: of the B-splines over the rows of all clients, [df].
            rows: number of these rows.
        """
        mean = sums / rows
        places = np.array([self.knots[k + 1 : k + 1 + DEGREE].mean() for k in range(self.df)])
        line = places - mean @ places  # B-splines with these coefficients are x - mean x
        # Coefficients that the mean leaves free, then those of them that no line has.
        free = np.linalg.qr(mean[:, None], mode="complete")[0][:, 1:]
        size, vectors = np.linalg.eigh(free.T @ self.penalty() @ free)
        curves = free @ vectors[:, 1:] / np.sqrt(size[1:])
        return np.column_stack([line, curves])

    def __call__(self, x: Any, *df: int, **arguments: int) -> Floats:
        """Return the columns of values [N]: [N, df - 1]; the other arguments of s() are known."""
        columns: Floats = self.basis(np.asarray(x, dtype=np.float64)) @ self.to_columns
        return columns


class Process:
    """Columns of a Gaussian process: sines, whose effects have scales of two parameters.

    Attributes:
        name, plain: as of `Smooth`.
        middle, half: of the range of the variable.
        edge: half of the length of the interval, at whose ends all sines are 0.
        frequencies: w of the sines, [k].
        means: of the sines over the rows of all clients, [k].
    """

    name: ClassVar[str] = "gp"
    plain: ClassVar[int] = 0

    def __init__(self, low: float, high: float, k: int, c: float) -> None:
        """Place the sines.

        Raises:
            ValueError: if the range is empty, or the number of sines or the margin is invalid.
        """
        _refuse_number("k", k, int, MIN_DF, MAX_SINES)
        _refuse_number("c", c, float, MIN_MARGIN, MAX_MARGIN)
        _refuse_constant(low, high)
        self.middle, self.half = (low + high) / 2, (high - low) / 2
        self.edge = c * self.half
        self.frequencies: Floats = np.linspace(1.0, k, k) * (np.pi / (2 * self.edge))
        self.means: Floats = np.zeros(k)

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the interval on which the process is defined."""
        return self.middle - self.edge, self.middle + self.edge

    @property
    def shortest(self) -> float:
        """Smallest length scale that the sines represent, in the unit of the variable."""
        return SHORTEST * self.edge / len(self.frequencies)

    def sines(self, x: Floats) -> Floats:
        """Return the sines of values [N]: [N, k]."""
        values: Floats = np.sin(np.outer(x - self.middle + self.edge, self.frequencies))
        return values

    def __call__(self, x: Any, *_: float, **arguments: float) -> Floats:
        """Return the columns of values [N]: [N, k]; the other arguments of gp() are known."""
        values = np.asarray(x, dtype=np.float64)
        if (bad := np.abs(values - self.middle) > self.edge).any():
            low, high = self.ends
            raise ValueError(
                f"a value is {values[bad][0]:g}; the process is defined from {low:g} to "
                f"{high:g}, which a larger c in gp(x, c={self.edge / self.half:g}) extends"
            )
        return self.sines(values) - self.means


class Monotonic:
    """Columns of a monotonic effect: first the level, then whether it has reached each step.

    Attributes:
        name, plain: as of `Smooth`.
        low: lowest level, which counts as 0.
        steps: number D of steps.
        levels: levels in order if they are categories; empty for whole numbers.
    """

    name: ClassVar[str] = "mo"
    plain: ClassVar[int] = 1

    def __init__(self, low: float, high: float, levels: Sequence[Any] = ()) -> None:
        """Count the steps.

        Raises:
            ValueError: if there are fewer than two steps, or too many.
        """
        self.low, self.steps, self.levels = low, round(high - low), tuple(levels)
        if self.steps < 2:
            raise ValueError(
                f"there are {self.steps + 1} levels; expected three or more, or x instead of mo(x)"
            )
        if self.steps > MAX_STEPS:
            raise ValueError(
                f"there are {self.steps + 1} levels; expected at most {MAX_STEPS + 1}: use s(x)"
            )

    def __call__(self, x: Any) -> Floats:
        """Return the columns of levels [N]: [N, 1 + D]."""
        level = codes(x, self.levels) - self.low
        if (bad := ~np.isin(level, np.arange(self.steps + 1))).any():
            raise ValueError(
                f"a level is {level[bad][0] + self.low:g}; expected whole numbers from "
                f"{self.low:g} to {self.low + self.steps:g}, as of the training rows"
            )
        reached = level[:, None] > np.arange(self.steps)
        return np.column_stack([level, reached])


class CategorySpecific:
    """Column of a variable whose coefficients differ between the thresholds of a response."""

    name: ClassVar[str] = "cs"
    plain: ClassVar[int] = 0

    def __call__(self, x: Any) -> Floats:
        """Return the column of values [N]: [N, 1]."""
        return np.asarray(x, dtype=np.float64).reshape(-1, 1)


class Block(NamedTuple):
    """Columns of a term that have one prior.

    Attributes:
        transform: the term's function.
        labels: names of the columns without coefficients of their own.
        line: name of the column before them that has one, or "".
    """

    transform: Smooth | Process | Monotonic | CategorySpecific
    labels: list[str]
    line: str


FUNCTIONS = (Smooth, Process, Monotonic, CategorySpecific)


def process_scale(frequencies: Tensor, edge: float, sd: Tensor, length: Tensor) -> Tensor:
    """Return the standard deviations [..., k] of the effects of a Gaussian process.

    They are at least 1e-12 sd, as those of high frequencies are 0 to machine precision.

    Args:
        frequencies: of the sines, [k].
        edge: half of the length of the interval, L.
        sd: of the process, [...].
        length: its length scale, [...].
    """
    length = length[..., None]
    shape = (2.5066282746310002 * length / edge).sqrt() * (-((length * frequencies) ** 2) / 4).exp()
    return sd[..., None] * shape.clamp(min=1e-12)


def codes(x: Any, levels: Sequence[Any]) -> Floats:
    """Return levels [N] as numbers: whole numbers themselves, or places of categories.

    Raises:
        ValueError: if text has no declared order.
    """
    if levels:
        places = {level: place for place, level in enumerate(levels)}
        return np.array([places[level] for level in list(x)], dtype=np.float64)
    try:
        return np.asarray(x, dtype=np.float64)
    except ValueError as error:
        raise ValueError(
            "it holds text, whose order is unknown; expected whole numbers, or "
            "pd.Categorical(column, [LOWEST, ..., HIGHEST], ordered=True)"
        ) from error


def _refuse_number(name: str, value: Any, kind: type, low: float, high: float) -> None:
    """Raise ValueError if an argument of a term is no number of a kind between two ends."""
    kinds = (int, np.integer) if kind is int else (int, float, np.number)
    if isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high:
        return
    shown = repr(value) if isinstance(value, int | float | str) else f"a {type(value).__name__}"
    whole = "whole " if kind is int else ""
    raise ValueError(f"{name} is {shown}; expected a {whole}number from {low:g} to {high:g}")


def _refuse_constant(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"all values are {low:g}; expected a variable that varies")


def s(x: Any, df: int = USUAL_DF) -> Any:
    """Stand for a smooth function until all clients have agreed on it, with its first columns."""
    return np.zeros((len(x), df - 1))


def gp(x: Any, k: int = USUAL_SINES, c: float = MARGIN) -> Any:
    """Stand for a Gaussian process until all clients have agreed on it."""
    return np.zeros((len(x), k))


def mo(x: Any) -> Any:
    """Stand for a monotonic effect until all clients have agreed on it."""
    return np.zeros((len(x), 1))


def cs(x: Any) -> Any:
    """Stand for a category-specific effect until all clients have agreed on it."""
    return np.zeros((len(x), 1))


STANDING = {"s": s, "gp": gp, "mo": mo, "cs": cs}
