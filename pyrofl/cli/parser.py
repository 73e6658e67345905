"""The command line `pyrofl`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import NoReturn, get_args

from pyrofl.cli import commands
from pyrofl.cli.resuming import CHECKPOINT, Stopped
from pyrofl.inference.loop.messages import OnBadMessage


class Parser(ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Leave with one line and exit code 2."""
        self.exit(2, complaint(f"{message}; see {self.prog} --help"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 if it is done, 2 if it was refused before any work, 3 if a run failed on its way, 130 if it
    was interrupted. What went wrong is said in one line.

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
    listing = add("list", help="print methods, data sets, partitions and networks")
    listing.set_defaults(do=commands.list_all)

    run = add("run", help="fit one method")
    run.add_argument("method", metavar="METHOD", help="see pyrofl list")
    _add_fit(run, "where results go; default runs/METHOD-SEED")
    run.set_defaults(do=commands.run)

    compare = add("compare", help="fit several methods on the same clients")
    compare.add_argument("methods", metavar="METHOD", nargs="+", help="see pyrofl list")
    _add_fit(compare, "where results go; default runs/compare")
    compare.add_argument("--seeds", type=_whole(1), default=3, help="runs per method (%(default)s)")
    compare.set_defaults(do=commands.compare)

    partition = add("partition", help="draw who holds which classes")
    _add_data(partition)
    partition.add_argument("--out", required=True, metavar="FIG.png", help="the figure's file")
    partition.set_defaults(do=commands.partition)

    timing = add("bench", help="measure the speed beside other loops")
    timing.add_argument("--quick", action="store_true", help="about a minute: few turns, few cases")
    timing.add_argument("--case", action="append", metavar="NAME", help="only this one")
    timing.add_argument("--data", metavar="D", help="images, npz:FILE; default made-up ones")
    timing.add_argument("--data-dir", metavar="DIR", help="where downloads are kept")
    timing.add_argument("--turns", type=_whole(1), default=5, help="of both sides (%(default)s)")
    timing.add_argument("--threads", type=_whole(1), default=2, help="of the CPU (%(default)s)")
    timing.add_argument("--out", default="runs/bench", metavar="DIR", help="(%(default)s)")
    timing.add_argument("--overwrite", action="store_true", help="replace files that are there")
    timing.set_defaults(do=commands.bench)
    return top


def _add_data(to: ArgumentParser) -> None:
    """Add what decides who holds which rows."""
    add = to.add_argument
    add("--data", default="digits", metavar="D", help="data set, see pyrofl list (%(default)s)")
    add("--data-dir", metavar="DIR", help="where downloads are kept; default ~/.cache/pyrofl")
    add("--target", metavar="COLUMN", help="of csv: and npz: data, what is predicted")
    add("--group", metavar="COLUMN", help="of csv: and npz: data, whose a row is")
    add("--features", metavar="COLUMN,...", help="of csv: data; default all other numbers")
    add("--likelihood", metavar="NAME", help="of csv: data; default by the target's type")
    add("--per-class", type=_whole(1), metavar="M", help="keep M training rows of each class")
    add("--partition", metavar="P", help="see pyrofl list; default groups of the data or slices:5")
    add("--clients", type=_whole(1), metavar="J", help="that train; default 20 or the groups")
    add("--held-out", type=_whole(0), default=0, metavar="H", help="clients that never train")
    add(
        "--server-data",
        metavar="U",
        help="unlabelled rows at the server: a count or share of the training rows, or a data set",
    )
    add("--test", default="same_shares", metavar="POLICY", help="who is tested on what")
    add("--seed", type=_whole(0), default=0, metavar="S", help="of all random numbers")
    _add_seed(to, "split", "who holds what")
    add("--overwrite", action="store_true", help="replace files that are there")


def _add_seed(to: ArgumentParser, name: str, of: str) -> None:
    to.add_argument(f"--{name}-seed", type=_whole(0), metavar="S", help=f"of {of}; default --seed")


def _add_fit(to: ArgumentParser, out: str) -> None:
    """Add what decides how methods are fitted and what is kept of them."""
    _add_data(to)
    add = to.add_argument
    add("--net", metavar="N", help="network, see pyrofl list, or FILE.py:NAME; default by the data")
    add("--rounds", type=_whole(1), default=20, metavar="R", help="of training (%(default)s)")
    _add_seed(to, "init", "the first server state and the common start of clients")
    _add_seed(to, "participation", "who trains, who is heard, and partial work")
    _add_seed(to, "noise", "the order of rows and all Monte Carlo draws")
    add(
        "--participation",
        default="everyone",
        metavar="F",
        help="who reports: everyone, a share 0.1, a count 10 (1 is one client), or bernoulli:0.1",
    )
    add(
        "--set",
        dest="settings",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of methods; METHOD.NAME=VALUE for one of several",
    )
    add(
        "--fail",
        type=float,
        default=0.0,
        metavar="P",
        help="probability that a client that trained is not heard (%(default)s)",
    )
    add(
        "--partial",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="clients do a random share of their epochs, from this one to all (%(default)s)",
    )
    add(
        "--on-bad-message",
        choices=get_args(OnBadMessage),
        default="reject",
        help="leave the client out of the round, or stop the run (%(default)s)",
    )
    add("--every", type=_whole(1), metavar="N", help="test every N rounds; default 20 times")
    add("--draws", type=_whole(1), metavar="S", help="average so many predictions; default: mean")
    add(
        "--posterior-draws",
        type=_whole(0),
        default=100,
        metavar="S",
        help="of every client, in posterior.nc (%(default)s); 0 writes none",
    )
    add("--chunk", type=_whole(1), metavar="C", help="clients side by side; default by memory")
    add(
        "--state-memory",
        type=_whole(0),
        default=4,
        metavar="GIB",
        help="private state beyond it goes to a temporary file (%(default)s)",
    )
    add(
        "--fold-messages",
        action="store_true",
        help="merge messages as they come instead of holding a round's, where the merge is a mean",
    )
    add("--threads", type=_whole(1), default=1, metavar="T", help="of the CPU (%(default)s)")
    add("--device", default="cpu", help="of torch (%(default)s)")
    add("--out", metavar="DIR", help=out)
    add(
        "--checkpoint-every",
        type=_whole(1),
        metavar="N",
        help=f"write {CHECKPOINT} into the results every N rounds, and after the last",
    )
    add("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    add("--quiet", action="store_true", help="print nothing but the table")


def _whole(least: int) -> Callable[[str], int]:
    """Make a reader of whole numbers from `least` on."""

    def read(text: str) -> int:
        if not text.strip().lstrip("-").isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"found {text!r}; expected a whole number of at least {least}")
        return int(text)

    return read
