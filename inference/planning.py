"""Prediction of the rounds, bytes and seconds of a fit, from its first two rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Unpack

from pyrofl.arguments import Count, NotNegative, checked
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.inference.definition.metadata import Moments, metadata_of_class
from pyrofl.inference.definition.seeds import Seed
from pyrofl.inference.definition.table_method import prepare_data
from pyrofl.inference.engine.federate import LoopOptions
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.chains import MethodOrBuilder
from pyrofl.inference.fitted_run.run import Run
from pyrofl.summaries import Summarized

NUM_PILOT_ROUNDS = 2  # rounds
# Fewest and most rounds that the problems of examples/posteriors needed, see hierarchical.md.
UNDAMPED_ROUNDS = (3, 9)  # of likelihood factors, if two do not suffice
DAMPED_ROUNDS = (10, 32)  # of PVI for hierarchical programs

Range = tuple[float, float]


@dataclass(frozen=True, repr=False)
class Plan(Summarized):
    """Predicted rounds, bytes and seconds of a fit.

    Attributes:
        rounds: fewest and most rounds, equal if the number is known; None if it is not predicted.
        why: reason for these rounds, or why they are not predicted.
        clients: number of clients that train.
        bytes_down: bytes that the server sends in a round, to all clients.
        bytes_up: bytes that it receives in a round, from all clients.
        first_seconds: computing time of the first round, which prepares the others.
        seconds: computing time of a later round, of all clients one after the other, as measured.
        exchange_seconds: time of an exchange of messages.
        pilot: the run of the first rounds, which `fit(resume_from=...)` continues.
    """

    rounds: tuple[int, int] | None
    why: str
    clients: int
    bytes_down: float
    bytes_up: float
    first_seconds: float
    seconds: float
    exchange_seconds: float
    pilot: Run

    @property
    def total_bytes(self) -> Range | None:
        """Bytes of all rounds and clients, in both directions: fewest and most, or None."""
        each = self.bytes_down + self.bytes_up
        return self.rounds and (self.rounds[0] * each, self.rounds[1] * each)

    @property
    def total_seconds(self) -> Range | None:
        """Seconds of all rounds with their exchanges: fewest and most, or None.

        It is an upper bound where clients compute at the same time on machines like this one.
        """
        if self.rounds is None:
            return None
        few, many = (
            min(n, 1) * self.first_seconds
            + max(n - 1, 0) * self.seconds
            + n * self.exchange_seconds
            for n in self.rounds
        )
        return few, many

    def overview(self) -> Mapping[str, object]:
        """Return rounds, bytes and seconds as text."""
        down, up = (f"{v / self.clients:,.0f}" for v in (self.bytes_down, self.bytes_up))
        rounds = "not predicted" if self.rounds is None else _between(self.rounds, str)
        texts = {
            "rounds": f"{rounds}: {self.why}",
            "each round": f"{self.seconds:.2g} s computing, {self.exchange_seconds:g} s exchange",
            "each client": f"{down} bytes down and {up} bytes up in a round",
        }
        if self.total_bytes and self.total_seconds:
            size = _between(self.total_bytes, lambda v: f"{v:,.0f}")
            time = _between(self.total_seconds, lambda v: str(timedelta(seconds=round(v))))
            texts["in all"] = f"{time} (hours:minutes:seconds), {size} bytes"
        return texts


@checked
def plan(
    method: MethodOrBuilder,
    data: Federation | Tables,
    rounds: Count | None = None,
    *,
    exchange_seconds: NotNegative = 0.0,
    seed: Seed = 0,
    **loop: Unpack[LoopOptions],
) -> Plan:
    """Predict the rounds, bytes and seconds of a fit from its first two rounds.

    Bytes and seconds of a round are measured. Their totals follow from the number of rounds, which
    is known if you give it, or if the fit converges within the first two rounds, as all methods do
    that are exact after one. Otherwise it is a range: that of the problems of `examples/posteriors`
    for likelihood factors and for PVI of hierarchical programs, if all clients report in every
    round. Changes in two rounds predict nothing better. For other methods, such as those with
    gradient steps, no rule predicts the number within a factor of two, and it is None.

    Args:
        method: a method, or round number (from 0) -> method.
        data: the federation, or the tables of a regression. Without the clients' rows, use
            simulated rows of the same sizes: then bytes and seconds are right, and rounds as far as
            the rows are alike.
        rounds: number of rounds, if you choose it; None predicts that of `fit` without rounds.
        exchange_seconds: seconds that a round takes to exchange messages between the machines.
        seed: fixes all random numbers.
        loop: further arguments of `federate`, such as participation or chunk_size.

    Returns:
        The `Plan`, which prints as a few lines. The exchange by which `to_arviz` corrects draws is
        not included.

    Raises:
        ValueError: as `fit`, or if data has no rows.

    Examples:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> import pyrofl
        >>> from pyrofl import datasets, federations
        >>> data = federations.split(datasets.load("eight_schools"), "groups", 8)
        >>> def schools(received, local, batch):
        ...     with batch.clients():
        ...         mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        ...         tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        ...         theta = pyro.sample("theta", dist.Normal(mu, tau))
        ...         with batch.rows():
        ...             pyro.sample("y", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)
        >>> method = pyrofl.hierarchical(schools, data, shared="mu tau")
        >>> expected = pyrofl.plan(method, data, exchange_seconds=30.0)
        >>> expected.rounds
        (1, 1)
        >>> expected.total_seconds[0] > 30
        True
    """
    data = prepare_data(method_schedule(method)(0), data)
    if data.is_outline:
        raise ValueError("data has no rows; pass simulated rows of the same sizes and columns")
    stop: Any = None if rounds else "converged"
    run = fit(
        method,
        data,
        min(rounds or NUM_PILOT_ROUNDS, NUM_PILOT_ROUNDS),
        stop_when=stop,
        seed=seed,
        progress=False,
        **loop,
    )
    last = run.records[-1]
    expected, why = ((rounds, rounds), "as given") if rounds else _predicted(run)
    return Plan(
        rounds=expected,
        why=why,
        clients=run.data.clients,
        bytes_down=last.bytes_down,
        bytes_up=last.bytes_up,
        first_seconds=run.records[0].seconds,
        seconds=last.seconds,
        exchange_seconds=exchange_seconds,
        pilot=run,
    )


def _predicted(run: Run) -> tuple[tuple[int, int] | None, str]:
    """Return the range of rounds until a run has converged, or None, and the reason."""
    status, number = run.status, run.state.number
    if status.kind == "converged":
        return (number, number), str(status)
    if status.kind != "not converged":
        return None, str(status)
    clients, tensors = run.data.clients, method_schedule(run.method)(0).metadata.tensors
    if any(len(record.reported) < clients for record in run.records):
        return None, "some clients do not report in every round; give a number of rounds"
    reason = "as problems of examples/posteriors need, unless the posterior has several modes"
    each = [moments for _, moments in metadata_of_class(tensors, Moments)]
    if any(moments.undamped for moments in each):
        return UNDAMPED_ROUNDS, reason
    if any(moments.optimal for moments in each) and run.method.metadata.sites:
        return DAMPED_ROUNDS, reason
    return None, "no rule predicts when this method converges; give a number of rounds"


def _between(ends: Range, shown: Any) -> str:
    """Return a range as text, or one number if both ends are equal as text."""
    low, high = map(shown, ends)
    return low if low == high else f"{low} to {high}"
