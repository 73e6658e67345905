"""pFedBayes: its two losses in closed form, its server, and pFedMe as the limit without spread."""

from __future__ import annotations

from dataclasses import replace
from math import log, pi

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch.nn.functional import softplus
from toys import last

from pyrofl.data import Cohort
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import adam
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import client_inputs
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import guides, likelihoods, pfedbayes, pfedme
from pyrofl.nets import build
from pyrofl.tensors import Tensors

PROMISES = {
    "pfedbayes": Promises(
        random=True, message=(2 * toys.ALL, 2 * toys.ALL), rises=frozenset({"w/* spread/*"})
    )
}

M, RHO = torch.tensor([[0.3, -0.2], [0.9, 0.4]]).double(), torch.tensor([[-1.0, 0.2], [0.5, -2.0]])
V, NU = torch.tensor([[0.1, 0.5], [0.1, 0.5]]).double(), torch.tensor([[0.3, -0.4], [0.3, -0.4]])
STATE = {
    "own/w/w": M,
    "own/spread/w": RHO.double(),
    "w/w": V,
    "spread/w": NU.double(),
}


def linear(**options: object) -> Method:
    usual = {"likelihood": likelihoods.normal(), "epochs": 1, "batch": None}
    return pfedbayes.build(build("linear", (2,), 1), **(usual | options))


def moves(method: Method) -> tuple[GradientStep, GradientStep]:
    infer, follow = method.phases[0].updates
    assert isinstance(infer, GradientStep)
    assert isinstance(follow, GradientStep)
    return infer, follow


@pytest.mark.parametrize("noise", [1.0, 0.5, 1e-3])
def test_the_losses_are_the_papers(quadratic, noise):
    method, batch = (
        linear(kl=3.0, num_particles=4, noise=noise),
        quadratic.federation.batch(torch.arange(2)),
    )
    infer, follow = moves(method)
    received = {"w/w": torch.zeros(2, 2).double(), "spread/w": torch.zeros(2, 2).double()}
    with toys.SigmaPoints():
        found = infer.loss(method.model, method.guide, received, STATE, batch)
    divergence = follow.loss(method.model, method.guide, received, STATE, batch)
    sd, width = softplus(RHO.double()), softplus(NU.double())
    kl = torch.distributions.kl_divergence(dist.Normal(M, sd), dist.Normal(V, width)).sum(1)
    close(divergence, 3 * kl / 2)
    gap = M - quadratic.mean
    fit = torch.einsum("ci,cij,cj->c", gap, quadratic.precision, gap) / 2
    seen = noise * sd
    fit += (quadratic.precision.diagonal(dim1=1, dim2=2) * seen.square()).sum(1) / 2
    residual = torch.stack([batch.y[c] - batch.x[c] @ quadratic.mean[c] for c in range(2)])
    fit += residual.square().sum(1) / 2 + log(2 * pi)
    close(found, (fit + 3 * kl) / 2, 1e-10)


def test_on_its_own_the_step_on_the_prior_ends_at_the_posterior(quadratic):
    method = linear()
    follow = replace(moves(method)[1], optim=adam(0.05))

    def init_client(received: Tensors, cohort: Cohort, *_: object) -> Tensors:
        return {n: v[cohort.ids] for n, v in STATE.items() if n.startswith("own/")}

    alone = replace(method, init_client=init_client, phases=(Phase((follow,), epochs=400),))
    start = {n: STATE[n][0] for n in ("w/w", "spread/w")}
    state = last(alone, quadratic.federation, 1, server_state=start, check=False)
    close(state.message["w/w"], M, 1e-3)
    close(state.message["spread/w"], RHO.double(), 1e-3)
    close(state.server["w/w"], M.mean(0), 1e-3)
    close(state.server["spread/w"], RHO.double().mean(0), 1e-3)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_server_goes_beta_of_the_way_to_the_even_mean_of_both(tiny, beta):
    method = pfedbayes.build(build("mlp:5", (4,), 3), beta=beta, num_particles=1)
    old = first(method, tiny, 0).server
    state = last(method, tiny, 1)
    assert {n.split("/")[0] for n in state.server} == {"w", "spread"}
    for n, value in state.server.items():
        close(value, old[n] + beta * (state.message[n].mean(0) - old[n]))


def test_without_spread_it_is_pfedme_by_adam(quadratic):
    # Clients of equal size, over which lambda = zeta / (n s^2) is the same.
    sd, options = 0.7, {"steps": 3, "epochs": 4, "batch": 1, "likelihood": likelihoods.normal()}
    net = build("linear", (2,), 1)
    one = pfedbayes.build(net, guide=guides.delta, init_scale=sd, kl=3.0, lr=0.02, **options)
    plain = pfedme.build(net, strength=3.0 / (2 * sd**2), **options)
    (phase,) = plain.phases
    by_adam = tuple(
        replace(m, optim=adam(0.02)) for m in phase.updates if isinstance(m, GradientStep)
    )
    other = replace(plain, phases=(replace(phase, updates=by_adam),))
    a, b = (last(m, quadratic.federation, 3) for m in (one, other))
    close(a.server["w/w"], b.server["w/w"], 1e-9)
    close(a.client_states["own/w/w"], b.client_states["own/w/w"], 1e-9)


def test_posteriors_start_at_the_prior_and_are_kept(tiny):
    net = build("mlp:5", (4,), 3)
    method = pfedbayes.build(net, init_scale=0.05, num_particles=1)
    begun = first(method, tiny, 0)
    _, private = client_inputs(method, tiny, begun, tiny.cohort(torch.arange(3)), seed=0)
    for n in net.shapes:
        close(softplus(private[f"own/spread/{n}"]), torch.full((3, *net.shapes[n]), 0.05), 1e-6)
    once = last(method, tiny, 1)
    still = pfedbayes.build(net, lr=0.0, num_particles=1)
    twice = last(still, tiny, 2, resume_from=once)
    for n, value in once.client_states.items():
        assert torch.equal(twice.client_states[n], value)


def test_the_common_model_is_the_prior(tiny):
    method = pfedbayes.build(build("mlp:5", (4,), 3), kl=0.1, lr=0.05, epochs=8)
    state = last(method, tiny, 2)
    scores = [evaluate(method, tiny, state, model=m).mean("nll") for m in ("personal", "global")]
    assert scores[0] < scores[1]
