"""The commands: list, run, compare and partition."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, get_args

from pyrofl import figures
from pyrofl.cli.methods import Scheduled, about, builds, foldable, methods
from pyrofl.cli.report import save
from pyrofl.cli.resuming import FAILED, Stopped, finishing, keeping, opened, stopping, tested
from pyrofl.cli.settings import Epochs, arguments, readable
from pyrofl.cli.setup import Task, participation, resolve, split, stragglers, task, threads
from pyrofl.cli.tables import CompareRow, compare_rows, compare_table, main_metric, score_table
from pyrofl.data.csv_files import LIKELIHOODS
from pyrofl.data.datasets import DATASETS
from pyrofl.files import run_folder
from pyrofl.inference.checkpoints import Keeper
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.fit import Run, fit
from pyrofl.inference.loop.messages import kinds
from pyrofl.nets import NETWORKS
from pyrofl.partitions.federations import PARTITIONS, TEST_POLICIES, class_counts

WRAPPED: dict[str, Any] = {
    "initial_indent": "  ",
    "subsequent_indent": " " * 12,
    "break_long_words": False,
    "break_on_hyphens": False,
}
COMPARISON = ("compare.csv", "figures/curves.png", "figures/comparison.png")
SUFFIXES = (".png", ".pdf", ".svg")


def list_all(args: Namespace) -> None:
    """Print what can be chosen, one line each."""
    groups: dict[str, Mapping[str, str]] = {
        "methods": {name: about(name) for name in builds()},
        "data sets": DATASETS,
        "partitions": dict(text.split(": ", 1) for text in PARTITIONS.values()),
        "test policies": TEST_POLICIES,
        "networks": NETWORKS,
        "likelihoods": LIKELIHOODS,
    }
    blocks = []
    for title, lines in groups.items():
        width = max(map(len, lines))
        found = [f"  {name:<{width}}  {text}" for name, text in lines.items()]
        blocks.append("\n".join([title, *found]))
    print("\n\n".join([blocks[0] + "\n\n" + variants(), *blocks[1:]]))


def bench(args: Namespace) -> None:
    """Measure the speed; see `pyrofl.bench.command`."""
    from pyrofl.bench.command import bench

    bench(args)


def variants() -> str:
    """Say what every method can be told by --set, with the words that it takes."""
    lines = ["settings of methods, for --set NAME=VALUE"]
    for name, build in builds().items():
        own = (told(n, kind) for n, kind in arguments(build).items())
        lines.append(fill(f"{name:<9} {'  '.join(own)}", 100, **WRAPPED))
    return "\n".join(lines)


def told(name: str, kind: Any) -> str:
    """Name a setting, and its words if it has some to choose from."""
    words = [str(word) for one in readable(kind) for word in get_args(one) if one != Epochs]
    return f"{name}={'|'.join(words)}" if words else name


def run(args: Namespace) -> None:
    """Fit one method and write its folder.

    Raises:
        ValueError: if an argument is refused; nothing is written then.
    """
    args = resolve(args)
    found = task(args, args.seed)
    built = methods([args.method], args.settings, found, args.rounds)
    foldable(args, built)
    participation(args.participation, found.data.clients)
    stragglers(args)
    out = Path(args.out or f"runs/{args.method}-{args.seed}")
    opened([out], args)
    keeper = keeping(args, args.method, built[args.method], found, out)
    _, scores = fit_and_save(args, args.method, built[args.method], found, keeper)
    print(score_table(scores))
    say(args, f"{out} holds tables, posterior and figures")


def compare(args: Namespace) -> None:
    """Fit several methods with several seeds on the same clients, and write all their folders.

    A run that fails is named in the end, and the others are compared.

    Raises:
        ValueError: if an argument is refused; nothing is written then.
        Stopped: if a run failed, after all others; or at once if it was interrupted.
    """
    args = resolve(args)
    tasks = [task(args, seed) for seed in range(args.seed, args.seed + args.seeds)]
    if len({(found.split, found.seeds) for found in tasks}) < len(tasks):
        raise ValueError(
            f"--seeds is {args.seeds}, and the seeds of split, init, participation and noise are "
            "all given, so that runs would be equal; expected --seeds 1, or one of them left out"
        )
    chosen = [(methods(args.methods, args.settings, t, args.rounds), t) for t in tasks]
    foldable(args, chosen[0][0])
    for found in tasks:
        participation(args.participation, found.data.clients)
    stragglers(args)
    left = rf"compare\.csv|figures|({'|'.join(builds())})-\d+" if args.resume else ""
    folder = run_folder.prepare(args.out or "runs/compare", args.overwrite, left)
    run_folder.prepare(folder / "figures", overwrite=True)
    jobs = [(name, built[name], found) for name in args.methods for built, found in chosen]
    paths = [folder / f"{name}-{found.seed}" for name, _, found in jobs]
    opened(paths, args)
    # Each leaves a checkpoint, so that those which are done need not be done again.
    keepers = [
        keeping(args, *job, path, args.rounds) for job, path in zip(jobs, paths, strict=True)
    ]
    run_folder.sweep(folder)
    for name in COMPARISON:
        (folder / name).unlink(missing_ok=True)
    finals: list[CompareRow] = []
    history: list[dict[str, object]] = []
    failed: list[str] = []
    for (name, method, found), keeper in zip(jobs, keepers, strict=True):
        try:
            done, scores = fit_and_save(args, name, method, found, keeper)
        except Stopped as stop:
            if stop.code != FAILED:
                raise
            failed.append(f"{keeper.path.parent.name} {stop}")
        else:
            finals += compare_rows(name, found.seed, done, scores)
            history += [{**row, "method": name, "seed": found.seed} for row in done.history]
        keeper.last = None  # what clients keep may be large
    if finals:
        with finishing(folder):
            write_comparison(folder, finals, history, main_metric(scores))
        print(compare_table(finals))
        say(args, f"{folder} holds compare.csv, figures and a folder for each method and seed")
    if failed:
        raise Stopped(f"{len(failed)} of {len(jobs)} runs failed: {'; '.join(failed)}", FAILED)
    for keeper in () if args.checkpoint_every else keepers:
        keeper.path.unlink(missing_ok=True)


def write_comparison(
    folder: Path, finals: list[CompareRow], history: list[dict[str, object]], metric: str
) -> None:
    """Write the table of all runs and its figures."""
    run_folder.write_csv(folder / "compare.csv", run_folder.COMPARE, finals)
    pictures = folder / "figures"
    table = [dict(zip(run_folder.COMPARE, row, strict=True)) for row in finals]
    figures.save(figures.curves(history, metric), pictures / "curves.png")
    figures.save(figures.comparison(table, metric), pictures / "comparison.png")


def partition(args: Namespace) -> None:
    """Draw who holds how many rows of which class.

    Raises:
        ValueError: if an argument is refused; nothing is written then.
    """
    args = resolve(args)
    path = Path(args.out)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
    if path.exists() and not args.overwrite:
        raise ValueError(f"{path} is there already; expected a new file, or --overwrite")
    data = split(args, args.seed)[1]
    figure = figures.partition(class_counts(data), data.names, data.classes)
    run_folder.prepare(path.parent, overwrite=True)
    figures.save(figure, path)
    sizes = data.sizes
    print(
        f"{args.partition} of {args.data}: {len(sizes)} clients of {sizes.min()} to {sizes.max()} "
        f"training rows, {float(sizes.double().mean()):.1f} on average"
    )


def fit_and_save(
    args: Namespace, name: str, method: Scheduled, found: Task, keeper: Keeper
) -> tuple[Run, list[Scores]]:
    """Fit a method, test it and write its folder."""
    data = found.data
    say(args, f"{name}, seed {found.seed}: {data.clients} clients, {args.partition} of {args.data}")
    folder = keeper.path.parent
    if keeper.written:
        say(args, f"{keeper.path} holds round {keeper.written}; going on from there")
    with threads(args.threads), stopping(keeper):
        done = fit(
            method,
            data,
            args.rounds,
            seed=found.seeds,
            participation=participation(args.participation, data.clients),
            chunk=args.chunk,
            state_memory=args.state_memory * 2**30,
            start=keeper.last,
            every=tested(args),
            draws=args.draws,
            progress=not args.quiet,
            stragglers=stragglers(args),
            on_bad_message=args.on_bad_message,
            keep_messages=not args.fold_messages,
            after=keeper,
        )
        scores = done.scores()
        arguments = {k: v for k, v in vars(args).items() if k not in ("do", "methods", "seeds")}
        arguments |= {"method": name, "seed": found.seed, "out": str(folder)}
        save(folder, done, scores, found, arguments, args.posterior_draws)
    told = ((blamed(r, data.names), r) for record in done.records for r in record.rejected)
    bad = Counter((client, kind) for client, r in told for kind in kinds([r]))
    for (client, kind), times in bad.items():
        say(args, f"{client}: rejected in {times} of {args.rounds} rounds; expected {kind}")
    return done, scores


def blamed(reason: str, names: Sequence[str]) -> str:
    """Return whom a reason for a rejection names.

    >>> blamed("ward 3: left: tau is nan; expected a finite number", ["ward 3", "ward 3: left"])
    'ward 3: left'
    """
    return max((n for n in names if reason.startswith(f"{n}: ")), key=len, default="the server")


def say(args: Namespace, text: str) -> None:
    """Print a line for people, unless they want quiet."""
    if not args.quiet:
        print(text, file=sys.stderr)
