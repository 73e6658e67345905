"""Sites whose support depends on other sites, or on a client's data."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl import Federation, reference
from pyrofl.models.shared.unconstrained import has_own_support, trace_prior, with_real_values

Y = (torch.randn(24, generator=torch.Generator().manual_seed(1)) * 0.5 + 1.3).double()
ROWS = list(torch.arange(24).split([9, 2, 6, 7]))
DATA = Federation(torch.zeros(24, 1).double(), Y, ROWS, [r[:0] for r in ROWS])


def model(received, local, batch):
    """Uniform site between another site and this plus 1."""
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Uniform(a, a + 1))
        with batch.rows():
            pyro.sample("y", dist.Normal(b, 0.5), obs=batch.y)


def exact():
    """Return mean and sd of a and b on a grid: b has its normal likelihood, and a is below it."""
    b = torch.linspace(-1, 4, 4001).double()
    a = torch.linspace(-4, 4, 3201).double()
    at_b = torch.distributions.Normal(b[:, None], 0.5).log_prob(Y).sum(1)
    joint = at_b[:, None] - a.square() / 2
    inside = (a < b[:, None]) & (b[:, None] < a + 1)
    weight = torch.where(inside, joint, -torch.inf).flatten().softmax(0).view(len(b), len(a))
    found = {}
    for name, grid, part in (("a", a, weight.sum(0)), ("b", b, weight.sum(1))):
        mean = part @ grid
        found[name] = float(mean), float((part @ (grid - mean).square()).sqrt())
    return found


def assert_exact(posterior):
    """Compare means and sds with those of the grid."""
    for name, (mean, sd) in exact().items():
        values = posterior[name].values
        assert abs(values.mean() - mean) < 0.15 * sd, name
        assert abs(values.std() / sd - 1) < 0.15, name
    low = posterior["b"].values - posterior["a"].values
    assert ((low > 0) & (low < 1)).all()


def test_the_posterior_is_that_of_the_grid():
    method = pyrofl.hierarchical(model, DATA, shared="a b")
    line = "method: PVI, as the support of site 'b' depends on other sites or on data"
    assert method.metadata.sites.endswith(line)
    assert "shared by all clients: a, b;" in method.metadata.sites
    run = pyrofl.fit(method, DATA, rounds=12, progress=False)
    assert_exact(run.to_arviz(draws=3000, progress=False)["posterior"])


def test_hmc_follows_the_support_and_nuts_refuses_it():
    assert_exact(reference.hmc(model, DATA, draws=32, shared="a b")["posterior"])
    line = "support of site 'b' depends on other sites"
    for sampler in (reference.nuts, reference.centralized):
        with pytest.raises(ValueError, match=line):
            sampler(model, DATA, shared="a b")


def of_data(received, local, batch):
    """Own sites with bounds of the client, and with constant bounds in several forms."""
    with batch.clients():
        pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("unit", dist.Uniform(0.0, 1.0))
        pyro.sample("above", dist.Pareto(2.0, 3.0))
        count = batch.mask.sum(-1, keepdim=True).double()
        d = pyro.sample("d", dist.Uniform(0.0, count))
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3).double()))
        low = pyro.sample("low", dist.Uniform(-weights, weights).to_event(1))
        with batch.rows():
            e = pyro.sample("e", dist.Uniform(d, d + 1))
            pyro.sample("y", dist.Normal(e + low[..., 0], 1.0), obs=batch.y)


def test_values_are_inside_the_supports_of_the_same_draw():
    batch = DATA.batch(torch.tensor([0, 3]))
    seen = trace_prior(of_data, batch, 2).nodes
    supported = [n for n in ("unit", "above", "d", "weights", "low", "e")]
    assert [has_own_support(seen[n]) for n in supported] == [False, True, True, False, True, True]
    found = trace_prior(with_real_values(of_data, DATA), batch, 50).nodes
    d, e = found["d"]["value"], found["e"]["value"]
    assert bool(((d > 0) & (d < batch.mask.sum(-1, keepdim=True))).all())
    assert bool(((e > d) & (e < d + 1))[:, batch.mask].all())
    assert bool((found["low"]["value"].abs() < found["weights"]["value"]).all())
    assert bool((found["above"]["value"] > 2).all())


# The error of an estimated variance needs fourth moments, which Pareto(2, 3) does not have.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:estimates of corrected draws .* for the sd of above")
def test_sites_of_clients_with_bounds_of_their_data_are_fitted():
    method = pyrofl.hierarchical(of_data, DATA, shared="mu")
    assert "PVI, as the support of site 'above' depends" in method.metadata.sites
    run = pyrofl.fit(method, DATA, rounds=1, progress=False)
    draws = run.to_arviz(draws=100, corrected=False, progress=False)["posterior"]
    counts = torch.tensor([9.0, 2.0, 6.0, 7.0])
    d = torch.as_tensor(draws["d"].values)[0]
    assert bool(((d > 0) & (d < counts)).all())
    table = run.summary() if hasattr(run, "summary") else None
    assert table is None or not [n for n in table.index if "unconstrained" in n]
