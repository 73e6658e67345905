"""Removal and addition of clients in a fitted run of PVI (partitioned variational inference).

A client's factor t_j is all that the server knows of its rows. Divided out of q it leaves the
product of the others' factors. These were fitted together with t_j, so where the model is not
normal they are a little off at once, and a few rounds without the client mend it. Who joins starts
with a factor of 1.

    left = pvi.leave(run, "hospital_3")
    left = pyrofl.fit(left.method, left.data, left.state.number + 8, start=left)
    never = pyrofl.fit(left.method, left.data, 30)
    pyrofl.reference.cost(left, never)

How far q is from that of a fit without the client, at worst over shared variables and clients, in
standard deviations of that fit (means) and in percent (standard deviations):

    after rounds                   run     0     1     2     4     8    16
    12 hospitals     means        0.72  0.21  0.14  0.09  0.02  0.01  0.00
    ("Surgical")     deviations     20    19    10     6     2     1     1
    85 counties      means        0.82  0.43  0.40  0.31  0.15  0.11  0.06
    (radon; 8 left)  deviations     31    21    17    10    12     8     2

where "run" is the run that has the client still. A client with more information than others on a
parameter, as one county does here, takes longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.arguments import checked, known
from pyrofl.data import Federation
from pyrofl.inference.engine.origin import rows_of
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models.pvi.gaussians import PARAMETERS, Normals
from pyrofl.tensors import Tensors, pick

ANEW = 0.5  # damping that adapts, to begin with: the factors are near where they will be


@checked
def leave(run: Run, client: str) -> Run:
    """Remove a client from a fitted PVI run, with its rows, state and factor of the posterior.

    Args:
        run: of PVI, by `build` or `hierarchical`.
        client: name of one that trains.

    Returns:
        A run of the others, to be continued: its state has the same round number, its records and
        scores are empty.

    Raises:
        ValueError: if the run is of another method, there is no such client or no other, or what
            the others know is no distribution yet.
    """
    server, data = _of_pvi(run), run.data
    known(client, data.names[: data.clients], "client that trains")
    if data.clients == 1:
        raise ValueError(f"{client!r} is the only client that trains; expected another to stay")
    at = data.names.index(client)
    parts: dict[str, Any] = {n: _kept(getattr(data, n), at) for n in ("train", "test", "names")}
    others = replace(data, **parts)
    q = {n: server[n] - server[f"server/{n}"][at] for n in PARAMETERS}
    size = len(q["shift"])
    if not bool(Normals(size, len(q["precision"]) > size).proper(q["precision"])):
        raise ValueError(
            f"without {client!r} the posterior is no distribution yet; expected a run of more "
            "rounds to begin with"
        )
    stay = torch.tensor([j for j in range(data.clients) if j != at])
    return _gone_on(run, others, server | q, stay, torch.arange(others.clients))


@checked
def join(run: Run, data: Federation) -> Run:
    """Add clients to a fitted PVI run, with constant initial factors.

    Args:
        run: of PVI, by `build` or `hierarchical`.
        data: the run's clients that train, with the same rows, and more, in any order; clients that
            the run held out may be among them.

    Returns:
        A run of all of them, to be continued: its state has the same round number, its records and
        scores are empty.

    Raises:
        ValueError: if the run is of another method, a client of it is not there or has other rows,
            or none is new.
    """
    server, names = _of_pvi(run), data.names[: data.clients]
    had = run.data.names[: run.data.clients]
    for name in had:
        known(name, names, "client of the run that trains in these data:")
    if len(names) == len(had):
        raise ValueError(f"the data have the {len(had)} clients of the run; expected one more")
    place = torch.tensor([names.index(name) for name in had])
    for name, same in zip(had, (rows_of(data)[place] == rows_of(run.data)).all(1), strict=True):
        if not bool(same):
            raise ValueError(f"{name!r} has other training rows in the run; expected the same")
    return _gone_on(run, data, server, torch.arange(len(had)), place)


def without(run: Run, client: str, rounds: int) -> RoundState:
    """Continue a run without one client, whose factor stays fixed, and return the new state.

    So q / t_j is what the others know, and the client's own information is its factor.
    """
    left = leave(run, client)
    if not rounds:
        return run.state
    end = run.state.number + rounds
    others = fit(run.method, left.data, end, resume_from=left, progress=False).state.server
    server, at = run.state.server, run.data.names.index(client)
    q = {n: others[n] + server[f"server/{n}"][at] for n in PARAMETERS}
    if "share" in server:  # the others share the whole prior out
        q["share"] = torch.zeros_like(server["share"])
    return replace(run.state, server=server | q)


def _of_pvi(run: Run) -> Tensors:
    """Return the server's state of a run; raise ValueError if it holds no client factors."""
    if not {f"server/{n}" for n in PARAMETERS} <= run.state.server.keys():
        raise ValueError(
            "the server of this run holds no factors of clients; expected a run of pvi.build or "
            "pvi.hierarchical"
        )
    return run.state.server


def _kept(values: Sequence[Any], at: int) -> tuple[Any, ...]:
    return tuple(v for i, v in enumerate(values) if i != at)


def _gone_on(run: Run, data: Federation, server: Tensors, stay: Tensor, place: Tensor) -> Run:
    """Return a copy of a run for other data, with the remaining clients' states reindexed.

    These are the clients `stay`, at the new indices `place`.
    """

    def dealt(table: Tensor) -> Tensor:
        """Move the remaining clients' rows of a table [J, ...] to their new indices."""
        new = table.new_zeros(data.clients, *table.shape[1:])
        new[place] = table[stay]
        return new

    tables = {n: dealt(v) for n, v in pick(server, run.method.per_client).items()}
    if "share" in server:  # of what the prior is more than p0
        tables["share"] = torch.full_like(server["share"], 1 / data.clients)
    if "server/damping" in server:  # fallen for want of anything but noise to follow
        tables["server/damping"] = torch.full_like(server["server/damping"], ANEW)
        tables |= {n: torch.zeros_like(v) for n, v in pick(server, "server/last/*").items()}
    state = RoundState(
        number=run.state.number,
        server=server | tables,
        client_states={n: dealt(v) for n, v in run.state.client_states.items()},
        seen=dealt(run.state.seen),
        names=data.names[: data.clients],
        rows=rows_of(data),
        constants=run.state.constants,
    )
    return run.copy(data=data, state=state, records=[], history=[])
