"""Fit the natural federations from ten seeds, with few draws and with many: does any fit collapse?

Ten copies of a federation are fitted side by side; each has random numbers and a server of its own.
Results of each problem and number of draws go into OUT as JSON.

Run: HIERARCHICAL=FOLDER python examples/posteriors/sweep.py [--only NAMES] [--draws NUMBERS]
     [--seeds 10] [--rounds N] [--resume] [--out FOLDER] [--table FILE.md]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare import EXACT, HERE, Draws
from numbers_of import labelled
from problems import PROBLEMS, Problem

from pyrofl import Method, federate, posterior
from pyrofl.inference.checks import replicas
from pyrofl.inference.engine.server_round import first

EXAMPLES = "eight_schools baseball rat_tumours sleepstudy nes heart_disease kidney radon_minnesota"
NUMBERS = [0, 16, 32, 64, 128, 256]  # of draws; 0 is the problem's own
DRAWS = 2000
COLLAPSED = 0.5
COLUMNS = ["problem", "draws", "rounds", "shift", "lowest", "highest"]
COLUMNS += ["spread", "collapsed", "rejected", "s"]


def fits(problem: Problem, method: Method, seeds: int) -> Iterator[tuple[Draws, int]]:
    """Yield what each seed found, and how many messages were rejected on the way."""
    data = replicas.compact(problem.load())
    clients, begin = data.clients, first(method, data, 0)
    many = replicas.with_responses(data, data.y.expand(seeds, *data.y.shape))
    state = start = replicas.first_of(begin.server, seeds, clients)
    stack = replicas.side_by_side(method, clients)
    rejected = [0] * seeds
    for state in federate(stack, many, problem.rounds, resume_from=start, check=False):
        for told in state.rejected:
            rejected[int(told.partition("/")[0])] += 1
    own = problem.own.split()
    for r, one in enumerate(replicas.rounds_of(state, clients)):
        found = posterior(method, data, one, DRAWS, seed=r)
        draws = {n: found[n] if n in own else found[n][:, 0] for n in problem.compared}
        yield {n: v.numpy() for n, v in draws.items()}, rejected[r]


def swept(problem: Problem, draws: int, seeds: int) -> dict[str, Any]:
    """Return the worst of all seeds: shift of a mean in sds, lowest and highest ratio of sds."""
    known = json.loads(EXACT.read_text()).get(problem.name)
    if known is None:
        raise SystemExit(f"{problem.name}: no reference yet; run compare.py --only {problem.name}")
    began = time.process_time()
    method = problem.method(problem.load(), **({"num_particles": draws} if draws else {}))
    shifts, low, high, rejected = [], [], [], 0
    for found, bad in fits(problem, method, seeds):
        mine = labelled(found, problem.compared, 1)
        far = {n: float(v.mean() - known[n][0]) / known[n][1] for n, v in mine.items()}
        ratio = {n: float(v.std()) / known[n][1] for n, v in mine.items()}
        shifts.append(max(((v, n) for n, v in far.items()), key=lambda one: abs(one[0])))
        low.append(min((v, n) for n, v in ratio.items()))
        high.append(max((v, n) for n, v in ratio.items()))
        rejected += bad
    return {
        "problem": problem.name,
        "draws": draws,
        "seeds": seeds,
        "rounds": problem.rounds,
        "shifts": shifts,
        "low": low,
        "high": high,
        "rejected": rejected,
        "seconds": time.process_time() - began,
    }


def stated(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    far, at = max(row["shifts"], key=lambda one: abs(one[0]))
    spread = np.std([one[0] for one in row["low"]])
    collapsed = sum(not one[0] > COLLAPSED for one in row["low"])
    cells = [row["problem"], str(row["draws"] or "its own"), str(row["rounds"]), f"{far:.2f} {at}"]
    cells += ["{:.2f} {}".format(*ends) for ends in (min(row["low"]), max(row["high"]))]
    cells += [f"{spread:.3f}", f"{collapsed} of {row['seeds']}", str(row["rejected"])]
    return f"| {' | '.join(cells)} | {row['seconds']:.0f} |"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table and what its columns say."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS), *map(stated, rows)]
    return (HERE / "words_of_seeds.md").read_text().replace("TABLE", "\n".join(lines))


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=EXAMPLES.split(), choices=list(PROBLEMS))
    parser.add_argument("--draws", nargs="+", type=int, default=NUMBERS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=0, help="of every fit; 0: the problem's own")
    parser.add_argument("--resume", action="store_true", help="keep the lines that there are")
    parser.add_argument("--out", type=Path, default=Path("results/posteriors"))
    parser.add_argument("--table", type=Path, default=HERE.parent / "POSTERIORS_SEEDS.md")
    args = parser.parse_args()
    print("A full run takes about an hour on one core; --only selects problems.", flush=True)
    torch.set_num_threads(1)
    folder = args.out / "seeds"
    folder.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        problem = PROBLEMS[name]
        if args.rounds:
            problem = replace(problem, rounds=args.rounds)
        for draws in args.draws:
            path = folder / f"{name}.{draws}.json"
            if not (args.resume and path.exists()):
                row = swept(problem, draws, args.seeds)
                path.write_text(json.dumps(row))
                print(stated(row), flush=True)
    rows = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    rows.sort(key=lambda row: (list(PROBLEMS).index(row["problem"]), row["draws"]))
    args.table.write_text(markdown(rows))


if __name__ == "__main__":
    main()
