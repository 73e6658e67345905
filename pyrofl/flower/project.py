"""Settings shared by the server and all sites of a study, from its study file."""

from __future__ import annotations

import os
import re
import runpy
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pyrofl.arguments import Count, ShareBelowOne, Whole, check_fields, check_name
from pyrofl.choices import LIKELIHOODS
from pyrofl.data import Federation
from pyrofl.data.outlines import outline
from pyrofl.data.roster import names_of
from pyrofl.data.tables.columns import Column, complete, read
from pyrofl.data.tables.dictionary import ColumnEntry, read_dictionary
from pyrofl.experiments.methods import Scheduled, methods
from pyrofl.experiments.regressions import read_priors
from pyrofl.experiments.tasks import Task, network
from pyrofl.files.yaml_files import read_yaml
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.transport.message_checks import Flat
from pyrofl.models.regression.families import family_of
from pyrofl.models.regression.formula import read_all
from pyrofl.models.regression.used_columns import formula_columns, number_columns
from pyrofl.nouns import USUAL, Noun, Nouns, is_plain, use

STUDY_FILE = "study.yaml"
DTYPES = {"float32": torch.float32, "float64": torch.float64}
UNCOMPARED_FIELDS = ("file", "server_data", "question", "unit")  # of one side: not compared
REGRESSION_METHOD = "regression"  # name of the method of a study with a formula
NETWORK_FIELDS = ("methods", "features", "target", "classes", "likelihood", "settings", "net")


@dataclass(frozen=True)
class Project:
    """Settings of a study, from its study file."""

    file: Path  # from which it was read
    # Names as `pyrofl list` has them, or "FILE.py:NAME", a function of a federation without rows
    # (`pyrofl.data.outline`) that returns a method. All are trained side by side.
    methods: tuple[str, ...] = ()
    features: tuple[str, ...] = ()  # columns of x, in this order
    target: str = ""  # column of y
    formula: str = ""  # of a regression, instead of methods, features and target
    family: str = "gaussian"  # of the regression, and so are the next three
    link: str = ""
    priors: tuple[str, ...] = ()  # as --prior of `pyrofl regress`
    question: str = ""  # title of the page
    unit: Noun | None = None  # what a site and its rows are, as a hospital
    columns: Mapping[str, ColumnEntry] = field(default_factory=dict)  # data dictionary
    classes: tuple[str, ...] = ()  # at every site the same; none for a number
    likelihood: str = "categorical"  # see `pyrofl list`
    settings: tuple[str, ...] = ()  # of methods, as --set
    net: str = "softmax"  # as --net
    client_column: str = ""  # column that identifies the client, if a site has several
    rounds: Count = 10  # at most; a method stops once it has converged
    corrected: bool = True  # whether clients report likelihoods at the server's last draws
    seed: Whole = 0  # of all random numbers
    dtype: Literal["float32", "float64"] = "float32"
    test_fraction: ShareBelowOne = 0.2  # of each client's rows
    server_data: str = ""  # CSV file of the server alone: rows without target to learn from

    @classmethod
    def read(cls, path: str | Path) -> Project:
        """Read and validate the settings of a study, from its file or from study.yaml in a folder.

        Raises:
            ValueError: if the file cannot be read, or an entry is unknown or invalid.
        """
        file = Path(path, STUDY_FILE) if os.path.isdir(path) else Path(path)
        if not os.path.isfile(file):
            raise ValueError(
                f"{file} is no file; expected a study file, as `pyrofl study new` writes it"
            )
        entries = read_yaml(file, yes_is_word=True)
        if not isinstance(entries, dict):
            raise ValueError(f"{file} has no entries; expected lines such as `rounds: 10`")
        try:
            return cls._of(file, {str(n).replace("-", "_"): v for n, v in entries.items()})
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def _of(cls, file: Path, entries: dict[str, Any]) -> Project:
        """Build the settings from entries of a study file; raise ValueError for invalid ones."""
        kinds = {f.name: str(f.type) for f in fields(cls) if f.name != "file"}
        if "levels" in entries:
            raise ValueError(
                "levels is no entry; expected them under columns, as `sex: {levels: [f, m]}`"
            )
        for name in entries:
            check_name(name, list(kinds), "entry")
        if entries.get("formula"):
            entries = _of_formula(entries)
        for name in () if entries.get("formula") else ("methods", "features", "target"):
            if not entries.get(name):
                raise ValueError(f"{name} is missing; expected it, or a formula")
        for name in [name for name in entries if kinds[name].startswith("tuple")]:
            entries[name] = names_of(name, _words_of(entries[name]))
        if "unit" in entries:
            entries["unit"] = Noun.of(entries["unit"])
        if "columns" in entries:
            entries["columns"] = read_dictionary(entries["columns"])
        project = cls(file, **entries)
        project._check()
        return project

    def _check(self) -> None:
        """Raise ValueError if a setting of the study has a wrong type or is out of range."""
        check_fields(self)
        used = self.used_columns  # refuses a formula or family that cannot be read
        self._compare_names(used)
        if self.formula:
            try:
                read_priors(self.priors)
            except ValueError as error:
                raise ValueError(str(error).replace("--prior", "priors", 1)) from error
            return
        categorical = self.likelihood == "categorical"
        fits = {
            "likelihood": (
                self.likelihood.partition(":")[0] in LIKELIHOODS,
                f"one of {', '.join(LIKELIHOODS)}",
            ),
            "classes": (
                len(self.classes) > 1 if categorical else not self.classes,
                "two names or more for categorical, and none for others",
            ),
            "features": (
                not {self.target, self.client_column} & {*self.features},
                "no target and no client column among them",
            ),
        }
        for name, (holds, expected) in fits.items():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {expected}")
        names_of("names of methods", list(self.labels))

    def _compare_names(self, used: Sequence[str]) -> None:
        """Raise ValueError if a column has two spellings, in the dictionary and in its use.

        The dictionary may have further columns.
        """
        others = [name for name in self.columns if name not in used]
        for name in used:
            if name not in self.columns and (near := get_close_matches(name, others, 1)):
                place = "the formula" if self.formula else "the study"
                raise ValueError(
                    f"{place} has {name}, and columns has {near[0]}; expected one spelling, or an "
                    "entry of each"
                )

    @property
    def folder(self) -> Path:
        """Folder of the study file, which may have further files, such as programs."""
        return self.file.parent

    @property
    def nouns(self) -> Nouns:
        """Nouns of the study's texts: clients are named by their column, if it is a plain word."""
        site, column = self.unit or USUAL.site, self.client_column
        if column:
            return Nouns(Noun.of(column) if is_plain(column) else USUAL.client, site)
        return Nouns(self.unit or USUAL.client, site)

    @property
    def client_name(self) -> str:
        """Name of the clients in the formula: their column, the unit of a term, or "client"."""
        unit = self.unit.one if self.unit else "client"
        groups = " ".join(re.findall(r"\|([^()]+)\)", self.formula))
        return self.client_column or (unit if unit in re.findall(r"[\w.]+", groups) else "client")

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels of the dictionary, as --levels of `pyrofl regress`."""
        used = {name: self.columns[name] for name in self.used_columns if name in self.columns}
        return tuple(f"{name}={','.join(one.levels)}" for name, one in used.items() if one.levels)

    @property
    def groups(self) -> list[str]:
        """Columns of the formula's groups, as `Klinik` of `(1 | Klinik)`."""
        if not self.formula:
            return []
        read = read_all(self.formula, family_of(self.family).auxiliary)
        return [name for group in read.groups for name in group.factors]

    @property
    def used_columns(self) -> list[str]:
        """Columns of the sites' tables that the study uses."""
        if self.formula:
            return formula_columns(self.formula, self.family, self.client_name)
        client = self.client_column
        return [*self.features, self.target, *([client] if client else [])]

    @property
    def number_columns(self) -> list[str]:
        """Columns that must hold numbers."""
        if self.formula:
            return number_columns(self.formula, self.family)
        return [*self.features, *([] if self.classes else [self.target])]

    @property
    def type(self) -> torch.dtype:
        """Floating-point type of all computations of the study."""
        return DTYPES[self.dtype]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the study's methods as they appear in results."""
        if self.formula:
            return (REGRESSION_METHOD,)
        return tuple(one.rpartition(":")[2] for one in self.methods)

    @property
    def agreed(self) -> Flat:
        """Return the settings of the study that must be equal on the server and at all sites."""
        entries = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in UNCOMPARED_FIELDS
        }
        entries["columns"] = {name: entry.facts for name, entry in self.columns.items()}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in entries.items()}

    def outline(self, clients: int, rows: int = 1) -> Federation:
        """Return a federation without data that has the study's shapes, for building methods.

        Its largest client has the given number of rows.
        """
        names, sizes = [f"client {j}" for j in range(clients)], [rows, *[1] * (clients - 1)]
        return outline(names, sizes, (len(self.features),), (), self.classes, self.type)

    def build(self, clients: int, rows: int = 1, *, server: bool = False) -> dict[str, Scheduled]:
        """Build all methods of the study by label, identically on the server and at the sites.

        Args:
            clients: number of clients.
            rows: largest number of rows of a client, for programs with effects of rows.
            server: whether the server builds them, with its unlabeled rows.
        """
        data = self.outline(clients, rows)
        spare: Tensor | None = data.x[:1].clone()  # sites need no more than its shape
        if server:
            spare = self.spare() if self.server_data else None
        data = replace(data, server_data=spare)
        net = network(self._here(self.net), tuple(data.x.shape[1:]), len(self.classes) or 1)
        seeds = Seeds(self.seed, self.seed, self.seed)
        task = Task(self.seed, self.seed, seeds, data, net, self.likelihood)
        named = [one for one in self.methods if ".py:" not in one]
        methods_by_label = dict(methods(named, self.settings, task, self.rounds)) if named else {}
        own = {m.rpartition(":")[2]: self._own(m, data) for m in self.methods if m not in named}
        return {label: (methods_by_label | own)[label] for label in self.labels}

    def read_columns(self, path: str, owners: Sequence[str] = ()) -> dict[str, Column]:
        """Read a CSV file's columns; raise ValueError if a required column has missing values.

        Required are the features and the columns `owners`.
        """
        table = read(path)
        for name in (*self.features, *owners):
            check_name(name, list(table), f"column in {path}:")
        complete([table[name] for name in (*self.features, *owners)], "error")
        return table

    def x(self, columns: Mapping[str, Column]) -> Tensor:
        """Return the feature columns of a table in the study's order and type, [N, columns]."""
        for name in self.features:
            columns[name].refuse_text("numbers as features")
            columns[name].refuse_odd("write numbers")
        return torch.stack([self.numbers(columns[n]) for n in self.features], 1)

    def numbers(self, column: Column) -> Tensor:
        """Return a column of numbers [N] in the study's type."""
        is_double = self.type == torch.float64
        return torch.from_numpy(column.numbers.copy() if is_double else column.single())

    def spare(self) -> Tensor:
        """Read the features of the server's unlabeled rows, [U, columns]."""
        return self.x(self.read_columns(str(self.folder / self.server_data)))

    def _here(self, spec: str) -> str:
        """Prefix "FILE.py:NAME" with the project folder; return other names unchanged."""
        return str(self.folder / spec) if ".py:" in spec else spec

    def _own(self, spec: str, data: Federation) -> Scheduled:
        """Build a user-defined method with a function in a file of the project."""
        file, _, name = self._here(spec).rpartition(":")
        try:
            method: Scheduled = runpy.run_path(file)[name](data)
            method_schedule(method)(0)
        except (Exception, SystemExit) as error:  # whatever the user's file does wrong
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"method {spec} cannot be made: {reason}") from error
        if not isinstance(method, Method) and not callable(method):
            raise ValueError(f"method {spec} gives {method!r}; expected a Method")
        return method


def of_study(command: Callable[[Namespace], None]) -> Callable[[Namespace], None]:
    """Return a command that reads its study file, as `args.project`, and uses the study's words."""

    @wraps(command)
    def do(args: Namespace) -> None:
        args.project = Project.read(args.study)
        with use(args.project.nouns):
            command(args)

    return do


def _words_of(entry: Any) -> Any:
    """Return a list with its numbers as words, as classes 0 and 1; other entries unchanged."""
    if not isinstance(entry, list):
        return entry
    return [str(w) if type(w) in (int, float) else w for w in entry]


def _of_formula(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a regression; raise ValueError for those of networks."""
    if odd := [name for name in NETWORK_FIELDS if name in entries]:
        name = odd[0].replace("_", "-")
        raise ValueError(f"formula and {name} are given; expected one of them")
    fixed = {"dtype": "float64", "test_fraction": 0.0}
    for name, value in fixed.items():
        if entries.get(name, value) != value:
            raise ValueError(
                f"{name.replace('_', '-')} is {entries[name]!r}; expected {value!r} with a formula"
            )
    return entries | fixed
