"""Comparison of a loss's gradient with its finite difference, for functions of a user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import Elbo, latent, trace_program, with_rows
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.definition.user_code import users_code
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.inference.validation.gradients import WatchedStep
from pyrofl.plates import KeptPlates
from pyrofl.tensors import Tensors, default_type, pick
from pyrofl.user_warnings import warn_user

DIFFERENCE_STEPS = 1e-6, 1e-7, 1e-5
# Distributions whose draws, for given noise, are smooth functions of their parameters.
SMOOTH = ("Normal", "Delta", "MultivariateNormal", "LowRankMultivariateNormal")
FAILS = (RuntimeError, TypeError, LookupError, ValueError)


def warn_of_odd_losses(method: Method, steps: Sequence[WatchedStep]) -> None:
    """Warn if a loss with a user's functions depends on ids, or its gradient is not its derivative.

    Losses of the library may have other gradients on purpose.
    """
    programs = users_code((method.model, method.guide))[0] and not is_of_library(method.model)
    for step in steps:
        loss = step.step.loss
        users = users_code(loss)[0] and not is_of_library(loss)
        users = users or (isinstance(loss, Elbo) and programs)
        texts = list[str]()
        if users and step.calls is not None:
            # Programs need not support double precision; the round reports other errors.
            with suppress(*FAILS), default_type(torch.float64):
                called = CalledLoss(method, step.step, *map(_double, step.calls))
                texts += called.of_ids()
                texts += called.odd_gradient() if called.is_smooth() else ()
        for text in texts:
            warn_user(f"the loss of step {step.step.names!r} {text}")


def is_of_library(function: object) -> bool:
    """Return whether a value is a function of the library, perhaps around a user's likelihood.

    Such a function may detach tensors on purpose, as the prior of MetaVD does.
    """
    module = getattr(function, "__module__", None) or ""  # None of a function made by exec
    return isinstance(function, FunctionType) and module.startswith("pyrofl.")


@dataclass(frozen=True)
class CalledLoss:
    """Loss of a gradient step, with the arguments of one of its calls in double precision."""

    method: Method
    step: GradientStep
    received: Tensors
    local: Tensors
    batch: Batch

    def _noise(self) -> ClientNoise:
        return ClientNoise([stream(0, Stream.TEST, 0, str(i)) for i in self.batch.ids.tolist()])

    def at(self, trained: Tensors, batch: Batch | None = None) -> Tensor:
        """Return the loss of each client at given values of the trained tensors."""
        # They require gradients, for programs that add hooks to them.
        local = self.local | {
            n: v if v.requires_grad else v.requires_grad_() for n, v in trained.items()
        }
        programs = self.method.model, self.method.guide
        with self._noise(), torch.enable_grad(), KeptPlates():
            return self.step.loss(*programs, self.received, local, batch or self.batch)

    def trained(self) -> Tensors:
        """Return copies of the tensors that the step trains."""
        return {n: v.detach().clone() for n, v in pick(self.local, self.step.names).items()}

    def is_smooth(self) -> bool:
        """Return whether the guide's draws are smooth functions of its parameters."""
        states = (with_rows(t, len(self.batch)) for t in (self.received, self.local))
        with self._noise(), torch.no_grad(), KeptPlates():
            guide = trace_program(self.method.guide, (*states, self.batch))
        return all(_innermost(site["fn"]) in SMOOTH for _, site in latent(guide))

    def of_ids(self) -> Iterator[str]:
        """Yield a text if the loss changes with the clients' ids alone."""
        other = replace(self.batch, ids=self.batch.ids.roll(1))
        one, two = self.at(self.trained()), self.at(self.trained(), other)
        same = torch.allclose(one, two, rtol=1e-6, atol=1e-9, equal_nan=True)
        if len(self.batch) > 1 and not same:
            yield (
                "depends on batch.ids, the positions of clients in the data, so that results "
                "change with their order; use values from received or local instead"
            )

    def odd_gradient(self) -> Iterator[str]:
        """Yield a text if the gradient differs from the finite difference in several directions."""
        trained, source = self.trained(), stream(0, Stream.TEST)
        value = self.at(trained)
        grads = torch.autograd.grad(value.sum(), [*trained.values()], materialize_grads=True)
        for size in DIFFERENCE_STEPS:
            way = [torch.randn(v.shape, generator=source, dtype=v.dtype) for v in trained.values()]
            pairs = zip(grads, way, strict=True)
            # Directional derivatives of the clients' losses, [C].
            slope = sum(((g * w).flatten(1).sum(1) for g, w in pairs), torch.zeros(len(self.batch)))
            difference = self._difference(way, size)
            rounding = 1e-13 * value.detach().abs().max() / size
            bound = 0.01 * torch.maximum(difference.abs(), slope.abs()) + rounding
            # A kink of the loss may be near in one direction.
            if not difference.isfinite().all() or bool(((difference - slope).abs() <= bound).all()):
                return
            # Where terms of the loss cancel, rounding is larger than its value shows.
            noise = (difference - self._difference(way, size / 2)).abs()
            if bool(((difference - slope).abs() <= bound + 4 * noise).all()):
                return
        at = int((difference - slope).abs().argmax())
        yield (
            f"has a gradient that is not its derivative: {float(slope[at]):.3g} along a random "
            f"direction, where finite differences give {float(difference[at]):.3g}; remove detach, "
            "hooks and autograd functions with another backward from it and from the programs, "
            "unless this is intended"
        )

    def _difference(self, way: Sequence[Tensor], size: float) -> Tensor:
        """Return the central difference of the loss in a direction, [C]."""

        def moved(by: float) -> Tensors:
            pairs = zip(self.trained().items(), way, strict=True)
            return {n: (v + by * w).detach() for (n, v), w in pairs}

        return ((self.at(moved(size)) - self.at(moved(-size))) / (2 * size)).detach()


def _innermost(fn: Any) -> str:
    """Return the class name of the distribution inside transforms, masks and event dimensions."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return type(fn).__name__


def _double(value: Any) -> Any:
    """Return tensors, or a batch, in double precision."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {n: _double(v) for n, v in value.items()}
    held = {f.name: getattr(value, f.name) for f in fields(value)}
    return replace(value, **{n: _double(v) for n, v in held.items() if isinstance(v, Tensor)})
