"""What a method is: Pyro programs, a local schedule, a wire and a server update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Federation, Who
from pyrofl.inference.elbo import Loss, Program, elbo
from pyrofl.inference.loop.messages import Rules
from pyrofl.tensors import Tensors, dense, spread_out

Move = Callable[[Tensors, Tensors, Batch], Tensors]
"""A closed form: (received, local, batch), tensors [C, *p] -> the names that change."""

Optim = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes an optimiser from torch.optim that works element by element, for stacked clients."""

Fold = Callable[[Tensors, Who], tuple[Tensors, Who]]
"""(message [C, ...], who) -> one message [1, ...] that stands for them, and its size."""

View = Callable[[Tensors, Tensors], Tensors | list[Tensors]]
"""(received, local) -> what the programs are to read as local; a list is an ensemble."""


@dataclass(frozen=True)
class Step:
    """Take gradient steps on the local tensors whose names match.

    Attributes:
        names: shell patterns separated by spaces.
        optim: makes the optimiser; it starts afresh in every round.
        loss: per client; `elbo(...)` or what wraps it.
        repeat: steps on each minibatch.
    """

    names: str
    optim: Optim
    loss: Loss = field(default_factory=elbo)
    repeat: int = 1

    def __post_init__(self) -> None:
        """Check the count.

        Raises:
            ValueError: if repeat is less than 1.
        """
        if self.repeat < 1:
            raise ValueError(f"repeat of step {self.names!r} is {self.repeat}; expected at least 1")


@dataclass(frozen=True)
class Phase:
    """Go through the client's rows, making the moves on every minibatch in turn.

    Attributes:
        moves: gradient steps and closed forms.
        epochs: passes over the rows: a number, or ids [C] -> numbers [C].
        batch: rows of a minibatch; None takes all rows at once.
        shortcut: (method, this phase, data, rows of the longest client) -> phases that do the same,
            up to rounding, if others than this one take less time.
    """

    moves: tuple[Step | Move, ...]
    epochs: int | Callable[[Tensor], Tensor] = 1
    batch: int | None = None
    shortcut: Callable[[Method, Phase, Federation, int], tuple[Phase, ...]] | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: if epochs is a negative number or batch is less than 1.
        """
        if not callable(self.epochs) and self.epochs < 0:
            raise ValueError(f"epochs is {self.epochs}; expected at least 0")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch is {self.batch}; expected at least 1 row, or None for all")


def send_all(server: Tensors, who: Who) -> Tensors:
    """Send everything but names under "server/", the same to every client."""
    public = {n: v for n, v in server.items() if not n.startswith("server/")}
    return spread_out(public, len(who.ids))


def keep_nothing(received: Tensors, who: Who, generator: Generator) -> Tensors:
    """Give a new client no private state."""
    return {}


def return_received(received: Tensors, local: Tensors) -> Tensors:
    """Send back the names that came down."""
    return {n: local[n] for n in received}


def no_statistics(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    """Tell nothing."""
    return {}


def as_trained(received: Tensors, local: Tensors) -> Tensors:
    """Read the client's state as it is."""
    return local


def as_received(received: Tensors, local: Tensors) -> Tensors:
    """Read what the server sent instead of what the client made of it."""
    return local | received


@dataclass(frozen=True)
class Method:
    """A federated method; each function runs at the place named.

    Attributes:
        init: server: (generator, clients) -> the first state; `clients` is how many train.
        model: client: prior given the server, times likelihood.
        guide: client: q(w_j; local).
        phases: client: local optimisation.
        merge: server: (server, message, who, generator) -> the next state. It never sees data.
        fold: server: several messages -> one that stands for them, so that nobody need hold them
            all: merge(fold(a), fold(b)) is merge(a, b) up to rounding. None if there is no such
            message, as of a median. Whoever replaces `merge` replaces `fold`.
        download: server: (server, who) -> received [C, ...], what goes down the wire.
        join: client: (received, who, generator) -> private state of a client first seen now. All
            clients and `init` hold equal generators, so that a common start need not travel.
        upload: client: (received, local) -> message [C, ...], what goes up the wire.
        adapt: client: what the paper runs before testing, such as fine-tuning.
        deploy: server: (server, who) -> received for prediction, where it is more than `download`:
            an ensemble that nobody needs while training.
        views: the models that can be tested: "personal", "global", "ensemble".
        statistics: what the paper reports about clients besides scores: a closed form
            (received, local, batch) -> name: [C].
        shared: patterns of the sites that are one for all clients though each has a copy, such as a
            population's mean; with the auxiliary sites of their guide. Their guide reads nothing of
            the client's own, so draws of them agree once the noise does.
        tables: patterns of what the server holds of every client that trains, [J, *p]; the rows
            that `init` gives are dealt in the order of the clients' names.
        weigh: bytes [C] that tensors [C, ...] cost on the wire; `sparse` if zeros stay at home.
        all_train: every client trains every round, and participation says who reports.
        rules: what must hold for a message besides being finite: patterns of its names -> rule,
            such as `POSITIVE` for variances and precisions. A client that breaks one is rejected.

    While a client trains, local = private | received (received wins); afterwards its private state
    is the names that `join` made, cut from local. Names under "rows/" that phases make are what
    they know of its rows: these are gone when it has trained.
    """

    init: Callable[[Generator, int], Tensors]
    model: Program
    guide: Program
    phases: tuple[Phase, ...]
    merge: Callable[[Tensors, Tensors, Who, Generator], Tensors]
    fold: Fold | None = None
    download: Callable[[Tensors, Who], Tensors] = send_all
    join: Callable[[Tensors, Who, Generator], Tensors] = keep_nothing
    upload: Callable[[Tensors, Tensors], Tensors] = return_received
    adapt: tuple[Phase, ...] = ()
    views: Mapping[str, View] = field(default_factory=lambda: {"personal": as_trained})
    deploy: Callable[[Tensors, Who], Tensors] | None = None
    statistics: Move = no_statistics
    shared: str = ""
    tables: str = ""
    weigh: Callable[[Tensors], Tensor] = dense
    all_train: bool = False
    rules: Rules = field(default_factory=dict)

    @property
    def main_view(self) -> str:
        """The model that the method is about: the personal one, or else its first."""
        return "personal" if "personal" in self.views else next(iter(self.views))

    @property
    def deployed(self) -> Method:
        """The method as it is tested: clients receive what they need to predict."""
        return self if self.deploy is None else replace(self, download=self.deploy, deploy=None)
