"""Derivatives of likelihoods whose responses have linear predictors, in closed form.

A row's response has parameters theta_k, such as the logits of a Bernoulli, of which the linear
predictors z_k are the values, the logarithms of positive ones, and the logits of probabilities.
Where these are linear in v = (u, eta), z_k = c_k + X_k v, the derivatives of the log likelihood are

    dl / dv = sum_k X_k' g_k,    d2l / dv2 = sum_kj X_k' W_kj X_j

with g_k and W_kj the derivatives of the rows' log densities by their predictors. They need one run
of the program, without derivatives of it; by automatic differentiation the Hessian takes a backward
pass through the program for each variable. The predictors are compared with c_k + X_k v at each
point, and the derivatives with automatic ones at two points of each set of clients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import constraints

from pyrofl.inference.definition.elbo import observed, per_draw, weighed
from pyrofl.tensors import generator

MAX_CELLS = 4_000_000  # numbers of rows and variables in one run of the program
LINEARITY_TOLERANCE = 1e-8  # relative error of a linear predictor
DERIVATIVE_TOLERANCE = 1e-6  # relative error of the derivatives
MAX_DIRECTIONS = 30  # in which Hessians are compared
REAL, POSITIVE, UNIT = "real", "positive", "unit"
BOUNDED_BELOW = (constraints.greater_than, constraints.greater_than_eq)

Run = Callable[[Tensor, Tensor], Any]
"""Points u [S, C, p] and eta [S, C, m] -> Pyro's trace of the program."""


class Parameter(NamedTuple):
    """Parameters of the clients' responses, [S, C, B], and the kind of their predictor."""

    value: Tensor
    kind: str

    def predictor(self) -> Tensor:
        """Return the predictor."""
        if self.kind == POSITIVE:
            return self.value.log()
        return self.value.logit() if self.kind == UNIT else self.value

    def inverse_link_derivatives(self) -> tuple[Tensor, Tensor]:
        """Return the first and second derivatives of the parameter by its predictor."""
        value = self.value.detach()
        if self.kind == POSITIVE:
            return value, value
        if self.kind == UNIT:
            slope = value * (1 - value)
            return slope, slope * (1 - 2 * value)
        return torch.ones_like(value), torch.zeros_like(value)


class Derivatives(NamedTuple):
    """Log likelihood at points [S, C], and derivatives by the rows' predictors, [S, C, B] each."""

    design: list[Tensor]  # X_k, [C, B, p + m]
    log_likelihood: Tensor
    slopes: list[Tensor]  # g_k
    curvature: list[list[Tensor]]  # W_kj

    def score(self, some: slice) -> Tensor:
        """Return the gradient [S, C, n] by some of the variables."""
        pairs = zip(self.design, self.slopes, strict=True)
        return sum(
            (torch.einsum("cbi,scb->sci", x[..., some], g) for x, g in pairs), torch.zeros(())
        )

    def hessian(self, weight: Tensor, some: slice) -> Tensor:
        """Return the weighted sum of Hessians [C, n, n] by some of the variables; weight [S, C]."""
        total = torch.zeros(())
        for x, row in zip(self.design, self.curvature, strict=True):
            for y, part in zip(self.design, row, strict=True):
                mean = torch.einsum("sc,scb->cb", weight, part.nan_to_num(0.0, 0.0, 0.0))
                total = total + (x[..., some] * mean[..., None]).mT @ y[..., some]
        return total


@dataclass(frozen=True)
class Predictors:
    """Linear predictors of the responses of C clients.

    Attributes:
        run: the program.
        constant: c_k, [C, B] each.
        design: X_k, [C, B, p + m] each.
    """

    run: Run
    constant: list[Tensor]
    design: list[Tensor]

    @classmethod
    def of(cls, run: Run, at: Tensor, m: int, automatic: Callable[..., Any]) -> Predictors | None:
        """Return the linear predictors of clients, or None if theirs are not linear.

        Args:
            run: the program.
            at: the variables u at which it is run, [C, p].
            m: number of own variables eta.
            automatic: (u, eta, directions [n, k]) -> gradient [S, C, n] of the likelihood, and the
                products [S, C, n, k] of its Hessian and the directions.
        """
        clients, p = at.shape
        middle = torch.cat([at, at.new_zeros(clients, m)], -1)
        first = _predictors(run, middle[None], p)
        if first is None:
            return None
        step = max(1, MAX_CELLS // (max(p + m, 1) * max(v[0].numel() for v in first)))
        columns: list[list[Tensor]] = [[] for _ in first]
        for unit in torch.eye(p + m, dtype=at.dtype).split(step):
            moved = _predictors(run, middle + unit[:, None], p)  # of [step, C, B]
            if moved is None or len(moved) != len(first):
                return None
            for column, new, old in zip(columns, moved, first, strict=True):
                column.append((new - old).movedim(0, -1))  # [C, B, step]
        design = [torch.cat(column, -1).nan_to_num(0.0, 0.0, 0.0) for column in columns]
        constant = [
            old[0] - torch.einsum("cbi,ci->cb", x, middle)
            for old, x in zip(first, design, strict=True)
        ]
        predictors = cls(run, constant, design)
        return predictors if predictors._agree(middle, p, automatic) else None

    def derivatives_at(self, u: Tensor, eta: Tensor) -> Derivatives | None:
        """Return the derivatives at u [S, C, p] and eta [S, C, m]; None where z is not linear."""
        with torch.no_grad():
            trace = self.run(u, eta)
        v, value, parameters = torch.cat([u, eta], -1), u.new_zeros(u.shape[:-1]), []
        with torch.enable_grad():
            for _, site in observed(trace):
                fn, parts = _cut(site["fn"], (*u.shape[:-1], self.constant[0].shape[-1]))
                parameters += parts
                density = weighed(site, fn.log_prob(site["value"]))
                value = value + per_draw(density, u.shape[1])
            if len(parameters) != len(self.design):
                return None
            leaves = [parameter.value for parameter in parameters]
            slopes = _gradients(value.sum(), leaves, True)
            rows = [_gradients(slope.sum(), leaves, False) for slope in slopes]
        changes = [parameter.inverse_link_derivatives() for parameter in parameters]
        g = [slope.detach() * one for slope, (one, _) in zip(slopes, changes, strict=True)]
        curvature = [
            [w * changes[k][0] * one for w, (one, _) in zip(row, changes, strict=True)]
            for k, row in enumerate(rows)
        ]
        for k, (_, bend) in enumerate(changes):
            curvature[k][k] = curvature[k][k] + slopes[k].detach() * bend
        for k, parameter in enumerate(parameters):
            z = parameter.predictor().detach()
            linear = self.constant[k] + torch.einsum("cbi,sci->scb", self.design[k], v)
            unused = (g[k] == 0) & (curvature[k][k] == 0)  # as of rows that only pad
            if not bool(
                (unused | ((z - linear).abs() <= LINEARITY_TOLERANCE * (1 + z.abs()))).all()
            ):
                return None
        return Derivatives(self.design, value.detach(), g, curvature)

    def _agree(self, middle: Tensor, p: int, automatic: Callable[..., Any]) -> bool:
        """Return whether the derivatives near a point [C, p + m] are those of the program.

        Hessians of many variables are compared in a few random directions.
        """
        off = 0.1 * torch.linspace(-1, 1, middle.shape[-1], dtype=middle.dtype)
        points = torch.stack([middle + off, middle - 2 * off])  # [2, C, p + m]
        u, eta = points[..., :p], points[..., p:]
        derivatives, every = self.derivatives_at(u, eta), slice(None)
        if derivatives is None:
            return False
        directions = torch.eye(middle.shape[-1], dtype=middle.dtype)
        if len(directions) > MAX_DIRECTIONS:
            shape, source = (len(directions), MAX_DIRECTIONS), generator("directions")
            directions = torch.randn(shape, generator=source, dtype=middle.dtype)
        score, products = automatic(u, eta, directions)
        one = torch.ones_like(derivatives.log_likelihood[:1])
        own = [
            Derivatives(
                self.design,
                derivatives.log_likelihood[s : s + 1],
                [v[s : s + 1] for v in derivatives.slopes],
                [[v[s : s + 1] for v in row] for row in derivatives.curvature],
            ).hessian(one, every)
            for s in range(2)
        ]
        pairs = [(derivatives.score(every), score), (torch.stack(own) @ directions, products)]
        return all(
            bool(((a - b).abs() <= DERIVATIVE_TOLERANCE * (1 + b.abs().max())).all())
            for a, b in pairs
        )


def _predictors(run: Run, v: Tensor, p: int) -> list[Tensor] | None:
    """Return the predictors [S, C, B] at points [S, C, p + m]; None without such parameters."""
    with torch.no_grad():
        trace = run(v[..., :p], v[..., p:])
    parameters = []
    for _, site in observed(trace):
        shape = site["fn"].batch_shape
        if site["fn"].event_dim or len(shape) != 3:
            return None
        parameters += _cut(site["fn"], (*v.shape[:-1], shape[-1]))[1]
    same = len({parameter.value.shape for parameter in parameters}) == 1
    return [parameter.predictor().detach() for parameter in parameters] if same else None


def _cut(fn: Any, shape: tuple[int, ...]) -> tuple[Any, list[Parameter]]:
    """Return a copy of a distribution whose parameters [S, C, B] are leaves, and these."""
    fn, parameters = copy.copy(fn), []
    for name, kind in _kinds(fn):
        value = fn.__dict__[name].detach().expand(shape).clone().requires_grad_()
        fn.__dict__[name] = value
        parameters.append(Parameter(value, kind))
    if hasattr(fn, "base_dist"):
        fn.base_dist, inner = _cut(fn.base_dist, shape)
        parameters += inner
    return fn, parameters


def _kinds(fn: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of a distribution's own parameters, and the kinds of their predictors."""
    for name, constraint in getattr(fn, "arg_constraints", {}).items():
        value = fn.__dict__.get(name)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() > 3:
            continue
        if isinstance(constraint, BOUNDED_BELOW) and constraint.lower_bound == 0:
            yield name, POSITIVE
        elif constraint is constraints.unit_interval:
            yield name, UNIT
        elif constraint is constraints.real:
            yield name, REAL


def _gradients(total: Tensor, leaves: list[Tensor], again: bool) -> list[Tensor]:
    """Return the gradients by leaves, 0 of those that the total does not depend on.

    They are themselves differentiable with `again`.
    """
    if not total.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(
        torch.autograd.grad(
            total, leaves, retain_graph=True, create_graph=again, materialize_grads=True
        )
    )
