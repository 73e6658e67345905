"""Validation of a remote server's requests at the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pyrofl.data import Cohort, Federation
from pyrofl.data.shard import Shard
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.inference.transport.message_checks import (
    InvalidRequestError,
    client_names,
    column,
    tensors,
    whole_number,
)
from pyrofl.tensors import Tensors

SENT_SEEDS = ("init", "noise")  # that of participation stays at the server: see `privacy.private`


def refuse_more_rounds(order: Mapping[str, Any], rounds: int | None) -> None:
    """Raise InvalidRequestError for a request of a round after the last one that is allowed."""
    if rounds is not None and (requested := whole_number(order, "round")) > rounds:
        raise InvalidRequestError(
            f"a request is of round {requested}, but this client takes part in {rounds} rounds; "
            "raise its number of rounds to continue"
        )


def place(order: Mapping[str, Any], data: Federation, seed: Seeds) -> tuple[Cohort, Shard, Tensors]:
    """Return a request's clients, their rows in the server's order, and received tensors."""
    local_names = data.names[: data.clients]
    names = client_names(order)
    ids, sizes = (column(order, n, len(names), torch.long) for n in ("ids", "sizes"))
    clients = whole_number(order, "clients")
    for what in SENT_SEEDS:
        sent_seed, local_seed = whole_number(order, f"seed/{what}"), getattr(seed, what)
        if sent_seed != local_seed:
            raise InvalidRequestError(
                f"seed of {what} is {local_seed}, but {sent_seed} at the server; use the same seed"
            )
    none = data.train[0][:0]
    train, test, labels = [none] * clients, [none] * clients, [""] * clients
    for name, i, size in zip(names, ids.tolist(), sizes.tolist(), strict=True):
        if name not in local_names:
            raise InvalidRequestError(
                f"a request is for {name!r}, but the clients here are {', '.join(local_names)}"
            )
        if not 0 <= i < clients:
            raise InvalidRequestError(f"{name} has id {i}; expected 0 to {clients - 1}")
        j = data.names.index(name)
        if len(data.train[j]) != size:
            raise InvalidRequestError(
                f"{name} has {len(data.train[j])} training rows, but {size} at the server; "
                "use the same data as at the start"
            )
        train[i], test[i], labels[i] = data.train[j], data.test[j], name
    shard = Shard(data.x, data.y, tuple(train), tuple(test), tuple(labels), data.classes)
    received = {n: v.to(data.device) for n, v in tensors("down", order).items()}
    for n, v in received.items():
        if v.is_floating_point() and v.dtype != data.dtype:
            raise InvalidRequestError(
                f"{n} is {v.dtype} in the request, but the data are {data.dtype}; use the same "
                "type at server and clients"
            )
    return shard.cohort(ids), shard, received
