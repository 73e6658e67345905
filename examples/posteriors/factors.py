"""Fit the hierarchical problems by likelihood factors, and compare with what the pooled rows say.

The tables lie in the folder that the variable HIERARCHICAL of the environment names; exact means
and standard deviations are in exact.json, see compare.py.

Run: HIERARCHICAL=FOLDER python examples/posteriors/factors.py [--only NAMES] [--rounds N ...]
     [--seeds N ...]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from itertools import product

import torch
from compare import DRAWS, EXACT
from numbers_of import FAR, RATIOS, labelled
from problems import PROBLEMS, Problem

import pyrofl
from pyrofl.models import likelihood_factors

COLUMNS = (
    "| | problem | rounds | seed | shift of a mean (sd) | lowest ratio of sds | highest | k | s |"
)


def row_of(problem: Problem, rounds: int, seed: int) -> str:
    """Fit a problem, and return a row of the table: the worst coordinates, and CPU seconds."""
    data, exact, began = problem.load(), json.loads(EXACT.read_text()), time.process_time()
    method = likelihood_factors.hierarchical(problem.program, data, shared=problem.shared)
    run = pyrofl.fit(method, data, rounds, seed=seed, progress=False)
    found = run.to_arviz(DRAWS, progress=False)
    seconds = time.process_time() - began
    draws = {n: found["posterior"][n].values[0] for n in problem.compared}
    each = labelled(draws, problem.compared, 1)
    known = {label: exact[problem.name][label] for label in each}
    shift = {n: (v.mean() - known[n][0]) / known[n][1] for n, v in each.items()}
    ratio = {n: v.std() / known[n][1] for n, v in each.items()}
    far = max(shift, key=lambda n: abs(shift[n]))
    low, high = min(ratio, key=lambda n: ratio[n]), max(ratio, key=lambda n: ratio[n])
    good = abs(shift[far]) <= FAR and RATIOS[0] <= ratio[low] and ratio[high] <= RATIOS[1]
    stats = found["sample_stats"]
    k = f"{float(stats['pareto_k'][0]):.2f}" if "pareto_k" in stats else "exact"
    cells = ["accurate" if good else "**inaccurate**", problem.name, str(rounds), str(seed)]
    cells += [f"{shift[far]:.2f} {far}", f"{ratio[low]:.2f} {low}", f"{ratio[high]:.2f} {high}"]
    return f"| {' | '.join([*cells, k, f'{seconds:.0f}'])} |"


def main() -> None:
    """Fit, compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--rounds", nargs="+", type=int, default=[3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(COLUMNS, "|" + " --- |" * 9, sep="\n", flush=True)
    for name in args.only:
        for rounds, seed in product(args.rounds, args.seeds):
            try:
                print(row_of(PROBLEMS[name], rounds, seed), flush=True)
            except ValueError as error:
                print(f"| refused | {name}: {error} | | | | | | | |", flush=True)


if __name__ == "__main__":
    main()
