"""Server state with the last model of every client.

The server holds "server/model/NAME" [J, *p], and in `server/heard` [J] whether client j has sent
its own; before that its model is the common start. Clients do not learn whose models they receive.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from pyrofl.data import Cohort
from pyrofl.inference.definition.metadata import PER_CLIENT, MetadataByPattern
from pyrofl.tensors import Tensors, role, spread_out, under

MODEL, HEARD = "server/model", "server/heard"
TENSORS: MetadataByPattern = {f"{MODEL}/* {HEARD}": PER_CLIENT}


def begin(start: Tensors, clients: int) -> Tensors:
    """Return a server state in which no client has sent a model, given initial parameters.

    These are common to all clients, [*p].
    """
    return under(MODEL, spread_out(start, clients)) | {HEARD: torch.zeros(clients)}


def keep(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
    """Store each message as the latest model of its client."""
    held, at = role(MODEL, server), cohort.ids
    models = {n: v.index_copy(0, at, message[n]) for n, v in held.items()}
    heard = server[HEARD].index_fill(0, at, 1.0)
    return server | under(MODEL, models) | {HEARD: heard}


def is_heard(server: Tensors, ids: Tensor) -> Tensor:
    """Return whether each client has sent a model, bool [...]; false for new clients."""
    heard = server[HEARD]
    return (ids < len(heard)) & (heard[ids.clamp(max=len(heard) - 1)] > 0)


def evenly(server: Tensors) -> Tensor:
    """Return equal weights [J] of all stored models, which sum to one."""
    heard = server[HEARD]
    if not bool(heard.any()):
        return torch.eye(len(heard)).to(heard)[0]
    return heard / heard.sum()


def combine_models(server: Tensors, weights: Tensor) -> Tensors:
    """Return weighted sums [C, *p] of all clients' stored models, given weights [C, J].

    Client by client, so that the last bit does not depend on other clients.
    """
    models = role(MODEL, server).items()
    return {n: torch.stack([torch.tensordot(own, v, 1) for own in weights]) for n, v in models}


def members(received: Tensors, local: Tensors) -> list[Tensors]:
    """Return each ensemble member's parameters; before round one, only the received model."""
    held = role("teacher", received)
    count = next(iter(held.values())).shape[1] if held else 0
    tensors = local | received
    return [tensors | {n: v[:, m] for n, v in held.items()} for m in range(count)] or [tensors]
