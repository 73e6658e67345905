"""What a round gave, for TensorBoard and MLflow; `log` of `fit` takes any such function.

    pyrofl.fit(method, data, rounds=20, eval_every=1, logger=loggers.tensorboard("runs/mine"))

A logger of one's own is a function (run, record of the round) -> None; `numbers` are what there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pyrofl.arguments import checked
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.fitted_run.run import Run

Log = Callable[[Run, RoundRecord], None]
Logger = Literal["tensorboard", "mlflow"]
ODD = r"[^\w\-./ ]"  # letters that MLflow does not take in a name


def numbers(run: Run, record: RoundRecord) -> dict[str, float]:
    """Return what a round gave: losses, seconds, bytes, clients, and its scores if it was tested.

    Scores are called model/METRIC, with population and adaptation where these are not the usual.
    """
    told = record.told(run.data.names)
    found = {n: float(v) for n, v in told.items() if isinstance(v, int | float) and n != "round"}
    for row in run.history:
        if row["round"] == record.number:
            more = [
                w for w in (row["population"], row["adaptation"]) if w not in ("training", "none")
            ]
            found["/".join([row["model"], *more, row["metric"]])] = row["value"]
    return {re.sub(ODD, "_", name): value for name, value in found.items()}


@checked
def tensorboard(folder: str | Path) -> Log:
    """Write the numbers of every round for TensorBoard; needs the package tensorboard."""
    writer = library("tensorboard").SummaryWriter(str(folder))

    def log(run: Run, record: RoundRecord) -> None:
        for name, value in numbers(run, record).items():
            writer.add_scalar(name, value, record.number)
        writer.flush()

    return log


def mlflow(name: str | None = None) -> Log:
    """Send the numbers of every round to MLflow, to a new run of that name or to the active one."""
    client = library("mlflow")
    if name is not None:
        client.end_run()
        client.start_run(run_name=name)

    def log(run: Run, record: RoundRecord) -> None:
        client.log_metrics(numbers(run, record), step=record.number)

    return log


def library(kind: Logger) -> Any:
    """Return the module that writes."""
    try:
        return import_module({"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow"}[kind])
    except ImportError as error:
        raise ValueError(
            f"{kind} is not installed ({error}); expected pip install 'pyrofl[{kind}]'"
        ) from error
