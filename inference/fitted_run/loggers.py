"""Loggers of losses and scores for TensorBoard and MLflow, for the argument `logger` of `fit`.

    pyrofl.fit(method, data, rounds=20, eval_every=1, logger=loggers.tensorboard("runs/mine"))

A custom logger is a function (run, record of the round) -> None; `numbers` returns the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from pyrofl.arguments import checked
from pyrofl.choices import Logger
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.fitted_run.run import Run

Log = Callable[[Run, RoundRecord], None]
INVALID_CHARACTERS = r"[^\w\-./ ]"  # characters that MLflow does not accept in a name


def numbers(run: Run, record: RoundRecord) -> dict[str, float]:
    """Return the values to log for a round: losses, seconds, bytes, clients and any scores.

    Scores are named model/METRIC, with population and adaptation where these are not the default.
    """
    columns = record.told(run.data.names)
    values = {
        n: float(v) for n, v in columns.items() if isinstance(v, int | float) and n != "round"
    }
    for row in run.history:
        if row["round"] == record.number:
            more = [
                w for w in (row["population"], row["adaptation"]) if w not in ("training", "none")
            ]
            values["/".join([row["model"], *more, row["metric"]])] = row["value"]
    return {re.sub(INVALID_CHARACTERS, "_", name): value for name, value in values.items()}


@checked
def tensorboard(folder: str | Path) -> Log:
    """Return a logger that writes losses and scores of each round for TensorBoard."""
    writer = library("tensorboard").SummaryWriter(str(folder))

    def log(run: Run, record: RoundRecord) -> None:
        for name, value in numbers(run, record).items():
            writer.add_scalar(name, value, record.number)
        writer.flush()

    return log


def mlflow(name: str | None = None) -> Log:
    """Return a logger that sends losses and scores of each round to MLflow."""
    client = library("mlflow")
    if name is not None:
        client.end_run()
        client.start_run(run_name=name)

    def log(run: Run, record: RoundRecord) -> None:
        client.log_metrics(numbers(run, record), step=record.number)

    return log


def library(kind: Logger) -> Any:
    """Import the library of a logger; raise ValueError if it is not installed."""
    try:
        return import_module({"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow"}[kind])
    except ImportError as error:
        raise ValueError(
            f"{kind} is not installed ({error}); run pip install -e '.[{kind}]' in the clone"
        ) from error
