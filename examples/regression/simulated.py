"""Simulated rows of regressions that have many clients, rows, levels or coefficients.

Rows are the same at every call. `python examples/regression/simulated.py FOLDER` writes them as CSV
files, for lme4.R.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd


def intercepts(sizes: np.ndarray, covariates: int, effect: float = 0.6) -> pd.DataFrame:
    """Return binary responses of clients that have intercepts of their own.

    Args:
        sizes: numbers of rows of the clients.
        covariates: number of columns x1, x2 and so on.
        effect: standard deviation of the clients' intercepts.
    """
    rng = np.random.default_rng(0)
    beta = rng.normal(0, 1 / np.sqrt(covariates), covariates)
    client = np.repeat(np.arange(len(sizes)), sizes)
    x = rng.normal(size=(len(client), covariates))
    logits = -1 + effect * rng.normal(size=len(sizes))[client] + x @ beta
    columns = {f"x{k + 1}": x[:, k].round(3) for k in range(covariates)}
    return pd.DataFrame({"client": client, **columns, "y": _binary(logits, rng)})


def hospitals(count: int, rows: int) -> pd.DataFrame:
    """Return `rows` patients with eight covariates in hospitals of log-normal sizes."""
    sizes = np.exp(np.random.default_rng(1).normal(size=count))
    sizes = np.maximum(1, sizes / sizes.sum() * rows).round().astype(int)
    sizes[sizes.argmax()] += rows - sizes.sum()
    return intercepts(sizes, 8)


def admissions() -> pd.DataFrame:
    """Return 5,078 patients of 40 hospitals, with 20 numbers and five factors of four levels."""
    rng = np.random.default_rng(2)
    table = intercepts(rng.multinomial(5078 - 40, np.full(40, 1 / 40)) + 1, 20)
    return table.assign(**{f"f{k}": rng.choice([*"abcd"], len(table)) for k in range(5)})


def ratings(clients: int, items: int, raters: int, rows: int) -> pd.DataFrame:
    """Return binary ratings of items by raters, which all clients share."""
    rng = np.random.default_rng(3)
    sizes = {"client": clients, "item": items, "rater": raters}
    places = {name: rng.integers(size, size=rows) for name, size in sizes.items()}
    logits = sum(0.8 * rng.normal(size=size)[places[name]] for name, size in sizes.items())
    return pd.DataFrame({**places, "y": _binary(np.asarray(logits), rng)})


def _binary(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (rng.uniform(size=len(logits)) < 1 / (1 + np.exp(-logits))).astype(int)


TABLES = {
    "hospitals_160": lambda: hospitals(160, 7000),
    "hospitals_929": lambda: hospitals(929, 124_000),
    "admissions": admissions,
    "ratings": lambda: ratings(8, 12, 6, 304),
    "thirty_items": lambda: ratings(10, 30, 4, 900),
    "coefficients_60": lambda: intercepts(np.full(10, 150), 60),
    "coefficients_200": lambda: intercepts(np.full(10, 400), 200),
    "clients_5000": lambda: intercepts(np.full(5000, 4), 2),
    "uneven": lambda: intercepts(np.array([50_000, *[30] * 8, 1]), 4),
}
"""Name -> function that returns the rows."""

if __name__ == "__main__":
    for name, make in TABLES.items():
        make().to_csv(Path(sys.argv[1]) / f"{name}.csv", index=False)
