"""Checks by repeated runs that results do not depend on other rows, clients or hidden state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import (
    IN_EVERY_RUN,
    is_deterministic,
    latent,
    observed,
    trace_program,
    weighed,
    with_rows,
)
from pyrofl.inference.posteriors.draws import is_per_row
from pyrofl.inference.validation.gradients import CURE
from pyrofl.inference.validation.independence import (
    AGAIN,
    CLIENTS,
    PADDING,
    Mixed,
    client_part,
    differs,
    scramble_generators,
)
from pyrofl.inference.validation.program_checker import (
    ProgramChecker,
    equal_up_to_rounding,
    factors,
    log_prob_of,
)
from pyrofl.inference.validation.variants import narrow_batch
from pyrofl.plates import KeptPlates
from pyrofl.tensors import Tensors, cut, default_type, seeded


class ChangedBatch(NamedTuple):
    """Changed batch of the same clients, for comparison with the original batch.

    Attributes:
        batch: the batch for the programs.
        source: [C, W] int64, index of each of its rows in the first batch.
        is_used: [C, W] bool, unchanged rows; others are padding now.
    """

    batch: Batch
    source: Tensor
    is_used: Tensor


@dataclass(frozen=True)
class Reruns:
    """Repeated runs of a method's model and guide, compared with their first run.

    Attributes:
        first_run: the first run.
        minibatches: whether a client trains on minibatches; if not, its rows may depend on each
            other.
        has_far_padding: whether padding has values far from those of the data.
    """

    first_run: ProgramChecker
    minibatches: bool
    has_far_padding: bool = False

    def refuse_mixed_rows(self) -> None:
        """Raise `Mixed` if the density of a data row depends on other rows or on padding."""
        other, after = self.changed_batch, self.changed_trace
        costs = {name for name, _ in factors(self.first_run.p)}
        for name, site in (*observed(self.first_run.p), *latent(self.first_run.p)):
            if name in after.nodes and self._alike(site, after.nodes[name], other):
                continue
            if self._changes():
                raise Mixed(f"site {name!r} {AGAIN[0]}; expected {AGAIN[1]}")
            if name in costs:
                raise Mixed(
                    f"pyro.factor {name!r} of a client or row depends on other rows or on padding; "
                    "use a cost per row inside batch.rows(), or, if every step has all rows "
                    "(batch=None), a cost per client that excludes padding by batch.mask"
                )
            if not self.minibatches:
                raise Mixed(f"site {name!r} {PADDING[0]}; expected {PADDING[1]}")
            if site["is_observed"]:
                raise Mixed(
                    f"the likelihood of {name!r} in one row depends on other rows or on padding; "
                    "use a model and layers that treat each row separately, without a mean or "
                    "softmax over rows or BatchNorm, and attention with batch_first=True"
                )
            raise Mixed(
                f"the prior of {name!r} depends on the rows of the batch, which change between "
                "minibatches; use a prior that only reads received and local tensors"
            )

    @cached_property
    def values(self) -> Tensors:
        """Real-valued draws of the latent sites, copied as tensors that require gradients."""
        return {
            n: s["value"].detach().clone().requires_grad_()
            for n, s in latent(self.first_run.q)
            if n in self.first_run.p.nodes and s["value"].is_floating_point()
        }

    @cached_property
    def changed_batch(self) -> ChangedBatch:
        """Batch with rows in another order, without the last row, and with other padding.

        Without minibatches, order and rows are unchanged.
        """
        batch, mask = self.first_run.batch, self.first_run.batch.mask
        wide = mask.shape[1] + self.minibatches
        source = torch.zeros(len(batch), wide, dtype=torch.long, device=mask.device)
        is_used = torch.zeros_like(source, dtype=torch.bool)
        for c, rows in enumerate(mask.sum(1).tolist()):
            order = list(range(rows))
            if self.minibatches:
                order = order[: max(2, rows - 1)][::-1]
            source[c, : len(order)] = torch.tensor(order)
            is_used[c, : len(order)] = True
        at = source if self.minibatches else batch.at
        weights = None if batch.weights is None else _taken(batch.weights, source, -1)
        y = self._other_responses(batch.y[torch.arange(len(batch))[:, None], source], ~is_used)
        return ChangedBatch(
            replace(batch, y=y, mask=is_used, at=at, weights=weights), source, is_used
        )

    @cached_property
    def changed_trace(self) -> Any:
        """Trace of the model on the changed batch, with the latent values of the first run."""
        with torch.enable_grad():
            return self._on_others(self.values)

    def _alike(self, site: Any, after: Any, other: ChangedBatch) -> bool:
        """Return whether a Pyro site has equal densities and weights by row in both batches."""
        one, two = log_prob_of(site), log_prob_of(after)
        if is_per_row(site):
            weights = [
                _weight(s, b) for s, b in ((site, self.first_run.batch), (after, other.batch))
            ]
            one, two = (
                torch.broadcast_tensors(v, b.mask)[0]  # `torch.broadcast_shapes` imports SymPy
                for v, b in ((one, self.first_run.batch), (two, other.batch))
            )
            pairs = [(one, two), (weights[0], weights[1])]
            return all(
                equal_up_to_rounding(
                    _taken(a, other.source, -1)[..., other.is_used], b[..., other.is_used]
                )
                for a, b in pairs
            )
        scales = [s["scale"] for s in (site, after)]
        return equal_up_to_rounding(one, two) and equal_up_to_rounding(
            *(torch.as_tensor(s).to(one) for s in scales)
        )

    def _on_others(self, values: Tensors) -> Any:
        """Run the model on reordered rows with given latent values, and return its trace."""
        other, look, sites = self.changed_batch, self.first_run, {}
        for name, site in look.q.nodes.items():
            if site["type"] == "sample" and not site_is_subsample(site):
                # Not a leaf, so that a program which writes into it does not fail.
                value = values[name] * 1.0 if name in values else site["value"]
                if is_per_row(site):
                    value = _taken(value, other.source, -1 - site["fn"].event_dim)
                site = {**site, "value": value}
            sites[name] = site
        x, table, latent_values = look.batch.x, look.data.x, SimpleNamespace(nodes=sites)
        taken = x[torch.arange(len(x))[:, None], other.source]  # [C, B, *x]
        some = ~other.is_used.reshape(*other.is_used.shape, *(1 for _ in x.shape[2:]))
        if x.is_floating_point():  # values outside the data test most; indices must stay valid
            beyond = 10 + 3 * table.abs().max() if self.has_far_padding else 1
            new = torch.where(some, taken.flip(0, 1) + beyond, taken)
            with suppress(IndexError, RuntimeError, ValueError):
                return self._model(replace(other.batch, x=new), latent_values)
        at = torch.arange(other.is_used.numel(), device=x.device) * 7 % len(table)
        new = torch.where(some, table[at].reshape(taken.shape), taken)
        return self._model(replace(other.batch, x=new), latent_values)

    def _model(self, batch: Batch, latent_values: Any) -> Any:
        """Return a trace of the model on a batch, with latent values fixed to `latent_values`."""
        states = (with_rows(t, len(batch)) for t in (self.first_run.received, self.first_run.local))
        with default_type(batch.size.dtype), KeptPlates():
            return trace_program(self.first_run.method.model, (*states, batch), latent_values)

    def _other_responses(self, y: Tensor, at: Tensor) -> Tensor:
        """Replace the responses of selected rows by a different response from the data."""
        table, there = self.first_run.data.y, y[at]
        # Rows of the data [N, *y] that differ from each selected response [n, *y].
        good = table.isfinite() & (table[:, None] != there[None]).all(1)
        rows = good.flatten(1).all(1) if table.dim() > 1 else good
        if not rows.any():
            return y
        some = at.reshape(*at.shape, *(1 for _ in y.shape[2:]))
        return torch.where(some, table[rows][0], y)

    # Clients alone

    def refuse_mixed_clients(self) -> None:
        """Raise `Mixed` if a client's Pyro site depends on other clients or on padding.

        If rows have latent variables, only the first client is run alone, which has no padding.
        """
        look, count = self.first_run, len(self.first_run.batch)
        some = range(1 if self.has_row_sites else count) if count > 1 else ()
        name = self._first_difference(look.batch, some, (look.q, look.p))
        if name is None:
            return
        if self._changes():
            why, cure = AGAIN
        else:
            rows = int(look.batch.mask.sum(1).min())
            mixed = self._first_difference(narrow_batch(look.batch, rows), range(count))
            why, cure = CLIENTS if mixed else PADDING
        raise Mixed(f"site {name!r} {why}; expected {cure}")

    @property
    def has_row_sites(self) -> bool:
        """Whether the guide has latent sites with one value per row."""
        return any(is_per_row(site) for _, site in latent(self.first_run.q))

    def _changes(self) -> bool:
        """Return whether running model and guide again, with the same noise, changes results."""
        look = self.first_run
        with scramble_generators(look.batch.size.device):
            again = look.run(look.batch, look.received, look.local)
        return _first((look.q, look.p), again, lambda one, _: one) is not None

    def _first_difference(
        self, batch: Batch, some: Sequence[int], together: tuple[Any, Any] | None = None
    ) -> str | None:
        """Return the first Pyro site that differs between a client run alone and with others.

        None if there is none.
        """
        look, count = self.first_run, len(batch)
        together = together or look.run(batch, look.received, look.local)
        for client in some:
            one = slice(client, client + 1)
            client_batch = narrow_batch(batch.select_clients(one), int(batch.mask[client].sum()))
            with scramble_generators(batch.size.device):
                alone = look.run(client_batch, cut(look.received, one), cut(look.local, one))
            if site_name := _first(
                together, alone, partial(client_part, client=client, clients=count)
            ):
                return site_name
        return None

    def refuse_conditional_sites(self) -> None:
        """Raise ValueError if the model has other sites where latent values are large or small."""
        for pick in (torch.amax, torch.amin):
            changed = _names(self.first_run.p) ^ self._names_at(pick)
            if changed:
                raise ValueError(
                    f"the model samples {', '.join(sorted(changed))} at some values of its latent "
                    f"sites and not at others; expected the same sites {IN_EVERY_RUN}"
                )

    def _names_at(self, pick: Callable[[Tensor], Tensor]) -> set[str]:
        """Return the names of the model's sites at extreme latent values.

        Those of the first run, if the model fails there, as at a scale that overflows.
        """
        look, sites = self.first_run, dict(self.first_run.q.nodes)
        with torch.no_grad(), seeded(0), suppress(IndexError, RuntimeError, ValueError):
            for name in self.values:
                sites[name] = {**sites[name], "value": _extreme(look.p.nodes[name], pick)}
            return _names(self._model(look.batch, SimpleNamespace(nodes=sites)))
        return _names(look.p)

    # Gradients

    def refuse_cut_sites(self) -> None:
        """Raise ValueError if densities depend on a latent site but give it no gradient."""
        values = self.values
        for name in self._without_gradient(values, self.changed_trace) if values else ():
            # Once more, as a gradient may be zero at a point.
            with torch.enable_grad():
                moved = {n: (v * 0.99 + (v == 0) * 0.01).detach() for n, v in values.items()}
                moved = {n: v.requires_grad_() for n, v in moved.items()}
                trace = self._on_others(moved)
            one = _others(trace, name)
            if name not in self._without_gradient(moved, trace) or not one.isfinite().all():
                continue
            with torch.no_grad():
                two = _others(self._on_others({**moved, name: moved[name] * 0.99}), name)
            if bool(two.isfinite().all()) and differs(one.detach(), two):
                raise ValueError(
                    f"no gradient of the model reaches site {name!r}, though densities depend on "
                    f"it; expected {CURE}"
                )

    def _without_gradient(self, values: Tensors, trace: Any) -> list[str]:
        """Return the latent sites that get no gradient from the densities of other sites."""
        with torch.enable_grad():
            total = _others(trace).sum()
        if not total.requires_grad:
            return [*values]
        grads = torch.autograd.grad(total, [*values.values()], allow_unused=True, retain_graph=True)
        pairs = zip(values, grads, strict=True)
        return [name for name, grad in pairs if grad is None or not bool(grad.any())]


def _names(trace: Any) -> set[str]:
    """Return the names of the latent and observed sites of a trace."""
    return {name for name, _ in (*latent(trace), *observed(trace))}


def _extreme(site: Any, pick: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the extreme of 20 prior draws as each entry of a latent value, if its support allows.

    Otherwise, as of a simplex or without a proper prior, the value is unchanged.
    """
    fn, value = site["fn"], torch.as_tensor(site["value"])
    with suppress(NotImplementedError):
        extreme = torch.full_like(value, float(pick(fn.sample((20,)))))
        if bool(fn.support.check(extreme).all()):
            return extreme
    return value


def _others(trace: Any, without: str = "") -> Tensor:
    """Return all sites' log densities, with each latent site's own value held constant."""
    parts = [log_prob_of(s) for _, s in observed(trace)]
    parts += [s["fn"].log_prob(s["value"].detach()) for n, s in latent(trace) if n != without]
    return torch.cat([part.flatten() for part in parts])


def _first(together: tuple[Any, Any], alone: tuple[Any, Any], extract: Any) -> str | None:
    """Return the first Pyro site that differs between two pairs of traces, or None."""
    for traces in zip(together, alone, strict=True):
        for name, site in traces[1].nodes.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            if name not in traces[0].nodes:
                return str(name)
            parts = [_parts(trace.nodes[name]) for trace in traces]
            for one, other in zip(*parts, strict=True):
                if differs(extract(one, other), other):
                    return str(name)
    return None


def _parts(site: Any) -> Iterator[Tensor]:
    """Yield a Pyro site's value, unless it is observed, and its log density."""
    if is_deterministic(site) or not site["is_observed"]:
        yield site["value"]
    if not is_deterministic(site):
        yield weighed(site, log_prob_of(site))


def _weight(site: Any, batch: Batch) -> Tensor:
    """Return the scale of each row's log density, divided by the row's count in the batch."""
    counts = batch.counts.where(batch.mask, 1.0)
    weight = torch.as_tensor(site["scale"]).to(counts) / counts
    return weight.expand(batch.mask.shape) if weight.dim() <= 2 else torch.ones_like(counts)


def _taken(value: Tensor, source: Tensor, axis: int) -> Tensor:
    """Select rows of a tensor [..., C, B, *event] by each client's row indices [C, W]."""
    shape = [1] * value.dim()
    shape[axis - 1], shape[axis] = source.shape
    return torch.take_along_dim(value, source.reshape(shape), dim=axis)
