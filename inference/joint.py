"""A client's program on all clients at once, what they share sampled only once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine

from pyrofl.data import Batch, Federation
from pyrofl.export import inference_data
from pyrofl.inference.elbo import Program, latent, with_rows
from pyrofl.inference.method import Method
from pyrofl.inference.noise import Message
from pyrofl.inference.prepare import prepared
from pyrofl.inference.state import Round
from pyrofl.tensors import Tensors, generator, matches, seeded

ENTRIES = 5_000_000  # draws times rows that the model is run on at once

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
        names: of the clients.
    """

    program: Program
    received: Tensors
    local: Tensors
    batch: Everybody
    names: tuple[str, ...]

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

    def gathered(
        self, chains: Sequence[Tensors], dims: Dims | None, stats: Mapping[str, Any]
    ) -> Any:
        """Gather draws for ArviZ, with the deterministic sites that follow from them.

        Args:
            chains: of each chain, site -> draws as Pyro gives them, [S, *batch, *p].
            dims: site -> names of its own axes.
            stats: statistics [chain, S] of the sampler.
        """
        known = self.sites()
        parts = [self._deterministic(draws, known) for draws in chains]
        own = {n for n, site in known.items() if site.own} | set(parts[0])
        variables = {}
        for name, site in known.items():
            lead = (len(self.batch),) if site.own else tuple(n for n in site.batch if n > 1)
            shaped = [draws[name].reshape(-1, *lead, *site.event) for draws in chains]
            variables[name] = torch.stack(shaped)
        variables |= {n: torch.stack([part[n] for part in parts]) for n in parts[0]}
        if isinstance(self.batch, Everybody):  # a shared quantity is the same at every client
            for name in [n for n in parts[0] if matches(n, self.batch.shared)]:
                variables[name] = variables[name][:, :, 0]
                own.remove(name)
        named = {}
        for name, value in variables.items():
            first: tuple[str, ...] = ("chain", "draw", *(("client",) if name in own else ()))
            rest = tuple(f"{name}_dim_{i}" for i in range(value.dim() - len(first)))
            named[name] = first + tuple((dims or {}).get(name, rest))
        named |= {n: ("chain", "draw") for n in stats}
        groups = {"posterior": variables, "sample_stats": dict(stats)}
        return inference_data(groups, named, {"client": list(self.names)})

    def _deterministic(self, draws: Tensors, known: Mapping[str, Site]) -> Tensors:
        """Run the model on draws of all sites, some at a time: deterministic sites [S, C, *p]."""
        if not _deterministic_sites(poutine.trace(self).get_trace(), 2):
            return {}
        # A batch shape takes the last two axes in front of the event's, those of the plates.
        values = {
            n: draws[n].reshape(-1, *(1,) * (2 - len(site.batch)), *site.batch, *site.event)
            for n, site in known.items()
        }
        step = max(1, ENTRIES // self.batch.mask.numel())
        total = len(next(iter(values.values())))
        parts = []
        for start in range(0, total, step):
            some = {n: v[start : start + step] for n, v in values.items()}
            count = min(step, total - start)
            with pyro.plate("draws", count, dim=-3), torch.no_grad():
                trace = poutine.trace(poutine.condition(self, data=some)).get_trace()
            found = _deterministic_sites(trace, 3)
            parts.append(
                {n: v.expand(count, len(self.batch), *v.shape[2:]) for n, v in found.items()}
            )
        return {n: torch.cat([part[n] for part in parts]) for n in parts[0]}


def _deterministic_sites(trace: Any, axes: int) -> Tensors:
    """Return the values of deterministic sites under the client plate, without the rows' axis.

    Those that have a value per row are left out.
    """
    return {
        name: site["value"].squeeze(axes - 1)
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
        and site["infer"].get("_deterministic")
        and {"clients"} == {f.name for f in site["cond_indep_stack"]} - {"draws"}
        and site["value"].dim() >= axes
        and site["value"].shape[axes - 1] == 1
    }


def joined(
    model: Method | Program,
    data: Federation,
    state: Round | None,
    seed: int,
    shared: str | None,
) -> Joint:
    """Bind a program, or a method's model, to all training clients, and run it once.

    Raises:
        ValueError: as `Joint.sites`, or if a method's main view is an ensemble.
    """
    ids = torch.arange(data.clients)
    received: Tensors = {}
    local: Tensors = {}
    if isinstance(model, Method):
        if state is not None:
            received, view = prepared(model, data, state, data.who(ids), seed=seed)
            if isinstance(view, list):
                raise ValueError("the method's main view is an ensemble; expected one model")
            local = view
        shared = getattr(model, "shared", "") if shared is None else shared
        model = model.model
    rows = data.batch(ids)
    batch = Everybody(rows.x, rows.y, rows.mask, rows.size, rows.ids, shared or "")
    joint = Joint(model, received, local, batch, data.names[: data.clients])
    with alone(data, seed):
        joint.sites()
    return joint


@contextmanager
def alone(data: Federation, *key: int) -> Iterator[None]:
    """Give a sampler of Pyro's random numbers and a floating-point type, and no one else."""
    before = torch.get_default_dtype()
    with seeded(int(torch.randint(2**62, (), generator=generator(*key)))):
        torch.set_default_dtype(data.dtype)
        try:
            with pyro.validation_enabled(False), pyro.get_param_store().scope():
                yield
        finally:
            torch.set_default_dtype(before)
