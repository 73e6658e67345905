"""Which sites clients share is shown before a fit; declarations that contradict it are refused."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

import pyrofl
from pyrofl import datasets, federations
from pyrofl.data import Federation
from pyrofl.data.outlines import facts, outline_federation
from pyrofl.inference.posteriors.shared import shared_posterior, shared_to_arviz
from pyrofl.models import pvi


@pytest.fixture(scope="module")
def schools() -> Federation:
    return federations.split(datasets.load("eight_schools"), "groups")


def two_each() -> Federation:
    """Return three clients of two rows each."""
    row = torch.arange(2.0)
    return Federation.from_arrays({name: (row[:, None], row) for name in "abc"})


def centered(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


def horseshoe(received, local, batch):
    """Have a scale for each client, which is meant."""
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        own = pyro.sample("own", dist.HalfCauchy(1.0))
        theta = pyro.sample("theta", dist.Normal(0.0, tau * own))
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


def noise_of_each(received, local, batch):
    """Have a level and a noise scale for each client, which is meant where there are rows."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        level = pyro.sample("level", dist.Normal(mu, 1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(level, sigma), obs=batch.y)


def by_data(received, local, batch):
    with batch.clients():
        pyro.sample("mu", dist.Normal(batch.size[:, None].to(batch.y), 1.0))


def test_sites_are_shown_before_the_fit(schools, capsys):
    method = pvi.hierarchical(centered, schools, shared="mu tau", steps=1, num_particles=8)
    expected = "shared by all clients: mu, tau; own to each client: theta"
    assert expected in repr(method)
    run = pyrofl.fit(method, schools, 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == expected
    pyrofl.fit(method, schools, 2, resume_from=run)
    assert expected not in capsys.readouterr().err
    lines = pvi.hierarchical(programs.lines, two_each(), shared="beta sd sigma").metadata.sites
    assert lines == "shared by all clients: beta (2), sd (2), sigma; own to each client: w (2)"


@pytest.mark.parametrize(
    ("model", "shared", "forgotten"),
    [
        (programs.eight_schools, "mu", "tau, eta"),
        (programs.eight_schools, "tau", "mu, eta"),
        (centered, "mu", "tau"),
        (centered, "tau", "mu"),
    ],
)
def test_a_forgotten_site_is_named(model, shared, forgotten, schools):
    with pytest.warns(UserWarning, match=f"each client has its own {forgotten}, and its rows"):
        pvi.hierarchical(model, schools, shared=shared)


@pytest.mark.parametrize(
    ("model", "shared"),
    [
        (programs.eight_schools, "mu tau"),
        (centered, "mu tau"),
        (horseshoe, "tau"),
        (noise_of_each, "mu"),
        (programs.lines, "beta sd sigma"),
    ],
)
def test_what_is_meant_has_no_warning(model, shared):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pvi.hierarchical(model, two_each(), shared=shared)


def test_declarations_that_contradict_the_program_are_refused(schools):
    for shared, others in (("theta mu", "tau"), ("theta", "mu, tau")):
        match = re.escape(f"'theta' is in shared, and its prior depends on {others}, which each")
        with pytest.raises(ValueError, match=match):
            pvi.hierarchical(centered, schools, shared=shared)
    uneven = Federation.from_arrays(
        {"a": (torch.zeros(1, 1), [0.0]), "b": (torch.zeros(3, 1), [0.0] * 3)}
    )
    with pytest.raises(ValueError, match="prior depends on the client's data"):
        pvi.hierarchical(by_data, uneven, shared="mu")


@pytest.mark.parametrize(
    ("shape", "scale", "told"),
    [
        ((3,), 1.0, "after site 'mu': .*must match.* in .\"bad\", dist.* vector .to_event\\(1\\)"),
        ((), -1, "Expected scale > 0 but got -1 .*; poutine.scale requires a scale above 0$"),
    ],
)
def test_a_program_that_fails_is_refused_in_one_line_that_names_the_site(shape, scale, told):
    """Pyro adds a table of all shapes to what its handlers raise."""
    rows = Federation.from_arrays({"A": (torch.ones(9, 1), torch.arange(9.0))})

    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            bad = pyro.sample(
                "bad", dist.Normal(torch.zeros(7 if shape else 1), torch.ones(shape or (1,)))
            )
            with batch.rows(), poutine.scale(scale=scale):
                pyro.sample("y", dist.Normal(mu + bad, 1.0), obs=batch.y)

    with pytest.raises(ValueError, match=told) as error:
        pvi.hierarchical(model, rows, shared="mu")
    assert "\n" not in str(error.value)


def test_a_server_without_rows_draws_what_clients_share(schools):
    run = pyrofl.fit(
        pvi.hierarchical(centered, schools, shared="mu tau"), schools, 2, progress=False
    )
    alone = run.copy(
        data=outline_federation(facts(schools)), state=replace(run.state, client_states={})
    )
    drawn, expected = shared_posterior(alone, 50), run.posterior(50)
    assert drawn.keys() == {"mu", "tau"}
    for name, value in drawn.items():
        torch.testing.assert_close(value, expected[name][:, 0])
    data = shared_to_arviz(alone, 50)
    assert data["posterior"]["mu"].dims == ("chain", "draw")
    assert data["posterior"].attrs["corrected"].startswith("no: the rows")
