"""The commands and what may be said to them, as tables, and how a command ends."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, get_args

from pyrofl.arguments import Count, PositiveShare, Share, Whole
from pyrofl.cli import commands
from pyrofl.cli.resuming import CHECKPOINT, Stopped
from pyrofl.data.columns import Missing
from pyrofl.inference.loop.messages import OnBadMessage


def number(kind: Any) -> dict[str, Any]:
    """Make a kind of argument of a type of `pyrofl.arguments`."""
    base, allowed = get_args(kind)

    def read(text: str) -> Any:
        with suppress(ValueError):
            if (value := base(text)) in allowed:
                return value
        whole = "whole " if base is int else ""
        raise ArgumentTypeError(f"found {text!r}; expected a {whole}number {allowed}")

    return {"type": read}


TEXT: dict[str, Any] = {}
SOME, FLAG, REQUIRED = {"nargs": "+"}, {"action": "store_true"}, {"required": True}
COUNT, WHOLE, SHARE, POSITIVE = map(number, (Count, Whole, Share, PositiveShare))
CASES = {"action": "append"}
SETTINGS = {"nargs": "+", "action": "extend", "dest": "settings"}
ON_BAD, MISSING = ({"choices": get_args(words)} for words in (OnBadMessage, Missing))

Row = tuple[str, dict[str, Any], Any, str]
"""A flag and a name for its value, its kind, its default, what it means."""

DATA: tuple[Row, ...] = (  # who holds which rows
    ("--data D", TEXT, "digits", "data set, see pyrofl list"),
    ("--data-dir DIR", TEXT, None, "where downloads are kept; default ~/.cache/pyrofl"),
    ("--target COLUMN", TEXT, None, "of csv: and npz: data, what is predicted"),
    ("--group COLUMN", TEXT, None, "of csv: and npz: data, whose a row is"),
    ("--features COLUMN,...", TEXT, None, "of csv: data; default all other numbers"),
    ("--likelihood NAME", TEXT, None, "of csv: data; default by the target's type"),
    (
        "--missing HOW",
        MISSING,
        None,
        "csv: rows that lack a value, refuse (default) or drop",
    ),
    ("--per-class M", COUNT, None, "keep M training rows of each class"),
    ("--partition P", TEXT, None, "see pyrofl list; default groups of the data or slices:5"),
    ("--clients J", COUNT, None, "that train; default 20 or the groups"),
    ("--held-out H", WHOLE, 0, "clients that never train"),
    ("--server-data U", TEXT, None, "the server's unlabelled rows: a count, share or data set"),
    ("--test POLICY", TEXT, "same_shares", "who is tested on what"),
    ("--seed S", WHOLE, 0, "of all random numbers"),
    ("--split-seed S", WHOLE, None, "of who holds what; default --seed"),
    ("--overwrite", FLAG, False, "replace files that are there"),
)
FIT: tuple[Row, ...] = (  # how methods are fitted, and what is kept of them
    ("--net N", TEXT, None, "network, see pyrofl list, or FILE.py:NAME; default by the data"),
    ("--rounds R", COUNT, 20, "of training"),
    ("--init-seed S", WHOLE, None, "of the first server state and clients' start; default --seed"),
    ("--participation-seed S", WHOLE, None, "of who trains, is heard, is slow; default --seed"),
    ("--noise-seed S", WHOLE, None, "of the order of rows, Monte Carlo draws; default --seed"),
    ("--participation WHO", TEXT, "everyone", "everyone, share 0.1, count 10, or bernoulli:0.1"),
    ("--set NAME=VALUE", SETTINGS, [], "settings of methods; METHOD.NAME=VALUE for one of several"),
    ("--fail P", SHARE, 0.0, "probability that a client that trained is not heard; default 0"),
    ("--partial SHARE", POSITIVE, 1.0, "clients do a random share of their epochs, at least this"),
    ("--on-bad-message", ON_BAD, "reject", "leave the client out of the round, or stop the run"),
    ("--every N", COUNT, None, "test every N rounds; default 20 times"),
    ("--draws S", COUNT, None, "average so many predictions; default: mean"),
    ("--posterior-draws S", WHOLE, 100, "of every client, in posterior.nc; 0 writes none"),
    ("--chunk C", COUNT, None, "clients side by side; default by memory"),
    ("--state-memory GIB", WHOLE, 4, "private state beyond it goes to a temporary file"),
    ("--fold-messages", FLAG, False, "merge messages as they come, where the merge is a mean"),
    ("--threads T", COUNT, 1, "of the CPU"),
    ("--device DEVICE", TEXT, "cpu", "of torch"),
    ("--out DIR", TEXT, None, "where results go; default runs/METHOD-SEED or runs/compare"),
    ("--checkpoint-every N", COUNT, None, f"write {CHECKPOINT} every N rounds and after the last"),
    ("--resume", FLAG, False, "go on from the checkpoint, if there is one"),
    ("--quiet", FLAG, False, "print nothing but the table"),
)
BENCH: tuple[Row, ...] = (
    ("--quick", FLAG, False, "about a minute: few turns, few cases"),
    ("--case NAME", CASES, None, "only this one"),
    ("--data D", TEXT, None, "images, npz:FILE; default made-up ones"),
    ("--data-dir DIR", TEXT, None, "where downloads are kept"),
    ("--turns TURNS", COUNT, 5, "of both sides"),
    ("--threads THREADS", COUNT, 2, "of the CPU"),
    ("--out DIR", TEXT, "runs/bench", "where results go"),
    ("--overwrite", FLAG, False, "replace files that are there"),
)
METHOD: Row = ("method METHOD", TEXT, None, "see pyrofl list")
METHODS: Row = ("methods METHOD", SOME, None, "see pyrofl list")
SEEDS: Row = ("--seeds SEEDS", COUNT, 3, "runs per method")
FIGURE: Row = ("--out FIG.png", REQUIRED, None, "the figure's file")

COMMANDS: dict[str, tuple[str, Callable[[Namespace], None], tuple[Row, ...]]] = {
    "list": ("print methods, data sets, partitions and networks", commands.list_all, ()),
    "run": ("fit one method", commands.run, (METHOD, *DATA, *FIT)),
    "compare": (
        "fit several methods on the same clients",
        commands.compare,
        (METHODS, *DATA, *FIT, SEEDS),
    ),
    "partition": ("draw who holds which classes", commands.partition, (*DATA, FIGURE)),
    "bench": ("measure the speed beside other loops", commands.bench, BENCH),
}


class Parser(ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Leave with one line and exit code 2."""
        self.exit(2, complaint(f"{message}; see {self.prog} --help"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 if it is done, 2 if it was refused before any work, 3 if a run failed on its way, 4 if a run
    made all its rounds, and diverged or merged nothing, 130 if it was interrupted. What went wrong
    is said in one line.

    Args:
        argv: the words after `pyrofl`; None takes those of the process.
    """
    try:
        args = parser().parse_args(argv)
        args.do(args)
        sys.stdout.flush()
    except SystemExit as stop:
        return int(stop.code or 0)
    except Stopped as stop:
        sys.stderr.write(f"\n{complaint(str(stop))}")
        return stop.code
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.stderr.write(complaint(str(error)))
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\npyrofl: interrupted\n")
        return 130
    return 0


def complaint(message: str) -> str:
    r"""Put what is wrong in one line.

    >>> complaint("too few\n  rows")
    'pyrofl: error: too few rows\n'
    """
    return f"pyrofl: error: {' '.join(message.split())}\n"


def parser() -> ArgumentParser:
    """Describe the commands and their arguments."""
    top = Parser(prog="pyrofl", description="Bayesian and personalised federated learning")
    add = top.add_subparsers(required=True, metavar="COMMAND").add_parser
    for name, (about, do, rows) in COMMANDS.items():
        command = add(name, help=about)
        for words, kind, default, text in rows:
            flag, _, metavar = words.partition(" ")
            told = f"{text} (%(default)s)" if default else text
            more = kind | ({"metavar": metavar} if metavar else {})
            command.add_argument(flag, default=default, help=told, **more)
        command.set_defaults(do=do)
    return top
