"""Start of a run: its initial state, and the engine that trains the clients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from pyrofl.choices import Engine
from pyrofl.data import Federation, Roster
from pyrofl.extensions import required
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.engine.origin import constants_of, match_server, rows_of
from pyrofl.inference.engine.requests import Backend
from pyrofl.inference.engine.round import LocalClients
from pyrofl.inference.engine.state import RoundState, to_data
from pyrofl.returned import as_tensors, calling
from pyrofl.tensors import Tensors, pick
from pyrofl.turns import synchronized

StartEngine = Callable[[], AbstractContextManager[Backend]]


@synchronized  # as layers draw by torch's own generator, which is the process's
def first(
    method: Method,
    data: Federation | Roster,
    seed: Seed,
    server: Tensors | RoundState | None = None,
) -> RoundState:
    """Return the initial state of a federated run, before round one."""
    if server is None:
        with calling("init"):
            server_state = method.init(stream(seed, Stream.START), data.clients)
        server = as_tensors("what init returns", server_state)
        place = torch.tensor(sorted(range(data.clients), key=data.names.__getitem__)).argsort()
        server = server | {n: v[place] for n, v in pick(server, method.per_client).items()}
    else:
        server = match_server(method, data, server)
    server = to_data(server, data)
    seen, names = torch.zeros(data.clients, dtype=torch.bool), data.names[: data.clients]
    rows = rows_of(data) if isinstance(data, Federation) else None
    constants = constants_of(method)
    return RoundState(0, server, {}, seen, names=names, rows=rows, constants=constants)


def method_schedule(method: Method | Callable[[int], Method]) -> Callable[[int], Method]:
    """Return a function that maps a round number (from 0) to the method used in that round."""
    if isinstance(method, Method):
        return lambda _: method

    def at(number: int) -> Method:
        """Return the method used in a round; raise ValueError if it is not a Method."""
        with calling(f"method({number})"):
            selected = method(number)
        if not isinstance(selected, Method):
            raise ValueError(
                f"method({number}) is a {type(selected).__name__}; expected a Method for each round"
            )
        return selected

    return at


def engine_starter(engine: Engine | Backend, workers: int | None, data: Federation) -> StartEngine:
    """Validate the engine settings, and return a function that starts the engine."""
    if callable(engine):
        backend = engine
        return lambda: nullcontext(backend)
    if engine == "local":
        if workers is not None:
            raise ValueError(
                f"workers is {workers}, but engine 'local' is one process; use engine='ray', or "
                "leave out workers"
            )
        return lambda: nullcontext(partial(LocalClients, data))
    create: Callable[[int | None, Federation], StartEngine]
    create = required(f"engine {engine}", f"engine={engine!r}")
    return create(workers, data)
