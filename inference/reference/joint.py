"""A client's program on all clients at once, what they share sampled only once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Generator

from pyrofl.data import Batch, Federation
from pyrofl.inference.elbo import latent, with_rows
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.inference.facts import SHARED
from pyrofl.inference.loop.noise import Message
from pyrofl.inference.loop.rounds import first
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.arviz import ClientAxes, Groups
from pyrofl.inference.posteriors.draws import pointwise_at
from pyrofl.inference.programs import Program
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.tensors import Tensors, cut, matches, seeded

Dims = Mapping[str, tuple[str, ...]]


class OncePlate(pyro.plate):
    """The plate over clients, which lets go of sites that all of them share.

    Such a site is sampled as if it stood before the plate; inside, every client gets its value.
    """

    shared = ""

    def _lets_go(self, msg: Message) -> bool:
        return (
            msg["type"] == "sample"
            and matches(msg["name"], self.shared)
            and not msg["infer"].get("_deterministic")
        )

    def _process_message(self, msg: Message) -> None:
        if not self._lets_go(msg):
            super()._process_message(msg)
        elif msg["fn"].batch_shape.numel() > 1:
            raise ValueError(
                f"site {msg['name']!r} has batch shape {list(msg['fn'].batch_shape)}; expected one "
                "prior, the same for all clients, as they share it"
            )

    def _postprocess_message(self, msg: Message) -> None:
        if not self._lets_go(msg):
            super()._postprocess_message(msg)
            return
        # The traces around the program have written down the one value by now.
        lead = msg["value"].dim() - msg["fn"].event_dim
        batch = torch.broadcast_shapes(msg["value"].shape[:lead], (self.size, 1))
        msg["value"] = msg["value"].expand(batch + msg["value"].shape[lead:])


@dataclass(frozen=True)
class Everybody(Batch):
    """All rows of all clients, for programs whose shared sites are to be sampled once."""

    shared: str = ""

    def clients(self) -> pyro.plate:
        """Return the Pyro plate over clients, dim -2."""
        plate = OncePlate("clients", len(self.ids), dim=-2)
        plate.shared = self.shared
        return plate


class Site(NamedTuple):
    """What is known of a latent site: its shapes, and whether every client has its own."""

    own: bool
    batch: torch.Size
    event: torch.Size


@dataclass(frozen=True)
class Joint:
    """A program bound to all clients of a federation.

    Attributes:
        program: the model.
        received: what it reads of the server, [C, ...].
        local: what it reads of the clients, [C, ...].
        batch: all their rows.
    """

    program: Program
    received: Tensors
    local: Tensors
    batch: Everybody

    def __call__(self) -> Any:
        """Run the model."""
        clients = len(self.batch)
        return self.program(
            with_rows(self.received, clients), with_rows(self.local, clients), self.batch
        )

    def sites(self) -> dict[str, Site]:
        """Return the latent sites.

        Raises:
            ValueError: if one lies inside `batch.rows()`, where padding would be sampled too, or
                the model reads a tensor that it is not given.
        """
        try:
            trace = poutine.trace(self).get_trace()
        except KeyError as error:
            missing = str(error.args[0]).splitlines()[0]  # Pyro adds lines about shapes
            raise ValueError(
                f"the model reads {missing} of the server or its clients; expected state, a round "
                "of the method"
            ) from error
        found = {}
        for name, site in latent(trace):
            frames = {frame.name for frame in site["cond_indep_stack"]}
            if "rows" in frames:
                raise ValueError(f"site {name!r} lies inside batch.rows(); expected it outside")
            found[name] = Site("clients" in frames, site["fn"].batch_shape, site["fn"].event_shape)
        return found

    def groups(self, draws: Tensors, axes: ClientAxes, source: Generator) -> Groups:
        """Return the groups of draws of all latent sites, as Pyro gives them, [S, *batch, *p].

        Observed sites are drawn anew, from the source.
        """
        sites, values, found = self.sites(), {}, []
        for name, site in sites.items():
            clients = (len(self.batch),) if site.own else ()
            values[name] = draws[name].reshape(-1, *clients, *site.event)
        for c, client in enumerate(self.batch.ids.tolist()):
            mine = {n: v[:, c] if sites[n].own else v for n, v in values.items()}
            received, local = (cut(v, slice(c, c + 1)) for v in (self.received, self.local))
            rows = axes.data.batch(torch.tensor([client]))
            found.append(
                pointwise_at(self.program, axes.shared, mine, (received, local, rows), source)
            )
        return axes.groups(found)


def joined(
    model: Method | Program,
    data: Federation,
    state: Round | None,
    seed: Seed,
    shared: str | None,
) -> tuple[Joint, Method, Round]:
    """Bind a program, or a method's model, to all training clients, and run it once.

    Returns:
        The joint program; and a method of the same model with a round of it, all of whose sites
        that are not a client's own are shared.

    Raises:
        ValueError: as `Joint.sites`, or if a method's main view is an ensemble.
    """
    method = model if isinstance(model, Method) else _bare(model)
    if state is None:  # the model reads nothing
        method = _bare(method.model, method.shared)
        state = first(method, data, seed, None)
    ids = torch.arange(data.clients)
    received, view = prepared(method, data, state, data.who(ids), seed=seed)
    if isinstance(view, list):
        raise ValueError("the method's main view is an ensemble; expected one model")
    rows = data.batch(ids)
    once = method.shared if shared is None else shared
    batch = Everybody(rows.x, rows.y, rows.mask, rows.size, rows.ids, rows.at, once)
    joint = Joint(method.model, received, view, batch)
    with alone(data, seed):
        common = " ".join(n for n, site in joint.sites().items() if not site.own)
    return joint, replace(method, facts={**method.facts, f"{once} {common}".strip(): SHARED}), state


def _bare(model: Program, shared: str = "") -> Method:
    """Return a method that has a model and does nothing."""
    return Method(
        init=lambda generator, clients: {},
        model=model,
        guide=model,
        phases=(),
        merge=lambda server, message, who, generator: server,
        facts={shared: SHARED},
    )


@contextmanager
def alone(data: Federation, seed: Seed, *key: int) -> Iterator[None]:
    """Give a sampler of Pyro's random numbers and a floating-point type, and no one else."""
    before = torch.get_default_dtype()
    with seeded(int(torch.randint(2**62, (), generator=stream(seed, Stream.SAMPLER, *key)))):
        torch.set_default_dtype(data.dtype)
        try:
            with pyro.validation_enabled(False), pyro.get_param_store().scope():
                yield
        finally:
            torch.set_default_dtype(before)
