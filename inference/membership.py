"""Removal and addition of clients in a fitted run with one factor per client.

These are runs of PVI and of likelihood factors. A client's factor t_j is all that the server knows
of its rows. Divided out of the posterior it leaves the product of the others' factors. These were
fitted together with t_j, so where the model is not normal they are slightly wrong, and a few rounds
without the client correct this. A client that joins starts with a factor of 1.

    left = pyrofl.leave(run, "hospital_3")
    left = pyrofl.fit(left.method, left.data, resume_from=left)
    never = pyrofl.fit(left.method, left.data)
    pyrofl.reference.compare_posteriors(left, never)

With PVI, the largest difference from a fit without the client, over shared variables and clients,
in standard deviations of that fit (means) and in percent (standard deviations):

    after rounds                   run     0     1     2     4     8    16
    12 hospitals     means        0.72  0.21  0.14  0.09  0.02  0.01  0.00
    ("Surgical")     deviations     20    19    10     6     2     1     1
    85 counties      means        0.82  0.43  0.40  0.31  0.15  0.11  0.06
    (radon; 8 left)  deviations     31    21    17    10    12     8     2

where "run" is the run that still has the client. A client with more information than others on a
parameter, as one county here, takes longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.arguments import check_name, checked
from pyrofl.data import Federation
from pyrofl.extensions import find_extension
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.metadata import Factors, metadata_of_class
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.origin import rows_of
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fitted_run.run import Run
from pyrofl.tensors import pick
from pyrofl.user_warnings import warn_user


@checked
def leave(run: Run, client: str) -> Run:
    """Remove a client from a fitted run, with its rows, state and factor of the posterior.

    Args:
        run: run of `pyrofl.hierarchical` or PVI.
        client: name of a training client.

    Returns:
        A run of the others, to be continued: its state has the same round number, its records and
        scores are empty.

    Raises:
        ValueError: if the run is of another method, there is no such client or no other, or the
            product of the others' factors is not a distribution yet.
    """
    data = run.data
    get_factors(run)
    check_name(client, data.names[: data.clients], "client that trains")
    if data.clients == 1:
        raise ValueError(f"{client!r} is the only client that trains; expected another to stay")
    at = data.names.index(client)
    parts: dict[str, Any] = {
        n: _without_position(getattr(data, n), at) for n in ("train", "test", "names")
    }
    others = replace(data, **parts)
    stay = torch.tensor([j for j in range(data.clients) if j != at])
    try:
        return _continued(run, others, stay, torch.arange(others.clients))
    except AggregationError as error:
        raise ValueError(f"without {client!r} {error}; fit more rounds first") from None


@checked
def join(run: Run, data: Federation) -> Run:
    """Add clients to a fitted run, with constant initial factors.

    Args:
        run: run of `pyrofl.hierarchical` or PVI.
        data: the run's clients that train, with the same rows, and more, in any order; clients that
            the run held out may be among them.

    Returns:
        A run of all of them, to be continued: its state has the same round number, its records and
        scores are empty.

    Raises:
        ValueError: if the run is of another method, a client of it is not there or has other rows,
            or none is new.

    Warns:
        UserWarning: if clients seem to use different units.
    """
    get_factors(run)
    names = data.names[: data.clients]
    had = run.data.names[: run.data.clients]
    for name in had:
        check_name(name, names, "client of the run that trains in these data:")
    if len(names) == len(had):
        raise ValueError(f"the data have the {len(had)} clients of the run; expected one more")
    place = torch.tensor([names.index(name) for name in had])
    for name, same in zip(had, (rows_of(data)[place] == rows_of(run.data)).all(1), strict=True):
        if not bool(same):
            raise ValueError(f"{name!r} has other training rows in the run; expected the same")
    look = find_extension("checks of units")
    for text in look(data) if look else ():
        warn_user(text)
    return _continued(run, data, torch.arange(len(had)), place)


def get_factors(run: Run) -> Factors:
    """Return the metadata of the clients' posterior factors; raise ValueError if there are none."""
    factors = metadata_of_class(run.method.metadata.tensors, Factors)
    if not factors:
        raise ValueError(
            "the server of this run keeps no factors of clients; expected a run of "
            "pyrofl.hierarchical, pvi.build or pvi.hierarchical"
        )
    return factors[0][1]


def _without_position(values: Sequence[Any], at: int) -> tuple[Any, ...]:
    return tuple(v for i, v in enumerate(values) if i != at)


def _continued(run: Run, data: Federation, stay: Tensor, place: Tensor) -> Run:
    """Return a copy of a run for other data, with the remaining clients' states reindexed.

    These are the clients `stay`, at the new indices `place`.
    """

    def moved(table: Tensor) -> Tensor:
        """Move the remaining clients' rows of a table [J, ...] to their new indices."""
        new = table.new_zeros(data.clients, *table.shape[1:])
        new[place.to(table.device)] = table[stay.to(table.device)]
        return new

    server, source = run.state.server, stream(run.seed, Stream.MERGE, run.state.number)
    tables = {n: moved(v) for n, v in pick(server, run.method.per_client).items()}
    state = RoundState(
        number=run.state.number,
        server=get_factors(run).replace(server, tables, source),
        client_states={n: moved(v) for n, v in run.state.client_states.items()},
        seen=moved(run.state.seen),
        names=data.names[: data.clients],
        rows=rows_of(data),
        constants=run.state.constants,
    )
    return run.copy(data=data, state=state, records=[], history=[], ending={})
