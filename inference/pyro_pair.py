"""A method's model and guide as Pyro programs without arguments, with parameters in Pyro's store.

`Method.to_pyro` returns them. They read the rows and tensors of one client, or of all clients under
the client plate, at a state of a run. Everything that Pyro does with programs works on them: SVI,
NUTS, Predictive, autoguides, handlers and `pyro.render_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyrofl.arguments import check_name
from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.elbo import (
    Elbo,
    On,
    TransformedLoss,
    base_of,
    latent,
    trace_program,
    with_rows,
)
from pyrofl.inference.definition.metadata import LocalPair
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.programs import Guide, Loss, Program
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState, client_inputs
from pyrofl.tensors import Tensors, default_type, pick, seeded
from pyrofl.user_warnings import warn_user


class PyroPair(NamedTuple):
    """Model and guide of a method as Pyro programs without arguments.

    Attributes:
        model: the model of the given clients' rows, at a state of a run.
        guide: the guide, with a `pyro.param` for every tensor that gradient steps train.
    """

    model: Callable[[], object]
    guide: Callable[[], object]


def to_pyro(
    method: Method,
    data: Federation,
    client: str | None = None,
    state: RoundState | None = None,
    *,
    phase: int | None = None,
    seed: int = 0,
) -> PyroPair:
    """Return model and guide as Pyro programs without arguments, with `pyro.param` statements.

    Use them with SVI, NUTS, Predictive, autoguides, handlers and `pyro.render_model`. Their
    parameters are the tensors [C, *p] that gradient steps train; they start at the state.
    Closed-form updates of earlier phases, such as pFedVEM's confidence, are computed once.

    Of PVI, also `pvi.hierarchical`, FedEP, FedGVI and VIRTUAL they are what a client fits: the
    likelihood of its rows with the cavity, the posterior without the client's own factor, as prior
    of what clients share.

    Args:
        method: the method.
        data: the federation.
        client: name of a client; None for all clients under the client plate.
        state: a run, or the state of a round; None is the state before round one.
        phase: number of the phase whose tensors are parameters, from 0; None for all phases.
        seed: seed of the initial states, as in `fit`.

    Returns:
        A pair (model, guide). Their ELBO has weight 1 for the divergence from the prior, and is
        the sum over rows and clients.

    Raises:
        ValueError: if the client is unknown, the method has no gradient steps or states why it has
            no such pair, or a cavity is no distribution; from the programs, if Pyro's store has
            parameters of another client or state.

    Warns:
        UserWarning: if the method's own loss weighs the divergence by another number, or has
            another divergence.

    Examples:
        >>> import pyro
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyrofl import datasets, federations, nets
        >>> from pyrofl.models import pfedvem
        >>> data = federations.split(datasets.load("digits"), "slices:5", clients=4)
        >>> method = pfedvem.build(nets.build("softmax", (64,), 10))
        >>> pyro.clear_param_store()
        >>> model, guide = method.to_pyro(data, "client 1")
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
        >>> loss = svi.step()
        >>> sorted(pyro.get_param_store())
        ['mu/head.bias', 'mu/head.weight', 'pi/head.bias', 'pi/head.weight']
    """
    ids = torch.arange(data.clients)
    if client is not None:
        check_name(client, data.names, "client")
        ids = torch.tensor([data.names.index(client)])
    batch = data.batch(ids)
    state = first(method, data, seed) if state is None else getattr(state, "state", state)
    pair, used = method.metadata.pair, method
    if isinstance(pair, str):
        raise ValueError(f"to_pyro of {method.name or 'this method'} is not possible: {pair}")
    if pair and pair.download:
        used = replace(method, download=pair.download)
    received, stored = client_inputs(used, data, state, data.cohort(ids), seed)
    programs = declared_pair if pair else pair_from_gradient_steps
    with torch.no_grad():
        base, program, local, trainable, transforms, loss_difference = programs(
            method, phase, received, stored, batch
        )
    if loss_difference:
        warn_user(
            f"the loss of {method.name or 'this method'} {loss_difference}, so SVI and NUTS "
            "approximate another distribution than the method"
        )

    def tensors(values: Tensors) -> tuple[Tensors, Tensors, Batch]:
        """Return the arguments of the method's programs, as its losses transform them."""
        down = received
        for transform in transforms:
            center = transform.center(down, values) if transform.center else down
            down, values = center, transform.view(down, values)
        return with_rows(down, len(batch)), with_rows(values, len(batch)), batch

    def with_parameters() -> tuple[Tensors, Tensors, Batch]:
        """Return the arguments, with parameters from Pyro's store."""
        return tensors({n: parameter(n, v) if n in names else v for n, v in local.items()})

    registered = set[str]()

    def parameter(name: str, start: Tensor) -> Tensor:
        """Return a parameter of Pyro's store, which starts at a tensor of the run."""
        if name not in registered and name in pyro.get_param_store():
            raise ValueError(
                f"Pyro's parameter store already has {name!r}, as of another client or state; call "
                "pyro.clear_param_store() first, or work inside pyro.get_param_store().scope()"
            )
        registered.add(name)
        value: Tensor = pyro.param(name, lambda: start.detach().clone())
        return value

    def run(values: Tensors) -> tuple[Any, Any]:
        """Return traces of the guide and of the model."""
        with default_type(batch.size.dtype), seeded(seed):
            try:
                q = trace_program(program, tensors(values))
                return q, trace_program(base, tensors(values), q)
            except RuntimeError as error:
                if "several sites are named 'clients'" not in str(error):
                    raise
                raise ValueError(
                    f"programs of {method.name or 'this method'} enter batch.clients() several "
                    "times, which Pyro's own inference refuses; use run.posterior, to_arviz, or "
                    "reference.nuts and reference.hmc on your own program"
                ) from None

    names = set(read_tensors(run, local, pick(local, trainable)))
    start = {n: site["value"].detach() for n, site in latent(run(local)[0])}

    def model() -> object:
        """Sample the latent sites of the clients, and observe the responses of their rows."""
        with default_type(batch.size.dtype), StartFlatPriors(start):
            return base(*with_parameters())

    def guide() -> object:
        """Sample the latent sites of the clients from their approximate posterior."""
        with default_type(batch.size.dtype), DeltaDensitiesAsFactors():
            return program(*with_parameters())

    return PyroPair(model, guide)


class LocalPrograms(NamedTuple):
    """Programs of a method with arguments, and what they read.

    Attributes:
        model: the Pyro model.
        guide: the Pyro guide, without the refusal of SVI.
        local: the tensors [C, *p] from which clients start.
        trainable: of those that may be parameters.
        transforms: how the method's loss transforms the tensors that programs read.
        loss_difference: how the method's loss differs from the programs' ELBO, or empty.
    """

    model: Program
    guide: Program
    local: Tensors
    trainable: str
    transforms: list[TransformedLoss]
    loss_difference: str


def declared_pair(
    method: Method, phase: int | None, received: Tensors, local: Tensors, batch: Batch
) -> LocalPrograms:
    """Return the pair that a method declares to be that of its clients, as PVI does.

    Raises:
        ValueError: if a phase is given, as all phases fit this pair.
    """
    pair = method.metadata.pair
    assert isinstance(pair, LocalPair)
    if phase is not None:
        raise ValueError(
            f"phase is {phase}; expected None, as all phases of {method.name or 'this method'} fit "
            "the same model and guide"
        )
    start = {n: v.detach() for n, v in pair.start(received, local | received, batch).items()}
    return LocalPrograms(pair.model, pair.guide, start, pair.names, [], pair.loss_difference)


def pair_from_gradient_steps(
    method: Method, phase: int | None, received: Tensors, local: Tensors, batch: Batch
) -> LocalPrograms:
    """Return a method's own model and guide, with the tensors of its gradient steps.

    Raises:
        ValueError: if there are no such steps.
    """
    at, steps = trained_steps(method, phase)
    transforms, kl = transforms_and_kl_weight(steps[0].loss)
    trainable = " ".join(step.names for step in steps)
    if phase is None:  # a guide may be set in closed form, as that of FedPop
        trainable += f" {getattr(method.guide, 'names', '')}"
    loss_difference = ""
    if kl not in (0, 1):
        loss_difference = (
            f"weighs the divergence of the guide from the prior by {kl}; the programs have weight 1"
        )
    # Guides of the library refuse SVI when they are called, as they have no parameters of Pyro.
    program = method.guide.program if isinstance(method.guide, Guide) else method.guide
    local = prepared(method, at, received, local | received, batch)
    return LocalPrograms(method.model, program, local, trainable, transforms, loss_difference)


class DeltaDensitiesAsFactors(Messenger):
    """Pyro handler that states the log densities of Delta sites as factors.

    `TraceMeanField_ELBO` takes the divergence of a Delta from the prior without them, so it would
    train no spread of a guide whose sites are functions of noise.
    """

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if isinstance(fn, dist.Delta) and not msg["is_observed"] and bool(fn.log_density.any()):
            pyro.factor(f"_density/{msg['name']}", fn.log_density, has_rsample=True)
            msg["fn"] = dist.Delta(fn.v, event_dim=fn.event_dim)


class StartFlatPriors(Messenger):
    """Pyro handler that starts sites with flat priors, which cannot be sampled, at given values."""

    def __init__(self, values: Tensors) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        unknown = msg["value"] is None and not msg["is_observed"]
        if (
            unknown
            and isinstance(base_of(msg["fn"]), dist.ImproperUniform)
            and msg["name"] in self.values
        ):
            shape = msg["fn"].batch_shape + msg["fn"].event_shape
            msg["value"] = self.values[msg["name"]].expand(shape)


def read_tensors(
    run: Callable[[Tensors], tuple[Any, Any]], local: Tensors, names: Collection[str]
) -> Iterator[str]:
    """Yield which of the named tensors the log densities of guide or model depend on."""
    values = {n: v.clone().requires_grad_() for n, v in local.items() if n in names}
    sites = [s for trace in run(local | values) for s in trace.nodes.values()]
    densities = [
        site["fn"].log_prob(site["value"]).sum()
        for site in sites
        if site["type"] == "sample" and not site_is_subsample(site)
    ]
    gradients = torch.autograd.grad(sum(densities), [*values.values()], allow_unused=True)
    for name, gradient in zip(values, gradients, strict=True):
        if gradient is not None:
            yield name


def trained_steps(method: Method, phase: int | None) -> tuple[int, list[GradientStep]]:
    """Return the number of the first phase that trains, and the gradient steps that train.

    These are the steps of a given phase, or all steps on the method's own model and guide.

    Raises:
        ValueError: if there are none.
    """
    steps = [
        (i, update)
        for i, one in enumerate(method.phases)
        for update in one.updates
        if isinstance(update, GradientStep) and not isinstance(update.loss, On)
    ]
    if not steps:
        raise ValueError(
            "to_pyro needs a method with gradient steps on its model and guide, as the tensors "
            "that they train are the parameters; of others use run.posterior or to_arviz"
        )
    numbers = sorted({i for i, _ in steps})
    if phase is not None and phase not in numbers:
        raise ValueError(
            f"phase is {phase}; expected a phase with gradient steps on the method's model and "
            f"guide: {', '.join(map(str, numbers))}"
        )
    trained = [(i, step) for i, step in steps if phase in (None, i)]
    return trained[0][0], [step for _, step in trained]


def transforms_and_kl_weight(loss: Loss) -> tuple[list[TransformedLoss], float]:
    """Return how a loss transforms the tensors that programs read, and its weight of the KL."""
    transforms = []
    while isinstance(loss, TransformedLoss):
        transforms.append(loss)
        loss = loss.loss
    if isinstance(loss, Elbo) and not callable(loss.kl):
        return transforms, loss.kl
    return transforms, 1.0


def prepared(
    method: Method, phase: int, received: Tensors, local: Tensors, batch: Batch
) -> Tensors:
    """Return the local tensors after the closed-form updates of the phases before a phase."""
    for before in method.phases[:phase]:
        for update in before.updates:
            if not isinstance(update, GradientStep):
                local = local | update(received, local, batch)
    return {n: v.detach() for n, v in local.items()}
