"""Quantiles of scores at clients: exact ranks, a stated error, and coverage by simulation."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, inf

import numpy as np
import pytest
import torch

from pyrofl.inference.conformal.quantiles import (
    new_client_quantile,
    pooled_quantile,
    quantile,
    summarize,
)

ONE = torch.ones((), dtype=torch.float64)
RAGGED = (3, 40, 257, 1, 999, 12)
BAND = 4  # standard errors of a simulated coverage


def draws(*sizes: int, seed: int = 0) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(j + rng.standard_normal(n)) for j, n in enumerate(sizes)]


@pytest.mark.parametrize("n", [1, 8, 9, 10, 19, 20, 99, 100, 999])
@pytest.mark.parametrize("alpha", ["0.1", "0.05", "0.7", "0.3", "0.01"])
def test_the_rank_is_that_of_exact_arithmetic(n, alpha):
    (scores,) = draws(n)
    rank = ceil((1 - Fraction(alpha)) * (n + 1))
    expected = float(scores.sort().values[rank - 1]) if rank <= n else inf
    assert float(quantile(scores, torch.ones(n), float(alpha), ONE)) == expected


@pytest.mark.parametrize("bins", [1, 7, 10, 100])
def test_the_federated_quantile_is_the_pooled_one_up_to_the_stated_rank_error(bins):
    clients = draws(*RAGGED)
    ordered, k = torch.cat(clients).sort().values, len(RAGGED)
    parts = [summarize(scores, bins) for scores in clients]
    off = sum(part.rank_error for part in parts)
    assert off == sum(max(-(-n // min(n, bins)) - 1, 0) for n in RAGGED)
    moved = 0
    for alpha in np.linspace(0.01, 0.99, 99):
        found = float(pooled_quantile(parts, alpha))
        rank = ceil((1 - alpha) * (len(ordered) + k) - 1e-9)
        exact = float(ordered[rank - 1]) if rank <= len(ordered) else inf
        most = float(ordered[rank - 1 + off]) if rank + off <= len(ordered) else inf
        assert exact <= found <= most
        moved += exact < found
    assert moved > 0


def test_with_enough_order_statistics_it_is_exact():
    clients = draws(*RAGGED)
    parts = [summarize(scores, max(RAGGED)) for scores in clients]
    assert all(part.rank_error == 0 for part in parts)
    everything, k = torch.cat(clients), torch.tensor(float(len(RAGGED)))
    for alpha in (0.05, 0.1, 0.5):
        exact = quantile(everything, torch.ones_like(everything), alpha, k)
        assert float(pooled_quantile(parts, alpha)) == float(exact)


def test_a_message_has_the_size_that_is_stated():
    for scores in draws(*RAGGED):
        part = summarize(scores, 10)
        assert len(part.upper) == len(part.mass) == min(10, len(scores))
        assert part.num_bytes == 8 + 2 * 8 * len(part.upper)
        assert int(part.num_scores) == int(part.counts.sum()) == len(scores)
        assert torch.equal(part.mass.long(), part.counts)
        below = (scores <= part.upper[:, None]).sum(1)
        assert torch.equal(below, part.counts.cumsum(0))


def test_weights_of_one_are_no_weights():
    clients = draws(*RAGGED)
    plain = [summarize(scores, 10) for scores in clients]
    ones = [summarize(scores, 10, torch.ones_like(scores)) for scores in clients]
    for alpha in (0.05, 0.1, 0.5):
        same = pooled_quantile(ones, alpha, torch.ones(4, dtype=torch.float64))
        assert same.tolist() == [float(pooled_quantile(plain, alpha))] * 4


@pytest.mark.parametrize("bins", [10, 1000])
def test_weighted_quantiles_are_those_of_the_definition(bins):
    clients, rng = draws(*RAGGED), np.random.default_rng(1)
    weights = [torch.from_numpy(rng.exponential(size=len(scores))) for scores in clients]
    parts = [summarize(s, bins, w) for s, w in zip(clients, weights, strict=True)]
    scores, mass = torch.cat(clients), torch.cat(weights)
    for own in (0.0, 0.5, 3.0, 60.0):
        weight = torch.tensor([own], dtype=torch.float64)
        level = 0.9 * (float(mass.sum()) + len(RAGGED) * own)
        reached = [
            float(t) for t in scores.sort().values if float(mass[scores <= t].sum()) >= level
        ]
        exact = min(reached, default=inf)
        found = float(pooled_quantile(parts, 0.1, weight))
        assert found >= exact
        assert bins < 1000 or found == exact


def test_a_new_client_gives_every_client_the_same_weight():
    clients = draws(2, 4)
    parts = [summarize(scores, 10) for scores in clients]
    ordered = torch.cat(clients).sort().values
    assert clients[0].max() < clients[1].min()  # ranks of the six scores are known
    # Masses 1/2, 1/2, four times 1/4, and 1 at infinity: 3 in all.
    for level, rank in ((0.4, 0), (0.9, 1), (1.0, 1), (1.2, 2), (1.3, 3), (1.6, 4), (2.0, 5)):
        assert float(new_client_quantile(parts, 1 - level / 3)) == float(ordered[rank])
    assert float(new_client_quantile(parts, 0.3)) == inf


def simulate(repetitions: int, once: Callable[[np.random.Generator], bool]) -> tuple[float, float]:
    """Return a simulated coverage and its standard error."""
    rng = np.random.default_rng(0)
    held = np.array([once(rng) for _ in range(repetitions)])
    return held.mean(), held.std() / repetitions**0.5


@pytest.mark.parametrize(("n", "alpha"), [(9, 0.1), (25, 0.1), (50, 0.05), (24, 0.3)])
def test_the_coverage_of_exchangeable_scores_is_exact(n, alpha):
    def once(rng: np.random.Generator) -> bool:
        scores = torch.from_numpy(rng.standard_cauchy(n + 1))
        return bool(scores[-1] <= quantile(scores[:-1], torch.ones(n), alpha, ONE))

    exact = ceil((1 - Fraction(str(alpha))) * (n + 1)) / (n + 1)
    assert 1 - alpha <= exact <= 1 - alpha + 1 / (n + 1)
    coverage, error = simulate(6000, once)
    assert abs(coverage - exact) <= BAND * error


@pytest.mark.parametrize("bins", [5, 100])
def test_pooled_coverage_holds_for_clients_that_differ(bins):
    """The row is of client k with probability (n_k + 1) / (n + K) (Lu et al. 2023)."""
    sizes = np.array([9, 30, 61])
    spread, total = np.array([0.2, 1.0, 5.0]), sizes.sum() + len(sizes)

    def once(rng: np.random.Generator) -> bool:
        clients = [torch.from_numpy(s * rng.random(n)) for s, n in zip(spread, sizes, strict=True)]
        q = pooled_quantile([summarize(scores, bins) for scores in clients], 0.1)
        new = spread[rng.choice(3, p=(sizes + 1) / total)] * rng.random()
        return bool(new <= float(q))

    coverage, error = simulate(4000, once)
    off = sum(-(-n // min(bins, n)) - 1 for n in sizes)
    assert 0.9 - BAND * error <= coverage <= 0.9 + (len(sizes) + off) / total + BAND * error


@pytest.mark.slow
def test_coverage_of_new_clients_holds_where_the_pooled_threshold_fails():
    sizes = [400, *[4] * 19]

    def once(rng: np.random.Generator) -> tuple[bool, bool]:
        # Scores of a client vary little, clients much.
        order = rng.permutation(sizes)
        clients = [torch.from_numpy(rng.exponential() + 0.1 * rng.random(n)) for n in order]
        parts = [summarize(scores, 100) for scores in clients]
        new = rng.exponential() + 0.1 * rng.random()
        return new <= float(new_client_quantile(parts, 0.1)), new <= float(
            pooled_quantile(parts, 0.1)
        )

    rng = np.random.default_rng(0)
    held = np.array([once(rng) for _ in range(3000)])
    error = held.std(0) / len(held) ** 0.5
    coverage, pooled = held.mean(0)
    assert coverage >= 0.9 - BAND * error[0]
    assert pooled < 0.9 - 2 * BAND * error[1]


def test_weights_keep_the_coverage_under_covariate_shift():
    """Scores grow with x; the density ratio of the new rows is 2 x, that of the old ones 1."""
    sizes = (20, 40)

    def once(rng: np.random.Generator) -> tuple[bool, bool]:
        inputs = [torch.from_numpy(rng.random(n)) for n in sizes]
        clients = [x * torch.from_numpy(rng.random(len(x))) for x in inputs]
        x = rng.random() ** 0.5
        new = x * rng.random()
        parts = [summarize(s, 100, 2 * w) for s, w in zip(clients, inputs, strict=True)]
        q = pooled_quantile(parts, 0.1, torch.tensor([2 * x], dtype=torch.float64))
        plain = pooled_quantile([part._replace(mass=part.counts) for part in parts], 0.1)
        return new <= float(q), new <= float(plain)

    rng = np.random.default_rng(0)
    held = np.array([once(rng) for _ in range(4000)])
    error = held.std(0) / len(held) ** 0.5
    weighted, plain = held.mean(0)
    assert 0.9 - BAND * error[0] <= weighted
    assert plain < 0.9 - BAND * error[1]
