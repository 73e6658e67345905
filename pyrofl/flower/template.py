"""Template of a new Flower study: settings, Flower apps, and simulated data of three sites."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyrofl.files import run_folder

SITES = 3
ROWS = (40, 65, 90)

SETTINGS = """\
# What the server and all sites agree on. Every site needs a copy of this folder, without sites/:
# only the methods of its own copy are run on its rows, and a difference is refused by name.

[tool.pyrofl]
methods = ["pfedvem"]          # see `pyrofl list`, or "FILE.py:NAME", a function data -> Method
settings = []                  # of methods, as "epochs=5", or "pfedvem.epochs=5" for one of several
net = "softmax"                # network, see `pyrofl list`
features = ["age", "dose", "pressure"]   # columns of the sites' CSV files
target = "recovered"
classes = ["no", "yes"]        # of the target; without this line for a number
likelihood = "categorical"     # see `pyrofl list`
# client-column = "ward"       # column that identifies the client, if a site has several
rounds = 10                    # at most; a method stops once it has converged
corrected = true               # at the end clients report likelihoods at posterior draws
seed = 0
dtype = "float32"
test-fraction = 0.2            # of each client's rows
# server_data = "spare.csv"     # rows without target, at the server alone

# What Flower needs. `pyrofl flower up` and `serve` fill in the run's settings; with `flwr run` they
# are given by --run-config.

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
project = ""                   # this folder, at the server
out = ""                       # results; "" is run/ in the project
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
    """Create the project folder of a Flower study, with simulated data of three sites."""
    path = run_folder.prepare(folder)
    files = {"pyproject.toml": SETTINGS, "LICENSE": LICENSE, "study/__init__.py": ""}
    files |= {f"study/{k}_app.py": APP.format(kind=k, place=at) for k, at in PLACES.items()}
    (path / "study").mkdir()
    for name, text in files.items():
        (path / name).write_text(text, encoding="utf-8")
    (path / "sites").mkdir()
    for number, count in enumerate(ROWS, 1):
        rows = _patients(np.random.default_rng(number), count, shift=number - 2)
        columns = ("age", "dose", "pressure", "recovered")
        run_folder.write_csv(path / f"sites/hospital_{number}.csv", columns, rows)
    return path


def _patients(random: np.random.Generator, count: int, shift: float) -> list[list[object]]:
    """Simulate patients of a hospital; `shift` changes the fraction that recovers."""
    x = random.normal(size=(count, 3)).round(3)
    odds = x @ [-1.0, 1.5, 0.5] + 0.8 * shift
    recovered = random.random(count) < 1 / (1 + np.exp(-odds))
    return [[*map(float, row), "yes" if r else "no"] for row, r in zip(x, recovered, strict=True)]
