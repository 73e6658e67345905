"""Template of a new study: its study file and simulated data of three sites; Flower's app."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyrofl.files import run_folder
from pyrofl.flower.project import STUDY_FILE

SITES = 3
ROWS = (40, 65, 90)

SETTINGS = """\
# What the server and all hospitals agree on. Every hospital needs a copy of this file, and of the
# program it names: only its own copy is run on its rows, and a difference is refused by name.

question: Who recovers?        # title of the page
unit: hospital                 # what has rows, as texts call it; or [SINGULAR, PLURAL]

# A regression, see `pyrofl regress --help`:
formula: recovered ~ age + dose + center(pressure) + (1 | hospital)
family: bernoulli
# priors: ["age=Normal(0, 1)"]

# Instead of a formula, methods (see `pyrofl list`, or FILE.py:NAME, a function data -> Method):
# methods: [pfedvem]
# settings: [epochs=5]         # of methods, or pfedvem.epochs=5 for one of several
# net: softmax                 # network, see `pyrofl list`
# features: [age, dose, pressure]
# target: recovered
# classes: [no, yes]           # of the target; without this line for a number
# likelihood: categorical      # see `pyrofl list`
# test-fraction: 0.2           # of each hospital's rows
# dtype: float32
# server-data: spare.csv       # rows without target, at the server alone

columns:                       # data dictionary, which `check` and `join` compare with the tables
  age: {unit: decades from 60 years, range: [-6, 6]}
  dose: {unit: standard deviations, range: [-6, 6]}
  pressure: {unit: standard deviations, range: [-6, 6]}
  recovered: {levels: [no, yes]}
# client-column: ward          # column that identifies the client, if a hospital has several

rounds: 10                     # at most; a method stops once it has converged
corrected: true                # at the end clients report likelihoods at posterior draws
seed: 0
"""

APP_SETTINGS = """\
[project]
name = "study"
version = "1.0.0"
description = "A study at several sites"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41,<1.43"]

[tool.flwr.app]
publisher = "pyrofl"
fab-format-version = 1
flwr-version-target = "1.41.0"
fab-include = ["study/*.py", "LICENSE"]  # of this folder nothing else is sent to the sites

[tool.flwr.app.components]
serverapp = "study.server_app:app"
clientapp = "study.client_app:app"

[tool.flwr.app.config]
project = ""                   # study file, at the server
out = ""                       # results; "" is run/ in the folder of the study file
sites = 3                      # number of sites
least = 0                      # smallest number of sites in a round; 0: all
timeout = 600.0                # seconds to wait for sites, and for their replies
end = ""                       # file with how the run ended; "" is end.json in the results
"""

APP = '''\
"""The app that Flower starts at {place}."""

from pyrofl.flower.apps import {kind}_app

app = {kind}_app()
'''
PLACES = {"client": "a site", "server": "the server"}

LICENSE = "All rights reserved.\n"


def new(folder: str | Path) -> Path:
    """Create the folder of a study: its study file, and simulated data of three sites."""
    path = run_folder.prepare(folder)
    (path / STUDY_FILE).write_text(SETTINGS, encoding="utf-8")
    (path / "sites").mkdir()
    for number, count in enumerate(ROWS, 1):
        rows = _patients(np.random.default_rng(number), count, shift=number - 2)
        columns = ("age", "dose", "pressure", "recovered")
        run_folder.write_csv(path / f"sites/hospital_{number}.csv", columns, rows)
    return path


def write_app(folder: str | Path) -> Path:
    """Create the folder of the Flower app of a study, for `flwr run`.

    It is the same for all studies: the run's setting `project` is the study file.
    """
    path = Path(folder)
    (path / "study").mkdir(parents=True, exist_ok=True)
    files = {"pyproject.toml": APP_SETTINGS, "LICENSE": LICENSE, "study/__init__.py": ""}
    files |= {f"study/{k}_app.py": APP.format(kind=k, place=at) for k, at in PLACES.items()}
    for name, text in files.items():
        with run_folder.replacing(path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return path


def _patients(random: np.random.Generator, count: int, shift: float) -> list[list[object]]:
    """Simulate patients of a hospital; `shift` changes the fraction that recovers."""
    x = random.normal(size=(count, 3)).round(3)
    odds = x @ [-1.0, 1.5, 0.5] + 0.8 * shift
    recovered = random.random(count) < 1 / (1 + np.exp(-odds))
    return [[*map(float, row), "yes" if r else "no"] for row, r in zip(x, recovered, strict=True)]
