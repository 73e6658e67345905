"""Runs that can be stopped and gone on with: their folders, their checkpoints, how they end."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyrofl import records
from pyrofl.cli_methods import Scheduled
from pyrofl.cli_setup import Task
from pyrofl.inference.checkpoint import Keeper, load
from pyrofl.inference.fit import Run
from pyrofl.inference.method import Method

CHECKPOINT = "checkpoint.pt"
FAILED = 3  # exit code of a run that ended on its way
POINTS = 20  # of a learning curve, unless asked for otherwise
FREE = (  # arguments that may differ when a run goes on
    *("do", "methods", "method", "seeds", "rounds", "out", "overwrite", "resume", "quiet"),
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


def opened(path: str | Path, args: Namespace) -> Path:
    """Make or empty the folder of a run; one with a checkpoint may be resumed as it is.

    Raises:
        ValueError: as `records.prepare`.
    """
    path = Path(path)
    checkpoint = path / CHECKPOINT
    if args.resume:
        records.sweep(path)
    elif args.overwrite:
        checkpoint.unlink(missing_ok=True)
    return records.prepare(path, args.overwrite or (args.resume and checkpoint.exists()))


def tested(args: Namespace) -> int:
    """Return after how many rounds there is a test."""
    every: int = args.every or max(1, args.rounds // POINTS)
    return every


def keeping(args: Namespace, name: str, method: Scheduled, found: Task, folder: Path) -> Keeper:
    """Return what keeps a run on the disk, with all that must be the same to go on."""
    about: dict[str, Any] = {n: v for n, v in vars(args).items() if n not in FREE}
    about |= {"method": name, "set": sorted(args.settings), "every": tested(args)}
    about["seed of split"] = found.split
    del about["settings"]
    about["network"] = hashlib.sha256(repr(found.net.module).encode()).hexdigest()[:16]
    if not isinstance(method, Method):  # a schedule knows how many rounds there are
        about["rounds"] = args.rounds
    return Keeper(folder / CHECKPOINT, args.checkpoint_every, args.rounds, about)


def resumed(args: Namespace, keeper: Keeper, method: Scheduled, found: Task) -> Run | None:
    """Read the checkpoint to go on from, if that is asked for and there is one.

    Raises:
        ValueError: if it is damaged, of another run, or further than this one is to go.
    """
    if not args.resume or not keeper.path.exists():
        return None
    run = load(keeper.path, method, found.data, keeper.about, seed=found.seeds)
    if run.state.number > args.rounds:
        raise ValueError(
            f"--rounds is {args.rounds}; expected at least {run.state.number}, which "
            f"{keeper.path} holds"
        )
    keeper.last, keeper.written = run, run.state.number
    return run


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
        text = f"after round {number} of {keeper.rounds}: {_what(error)}; {kept}{problem}"
        if isinstance(error, KeyboardInterrupt):
            raise Stopped(text, 130) from error
        if isinstance(error, ValueError | RuntimeError | OSError | MemoryError):
            raise Stopped(text, FAILED) from error
        raise


def _what(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return str(error) or type(error).__name__
