"""A project folder to begin with: settings, the file that Flower calls, rows of three sites."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyrofl.files import run_folder

SITES = 3
ROWS = (40, 65, 90)

SETTINGS = """\
# What the server and all sites agree on. Every site needs a copy of this folder, without sites/:
# its own copy says what is run on its rows, and a difference is refused by name.

[tool.pyrofl]
methods = ["pfedvem"]          # see `pyrofl list`, or "FILE.py:NAME", a function data -> Method
settings = []                  # of methods, as "epochs=5", or "pfedvem.epochs=5" for one of several
net = "softmax"                # network, see `pyrofl list`
features = ["age", "dose", "pressure"]   # columns of the sites' CSV files
target = "recovered"
classes = ["no", "yes"]        # of the target; without this line for a number
likelihood = "categorical"     # see `pyrofl list`
# group = "ward"               # column that says whose a row is, if a site has several clients
rounds = 10
seed = 0
dtype = "float32"
test-share = 0.2               # of each client's rows
# unlabelled = "spare.csv"     # rows without target, at the server alone

# What Flower needs; the run's settings are filled in by `pyrofl flower up` and `serve`.

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
fab-include = ["app.py", "LICENSE"]     # of this folder nothing else is sent to the sites

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

[tool.flwr.app.config]
project = ""
out = ""
end = ""
sites = 0
least = 0
timeout = 0.0
"""

APP = '''\
"""What Flower starts: at the server `server`, at a site `client`."""

from pyrofl.flower.apps import client_app, server_app

client = client_app()
server = server_app()
'''

LICENSE = "All rights reserved.\n"


def new(folder: str | Path) -> Path:
    """Write a project folder, and made-up rows of three sites to try it with.

    Raises:
        ValueError: if the folder holds anything.
    """
    path = run_folder.prepare(folder)
    for name, text in (("pyproject.toml", SETTINGS), ("app.py", APP), ("LICENSE", LICENSE)):
        (path / name).write_text(text, encoding="utf-8")
    (path / "sites").mkdir()
    for number, count in enumerate(ROWS, 1):
        rows = _patients(np.random.default_rng(number), count, shift=number - 2)
        columns = ("age", "dose", "pressure", "recovered")
        run_folder.write_csv(path / f"sites/hospital_{number}.csv", columns, rows)
    return path


def _patients(random: np.random.Generator, count: int, shift: float) -> list[list[object]]:
    """Make up rows; hospitals differ in how many recover."""
    x = random.normal(size=(count, 3)).round(3)
    odds = x @ [-1.0, 1.5, 0.5] + 0.8 * shift
    recovered = random.random(count) < 1 / (1 + np.exp(-odds))
    return [[*map(float, row), "yes" if r else "no"] for row, r in zip(x, recovered, strict=True)]
