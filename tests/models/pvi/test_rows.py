"""Latent sites of rows and of a program's own plates, beside closed forms of normal programs."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from checks import close
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.inference.evaluation.predict import predict
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models import pvi
from pyrofl.models.shared.gaussians import Normals
from pyrofl.tensors import Tensors, generator

SIZES = (1, 5, 3)
CLIENT = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))


def federation(sizes: tuple[int, ...] = SIZES) -> Federation:
    """Hold ragged rows; x is a number, whether the response is known, and one of three parts."""
    count = sum(sizes)
    x = torch.randn(count, 3, generator=generator(1), dtype=torch.float64)
    x[:, 1], x[:, 2] = (torch.arange(count) % 4 != 1).double(), torch.arange(count) % 3
    y = 1 + torch.randn(count, generator=generator(2), dtype=torch.float64)
    none = tuple(torch.empty(0, dtype=torch.long) for _ in sizes)
    return Federation(x, torch.where(x[:, 1] > 0, y, 0.0), torch.arange(count).split(sizes), none)


def effects(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let every client, and every row, be off by a number of its own."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with batch.rows():
            e = pyro.sample("e", dist.Normal(0.0, 0.6))
            pyro.sample("y", dist.Normal(mu + theta + e, 0.5), obs=batch.y)


def line(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Have rows without a response, which are drawn."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with batch.rows():
            mean = w[..., 0] + w[..., 1] * batch.x[..., 0]
            seen = batch.x[..., 1] > 0
            pyro.sample("y", dist.Normal(mean, 0.5), obs=batch.y, obs_mask=seen)


def hidden(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Leave the same rows out."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with batch.rows(), poutine.mask(mask=batch.x[..., 1] > 0):
            mean = w[..., 0] + w[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(mean, 0.5), obs=batch.y)


def parts(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let every client have three parts, in a plate."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with pyro.plate("parts", 3):
            theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        at = batch.x[..., 2].long().expand(*theta.shape[:-1], -1)
        with batch.rows():
            pyro.sample("y", dist.Normal(mu + theta.gather(-1, at), 0.5), obs=batch.y)


def normal(design: Tensor, variance: Tensor, y: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of a normal regression's weights."""
    covariance = (torch.diag(1 / variance) + design.T @ design / noise**2).inverse()
    return covariance @ design.T @ y / noise**2, covariance


def of_effects() -> tuple[Tensor, Tensor]:
    """Return the design of `effects`, and the variances of its variables."""
    clients = torch.nn.functional.one_hot(CLIENT)
    design = torch.cat([torch.ones(9, 1), clients, torch.eye(9)], 1).double()
    return design, torch.tensor([4.0] + 3 * [1.0] + 9 * [0.36]).double()


def fitted(program, shared: str, data: Federation, rounds: int = 12, **options) -> Run:
    method = pvi.hierarchical(program, data, shared=shared, steps=2, **options)
    return fit(method, data, rounds, progress=False)


def shared(run: Run) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of what clients share."""
    server = run.state.server
    mean, root = Normals(len(server["shift"]), True).moments(server)
    return mean, root @ root.mT


def test_rows_have_effects_of_their_own_and_padding_has_none():
    data = federation()
    mean, covariance = normal(*of_effects(), data.y, 0.5)
    run = fitted(effects, "mu", data)
    found = shared(run)
    close(found[0], mean[:1], 1e-6)
    close(found[1], covariance[:1, :1], 1e-6)
    groups = run.to_arviz(draws=4000, groups="all")
    draws = torch.from_numpy(groups["posterior"]["e"].values)[0]
    sd = covariance.diagonal()[4:].sqrt()
    assert ((draws.mean(0) - mean[4:]).abs() < 4 * sd / 4000**0.5).all()
    assert (draws.std(0) / sd - 1).abs().max() < 4 / 8000**0.5
    # Where the guide is the posterior, these differ by a number, which padding would disturb.
    stats = groups["sample_stats"]
    assert float((stats["log_p"] - stats["log_q"]).std()) < 1e-6
    alone = fit(run.method, data, 12, chunk_size=1, progress=False)  # where nothing is padded
    close(shared(alone)[0], mean[:1], 1e-6)


def test_the_effect_of_another_row_is_drawn_anew():
    """Its response has the variance of a row's effect, and of all that is known, added up."""
    data = replace(federation(), test=federation().train)
    run = fitted(effects, "mu", data)
    mean, covariance = normal(*of_effects(), data.y, 0.5)
    known = of_effects()[0][:, :4]
    spread = (known @ covariance[:4, :4] @ known.T).diagonal() + 0.36 + 0.25
    exact = dist.Normal(known @ mean[:4], spread.sqrt()).log_prob(data.y)
    (found,) = predict(run.method, data, run.state, draws=20_000)
    back = found.ids.argsort()
    close(found.prediction.log_density[back][found.mask[back]], exact, 0.03)


@pytest.mark.parametrize("program", [line, hidden])
def test_responses_that_are_missing_are_drawn_or_hidden(program):
    data = federation()
    design = torch.stack([torch.ones(9).double(), data.x[:, 0]], 1)
    seen = data.x[:, 1] > 0
    mean, covariance = normal(design[seen], torch.full((2,), 4.0).double(), data.y[seen], 0.5)
    run = fitted(program, "w", data)
    close(shared(run)[0], mean, 1e-6)
    close(shared(run)[1], covariance, 1e-6)
    if program is line:
        y = torch.from_numpy(run.to_arviz(draws=4000, groups="all")["posterior"]["y"].values)[0]
        close(y[:, seen], data.y[seen].expand(4000, -1))
        sd = ((design @ covariance @ design.T).diagonal() + 0.25).sqrt()[~seen]
        off = (y[:, ~seen].mean(0) - (design @ mean)[~seen]) / sd
        assert off.abs().max() < 4 / 4000**0.5
        assert (y[:, ~seen].std(0) / sd - 1).abs().max() < 4 / 8000**0.5


@pytest.mark.parametrize("names", ["mu", "mu theta"])
def test_a_plate_of_ones_own_has_a_variable_for_each_place(names):
    data = federation()
    own = names == "mu"
    part = data.x[:, 2].long() + 3 * CLIENT * own
    places = torch.nn.functional.one_hot(part, 9 if own else 3)
    design = torch.cat([torch.ones(9, 1), places], 1).double()
    variance = torch.tensor([4.0] + places.shape[1] * [1.0]).double()
    mean, covariance = normal(design, variance, data.y, 0.5)
    run = fitted(parts, names, data, rounds=20)
    count = 1 if own else 4
    close(shared(run)[0], mean[:count], 1e-6)
    close(shared(run)[1], covariance[:count, :count], 1e-6)
    theta = run.to_arviz(draws=500)["posterior"]["theta"]
    assert theta.dims == ("chain", "draw") + ("client",) * own + ("theta_dim_0",)
    found = torch.from_numpy(theta.values)[0].flatten(1).mean(0)
    sd = covariance.diagonal()[1:].sqrt()
    assert ((found - mean[1:]).abs() < 4 * sd / 500**0.5).all()


def centered(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Have an effect of each client around a mean."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        theta = pyro.sample("theta", dist.Normal(mu, 0.8))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 0.5), obs=batch.y)


def test_a_program_may_be_reparametrized():
    data = federation()
    stated = poutine.reparam(centered, config={"theta": LocScaleReparam(0.0)})
    runs = [fitted(program, "mu", data) for program in (centered, stated)]
    first, second = (shared(run) for run in runs)
    close(first[0], second[0], 1e-6)
    close(first[1], second[1], 1e-6)
    posterior = runs[1].to_arviz(draws=10, groups="all")["posterior"]
    assert {"mu", "theta", "theta_decentered"} <= set(posterior)


def test_what_is_reparametrized_is_shared_by_its_new_name():
    stated = poutine.reparam(centered, config={"theta": LocScaleReparam(0.0)})
    with pytest.raises(ValueError, match=r"'theta' in shared matches no latent site; "):
        pvi.hierarchical(stated, federation(), shared="mu theta")


def test_a_learned_reparametrization_is_refused():
    stated = poutine.reparam(centered, config={"theta": LocScaleReparam()})
    with pytest.raises(ValueError, match=r"'theta_centered' is a .*, or LocScaleReparam\(0.0\)"):
        fitted(stated, "mu", federation(), 1)


def correlated(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Have two effects of each client, with a correlation to learn; literals are of any type."""
    with batch.clients():
        sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
        tril = pyro.sample("tril", dist.LKJCholesky(2, 2.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        w = pyro.deterministic("w", ((sd[..., None] * tril) @ z[..., None])[..., 0])
        with batch.rows():
            pyro.sample("y", dist.Normal(w[..., 0] + w[..., 1] * batch.x[..., 0], 0.5), obs=batch.y)


def test_programs_run_in_the_type_of_the_data():
    run = fitted(correlated, "sd tril", federation(), 1)
    groups = run.to_arviz(draws=4, groups="all")
    assert groups["posterior"]["tril"].dtype == groups["prior"]["w"].dtype == "float64"
    assert torch.get_default_dtype() == torch.float32


def test_refuses():
    data = federation()
    with pytest.raises(ValueError, match=r"batch is 2, and site 'e' is .*; expected batch=None"):
        pvi.hierarchical(effects, data, shared="mu", batch=2)
    run = fitted(effects, "mu", data, 1)
    more = replace(federation((*SIZES, 7)), names=(*data.names, "new"))
    joined = pyrofl.join(
        run, replace(more, x=torch.cat([data.x, more.x[9:]]), y=torch.cat([data.y, more.y[9:]]))
    )
    with pytest.raises(ValueError, match="a client has 7 rows, and the method was built for 5 at"):
        fit(joined.method, joined.data, 2, resume_from=joined, check=False, progress=False)
