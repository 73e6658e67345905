"""Run the federated rounds of a method, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypedDict

import torch

from pyrofl.arguments import Count, Whole, checked
from pyrofl.choices import Engine, OnBadMessage
from pyrofl.data import Federation
from pyrofl.extensions import find_extension, required
from pyrofl.inference.definition.budget import Privacy
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, separate
from pyrofl.inference.engine.messages import inbox
from pyrofl.inference.engine.origin import match_server, refuse_other_constants, validate_resume
from pyrofl.inference.engine.participation import Draw, Stragglers, everyone
from pyrofl.inference.engine.requests import Backend
from pyrofl.inference.engine.resume import validate_tensors
from pyrofl.inference.engine.round import run_rounds
from pyrofl.inference.engine.start import engine_starter, first, method_schedule
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.engine.surroundings import refuse_surroundings
from pyrofl.tensors import Tensors


class LoopOptions(TypedDict, total=False):
    """Optional keyword arguments of `federate`, such as participation and chunk_size."""

    participation: Draw
    training_clients: Draw | None
    chunk_size: int | None
    stragglers: Stragglers | None
    on_bad_message: OnBadMessage
    keep_messages: bool
    check: bool
    record: bool | None
    engine: Engine | Backend
    workers: int | None
    privacy: Privacy | None


@checked
def federate(
    method: Method | Callable[[int], Method],
    data: Federation,
    rounds: Whole,
    *,
    seed: Seed = 0,
    participation: Draw = everyone,
    training_clients: Draw | None = None,
    chunk_size: Count | None = None,
    server_state: Tensors | RoundState | None = None,
    resume_from: RoundState | None = None,
    stragglers: Stragglers | None = None,
    on_bad_message: OnBadMessage = "reject",
    keep_messages: bool = True,
    check: bool = True,
    record: bool | None = None,
    privacy: Privacy | None = None,
    engine: Engine | Backend = "local",
    workers: Count | None = None,
) -> Generator[RoundState, None, None]:
    """Run federated rounds of a method, yielding the state after each round.

    Args:
        method: a method, or round number (from 0) -> method, for schedules that depend on it.
        data: the federation, whose device and floating-point type are used throughout.
        rounds: number of the last round; a run resumed at round r runs rounds - r of them.
        seed: with the round and the client's name, fixes all random numbers; `Seeds` sets several.
        participation: function that samples the reporting clients of a round.
        training_clients: function that samples the training clients; selected reporters that did
            not train do not report. Default: the reporters, or all clients if
            `method.metadata.train_all_clients`.
        chunk_size: clients per vectorized batch; default by the size of their state.
        server_state: initial server state, instead of `method.init`: tensors, whose tables of
            clients are in the order of the data, or a `RoundState`, whose tables are matched by the
            clients' names.
        resume_from: a `RoundState` of the same clients with the same training rows.
        stragglers: clients that do part of their work, or that drop out before reporting.
        on_bad_message: "reject" continues without the client, "raise" stops the run.
        keep_messages: False folds messages into one on arrival, for an `Aggregator`: memory holds
            the messages of one chunk only, and those of a `RoundState` are [0, ...].
        check: before round one, raise ValueError for a method that would give wrong numbers, see
            `validate_method`, and for a resumed state whose tensors are not those of the method.
        record: run repeated updates from recorded operations, see `recordings`. None records
            those whose functions are all pyrofl's own. True records your functions too, several
            times faster: it is a promise that within a phase of a round their results depend on
            their tensors alone, not on a counter, a clock or a file. False runs every phase as it
            is written, without groups of clients by size too, as a debugger needs.
        privacy: clip the clients' contributions to the server's sums and add noise to them; see
            `privacy.private`.
        engine: "local" trains in this process, "ray" in several; see `pyrofl.inference.transport`.
            These processes end after the last round, or when the iterator is closed. A function
            `RoundRequest` -> `RunningRound` is a transport of your own; see "How a round works".
        workers: number of Ray workers, each with some of the clients; default one per core or GPU.

    Yields:
        The `RoundState` after each round.

    Raises:
        ValueError: if the validation fails, privacy does not fit the method, a draw does not fit
            the clients, a resumed state has other clients, rows, tensors or frozen weights,
            messages cannot be folded but `keep_messages` is False, or the engine cannot start.
        BadMessage: in a round, if a message is invalid and `on_bad_message` is "raise".
        ChildProcessError: in a round, if a worker dies.

    Examples:
        >>> import pyrofl
        >>> from pyrofl import datasets, federations, nets
        >>> from pyrofl.models import pfedvem
        >>> data = federations.split(datasets.load("digits"), "slices:5", clients=4)
        >>> method = pfedvem.build(nets.build("softmax", (64,), 10))
        >>> for state in pyrofl.federate(method, data, rounds=2):
        ...     print(state.number, state.reporters.ids.tolist())
        1 [0, 1, 2, 3]
        2 [0, 1, 2, 3]
    """
    refuse_surroundings()
    seed = separate(seed)
    if privacy is not None:
        method = required("privacy", "privacy")(method, privacy, data.clients, participation)
    at = method_schedule(method)
    refuse_private_preparation(at(resume_from.number if resume_from else 0), data)
    if resume_from is not None and server_state is not None:
        raise ValueError(
            "resume_from and server_state are mutually exclusive; pass resume_from to resume a "
            "run, server_state to set its initial state"
        )
    if resume_from is not None:
        resume_from = validate_resume(resume_from, data)
        refuse_other_constants(at(max(resume_from.number - 1, 0)), resume_from.constants)
        if check:
            same, here = isinstance(method, Method), not callable(engine)
            resume_from = validate_tensors(at, data, resume_from, exact=same, stored=here)
    if server_state is not None:
        server_state = match_server(at(0), data, server_state)
    if (begun := resume_from.number if resume_from else 0) < rounds:
        inbox(at(begun), {}, torch.zeros(0), keep_messages)
        validate = find_extension("validation") if check and not begun else None
        if validate is not None:
            validate(
                at(0),
                data,
                chunk_size=chunk_size,
                server_state=resume_from.server if resume_from else server_state,
            )

    start_engine = engine_starter(engine, workers, data)

    def run(state: RoundState) -> Generator[RoundState, None, None]:
        with start_engine() as backend:
            yield from run_rounds(
                at,
                data,
                state,
                rounds,
                participation,
                training_clients,
                stragglers or Stragglers(),
                on_bad_message,
                seed,
                chunk_size=chunk_size,
                keep_messages=keep_messages,
                record=record,
                backend=backend,
            )

    return run(resume_from or first(at(0), data, seed, server_state))


def refuse_private_preparation(method: Method, data: Federation) -> None:
    """Raise ValueError if a method is private and its data were prepared by the clients' rows."""
    if method.metadata.privacy is not None:
        required("private data", "privacy")(method, data)
