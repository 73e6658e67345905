"""Argument parser of the `pyrofl` commands and their options."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

import pyrofl
from pyrofl.arguments import RENAMED, check_name
from pyrofl.choices import MIN_SCORED_ROWS
from pyrofl.cli.rows import (
    CHECK_OPTIONS,
    CONFIG_OPTION,
    CONFORMAL_OPTIONS,
    COURSE_OPTIONS,
    DATA_OPTION_NAMES,
    DESCRIBE_OPTIONS,
    FIGURE_FILE_OPTION,
    LIST_SECTION_ARGUMENT,
    METHOD_ARGUMENT,
    METHOD_TO_FIT,
    METHODS_TO_FIT,
    OPTIONS_TUNE_LACKS,
    PREDICT_OPTIONS,
    REGRESS_OPTIONS,
    REPORT_TITLE_OPTION,
    RUN_FOLDER,
    RUN_OPTION_NAMES,
    SCORE_OPTION,
    SEEDS_OPTION_NAMES,
    options_named,
)
from pyrofl.experiments.console import complaint, ended, say, show
from pyrofl.experiments.experiment import (
    Experiment,
    options,
    read_config,
    words_of,
)
from pyrofl.experiments.method_names import is_method_argument, method_summaries
from pyrofl.experiments.options import (
    COUNT,
    FLAG,
    PATH,
    PORT,
    POSITIVE,
    REQUIRED,
    TEXT,
    CommandOption,
    expand_home,
    refuse_repeated,
)
from pyrofl.starting import end_loading

EXAMPLES = {
    "list": "pyrofl list\npyrofl list methods",
    "explain": "pyrofl explain pfedvem",
    "run": "pyrofl run pfedvem --test same_classes --rounds 12 --set lr_head=0.01 lr_base=0.01\n"
    "pyrofl run fedavg --data csv:heart.csv --target sick --client-column site --missing impute",
    "compare": "pyrofl compare local fedavg pfedvem --seeds 3 --out results\n"
    "pyrofl compare local fedavg --set fedavg.fine_tune=2 --out cmp",
    "tune": "pyrofl tune fedavg --over lr=0.01,0.03,0.1 --rounds 18 --out tuned",
    "partition": "pyrofl partition --partition dirichlet:0.3 --clients 10 --out who.png",
    "predict": "pyrofl predict runs/fedavg-0 --data new.csv --client hospital_3 --out p.csv",
    "conformal": "pyrofl conformal runs/fedavg-0 --alpha 0.1",
    "regress": "pyrofl regress 'died ~ age + (1 | client)' --data csv:wards --family bernoulli\n"
    "pyrofl regress 'y ~ x + (x | ward)' --data csv:y.csv --client-column ward --out y",
    "check": "pyrofl check wards --formula 'died ~ age + (1 | client)' --family bernoulli\n"
    "pyrofl check bern.csv chur.csv --columns age,sex --na unknown,-999",
    "describe": "pyrofl describe wards --columns age,sex",
    "benefit": "pyrofl benefit results",
    "report": "pyrofl report results",
    "course": "pyrofl course course_2027",
}
FIRST = """three commands to try:
  pyrofl list
  pyrofl explain pfedvem
  pyrofl compare local fedavg pfedvem --rounds 5 --seeds 2 --out results"""


def load(place: str) -> Callable[..., None]:
    """Return a function "module:name" of the command line, imported when it is called.

    Interrupts are handled as usual from then on: while libraries are loaded, they end the command.
    """

    def do(given: Any) -> None:
        module, _, name = place.partition(":")
        command: Callable[[Any], None] = getattr(import_module(f"pyrofl.{module}"), name)
        end_loading()
        command(given)

    return do


def on_experiment(place: str) -> Callable[[Namespace], None]:
    """Return a command that receives its parsed arguments as an `Experiment` with methods."""

    def do(args: Namespace) -> None:
        methods = args.methods if isinstance(args.methods, list) else [args.methods or ""]
        methods = [name for text in methods for name in text.split(",") if name]
        experiment = replace(Experiment.of(args), methods=tuple(methods)).with_programs()
        refuse_repeated(experiment.settings)
        if not experiment.methods:
            name = place.rpartition(":")[2]
            raise ValueError(f"{name}: METHOD is missing; expected one of pyrofl list methods")
        for method in experiment.methods:
            check_name(method, method_summaries(), "method")
        if "torch" not in sys.modules and sys.stderr.isatty():  # importing it takes some seconds
            say(experiment, "loading PyTorch")
        load(place)(experiment)

    return do


def on_data(place: str) -> Callable[[Namespace], None]:
    """Return a command that receives its arguments as an `Experiment` without methods."""
    return lambda args: load(place)(Experiment.of(args))


COMMANDS: dict[str, tuple[str, Callable[[Namespace], None], tuple[CommandOption, ...]]] = {
    "list": (
        "list methods, data sets, partitions and other choices",
        load("cli.commands.listing:list_choices"),
        (LIST_SECTION_ARGUMENT,),
    ),
    "explain": (
        "print what a method computes, its settings, message sizes and when to use it",
        load("cli.output.cards:explain"),
        (METHOD_ARGUMENT,),
    ),
    "run": (
        "fit one method",
        on_experiment("cli.commands.fitting:run"),
        (METHOD_TO_FIT, CONFIG_OPTION, *options_named(RUN_OPTION_NAMES)),
    ),
    "compare": (
        "fit several methods on the same clients",
        on_experiment("cli.commands.fitting:compare"),
        (
            METHODS_TO_FIT,
            CONFIG_OPTION,
            *options_named((RUN_OPTION_NAMES | SEEDS_OPTION_NAMES) - {"over"}),
        ),
    ),
    "tune": (
        "select a method's settings by their scores on validation rows",
        on_experiment("cli.commands.tune:tune"),
        (
            METHOD_TO_FIT,
            CONFIG_OPTION,
            *options_named((RUN_OPTION_NAMES | SEEDS_OPTION_NAMES) - OPTIONS_TUNE_LACKS),
        ),
    ),
    "partition": (
        "plot how many rows of each class every client holds",
        on_data("cli.commands.fitting:partition"),
        (*options_named(DATA_OPTION_NAMES | {"overwrite"}), FIGURE_FILE_OPTION),
    ),
    "predict": (
        "predict new rows with a saved run",
        load("cli.commands.predict:predict"),
        PREDICT_OPTIONS,
    ),
    "conformal": (
        "calibrate prediction sets on test rows, and report their coverage",
        load("cli.commands.conformal:measure"),
        CONFORMAL_OPTIONS,
    ),
    "regress": (
        "fit a Bayesian multilevel regression from a formula",
        load("cli.commands.regress:regress"),
        REGRESS_OPTIONS,
    ),
    "check": (
        "list all problems of the clients' files before a study",
        load("cli.commands.check:check"),
        CHECK_OPTIONS,
    ),
    "describe": (
        "describe the clients' tables by sums and counts",
        load("cli.commands.describe:describe"),
        DESCRIBE_OPTIONS,
    ),
    "benefit": (
        "estimate the benefit of federation for each client",
        load("cli.commands.benefit:benefit"),
        (RUN_FOLDER, SCORE_OPTION),
    ),
    "report": (
        "write an HTML report about a run or a comparison",
        load("cli.commands.report:report"),
        (RUN_FOLDER, REPORT_TITLE_OPTION),
    ),
    "course": (
        "write a course: notebooks with tests, slides, project, exam",
        load("cli.commands.course:course"),
        COURSE_OPTIONS,
    ),
}

WAITING: tuple[CommandOption, ...] = (  # for sites
    CommandOption("--min-sites N", COUNT, "Smallest number of sites in a round (default: all)."),
    CommandOption(
        "--timeout S", POSITIVE, "Seconds to wait for sites and for their replies.", 600.0
    ),
    CommandOption(
        "--out DIR", PATH, "Output directory; a run that exists there is resumed (default: run)."
    ),
    CommandOption("--quiet", FLAG, "Print the result tables only.", False),
)
CA = CommandOption(
    "--ca FILE", PATH, "Certificate of the authority that signed the server certificate."
)
RULES = CommandOption(
    "--rules FILE.toml",
    PATH,
    "Rules that messages of a site must satisfy (default: those of pyrofl.SiteRules).",
)
SITE: tuple[CommandOption, ...] = (  # of a site
    CommandOption("--data FILE.csv", REQUIRED, "Rows of the site."),
    CommandOption("--name NAME", TEXT | {"required": True}, "Unique name of the site."),
    CommandOption("--state DIR", REQUIRED, "Directory for client states and the log."),
    CommandOption("--study FILE.yaml", PATH, "The site's copy of the study file.", "study.yaml"),
    RULES,
    CommandOption("--rejoin", FLAG, "Rejoin as a new client if the state was lost.", False),
    CommandOption(
        "--min-scored-rows N",
        COUNT,
        "Send a client's scores only if it has at least this number of test rows.",
        MIN_SCORED_ROWS,
    ),
    CommandOption("--no-scores", FLAG, "Send no scores; losses are still sent.", False),
)
KEY = CommandOption("--key FILE", PATH, "Private key of the site's node.")
SHOW = CommandOption("--show", FLAG, "Print what would be sent, and exit.", False)
STUDY = CommandOption("study FILE.yaml", PATH, "Study file, or a folder with study.yaml.")
STUDIES: dict[str, tuple[str, tuple[CommandOption, ...]]] = {
    "new": (
        "write a study file and example data",
        (CommandOption("folder DIR", PATH, "Folder of the study."),),
    ),
    "check": (
        "list all problems of sites' tables before a study, also by its data dictionary",
        (
            STUDY,
            CommandOption("files PATH", PATH | {"nargs": "+"}, "CSV files, or folders of them."),
            RULES,
        ),
    ),
    "run": (
        "run a study in one process; each file of a folder has the rows of one site",
        (
            STUDY,
            CommandOption(
                "--data DIR", PATH, "Folder with a CSV file for each site (default: sites)."
            ),
            RULES,
            *WAITING[2:],
        ),
    ),
    "up": (
        "simulate a study on this machine by Flower; each file in sites has the rows of one site",
        (
            STUDY,
            CommandOption("--sites N", COUNT, "Number of sites to simulate: the first N files.", 3),
            RULES,
            *WAITING,
        ),
    ),
    "serve": (
        "run the server of a study whose sites are on other machines",
        (
            STUDY,
            CommandOption(
                "--sites N", COUNT, "Number of sites that must be connected before round one.", 3
            ),
            CommandOption("--host ADDRESS", TEXT, "Address to listen on.", "127.0.0.1"),
            CommandOption("--port PORT", PORT, "Port to listen on.", 8443),
            CommandOption("--cert FILE", PATH, "Server certificate."),
            CommandOption("--cert-key FILE", PATH, "Private key of the server certificate."),
            CA,
            CommandOption(
                "--nodes DIR", PATH, "Directory with the public keys of the sites' nodes, NAME.pub."
            ),
            *WAITING,
        ),
    ),
    "join": (
        "connect a site to a server and train on the site's rows",
        (
            CommandOption("server HOST:PORT", TEXT, "Address of the server."),
            *SITE,
            KEY,
            CA,
            SHOW,
        ),
    ),
    "exchange": (
        "run the server of a study by files, without network; repeat it after each reply",
        (
            STUDY,
            CommandOption(
                "--nodes DIR", REQUIRED, "Directory with public keys of sites, NAME.pub."
            ),
            CommandOption("--key FILE", REQUIRED, "Private key of the server."),
            CommandOption(
                "--messages DIR",
                PATH,
                "Directory of requests and of replies that arrived (default: OUT/messages).",
            ),
            CommandOption(
                "--without NAME,...", TEXT, "Sites that the open exchange does not wait for."
            ),
            CommandOption(
                "--ask-again NAME", TEXT, "Site that receives its requests again, from the first."
            ),
            *WAITING[2:],
        ),
    ),
    "answer": (
        "answer a request of `exchange` in a file, after a look at what leaves",
        (
            CommandOption("request FILE.json", PATH, "Request of the server."),
            *SITE,
            CommandOption("--key FILE", REQUIRED, "Private key of the site."),
            CommandOption("--server-key FILE.pub", REQUIRED, "Public key of the server."),
            CommandOption(
                "--out FILE.json", PATH, "Reply (default: in the folder of the request)."
            ),
            CommandOption("--yes", FLAG, "Write the reply without a question.", False),
            SHOW,
        ),
    ),
    "rehearse": (
        "attack a site's own messages in a study with a formula; nothing is sent",
        (
            STUDY,
            CommandOption("--data FILE.csv", REQUIRED, "Rows of the site."),
            CommandOption("--name NAME", TEXT, "Name of the site.", "site"),
            RULES,
        ),
    ),
    "predict": (
        "predict new rows at a site with the client states stored there",
        (
            CommandOption("folder DIR", PATH, "State directory of the site (--state of join)."),
            CommandOption(
                "--rows FILE.csv",
                REQUIRED,
                "Rows to predict, with the feature columns of training.",
            ),
            CommandOption("--out FILE.csv", REQUIRED, "Output file with one line per row."),
            CommandOption("--method NAME", TEXT, "Method; needed if the study has several."),
            CommandOption(
                "--client NAME",
                TEXT,
                "Client; needed if the site has several and the rows do not identify them.",
            ),
            CommandOption("--model VIEW", TEXT, "Model: personal, global or ensemble."),
            CommandOption(
                "--draws S",
                COUNT,
                "Number of posterior draws to average over (default: no draws; the guide's mean).",
            ),
            CommandOption("--overwrite", FLAG, "Overwrite an existing file.", False),
        ),
    ),
}


class Parser(ArgumentParser):
    """Argument parser that reports errors in one line, and refuses abbreviated options."""

    def __init__(self, **options: Any) -> None:
        """Create a parser; an abbreviation would change its meaning with a new option."""
        super().__init__(**options, allow_abbrev=False)

    def print_help(self, file: Any = None) -> None:
        """Print the help text of a command; raise an error if it cannot be written."""
        show(self.format_help().rstrip("\n"))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse command-line arguments; reject --flag=--, which argparse would misread."""
        for word in sys.argv[1:] if args is None else args:
            if re.fullmatch(r"--[\w-]+=--", word):
                self.error(f"argument {word.partition('=')[0]}: found '--'; expected a value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit the process with a one-line error message and exit code 2."""
        if unknown := re.fullmatch(r"unrecognized arguments: (--[\w-]+)=?([^ ]*) ?(.*)", message):
            message += remedy(unknown[1], unknown[2] or unknown[3].partition(" ")[0])
        self.exit(2, complaint(f"{message}; see {self.prog} --help"))


def remedy(flag: str, value: str) -> str:
    """Return the end of the message that refuses an unknown option: what it may stand for."""
    flags = [row.flag for row in options().values()]
    name = flag.removeprefix("--").replace("-", "_")
    if flag in flags:
        return f"; other commands have {flag}, and this one has not"
    if name in RENAMED:
        return f"; it is --{RENAMED[name].replace('_', '-')} now"
    if is_method_argument(name):
        return f"; {name} is a setting of methods, use --set {name}={value or 'VALUE'}"
    near = get_close_matches(flag, flags, 1)
    return f"; did you mean {near[0]}?" if near else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a `pyrofl` command and return its exit code.

    0 if it is done, 2 if it was refused before any work, 3 if a run failed on its way, 4 if a run
    made all its rounds, and diverged or aggregated no update, 130 if it was interrupted. What went
    wrong is reported in one line.

    Args:
        argv: the words after `pyrofl`; None takes those of the process.
    """
    words = sys.argv[1:] if argv is None else argv
    return ended(lambda: parser().parse_args(with_config(words)))


def with_config(words: Sequence[str]) -> list[str]:
    """Insert the options from the --config file before those on the command line."""
    words = list(words)
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--config"), None)
    if at is None or words[0] not in ("run", "compare", "tune") or "--help" in words:
        return words
    path = words[at].partition("=")[2] or next(iter(words[at + 1 : at + 2]), "")
    values = read_config(expand_home(path))
    settings = words_of({"settings": values.pop("settings", None)})[1:]
    refuse_repeated(settings, f"--config {path}")
    methods = values.pop("methods", [])
    own = [row.name for row in COMMANDS[words[0]][2]]
    parsed = parser().parse_args(words)
    over = {word.partition("=")[0] for word in parsed.settings}
    values["settings"] = [word for word in settings if word.partition("=")[0] not in over]
    words_of_flags = words_of({name: value for name, value in values.items() if name in own})
    if not parsed.methods:
        words_of_flags = [
            *([methods] if isinstance(methods, str) else map(str, methods)),
            *words_of_flags,
        ]
    # An option follows, so that a method is not read as one more value of the last one.
    return [words[0], *words_of_flags, f"--config={path}", *words[1:]]


def parser() -> ArgumentParser:
    """Build the argument parser of the command line with all subcommands."""
    what: dict[str, Any] = {"description": "Bayesian and personalized federated learning"}
    what |= {"formatter_class": RawDescriptionHelpFormatter, "epilog": FIRST}
    top = Parser(prog="pyrofl", **what)
    top.set_defaults(do=lambda args: top.print_help())
    top.add_argument("--version", action="version", version=f"pyrofl {pyrofl.__version__}")
    add = top.add_subparsers(metavar="COMMAND").add_parser
    for name, (about, do, rows) in COMMANDS.items():
        epilog = "examples:\n  " + EXAMPLES[name].replace("\n", "\n  ")
        describe(add(name, help=about, **what | {"description": None, "epilog": epilog}), do, rows)
    sites = add("study", help="run a study whose rows stay at sites: by Flower, files or here")
    add = sites.add_subparsers(required=True, metavar="COMMAND").add_parser
    for name, (about, rows) in STUDIES.items():
        module = {"check": "table_check", "run": "one_process"}.get(name, name)
        module = "commands" if name in ("new", "up", "serve", "join") else module
        describe(add(name, help=about), load(f"flower.{module}:{name}"), rows)
    return top


def describe(
    command: ArgumentParser, do: Callable[[Namespace], None], rows: Sequence[CommandOption]
) -> None:
    """Add arguments, with their help sections, to the parser of a subcommand."""
    groups: dict[str | None, Any] = {None: command}
    for row in rows:
        text = row.text
        if row.default and "(default" not in text:
            text = f"{text.removesuffix('.')} (default: %(default)s){'.' * text.endswith('.')}"
        if row.section not in groups:
            groups[row.section] = command.add_argument_group(row.section)
        metavar = row.words.partition(" ")[2]
        more = row.kind | ({"metavar": metavar} if metavar else {})
        groups[row.section].add_argument(row.flag, default=row.default, help=text, **more)
    command.set_defaults(do=do)
