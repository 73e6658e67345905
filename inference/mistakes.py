"""A look at a method and its data before round one: what would give wrong numbers without a word.

The method makes a round on a handful of rows of a few clients. Its programs are traced, and run
again on other rows: a row's likelihood may depend on nothing but that row and what is known of the
client. A client's first row is not changed, as programs may read there what all its rows say alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import lazy_property

from pyrofl.data import Batch, Federation
from pyrofl.inference.elbo import latent, observed, traces
from pyrofl.inference.facts import INCOMPARABLE, Centre, Mark, Rule, WireCost, of_kind
from pyrofl.inference.loop.local import train
from pyrofl.inference.loop.noise import ClientNoise
from pyrofl.inference.loop.state import Round, meet, to_data
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.programs import Program
from pyrofl.inference.seeds import Stream, stream
from pyrofl.tensors import Tensors, cut, matches

ROWS = (3, 2, 1)  # of the clients that are looked at: two that train, one that is held out


def check(
    method: Method, data: Federation, *, chunk: int | None = None, server: Tensors | None = None
) -> None:
    """Refuse a method that would give wrong numbers on these data, in one line with the cure.

    `fit` and `federate` call it before round one, unless they are told check=False.

    Args:
        method: any.
        data: the federation; of the clients two that train and one that is held out are looked at.
        chunk: clients side by side; with 1 a single client is looked at.
        server: first state, instead of `method.init`.

    Raises:
        ValueError: if a latent site lies outside `batch.clients()`, or inside `batch.rows()` with a
            guide that is the same for every row; an observed one lies outside `batch.rows()`; there
            is a `pyro.param`; a parameter of a distribution, or a response, is outside its
            constraint; rows depend on each other or on padding; or a pattern of names matches
            nothing.

    Warns:
        UserWarning: if the guide reads a tensor that nothing moves.
    """
    few = _few(data, alone=chunk == 1)
    who = few.who(torch.arange(len(few.train)))
    with pyro.get_param_store().scope(), pyro.validation_enabled(False):
        if server is None:
            server = method.init(stream(0, Stream.START), few.clients)
        state = Round(0, to_data(server, few), {}, torch.zeros(few.clients, dtype=torch.bool))
        received, private = meet(method, few, state, who, 0)
        known = private | received
        written: set[str] = set()
        phases = tuple(_short(p, written) for p in (*method.phases, *method.adapt))
        local, *_ = train(method, received, known, few, who, seed=0, number=0, phases=phases)
        if not all(v.isfinite().all() for v in local.values()):
            return  # the round says so, and names the clients
        look = Look(method, few, *(cut(t, slice(few.clients)) for t in (received, local)))
        look.refuse_wrong_sites()
        look.refuse_broken_constraints()
        look.refuse_mixed_rows()
        with torch.no_grad():
            travels = method.upload(received, local) | received
        _refuse_idle_patterns(method, local, state.server, travels, look.sites)
        look.warn_of_still_tensors({n: v for n, v in known.items() if n not in written})


def _few(data: Federation, alone: bool) -> Federation:
    """Return the largest client and the smallest, and one that is held out, with few rows each."""
    order = data.sizes[: data.clients].argsort(descending=True, stable=True).tolist()
    good = [i for i in order if _finite(data, i)]
    order = good or order  # a bad client is left out and named in every round
    train = order[:1] if alone or len(order) == 1 else [order[0], order[-1]]
    ids = [*train, *([] if alone else range(data.clients, len(data.train)))[:1]]
    return replace(
        data,
        train=tuple(data.train[i][:n] for i, n in zip(ids, ROWS, strict=False)),
        test=tuple(data.test[i][:0] for i in ids),
        names=tuple(data.names[i] for i in ids),
        held_out=len(ids) - len(train),
        pooled_test=None,
    )


def _finite(data: Federation, client: int) -> bool:
    """Say whether the rows of a client that are looked at are finite."""
    rows = data.train[client][: max(ROWS)]
    return bool(data.x[rows].isfinite().all() and data.y[rows].isfinite().all())


def _short(phase: Phase, written: set[str]) -> Phase:
    """Return a phase of one epoch at most, on minibatches; names that its moves set are noted."""

    def noted(move: Callable[..., Tensors], *args: Any) -> Tensors:
        changed = move(*args)
        written.update(changed)
        return changed

    moves = tuple(m if isinstance(m, Step) else partial(noted, m) for m in phase.moves)
    epochs = 1 if callable(phase.epochs) else min(phase.epochs, 1)
    batch = min(phase.batch, 2) if phase.batch else None
    return replace(phase, moves=moves, epochs=epochs, batch=batch)


@dataclass
class Look:
    """The programs of a method, run on few rows.

    Attributes:
        method: gives them.
        data: the few rows.
        received: of the clients that train, [C, ...].
        local: of these, trained, [C, ...].
    """

    method: Method
    data: Federation
    received: Tensors
    local: Tensors

    def __post_init__(self) -> None:
        """Run them once."""
        self.batch = self.data.batch(torch.arange(self.data.clients))
        self.q, self.p = self._run(self.method.guide, self.batch, self.local)

    @property
    def sites(self) -> list[str]:
        """Names of all sites."""
        return [*self.q.nodes, *self.p.nodes]

    def _run(self, guide: Program, batch: Batch, local: Tensors) -> tuple[Any, Any]:
        """Return traces of guide and model, with the same noise in every call."""
        ids = batch.ids.tolist()
        noise = [stream(0, Stream.TEST, 0, self.data.names[i]) for i in ids]
        received, local = (cut(t, batch.ids.cpu()) for t in (self.received, local))
        with torch.no_grad(), ClientNoise(noise):
            return traces(self.method.model, guide, received, local, batch)

    def refuse_wrong_sites(self) -> None:
        """Refuse sites that are not under the plates of the batch."""
        for trace in (self.q, self.p):
            for name, site in trace.nodes.items():
                if site["type"] == "param" and name in pyro.get_param_store():
                    raise ValueError(
                        f"{name!r} is a pyro.param, which no step moves; expected a tensor of the "
                        "client's local state, or a guide made by guides.from_pyro"
                    )
            for name, site in latent(trace):
                frames = {frame.name for frame in site["cond_indep_stack"]}
                if "clients" not in frames and len(self.batch) > 1:
                    raise ValueError(
                        f"latent site {name!r} is outside batch.clients(); expected it inside, "
                        "with facts={NAME: SHARED} if it is one for all clients"
                    )
        for name, site in latent(self.q):
            if self._same_in_all_rows(site):
                raise ValueError(
                    f"latent site {name!r} is inside batch.rows(), and its guide is the same for "
                    "every row; expected it outside, or a guide that reads the row"
                )
        for name, site in self._responses():
            if site["mask"] is not self.batch.mask:
                raise ValueError(
                    f"observed site {name!r} is not inside batch.rows(); expected `with "
                    "batch.rows():` around it, which hides padding and scales minibatches"
                )

    def refuse_broken_constraints(self) -> None:
        """Refuse parameters of a distribution, and responses, that it cannot have."""
        for name, site in (*latent(self.q), *latent(self.p), *observed(self.p)):
            for parameter, value, constraint in _parameters(site["fn"]):
                if not (good := constraint.check(value)).all():
                    odd = ", ".join(f"{v:g}" for v in value[~good][:1].flatten()[:6])
                    raise ValueError(
                        f"{parameter} of the distribution of {name!r} is {odd}; expected "
                        f"{constraint}"
                    )
        for name, site in self._responses():
            inside = site["fn"].support.check(site["value"])
            if not inside[..., self.batch.mask].all():
                raise ValueError(
                    f"responses {name!r} of the data are outside the support of their "
                    f"distribution, {site['fn'].support}"
                )

    def _same_in_all_rows(self, site: Any) -> bool:
        """Say whether every row of the largest client has a draw of its own of one distribution."""
        at = next((f.dim for f in site["cond_indep_stack"] if f.name == "rows"), None)
        if at is None or site["infer"].get("is_auxiliary") or self.batch.mask[0].sum() < 2:
            return False
        first = site["value"].narrow(at - site["fn"].event_dim, 0, 1)
        density = site["fn"].log_prob(first.expand_as(site["value"]))[..., 0, :]
        return _equal(density, density[..., :1].expand_as(density))

    def _responses(self) -> list[tuple[str, Any]]:
        """Return the observed sites of the model but `pyro.factor`, a cost of the client."""
        return [(n, s) for n, s in observed(self.p) if not isinstance(s["fn"], dist.Unit)]

    def refuse_mixed_rows(self) -> None:
        """Refuse programs in which a row or padding has a say elsewhere."""
        at = ~self.batch.mask
        at[0, -1] = True  # not the first, which may tell what is known of the client
        x = self.batch.x
        others = x.flip(0, 1) + 1 if x.is_floating_point() else x.roll(1, 1)
        x = torch.where(at.reshape(*at.shape, *(1 for _ in x.shape[2:])), others, x)
        same = poutine.replay(self.method.guide, trace=self.q)
        _, changed = self._run(same, replace(self.batch, x=x), self.local)
        for name, site in self._responses():
            before, after = (_log_prob(s)[..., ~at] for s in (site, changed.nodes[name]))
            if not _equal(before, after):
                raise ValueError(
                    f"the likelihood of {name!r} in one row depends on other rows or on padding; "
                    "expected a model and layers that treat each row by itself: no mean or softmax "
                    "over rows, no BatchNorm"
                )
        for name, site in latent(self.p):
            if not _equal(_log_prob(site), _log_prob(changed.nodes[name])):
                raise ValueError(
                    f"the prior of {name!r} depends on the rows of the batch; expected one that "
                    "reads what the server and the client hold, as batches change"
                )

    def warn_of_still_tensors(self, before: Tensors) -> None:
        """Warn of tensors that the guide reads and nothing moves."""
        steps = [m for p in (*self.method.phases, *self.method.adapt) for m in p.moves]
        moving = " ".join(m.names for m in steps if isinstance(m, Step))
        still = {
            n: v + 1
            for n, v in self.local.items()
            if v.is_floating_point()
            and not matches(n, moving)
            and n in before
            and torch.equal(v, before[n][: len(v)])
        }
        if not still or not moving or not self._differs(still):
            return
        read = [n for n, v in still.items() if self._differs({n: v})]
        warnings.warn(
            f"the guide reads {', '.join(read)}, and no step or move changes it; expected a step "
            "whose names match it, if it is to be trained",
            stacklevel=4,
        )

    def _differs(self, tensors: Tensors) -> bool:
        """Say whether the guide draws otherwise with other local tensors."""
        q, _ = self._run(self.method.guide, self.batch, self.local | tensors)
        pairs = [(s["value"], q.nodes[n]["value"]) for n, s in latent(self.q)]
        return not all(_equal(a, b) for a, b in pairs)


def _parameters(fn: Any) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield finite parameters of a distribution with their constraints."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    for name, constraint in fn.arg_constraints.items():
        made = name in fn.__dict__ or not isinstance(getattr(type(fn), name, None), lazy_property)
        if made and not constraints.is_dependent(constraint):
            value = getattr(fn, name)
            if isinstance(value, Tensor) and value.isfinite().all():
                yield name, value, constraint


def _log_prob(site: Any) -> Tensor:
    value: Tensor = site["fn"].log_prob(site["value"])
    return value


def _equal(a: Tensor, b: Tensor) -> bool:
    """Compare what must not change at all, but for rounding."""
    off = 1e-3 if a.dtype == torch.float32 else 1e-7
    return torch.allclose(a, b, rtol=off, atol=off, equal_nan=True)


def _refuse_idle_patterns(
    method: Method, local: Tensors, server: Tensors, travels: Tensors, sites: list[str]
) -> None:
    """Refuse a pattern of names that matches nothing, naming the nearest."""
    asked: list[tuple[str, str, Iterable[str]]] = [
        (f"step {move.names!r} of {kind}", move.names, local)
        for kind in ("phases", "adapt")
        for phase in getattr(method, kind)
        for move in phase.moves
        if isinstance(move, Step)
    ]
    for names, mark in of_kind(method.facts, Mark).items():
        of_sites = names in method.shared
        held = local if mark is INCOMPARABLE else server
        asked.append((f"fact {mark.text!r}", names, sites if of_sites else held))
    for names in {**of_kind(method.facts, Rule), **of_kind(method.facts, WireCost)}:
        asked.append(("fact about messages", names, travels))
    for names in of_kind(method.facts, Centre):
        asked.append(("fact about movement", names, {**server, **local}))
    for what, patterns, known in asked:
        for pattern in patterns.split():
            if not any(matches(name, pattern) for name in known):
                near = get_close_matches(pattern, list(known), 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise ValueError(f"{pattern!r} in the {what} matches no name; {hint}")
