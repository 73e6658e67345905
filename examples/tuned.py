"""Compare all methods on one partition, each tuned over the same number of settings.

The script runs `pyrofl compare METHOD --tune` for three seeds and one method at a time, and writes
the tables and the figure of all finished methods. Settings are chosen on validation rows. The
script can be interrupted at any time; it resumes after the finished methods. `CHEAPER` contains
settings that reduce the cost of slow methods.

Run: python examples/tuned.py [--data npz:fashion_mnist.npz] [--quick] [--out FOLDER]
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from datetime import date
from importlib import import_module
from pathlib import Path
from time import perf_counter

import pandas as pd
from papers.settings import digest

from pyrofl import figures
from pyrofl.cli import main

CHEAPER = {
    "fedavg": ["fine_tune=5"],
    "fedabml": ["steps=1", "num_particles=1"],
    "pfedme": ["epochs=2"],
    "pfedbayes": ["epochs=1", "num_particles=1"],
    "lrbpfl": ["num_particles=1"],
}
METHODS = (
    "local fedavg perfedavg ifca fedabml ditto pfedvem fedper apfl reptile pvi fedprox fedopt "
)
METHODS += "scaffold fedavgm fedrep fedbabu lgfedavg pfedmb fedpop fedpa fedbe "
METHODS += "fedem fedamp fedfomo fisher fedhb fola fedep virtual pfedgp predbayes fald "
METHODS += "metavd pfedme pfedbayes fedgvi fedlap fedivon ivonadmm lrbpfl amortized fedwba"
FAILED = "none: all failed"  # as in compare; the scores are those of the defaults
FOLDER = Path(__file__).parent

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--quick", action="store_true", help="Short run with two methods and two rounds."
)
parser.add_argument("--data", default="digits", help="Data set with classes.")
parser.add_argument("--per-class", default="300", help="Training rows per class, over all clients.")
parser.add_argument("--clients", default="100")
parser.add_argument("--partition", default="dirichlet:0.3,min=10")
parser.add_argument("--net", default="mlp:50")
parser.add_argument("--participation", default="0.2")
parser.add_argument("--rounds", default="18")
parser.add_argument("--trials", default="6", help="Settings tried per method.")
parser.add_argument("--seeds", default="3")
parser.add_argument("--methods", nargs="+", default=METHODS.split())
parser.add_argument(
    "--seconds", type=float, default=1e9, help="Start no method after this number of seconds."
)
parser.add_argument("--out", type=Path, default=Path("results/tuned"))
parser.add_argument("--tables", type=Path, help="Folder of the tables (default: --out).")
args = parser.parse_args()
print("A full run takes about three hours on one core; --quick takes seconds.", flush=True)
if args.quick:
    args.methods, args.rounds, args.trials, args.seeds = ["local", "fedavg"], "2", "2", "1"
    args.per_class, args.clients = "20", "4"


def command(method):
    """Return the arguments of the comparison of one method."""
    words = ["compare", method, "--data", args.data, "--per-class", args.per_class]
    words += ["--clients", args.clients, "--partition", args.partition, "--split-seed", "0"]
    words += ["--server-data", "0.1", "--net", args.net, "--participation", args.participation]
    words += ["--rounds", args.rounds, "--eval-every", args.rounds, "--seeds", args.seeds]
    words += ["--posterior-draws", "0", "--tune", "--trials", args.trials]
    words += ["--set", *CHEAPER[method]] if method in CHEAPER else []
    return [*words, "--out", str(args.out / method)]


def commit():
    """Return the commit of the checkout, or "" if there is none."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=FOLDER, capture_output=True, text=True
    )
    return found.stdout.strip()


def words(setting):
    """Return a setting as text, in the format of compare."""
    return " ".join(f"{n}={v}" for n, v in setting.items()) or "defaults"


def grid(method):
    """Return the values of which the settings to try are drawn, as text."""
    values = import_module(f"pyrofl.models.{method}").SEARCH_GRID
    return " ".join(f"{name}={','.join(map(str, of))}" for name, of in values.items())


def about(method):
    """Return the line of a method in the budget table."""
    path = args.out / method
    known = path / f"{method}-tune/tune.json"
    tuned = (
        json.loads(known.read_text()) if known.exists() else None
    )  # None if every setting failed
    runs = [json.loads(p.read_text()) for p in sorted(path.glob(f"{method}-[0-9]*/run.json"))]
    second = next(iter(tuned["margins"]), None) if tuned else None  # the runner-up
    return {
        "method": method,
        "chosen": words(tuned["chosen"]) if tuned else FAILED,
        "grid": grid(method),
        "defaults": digest(method),
        "tune_seeds": 1 + max(t["seed"] for t in tuned["trials"]) if tuned else None,
        "finalists": 1 + len(tuned["margins"]) if tuned else None,
        "runner_up": words(second["setting"]) if second else None,
        "margin": second["behind"] if second else None,
        "margin_error": second["error"] if second else None,
        "settings": len(tuned["about"]["settings"]) if tuned else int(args.trials),
        "tuning_rounds": tuned["rounds"] if tuned else None,
        "tuning_seconds": round(tuned["seconds"], 1) if tuned else None,
        "rounds": sum(run["rounds"] for run in runs),
        "seconds": round(sum(sum(run["seconds"]) for run in runs), 1),
        **json.loads((path / "made.json").read_text()),
        "command": shlex.join(["pyrofl", *command(method)]),
    }


def together(rows, name):
    """Return these rows and those of other methods in the existing table."""
    if (tables / name).exists():
        before = pd.read_csv(tables / name)
        some = pd.concat([before[~before["method"].isin(done)], rows])
        return some[[*rows.columns]]
    return rows


def best_first(scores):
    """Return scores sorted by the mean accuracy of each method's best model."""
    accurate = scores[scores["metric"] == "accuracy"].fillna("")
    means = accurate.groupby(["method", "model", "adaptation"])["value"].mean()
    best = means.groupby("method").max()
    return scores.sort_values(
        "method", key=lambda names: names.map(best), ascending=False, kind="stable"
    )


def refuse_other_data():
    """Exit if the tables are of another data set than --data; files are compared by name."""
    path = (args.tables or args.out) / "budget.csv"
    commands = pd.read_csv(path)["command"] if path.exists() else []
    stored = {re.search(r" --data (\S+)", line)[1] for line in commands}
    if {re.split("[:/]", name)[-1] for name in stored} - {re.split("[:/]", args.data)[-1]}:
        sys.exit(f"{path} is of --data {', '.join(stored)}; expected that, or another --tables")


refuse_other_data()
begun = perf_counter()
for method in args.methods:
    folder = args.out / method
    if (folder / "made.json").exists() or perf_counter() - begun > args.seconds:
        continue
    code = main([*command(method), "--resume", "--quiet"])
    if code == 130:  # interrupted
        break
    if (folder / "compare.csv").exists():  # a run that diverged is a result
        made = {"code": code, "commit": commit(), "date": str(date.today())}
        (folder / "made.json").write_text(json.dumps(made))

done = [m for m in args.methods if (args.out / m / "made.json").exists()]
if not done:
    sys.exit("no method is finished yet; run the same command again to resume")
tables = args.tables or args.out
tables.mkdir(parents=True, exist_ok=True)
scores = pd.concat([pd.read_csv(args.out / m / "compare.csv") for m in done])
scores = best_first(together(scores, "scores.csv"))
budget = together(pd.DataFrame([about(m) for m in done]), "budget.csv")
scores.to_csv(tables / "scores.csv", index=False)
budget.to_csv(tables / "budget.csv", index=False)
figures.save(figures.comparison(scores.fillna(""), "accuracy"), tables / "tuned.png")
print(f"Results of {len(budget)} methods saved to {tables}: scores.csv, budget.csv, tuned.png")
