"""Draw the README's figures: PYTHONPATH=examples:examples/docs python -m making.readme_figures."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import pyrofl
from making.cards import effects
from pyrofl import datasets, federations, reference

FOLDER = Path(__file__).parents[2]  # examples/
METHODS = {  # of the table of tuned methods -> name, and whether it has a posterior
    "local": ("local training", False),
    "fedavg": ("FedAvg", False),
    "fedper": ("FedPer", False),
    "ditto": ("Ditto", False),
    "perfedavg": ("Per-FedAvg", False),
    "pvi": ("PVI", True),
    "fedbe": ("FedBE", True),
    "metavd": ("MetaVD", True),
    "pfedmb": ("pFedMB", False),
    "pfedvem": ("pFedVEM", True),
}
WIDTH, DPI = 5.4, 180  # inches: 390 px of a telephone show the text in its size of 10 points
COLORS = {"federated": "C0", "NUTS on pooled data": "C1"}


def posterior() -> None:
    """Draw the effects of eight schools, federated and by NUTS on the pooled data."""
    schools = federations.split(datasets.load("eight_schools"), "groups")
    run = pyrofl.fit(
        pyrofl.hierarchical(effects, schools, shared="mu tau"), schools, progress=False
    )
    draws = {
        "federated": run.to_arviz(draws=4000, progress=False),
        "NUTS on pooled data": reference.hmc(effects, schools, shared="mu tau"),
    }
    figure, axes = plt.subplots(figsize=(WIDTH, 3.9), layout="constrained")
    for i, (name, data) in enumerate(draws.items()):
        theta = data["posterior"]["theta"].values.reshape(-1, len(schools.names))
        low, middle, high = np.quantile(theta, (0.025, 0.5, 0.975), axis=0)
        at = np.arange(len(schools.names)) + 0.3 * (i - 0.5)
        axes.hlines(at, low, high, color=COLORS[name], linewidth=2)
        axes.plot(middle, at, "o", color=COLORS[name], markersize=5, label=name)
    axes.set_yticks(range(len(schools.names)), [f"school {name}" for name in schools.names])
    axes.invert_yaxis()
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlabel="effect on the test score: median and 95% interval")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / "readme_posterior.png", dpi=DPI)


def methods() -> None:
    """Draw accuracy and calibration error of ten methods, from the table of tuned methods."""
    table = pd.read_csv(FOLDER / "papers" / "tuned" / "scores.csv")
    table = table[table.method.isin(METHODS) & table.metric.isin(["accuracy", "ece"])]
    table["adaptation"] = table.adaptation.fillna("none")
    kinds = ["method", "model", "adaptation"]
    means = table.pivot_table(index=kinds, columns="metric", values="value").reset_index()
    best = means.loc[means.groupby("method").accuracy.idxmax()].sort_values("accuracy")
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 4.2), sharey=True, layout="constrained")
    labels = {"accuracy": "accuracy\n(1 is best)", "ece": "calibration error\n(0 is best)"}
    for axes, (metric, label) in zip(panels, labels.items(), strict=True):
        for y, row in enumerate(best.itertuples()):
            name, has_posterior = METHODS[row.method]
            same = (table[kinds] == [row.method, row.model, row.adaptation]).all(axis=1)
            seeds = table[same & (table.metric == metric)].value
            error = seeds.std() / len(seeds) ** 0.5
            color = "C0" if has_posterior else "0.5"
            axes.errorbar(seeds.mean(), y, xerr=error, fmt="o", color=color, markersize=6)
        axes.set(xlabel=label)
        axes.grid(axis="y", color="0.92")
        axes.spines[["top", "right", "left"]].set_visible(False)
    tuned = [", fine-tuned" * (row.adaptation == "fine_tune") for row in best.itertuples()]
    names = [METHODS[name][0] + text for name, text in zip(best.method, tuned, strict=True)]
    panels[0].set_yticks(range(len(best)), names)
    for color, name in (("C0", "posterior"), ("0.5", "point estimate")):
        panels[1].plot([], [], "o", color=color, label=name)
    figure.suptitle("Fashion-MNIST, mean over 100 clients", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(FOLDER / "readme_methods.png", dpi=DPI)


if __name__ == "__main__":
    posterior()
    methods()
