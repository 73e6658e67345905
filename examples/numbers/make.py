"""Make NUMBERS.md of words.md and of the CSV files that runs have left.

A line `<!-- table: NAME -->` of words.md becomes the table of that name; see `TABLES`.

Run: python examples/numbers/make.py [--check]
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
EXAMPLES = HERE.parent
BEGIN, END = "<!-- table: ", " -->"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Lay out a table."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def percent(values: pd.Series) -> str:
    """Write the mean of shares in percent, and its standard error where there are several."""
    if values.empty:
        return ""
    error = f" ± {100 * values.sem():.1f}" if len(values) > 1 else ""
    return f"{100 * values.mean() + 1e-9:.1f}{error}"  # .5 goes up, as people do


def views(part: pd.DataFrame) -> list[str]:
    """Return the accuracy of the global, the personal and the adapted model of one method.

    A personal model that is the global one, as of FedAvg before fine-tuning, has none of its own.
    """
    of = {key: rows["value"] for key, rows in part.groupby(["model", "adaptation"], sort=False)}
    none = pd.Series(dtype=float)
    common, own = (of.get((model, "none"), none) for model in ("global", "personal"))
    if common.tolist() == own.tolist():
        own = none
    return [percent(one) for one in (common, own, of.get(("personal", "fine_tune"), none))]


def fashion() -> str:
    """Return all methods at their defaults on one partition, with bytes and seconds."""
    table = pd.read_csv(EXAMPLES / "compare_fashion.csv").rename(columns={"accuracy": "value"})
    rows = []
    for method, part in table.groupby("method", sort=False):
        first = part.iloc[0]
        sent = [f"{first[name]:,}" for name in ("bytes_down", "bytes_up")]
        rows.append([f"`{method}`", *sent, f"{first['seconds_per_round']:.2f}", *views(part)])
    head = ["method", "down", "up", "s per round", "global", "personal", "adapted"]
    return markdown(head, rows)


def margin(one: pd.Series) -> str:
    """Write the margin of a row of budget.csv, and whether it was chosen with one seed."""
    if one["tuning_rounds"] != one["tuning_rounds"]:
        return ""  # all settings failed
    if one["tune_seeds"] != one["tune_seeds"]:
        return "one seed"
    if one["margin"] != one["margin"]:
        return "others failed"
    return f"{100 * one['margin']:.1f} ± {100 * one['margin_error']:.1f}"


def tuned(folder: Path = EXAMPLES / "papers/tuned") -> str:
    """Return all methods with settings chosen on validation rows, best first, and their budgets.

    The margin is that of the chosen setting over the runner-up, in points of accuracy.
    """
    scores = pd.read_csv(folder / "scores.csv")
    budget = pd.read_csv(folder / "budget.csv").set_index("method")
    scores = scores[scores["metric"] == "accuracy"]
    means = scores.groupby(["method", "model", "adaptation"])["value"].mean()
    order = means.groupby("method").max().sort_values(ascending=False, kind="stable").index
    rows = []
    for method in order:
        one = budget.loc[method]
        cost = [f"{v:.0f}" if v == v else "" for v in (one["tuning_seconds"], one["seconds"])]
        own = views(scores[scores["method"] == method])
        rows.append([f"`{method}`", one["chosen"], margin(one), *own, *cost])
    head = ["method", "chosen", "margin", "global", "personal", "adapted"]
    head += ["s of tuning", "s of 3 runs"]
    return markdown(head, rows)


def tuned_cifar() -> str:
    """Return the same of the images of CIFAR-10."""
    return tuned(EXAMPLES / "papers/tuned/cifar10")


TABLES = {"fashion": fashion, "tuned": tuned, "tuned_cifar": tuned_cifar}


def made() -> str:
    """Return the page."""
    lines = []
    for line in (HERE / "words.md").read_text(encoding="utf-8").split("\n"):
        name = line.removeprefix(BEGIN).removesuffix(END)
        lines.append(TABLES[name]() if line == f"{BEGIN}{name}{END}" else line)
    return "\n".join(lines)


def main() -> int:
    """Write the page, or say whether it is as it would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it differs")
    args = parser.parse_args()
    page = EXAMPLES / "NUMBERS.md"
    if args.check:
        return int(page.read_text(encoding="utf-8") != made())
    page.write_text(made(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
