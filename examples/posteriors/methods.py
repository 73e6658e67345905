"""Methods of the benchmark: functions from a problem to ArviZ data.

A method reads `problem.program`, `problem.federation`, `problem.shared`, `problem.rounds` and
`problem.seed`, and returns draws of the sites `problem.compared`, or at least of those in
`problem.population`. It may state `pareto_k` in sample_stats, and these attributes: status,
exchanges, and bytes_up and bytes_down of a client. It raises NotImplementedError for problems that
it does not apply to.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache, partial
from typing import Any

import torch
from density import Density
from problems import Problem
from torch import Tensor

import pyrofl
from pyrofl import Method, Run, nets, reference
from pyrofl.inference.hmc import NUM_CHAINS, LogDensity
from pyrofl.inference.hmc import hmc as chains
from pyrofl.inference.posteriors.export import inference_data
from pyrofl.models import fedlap, fisher, fola, guides
from pyrofl.models import pvi as pvi_models
from pyrofl.models.likelihoods import named
from pyrofl.models.shared.unconstrained import noncentered
from pyrofl.tensors import Tensors, generator

DRAWS = 4000
DESCENT, RATE = 500, 0.1  # rounds of gradient descent, and its first learning rate
NUTS = {"draws": 300, "warmup": 200, "chains": 4}
MIXED = 1.1  # largest R-hat of chains that have mixed
TRAINING: dict[str, Any] = {"epochs": 200, "batch": None, "lr": 0.3, "momentum": 0.9}
NUMBER = 8  # bytes
FULL = guides.full_covariance


def default(problem: Problem) -> Any:
    """Return the default of pyrofl: likelihood factors, or PVI for programs of other structure."""
    data = problem.federation
    method = pyrofl.hierarchical(problem.program, data, shared=problem.shared)
    if method.name == "pvi":
        return pvi(problem)
    return drawn(fitted(problem, method, problem.rounds), problem)


def pvi(problem: Problem) -> Any:
    """Return draws of PVI, corrected by importance weights where these are reliable."""
    return drawn(pvi_run(problem), problem)


def pvi_guide(problem: Problem) -> Any:
    """Return draws of PVI without the correction."""
    return drawn(pvi_run(problem), problem, corrected=False)


@lru_cache(1)
def pvi_run(problem: Problem) -> Run:
    """Fit PVI with the settings of the problem."""
    method = pvi_models.hierarchical(
        problem.program, problem.federation, shared=problem.shared, **problem.pvi
    )
    return fitted(problem, method, problem.rounds or problem.pvi_rounds)


def fitted(problem: Problem, method: Method, rounds: int | None) -> Run:
    """Fit a method of pyrofl; without a number of rounds, until it has converged."""
    return pyrofl.fit(method, problem.federation, rounds, seed=problem.seed, progress=False)


def drawn(run: Run, problem: Problem, **what: Any) -> Any:
    """Draw from the posterior of a run, and state what it has sent; a correction sends more."""
    found, clients = run.to_arviz(DRAWS, seed=run.seed, progress=False, **what), run.data.clients
    corrected = "pareto_k" in found["sample_stats"]
    down, up = (
        sum(getattr(record, name) for record in run.records) / clients
        for name in ("bytes_down", "bytes_up")
    )
    tried = 1.25 * DRAWS * NUMBER * corrected  # points of the shared variables
    shared = (n for n in problem.shared.split() if corrected)
    size = sum(math.prod(found["posterior"][n].shape[2:]) for n in shared)
    found.attrs |= {
        "exchanges": len(run.records) + corrected,
        "bytes_down": down + tried * size,
        "bytes_up": up + tried,
        "warnings": "; ".join(run.warnings),
    }
    return found


def consensus(problem: Problem) -> Any:
    """Return consensus Monte Carlo: averages of draws of the clients' posteriors, in one exchange.

    Scott et al., "Bayes and Big Data: The Consensus Monte Carlo Algorithm", 2016. Client j draws
    from p(u)^(1 / J) p(y_j | u) by Hamiltonian Monte Carlo, with its own variables; the server
    averages the draws, weighted by the inverse covariances of the clients. The method has no draws
    of own sites.
    """
    source = generator(problem.seed)
    density = Density.of(problem.program, problem.federation, problem.shared)
    d, clients, own = density.sizes

    def log_density(point: Tensor) -> Tensor:
        u, z = point.reshape(len(point), clients, d + own).split([d, own], -1)
        prior, likelihood = density.evaluate(u, z)
        return (prior / clients + likelihood - z.square().sum(-1) / 2).sum(-1)

    middle = torch.cat([density.start(), density.start().new_zeros(own)]).repeat(clients)
    start = highest(log_density, middle)
    noise = torch.randn(NUM_CHAINS, len(start), generator=source, dtype=start.dtype)
    found = chains(log_density, start + 0.1 * noise, source)  # clients are independent in it
    if not found.r_hat <= MIXED:
        warnings.warn(f"a client's draws have not mixed: R-hat {found.r_hat:.2f}", stacklevel=2)
    u = found.u.reshape(-1, clients, d + own)[..., :d]
    centered = u - u.mean(0)
    weight = torch.linalg.inv(torch.einsum("sci,scj->cij", centered, centered) / len(u))
    total = torch.einsum("cij,scj->si", weight, u)
    u = torch.linalg.solve(weight.sum(0), total.mT).mT
    values = density.values(u, u.new_zeros(len(u), clients, own), problem.population, ())
    return stated(values, exchanges=1, bytes_down=0, bytes_up=len(u) * d * NUMBER)


def highest(log_density: LogDensity, start: Tensor) -> Tensor:
    """Return a point [d] near a maximum of a log density."""
    u = start.clone().requires_grad_()
    climb = torch.optim.Adam([u], lr=0.05)
    for _ in range(200):
        climb.zero_grad()
        (-log_density(u[None])[0]).backward()  # type: ignore[no-untyped-call]
        climb.step()
    return u.detach()


def fedavg_laplace(problem: Problem) -> Any:
    """Return the Laplace approximation at the joint mode, found by federated averaging.

    In each round clients send one gradient step of the shared variables and take one of their own;
    the server averages them with Adam (FedAdam: Reddi et al., "Adaptive Federated Optimization",
    2021). At the end they send their curvature.
    """
    source = generator(problem.seed)
    density = Density.of(problem.program, problem.federation, problem.shared)
    d, clients, own = density.sizes
    at = torch.cat([density.start(), density.start().new_zeros(clients * own)]).requires_grad_()
    rounds = problem.rounds or DESCENT
    climb = torch.optim.Adam([at], lr=RATE)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(climb, rounds)
    for _ in range(rounds):
        climb.zero_grad()
        (-density.joint(at[None])[0]).backward()  # type: ignore[no-untyped-call]
        climb.step()
        decay.step()
    mode = at.detach()
    curve = torch.autograd.functional.hessian(lambda v: -density.joint(v[None])[0], mode)
    root, bad = torch.linalg.cholesky_ex(curve)
    if int(bad):
        raise ValueError("the point that was found is no mode: its curvature is not positive")
    noise = torch.randn(len(mode), DRAWS, generator=source, dtype=mode.dtype)
    point = mode + torch.linalg.solve_triangular(root.mT, noise, upper=True).mT
    z = point[:, d:].reshape(DRAWS, clients, own)
    values = density.values(point[:, :d], z, problem.compared, problem.own.split())
    size, last = d * rounds * NUMBER, d * (d + 1) // 2 * NUMBER
    return stated(values, exchanges=rounds + 1, bytes_down=size, bytes_up=size + last)


def stated(values: Tensors, **attrs: Any) -> Any:
    """Return ArviZ data with one chain of draws [S, *p] of each site."""
    posterior = {n: v[None] for n, v in values.items()}
    dims = {
        n: ("chain", "draw", *(f"{n}_dim_{i}" for i in range(v.dim() - 1)))
        for n, v in values.items()
    }
    return inference_data({"posterior": posterior}, dims, {}, attrs=attrs)


def of_network(build: Any, problem: Problem, **settings: Any) -> Any:
    """Return draws of a method for networks, after one round, for regressions without effects."""
    if not problem.likelihood:
        raise NotImplementedError("the method fits networks, and the program is not one")
    data = problem.federation
    net = nets.build("softmax", data.x.shape[1:], 1)
    method = build(net, likelihood=named(problem.likelihood), **TRAINING, **settings)
    found = drawn(fitted(problem, method, problem.rounds or 1), problem, corrected=False)
    bias, weight = (
        torch.tensor(next(v.values for n, v in found["posterior"].items() if n.endswith(end)))
        for end in ("bias", "weight")
    )
    size = len(data.x[0]) + 1
    draws = torch.cat([bias.reshape(-1, 1), weight.reshape(-1, size - 1)], -1)
    return stated({problem.shared: draws}, **found.attrs)


def hmc(problem: Problem) -> Any:
    """Return draws of Hamiltonian Monte Carlo, many chains in a batch, on the pooled rows."""
    program, data = problem.pooled()
    return reference.hmc(program, data, seed=problem.seed + 1, shared=problem.shared)


def nuts(problem: Problem) -> Any:
    """Return draws of NUTS on the pooled rows."""
    program, data = problem.pooled()
    program = noncentered(program, data.batch(torch.tensor([0])))
    found = reference.nuts(
        program, data, **NUTS, seed=problem.seed, shared=problem.shared, jit=True
    )
    found.attrs["status"] = f"{int(found['sample_stats']['diverging'].sum())} divergences"
    return found


METHODS = {
    "default": default,
    "pvi": pvi,
    "pvi_guide": pvi_guide,
    "consensus": consensus,
    "fedavg_laplace": fedavg_laplace,
    "fisher": partial(of_network, fisher.build, guide=FULL),
    "fola": partial(of_network, fola.build, guide=FULL, multiply=True),
    "fedlap": partial(of_network, fedlap.build, covariance="full", newton=True, damping=1.0),
    "hmc": hmc,
    "nuts": nuts,
}
