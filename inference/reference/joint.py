"""Joint model of all clients, in which shared sites are sampled once, on all their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from pyrofl.arguments import check_name
from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.elbo import is_deterministic, latent, with_rows
from pyrofl.inference.definition.metadata import SHARED, Metadata
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.engine.origin import refuse_other_clients
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.inference.posteriors.draws import Values, is_per_row
from pyrofl.inference.training.noise import Message, is_unset_latent
from pyrofl.returned import calling
from pyrofl.tensors import (
    Tensors,
    default_type,
    matches,
    seeded,
    suggest_name,
    unmatched_patterns,
)


class OnePrior(dist.TorchDistribution):
    """Prior of a shared site, defined by the first client of a distribution with a client axis."""

    arg_constraints = {}  # noqa: RUF012 (as every distribution of Pyro has it)

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        shape = torch.Size((*fn.batch_shape[:-2], 1, *fn.batch_shape[-1:]))
        super().__init__(shape, fn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """Support of the prior distribution, which is equal for all clients."""
        return self.fn.support

    def expand(self, batch_shape: Any, _instance: Any = None) -> OnePrior:
        """Return a copy of the prior with its last batch axis expanded to the given shape."""
        return OnePrior(self.fn.expand((*self.fn.batch_shape[:-1], batch_shape[-1])))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw values from the first client's prior."""
        value: Tensor = self.fn(sample_shape)
        return value.narrow(value.dim() - self.event_dim - 2, 0, 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of a value under the first client's prior."""
        density: Tensor = self.fn.log_prob(value)
        return density[..., :1, :]

    def agrees(self, value: Tensor) -> bool:
        """Return whether a value has the same log density under the priors of all clients."""
        density = self.fn.log_prob(value)
        return torch.allclose(density, density[..., :1, :].expand_as(density), equal_nan=True)


class OncePlate(pyro.plate):
    """Pyro plate over clients in which shared sites are sampled once instead of per client."""

    shared = ""

    def _lets_go(self, msg: Message) -> bool:
        is_fixed = msg["type"] != "sample" or is_deterministic(msg)
        return not is_fixed and matches(msg["name"], self.shared)

    def _process_message(self, msg: Message) -> None:
        if not self._lets_go(msg):
            super()._process_message(msg)
            return
        if msg["fn"].batch_shape[:-1].numel() > 1:
            msg["fn"] = OnePrior(msg["fn"])

    def _postprocess_message(self, msg: Message) -> None:
        if not self._lets_go(msg):
            super()._postprocess_message(msg)
            return
        # The enclosing traces have recorded the single value by now.
        lead = msg["value"].dim() - msg["fn"].event_dim
        batch = torch.broadcast_shapes(msg["value"].shape[:lead], (self.size, 1))
        msg["value"] = msg["value"].expand(batch + msg["value"].shape[lead:])  # [..., C, 1, *event]


@dataclass(frozen=True)
class Everybody(Batch):
    """Batch of all rows of all clients, whose client plate samples shared sites only once."""

    shared: str = ""

    def clients(self) -> pyro.plate:
        """Return the Pyro plate over clients, at dim -2, with shared sites sampled once."""
        plate = OncePlate("clients", len(self.ids), dim=-2)
        plate.shared = self.shared
        return plate


class JointSite(NamedTuple):
    """Shape of a latent site, and whether its values differ between clients and rows."""

    is_per_client: bool  # whether every client has its own value
    rows: bool  # whether every row has its own value
    places: int  # along the last axis of its batch shape
    event: torch.Size

    def laid(self, flat: Tensor, clients: int) -> Tensor:
        """Reshape flattened draws [S, ...] to [draws, clients or 1, rows or entries, *event]."""
        return flat.reshape(
            len(flat), clients if self.is_per_client else 1, self.places, *self.event
        )

    def of(self, value: Tensor, client: int, rows: int) -> Values:
        """Extract one client's values of a site from all clients' draws, without padding rows."""
        values = value[:, [client if self.is_per_client else 0]]
        return Values(values[:, :, :rows] if self.rows else values, self.rows)


class RowsKept(Messenger):
    """Pyro messenger that removes masks of latent sites in padding rows, for a proper density."""

    def _pyro_sample(self, msg: Message) -> None:
        if is_unset_latent(msg) and is_per_row(msg):
            msg["mask"] = None
            while isinstance(msg["fn"], dist.MaskedDistribution):
                msg["fn"] = msg["fn"].base_dist


@dataclass(frozen=True)
class Joint:
    """Joint model of all clients: a method's model bound to its inputs and to all rows."""

    method: Method
    data: Federation
    state: RoundState
    received: Tensors
    local: Tensors
    batch: Everybody

    def __call__(self) -> Any:
        """Run the model on all clients' rows."""
        received, local = (with_rows(v, len(self.batch)) for v in (self.received, self.local))
        with RowsKept():
            return self.method.model(received, local, self.batch)

    def refuse_moving_supports(self) -> None:
        """Raise ValueError if the support of a site depends on other sites."""
        one, other = (dict(latent(poutine.trace(self).get_trace())) for _ in range(2))
        for name, site in one.items():
            if site["fn"].support.is_discrete:
                continue
            first, second = (biject_to(v[name]["fn"].support) for v in (one, other))
            free = first.inv(site["value"])
            if not torch.allclose(first(free), second(free), equal_nan=True):
                raise ValueError(
                    f"the support of site {name!r} depends on other sites, which Pyro's NUTS and "
                    "automatic guides do not support; use reference.hmc"
                )

    def sites(self) -> dict[str, JointSite]:
        """Return the shape of each latent site of the model, by site name."""
        try:
            trace = poutine.trace(self).get_trace()
        except KeyError as error:
            missing = str(error.args[0]).splitlines()[0]  # Pyro adds lines about shapes
            raise ValueError(
                f"the model reads {missing} of the server or its clients; pass state, a round of "
                "the method"
            ) from error
        sites_by_name = {}
        for name, site in latent(trace):
            if isinstance(site["fn"], OnePrior) and not site["fn"].agrees(site["value"]):
                raise ValueError(
                    f"the prior of {name!r} differs between clients, but the site is shared; it "
                    "must only depend on shared sites and constants"
                )
            frames = {frame.name for frame in site["cond_indep_stack"]}
            is_per_client, rows, fn = "clients" in frames, "rows" in frames, site["fn"]
            sites_by_name[name] = JointSite(
                is_per_client, rows, fn.batch_shape[-1:].numel(), fn.event_shape
            )
        return sites_by_name


def joint_model(
    model: Method | Program,
    data: Federation,
    state: RoundState | None,
    seed: Seed,
    shared: str | None,
    dims: Mapping[str, Any] | None = None,
) -> Joint:
    """Return the joint model of all training clients; sites without a client axis become shared.

    Raises:
        ValueError: if the model fails on the data, or `shared` or `dims` name no site.
    """
    method = model if isinstance(model, Method) else _bare(model)
    if state is None:  # the model reads nothing
        method = _bare(method.model, method.shared)
        state = first(method, data, seed)
    ids = torch.arange(data.clients)
    refuse_other_clients(method, data, state)
    received, view = prepared(method, data, state, data.cohort(ids), seed=seed)
    if isinstance(view, list):
        raise ValueError("the method's main view is an ensemble; pass a method with a single model")
    once = method.shared if shared is None else shared
    batch = Everybody(**vars(data.batch(ids)), shared=once)
    joint = Joint(method, data, state, received, view, batch)
    with isolated_sampling(data, seed), calling("program"):
        sites, nodes = joint.sites(), poutine.trace(joint).get_trace().nodes
    computed = [n for n, s in nodes.items() if s["type"] == "sample" and is_deterministic(s)]
    names = [*sites, *computed]
    for pattern in unmatched_patterns(shared, names) if shared else ():
        raise ValueError(f"shared names no site {pattern!r}; {suggest_name(pattern, names)}")
    for name in dims or ():  # of the covariates, too
        check_name(name, [*names, "x"], "site in dims")
    common = " ".join([once, *(n for n, site in sites.items() if not site.is_per_client)])
    metadata = method.metadata.extend({common.strip(): SHARED})
    return replace(joint, method=replace(method, metadata=metadata))


def _bare(model: Program, shared: str = "") -> Method:
    """Return a `Method` that consists of a model only, without training."""
    return Method(
        init=lambda generator, clients: {},
        model=model,
        guide=model,
        phases=(),
        aggregate=lambda server, message, cohort, generator: server,
        metadata=Metadata({shared: SHARED}),
    )


@contextmanager
def isolated_sampling(data: Federation, seed: Seed, *key: int) -> Iterator[None]:
    """Context manager that sets seed, data type and an empty parameter store for Pyro samplers."""
    source = int(torch.randint(2**62, (), generator=stream(seed, Stream.SAMPLER, *key)))
    unchecked, scope = pyro.validation_enabled(False), pyro.get_param_store().scope()
    with seeded(source), default_type(data.dtype), unchecked, scope:
        yield
