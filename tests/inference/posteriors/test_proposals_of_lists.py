"""A list of draws that lacks a tail is completed by draws of t distributions, and checked by them.

The list has the normal density f = N(0, 1), and the target p is Student's t with 6 degrees of
freedom: no weight of the list's draws shows what is beyond the farthest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import Generator, Tensor

from pyrofl.inference.monitoring.status import ConvergenceStatus
from pyrofl.inference.posteriors import importance_sampling
from pyrofl.inference.posteriors.correction_outcomes import describe_heavy_estimates, report_outcome
from pyrofl.inference.posteriors.export import smooth_weights
from pyrofl.inference.posteriors.group_weights import GroupTerms
from pyrofl.inference.posteriors.importance_sampling import (
    MAX_RELIABLE_K,
    Request,
    TermsReply,
    Weighing,
    WeightedDraws,
    Weights,
)
from pyrofl.inference.posteriors.proposals import (
    Listed,
    ProposalMixture,
    ServerDraws,
    refit_proposal,
)
from pyrofl.inference.posteriors.tail_shapes import (
    ESTIMATES,
    _shape,
    difference,
    shapes,
    smooth_with_shape,
)
from pyrofl.tensors import seeded

LIST, CONSTANT = 4096, 7.0  # draws of the server, and the unknown constant of f
TARGET = dist.StudentT(torch.tensor(6.0).double())
SD = 1.5**0.5  # of the target


def log_f(noise: Tensor) -> Tensor:
    """Return log f, up to a constant that is not 0."""
    return CONSTANT - noise.square().sum(-1) / 2


def server(seed: int, size: int = 1) -> ServerDraws:
    """Return a list of normal draws; its states hold other draws and nothing else."""
    source = Generator().manual_seed(seed)
    noise = torch.randn(LIST, size, generator=source, dtype=torch.float64)
    return ServerDraws(noise, log_f(noise), lambda e: ({"draws": e}, log_f(e)))


class ListedGuide:
    """Guide that selects among the draws of a list."""

    num_server_draws, min_draws, normal_counts = LIST, 3, (1, 0)


def weighed(listed: ServerDraws, complete: bool = True, count: int = 2000) -> WeightedDraws:
    """Weigh draws of a list, alone or with further ones, by one client's exact ratio p / f."""

    def exchange(asked: Request) -> TermsReply:
        place = (torch.special.ndtr(asked.noise[:, 0]) * LIST).long()
        draws = listed.noise[place] if asked.server is None else asked.server["draws"]
        ratio = TARGET.log_prob(draws).sum(-1) - log_f(draws)
        one = ratio[:, None]
        return TermsReply([GroupTerms(one, 0 * one, 0 * ratio)], {"x": draws})

    rows, source = torch.ones(1).double(), Generator().manual_seed(1)
    given = listed if complete else None
    guide: Sequence[ListedGuide] = [ListedGuide()]
    return Weighing(guide[0], rows, exchange, source, count, given).together()  # type: ignore[arg-type]


def sd(found: WeightedDraws) -> float:
    """Return the standard deviation of weighted draws of the first coordinate."""
    x, w = found.values["x"][:, 0], found.log_w.exp()
    return float((w @ (x - w @ x).square()).sqrt())


def test_further_draws_have_the_tail_that_a_list_lacks():
    """The list alone is too narrow for every seed; with draws of a t none is by more than 5%."""
    alone = [sd(weighed(server(seed), complete=False)) for seed in range(8)]
    complete = [weighed(server(seed)) for seed in range(8)]
    assert np.mean(alone) < 0.97 * SD
    assert all(abs(sd(one) / SD - 1) < 0.05 for one in complete)
    assert all(float(one.weights.k) < 0.5 and not one.weights.doubt for one in complete)


def test_all_draws_of_a_mixture_have_its_density():
    """The weights of list and t together are p / q, with the constant of f estimated."""
    listed = server(0)
    five, one = torch.tensor(5.0).double(), torch.ones(1).double()
    near = dist.MultivariateStudentT(five, 0 * one, one[:, None])
    with seeded(1):
        noise = near.sample((1000,))
    at = torch.arange(2000)
    every = torch.cat([listed.noise[at], noise])
    ratio = TARGET.log_prob(every).sum(-1) - log_f(every)
    first = ProposalMixture(listed, listed.noise[at], listed.log_density[at], ratio[:2000])
    found = first.extended(near, noise, log_f(noise), ratio[2000:]).log_weights()
    normal = dist.Normal(0.0, 1.0).log_prob(every).sum(-1)
    q = torch.logaddexp(math.log(2 / 3) + normal, math.log(1 / 3) + near.log_prob(every))
    off = found - (TARGET.log_prob(every).sum(-1) - q)
    assert float(off.max() - off.min()) < 0.05  # the error of the constant


@pytest.mark.parametrize("k", [0.1, 0.4, 0.7, 1.2])
def test_the_shape_of_a_pareto_tail_is_found(k):
    """Of 20,000 draws with tails of shape k, within 4 standard errors (1 + k) / sqrt(tail)."""
    uniform = torch.rand(20_000, 5, generator=Generator().manual_seed(0), dtype=torch.float64)
    found = _shape(uniform**-k)
    error = (1 + k) / (3 * 20_000**0.5) ** 0.5
    assert float((found - k).abs().max()) < 4 * error


def test_bounded_weights_have_no_heavy_tail():
    """Most draws have little weight, and one in 50 up to three times the mean: the fit has k .8."""
    source = Generator().manual_seed(0)
    w = 1 + 0.3 * torch.rand(5000, generator=source, dtype=torch.float64)
    w[:100] = 3 * torch.rand(100, generator=source, dtype=torch.float64).clamp(min=0.6)
    assert smooth_weights(w.log())[1] > MAX_RELIABLE_K
    log_w, k = smooth_with_shape(w.log())
    assert k < 0.3
    assert torch.equal(log_w, smooth_weights(w.log())[0])


@pytest.mark.parametrize("k", [0.8, 0.9, 1.2])
def test_the_bound_does_not_hide_heavy_tails(k):
    uniform = torch.rand(200, 5000, generator=Generator().manual_seed(0), dtype=torch.float64)
    hidden = [
        smooth_weights(log_w)[1] > MAX_RELIABLE_K >= smooth_with_shape(log_w)[1]
        for log_w in -k * uniform.log()
    ]
    assert np.mean(hidden) <= 0.05


def test_each_estimate_has_its_own_shape():
    """Weights that are equal have no tail, but x^2 of a Cauchy variable has one of shape 2."""
    source = Generator().manual_seed(0)
    normal = torch.randn(10_000, 2, generator=source, dtype=torch.float64)
    x = torch.stack([normal[:, 0], normal[:, 0] / normal[:, 1]], 1)
    log_w = torch.full((10_000,), -math.log(10_000)).double()
    found = dict(zip(ESTIMATES, shapes(x, log_w, 0.0), strict=True))
    assert all(float(found[n][0]) < 0.3 for n in ESTIMATES)
    assert 0.8 < float(found["mean"][1]) < 1.2
    assert 1.7 < float(found["sd"][1]) < 2.3
    assert float(found["97.5%"][1]) < 0.3  # a quantile exists
    assert found["mean"].shape == (2,)


def test_bounded_values_that_many_draws_reach_have_no_heavy_tail():
    """A uniform target, with half of the weight in 3% of draws that reach its ends."""
    source = Generator().manual_seed(5)
    x = torch.rand(4000, 1, generator=source).double() * 0.01
    x[:120] = 1.0 - 0.05 * torch.rand(120, 1, generator=source).double()
    log_w = torch.zeros(4000).double()
    log_w[:120] = math.log(4000 / 120)
    off = x - log_w.softmax(0) @ x
    assert float(_shape(off.square() * log_w.softmax(0)[:, None])) > MAX_RELIABLE_K
    found = dict(zip(ESTIMATES, shapes(x, log_w.log_softmax(0), 0.0), strict=True))
    assert float(found["sd"]) < MAX_RELIABLE_K
    assert float(found["mean"]) < MAX_RELIABLE_K


def test_estimates_that_differ_beyond_their_errors_are_named():
    source = Generator().manual_seed(0)
    x = torch.randn(4000, 2, generator=source, dtype=torch.float64)
    log_w = torch.full((2000,), -math.log(2000)).double()
    assert difference({"a": x, "b": x.clone().fill_(0.1), "c": 0 * x}, log_w, log_w) == ""
    shifted = x + torch.tensor([0.0, 0.4]) * (torch.arange(4000) >= 2000)[:, None]
    assert difference({"a": shifted}, log_w, log_w).startswith("mean of a ")
    wider = x * torch.where(torch.arange(4000) >= 2000, 1.4, 1.0)[:, None]
    assert difference({"a": x, "b": wider}, log_w, log_w).startswith("sd of b ")


def test_differing_draws_are_reported(monkeypatch):
    """Where no t distribution agrees with the draws before, the diagnostics say which estimate."""
    monkeypatch.setattr(importance_sampling, "difference", lambda *_: "sd of x 1 and 2")
    found = weighed(server(0)).weights.doubt
    assert found == f"{importance_sampling.DIFFER} (sd of x 1 and 2)"


@pytest.mark.parametrize(("sd", "doubt"), [(1.0, ""), (1.25, importance_sampling.UNCHECKED)])
def test_a_list_that_no_t_distribution_can_check_is_said(sd, doubt, monkeypatch):
    """As of many dimensions, where these are far from all; even weights need no check."""
    monkeypatch.setattr(f"{__name__}.TARGET", dist.Normal(torch.tensor(0.0).double(), sd))
    monkeypatch.setattr(importance_sampling, "MIN_ESS_OF_ERROR", LIST)
    found = weighed(server(0)).weights
    assert found.doubt == doubt
    assert float(found.k) < 0.7


def test_estimates_with_a_heavy_tail_are_named():
    """A mean and a standard deviation that do not exist, or whose errors cannot be known."""
    shapes = torch.tensor([[0.6, 1.2], [0.69, 2.1], [0.2, 0.2], [0.2, 0.2]])[:, None]
    found = Weights(torch.tensor([0.2]), torch.tensor([3000.0]), 5000, "", {"beta": shapes})
    assert describe_heavy_estimates(found) == "1.20 for the mean of beta, 2.10 for the sd of beta"
    assert describe_heavy_estimates(found._replace(shapes={"beta": shapes[..., :1]})) == ""
    with pytest.warns(UserWarning, match="1.20 for the mean of beta"):
        assert report_outcome(found, [], False, ConvergenceStatus("converged", "", 1)) == "yes"


@pytest.mark.parametrize(
    ("k", "ess", "told"),
    [
        (
            0.71,
            10_288,
            "Pareto k is 0.71 (at most 0.7 is reliable), although the effective sample ",
        ),
        (0.20, 212, "the effective sample size of 12,288 weighted draws is 212 (at least 400 are "),
        (
            0.82,
            168,
            "Pareto k is 0.82 (at most 0.7 is reliable), and the effective sample size of ",
        ),
    ],
)
def test_the_reason_against_a_correction_is_what_is_not_reliable(k, ess, told):
    """A size that suffices is no reason; corrected=True uses such draws."""
    found = Weights(torch.tensor([k]), torch.tensor([float(ess)]), 12_288)
    with pytest.warns(UserWarning, match="draws are not corrected") as caught:
        outcome = report_outcome(found, [], False, ConvergenceStatus("converged", "", 1))
    assert outcome.startswith(f"no: {told}")
    assert f"{ess:,}" in outcome
    assert ("at least 400 are needed" in outcome) is (ess < 400)
    assert ("corrected=True returns the weighted draws" in str(caught[0].message)) is (ess > 400)


def test_a_list_is_selected_evenly():
    source = Listed(100)
    assert source.places(100).tolist() == list(range(100))
    assert source.places(4).tolist() == [0, 25, 50, 75]
    found = (torch.special.ndtr(source.sample((4,))[:, 0]) * 100).long()
    assert found.tolist() == [0, 25, 50, 75]


def test_a_t_distribution_is_moved_toward_weighted_draws():
    noise = torch.randn(5000, 2, generator=Generator().manual_seed(0), dtype=torch.float64)
    log_w, _ = smooth_weights(noise[:, 0] * 0.5)
    near = refit_proposal(None, noise, log_w.exp())
    assert near.loc.tolist() == pytest.approx([0.5, 0.0], abs=0.1)
