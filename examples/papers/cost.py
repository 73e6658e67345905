"""Expected cost of a study: one round of every run is timed, on a part of its rows if it is long.

A long round is timed with few rows of each client, and of the server, and its seconds are
multiplied by the ratio of the rows: those of all rounds on average, and those in the timed round.
Evaluation and partition are not included.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from harness import Trial

from pyrofl import Federation
from pyrofl.experiments.tasks import participation
from pyrofl.inference.engine.participation import sampling_of

SECONDS = 10.0  # of a timed round; longer ones are reduced to one minibatch per client and epoch
HEAD = ("case", "row", "round_seconds", "part", "hours")


class Cost(NamedTuple):
    """Expected seconds of a round, and the part of its rows that were timed: 1 for all."""

    round_seconds: float
    part: float

    def hours(self, rounds: int, runs: int) -> float:
        """Return the hours of all rounds of a number of runs."""
        return self.round_seconds * rounds * runs / 3600


def estimate(trial: Trial, seconds: float = SECONDS) -> Cost:
    """Return the cost of a run: a round with one minibatch per client first, then a longer one.

    Args:
        trial: a run of a study.
        seconds: the second round has as many rows as fit into this time, or all rows.
    """
    data = trial.task.data
    sizes = data.sizes[: data.clients]
    average, largest, batch = float(sizes.double().mean()), int(sizes.max()), batch_of(trial)
    expected = clients_of(trial) * average
    rows, timed, cost = batch, 0, Cost(0.0, 0.0)
    while rows > timed:
        reduced = first_rows(data, rows, average)
        spent, trained = time_round(trial, reduced)
        cost = Cost(spent * expected / trained, min(1.0, trained / expected))
        timed = rows
        longer = batch * int(rows / batch * seconds / spent)
        rows = largest if longer >= average else longer if longer > 2 * rows else rows
    return cost if rows < largest else cost._replace(part=1.0)


def clients_of(trial: Trial) -> float:
    """Return the expected number of clients that train in a round."""
    clients = trial.task.data.clients
    if trial.built().metadata.train_all_clients:  # also those that do not report
        return clients
    drawn = participation(trial.settings.participation, clients)
    return sampling_of(drawn, clients).expected


def time_round(trial: Trial, data: Federation) -> tuple[float, int]:
    """Return the seconds of a round, and the number of rows of the clients that trained in it."""
    run = trial.fit(data, rounds=1, eval_every=0)
    (record,) = run.records
    return record.seconds, int(data.sizes[record.trained].sum())


def first_rows(data: Federation, rows: int, average: float) -> Federation:
    """Return a federation with the first training rows of each client.

    The server's rows are reduced in proportion to an average client's.
    """
    server = data.server_data
    if server is not None:
        server = server[: ceil(len(server) * min(1.0, rows / average))]
    return replace(data, train=tuple(part[:rows] for part in data.train), server_data=server)


def batch_of(trial: Trial) -> int:
    """Return the size of a minibatch, 50 if the settings do not state it."""
    sizes = [int(word.partition("=")[2]) for word in trial.words if word.startswith("batch=")]
    return sizes[-1] if sizes else 50
