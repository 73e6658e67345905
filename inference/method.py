"""What a method is: Pyro programs, a local schedule, a wire and a server update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import import_module
from typing import get_args

from torch import Generator, Tensor

from pyrofl import docstrings
from pyrofl.arguments import Count, Whole, check_fields
from pyrofl.data import Batch, Who
from pyrofl.files.pickles import Pickled
from pyrofl.inference.aggregation.aggregator import Aggregate, Aggregator
from pyrofl.inference.budget import Promise
from pyrofl.inference.elbo import elbo
from pyrofl.inference.metadata import (
    PER_CLIENT,
    SHARED,
    MetadataByPattern,
    Rule,
    TensorMetadata,
    WireCost,
    marked,
    of_kind,
)
from pyrofl.inference.optim import Optim
from pyrofl.inference.programs import Loss, Program
from pyrofl.recipes import Recipe
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
        repeat: steps on each minibatch.
    """

    names: str
    optim: Optim
    loss: Loss = field(default_factory=elbo)
    num_steps: Count = 1

    def __post_init__(self) -> None:
        """Check the count."""
        check_fields(self)


@dataclass(frozen=True)
class Phase:
    """Go through the client's rows, making the moves on every minibatch in turn.

    Attributes:
        moves: gradient steps and closed forms.
        epochs: passes over the rows: a number, or ids [C] -> numbers [C].
        batch: rows of a minibatch; None takes all rows at once.
    """

    updates: tuple[GradientStep | ClosedFormUpdate, ...]
    epochs: Whole | Callable[[Tensor], Tensor] = 1
    batch: Count | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_fields(self)


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


def keep_server_state(server: Tensors, who: Who) -> Tensors:
    """Keep what the server knows, where nothing in it has to fit what clients keep."""
    return server


def send_unchanged(received: Tensors, message: Tensors, sources: Sequence[Generator]) -> Tensors:
    """Send the message as it is."""
    return message


def no_statistics(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    """Tell nothing."""
    return {}


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
        download: (server, who) -> received for prediction, where clients need more than to train.
        posterior: of one model for all clients, where the server has one: what draws from it. None
            is that of the guide.
    """

    read: Callable[[Tensors, Tensors], Tensors | list[Tensors]]
    download: Callable[[Tensors, Who], Tensors] | None = None
    posterior: ServerPosterior | None = None

    def __call__(self, received: Tensors, local: Tensors) -> Tensors | list[Tensors]:
        """Return what the programs are to read as local."""
        return self.read(received, local)


@dataclass(frozen=True, repr=False)
class Method(Pickled, Summarised):
    """A federated method; each function runs at the place named.

    Attributes:
        init: server: (generator, clients) -> the first state; `clients` is how many train.
        model: client: prior given the server, times likelihood.
        guide: client: q(w_j; local).
        phases: client: local optimisation.
        aggregate: server: `Aggregator` where the next state depends on weighted means of the
            messages alone, or else (server, message, who, generator) -> the next state. It never
            sees data.
        download: server: (server, who) -> received [C, ...], what goes down the wire.
        init_client: client: (received, who, generator) -> private state of a client first seen
            now. All clients and `init` hold equal generators, so that a common start need not
            travel.
        upload: client: (received, local) -> message [C, ...], what goes up the wire.
        reset_clients: server: (server, who) -> the state once clients that it has heard have lost
            what they keep and are to `init_client` again; ValueError where nobody can tell it.
        adapt: client: what the paper runs before testing, such as fine-tuning.
        views: the models that can be tested, "personal", "global", "ensemble": a `View`, or its
            `read` alone.
        statistics: what the paper reports about clients besides scores: a closed form
            (received, local, batch) -> name: [C], or [C, *p] for what only `to_arviz` has room
            for: there "WHAT/SITE" has the axes of the site.
        metadata: patterns of names -> what holds for them: rules that messages must obey, sites
            that all clients share, tables with a row for every client, costs on the wire; see
            `metadata`.
        train_all_clients: every client trains every round, and participation says who reports.
        privatize: client: (received, message [C, ...], a generator of each client's own) -> what
            leaves the client instead, of the same names and shapes.
        privacy: what a method promises whose server's states are private, see `privacy.private`.
        name: what results call it.
        sites: which sites of the model clients share, and which are their own; shown before a fit.
        recipe: how the library's `build` was called, for `pyrofl.load`; what is replaced later is
            not in it.

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
    download: Callable[[Tensors, Who], Tensors] = send_all
    init_client: Callable[[Tensors, Who, Generator], Tensors] = keep_nothing
    upload: Callable[[Tensors, Tensors], Tensors] = return_received
    reset_clients: Callable[[Tensors, Who], Tensors] = keep_server_state
    adapt: tuple[Phase, ...] = ()
    views: Mapping[str, Callable[[Tensors, Tensors], Tensors | list[Tensors]]] = field(
        default_factory=lambda: {"personal": as_trained}
    )
    statistics: ClosedFormUpdate = no_statistics
    metadata: MetadataByPattern = field(default_factory=dict)
    train_all_clients: bool = False
    privatize: Callable[[Tensors, Tensors, Sequence[Generator]], Tensors] = send_unchanged
    privacy: Promise | None = None
    name: str = ""
    sites: str = ""
    recipe: Recipe | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Refuse fields of another kind, and programs that a part, `built_for` others, ignores."""
        check_fields(self)
        for i, phase in enumerate((*self.phases, *self.adapt)):
            if not isinstance(phase, Phase):
                raise ValueError(f"phases[{i}] is a {type(phase).__name__}; expected a Phase")
        if not self.views or not all(map(callable, self.views.values())):
            raise ValueError(f"views are {dict(self.views)}; expected a function by its name")
        for name, fact in self.metadata.items():
            if not isinstance(fact, (tuple, *get_args(TensorMetadata))):
                raise ValueError(f"metadata[{name!r}] is {fact!r}; expected a Rule or its like")
        names = ("init", "aggregate", "download", "init_client", "upload", "statistics", "model")
        parts: dict[str, object] = {n: getattr(self, n) for n in names}
        parts |= {f"the view {n!r}": view for n, view in self.views.items()}
        for kind, phases in (("phases", self.phases), ("adapt", self.adapt)):
            for i, phase in enumerate(phases):
                for move in phase.updates:
                    moving = move.loss if isinstance(move, GradientStep) else move
                    parts[f"{kind}[{i}] ({_moved(move)})"] = moving
        for what, function in parts.items():
            for kind, program in getattr(function, "built_for", {}).items():
                if getattr(self, kind) is not program:
                    raise ValueError(
                        f"{kind} was replaced, but {what} reads the one that the method was built "
                        "with; expected build(...) with a prior, likelihood or guide of your own, "
                        f"or {what} replaced too"
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

    def deployed(self, view: str) -> Method:
        """Return the method as it is tested: clients receive what they need to predict."""
        download = getattr(self.views[view], "download", None)
        return self if download is None else replace(self, download=download)

    @property
    def shared(self) -> str:
        """Patterns of the sites that are one for all clients though each has a copy."""
        return marked(self.metadata, SHARED)

    @property
    def per_client(self) -> str:
        """Patterns of what the server holds of every client that trains, [J, *p]."""
        return marked(self.metadata, PER_CLIENT)

    @property
    def rules(self) -> dict[str, Rule]:
        """Patterns of names -> what must hold for a message besides being finite."""
        return of_kind(self.metadata, Rule)

    def message_bytes(self, tensors: Tensors) -> Tensor:
        """Return the bytes [C] that tensors [C, ...] cost on the wire."""
        total = dense(tensors)
        for names, cost in of_kind(self.metadata, WireCost).items():
            for name, value in pick(tensors, names).items():
                total = total - dense({name: value}) + cost.bytes(name, tensors)
        return total

    @property
    def title(self) -> str:
        """What it is called, where it has a name."""
        return f"Method {self.name}".strip()

    def _more_html(self) -> str:
        """Show what its paper says: who wrote it, its equations, where to use it."""
        if self.recipe is None:
            return ""
        paper = docstrings.paper(import_module(self.recipe.maker.partition(":")[0]).__doc__ or "")
        blocks = "\n\n".join("\n".join(block) for block in paper.equations[:2])
        texts = (f"<p>{escape(text)}</p>" for text in (paper.source, paper.use) if text)
        return f"{''.join(texts)}<pre>{escape(blocks)}</pre>"

    @property
    def programs(self) -> str:
        """The names of its programs."""
        return f"{_name(self.model)}, with the guide {_name(self.guide)}"

    def summary(self) -> Mapping[str, object]:
        """Tell what it is."""
        return {
            "model": self.programs,
            **({"sites": self.sites} if self.sites else {}),
            "clients": "; ".join(map(_told, self.phases)) or "do not train",
            "server": self.aggregate
            if isinstance(self.aggregate, Aggregator)
            else _name(self.aggregate),
            "views": ", ".join(self.views) + "; adapted before a test" * bool(self.adapt),
            "rounds": "all clients train" if self.train_all_clients else "who reports trains",
        }


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__).strip("_")


def _moved(move: GradientStep | ClosedFormUpdate) -> str:
    return move.names if isinstance(move, GradientStep) else _name(move)


def _told(phase: Phase) -> str:
    """Say what a phase moves, and how often."""
    epochs = "epochs by client" if callable(phase.epochs) else f"{phase.epochs}"
    return f"{', '.join(map(_moved, phase.updates))} ({epochs} x {phase.batch or 'all'} rows)"
