"""The commands and their options."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from pyrofl.cli.commands import fitting, listing, predict, tune
from pyrofl.cli.commands.answer import answer
from pyrofl.cli.commands.report import report
from pyrofl.cli.examples import EXAMPLES, FIRST
from pyrofl.cli.output.model_comparison import By
from pyrofl.experiments.console import complaint, ended, show
from pyrofl.experiments.experiment import (
    SECTIONS,
    Experiment,
    flag_of,
    kinds,
    options,
    read_config,
    sections,
    words_of,
)
from pyrofl.experiments.options import (
    COUNT,
    FLAG,
    PATH,
    PORT,
    POSITIVE,
    REQUIRED,
    TEXT,
    Kind,
    choice,
    expand_home,
)
from pyrofl.inference.transport.client import MIN_SCORED_ROWS
from pyrofl.starting import end_loading


class Row(NamedTuple):
    """An argument of a command."""

    words: str
    """Its option and a name for its value, such as "--out DIR"."""
    kind: Kind
    default: Any
    text: str
    section: str | None = None
    """Heading in the help."""


def rows_of(names: Collection[str]) -> Iterator[Row]:
    """Yield options of an experiment."""
    for one in options():
        if one.name in names:
            words = " ".join(filter(None, (flag_of(one), one.metadata["metavar"])))
            # Lists are extended by argparse, which must not extend the field's default.
            default = list(one.default) if isinstance(one.default, tuple) else one.default
            kind = kinds()[one.name] | {"dest": one.name}
            yield Row(words, kind, default, one.metadata["text"], sections()[one.name])


RUNS = Row("folder DIR", PATH, None, "of pyrofl run or pyrofl compare")
SCORE = Row(
    "--by",
    choice(By),
    None,
    "score of rows; default accuracy, or error where y is a number, which has a crps too",
)
PREDICT: tuple[Any, ...] = (
    Row("folder DIR", PATH, None, "of pyrofl run, or of Run.save"),
    Row("--data FILE.csv", REQUIRED, None, "the rows, with the columns of training by name"),
    Row("--out FILE.csv", REQUIRED, None, "where predictions go, a line for each row"),
    Row("--client NAME", TEXT, None, "whose rows they are"),
    Row("--group COLUMN", TEXT, None, "that says whose each row is"),
    Row("--new-client", FLAG, False, "they are of a client that was never seen"),
    Row("--own-rows FILE.csv", PATH, None, "labelled rows that a new client adapts to"),
    Row(
        "--model VIEW", TEXT, None, "personal, global or ensemble; default what the method is about"
    ),
    Row("--net FILE.py:NAME", PATH, None, "of a run with a network of your own: it is made again"),
    Row("--unadapted", FLAG, False, "do not adapt to training rows, which need not be there then"),
    Row("--draws S", COUNT, None, "average so many predictions; default as the run did"),
    Row("--overwrite", FLAG, False, "replace a file that is there"),
)
SECTION = Row(
    "section SECTION",
    {"nargs": "?", "choices": (*listing.SECTIONS, "settings")},
    None,
    f"{', '.join(listing.SECTIONS)} or settings; default names of all",
)
METHOD = Row("method METHOD", TEXT, None, "see pyrofl list")
ONE = Row("methods METHOD", {"nargs": "?"} | TEXT, None, "Method to fit (see pyrofl list methods).")
SEVERAL = Row("methods METHOD", {"nargs": "*"} | TEXT, [], "Methods (see pyrofl list methods).")
FIGURE = Row("--out FIG.png", REQUIRED, None, "the figure's file")
CONFIG = Row(
    "--config FILE", PATH, None, "YAML file with options, or run.json; options given here win."
)
HEADINGS = list(SECTIONS.values())
OF_DATA = {n for n, section in sections().items() if section in HEADINGS[:3]} | {"overwrite"}
OF_RUN = {n for n, section in sections().items() if section != HEADINGS[-1]}
OF_TUNING = sections().keys() - OF_RUN
UNTUNED = {"until", "privacy", "every", "posterior_draws", "groups", "rows", "log", "seeds", "tune"}


def on_experiment(command: Callable[[Experiment], None], name: str) -> Callable[[Namespace], None]:
    """Return a command that is called with an experiment."""

    def do(args: Namespace) -> None:
        methods = args.methods if isinstance(args.methods, list) else [args.methods or ""]
        experiment = replace(Experiment.of(args), methods=tuple(filter(None, methods)))
        if not experiment.methods:
            raise ValueError(f"{name}: METHOD is missing; expected one of pyrofl list methods")
        command(experiment)

    return do


def on_data(command: Callable[[Experiment], None]) -> Callable[[Namespace], None]:
    """Return a command that is called with an experiment without methods."""
    return lambda args: command(Experiment.of(args))


COMMANDS: dict[str, tuple[str, Callable[[Namespace], None], tuple[Row, ...]]] = {
    "list": ("print what there is: methods, data, partitions...", listing.list_all, (SECTION,)),
    "explain": ("print a method's equations, settings, bytes and use", listing.explain, (METHOD,)),
    "run": (
        "fit one method",
        on_experiment(fitting.run, "run"),
        (ONE, CONFIG, *rows_of(OF_RUN)),
    ),
    "compare": (
        "fit several methods on the same clients",
        on_experiment(fitting.compare, "compare"),
        (SEVERAL, CONFIG, *rows_of((OF_RUN | OF_TUNING) - {"over"})),
    ),
    "tune": (
        "choose a method's settings on validation rows of the clients",
        on_experiment(tune.tune, "tune"),
        (ONE, CONFIG, *rows_of((OF_RUN | OF_TUNING) - UNTUNED)),
    ),
    "partition": (
        "draw who holds which classes",
        on_data(fitting.partition),
        (*rows_of(OF_DATA), FIGURE),
    ),
    "predict": ("predict new rows by a run's folder", predict.predict, PREDICT),
    "answer": ("say what federation buys each site", answer, (RUNS, SCORE)),
    "report": ("write one page of HTML about a run or a comparison", report, (RUNS,)),
}

WAITING: tuple[Row, ...] = (  # for sites
    Row("--min-sites N", COUNT, None, "Smallest number of sites in a round (default: all)."),
    Row("--timeout S", POSITIVE, 600.0, "seconds to wait for sites, and for their replies"),
    Row(
        "--out DIR",
        PATH,
        None,
        "states and results, gone on from if there are some; default DIR/run",
    ),
    Row("--quiet", FLAG, False, "print nothing but the tables"),
)
FOLDER = Row("folder DIR", PATH, None, "project folder")
FLOWER: dict[str, tuple[str, tuple[Row, ...]]] = {
    "new": ("write a project folder, and rows to try it with", (FOLDER,)),
    "up": (
        "run a project on this machine alone, with a node for each file of DIR/sites",
        (FOLDER, Row("--sites N", COUNT, 3, "how many of them"), *WAITING),
    ),
    "serve": (
        "run a project's server for sites elsewhere",
        (
            FOLDER,
            Row("--sites N", COUNT, 3, "begin when so many are there"),
            Row("--host ADDRESS", TEXT, "127.0.0.1", "to listen on"),
            Row("--port PORT", PORT, 8443, "to listen on"),
            Row("--cert FILE", PATH, None, "the server's certificate"),
            Row("--cert-key FILE", PATH, None, "its private key"),
            Row("--ca FILE", PATH, None, "certificate of who signed it"),
            Row("--nodes DIR", PATH, None, "public keys of the sites' nodes, NAME.pub"),
            *WAITING,
        ),
    ),
    "join": (
        "take part with the rows of a site",
        (
            Row("server HOST:PORT", TEXT, None, "where the server is"),
            Row("--data FILE.csv", REQUIRED, None, "the site's rows"),
            Row("--name NAME", TEXT | {"required": True}, None, "of the site; no other has it"),
            Row("--state DIR", REQUIRED, None, "what its clients keep, and its log"),
            Row("--project DIR", PATH, ".", "the site's copy of the project folder"),
            Row("--key FILE", PATH, None, "private key of the site's node"),
            Row("--ca FILE", PATH, None, "certificate of who signed the server's"),
            Row("--rejoin", FLAG, False, "come back as a newcomer if the state is lost"),
            Row(
                "--min-scored-rows N",
                COUNT,
                MIN_SCORED_ROWS,
                "Smallest number of test rows of which a client's scores are sent.",
            ),
            Row("--no-scores", FLAG, False, "Send no scores; losses are still sent."),
            Row("--show", FLAG, False, "say what will leave, and no more"),
        ),
    ),
    "predict": (
        "predict rows at a site, from the state that its clients keep",
        (
            Row("folder DIR", PATH, None, "State directory of the site (--state of join)."),
            Row("--rows FILE.csv", REQUIRED, None, "Rows to predict, with the study's features."),
            Row("--out FILE.csv", REQUIRED, None, "Predictions, a line for each row."),
            Row("--method NAME", TEXT, None, "Method (default: the only one of the study)."),
            Row("--client NAME", TEXT, None, "Client (default: the only one, or by the group)."),
            Row("--model VIEW", TEXT, None, "Model: personal, global or ensemble."),
            Row("--draws S", COUNT, None, "Posterior draws (default: the guide's mean)."),
            Row("--overwrite", FLAG, False, "Overwrite an existing file."),
        ),
    ),
}


def flower(name: str) -> Callable[[Namespace], None]:
    """Return a command of `pyrofl flower`, which is loaded when it is called."""

    def do(args: Namespace) -> None:
        module = import_module(f"pyrofl.flower.{'predict' if name == 'predict' else 'commands'}")
        command: Callable[[Namespace], None] = getattr(module, name)
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
    is reported in one line.

    Args:
        argv: the words after `pyrofl`; None takes those of the process.
    """
    end_loading()
    words = sys.argv[1:] if argv is None else argv
    return ended(lambda: parser().parse_args(with_config(words)))


def with_config(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the options of its --config in front of its own."""
    words = list(words)
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--config"), None)
    if at is None or words[0] not in ("run", "compare", "tune") or "--help" in words:
        return words
    path = words[at].partition("=")[2] or next(iter(words[at + 1 : at + 2]), "")
    values = read_config(expand_home(path))
    methods = values.pop("methods", [])
    own = [row.kind.get("dest") for row in COMMANDS[words[0]][2]]
    asked = words_of({name: value for name, value in values.items() if name in own})
    given = parser().parse_args(words)
    if not given.methods:
        asked = [*([methods] if isinstance(methods, str) else map(str, methods)), *asked]
    # An option follows, so that a method is not read as one more value of the last one.
    return [words[0], *asked, f"--config={path}", *words[1:]]


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
    headings: dict[str | None, Any] = {None: command}
    for row in rows:
        option, _, metavar = row.words.partition(" ")
        text = row.text
        if row.default and "(default" not in text:
            text = f"{text.removesuffix('.')} (default: %(default)s){'.' * text.endswith('.')}"
        if row.section not in headings:
            headings[row.section] = command.add_argument_group(row.section)
        more = row.kind | ({"metavar": metavar} if metavar else {})
        headings[row.section].add_argument(option, default=row.default, help=text, **more)
    command.set_defaults(do=do)
