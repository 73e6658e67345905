"""Smooth functions of a variable, s(x): splines whose wiggliness is learned.

A cubic spline f with evenly spaced knots has the penalty J(f) = int f''(x)^2 dx over its range, as
in O'Sullivan (Statistical Science 1986), which is 0 for straight lines only. Its coefficients are
transformed as in Wood, "Stable and efficient multiple smoothing parameter estimation for
generalized additive models" (JASA 2004), and by `smooth2random` of mgcv:

    f(x) = b (x - mean x) + sum_k r_k z_k(x)      r_k ~ Normal(0, sd)

so that sum_k r_k^2 is J(f) up to a factor, and f has mean 0 over the rows of all clients. The
factor makes sd the standard deviation of the part that is not a line, over the same rows: columns
z_k have sum_k mean(z_k^2) = 1. The server needs the range of x, the sums of the spline's columns
and one sum of squares.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
DEGREE = 3
MIN_DF = 5  # so that at least three functions are no lines
USUAL_DF = 10


class Smooth:
    """Columns of a smooth function: first the line, then those with effects of one scale.

    Attributes:
        df: number of B-splines; there are df - 1 columns, as their sums over all rows are 0.
        low, high: range of the variable, with evenly spaced knots; lines continue it.
        to_columns: map from B-splines to columns, [df, df - 1].
    """

    def __init__(self, low: float, high: float, df: int) -> None:
        """Place the knots.

        Raises:
            ValueError: if the range is empty, or df is too small.
        """
        if isinstance(df, bool) or not isinstance(df, int | np.integer) or df < MIN_DF:
            raise ValueError(f"df is {df!r}; expected a whole number of at least {MIN_DF}")
        if not low < high:
            raise ValueError(f"all values are {low:g}; expected a variable that varies")
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


def s(x: Any, df: int = USUAL_DF) -> Any:
    """Stand for a smooth function until all clients have agreed on it, with its first columns."""
    values = np.asarray(x, dtype=np.float64)
    return np.zeros((len(values), df - 1))
