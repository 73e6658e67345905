"""Arguments of the `pyrofl` commands: options, descriptions, defaults and help sections."""

from __future__ import annotations

from collections.abc import Collection

from pyrofl.choices import FAMILIES, RowScore
from pyrofl.experiments.experiment import SECTIONS, options
from pyrofl.experiments.options import (
    COUNT,
    FLAG,
    FRACTION,
    PATH,
    REQUIRED,
    TEXT,
    CommandOption,
    choice,
)


def options_named(names: Collection[str]) -> list[CommandOption]:
    """Return the options of `pyrofl run` and similar commands with the given names."""
    return [row for name, row in options().items() if name in names]


RUN_FOLDER = CommandOption("folder DIR", PATH, "Output directory of pyrofl run or pyrofl compare.")
SCORE_OPTION = CommandOption(
    "--by",
    choice(RowScore),
    "Score to compare by (default: accuracy, or error where the target is numeric).",
)
PREDICT_OPTIONS: tuple[CommandOption, ...] = (
    CommandOption(
        "folder DIR", PATH, "Output directory of pyrofl run, or directory written by Run.save."
    ),
    CommandOption(
        "--data FILE.csv", REQUIRED, "Rows to predict, with the feature columns of training."
    ),
    CommandOption("--out FILE.csv", REQUIRED, "Output file with one line per row."),
    CommandOption("--client NAME", TEXT, "Name of the client to which all rows belong."),
    CommandOption("--client-column COLUMN", TEXT, "Column that identifies the client of each row."),
    CommandOption(
        "--new-client", FLAG, "Predict for a client that did not take part in training.", False
    ),
    CommandOption(
        "--own-rows FILE.csv", PATH, "Labeled rows on which the new client's model is adapted."
    ),
    CommandOption(
        "--model VIEW", TEXT, "Model: personal, global or ensemble (default: set by the method)."
    ),
    CommandOption(
        "--net FILE.py:NAME",
        PATH,
        "Function that builds the run's network (only for your own networks).",
    ),
    CommandOption(
        "--unadapted", FLAG, "Do not adapt the model; the training data are then not needed.", False
    ),
    CommandOption(
        "--draws S", COUNT, "Number of posterior draws to average over (default: as in the run)."
    ),
    CommandOption(
        "--alpha A",
        FRACTION,
        "Add prediction sets that contain the true value with probability 1 - A.",
    ),
    CommandOption("--overwrite", FLAG, "Overwrite an existing file.", False),
)
FORMAT_OPTIONS: tuple[CommandOption, ...] = (  # of CSV files
    CommandOption(
        "--separator MARK",
        {"choices": (",", ";", "|", "tab")},
        "Mark between cells (default: guessed for each file).",
    ),
    CommandOption("--encoding NAME", TEXT, "Encoding of the text (default: guessed)."),
    CommandOption(
        "--decimal MARK", {"choices": (".", ",")}, "Mark before decimals (default: guessed)."
    ),
    CommandOption("--na WORD,...", TEXT, "Further words that stand for missing values."),
)
CHECK_OPTIONS: tuple[CommandOption, ...] = (
    CommandOption(
        "files PATH", PATH | {"nargs": "+"}, "CSV file of each client, or a folder of them."
    ),
    CommandOption("--client-column COLUMN", TEXT, "Column that identifies the client of each row."),
    CommandOption("--formula F", TEXT, "Formula of the study, of whose columns files are checked."),
    CommandOption("--family NAME", TEXT, "Family of the responses.", "gaussian"),
    CommandOption(
        "--columns COLUMN,...", TEXT, "Columns to check (default: those that most files have)."
    ),
    *FORMAT_OPTIONS,
)
DESCRIBE_OPTIONS: tuple[CommandOption, ...] = (
    CommandOption(
        "paths PATH", PATH | {"nargs": "+"}, "CSV file of each client, or a folder of them."
    ),
    CommandOption("--client-column COLUMN", TEXT, "Column that identifies the client of each row."),
    CommandOption(
        "--columns COLUMN,...",
        TEXT,
        "Columns to describe (default: those of the study, or that most files have).",
    ),
    CommandOption(
        "--cross COLUMN,COLUMN", TEXT, "Two columns whose pairs of levels are counted, too."
    ),
    CommandOption(
        "--study FILE.yaml", PATH, "Study file, whose dictionary names columns and levels."
    ),
    CommandOption(
        "--rules FILE.toml",
        PATH,
        "Rules that the counts must satisfy (default: those of pyrofl.SiteRules).",
    ),
    *FORMAT_OPTIONS,
)
CONFORMAL_OPTIONS: tuple[CommandOption, ...] = (
    CommandOption("folder DIR", PATH, "Output directory of pyrofl run."),
    CommandOption(
        "--alpha A", FRACTION, "Probability that a set does not contain the true value.", 0.1
    ),
    CommandOption(
        "--calibration-fraction F",
        FRACTION,
        "Fraction of the test rows used for calibration; the rest measure coverage.",
        0.5,
    ),
    CommandOption(
        "--deterministic",
        FLAG,
        "Build sets without randomization: they are larger and never empty.",
        False,
    ),
    *(row for row in PREDICT_OPTIONS if row.flag in ("--model", "--net", "--draws")),
)
LIST_SECTIONS = ("methods", "data", "partitions", "tests", "networks", "likelihoods")
LIST_SECTION_ARGUMENT = CommandOption(
    "section SECTION",
    {"nargs": "?", "choices": (*LIST_SECTIONS, "settings")},
    f"What to list: {', '.join(LIST_SECTIONS)} or settings (default: a short list of each).",
)
METHOD_ARGUMENT = CommandOption("method METHOD", TEXT, "Method (see pyrofl list methods).")
METHOD_TO_FIT = CommandOption(
    "methods METHOD", {"nargs": "?"} | TEXT, "Method to fit (see pyrofl list methods)."
)
METHODS_TO_FIT = CommandOption(
    "methods METHOD", {"nargs": "*"} | TEXT, "Methods (see pyrofl list methods).", []
)
COURSE_OPTIONS = (
    CommandOption("out OUT", PATH, "New or empty folder for the course."),
    CommandOption(
        "--no-figures",
        FLAG,
        "Leave figures and printed text out of the slides: seconds, not 10 to 15 minutes.",
        False,
    ),
)
FIGURE_FILE_OPTION = CommandOption("--out FIG.png", REQUIRED, "Output file of the figure.")
CONFIG_OPTION = CommandOption(
    "--config FILE",
    PATH,
    "YAML file with options, or a run.json; options on the command line override it.",
)
DATA_OPTION_NAMES = {n for n, row in options().items() if row.section in [*SECTIONS.values()][:3]}
SEEDS_OPTION_NAMES = {n for n, row in options().items() if row.section == SECTIONS["seeds"]}
RUN_OPTION_NAMES = options().keys() - SEEDS_OPTION_NAMES
OPTIONS_TUNE_LACKS = {"stop_when", "privacy", "eval_every", "posterior_draws", "arviz_groups"}
OPTIONS_TUNE_LACKS |= {"save_predictions", "log", "seeds", "tune", "checkpoint_every"}
REPORT_TITLE_OPTION = CommandOption(
    "--question TEXT", TEXT, "Title of the report (default: from the model)."
)
REGRESS_OPTIONS: tuple[CommandOption, ...] = (
    CommandOption("formula FORMULA", TEXT, "Formula, such as 'died ~ age + (1 + age | client)'."),
    CommandOption(
        "--data csv:PATH",
        REQUIRED,
        "Folder with one CSV file for each client, or one file with --client-column.",
    ),
    CommandOption(
        "--client-column COLUMN",
        TEXT,
        "Column that identifies the client; with a folder, its name in the formula (default: "
        "client).",
    ),
    CommandOption(
        "--family NAME", TEXT, f"Family of the responses: {', '.join(FAMILIES)}.", "gaussian"
    ),
    CommandOption("--link NAME", TEXT, "Link of the family (default: the usual one)."),
    CommandOption(
        "--prior NAME=DIST",
        {"nargs": "+", "action": "extend", "dest": "priors"},
        "Priors by name, such as 'age=Normal(0, 1)' or 'sd=HalfNormal(1)' (default: weakly "
        "informative priors, which report.html lists).",
        [],
    ),
    CommandOption(
        "--levels COLUMN=A,B,...",
        {"nargs": "+", "action": "extend", "dest": "levels"},
        "Ordered levels of text columns, such as 'pain=none,mild,severe'; the first is the "
        "reference (default: in the order of the alphabet).",
        [],
    ),
    options()["row_weights"],
    CommandOption("--rounds N", COUNT, "Largest number of rounds (default: until converged)."),
    options()["seed"],
    options()["posterior_draws"]._replace(
        kind=COUNT, text="Number of posterior draws.", default=4000
    ),
    REPORT_TITLE_OPTION,
    CommandOption("--out DIR", PATH, "Output directory (default: runs/regression-SEED)."),
    options()["overwrite"],
    options()["quiet"],
)
