"""Simulated rows, which show the structure of a program where no rows are available.

The structure is one of derivatives that vanish for all rows. So it needs no real rows, but rows at
which the program has a likelihood. Covariates are between 0 and 2; of a covariate that the program
uses as an index, these are all indices that are valid. Clients have whole or other covariates, and
responses that are 0 or 1, or between; those without a finite likelihood are left out.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Generator, Tensor

from pyrofl.data import Federation
from pyrofl.inference.definition.elbo import log_prob, observed, per_draw, weighed
from pyrofl.inference.definition.programs import Program
from pyrofl.models.likelihood_factors.structure import OtherStructure, on_cpu
from pyrofl.models.shared.unconstrained import trace_prior
from pyrofl.tensors import generator

NUM_CLIENTS = 48  # simulated; one in twelve has each kind of covariates and responses
MAX_SIMULATED_ROWS = 16  # of each of them at most
MAX_LEVELS = 64  # of an index at most
MAX_COVARIATE = 2  # of other covariates
PRIOR_DRAWS = 8  # of the prior, at which clients must have a likelihood


def simulated(program: Program, data: Federation) -> Federation:
    """Return simulated clients with rows of the shapes and types of an outline.

    Raises:
        OtherStructure: if the program has no finite likelihood at any of them.
    """
    rows = _rows(data, _bounds(program, data))
    batch = on_cpu(rows.batch(torch.arange(NUM_CLIENTS)))
    total = torch.zeros(1, NUM_CLIENTS)
    try:
        for name, site in observed(trace_prior(program, batch, PRIOR_DRAWS)):
            total = total + per_draw(weighed(site, log_prob(name, site)), NUM_CLIENTS)
    except (ValueError, RuntimeError, IndexError) as error:
        raise unsuitable(error) from error
    finite = total.isfinite()
    good = (finite | ~finite.any(1, keepdim=True)).all(0) & finite.any(0)  # [S, C] -> [C]
    if not bool(good.any()):
        raise unsuitable("its likelihood is not finite")
    good_rows = [r for r, g in zip(rows.train, good.tolist(), strict=True) if g]
    return _federation(rows.x, rows.y, good_rows, data)


def unsuitable(why: object) -> OtherStructure:
    """Return the error for a program that simulated rows do not suit."""
    first = str(why).partition("\n")[0]
    return OtherStructure(
        f"the clients' rows are not available, and the program fails at simulated rows ({first})"
    )


def _bounds(program: Program, data: Federation) -> Tensor:
    """Return the upper bound of each covariate, [*x]."""

    def fails(bounds: Tensor) -> bool:
        try:
            trace_prior(program, on_cpu(_rows(data, bounds).batch(torch.arange(NUM_CLIENTS))), 2)
        except ValueError:
            return True
        return False

    shape = data.x.shape[1:]
    bounds = torch.full(shape, MAX_COVARIATE)
    if not fails(torch.full(shape, MAX_LEVELS)) or fails(torch.ones_like(bounds)):
        return bounds
    lowest = torch.ones(shape, dtype=torch.long)
    for i in range(lowest.numel()):
        alone = [lowest.clone() for _ in range(MAX_LEVELS + 1)]
        for bound, one in enumerate(alone):
            one.view(-1)[i] = bound
        if fails(alone[MAX_LEVELS]):
            levels = bisect_left(range(1, MAX_LEVELS), True, key=lambda n: fails(alone[n]))
            bounds.view(-1)[i] = max(1, levels)
    return bounds


def _rows(data: Federation, bounds: Tensor) -> Federation:
    """Return simulated clients with covariates below the given bounds [*x]."""
    count = min(MAX_SIMULATED_ROWS, int(data.sizes.max()))
    source = generator("simulated rows")
    x = torch.stack([_even(NUM_CLIENTS * count, source) for _ in range(bounds.numel())], -1)
    x = (x * bounds.flatten()).view(NUM_CLIENTS, count, *bounds.shape)  # [C, n, *x]
    y = _even(NUM_CLIENTS * count * data.y[0].numel(), source).view(
        NUM_CLIENTS, count, *data.y.shape[1:]
    )
    x[1::3] = x[1::3].floor()
    x[2::3] = torch.minimum(x[2::3].floor().clamp(min=1), (bounds - 1).double())
    if data.classes:
        y = (y * len(data.classes)).floor()
    else:
        kind = torch.arange(NUM_CLIENTS) // 3 % 4
        y[kind == 0] = y[kind == 0].round()
        y[kind == 2] = 1.0
    train = torch.arange(NUM_CLIENTS * count).split(count)
    return _federation(
        x.flatten(0, 1).to(data.x.dtype), y.flatten(0, 1).to(data.y.dtype), train, data
    )


def _even(count: int, source: Generator) -> Tensor:
    """Return evenly spread numbers between 0 and 1 in random order, [count]."""
    return (torch.randperm(count, generator=source).double() + 0.5) / count


def _federation(x: Tensor, y: Tensor, train: list[Tensor], data: Federation) -> Federation:
    names = [str(j) for j in range(len(train))]
    return Federation(x, y, train, [r[:0] for r in train], names, data.classes)
