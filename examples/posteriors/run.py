"""Compare posteriors of federated methods with reference posteriors.

A method is a function from a problem to ArviZ data, see `methods`; FILE.py:NAME names a function
of your own. Each result is a row of a CSV file, also if the method fails.

Run: python examples/posteriors/run.py --methods default consensus --problems surgical seeds
     [--rounds 1 2 4] [--seeds 0 1] [--limit 300] [--resume] [--out FILE.csv]
     python examples/posteriors/run.py --page FILE.md [--out FILE.csv]
"""

from __future__ import annotations

import argparse
import csv
import runpy
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods import METHODS
from metrics import Reference, Worst, accurate, compare
from page import draw, write
from problems import HERE, NAMES, Problem, load

KEY = ("problem", "method", "rounds", "seed")
WORST = ("shift", "low", "high", "energy")
COLUMNS = [
    *KEY,
    "verdict",
    "warning",
    *(f"{n}{end}" for n in WORST for end in ("", "_at", "_error")),
]
COLUMNS += ["own", "pareto_k", "exchanges", "bytes_up", "bytes_down", "seconds"]
RELIABLE = 0.7  # largest Pareto k

Method = Callable[[Problem], Any]


class Stopped(BaseException):
    """Signal that a method has used the CPU time that it may use; no method should catch it."""


@contextmanager
def stopped_after(seconds: int | None) -> Iterator[None]:
    """Raise `Stopped` after some seconds of CPU time; None sets no limit."""

    def stop(*_: Any) -> None:
        raise Stopped

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def evaluate(
    method: Method,
    problem: Problem,
    limit: int | None = None,
    known: Reference | None = None,
) -> dict[str, Any]:
    """Run a method, and return the row of its result without the key.

    The verdict is "accurate", "inaccurate", "failed", "stopped" if the method needs more seconds of
    CPU time than the limit, or "not applicable". The warning is the first one of the method, its
    Pareto k above 0.7 or its status, unless it has converged. `known` is the reference; default
    that of the problem's name.
    """
    known = known or Reference.load(HERE / "references", problem.reference or problem.name)
    began = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with stopped_after(limit):
                found = method(problem)
            missing = [n for n in problem.population if n not in found["posterior"]]
            if missing:
                raise ValueError(f"the posterior lacks {', '.join(missing)}")
            draws = {
                n: found["posterior"][n].values for n in problem.compared if n in found["posterior"]
            }
            wrong = [n for n, v in draws.items() if not np.isfinite(v).all()]
            if wrong:
                raise ValueError(f"draws of {', '.join(wrong)} are not finite")
            worst = compare(draws, known, problem.population)
        except NotImplementedError as error:
            return {"verdict": "not applicable", "warning": first_line(error)}
        except Stopped:
            reason = f"stopped after {limit} s of CPU time"
            return {"verdict": "stopped", "warning": reason, "seconds": limit}
        except Exception as error:  # a failure is a result
            seconds = time.process_time() - began
            reason = f"{type(error).__name__}: {first_line(error)}"
            return {"verdict": "failed", "warning": reason, "seconds": round(seconds, 1)}
    row: dict[str, Any] = {"seconds": round(time.process_time() - began, 1)}
    for name, one in worst.items():
        row |= flat(name, one)
    stats = found.get("sample_stats", {})
    k = float(np.max(stats["pareto_k"])) if "pareto_k" in stats else None
    told = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    status = str(found.attrs.get("status", ""))
    told += [f"Pareto k is {k:.2f}"] if k is not None and k > RELIABLE else []
    told += [status] if status and not status.lower().startswith(("converged", "0 div")) else []
    told += [found.attrs["warnings"]] if found.attrs.get("warnings") else []
    own = problem.own.split()
    return row | {
        "verdict": "accurate" if accurate(worst) else "inaccurate",
        "warning": first_line(told[0]) if told else "",
        "own": "compared" if own and all(n in draws for n in own) else "none",
        "pareto_k": "" if k is None else round(k, 3),
        **{n: found.attrs[n] for n in ("exchanges", "bytes_up", "bytes_down") if n in found.attrs},
    }


def flat(name: str, worst: Worst) -> dict[str, Any]:
    """Return the cells of one measure."""
    value, error = (float(f"{v:.4g}") for v in (worst.value, worst.error))
    return {name: value, f"{name}_at": worst.at, f"{name}_error": error}


def first_line(message: object) -> str:
    """Return the first line of a message."""
    return (str(message).splitlines() or [""])[0]


def find(spec: str) -> Method:
    """Return the method with the given name, or the function FILE.py:NAME."""
    if spec in METHODS:
        return METHODS[spec]
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(
            f"method {spec!r} does not exist; expected FILE.py:NAME or one of {', '.join(METHODS)}"
        )
    found: Method = runpy.run_path(path)[name]
    return found


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of results; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def results(
    methods: dict[str, Method],
    problems: list[Problem],
    rounds: list[int | None],
    seeds: list[int],
    done: set[tuple[str, ...]],
    limit: int | None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of all methods on all problems, except for keys that are done."""
    for one in problems:
        for number in rounds:
            for seed in seeds:
                problem = replace(one, rounds=number, seed=seed)  # methods share its fits
                for name, method in methods.items():
                    key = dict(zip(KEY, (one.name, name, number or "", seed), strict=True))
                    if tuple(map(str, key.values())) not in done:
                        yield key | evaluate(method, problem, limit)


def main(words: list[str] | None = None) -> None:
    """Run methods, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["default"], help="Names or FILE.py:NAME.")
    parser.add_argument("--problems", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--rounds", nargs="+", type=int, help="Rounds (default: of the method).")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--limit", type=int, help="Seconds of CPU time of a row (default: none).")
    parser.add_argument("--resume", action="store_true", help="Keep the rows in the CSV file.")
    parser.add_argument("--out", type=Path, default=HERE / "results.csv", help="CSV file.")
    parser.add_argument("--page", type=Path, help="Write this page and a figure; run nothing.")
    args = parser.parse_args(words)
    if args.page:
        rows = read(args.out)
        draw(rows, args.page.parent / "posteriors" / "rounds.png")
        write(rows, args.page)
        return
    methods = {spec: find(spec) for spec in args.methods}
    old = read(args.out) if args.resume else []
    torch.set_num_threads(1)
    print("A full run takes some hours on one core; --problems selects problems.", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w" if not old else "a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if not old:
            table.writeheader()
        done = {tuple(row[n] for n in KEY) for row in old}
        problems = [load(name) for name in args.problems]
        rounds = args.rounds or [None]
        for row in results(methods, problems, rounds, args.seeds, done, args.limit):
            table.writerow(row)
            file.flush()
            print(" | ".join(f"{n} {row[n]}" for n in COLUMNS if row.get(n, "") != ""), flush=True)


if __name__ == "__main__":
    main()
