"""What a method is: Pyro programs, a local schedule, a wire and a server update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, Whole, check_fields
from pyrofl.data import Batch, Cohort
from pyrofl.files.pickles import Pickled
from pyrofl.inference.aggregation.aggregator import Aggregate, Aggregator
from pyrofl.inference.elbo import elbo
from pyrofl.inference.metadata import (
    PER_CLIENT,
    SHARED,
    Metadata,
    Rule,
    WireCost,
    marked,
    of_kind,
)
from pyrofl.inference.optim import Optim
from pyrofl.inference.programs import Loss, Program
from pyrofl.returned import as_numbers, as_tensors, calling
from pyrofl.summaries import Summarised
from pyrofl.tensors import Tensors, dense, pick, spread_out

ClosedFormUpdate = Callable[[Tensors, Tensors, Batch], Tensors]
"""A closed form: (received, local, batch), tensors [C, *p] -> the names that change."""


@dataclass(frozen=True)
class GradientStep:
    """Take gradient steps on the local tensors whose names match.

    Attributes:
        names: shell patterns separated by spaces.
        optim: makes the optimiser; it starts afresh in every round.
        loss: per client; `elbo(...)` or what wraps it.
        num_steps: steps on each minibatch.
    """

    names: str
    optim: Optim
    loss: Loss = field(default_factory=elbo)
    num_steps: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Phase:
    """Go through the client's rows, making the moves on every minibatch in turn.

    Attributes:
        updates: gradient steps and closed-form updates.
        epochs: passes over the rows: a number, or ids [C] -> numbers [C].
        batch: rows of a minibatch; None takes all rows at once.
    """

    updates: tuple[GradientStep | ClosedFormUpdate, ...]
    epochs: Whole | Callable[[Tensor], Tensor] = 1
    batch: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.updates or not all(
            isinstance(u, GradientStep) or callable(u) for u in self.updates
        ):
            raise ValueError(f"updates are {self.updates}; expected gradient steps or functions")

    def count_epochs(self, ids: Tensor) -> Tensor:
        """Return the epochs of clients, int64 [C]."""
        if not callable(self.epochs):
            return torch.full((len(ids),), self.epochs)
        with calling("epochs"):
            found = as_numbers("what epochs returns", self.epochs(ids), (len(ids),), torch.long)
        if bool((found < 0).any()):
            raise ValueError(
                f"epochs are {found.tolist()}; expected one number >= 0 for each client"
            )
        return found.cpu().long()


def send_all(server: Tensors, cohort: Cohort) -> Tensors:
    """Send everything but names under "server/", the same to every client."""
    public = {n: v for n, v in server.items() if not n.startswith("server/")}
    return spread_out(public, len(cohort.ids))


def keep_nothing(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
    """Give a new client no private state."""
    return {}


def return_received(received: Tensors, local: Tensors) -> Tensors:
    """Send back the names that came down."""
    return {n: local[n] for n in received}


def as_trained(received: Tensors, local: Tensors) -> Tensors:
    """Read the client's state as it is."""
    return local


def as_received(received: Tensors, local: Tensors) -> Tensors:
    """Read what the server sent instead of what the client made of it."""
    return local | received


ServerPosterior = Callable[[Tensors, int, Generator], tuple[Tensors, Tensors]]
"""(server, draws, generator) -> what all clients share, [S, *p], latent sites and more; and what
each client that trains has of it, [S, J, *p], 0 for clients beyond the last row."""


@dataclass(frozen=True)
class View:
    """A model that can be tested.

    Attributes:
        read: (received, local) -> what the programs are to read as local; a list is an ensemble.
        download: (server, cohort) -> received for prediction, where clients need more than to
            train.
        posterior: of one model for all clients, where the server has one: what draws from it. None
            is that of the guide.
    """

    read: Callable[[Tensors, Tensors], Tensors | list[Tensors]]
    download: Callable[[Tensors, Cohort], Tensors] | None = None
    posterior: ServerPosterior | None = None

    def __call__(self, received: Tensors, local: Tensors) -> Tensors | list[Tensors]:
        """Return what the programs are to read as local."""
        return self.read(received, local)


@dataclass(frozen=True, repr=False)
class Method(Pickled, Summarised):
    """Federated method: programs, a local schedule and a server update.

    Attributes:
        init: Server: (generator, number of training clients) -> first state.
        model: Client: prior given the server's state, times likelihood.
        guide: Client: q(w_j; local).
        phases: Client: local optimization.
        aggregate: Server: `Aggregator` where the next state depends on weighted means of the
            messages alone, or else (server, message, cohort, generator) -> next state.
        download: Server: (server, cohort) -> received [C, ...], what is sent to clients.
        init_client: Client: (received, cohort, generator) -> private state of a new client. All
            clients and `init` get equal generators, so that a common start need not be sent.
        upload: Client: (received, local) -> message [C, ...], what is sent to the server.
        adapt: Client: phases that the paper runs before testing, such as fine-tuning.
        views: Models that can be tested, "personal", "global", "ensemble": a `View`, or its
            `read` alone.
        metadata: Rules and roles of tensors, and settings such as `train_all_clients`.
        name: Name in tables and figures.

    While a client trains, local = private | received (received wins); afterwards its private state
    is the names that `init_client` made, cut from local. Names under "rows/" that phases make are
    what they know of its rows: these are gone when it has trained.

    What is replaced by `dataclasses.replace` takes effect everywhere, or is refused.
    """

    init: Callable[[Generator, int], Tensors]
    model: Program
    guide: Program
    phases: tuple[Phase, ...]
    aggregate: Aggregate
    download: Callable[[Tensors, Cohort], Tensors] = send_all
    init_client: Callable[[Tensors, Cohort, Generator], Tensors] = keep_nothing
    upload: Callable[[Tensors, Tensors], Tensors] = return_received
    adapt: tuple[Phase, ...] = ()
    views: Mapping[str, Callable[[Tensors, Tensors], Tensors | list[Tensors]]] = field(
        default_factory=lambda: {"personal": as_trained}
    )
    metadata: Metadata = field(default_factory=Metadata)
    name: str = ""

    def __post_init__(self) -> None:
        """Validate types; refuse another model or guide where functions read the old one."""
        check_fields(self)
        for i, phase in enumerate((*self.phases, *self.adapt)):
            if not isinstance(phase, Phase):
                raise ValueError(f"phases[{i}] is a {type(phase).__name__}; expected a Phase")
        named = all(isinstance(name, str) and name for name in self.views)
        if not self.views or not named or not all(map(callable, self.views.values())):
            raise ValueError(f"views are {dict(self.views)}; expected a function by its name")
        for kind, program in self.metadata.reads.items():
            if getattr(self, kind) is not program:
                raise ValueError(
                    f"{kind} was replaced, but functions of the method read the one that it was "
                    "built with; expected build(...) with a prior, likelihood or guide of your "
                    f"own, or these functions replaced too, and {kind!r} removed from "
                    "metadata.reads"
                )

    @property
    def main_view(self) -> str:
        """The model that the method is about: the personal one, or else its first."""
        return "personal" if "personal" in self.views else next(iter(self.views))

    @property
    def posterior_view(self) -> str:
        """The model that draws are of: the one whose posterior the server has, or the main one."""
        own = (n for n, view in self.views.items() if getattr(view, "posterior", None))
        return next(own, self.main_view)

    def read_view(self, view: str, received: Tensors, local: Tensors) -> Tensors | list[Tensors]:
        """Return what programs are to read as local, [C, ...]; a list is an ensemble."""
        known, what = received | local, f"what view {view!r} returns"
        with calling(f"view {view!r}", known):
            found = self.views[view](received, local)
        clients = next((len(v) for v in known.values()), None)
        each = found if isinstance(found, list) else [found]
        for model in each or [{}]:
            if not as_tensors(what, model, clients) and known:
                raise ValueError(
                    f"{what} is empty; expected a dict of tensors made of {', '.join(known)}, or a "
                    "list of such"
                )
        return found

    def deployed(self, view: str) -> Method:
        """Return the method as it is tested: clients receive what they need to predict."""
        download = getattr(self.views[view], "download", None)
        return self if download is None else replace(self, download=download)

    @property
    def shared(self) -> str:
        """Patterns of the sites that are one for all clients though each has a copy."""
        return marked(self.metadata.tensors, SHARED)

    @property
    def per_client(self) -> str:
        """Patterns of what the server holds of every client that trains, [J, *p]."""
        return marked(self.metadata.tensors, PER_CLIENT)

    @property
    def rules(self) -> dict[str, Rule]:
        """Patterns of names -> what must hold for a message besides being finite."""
        return of_kind(self.metadata.tensors, Rule)

    def message_bytes(self, tensors: Tensors) -> Tensor:
        """Return the bytes [C] that tensors [C, ...] cost on the wire."""
        total = dense(tensors)
        for names, cost in of_kind(self.metadata.tensors, WireCost).items():
            for name, value in pick(tensors, names).items():
                total = total - dense({name: value}) + cost.count(name, tensors)
        return total

    @property
    def title(self) -> str:
        """What it is called, where it has a name."""
        return f"Method {self.name}".strip()

    @property
    def programs(self) -> str:
        """The names of its programs."""
        return f"{_name(self.model)}, with the guide {_name(self.guide)}"

    def summary(self) -> Mapping[str, object]:
        """Tell what it is."""
        return {
            "model": self.programs,
            **({"sites": self.metadata.sites} if self.metadata.sites else {}),
            "clients": "; ".join(map(_told, self.phases)) or "do not train",
            "server": self.aggregate
            if isinstance(self.aggregate, Aggregator)
            else _name(self.aggregate),
            "views": ", ".join(self.views) + "; adapted before a test" * bool(self.adapt),
            "rounds": "all clients train"
            if self.metadata.train_all_clients
            else "who reports trains",
        }


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__).strip("_")


def _moved(move: GradientStep | ClosedFormUpdate) -> str:
    return move.names if isinstance(move, GradientStep) else _name(move)


def _told(phase: Phase) -> str:
    """Say what a phase moves, and how often."""
    epochs = "epochs by client" if callable(phase.epochs) else f"{phase.epochs}"
    return f"{', '.join(map(_moved, phase.updates))} ({epochs} x {phase.batch or 'all'} rows)"
