"""Chains that do not move, and cavities of few effective draws."""

import programs
import pyro
import pyro.distributions as dist
import torch

from pyrofl import datasets, federations
from pyrofl.inference import hmc as sampler
from pyrofl.inference.fit import fit
from pyrofl.models import likelihood_factors


def test_chains_that_do_not_move_are_no_posterior(monkeypatch):
    data = federations.split(datasets.load("eight_schools"), "groups", 8)
    method = likelihood_factors.hierarchical(programs.eight_schools, data, shared="mu tau")

    def stuck(log_density, start, source):
        found = sampler.hmc(log_density, start, source)
        return found._replace(u=found.u[:1].expand_as(found.u))

    monkeypatch.setattr("pyrofl.models.likelihood_factors.method.hmc", stuck)
    run = fit(method, data, rounds=2, progress=False)
    assert run.status.kind == "diverged"
    assert "the server's chains have not moved" in str(run.status)


def test_chains_that_never_moved_in_the_warm_up_restart_from_others():
    u = torch.arange(8.0).reshape(4, 2)
    now = sampler._Point(u, torch.arange(4.0), -u)
    moving = u + 1.0
    moving[1] = u[1]
    found = sampler._restarted(now, [moving, u], torch.Generator().manual_seed(0))
    assert torch.equal(found.u[[0, 2, 3]], u[[0, 2, 3]])
    (at,) = [k for k in (0, 2, 3) if torch.equal(found.u[1], u[k])]
    assert torch.equal(found.value[1], now.value[at])
    assert torch.equal(found.slope[1], now.slope[at])
    assert sampler._restarted(now, [u, u], torch.Generator()) is now


def test_a_cavity_of_few_effective_draws_has_a_covariance(monkeypatch):
    monkeypatch.setattr(sampler, "KEPT", 4)
    data = federations.split(datasets.load("eight_schools"), "groups", 8)

    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 5.0).to_event(1))
            theta = pyro.sample("theta", dist.Normal(mu[..., 0], 3.0))
            with batch.rows():
                pyro.sample("y", dist.StudentT(5.0, theta + mu[..., 1], 10.0), obs=batch.y)

    method = likelihood_factors.hierarchical(model, data, shared="mu")
    run = fit(method, data, rounds=1, progress=False)
    server = dict(run.state.server)
    server["server/precision"] = 1e6 * server["server/precision"]  # then one draw has all weight
    sent = method.download(server, data.cohort(torch.arange(8)))
    assert bool((torch.linalg.eigvalsh(sent["cavity"]) > 0).all())
    sd = torch.linalg.inv(sent["cavity"]).diagonal(dim1=-2, dim2=-1).sqrt()
    assert bool((sd > 0.1 * server["sd"]).all())
