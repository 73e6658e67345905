"""Fit every hierarchical problem federated, and compare with what the pooled rows say.

The tables lie in the folder that the variable HIERARCHICAL of the environment names. Results of
each problem go into OUT as JSON, draws of the references into OUT/reference: they are made once.

Run: HIERARCHICAL=FOLDER python examples/posteriors/compare.py [--only NAMES] [--variants NAMES]
     [--resume] [--out FOLDER] [--table FILE.md]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numbers_of import bad, beside, in_short
from problems import PROBLEMS, Problem
from references import cached

import pyrofl
from pyrofl import Run
from pyrofl.inference.monitoring.status import convergence_status

HERE = Path(__file__).parent
EXACT = HERE / "exact.json"
DRAWS = 4000

Draws = dict[str, np.ndarray]


@dataclass(frozen=True)
class Variant:
    """A way to fit a problem and to draw from it.

    Attributes:
        draw: run, problem -> draws [S, *p] of what is compared, own sites [S, C, *p], and Pareto k
            of their weights, if they have been weighted.
        settings: of `pvi.hierarchical`, beside the problem's.
    """

    draw: Callable[[Run, Problem], tuple[Draws, float | None]]
    settings: Mapping[str, Any] = field(default_factory=dict)


def default(run: Run, problem: Problem) -> tuple[Draws, float | None]:
    """Draw as `Run.to_arviz` does by default: corrected where the weights can be trusted."""
    return drawn(run, problem, None)


def guided(run: Run, problem: Problem) -> tuple[Draws, float | None]:
    """Draw from q."""
    return drawn(run, problem, False)


def drawn(run: Run, problem: Problem, corrected: bool | None) -> tuple[Draws, float | None]:
    """Return draws of what is compared, and Pareto k of their weights, if they have some."""
    found = run.to_arviz(DRAWS, corrected=corrected, progress=False)
    sites = {n: found["posterior"][n] for n in problem.compared}
    stats = found["sample_stats"]
    k = float(stats["pareto_k"][0]) if "pareto_k" in stats else None
    return {n: v.values.reshape(-1, *v.shape[2:]) for n, v in sites.items()}, k


VARIANTS = {
    "default": Variant(default),
    "guide": Variant(guided),
    "blocks": Variant(guided, {"covariance": "blocks"}),
}


@lru_cache(1)
def fitted(problem: Problem, settings: tuple[tuple[str, Any], ...]) -> tuple[Run, float]:
    """Return a fit, which variants may share, and the seconds that it took."""
    data, began = problem.load(), time.process_time()
    method = problem.method(data, **dict(settings))
    run = pyrofl.fit(method, data, problem.rounds, progress=False)
    return run, time.process_time() - began


def row_of(problem: Problem, name: str, variant: Variant, folder: Path) -> dict[str, Any]:
    """Fit a problem, and return a row of the table."""
    run, took = fitted(problem, tuple(variant.settings.items()))
    data, began = run.data, time.process_time()
    draws, k = variant.draw(run, problem)
    seconds = took + time.process_time() - began
    known = cached(problem, folder / "reference")
    behind = math.inf if problem.exact == "nuts" else known.effective
    return {
        "problem": problem.name,
        "variant": name,
        "family": problem.family,
        "clients": data.clients,
        "rows": int(data.sizes.sum()),
        "rounds": problem.rounds,
        "converged": converged(run),
        "verdict": str(run.status),
        "seconds": seconds,
        "reference": problem.exact,
        "reference_seconds": known.seconds,
        "k": k,
        "quality": known.quality,
        "effective": known.effective,
        **beside(draws, known.draws, problem.population, problem.own.split(), behind),
    }


def converged(run: Run) -> int | None:
    """Return after which round the run had converged, None if it has not."""
    records, known = run.records, range(1, len(run.records) + 1)
    return next((r for r in known if convergence_status(records[:r]).kind == "converged"), None)


def stated(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row."""

    def cell(name: str, digits: int = 2) -> str:
        value, at, error = row[name]
        where = f" {at}" if at else ""
        return f"{value:.{digits}f} ± {error:.{digits}f}{where}"

    return [
        "**inaccurate**" if bad(row) else "accurate",
        row["problem"],
        row["variant"] if row["k"] is None else f"{row['variant']}, k {row['k']:.2f}",
        row["family"],
        f"{row['clients']} / {row['rows']:,}",
        cell("shift"),
        cell("low"),
        cell("high"),
        cell("correlation"),
        cell("energy", 4),
        str(row["converged"] or f"> {row['rounds']}"),
        f"{row['seconds']:.0f}",
        f"{row['reference_seconds']:.0f}",
        f"{row['reference']}, {row['effective']:.0f}, {row['quality']:.2f}",
    ]


COLUMNS = """| | problem | variant | responses | clients / rows | shift of a mean (sd) |
 lowest ratio of sds | highest ratio of sds | correlation | energy | rounds | s PVI | s reference |
 reference |""".replace("\n", "")


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table and what its columns say."""
    lines = [COLUMNS, "|" + " --- |" * (COLUMNS.count("|") - 1)]
    lines += [f"| {' | '.join(stated(row))} |" for row in rows]
    good = sum(not bad(row) for row in rows)
    words = (HERE / "words.md").read_text()
    ran = {row["problem"] for row in rows}
    if left := [name for name in PROBLEMS if name not in ran]:
        lines += ["", f"Not run yet: {', '.join(left)}."]
    return words.replace("TABLE", "\n".join(lines)).replace("GOOD", f"{good} of {len(rows)}")


def keep_exact(names: list[str], folder: Path) -> None:
    """Write what is known of the references' draws where tests and `sweep.py` find it."""
    known = json.loads(EXACT.read_text()) if EXACT.exists() else {}
    for name in names:
        if (folder / f"{name}.npz").exists():
            known[name] = in_short(cached(PROBLEMS[name], folder).draws, PROBLEMS[name].compared)
    lines = (f"{json.dumps(n)}: {json.dumps(known[n])}" for n in PROBLEMS if n in known)
    EXACT.write_text("{" + ",\n".join(lines) + "}\n")


def main() -> None:
    """Fit, compare and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument(
        "--variants", nargs="+", default=["default", "guide"], choices=list(VARIANTS)
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that there are")
    parser.add_argument("--out", type=Path, default=Path("results/posteriors"))
    parser.add_argument("--table", type=Path, default=HERE.parent / "POSTERIORS.md")
    args = parser.parse_args()
    print("A full run takes about an hour on one core; --only selects problems.", flush=True)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        for variant in args.variants:
            path = args.out / f"{name}.{variant.replace(' ', '_')}.json"
            if args.resume and path.exists():
                continue
            row = row_of(PROBLEMS[name], variant, VARIANTS[variant], args.out)
            path.write_text(json.dumps(row, indent=1))
            print(" | ".join(stated(row)), flush=True)
    keep_exact(args.only, args.out / "reference")
    rows = [json.loads(path.read_text()) for path in args.out.glob("*.json")]
    order = {(p, v): i for i, (p, v) in enumerate((p, v) for p in PROBLEMS for v in VARIANTS)}
    rows.sort(key=lambda row: order[row["problem"], row["variant"]])
    args.table.write_text(markdown(rows))


if __name__ == "__main__":
    main()
