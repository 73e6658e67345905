"""Fit methods to CSV files of several clients, and compare with scikit-learn on pooled rows.

Hospitals: one file each, with missing values and categories; the last hospital is held out.
Columns are standardized, encoded and imputed from sums over hospitals; no row leaves a hospital.
Subjects: one file; the last fifth of each subject's rows in time is the test set, scored by RMSE,
log score and CRPS. The environment variable HIERARCHICAL names the folder of the UCI tables
heart_disease and parkinsons_telemonitoring; without it, or with --quick, the rows are simulated.

Run: HIERARCHICAL=FOLDER python examples/own_sites.py [--quick] [--out FOLDER]
"""

import argparse
import os
import tempfile
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import pyrofl
from pyrofl import datasets, federations, figures, likelihoods, metrics, nets
from pyrofl.models import fedavg, pfedvem

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--quick", action="store_true", help="Short run on simulated rows with two rounds."
)
parser.add_argument("--out", type=Path, default=Path("results/own_sites"))
args = parser.parse_args()
torch.set_num_threads(1)
ROUNDS, SEEDS = (2, 1) if args.quick else (30, 3)
FOLDER = Path(os.environ.get("HIERARCHICAL", "../shared/data/hierarchical"))
NOISE = 3.0  # standard deviation of the noise in all models of the subjects
CATEGORIES = ["cp", "restecg", "slope", "thal"]


def hospitals():
    """Return the rows of four hospitals, with a cholesterol of 0 as a missing value."""
    path = FOLDER / "heart_disease.csv"
    if path.exists() and not args.quick:
        table = pd.read_csv(path)
        sick = (table.pop("target") > 0).map({True: "yes", False: "no"})
        return table.assign(chol=table["chol"].where(table["chol"] > 0), disease=sick)
    rng, n = np.random.default_rng(0), 240
    table = pd.DataFrame({"hospital": np.repeat(list("abcd"), n // 4), "age": rng.normal(54, 9, n)})
    table["chol"] = np.where(rng.random(n) < 0.3, np.nan, rng.normal(240, 50, n))
    table = table.assign(**{name: rng.integers(1, 4, n) for name in CATEGORIES})
    noise = rng.logistic(size=n)
    return table.assign(disease=np.where(table["cp"] + noise > 2, "yes", "no"))


def subjects():
    """Return voice measures and disease severity of subjects over time."""
    path = FOLDER / "parkinsons_telemonitoring.csv"
    if path.exists() and not args.quick:
        return pd.read_csv(path).drop(columns="motor_UPDRS")
    rng, n = np.random.default_rng(0), 120
    table = pd.DataFrame({"subject": np.repeat(range(6), n // 6), "test_time": rng.random(n)})
    voice = rng.normal(0.005, 0.002, n)
    return table.assign(Jitter=voice, total_UPDRS=25 + table["subject"] + 900 * voice)


def test_sklearn(name, model, data, j, rows):
    """Score a fitted model of scikit-learn on rows of client j."""
    x, y = data.x[rows].numpy(), data.y[rows][None]
    if data.classes:
        probs = np.zeros((1, len(x), len(data.classes)))
        probs[..., model.classes_] = model.predict_proba(x)
        found = metrics.classification(torch.tensor(probs), y, y >= 0)
    else:
        loc, scale = torch.tensor(model.predict(x))[None], torch.full((1, len(x)), NOISE).double()
        density = torch.distributions.Normal(loc, scale).log_prob(y)
        crps = metrics.crps_of_normals(loc[None], scale[None], y.double())
        found = metrics.regression(loc, density, crps, y, y.isfinite())
    known.extend((name, data.names[j], metric, float(v)) for metric, v in found.items())


def test_run(name, run, **options):
    """Score a fitted method on the rows of its clients."""
    scores = run.evaluate(draws=50, **options)
    sites = [run.data.names[i] for i in scores.ids.tolist()]
    for metric, values in scores.values.items():
        known.extend((name, *found) for found in zip(sites, repeat(metric), values.tolist()))


def compare(data, seed, alone, **likelihood):
    """Fit and test two methods, and scikit-learn on pooled rows and on the rows of each client."""
    training, new = range(data.clients), range(data.clients, len(data.train))
    x, y, every = data.x.numpy(), data.y.numpy(), torch.cat(data.train[: data.clients])
    net = nets.build("softmax", (x.shape[1],), max(1, len(data.classes)))
    pooled = alone().fit(x[every], y[every])
    for j in training:
        own = alone().fit(x[data.train[j]], y[data.train[j]])
        test_sklearn("scikit-learn, pooled rows", pooled, data, j, data.test[j])
        test_sklearn("scikit-learn, each alone", own, data, j, data.test[j])
    for j in new:  # held out: none of its rows were used for training
        test_sklearn("scikit-learn, pooled rows", pooled, data, j, data.train[j])
    for name, method in (
        ("FedAvg", fedavg.build(net, **likelihood)),
        ("pFedVEM", pfedvem.build(net, head_epochs=20, **likelihood)),
    ):
        run = pyrofl.fit(method, data, ROUNDS, seed=seed, progress=False)
        for model in ("global", "personal")[: 1 + (name == "pFedVEM")]:
            test_run(f"{name}, {model}", run, model=model)
        if new:
            held = {"population": "held_out", "part": "train"}
            test_run(f"{name}, global", run, model="global", **held)
    return run


def table_of(metric, names):
    """Return a table of a metric, means over seeds: one row per model, one column per client."""
    rows = pd.DataFrame(known, columns=["model", "site", "metric", metric])
    rows = rows[(rows["metric"] == metric) & rows["site"].isin(names)]
    found = rows.pivot_table(metric, "model", "site", sort=False)
    return found[list(names)].round(3).to_string()


known = []  # model, site, metric, value
for seed in range(SEEDS):
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in hospitals().groupby("hospital"):
            rows.drop(columns="hospital").to_csv(f"{folder}/{name}.csv", index=False)
        how = {"categories": CATEGORIES, "missing": "impute", "scaling": "standardize"}
        table = datasets.load(f"csv:{folder}", target="disease", seed=seed, **how)
    data = federations.split(table, "groups", held_out=1)
    run = compare(data, seed, partial(LogisticRegression, max_iter=5000))
print(data)
for metric in ("accuracy", "nll", "ece"):
    print(f"\n{metric}; {data.names[-1]} is held out\n{table_of(metric, data.names)}")
made = data.source.preparation
raw, _ = made.on_raw_scale(run.posterior(1, model="global")["head.weight"][0, 0])
print("\nlog odds of disease per unit of each feature, global model of pFedVEM:")
for name, scale, weight in zip(made.features, made.scale.tolist(), raw[1] - raw[0], strict=True):
    if scale != 1:
        print(f"{name:10} {float(weight):+.4f} (standard deviation {scale:.4g})")
bins = {model: run.calibration(model=model) for model in ("personal", "global")}
figures.save(figures.reliability(bins), args.out / "reliability.png")

known = []
with tempfile.TemporaryDirectory() as folder:
    subjects().to_csv(f"{folder}/voices.csv", index=False)
    how = {"client_column": "subject", "test_last": "test_time", "scaling": "standardize"}
    table = datasets.load(f"csv:{folder}/voices.csv", target="total_UPDRS", **how)
data = federations.split(table, "groups")
compare(data, 0, Ridge, likelihood=likelihoods.named(f"normal:{NOISE}"))
scores = pd.DataFrame(known, columns=["model", "subject", "metric", "value"])
for metric in ("rmse", "nll", "crps"):
    each = scores[scores["metric"] == metric].groupby("model", sort=False)["value"]
    summary = each.agg(["mean", "median", "max"]).round(2)
    print(f"\n{metric} over {data.clients} subjects\n{summary}")
scores.to_csv(args.out / "subjects.csv", index=False)
