"""Sites of any support as one vector without constraints, and what stands for their prior."""

from __future__ import annotations

import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from pyro import poutine

from pyrofl.data import Batch
from pyrofl.models.shared.unconstrained import layouts, noncentered
from pyrofl.tensors import Tensors

BATCH = toys.blobs().batch(torch.tensor([0]))


def program(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Have a site of every kind."""
    with batch.clients():
        pyro.sample("mu", dist.Normal(1.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        pyro.sample("flat", dist.ImproperUniform(dist.constraints.real, (), (2,)))
        pyro.sample("rate", dist.ImproperUniform(dist.constraints.positive, (), ()))
        pyro.sample("share", dist.Dirichlet(torch.ones(3)))
        pyro.sample("theta", dist.Normal(0.0, tau))


def test_sites_are_parted_and_their_priors_replaced():
    shared, own = layouts(program, BATCH, "mu tau flat rate", 10.0)
    assert shared.names == "mu tau flat rate"
    assert own.names == "share theta"
    assert (shared.size, own.size) == (5, 3)
    mu, tau, flat, rate = shared.sites
    assert (mu.exact, float(mu.mean), float(mu.sd)) == (True, 1.0, 5.0)
    # log of a half-Cauchy: median log 5, central 68% between tan(pi/2 * 0.159) and its inverse.
    assert not tau.exact
    assert float(tau.mean) == pytest.approx(math.log(5), abs=0.25)
    assert float(tau.sd) == pytest.approx(1.37, abs=0.2)
    assert (flat.mean.tolist(), flat.sd.tolist()) == ([0.0, 0.0], [10.0, 10.0])
    assert (float(rate.mean), float(rate.sd)) == (0.0, 1.0)
    assert not own.sites[1].exact


def test_values_become_sites_with_their_jacobians():
    _, own = layouts(program, BATCH, "mu", 10.0)
    u = torch.randn(4, 3, 1, own.size, generator=torch.Generator().manual_seed(0)).double()
    trace = poutine.trace(own.sample).get_trace(u, torch.full((4, 3, 1), 0.75).double(), 1.0)
    share = trace.nodes["share"]["value"]
    close(share.sum(-1), torch.ones(4, 3, 1))
    close(trace.nodes["tau"]["value"], u[..., 0].exp())
    # The first site carries the density of all.
    close(trace.nodes["tau"]["fn"].log_density, 0.75 - u[..., 0])
    assert trace.nodes["flat"]["fn"].log_density.abs().max() == 0
    assert trace.nodes["share"]["fn"].log_density.shape == (4, 3, 1)
    values = {n: trace.nodes[n]["value"][0, 0, 0] for n in own.names.split()}
    close(own.joined(values), u[0, 0, 0], 1e-6)


def centered(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Have own normal sites with scales that are shared, improper, fixed, and inside an event."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.ImproperUniform(dist.constraints.positive, (), ()))
        pyro.sample("a", dist.Normal(mu, tau))
        pyro.sample("b", dist.Normal(mu, 1.5))
        pyro.sample("c", dist.Normal(mu[..., None], tau[..., None] * torch.ones(2)).to_event(1))


def test_own_normal_sites_of_random_scale_are_stated_without_center():
    stated = noncentered(centered, BATCH)
    shared, own = layouts(stated, BATCH, "mu tau", 10.0)
    assert (shared.names, own.names) == ("mu tau", "a_noncentered b c_noncentered")
    assert own.each("exact").tolist() == [1, 0, 1, 1]
    # Densities and values are those of the program as it was written, but for the change of scale.
    values = {"mu": torch.tensor([[0.7]]), "tau": torch.tensor([[0.5]]), "b": torch.tensor([[2.0]])}
    noise = {"a_noncentered": torch.tensor([[1.3]]), "c_noncentered": torch.tensor([[[0.1, -2.0]]])}
    found = poutine.trace(poutine.condition(stated, values | noise)).get_trace({}, {}, BATCH)
    close(found.nodes["a"]["value"], [[0.7 + 0.5 * 1.3]], 1e-6)
    close(found.nodes["c"]["value"], [[[0.75, -0.3]]], 1e-6)
    sites = {n: found.nodes[n]["value"] for n in ("a", "c")}
    before = poutine.trace(poutine.condition(centered, values | sites)).get_trace({}, {}, BATCH)
    change = 3 * math.log(0.5)
    assert float(found.log_prob_sum() - before.log_prob_sum()) == pytest.approx(change, abs=1e-5)


def test_shared_normal_sites_of_random_scale_are_stated_without_center_too():
    stated = noncentered(centered, BATCH)
    shared, own = layouts(stated, BATCH, "mu tau a c", 10.0)
    assert (shared.names, own.names) == ("mu tau a_noncentered c_noncentered", "b")
    known = [None if s.scales is None else s.scales.tolist() for s in shared.sites]
    assert known == [None, None, [1], [1, 1]]  # the place of log tau among (mu, log tau, a, c)
    assert noncentered(by_fixed_scale, BATCH) is by_fixed_scale


def test_nothing_global_is_touched():
    before = torch.get_rng_state()
    first = layouts(program, BATCH, "tau", 10.0)[0].prior()
    assert torch.equal(torch.get_rng_state(), before)
    again = layouts(program, BATCH, "tau", 10.0)[0].prior()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def by_fixed_scale(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Have a normal site with a random mean and a fixed scale."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("a", dist.Normal(mu, 1.0))


def outside(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Sample before the plate."""
    pyro.sample("mu", dist.Normal(0.0, 1.0))


def by_row(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Sample for each row what is to be shared."""
    with batch.clients(), batch.rows():
        pyro.sample("mu", dist.Normal(0.0, 1.0))


def discrete(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Sample a count."""
    with batch.clients():
        pyro.sample("mu", dist.Poisson(1.0))


def constant(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Sample a number that is certain."""
    with batch.clients():
        pyro.sample("mu", dist.Delta(torch.tensor(1.0)))


def nested(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Have a plate of one's own in a row."""
    with batch.clients(), batch.rows(), pyro.plate("parts", 2):
        pyro.sample("mu", dist.Normal(0.0, 1.0))


def in_part(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Look at some places of a plate at a time."""
    with batch.clients(), pyro.plate("parts", 5, subsample_size=2):
        pyro.sample("mu", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (
            outside,
            "is outside batch.clients(); expected it inside batch.clients(), and there at most",
        ),
        (by_row, "is inside batch.rows(), and shared matches it; expected it to be each client's"),
        (discrete, "is a Poisson, which is discrete; expected continuous latent sites: sum it out"),
        (constant, "is a Delta, which is constant; write its value as a number or tensor, or by"),
        (
            nested,
            "is inside plate 'parts' and plate 'rows'; expected it inside batch.clients(), and",
        ),
        (in_part, "which subsamples 2 of 5 entries; use batch.rows() for rows"),
    ],
)
def test_sites_that_have_no_place_are_refused(bad, told):
    with pytest.raises(ValueError, match=f"'mu' .*{re.escape(told)}"):
        layouts(bad, BATCH, "mu", 10.0)


@pytest.mark.parametrize("name", ["chain", "draw", "client", "row"])
def test_sites_with_names_of_axes_are_refused(name):
    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            pyro.sample(name, dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=f"a site is named '{name}', as an axis of the result"):
        layouts(program, BATCH, name, 10.0)


def test_names_with_brackets_are_shared_as_they_are_spelled():
    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            for i in range(3):
                pyro.sample(f"b[{i}]", dist.Normal(0.0, 1.0))

    ours, mine = layouts(program, BATCH, "b[0] b[2]", 10.0)
    assert [site.name for site in ours.sites] == ["b[0]", "b[2]"]
    assert [site.name for site in mine.sites] == ["b[1]"]


def test_something_must_be_shared():
    with pytest.raises(
        ValueError, match=r"shared is .nu., which matches no latent site; expected .* of mu, tau"
    ):
        layouts(program, BATCH, "nu", 10.0)


def test_every_pattern_of_shared_must_match():
    with pytest.raises(ValueError, match="'tua' in shared matches no latent site; did you mean t"):
        layouts(program, BATCH, "mu tua", 10.0)
