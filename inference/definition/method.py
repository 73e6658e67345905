"""Federated methods: Pyro programs, local training, messages and server aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import isclass
from typing import Any

import torch
from torch import Generator, Tensor

import pyrofl
from pyrofl.arguments import Count, Whole, accepts, check_fields, described
from pyrofl.data import Batch, Cohort, Federation
from pyrofl.files.pickles import Pickled
from pyrofl.inference.definition.aggregator import Aggregate, Aggregator
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import (
    PER_CLIENT,
    SHARED,
    JointRule,
    Metadata,
    Rule,
    WireCost,
    marked_names,
    metadata_of_class,
)
from pyrofl.inference.definition.optim import Optim
from pyrofl.inference.definition.programs import Loss, Program
from pyrofl.recipes import rebuild
from pyrofl.returned import as_numbers, as_tensors, calling
from pyrofl.summaries import Summarized
from pyrofl.tensors import Tensors, dense_bytes, pick, spread_out

ClosedFormUpdate = Callable[[Tensors, Tensors, Batch], Tensors]
"""Function (received, local, batch), tensors [C, *p] -> new values of the names that change."""


@dataclass(frozen=True)
class GradientStep:
    """Update of a client's tensors with matching names by gradient steps on a loss.

    Attributes:
        names: shell patterns separated by spaces.
        optim: function that creates the optimizer; its state is reset in every round.
        loss: loss per client, [C]: `elbo(...)` or a wrapper of it.
        num_steps: steps on each minibatch.

    Examples:
        >>> from pyrofl.inference.definition.elbo import elbo
        >>> from pyrofl.inference.definition.optim import adam
        >>> step = GradientStep("q/*", adam(0.01), elbo(num_particles=4))
    """

    names: str
    optim: Optim
    loss: Loss = field(default_factory=elbo)
    num_steps: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Phase:
    """Phase of local training: updates that run on each minibatch of a client's rows.

    Attributes:
        updates: gradient steps and closed-form updates.
        epochs: passes over the rows: a number, or ids [C] -> numbers [C].
        batch: rows of a minibatch; None uses all rows at once.

    Examples:
        >>> from pyrofl.inference.definition.elbo import elbo
        >>> from pyrofl.inference.definition.optim import sgd
        >>> phase = Phase((GradientStep("q/*", sgd(0.1), elbo()),), epochs=5, batch=32)
    """

    updates: tuple[GradientStep | ClosedFormUpdate, ...]
    epochs: Whole | Callable[[Tensor], Tensor] = 1
    batch: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.updates or not all(
            isinstance(u, GradientStep) or callable(u) for u in self.updates
        ):
            raise ValueError(
                f"updates are {self.updates}; expected at least one, each a GradientStep or a "
                "function (received, local, batch) -> tensors"
            )

    def count_epochs(self, ids: Tensor) -> Tensor:
        """Return the number of local training epochs of the given clients, int64 [C]."""
        if not callable(self.epochs):
            return torch.full((len(ids),), self.epochs)
        with calling("epochs"):
            epochs = as_numbers("what epochs returns", self.epochs(ids), (len(ids),), torch.long)
        if bool((epochs < 0).any()):
            raise ValueError(f"epochs are {epochs.tolist()}; expected integers >= 0")
        return epochs.cpu().long()


def send_all(server: Tensors, cohort: Cohort) -> Tensors:
    """Send all server tensors to each client, except those with names under "server/"."""
    public = {n: v for n, v in server.items() if not n.startswith("server/")}
    return spread_out(public, len(cohort.ids))


def keep_nothing(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
    """Return an empty client state: clients keep no tensors between rounds."""
    return {}


def return_received(received: Tensors, local: Tensors) -> Tensors:
    """Return a message with the client's trained values of the tensors that it received."""
    return {n: local[n] for n in received}


def as_trained(received: Tensors, local: Tensors) -> Tensors:
    """Return the client's trained tensors unchanged, as those of its predictive model."""
    return local


def as_received(received: Tensors, local: Tensors) -> Tensors:
    """Return the client's tensors, with trained values replaced by those from the server."""
    return local | received


ServerPosterior = Callable[[Tensors, int, Generator], tuple[Tensors, Tensors]]
"""(server, draws, generator) -> draws of shared tensors [S, *p], latent sites and others; and
draws of the training clients' tensors [S, J, *p], 0 for clients beyond the last row."""


@dataclass(frozen=True)
class View:
    """Predictive model of a method, such as the personal or the global model.

    Attributes:
        read: (received, local) -> tensors that the programs read as local; a list is an ensemble.
        download: (server, cohort) -> received tensors for prediction, where these differ from the
            ones for training.
        posterior: function that draws from a posterior of the server, for one model of all
            clients; None draws from the guide.
        exact: whether draws of the guide are of the exact posterior, given the server's state, so
            that they need no correction; None never.
        listed: of a guide that selects among draws of the server: server state -> `ServerDraws`,
            for their correction by further draws; None corrects by weights of these draws alone.
    """

    read: Callable[[Tensors, Tensors], Tensors | list[Tensors]]
    download: Callable[[Tensors, Cohort], Tensors] | None = None
    posterior: ServerPosterior | None = None
    exact: Callable[[Tensors], bool] | None = None
    listed: Callable[[Tensors], Any] | None = None

    def __call__(self, received: Tensors, local: Tensors) -> Tensors | list[Tensors]:
        """Return the tensors of the predictive model, or a list of them for an ensemble."""
        return self.read(received, local)


@dataclass(frozen=True, repr=False)
class Method(Pickled, Summarized):
    """Federated method: Pyro model and guide, local training, messages and aggregation.

    Attributes:
        init: Server: (generator, number of training clients) -> initial state.
        model: Client: prior given the server's state, times likelihood.
        guide: Client: q(w_j; local).
        phases: Client: local optimization.
        aggregate: Server: `Aggregator` where the next state depends only on weighted means of the
            messages, otherwise (server, message, cohort, generator) -> next state.
        download: Server: (server, cohort) -> received [C, ...], what is sent to clients.
        init_client: Client: (received, cohort, generator) -> client state of a new client. All
            clients and `init` get equal generators, so that equal initial values need no message.
        upload: Client: (received, local) -> message [C, ...], what is sent to the server.
        adapt: Client: phases that the paper runs before evaluation, such as fine-tuning.
        views: Models that can be evaluated, "personal", "global", "ensemble": a `View`, or only
            its `read`.
        metadata: Rules and roles of tensors, and settings such as `train_all_clients`.
        name: Name in tables and figures.

    While a client trains, local = client state | received (received wins); afterwards its client
    state is the part of local with the names that `init_client` returned. Phases may create names
    under "rows/" for statistics of a client's rows: these are deleted after its training.

    A field replaced by `dataclasses.replace` takes effect everywhere, or an error is raised.

    Examples:
        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyrofl.data import Federation
        >>> from pyrofl.inference.aggregation import Aggregator, uniform
        >>> from pyrofl.inference.definition.elbo import elbo
        >>> from pyrofl.inference.engine.federate import federate
        >>> from pyrofl.inference.definition.optim import sgd
        >>> def model(received, local, batch):
        ...     with batch.clients():
        ...         mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...         with batch.rows():
        ...             pyro.sample("y", dist.Normal(mu, 1.0), obs=batch.y)
        >>> def guide(received, local, batch):
        ...     with batch.clients():
        ...         pyro.sample("mu", dist.Delta(local["m"]))
        >>> method = Method(
        ...     name="mean",
        ...     init=lambda generator, clients: {"m": torch.zeros(())},
        ...     model=model,
        ...     guide=guide,
        ...     init_client=lambda received, cohort, generator: received,
        ...     phases=(Phase((GradientStep("m", sgd(0.1), elbo()),), epochs=50, batch=None),),
        ...     upload=lambda received, local: local,
        ...     aggregate=Aggregator({"*": uniform}),
        ... )
        >>> data = Federation.from_arrays({"A": (torch.zeros(2, 1), [1.0, 3.0])})
        >>> *_, state = federate(method, data, rounds=1)
        >>> round(float(state.server["m"]), 1)
        2.0
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
        """Validate the fields; reject a replaced model or guide that other functions still read."""
        for kind in ("model", "guide"):
            program, setting = getattr(self, kind), "guide" if kind == "guide" else "prior"
            if isclass(program) or not accepts(program, {}, {}, None):
                raise ValueError(
                    f"{kind} is {described(program)}; expected a Pyro program (received, local, "
                    f"batch); method.swap({setting}=...) builds a method again with another "
                    f"{setting}"
                )
        check_fields(self)
        for i, phase in enumerate((*self.phases, *self.adapt)):
            if not isinstance(phase, Phase):
                raise ValueError(f"phases[{i}] is a {type(phase).__name__}; expected a Phase")
        named = all(isinstance(name, str) and name for name in self.views)
        if not self.views or not named or not all(map(callable, self.views.values())):
            raise ValueError(
                f"views are {dict(self.views)}; expected a dict of name -> View or function "
                "(received, local) -> tensors, such as {'personal': as_trained}"
            )
        for kind, program in self.metadata.reads.items():
            if getattr(self, kind) is not program:
                settings = "guide=..." if kind == "guide" else "prior=... or likelihood=..."
                raise ValueError(
                    f"{kind} was replaced, but other functions of the method read the original; "
                    f"pass {settings} to build(...), or to method.swap(...), which builds the "
                    f"method again, or replace these functions too and remove {kind!r} from "
                    "metadata.reads"
                )

    def swap(self, **settings: Any) -> Method:
        """Return the method built again with another prior, guide, likelihood or other settings.

        Args:
            settings: arguments of the `build` function that made this method; all others stay.

        Raises:
            ValueError: if no `build` function made this method, or a setting does not fit.

        Examples:
            >>> import pyro.distributions as dist
            >>> from pyrofl import guides, nets
            >>> from pyrofl.models import pfedvem
            >>> method = pfedvem.build(nets.build("softmax", (4,), 2), lr_head=0.01)
            >>> other = method.swap(prior=dist.Laplace, guide=guides.full_covariance)
            >>> other.guide.names
            'mu/* pi/*'
        """
        swapped: Method = rebuild(self, **settings)
        return swapped

    def to_pyro(
        self,
        data: Federation,
        client: str | None = None,
        state: Any = None,
        *,
        phase: int | None = None,
        seed: int = 0,
    ) -> Any:
        """Return model and guide as Pyro programs with parameters; see `pyrofl.to_pyro`."""
        package: Any = pyrofl  # which imports the function when it is first used
        return package.to_pyro(self, data, client, state, phase=phase, seed=seed)

    @property
    def main_view(self) -> str:
        """Name of the main predictive model: "personal" if the method has one."""
        return "personal" if "personal" in self.views else next(iter(self.views))

    @property
    def posterior_view(self) -> str:
        """Name of the predictive model from which posterior draws are taken."""
        names = (n for n, view in self.views.items() if getattr(view, "posterior", None))
        return next(names, self.main_view)

    def read_view(self, view: str, received: Tensors, local: Tensors) -> Tensors | list[Tensors]:
        """Return the tensors [C, ...] of a predictive model, or a list of them for an ensemble."""
        tensors, what = received | local, f"what view {view!r} returns"
        with calling(f"view {view!r}", tensors):
            parameters = self.views[view](received, local)
        clients = next((len(v) for v in tensors.values()), None)
        each = parameters if isinstance(parameters, list) else [parameters]
        for model in each or [{}]:
            if not as_tensors(what, model, clients) and tensors:
                raise ValueError(
                    f"{what} is empty; expected a dict of tensors computed from "
                    f"{', '.join(tensors)}, or a list of such dicts"
                )
        return parameters

    def deployed(self, view: str) -> Method:
        """Return a copy of the method whose clients download what a predictive model needs."""
        download = getattr(self.views[view], "download", None)
        return self if download is None else replace(self, download=download)

    @property
    def shared(self) -> str:
        """Name patterns of the sample sites that all clients share, joined by spaces."""
        return marked_names(self.metadata.tensors, SHARED)

    @property
    def per_client(self) -> str:
        """Name patterns of server tensors with one entry for each training client, [J, *p]."""
        return marked_names(self.metadata.tensors, PER_CLIENT)

    @property
    def rules(self) -> list[tuple[str, Rule]]:
        """Rules for single tensors of messages besides being finite, after their name patterns."""
        each = metadata_of_class(self.metadata.tensors, Rule)
        return [(names, rule) for names, rule in each if not isinstance(rule, JointRule)]

    def message_bytes(self, tensors: Tensors) -> Tensor:
        """Return the size in bytes [C] of each client's tensors when they are sent as a message."""
        total = dense_bytes(tensors)
        for names, cost in metadata_of_class(self.metadata.tensors, WireCost):
            for name, value in pick(tensors, names).items():
                total = total - dense_bytes({name: value}) + cost.count(name, tensors)
        return total

    @property
    def title(self) -> str:
        """Title of the printed summary, with the name of the method if it has one."""
        return f"Method {self.name}".strip()

    @property
    def programs(self) -> str:
        """Names of the model and the guide, as text for the printed summary."""
        return f"{_name(self.model)}, with the guide {_name(self.guide)}"

    def overview(self) -> Mapping[str, object]:
        """Return the printed summary of the method, as label -> text."""
        return {
            "model": self.programs,
            **({"sites": self.metadata.sites} if self.metadata.sites else {}),
            "clients": "; ".join(map(_phase_line, self.phases)) or "do not train",
            "server": self.aggregate
            if isinstance(self.aggregate, Aggregator)
            else _name(self.aggregate),
            "views": ", ".join(self.views) + "; adapted before evaluation" * bool(self.adapt),
            "rounds": "all clients train"
            if self.metadata.train_all_clients
            else "only reporting clients train",
        }


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__).strip("_")


def _moved(move: GradientStep | ClosedFormUpdate) -> str:
    return move.names if isinstance(move, GradientStep) else _name(move)


def _phase_line(phase: Phase) -> str:
    """Describe a training phase in one line: its updates, epochs and batch size."""
    epochs = "epochs by client" if callable(phase.epochs) else f"{phase.epochs}"
    return f"{', '.join(map(_moved, phase.updates))} ({epochs} x {phase.batch or 'all'} rows)"


def phase_and_step(method: Method) -> tuple[Phase, GradientStep]:
    """Return the training phase and gradient step of a method that has one of each, as FedAvg."""
    (phase,) = method.phases
    (step,) = phase.updates
    assert isinstance(step, GradientStep)
    return phase, step
