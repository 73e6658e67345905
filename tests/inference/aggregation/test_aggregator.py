"""Servers as declarations: what is pooled by what, folded in any grouping."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from pyrofl.data import Cohort
from pyrofl.inference.definition.aggregator import (
    Aggregator,
    Weighed,
    WeightedSum,
    by_size,
    uniform,
    weight_by,
    with_server_step,
)
from pyrofl.inference.definition.averages import AggregationError, weighted_mean
from pyrofl.tensors import Tensors, cut, generator

CLIENTS = 7
SERVER = {"a": torch.ones(3, 2).double(), "b": torch.ones(()).double()}


def sent(clients: int = CLIENTS, seed: int = 0) -> tuple[Tensors, Cohort]:
    """Return messages with a confidence, and how many rows each client has."""
    g = generator(seed)
    message = {
        "a": torch.randn(clients, 3, 2, generator=g, dtype=torch.float64),
        "b": torch.randn(clients, generator=g, dtype=torch.float64),
        "tau": torch.rand(clients, generator=g, dtype=torch.float64) + 0.1,
        "share": torch.rand(clients, 2, generator=g, dtype=torch.float64),
    }
    return message, Cohort(torch.arange(clients), torch.arange(1.0, 1.0 + clients).double())


def share(message: Tensors, cohort: Cohort) -> Tensor:
    """Let clients count for each of two branches."""
    return message["share"] * cohort.size[:, None]


def two(server: Tensors, message: Tensors) -> Tensors:
    """Send the first tensor as two branches."""
    return message | {"a": torch.stack([message["a"], 2 * message["a"]], 1)}


DECLARED = {
    "by size": Aggregator({"a b": by_size}),
    "uniform": Aggregator({"*": uniform}),
    "by confidence": Aggregator({"a": weight_by("tau"), "b": by_size}),
    "sums": Aggregator({"a": WeightedSum(weight_by("tau")), "b": WeightedSum(uniform)}),
    "branches": Aggregator({"a": share, "b": by_size}, transform=two),
    "server step": Aggregator(
        {"a": by_size}, lambda server, pooled: {"a": server["a"] - pooled["a"]}
    ),
}


def grouped(aggregate: Aggregator, message: Tensors, cohort: Cohort, ends: list[int]) -> Weighed:
    """Fold clients in groups, then the groups one after the other."""
    found: list[Weighed] = []
    for begin, end in pairwise([0, *ends, len(cohort.ids)]):
        some = slice(begin, end)
        part = aggregate.weigh(
            SERVER, cut(message, some), Cohort(cohort.ids[some], cohort.size[some])
        )
        found = [aggregate.fold(*found, aggregate.fold(part))]
        assert {len(v) for v in (*found[0].values.values(), *found[0].weights.values())} == {1}
    return found[0]


def merged(
    aggregate: Aggregator, message: Tensors, cohort: Cohort, ends: list[int] | None = None
) -> Tensors:
    """Merge messages that are kept, or that are folded in groups."""
    if ends is None:
        return aggregate(SERVER, message, cohort, Generator())
    return aggregate.close(SERVER, grouped(aggregate, message, cohort, ends), Generator())


@pytest.mark.parametrize("name", DECLARED)
@given(ends=st.lists(st.integers(1, CLIENTS - 1), unique=True).map(sorted), seed=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_folding_in_any_grouping_is_merging_all(name, ends, seed):
    message, cohort = sent(seed=seed)
    kept, folded = (merged(DECLARED[name], message, cohort, at) for at in (None, ends))
    assert kept.keys() == folded.keys()
    for n, v in kept.items():
        torch.testing.assert_close(folded[n], v, rtol=1e-12, atol=1e-13)


def test_means_are_those_of_the_equations():
    message, cohort = sent()
    found = merged(DECLARED["by confidence"], message, cohort)
    torch.testing.assert_close(found["a"], weighted_mean(message["a"], message["tau"]))
    torch.testing.assert_close(found["b"], weighted_mean(message["b"], cohort.size))
    totals = merged(DECLARED["sums"], message, cohort)
    torch.testing.assert_close(totals["b"], message["b"].sum())
    torch.testing.assert_close(
        totals["a"], torch.einsum("c,c...->...", message["tau"], message["a"])
    )
    branches = merged(DECLARED["branches"], message, cohort)["a"]
    weight = share(message, cohort)
    for k in range(2):
        torch.testing.assert_close(branches[k], (k + 1) * weighted_mean(message["a"], weight[:, k]))


def test_a_name_is_pooled_by_the_patterns_that_it_matches_first():
    message, cohort = sent()
    aggregate = Aggregator({"a": weight_by("tau"), "*": by_size})
    found = merged(aggregate, message, cohort)
    torch.testing.assert_close(found["a"], weighted_mean(message["a"], message["tau"]))
    torch.testing.assert_close(found["tau"], weighted_mean(message["tau"], cohort.size))


def test_what_matches_nothing_stays_at_the_server():
    message, cohort = sent()
    found = merged(Aggregator({"b": by_size}), message, cohort)
    assert found.keys() == SERVER.keys()
    assert torch.equal(found["a"], SERVER["a"])


@pytest.mark.parametrize("ends", [None, [1, 2, 3, 4, 5, 6], [3]])
@pytest.mark.parametrize("name", ["by confidence", "sums", "branches"])
def test_clients_without_weight_do_not_count_in_whatever_group(name, ends):
    message, cohort = sent()
    for n in ("tau", "share"):
        message[n][:3] = 0
    some = slice(3, None)
    size = torch.where(cohort.ids < 3, 0.0, cohort.size)
    aggregate = replace(DECLARED[name], weights={**DECLARED[name].weights, "b": by_size})
    found = merged(aggregate, message, Cohort(cohort.ids, size), ends)
    expected = merged(aggregate, cut(message, some), Cohort(cohort.ids[some], cohort.size[some]))
    for n, v in expected.items():
        torch.testing.assert_close(found[n], v, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("ends", [None, [1, 2, 3, 4, 5, 6], [3]])
@pytest.mark.parametrize("bad", [-1.0, -1e-15, float("inf"), float("nan")])
@pytest.mark.parametrize(("name", "weight"), [("by confidence", "tau"), ("branches", "share")])
def test_weights_that_make_no_mean_are_refused_in_whatever_group(name, weight, bad, ends):
    message, cohort = sent()
    message[weight][1] = bad
    with pytest.raises(AggregationError, match=r"weights are .*; expected finite"):
        merged(DECLARED[name], message, cohort, ends)


@pytest.mark.parametrize("ends", [None, [1, 2, 3, 4, 5, 6], [3]])
def test_a_negative_weight_is_not_hidden_by_others_of_its_group(ends):
    message, cohort = sent()
    message["share"][0], message["share"][1] = 1.0, -0.5  # by size they add up to 0
    with pytest.raises(AggregationError, match="expected finite numbers >= 0"):
        merged(DECLARED["branches"], message, cohort, ends)


@pytest.mark.parametrize("ends", [None, [3]])
def test_with_no_weight_at_all_there_is_no_mean(ends):
    message, cohort = sent()
    message["tau"][:] = 0
    with pytest.raises(AggregationError, match="with a positive sum"):
        merged(DECLARED["by confidence"], message, cohort, ends)


@pytest.mark.parametrize("ends", [None, [1, 2, 3, 4, 5, 6], [3]])
def test_a_branch_that_nobody_uses_stays_as_it_was(ends):
    message, cohort = sent()
    message["share"][:, 1] = 0
    server = SERVER | {"a": torch.full((2, 3, 2), 5.0).double()}
    aggregate = Aggregator(
        {"a": share, "b": by_size},
        transform=lambda old, new: (
            two(old, new)
            | {
                n: v
                for n, v in new.items()
                if v.dim() == 4  # the server's own state has its branches
            }
        ),
    )
    if ends is None:
        found = aggregate(server, message, cohort, Generator())["a"]
    else:
        found = aggregate.close(server, grouped(aggregate, message, cohort, ends), Generator())["a"]
    assert torch.equal(found[1], server["a"][1])
    torch.testing.assert_close(found[0], weighted_mean(message["a"], share(message, cohort)[:, 0]))


def test_a_robust_rule_takes_the_place_of_the_mean():
    message, cohort = sent()
    aggregate = Aggregator({"a b": by_size}, rule="median")
    found = merged(aggregate, message, cohort)
    for n in ("a", "b"):
        torch.testing.assert_close(found[n], message[n].median(0).values)
    own = replace(
        aggregate, rule=lambda values, weight, before: {n: v[2] for n, v in values.items()}
    )
    assert torch.equal(merged(own, message, cohort)["a"], message["a"][2])


def test_an_unknown_rule_is_refused_where_it_is_declared():
    with pytest.raises(ValueError, match="aggregation is 'mode'; expected mean, median"):
        Aggregator({"*": by_size}, rule="mode")


def test_what_follows_a_declaration_is_one():
    message, cohort = sent()

    def half(server: Tensors, new: Tensors) -> Tensors:
        return {n: (v + server[n]) / 2 for n, v in new.items()}

    plain = DECLARED["by size"]
    found = with_server_step(plain, half)
    assert isinstance(found, Aggregator)

    def written(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        return plain(server, message, cohort, generator)

    other = with_server_step(written, half)
    assert not isinstance(other, Aggregator)
    a, b = found(SERVER, message, cohort, Generator()), other(SERVER, message, cohort, Generator())
    for n, v in half(SERVER, merged(plain, message, cohort)).items():
        assert torch.equal(a[n], v)
        assert torch.equal(b[n], v)
