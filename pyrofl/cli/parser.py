"""The commands and what may be said to them, as tables, and how a command ends."""

from __future__ import annotations

import os
import re
import sys
from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from math import inf
from typing import Any, NoReturn, get_args

from pyrofl.arguments import (
    Count,
    Positive,
    PositiveShare,
    ProperShare,
    Share,
    ShareBelowOne,
    Whole,
)
from pyrofl.cli import commands, grids, predicting, tuning
from pyrofl.cli.answer import answer
from pyrofl.cli.ends import complaint, ended, show
from pyrofl.cli.examples import EXAMPLES, FIRST
from pyrofl.cli.page import report
from pyrofl.cli.pairs import By
from pyrofl.cli.rehearsal import UNASKED
from pyrofl.data.columns import Missing
from pyrofl.data.preparation import Prepare
from pyrofl.data.wording import composed
from pyrofl.files.run_folder import CHECKPOINT
from pyrofl.inference.chains import Until
from pyrofl.inference.engines.start import Engine
from pyrofl.inference.halves.client import MIN_SCORED_ROWS
from pyrofl.inference.loggers import Logger
from pyrofl.inference.loop.messages import OnBadMessage
from pyrofl.inference.posteriors.axes import GROUPS
from pyrofl.inference.tuned import By as TuneBy
from pyrofl.starting import end_loading

MOST = 2**31 - 1  # what is longer is no count that anybody waits for
CORES = max(64, os.cpu_count() or 1)  # too many threads kill a process


def number(kind: Any, most: float = MOST) -> dict[str, Any]:
    """Make a kind of argument of a type of `pyrofl.arguments`."""
    base, allowed = get_args(kind)

    def read(text: str) -> Any:
        high = allowed
        with suppress(ValueError):
            if (value := base(text)) in allowed and value <= most:
                return value
            high = allowed if value <= most else f"of at most {most}"
        whole = "whole " if base is int else ""
        raise ArgumentTypeError(f"found {text!r}; expected a {whole}number {high}")

    return {"type": read}


def some_text(text: str) -> str:
    """Refuse what a variable of the shell without a value leaves, and what no path can have."""
    if not text or "\0" in text:
        raise ArgumentTypeError(f"found {text!r}; expected a text that is not empty, without NUL")
    return text


def at_home(text: str) -> str:
    """Write out ~ where a path begins: in front, behind csv: and npz:, behind commas of csv:."""
    comma = "|," if text.startswith("csv:") else ""
    return re.sub(rf"(^|\bcsv:|\bnpz:{comma})(~[^/+:,]*)", _written_out, some_text(text))


def _written_out(found: re.Match[str]) -> str:
    return found[1] + os.path.expanduser(found[2])


def some_groups(text: str) -> str | list[str]:
    """Read names of groups, or "all"."""
    names = text.split(",")
    if text != "all" and not set(names) <= set(GROUPS):
        raise ArgumentTypeError(
            f"found {text!r}; expected all, or some of {','.join(GROUPS)} with commas between"
        )
    return text if text == "all" else names


def some_clients(text: str) -> int | str:
    """Read how many clients, or their names with commas between; "5," is the name 5."""
    try:
        found: int = WHOLE["type"](text)
    except ArgumentTypeError:
        with suppress(ValueError):
            float(text)  # nan, 2.5 and -1 are no names
            raise
        if not all(text.removesuffix(",").split(",")):
            raise
        return composed(some_text(text))
    return found


TEXT: dict[str, Any] = {"type": lambda text: composed(some_text(text))}
SOME_GROUPS: dict[str, Any] = {"type": some_groups}
CLIENTS: dict[str, Any] = {"type": some_clients}
PATH: dict[str, Any] = {"type": at_home}
SOME, FLAG, REQUIRED = {"nargs": "+"}, {"action": "store_true"}, PATH | {"required": True}
COUNT, WHOLE, SHARE, POSITIVE = map(number, (Count, Whole, Share, PositiveShare))
PORT, POSITIVE_NUMBER = number(Count, 65535), number(Positive, 1e9)
BELOW_ONE, PROPER = number(ShareBelowOne), number(ProperShare)
SEED, FEW, THREADS = number(Whole, inf), number(Count, 1000), number(Count, CORES)
SETTINGS = {"nargs": "+", "action": "extend", "dest": "settings"}
WORDS = (OnBadMessage, Missing, Until, Prepare, By, Logger, Engine, TuneBy)
KINDS = ({"choices": get_args(words)} for words in WORDS)
ON_BAD, MISSING, UNTIL, PREPARE, BY, LOG, ENGINE, TUNE_BY = KINDS

Row = tuple[str, dict[str, Any], Any, str]
"""A flag and a name for its value, its kind, its default, what it means."""

DATA: tuple[Row, ...] = (  # who holds which rows
    ("--data D", PATH, "digits", "data set, see pyrofl list"),
    ("--data-dir DIR", PATH, None, "where downloads are kept; default ~/.cache/pyrofl"),
    ("--target COLUMN", TEXT, None, "of csv: and npz: data, what is predicted"),
    ("--group COLUMN", TEXT, None, "of csv: and npz: data, whose a row is"),
    ("--features COLUMN,...", TEXT, None, "of csv: data; default all others"),
    ("--categories COLUMN,...", TEXT, None, "of csv: data, features that are no numbers"),
    ("--likelihood NAME", TEXT, None, "of csv: data; default by the target's type"),
    (
        "--missing HOW",
        MISSING,
        None,
        "csv: rows that lack a value: refuse (default), drop, or fill in means and mark them",
    ),
    ("--prepare HOW", PREPARE, None, "csv: standardise numbers (default), or none"),
    ("--test-share SHARE", BELOW_ONE, None, "csv: of each group's rows; default 0.2"),
    ("--test-column COLUMN", TEXT, None, "csv: says which rows are for testing"),
    ("--test-last COLUMN", TEXT, None, "csv: time, by which the last rows are for testing"),
    ("--row-weights COLUMN", TEXT, None, "csv: how much each training row counts, a number"),
    ("--class-weights W", TEXT, None, "how much their rows count: balanced, or NAME=VALUE,..."),
    ("--per-class M", COUNT, None, "keep M training rows of each class"),
    ("--partition P", PATH, None, "see pyrofl list, or FILE.py:NAME; default groups or slices:5"),
    ("--clients J", COUNT, None, "that train; default 20 or the groups"),
    ("--held-out H", CLIENTS, 0, "never train: how many clients, or names of groups A,B"),
    ("--server-data U", PATH, None, "the server's unlabelled rows: a count, share or data set"),
    ("--test POLICY", TEXT, "same_shares", "who is tested on what"),
    ("--seed S", SEED, 0, "of all random numbers"),
    ("--split-seed S", SEED, None, "of who holds what; default --seed"),
    ("--overwrite", FLAG, False, "replace files that are there"),
)
FIT: tuple[Row, ...] = (  # how methods are fitted, and what is kept of them
    ("--net N", PATH, None, "network, see pyrofl list, or FILE.py:NAME; default by the data"),
    ("--rounds R", COUNT, 20, "of training"),
    ("--until", UNTIL, None, "stop before --rounds if the verdict is that, or that it diverged"),
    ("--init-seed S", SEED, None, "of the first server state and clients' start; default --seed"),
    ("--participation-seed S", SEED, None, "of who trains, is heard, is slow; default --seed"),
    ("--noise-seed S", SEED, None, "of the order of rows, Monte Carlo draws; default --seed"),
    ("--participation WHO", TEXT, "everyone", "everyone, share 0.1, count 10, or bernoulli:0.1"),
    ("--set NAME=VALUE", SETTINGS, [], "settings of methods; METHOD.NAME=VALUE for one of several"),
    ("--fail P", SHARE, 0.0, "probability that a client that trained is not heard; default 0"),
    ("--partial SHARE", POSITIVE, 1.0, "clients do a random share of their epochs, at least this"),
    (
        "--privacy clip=C,noise=Z",
        TEXT,
        None,
        "Differential privacy: clip client updates and add noise. Also delta=, most=, where=server "
        "or client; seed= makes the noise repeatable and therefore not private.",
    ),
    ("--on-bad-message", ON_BAD, "reject", "leave the client out of the round, or stop the run"),
    ("--every N", COUNT, None, "test every N rounds; default 20 times"),
    ("--draws S", COUNT, None, "average so many predictions; default: mean"),
    ("--posterior-draws S", WHOLE, 100, "of every client, in posterior.nc; 0 writes none"),
    (
        "--groups GROUP,...",
        SOME_GROUPS,
        None,
        "in posterior.nc, or all; default all, but posterior,sample_stats alone where the others "
        f"have more than {UNASKED:,} numbers",
    ),
    ("--rows", FLAG, False, "write rows.csv, what is predicted for each test row, however many"),
    ("--chunk C", COUNT, None, "clients side by side; default by memory"),
    ("--state-memory GIB", WHOLE, 4, "private state beyond it goes to a temporary file"),
    ("--fold-messages", FLAG, False, "merge messages as they come, where the merge is a mean"),
    ("--engine", ENGINE, "local", "where clients train: in this process, or in several by Ray"),
    ("--workers W", FEW, None, "of Ray, that share the clients; default one per core, or GPU"),
    ("--threads T", THREADS, 1, "of the CPU"),
    ("--device DEVICE", TEXT, "cpu", "of torch"),
    ("--out DIR", PATH, None, "where results go; default runs/METHOD-SEED or runs/compare"),
    ("--checkpoint-every N", COUNT, None, f"write {CHECKPOINT} every N rounds and after the last"),
    ("--log WHERE", LOG, None, "every round to tensorboard (in the run's folder), or mlflow"),
    ("--resume", FLAG, False, "go on from the checkpoint, if there is one"),
    ("--quiet", FLAG, False, "print nothing but the table"),
)
UNTRIED = ("--until", "--privacy", "--every", "--posterior-draws", "--groups", "--rows", "--log")
TRIED = tuple(row for row in FIT if row[0].partition(" ")[0] not in UNTRIED)
TUNING: tuple[Row, ...] = (  # how settings are chosen
    (
        "--settings N",
        FEW | {"dest": "tries"},
        None,
        f"to try of every method; default all of --over, else {grids.TRIES} of the method's own",
    ),
    ("--metric", TUNE_BY, None, "to choose by; default accuracy, or nll where y is a number"),
    ("--hold-back SHARE", PROPER, 0.2, "of every client's training rows, to choose on"),
    ("--tune-seeds N", COUNT, 3, "Number of seeds with which the finalists are compared."),
)
OVER: Row = ("--over NAME=VALUE,...", SETTINGS | {"dest": "over"}, [], "all combinations to try")
TUNE: Row = ("--tune", FLAG, False, "choose every method's settings first, see pyrofl tune")
RUNS: Row = ("folder DIR", PATH, None, "of pyrofl run or pyrofl compare")
SCORE: Row = (
    "--by",
    BY,
    None,
    "score of rows; default accuracy, or error where y is a number, which has a crps too",
)
PREDICT: tuple[Row, ...] = (
    ("folder DIR", PATH, None, "of pyrofl run, or of Run.save"),
    ("--data FILE.csv", REQUIRED, None, "the rows, with the columns of training by name"),
    ("--out FILE.csv", REQUIRED, None, "where predictions go, a line for each row"),
    ("--client NAME", TEXT, None, "whose rows they are"),
    ("--group COLUMN", TEXT, None, "that says whose each row is"),
    ("--new-client", FLAG, False, "they are of a client that was never seen"),
    ("--own-rows FILE.csv", PATH, None, "labelled rows that a new client adapts to"),
    ("--model VIEW", TEXT, None, "personal, global or ensemble; default what the method is about"),
    ("--net FILE.py:NAME", PATH, None, "of a run with a network of your own: it is made again"),
    ("--unadapted", FLAG, False, "do not adapt to training rows, which need not be there then"),
    ("--draws S", COUNT, None, "average so many predictions; default as the run did"),
    ("--overwrite", FLAG, False, "replace a file that is there"),
)
SECTION: Row = (
    "section SECTION",
    {"nargs": "?", "choices": (*commands.SECTIONS, "settings")},
    None,
    f"{', '.join(commands.SECTIONS)} or settings; default names of all",
)
METHOD: Row = ("method METHOD", TEXT, None, "see pyrofl list")
METHODS: Row = ("methods METHOD", SOME, None, "see pyrofl list")
SEEDS: Row = ("--seeds SEEDS", FEW, 3, "runs per method")
FIGURE: Row = ("--out FIG.png", REQUIRED, None, "the figure's file")

COMMANDS: dict[str, tuple[str, Callable[[Namespace], None], tuple[Row, ...]]] = {
    "list": ("print what there is: methods, data, partitions...", commands.list_all, (SECTION,)),
    "explain": ("print a method's equations, settings, bytes and use", commands.explain, (METHOD,)),
    "run": ("fit one method", commands.run, (METHOD, *DATA, *FIT)),
    "compare": (
        "fit several methods on the same clients",
        commands.compare,
        (METHODS, *DATA, *FIT, SEEDS, TUNE, *TUNING),
    ),
    "tune": (
        "choose a method's settings on rows held back inside the clients",
        tuning.tune,
        (METHOD, OVER, *TUNING, *DATA, *TRIED),
    ),
    "partition": ("draw who holds which classes", commands.partition, (*DATA, FIGURE)),
    "predict": ("predict new rows by a run's folder", predicting.predict, PREDICT),
    "answer": ("say what federation buys each site", answer, (RUNS, SCORE)),
    "report": ("write one page of HTML about a run or a comparison", report, (RUNS,)),
}

WAITING: tuple[Row, ...] = (  # for sites
    ("--min-sites N", COUNT, None, "Smallest number of sites in a round (default: all)."),
    ("--timeout S", POSITIVE_NUMBER, 600.0, "seconds to wait for sites, and for their replies"),
    (
        "--out DIR",
        PATH,
        None,
        "states and results, gone on from if there are some; default DIR/run",
    ),
    ("--quiet", FLAG, False, "print nothing but the tables"),
)
FOLDER: Row = ("folder DIR", PATH, None, "project folder")
FLOWER: dict[str, tuple[str, tuple[Row, ...]]] = {
    "new": ("write a project folder, and rows to try it with", (FOLDER,)),
    "up": (
        "run a project on this machine alone, with a node for each file of DIR/sites",
        (FOLDER, ("--sites N", COUNT, 3, "how many of them"), *WAITING),
    ),
    "serve": (
        "run a project's server for sites elsewhere",
        (
            FOLDER,
            ("--sites N", COUNT, 3, "begin when so many are there"),
            ("--host ADDRESS", TEXT, "127.0.0.1", "to listen on"),
            ("--port PORT", PORT, 8443, "to listen on"),
            ("--cert FILE", PATH, None, "the server's certificate"),
            ("--cert-key FILE", PATH, None, "its private key"),
            ("--ca FILE", PATH, None, "certificate of who signed it"),
            ("--nodes DIR", PATH, None, "public keys of the sites' nodes, NAME.pub"),
            *WAITING,
        ),
    ),
    "join": (
        "take part with the rows of a site",
        (
            ("server HOST:PORT", TEXT, None, "where the server is"),
            ("--data FILE.csv", REQUIRED, None, "the site's rows"),
            ("--name NAME", TEXT | {"required": True}, None, "of the site; no other has it"),
            ("--state DIR", REQUIRED, None, "what its clients keep, and its log"),
            ("--project DIR", PATH, ".", "the site's copy of the project folder"),
            ("--key FILE", PATH, None, "private key of the site's node"),
            ("--ca FILE", PATH, None, "certificate of who signed the server's"),
            ("--rejoin", FLAG, False, "come back as a newcomer if the state is lost"),
            (
                "--min-scored-rows N",
                COUNT,
                MIN_SCORED_ROWS,
                "Smallest number of test rows of which a client's scores are sent.",
            ),
            ("--no-scores", FLAG, False, "Send no scores; losses are still sent."),
            ("--show", FLAG, False, "say what will leave, and no more"),
        ),
    ),
}


def flower(name: str) -> Callable[[Namespace], None]:
    """Return a command of `pyrofl flower`, which is loaded when it is called."""

    def do(args: Namespace) -> None:
        command: Callable[[Namespace], None] = getattr(import_module("pyrofl.flower.command"), name)
        command(args)

    return do


class Parser(ArgumentParser):
    """A parser whose complaints are one line, and whose help is printed or is not."""

    def print_help(self, file: Any = None) -> None:
        """Print the help; argparse would not notice that it cannot."""
        show(self.format_help().rstrip("\n"))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read words; of --flag=-- argparse would make an empty list."""
        for word in sys.argv[1:] if args is None else args:
            if re.fullmatch(r"--[\w-]+=--", word):
                self.error(f"argument {word.partition('=')[0]}: found '--'; expected a value")
        return super().parse_known_args(args, namespace)

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
    end_loading()
    return ended(lambda: parser().parse_args(argv))


def parser() -> ArgumentParser:
    """Describe the commands and their arguments."""
    what: dict[str, Any] = {"description": "Bayesian and personalised federated learning"}
    what |= {"formatter_class": RawDescriptionHelpFormatter, "epilog": FIRST}
    top = Parser(prog="pyrofl", **what)
    top.set_defaults(do=lambda args: top.print_help())
    add = top.add_subparsers(metavar="COMMAND").add_parser
    for name, (about, do, rows) in COMMANDS.items():
        epilog = "examples:\n  " + EXAMPLES[name].replace("\n", "\n  ")
        describe(add(name, help=about, **what | {"description": None, "epilog": epilog}), do, rows)
    sites = add("flower", help="a server and sites on their own machines, by Flower")
    add = sites.add_subparsers(required=True, metavar="COMMAND").add_parser
    for name, (about, rows) in FLOWER.items():
        describe(add(name, help=about), flower(name), rows)
    return top


def describe(command: ArgumentParser, do: Callable[[Namespace], None], rows: Sequence[Row]) -> None:
    """Add the arguments of a command."""
    for words, kind, default, text in rows:
        flag, _, metavar = words.partition(" ")
        told = f"{text} (%(default)s)" if default else text
        more = kind | ({"metavar": metavar} if metavar else {})
        command.add_argument(flag, default=default, help=told, **more)
    command.set_defaults(do=do)
