"""Compare `pyrofl.regression` with NUTS on the pooled rows, for all cases.

A fit has all defaults. A case is accurate if the means of all coefficients, scales and group
effects are within 0.1 standard deviations of the reference, and the ratios of standard deviations
are 0.9 to 1.1, up to two Monte Carlo standard errors. Results are kept in results.json and
references/NAME.json, and what is there is not computed again.

Run: python examples/regression/fit_cases.py [--cases NAMES] [--data FOLDER] [--out FILE.json]
     python examples/regression/fit_cases.py --references [--cases NAMES] (needs numpyro)
     python examples/regression/fit_cases.py --time-nuts [--cases NAMES] (needs numpyro)

--time-nuts measures NUTS with its own defaults, on one core: 1,000 draws of each of four chains.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from regression_cases import CASES, FOLDER, Case

import pyrofl
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.export import import_arviz
from pyrofl.inference.posteriors.summary import summarize
from pyrofl.models.regression import Regression

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "posteriors"))

from metrics import Reference, accurate, compare, statistics  # noqa: E402

DRAWS, RELIABLE = 4000, 0.7  # draws of a fit; largest Pareto k
REFERENCES, NUTS_SECONDS = HERE / "references", HERE / "nuts_seconds.json"
QUICK = {"draws": 1000, "target": 0.8}  # of NUTS, to measure its seconds
LARGE = ("hospitals_929", "coefficients_200", "clients_5000", "uneven")  # the same as references
MANY = 1000  # effects of clients, of which a file has no references
INNER = ("raw_", "root_", "cut_")  # sites that have no counterpart, or follow from others
# Scales and lengths of processes, of which few draws far out dominate moments; and curves, which
# are no variables of a fit (features.py compares one).
LEFT_OUT = ("sd_gp_", "lscale_gp_", "curve_gp_")


def build(case: Case, folder: Path) -> Regression:
    """Return the regression of a case."""
    tables = case.tables(folder)
    return pyrofl.regression(
        case.formula, tables, family=case.family, client=case.client, **case.options
    )


def fit(case: Case, folder: Path) -> tuple[Regression, Run, Any]:
    """Return the regression of a case, its run, and its posterior with default settings."""
    method = build(case, folder)
    run = pyrofl.fit(method, case.tables(folder), progress=False)
    return method, run, run.to_arviz(DRAWS, progress=False)


def refer(name: str, folder: Path) -> None:
    """Compute the reference of a case by NUTS on the pooled rows."""
    import pooled

    case = CASES[name]
    method = build(case, folder)
    how: dict[str, Any] = QUICK if name in LARGE else {}
    began = time.process_time()
    draws = pooled.nuts(method, case.family, case.table(folder), **how)
    seconds = round(time.process_time() - began, 1)
    names = [n for n, v in draws.items() if not n.startswith(INNER) and v[0, 0].size < MANY]
    arviz = import_arviz()
    mixed = arviz.rhat(arviz.convert_to_dataset({n: draws[n] for n in names}))
    worst = max(float(mixed[n].max()) for n in names)
    made = "NumPyro NUTS on the pooled rows"
    known = statistics(draws, names)
    Reference(made, round(worst, 4), None, seconds, known, {}).save(REFERENCES, name)
    print(f"{name}: R-hat {worst:.4f}, {seconds} s", flush=True)


def time_nuts(name: str, folder: Path) -> float:
    """Return CPU seconds of NUTS on the pooled rows: four chains of 1,000 and 1,000 iterations."""
    import pooled

    if name in LARGE and (REFERENCES / f"{name}.json").exists():
        return Reference.load(REFERENCES, name).seconds  # is of the same run
    case = CASES[name]
    method, table = build(case, folder), case.table(folder)
    began = time.process_time()
    pooled.nuts(method, case.family, table, **QUICK)
    return round(time.process_time() - began, 1)


def evaluate(name: str, folder: Path) -> dict[str, Any]:
    """Return the row of a case: verdict, worst coordinates, rounds, bytes and seconds."""
    case = CASES[name]
    row: dict[str, Any] = {"formula": case.formula, "family": case.family}
    began = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            method, run, found = fit(case, folder)
        except Exception as error:  # a failure is a result
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return row | {"verdict": "failed", "reason": reason}
    seconds = time.process_time() - began
    posterior, stats, clients = found["posterior"], found["sample_stats"], run.data.clients
    row |= {"clients": clients, "rows": len(run.data.y), "method": method.name}
    row |= {"verdict": "no reference"}
    if (REFERENCES / f"{name}.json").exists():
        row |= compared(posterior, Reference.load(REFERENCES, name))
    k = float(np.max(stats["pareto_k"])) if "pareto_k" in stats else None
    row |= {"pareto_k": None if k is None else round(k, 3), "status": str(run.status)}
    row |= {"rounds": run.state.number}
    up, down = (sum(getattr(r, n) for r in run.records) for n in ("bytes_up", "bytes_down"))
    row |= {"bytes_up_per_client": up // clients, "bytes_down_per_client": down // clients}
    table = summarize(found, names=method.variables())
    row["estimates"] = {
        n: [_rounded(v) for v in pair] for n, *pair in table.iloc[:, :2].itertuples()
    }
    told = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    return row | {"seconds": round(seconds, 1), "warnings": told}


def compared(posterior: Any, known: Reference) -> dict[str, Any]:
    """Return the verdict on a posterior, and its worst coordinates."""
    names = {one.partition("[")[0] for one in known.statistics}
    common = {name for name in names if not name.startswith(LEFT_OUT)}
    kept = {n: v for n, v in known.statistics.items() if not n.startswith(LEFT_OUT)}
    known = replace(known, statistics=kept)
    draws = {n: posterior[n].values for n in posterior.data_vars if n in common}
    # Effects of one term have an axis of terms at items, unlike those of clients.
    draws = {n: v[..., 0] if v.ndim == 4 and v.shape[-1] == 1 else v for n, v in draws.items()}
    lost = sorted(common - draws.keys() - {"Intercept_centered"})
    worst = compare(draws, known, ())
    row: dict[str, Any] = {"not compared": lost} if lost else {}
    row["verdict"] = "accurate" if accurate(worst) and not lost else "inaccurate"
    for measure, one in worst.items():
        row[measure] = [round(one.value, 4), one.at, round(one.error, 4)]
    return row | {"coordinates": sum(v[0, 0].size for v in draws.values())}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def main() -> None:
    """Compute what is missing, and write it after each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--references", action="store_true", help="compute references")
    parser.add_argument("--time-nuts", action="store_true", help="measure seconds of NUTS")
    parser.add_argument("--all", action="store_true", help="also fit cases without a reference")
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the CSV files")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    if not args.data.is_dir():
        parser.error(f"{args.data} does not exist; expected the folder of the CSV files: --data")
    for name in args.cases if args.references else ():
        if not (REFERENCES / f"{name}.json").exists():
            refer(name, args.data)
    times = json.loads(NUTS_SECONDS.read_text()) if NUTS_SECONDS.exists() else {}
    for name in args.cases if args.time_nuts else ():
        if name not in times:
            times[name] = time_nuts(name, args.data)
            times = {n: times[n] for n in CASES if n in times}
            NUTS_SECONDS.write_text(json.dumps(times, indent=1) + "\n")
            print(f"{name}: {times[name]} s", flush=True)
    if args.references or args.time_nuts:
        return
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in args.cases:
        done = rows.get(name, {}).get("verdict", "no reference")
        if done != "no reference" or not ((REFERENCES / f"{name}.json").exists() or args.all):
            continue
        rows[name] = evaluate(name, args.data)
        rows = {n: rows[n] for n in CASES if n in rows}
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
        one = rows[name]
        print(
            name,
            one["verdict"],
            one.get("reason", [one.get(n) for n in ("shift", "low", "high")]),
            flush=True,
        )


if __name__ == "__main__":
    main()
