"""Settings of `pyrofl run`, `compare` and `tune`, as one frozen dataclass.

Its fields are the options of the command line, the keys of a file for --config, what run.json
holds under "experiment", and what must be equal when a run is resumed.
"""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, Self, get_type_hints

from pyrofl.arguments import RENAMED, Count, PositiveShare, ProperShare, Share, ShareBelowOne, Whole
from pyrofl.choices import Engine, Logger, Metric, Missing, OnBadMessage, Scaling, Until
from pyrofl.experiments.options import (
    ArvizGroups,
    Clients,
    CommandOption,
    Few,
    Path,
    Seed,
    Settings,
    Threads,
    kind_of,
)
from pyrofl.files.run_folder import CHECKPOINT

SECTIONS = {
    "data": "Data",
    "target": "Tables (csv:PATH; --target and --client-column also with npz:PATH)",
    "class_weights": "Partition",
    "net": "Training",
    "eval_every": "Output",
    "chunk_size": "Execution",
    "seeds": "Seeds and tuning",
}
"""First field -> heading in the help of it and those that follow."""
NUM_EVALUATIONS = 20  # of a run, without --eval-every
NUM_TRIALS = 9  # settings of every method, without --trials
MAX_UNREQUESTED = 5_000_000  # numbers in groups of posterior.nc without --arviz-groups
UNTOLD = (
    *("methods", "seed", "seeds", "out", "overwrite", "resume", "quiet", "tune", "over", "trials"),
    *("metric", "validation_fraction", "tune_seeds"),  # of the choice of settings
)
PRIVACY = (
    "Differential privacy: clip client updates and add noise. Optional values are delta=, "
    "max_weight=, where=server or where=client, and seed=, which makes the noise repeatable and "
    "therefore not private."
)
GROUPS = (
    "ArviZ groups of posterior.nc, or all (default: all; only posterior,sample_stats if the other "
    f"groups have more than {MAX_UNREQUESTED:,} numbers)."
)


def option(
    metavar: str | None, text: str, default: Any = None, flag: str = "", *, resumable: bool = False
) -> Any:
    """Return a dataclass field of `Experiment` that is also a command-line option.

    The help is a noun phrase with a full stop. A flag is given where it is not the field's name.
    A resumable field may differ when a run is resumed.
    """
    more = {"metavar": metavar, "text": text, "flag": flag, "resumable": resumable}
    return field(default=default, metadata=more)


free = partial(option, resumable=True)  # may differ when a run is resumed


@dataclass(frozen=True)
class Experiment:
    """Settings of one or several fits: methods, data, partition, training, output, execution."""

    methods: tuple[str, ...] = field(default=(), metadata={"resumable": True})
    # Data
    data: Path = option(
        "NAME", "Name of a data set (see pyrofl list data), csv:PATH or npz:PATH.", "digits"
    )
    data_dir: Path | None = free("DIR", "Download directory (default: ~/.cache/pyrofl).")
    # Tables
    target: str | None = option("COLUMN", "Column to predict.")
    client_column: str | None = option("COLUMN", "Column that identifies the client.")
    features: str | None = option("COLUMN,...", "Feature columns (default: all others).")
    categories: str | None = option("COLUMN,...", "Categorical feature columns.")
    likelihood: str | None = option("NAME", "Likelihood (default: inferred from the target).")
    missing: Missing | None = option(
        None,
        "What to do with missing values: error (refuse them), drop (omit their rows) or impute "
        "(use the mean, and add an indicator column) (default: error).",
    )
    scaling: Scaling | None = option(None, "Scaling of numeric columns (default: standardize).")
    test_fraction: ShareBelowOne | None = option(
        "SHARE", "Test fraction of each client (default: 0.2)."
    )
    test_column: str | None = option("COLUMN", "Column that marks test rows.")
    test_last: str | None = option("COLUMN", "Time column; the latest rows are test rows.")
    row_weights: str | None = option("COLUMN", "Column with the weights of training rows.")
    # Partition
    class_weights: str | None = option("W", "Class weights: balanced or CLASS=WEIGHT,...")
    per_class: Count | None = option(
        "N", "Number of training rows of each class, over all clients (default: all)."
    )
    partition: Path | None = option(
        "SPEC",
        "Partition of the rows into clients: a name (see pyrofl list partitions) or FILE.py:NAME "
        "(default: groups for tables with a client column, slices:5 otherwise).",
    )
    clients: Count | None = option(
        "N", "Number of training clients (default: 20, or one per value of the client column)."
    )
    held_out: Clients = option(
        "N|A,B", "Clients excluded from training: their number, or their names.", 0
    )
    server_data: Path | None = option(
        "DATA",
        "Unlabeled rows for the server: a number or fraction of the training rows, or a data set.",
    )
    test: str = option(
        "POLICY",
        "Selection of the test rows of each client (see pyrofl list tests).",
        "same_shares",
    )
    seed: Seed = free("S", "Random seed.", 0)
    split_seed: Seed | None = free("S", "Seed of the partition (default: --seed).")
    # Training
    net: Path | None = option(
        "SPEC",
        "Network: a name (see pyrofl list networks) or FILE.py:NAME (default: set by the data).",
    )
    rounds: Count = free("N", "Communication rounds.", 20)
    stop_when: Until | None = free(None, "Stop early on convergence or divergence.")
    init_seed: Seed | None = free(
        "S", "Seed of the initial server and client states (default: --seed)."
    )
    participation_seed: Seed | None = free(
        "S", "Seed of client sampling and dropout (default: --seed)."
    )
    noise_seed: Seed | None = free(
        "S", "Seed of minibatches and Monte Carlo noise (default: --seed)."
    )
    participation: str = option(
        "SPEC",
        "Clients per round: everyone, a number, a fraction, or bernoulli:P, which includes each "
        "client with probability P.",
        "everyone",
    )
    prior: str | None = option(
        "DIST",
        "Prior, such as student_t(3), Laplace or Normal(0, 1); the same as --set prior=DIST.",
    )
    guide: str | None = option(
        "FAMILY",
        "Guide, such as full_covariance or low_rank(3); the same as --set guide=FAMILY.",
    )
    settings: Settings = free(
        "NAME=VALUE",
        "Settings of the method (see pyrofl explain METHOD); METHOD.NAME=VALUE sets those of one "
        "method among several.",
        (),
        flag="--set",
    )
    drop_rate: Share = option("P", "Probability that a client drops out after training.", 0.0)
    min_work: PositiveShare = option(
        "SHARE",
        "Smallest fraction of its epochs that a client completes; fractions are drawn uniformly "
        "between it and 1.",
        1.0,
    )
    privacy: str | None = option("clip=C,noise_multiplier=Z", PRIVACY)
    on_bad_message: OnBadMessage = free(
        None, "What to do with an invalid client message: reject it, or raise an error.", "reject"
    )
    discard_messages: bool = option(
        None,
        "Aggregate each message when it arrives, to save memory; for methods whose server computes "
        "means.",
        False,
    )
    # Output
    eval_every: Count | None = free("N", "Rounds between evaluations (default: rounds / 20).")
    draws: Count | None = option(
        "S",
        "Number of posterior draws to average for predictions (default: no draws; predictions use "
        "the guide's mean).",
    )
    posterior_draws: Whole = free(
        "S", "Number of posterior draws in posterior.nc; 0 writes no file.", 100
    )
    arviz_groups: ArvizGroups | None = free("GROUP,...", GROUPS)
    save_predictions: bool = free(
        None, "Write rows.csv, with one line per test row; by default only if it is small.", False
    )
    out: Path | None = free(
        "DIR",
        "Output directory (default: runs/METHOD-SEED, or runs/compare for pyrofl compare, or "
        "runs/tune-METHOD-SEED for pyrofl tune).",
    )
    checkpoint_every: Count | None = free("N", f"Number of rounds between writes of {CHECKPOINT}.")
    log: Logger | None = free(
        None, "Log every round with TensorBoard (in the output directory) or MLflow."
    )
    resume: bool = free(None, "Resume from the last checkpoint.", False)
    overwrite: bool = free(None, "Overwrite existing files.", False)
    quiet: bool = free(None, "Print the result table only.", False)
    # Execution
    chunk_size: Count | None = option(
        "C",
        "Number of clients that train together in one vectorized batch (default: chosen from the "
        "sizes of the state and of the processor's cache).",
    )
    record: bool = free(
        None,
        "Record the updates of a network with your own forward, which is faster; it may depend on "
        "its tensors alone.",
        False,
    )
    engine: Engine = free(
        None, "Where clients train: in this process (local), or in several with Ray.", "local"
    )
    workers: Few | None = free("N", "Ray workers (default: one per core or GPU).")
    threads: Threads = option("N", "CPU threads.", 1)
    device: str = option("NAME", "PyTorch device.", "cpu")
    # Tuning
    seeds: Few = free("N", "Runs of each method, with consecutive seeds.", 3)
    tune: bool = free(None, "Select settings first, as pyrofl tune does.", False)
    trials: Few | None = free(
        "N",
        f"Number of combinations of settings to try for each method (default: {NUM_TRIALS} of "
        "those that the method proposes; all combinations if pyrofl tune has --over).",
    )
    metric: Metric | None = free(
        None,
        "Metric that selects settings (default: accuracy, or nll where the target is numeric).",
    )
    validation_fraction: ProperShare = free(
        "SHARE", "Validation fraction of every client's training rows.", 0.2
    )
    tune_seeds: Count = free(
        "N",
        "Number of seeds with which the best combinations are run again before one is chosen.",
        3,
    )
    over: Settings = free("NAME=VALUE,...", "Values to try; all combinations are tried.", ())

    @classmethod
    def of(cls, given: Namespace | Mapping[str, Any]) -> Self:
        """Build the settings from parsed command-line options, or from the dict of `to_json`."""
        values: dict[str, Any] = dict(given) if isinstance(given, Mapping) else vars(given)
        if isinstance(given, Namespace):  # which holds the command's function as well
            values = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        values |= {n: tuple(v) for n, v in values.items() if isinstance(v, list)}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return all settings of the experiment as JSON-compatible values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def key(self) -> dict[str, Any]:
        """Return the settings that must be unchanged when a run is resumed."""
        values = self.to_json()
        return {one.name: values[one.name] for one in fields(self) if not one.metadata["resumable"]}

    def with_programs(self) -> Self:
        """Return an experiment that has its prior and guide among the settings of methods."""
        given = {"prior": self.prior, "guide": self.guide}
        words = [f"{name}={text}" for name, text in given.items() if text]
        return replace(self, settings=(*self.settings, *words), prior=None, guide=None)

    @property
    def evaluation_interval(self) -> int:
        """Number of rounds between evaluations."""
        return self.eval_every or default_interval(self.rounds)

    def words(self, without: Sequence[str] = ()) -> list[str]:
        """Return command-line options that reproduce the settings, except the names of methods."""
        return words_of({n: value for n, value in vars(self).items() if n not in without})

    def command(self, words: Sequence[str], seed: int) -> str:
        """Return a `pyrofl` command line that begins with `words`, with these settings."""
        return shlex.join(["pyrofl", *words, *self.words(UNTOLD), "--seed", str(seed)])


def default_interval(rounds: int) -> int:
    """Return the default number of rounds between evaluations."""
    return max(1, rounds // NUM_EVALUATIONS)


@cache
def options() -> dict[str, CommandOption]:
    """Return the command-line options of an experiment: field name -> option."""
    hints, rows, section = (
        get_type_hints(Experiment, include_extras=True),
        dict[str, CommandOption](),
        "",
    )
    for one in fields(Experiment):
        section = SECTIONS.get(one.name, section)
        if one.name != "methods":
            words = one.metadata["flag"] or f"--{one.name.replace('_', '-')}"
            words += f" {one.metadata['metavar']}" if one.metadata["metavar"] else ""
            # argparse extends lists, and must not extend the default of the field.
            default = list(one.default) if isinstance(one.default, tuple) else one.default
            kind = kind_of(hints[one.name]) | {"dest": one.name}
            rows[one.name] = CommandOption(words, kind, one.metadata["text"], default, section)
    return rows


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Convert settings to command-line options; None, False and empty lists are omitted.

    >>> words_of({"per_class": 12, "resume": True, "settings": {"lr": 0.1, "batch": None}})
    ['--per-class', '12', '--set', 'lr=0.1', 'batch=none', '--resume']
    """
    words = list[str]()
    for name, row in options().items():
        value = values.get(name)
        if value is None or value is False or value == () or value == []:  # 0 is a value
            continue
        if isinstance(value, Mapping):
            value = [f"{n}={as_text(v)}" for n, v in value.items()]
        if value is True and row.kind.get("action") == "store_true":
            words.append(row.flag)
        elif row.kind.get("action") == "extend":
            words += [row.flag, *([value] if isinstance(value, str) else map(str, value))]
        else:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else as_text(value)
            words += [f"{row.flag}={text}"] if text.startswith("-") else [row.flag, text]
    return words


def as_text(value: Any) -> str:
    """Format a YAML or JSON value as it is written on the command line."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def read_config(path: str) -> dict[str, Any]:
    """Read settings from a YAML file, or from the run.json of a run: field name -> value."""
    from pyrofl.files.yaml_files import read_yaml

    try:
        mapping = read_yaml(path)  # JSON is YAML
    except ValueError as error:
        raise ValueError(f"--config {error}") from error
    if isinstance(mapping, dict) and isinstance(mapping.get("experiment"), dict):
        mapping = mapping["experiment"]
    if not isinstance(mapping, dict):
        raise ValueError(f"--config {path} holds no mapping; expected lines such as rounds: 20")
    names = {row.flag.removeprefix("--"): name for name, row in options().items()}
    names |= {one.name: one.name for one in fields(Experiment)}  # settings is --set, as in run.json
    for name in mapping:
        if name not in names:
            near = [RENAMED[name]] if name in RENAMED else get_close_matches(str(name), names, 1)
            like = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--config {path} holds {name!r}, which is no option{like}")
    values = dict[str, Any]()
    for name, value in mapping.items():
        if names[name] in values:
            raise ValueError(f"--config {path} gives {name} by two names; expected one of them")
        values[names[name]] = value
    return values
