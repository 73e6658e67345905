"""Runs that can be stopped and gone on with: their folders, their checkpoints, how they end."""

from __future__ import annotations

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pyrofl.cli.methods import Scheduled, reaching
from pyrofl.cli.report import LAST, RESULTS
from pyrofl.cli.setup import Task
from pyrofl.files import hashed, run_folder
from pyrofl.inference.checkpoints import Keeper, load
from pyrofl.inference.fit import Run
from pyrofl.inference.method import Method

CHECKPOINT = "checkpoint.pt"
FAILED = 3  # exit code of a run that ended on its way
POINTS = 20  # of a learning curve, unless asked for otherwise
FREE = (  # arguments that may differ when a run goes on
    *("do", "methods", "method", "seeds", "rounds", "out", "overwrite", "resume", "quiet", "every"),
    *("seed", "split_seed", "init_seed", "participation_seed", "noise_seed"),
    *("checkpoint_every", "posterior_draws", "on_bad_message", "data_dir", "state_memory"),
)


class Stopped(Exception):
    """A run that ended before its last round, or before its results were written.

    Attributes:
        code: of the process: 3, or 130 if it was interrupted.
    """

    def __init__(self, text: str, code: int) -> None:
        """Take what happened, in one line."""
        super().__init__(text)
        self.code = code


def opened(paths: Sequence[Path], args: Namespace) -> None:
    """Make the folders of runs, or empty them; one with a checkpoint or results may be resumed.

    Raises:
        ValueError: as `run_folder.prepare`; nothing is removed then.
    """
    for path in paths:
        resumed = args.resume and any((path / name).exists() for name in (CHECKPOINT, LAST))
        run_folder.prepare(path, args.overwrite or resumed)
        if os.path.lexists(path / "figures"):
            run_folder.prepare(path / "figures", overwrite=True)
    for path in paths:
        run_folder.sweep(path)
        for name in (CHECKPOINT, *RESULTS) if args.overwrite and not args.resume else ():
            (path / name).unlink(missing_ok=True)


def tested(args: Namespace) -> int:
    """Return after how many rounds there is a test."""
    every: int = args.every or max(1, args.rounds // POINTS)
    return every


def keeping(
    args: Namespace,
    name: str,
    method: Scheduled,
    found: Task,
    path: Path,
    every: int | None = None,
) -> Keeper:
    """Return what keeps a run, with the round to go on from if any.

    Args:
        args: of the command.
        name: of the method.
        method: that is to run.
        found: data and network.
        path: of the folder, which has been opened.
        every: rounds between two checkpoints, if `args` do not say.

    Raises:
        ValueError: if the checkpoint is damaged, of another run, further than this one is to go, or
            not tested when this one is to be; or if there is none, and another run's results.
    """
    about: dict[str, Any] = {n: v for n, v in vars(args).items() if n not in FREE}
    about |= {
        "method": name,
        "set": reaching(args.settings, name),
        "seed of split": found.split,
    }
    del about["settings"]
    about["network"] = hashlib.sha256(repr(found.net.module).encode()).hexdigest()[:16]
    if not isinstance(method, Method):  # a schedule knows how many rounds there are
        about["rounds"] = args.rounds
    file = path / CHECKPOINT
    keeper = Keeper(file, args.checkpoint_every or every, args.rounds, about)
    if args.resume and file.exists():
        run = load(file, method, found.data, about, seed=found.seeds)
        keeper.last = as_if_never_stopped(run, tested(args), args.rounds, file)
        keeper.written = run.state.number
    elif args.resume and (path / LAST).exists():
        made_again(path / LAST, about, found, args.rounds)
    return keeper


def made_again(path: Path, about: Mapping[str, Any], found: Task, rounds: int) -> None:
    """Refuse to make a run again where run.json is of another one, or of more rounds.

    Raises:
        ValueError: if it is, or cannot be read.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        number, had = int(facts["rounds"]), facts["arguments"] | {"seeds": facts["seeds"]}
        had["set"] = reaching(had["settings"], about["method"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; expected a run's facts") from error
    asked = {n: v for n, v in about.items() if n in had}
    asked["seeds"] = {"split": found.split, **vars(found.seeds)}
    hashed.same(path, {n: had[n] for n in asked}, asked)
    far_enough(rounds, number, path)


def far_enough(rounds: int, number: int, path: Path) -> None:
    """Refuse to leave fewer rounds than there are.

    Raises:
        ValueError: if that is asked.
    """
    if number > rounds:
        raise ValueError(f"--rounds is {rounds}; expected at least {number}, which {path} holds")


def as_if_never_stopped(run: Run, every: int, rounds: int, path: Path) -> Run:
    """Leave a run the tests that it would have had if it had been asked for `rounds` at once.

    That of its last round may be missing: `fit` makes it before it goes on.

    Raises:
        ValueError: if it is further than that, or lacks one of them.
    """
    number = run.state.number
    far_enough(rounds, number, path)
    had = {row["round"] for row in run.history}
    wanted = {n for n in range(1, number + 1) if n % every == 0 or n == rounds}
    if lacking := sorted(wanted - had - {number}):
        raise ValueError(
            f"{path} was tested after rounds {sorted(had)}; expected --rounds and --every that ask "
            f"for no others up to round {number}; {rounds} and {every} ask for round {lacking[0]}"
        )
    return run.copy(history=[row for row in run.history if row["round"] in wanted])


@contextmanager
def stopping(keeper: Keeper) -> Iterator[None]:
    """Let whatever stops a run leave a checkpoint of the last whole round.

    Raises:
        Stopped: if the run is interrupted, a message is bad, the disk is full, ...
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        problem = ""
        try:
            keeper.rescue()
        except (OSError, ValueError, MemoryError) as full:
            problem = f", and it could not be written: {_what(full)}"
        number = keeper.last.state.number if keeper.last else 0
        kept = (
            f"{keeper.path} holds round {keeper.written}, go on with --resume"
            if keeper.written
            else "there is no checkpoint to go on from"
        )
        _stop(error, f"after round {number} of {keeper.rounds}: {_what(error)}; {kept}{problem}")


@contextmanager
def finishing(folder: Path) -> Iterator[None]:
    """Say of whatever stops the last files of a comparison that its runs are kept.

    Raises:
        Stopped: likewise.
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        kept = f"{folder} holds their checkpoints, go on with --resume"
        _stop(error, f"after all runs: {_what(error)}; {kept}")


def _stop(error: BaseException, text: str) -> NoReturn:
    """End the command with one line, unless nobody expects the error."""
    if isinstance(error, KeyboardInterrupt):
        raise Stopped(text, 130) from error
    if isinstance(error, ValueError | RuntimeError | OSError | MemoryError):
        raise Stopped(text, FAILED) from error
    raise error


def _what(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return str(error) or type(error).__name__
