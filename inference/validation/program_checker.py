"""Validation of Pyro models and guides on a few rows: sites, plates and constraints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.elbo import latent, observed, parameters, traces
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.programs import Program, Supervised, refuse_subsampling
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.inference.validation.independence import (
    Drew,
    differs,
    refuse_changes,
    refuse_global_draws,
    rows_of,
)
from pyrofl.returned import explained, is_of_library
from pyrofl.tensors import Tensors, matches
from pyrofl.user_warnings import warn_user


@dataclass
class ProgramChecker:
    """Checker of a method's model and guide, based on their traces on a few rows.

    Attributes:
        method: method with the programs.
        data: federation with a few rows.
        received: received tensors of the training clients, [C, ...].
        local: their local tensors after training, [C, ...].
        ids: of the training clients; None takes all.
    """

    method: Method
    data: Federation
    received: Tensors
    local: Tensors
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        every = torch.arange(self.data.clients)
        self.batch = self.data.batch(every if self.ids is None else self.ids)
        self.q, self.p = self.run(self.batch, self.received, self.local)

    @property
    def sites(self) -> list[str]:
        """Names of all Pyro sites of the guide and the model."""
        return [*self.q.nodes, *self.p.nodes]

    def run(self, batch: Batch, received: Tensors, local: Tensors) -> tuple[Any, Any]:
        """Return traces of guide and model on a batch, with the same random noise in every call."""
        noise = [stream(0, Stream.TEST, 0, self.data.names[i]) for i in batch.ids.tolist()]
        drawn, drew = InPlaceDetector(), list[Drew]()

        def guarded(program: Program, function: str) -> Program:
            def run(*args: Any) -> None:
                try:
                    with refuse_global_draws(function, batch.size.device):
                        program(*args)
                except Drew as error:
                    drew.append(error)

            return run

        programs = guarded(self.method.model, "the model"), guarded(self.method.guide, "the guide")
        inputs_unchanged = refuse_changes("a program", received, local, rows_of(batch))
        with torch.no_grad(), ClientNoise(noise), drawn, inputs_unchanged:
            try:
                pair = traces(*programs, received, local, batch)
            except ValueError as error:
                if not is_of_library(error):
                    raise
                raise ValueError(f"the model or the guide fails: {explained(error)}") from error
        drawn.refuse_changed()
        self.drew = next(iter(drew), None)
        return pair

    def refuse_wrong_sites(self) -> None:
        """Raise ValueError for invalid Pyro sites, as latent ones outside `batch.clients()`."""
        for trace in (self.q, self.p):
            for name, site in trace.nodes.items():
                if site["type"] == "param" and name in pyro.get_param_store():
                    alternative = ", or LocScaleReparam(0.0)" * name.endswith("_centered")
                    raise ValueError(
                        f"{name!r} is a pyro.param, which no step trains; use a tensor of the "
                        f"client's local state, or a guide by guides.from_pyro{alternative}"
                    )
                refuse_subsampling(name, site)
            for name, site in latent(trace):
                frames = {frame.name for frame in site["cond_indep_stack"]}
                if "clients" not in frames and len(self.batch) > 1:
                    raise ValueError(
                        f"latent site {name!r} is outside batch.clients(); move it inside, with "
                        "metadata={NAME: SHARED} if all clients share it"
                    )
                self._refuse_stray_axes(name, site)
        if self.drew:
            raise self.drew
        for name, site in latent(self.q):
            if self._same_in_all_rows(site):
                raise ValueError(
                    f"latent site {name!r} is inside batch.rows(), but its guide is the same for "
                    "every row; move it outside, or use a guide that reads the row"
                )
        for name, _ in factors(self.q):
            raise ValueError(
                f"pyro.factor {name!r} is in the guide, where it has no effect; move it to the "
                "model"
            )
        for name, site in factors(self.p):
            frames = {frame.name for frame in site["cond_indep_stack"]}
            if "clients" not in frames and len(self.batch) > 1:
                raise ValueError(
                    f"pyro.factor {name!r} is outside batch.clients(); move it inside, with a cost "
                    "[C, 1] per client, or [C, B] per row inside batch.rows()"
                )
        if not any(observed(self.p)) and any(latent(self.p)):
            raise ValueError(
                "the model observes nothing; pass obs=batch.y at the site of the responses, "
                "inside batch.rows()"
            )
        self._refuse_responses_observed_twice()
        for name, site in self.responses():
            if not self._in_rows(site):
                raise ValueError(
                    f"observed site {name!r} is not inside batch.rows(); put `with batch.rows():` "
                    "around it, which masks padding and scales minibatches"
                )

    def _refuse_responses_observed_twice(self) -> None:
        """Raise ValueError if two sites observe the same responses, which would count twice."""
        sites = [(n, s) for n, s in observed(self.p) if self._in_rows(s)]
        for i, (name, site) in enumerate(sites):
            for other, second in sites[:i]:
                both = site["mask"] & second["mask"]
                share = (site["scale"] + second["scale"]) / self.batch.counts.where(both, 1.0)
                if bool((share * both > 1 + 1e-6).any()) and _repeated(site, second, both):
                    raise ValueError(
                        f"sites {other!r} and {name!r} both observe the same responses, which "
                        "would count twice; remove one, or weight them by poutine.scale with "
                        "weights that sum to 1"
                    )

    def _refuse_stray_axes(self, name: str, site: Any) -> None:
        """Raise ValueError if a Pyro site's batch shape has an axis that belongs to no plate."""
        shape = site["fn"].batch_shape
        declared = {frame.dim for frame in site["cond_indep_stack"]}
        stray = [d for d in range(-len(shape), 0) if d not in declared and shape[d] > 1]
        if stray:
            raise ValueError(
                f"latent site {name!r} has batch shape {tuple(shape)}, but axis {stray[0]} has no "
                "plate; expected [clients, 1], with further axes declared by .to_event()"
            )

    def _in_rows(self, site: Any) -> bool:
        """Return whether a Pyro site is inside the plate over rows, which masks padding rows.

        The plate also scales densities.
        """
        mask = site["mask"]
        if not torch.is_tensor(mask) or not torch.is_tensor(site["scale"]):
            return False
        return not bool((mask & ~self.batch.mask).any())

    def refuse_broken_constraints(self) -> None:
        """Raise ValueError for invalid distribution parameters or responses."""
        for name, site in (*latent(self.q), *latent(self.p), *observed(self.p)):
            for parameter, value, constraint in parameters(site["fn"]):
                if not value.isfinite().all():
                    continue
                if not (good := constraint.check(value)).all():
                    odd = ", ".join(f"{v:g}" for v in value[~good][:1].flatten()[:6])
                    raise ValueError(
                        f"{parameter} of the distribution of {name!r} is {odd}; expected "
                        f"{constraint}"
                    )
        self.refuse_odd_responses()

    def refuse_odd_responses(self) -> None:
        """Raise ValueError for observed responses outside their distribution's support."""
        for name, site in self.responses():
            self._refuse_odd(name, site)
            self._refuse_numbers(site)

    def _refuse_odd(self, name: str, site: Any) -> None:
        support, value = site["fn"].support, site["value"]
        if not torch.is_tensor(value):
            raise ValueError(f"obs of site {name!r} is {value!r}; expected a tensor, as batch.y is")
        odd = value[~(support.check(value) | ~self.batch.mask)]
        bounds = [v for v in vars(support).values() if isinstance(v, Tensor)]
        same = not any(v.numel() > 1 for v in bounds) and support.event_dim == 0
        if same and value is self.batch.y and not len(odd):
            odd = self.data.y[~support.check(self.data.y)]
        if len(odd) and any(v.numel() > 1 for v in bounds):
            raise ValueError(
                f"a response {name!r} of the data is {odd.flatten()[0].item():g}, outside the "
                "support of its distribution at a draw of the prior: the support depends on other "
                "sites; use a distribution with a fixed support"
            )
        if len(odd):
            raise ValueError(
                f"a response {name!r} of the data is {odd.flatten()[0].item():g}, outside the "
                f"support of its distribution, {support}; choose a likelihood with this response, "
                "and for classes a network with one output per class"
            )

    def _refuse_numbers(self, site: Any) -> None:
        """Raise ValueError if a network of classes is fitted to data whose y is numbers."""
        is_network = isinstance(self.method.model, Supervised)
        is_number = self.data.y.is_floating_point()
        if is_network and is_number and isinstance(site["fn"], dist.Categorical):
            count = site["fn"].logits.shape[-1]
            raise ValueError(
                "the likelihood is categorical, and y holds numbers without classes; pass "
                f"classes={count}, or their names, to Federation.from_arrays (or Federation)"
            )

    def _same_in_all_rows(self, site: Any) -> bool:
        """Return whether a row-level site has the same distribution in all rows."""
        at = next((f.dim for f in site["cond_indep_stack"] if f.name == "rows"), None)
        if at is None or site["infer"].get("is_auxiliary") or self.batch.mask[0].sum() < 2:
            return False
        first = site["value"].narrow(at - site["fn"].event_dim, 0, 1)
        density = site["fn"].log_prob(first.expand_as(site["value"]))[..., 0, :]  # [..., B]
        return equal_up_to_rounding(density, density[..., :1].expand_as(density))

    def responses(self) -> list[tuple[str, Any]]:
        """Return the observed sites of the model by name, without those of `pyro.factor`."""
        return [(n, s) for n, s in observed(self.p) if not isinstance(s["fn"], dist.Unit)]

    def warn_of_still_tensors(self, before: Tensors) -> None:
        """Warn about local tensors that the guide reads but no update changes."""
        steps = [m for p in (*self.method.phases, *self.method.adapt) for m in p.updates]
        moving = " ".join(m.names for m in steps if isinstance(m, GradientStep))
        still = {
            n: v + 1
            for n, v in self.local.items()
            if v.is_floating_point()
            and not matches(n, moving)
            and n in before
            and torch.equal(v, before[n][: len(v)])
        }
        if not still or not self._differs(still):
            return
        read = [n for n, v in still.items() if self._differs({n: v})]
        warn_user(
            f"{', '.join(read)} is read by the guide but never updated; add a gradient step with "
            "its name to train it"
        )

    def _differs(self, tensors: Tensors) -> bool:
        """Return whether the guide's draws change with the given changes of local tensors."""
        q, _ = self.run(self.batch, self.received, self.local | tensors)
        pairs = [(s["value"], q.nodes[n]["value"]) for n, s in latent(self.q)]
        return not all(equal_up_to_rounding(a, b) for a, b in pairs)


def factors(trace: Any) -> list[tuple[str, Any]]:
    """Return the `pyro.factor` sites of a trace, with their names."""
    return [(n, s) for n, s in observed(trace) if isinstance(s["fn"], dist.Unit)]


def log_prob_of(site: Any) -> Tensor:
    """Return the log density of a Pyro site's value, without the site's scale or mask."""
    value: Tensor = site["fn"].log_prob(site["value"])
    return value


def equal_up_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding errors."""
    return not differs(a, b)


def _repeated(site: Any, second: Any, both: Tensor) -> bool:
    """Return whether two Pyro sites have equal values (or factors) in the selected rows."""
    pair = site, second
    if any(isinstance(s["fn"], dist.Unit) for s in pair):
        contents = [log_prob_of(s).expand(both.shape)[both] for s in pair]
    else:
        contents = [s["value"].reshape(*both.shape, -1)[both].double() for s in pair]
    one, other = contents
    return (
        one.shape == other.shape and equal_up_to_rounding(one, other) and len(one.unique(dim=0)) > 1
    )


class InPlaceDetector(Messenger):
    """Pyro messenger that detects programs which modify a sampled value in place."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled: list[tuple[str, Tensor, Tensor]] = []

    def _pyro_post_sample(self, msg: Any) -> None:
        value = msg["value"]
        if isinstance(value, Tensor) and not site_is_subsample(msg):
            self.sampled.append((msg["name"], value, value.clone()))

    def refuse_changed(self) -> None:
        """Raise ValueError if a sampled value was modified in place."""
        for name, value, copy in self.sampled:
            if not torch.allclose(value, copy, rtol=0, atol=0, equal_nan=True):
                raise ValueError(
                    f"a program writes into the value of site {name!r} in place; compute a new "
                    "tensor, such as value.clamp(min=0) or value.clone()"
                )
