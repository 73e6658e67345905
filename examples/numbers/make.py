"""Write NUMBERS.md and CALIBRATION.md from texts and from the CSV files of runs.

A line `<!-- table: NAME -->` of words.md or calibration.md becomes the table of that name; see
`TABLES`. The coverage of intervals is also written to a table of the package, for `pyrofl explain`.

Run: python examples/numbers/make.py [--check]
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from pyrofl.files.text_tables import markdown

HERE = Path(__file__).parent
EXAMPLES = HERE.parent
sys.path.append(str(EXAMPLES / "papers"))

from settings import edges  # noqa: E402

BEGIN, END = "<!-- table: ", " -->"


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
    at_edge = edges((folder / "budget.csv").relative_to(EXAMPLES / "papers/tuned").as_posix())
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
        edge = "; ".join(f"{name} {note}" for name, note in at_edge.get(method, {}).items())
        rows.append([f"`{method}`", one["chosen"], margin(one), *own, *cost, edge])
    head = ["method", "chosen", "margin", "global", "personal", "adapted"]
    head += ["s of tuning", "s of 3 runs", "at the edge of its grid"]
    return markdown(head, rows)


def older() -> str:
    """Return a sentence about the rows that were measured with other defaults."""
    budgets = (EXAMPLES / "papers/tuned").glob("**/budget.csv")
    lines = pd.concat([pd.read_csv(path, dtype={"defaults": str}) for path in budgets])
    of = sorted(lines[lines["defaults"].isna()]["method"].unique())
    names = ", ".join(f"`{method}`" for method in of) or "no method"
    return f"Rows of {names} were measured before their defaults changed."


def tuned_cifar() -> str:
    """Return the same of the images of CIFAR-10."""
    return tuned(EXAMPLES / "papers/tuned/cifar10")


def calibrated() -> str:
    """Return the coverage of intervals in the simulation of a linear model."""
    table = pd.read_csv(EXAMPLES / "calibrated.csv", dtype=str, keep_default_na=False)
    return markdown([*table.columns], table.to_numpy().tolist())


def networks() -> str:
    """Return the coverage of intervals, and the scores, of networks."""
    rows = []
    for one in pd.read_csv(EXAMPLES / "calibrated_networks.csv").itertuples():
        held = f"{100 * one.coverage:.0f} ± {100 * one.coverage_error:.0f}%"
        scores = [f"{v:.3f}" for v in (one.width, one.accuracy, one.nll, one.ece, one.auroc)]
        rows.append([f"`{one.method}`", held, *scores, f"{one.seconds:.0f}"])
    head = ["method", "95% intervals", "mean width", "accuracy", "NLL", "ECE", "AUROC", "seconds"]
    return markdown(head, rows)


def rare_events() -> str:
    """Return p values and coverage of regressions of rare events."""
    rows = []
    for one in pd.read_csv(EXAMPLES / "posteriors/rare_events.csv", dtype=str).to_dict("records"):
        shown = [f"{float(one[name]):.2f}" for name in ("p", "p_holm")]
        covered = [f"{100 * float(v):.0f}%" for n, v in one.items() if n.endswith("%")]
        rows.append([one["family"].replace("_", " "), f"`{one['parameter']}`", *shown, *covered])
    head = ["family", "parameter", "p", "p (Holm)", "50%", "80%", "94%"]
    return markdown(head, rows)


def coverage() -> str:
    """Return the package's table of the coverage of 95% intervals, as CSV."""
    linear = pd.read_csv(EXAMPLES / "calibrated.csv", dtype=str, keep_default_na=False)
    rows = [
        ("linear", one["method"], one["setting"], one["95%"][:-1], one["calibrated"].strip("*"))
        for one in linear.to_dict("records")
    ]
    for one in pd.read_csv(EXAMPLES / "calibrated_networks.csv").itertuples():
        if one.width > 0:  # not of point estimates
            rows.append(("networks", one.method, "", f"{100 * one.coverage:.0f}", ""))
    head = ("simulation", "method", "setting", "percent", "calibrated")
    return "\n".join(",".join(f'"{v}"' if "," in v else v for v in r) for r in (head, *rows)) + "\n"


TABLES = {"fashion": fashion, "tuned": tuned, "tuned_cifar": tuned_cifar}
TABLES |= {"older": older, "calibrated": calibrated, "networks": networks}
TABLES |= {"rare_events": rare_events}


def made(words: str) -> str:
    """Return a page."""
    lines = []
    for line in (HERE / words).read_text(encoding="utf-8").split("\n"):
        name = line.removeprefix(BEGIN).removesuffix(END)
        lines.append(TABLES[name]() if line == f"{BEGIN}{name}{END}" else line)
    return "\n".join(lines)


def main() -> int:
    """Write all files, or return 1 if one of them differs from what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file differs")
    args = parser.parse_args()
    files = {
        EXAMPLES / "NUMBERS.md": made("words.md"),
        EXAMPLES / "CALIBRATION.md": made("calibration.md"),
        EXAMPLES.parent / "pyrofl/reports/calibration.csv": coverage(),
    }
    if args.check:
        return int(any(path.read_text(encoding="utf-8") != text for path, text in files.items()))
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
