"""Servers as declarations: what is pooled by what, folded in any grouping."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from pyrofl.data import Who
from pyrofl.inference.engine.messages import CannotMerge
from pyrofl.inference.servers.averages import weighted_mean
from pyrofl.inference.servers.pooled import Pooled, Total, Weighed, by, by_size, evenly, followed
from pyrofl.tensors import Tensors, cut, generator

CLIENTS = 7
SERVER = {"a": torch.ones(3, 2).double(), "b": torch.ones(()).double()}


def sent(clients: int = CLIENTS, seed: int = 0) -> tuple[Tensors, Who]:
    """Return messages with a confidence, and how many rows each client has."""
    g = generator(seed)
    message = {
        "a": torch.randn(clients, 3, 2, generator=g, dtype=torch.float64),
        "b": torch.randn(clients, generator=g, dtype=torch.float64),
        "tau": torch.rand(clients, generator=g, dtype=torch.float64) + 0.1,
        "share": torch.rand(clients, 2, generator=g, dtype=torch.float64),
    }
    return message, Who(torch.arange(clients), torch.arange(1.0, 1.0 + clients).double())


def share(message: Tensors, who: Who) -> Tensor:
    """Let clients count for each of two branches."""
    return message["share"] * who.size[:, None]


def two(server: Tensors, message: Tensors) -> Tensors:
    """Send the first tensor as two branches."""
    return message | {"a": torch.stack([message["a"], 2 * message["a"]], 1)}


DECLARED = {
    "by size": Pooled({"a b": by_size}),
    "evenly": Pooled({"*": evenly}),
    "by confidence": Pooled({"a": by("tau"), "b": by_size}),
    "sums": Pooled({"a": Total(by("tau")), "b": Total(evenly)}),
    "branches": Pooled({"a": share, "b": by_size}, of=two),
    "then": Pooled({"a": by_size}, lambda server, pooled: {"a": server["a"] - pooled["a"]}),
}


def grouped(merge: Pooled, message: Tensors, who: Who, ends: list[int]) -> Weighed:
    """Fold clients in groups, then the groups one after the other."""
    found: list[Weighed] = []
    for begin, end in pairwise([0, *ends, len(who.ids)]):
        some = slice(begin, end)
        part = merge.weigh(SERVER, cut(message, some), Who(who.ids[some], who.size[some]))
        found = [merge.fold(*found, merge.fold(part))]
        assert {len(v) for v in (*found[0].values.values(), *found[0].weights.values())} == {1}
    return found[0]


def merged(merge: Pooled, message: Tensors, who: Who, ends: list[int] | None = None) -> Tensors:
    """Merge messages that are kept, or that are folded in groups."""
    if ends is None:
        return merge(SERVER, message, who, Generator())
    return merge.close(SERVER, grouped(merge, message, who, ends), Generator())


@pytest.mark.parametrize("name", DECLARED)
@given(ends=st.lists(st.integers(1, CLIENTS - 1), unique=True).map(sorted), seed=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_folding_in_any_grouping_is_merging_all(name, ends, seed):
    message, who = sent(seed=seed)
    kept, folded = (merged(DECLARED[name], message, who, at) for at in (None, ends))
    assert kept.keys() == folded.keys()
    for n, v in kept.items():
        torch.testing.assert_close(folded[n], v, rtol=1e-12, atol=1e-13)


def test_means_are_those_of_the_equations():
    message, who = sent()
    found = merged(DECLARED["by confidence"], message, who)
    torch.testing.assert_close(found["a"], weighted_mean(message["a"], message["tau"]))
    torch.testing.assert_close(found["b"], weighted_mean(message["b"], who.size))
    totals = merged(DECLARED["sums"], message, who)
    torch.testing.assert_close(totals["b"], message["b"].sum())
    torch.testing.assert_close(
        totals["a"], torch.einsum("c,c...->...", message["tau"], message["a"])
    )
    branches = merged(DECLARED["branches"], message, who)["a"]
    weight = share(message, who)
    for k in range(2):
        torch.testing.assert_close(branches[k], (k + 1) * weighted_mean(message["a"], weight[:, k]))


def test_a_name_is_pooled_by_the_patterns_that_it_matches_first():
    message, who = sent()
    merge = Pooled({"a": by("tau"), "*": by_size})
    found = merged(merge, message, who)
    torch.testing.assert_close(found["a"], weighted_mean(message["a"], message["tau"]))
    torch.testing.assert_close(found["tau"], weighted_mean(message["tau"], who.size))


def test_what_matches_nothing_stays_at_the_server():
    message, who = sent()
    found = merged(Pooled({"b": by_size}), message, who)
    assert found.keys() == SERVER.keys()
    assert torch.equal(found["a"], SERVER["a"])


@pytest.mark.parametrize("ends", [None, [1, 2, 3, 4, 5, 6], [3]])
@pytest.mark.parametrize("name", ["by confidence", "sums", "branches"])
def test_clients_without_weight_do_not_count_in_whatever_group(name, ends):
    message, who = sent()
    for n in ("tau", "share"):
        message[n][:3] = 0
    some = slice(3, None)
    size = torch.where(who.ids < 3, 0.0, who.size)
    merge = replace(DECLARED[name], weights={**DECLARED[name].weights, "b": by_size})
    found = merged(merge, message, Who(who.ids, size), ends)
    expected = merged(merge, cut(message, some), Who(who.ids[some], who.size[some]))
    for n, v in expected.items():
        torch.testing.assert_close(found[n], v, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("ends", [None, [1, 2, 3, 4, 5, 6], [3]])
@pytest.mark.parametrize("bad", [-1.0, -1e-15, float("inf"), float("nan")])
@pytest.mark.parametrize(("name", "weight"), [("by confidence", "tau"), ("branches", "share")])
def test_weights_that_make_no_mean_are_refused_in_whatever_group(name, weight, bad, ends):
    message, who = sent()
    message[weight][1] = bad
    with pytest.raises(CannotMerge, match=r"weights are .*; expected finite"):
        merged(DECLARED[name], message, who, ends)


@pytest.mark.parametrize("ends", [None, [1, 2, 3, 4, 5, 6], [3]])
def test_a_negative_weight_is_not_hidden_by_others_of_its_group(ends):
    message, who = sent()
    message["share"][0], message["share"][1] = 1.0, -0.5  # by size they add up to 0
    with pytest.raises(CannotMerge, match="none < 0"):
        merged(DECLARED["branches"], message, who, ends)


@pytest.mark.parametrize("ends", [None, [3]])
def test_with_no_weight_at_all_there_is_no_mean(ends):
    message, who = sent()
    message["tau"][:] = 0
    with pytest.raises(CannotMerge, match="not all zero"):
        merged(DECLARED["by confidence"], message, who, ends)


@pytest.mark.parametrize("ends", [None, [1, 2, 3, 4, 5, 6], [3]])
def test_a_branch_that_nobody_uses_stays_as_it_was(ends):
    message, who = sent()
    message["share"][:, 1] = 0
    server = SERVER | {"a": torch.full((2, 3, 2), 5.0).double()}
    merge = Pooled(
        {"a": share, "b": by_size},
        of=lambda old, new: (
            two(old, new)
            | {
                n: v
                for n, v in new.items()
                if v.dim() == 4  # the server's own state has its branches
            }
        ),
    )
    if ends is None:
        found = merge(server, message, who, Generator())["a"]
    else:
        found = merge.close(server, grouped(merge, message, who, ends), Generator())["a"]
    assert torch.equal(found[1], server["a"][1])
    torch.testing.assert_close(found[0], weighted_mean(message["a"], share(message, who)[:, 0]))


def test_a_robust_rule_takes_the_place_of_the_mean():
    message, who = sent()
    merge = Pooled({"a b": by_size}, how="median")
    found = merged(merge, message, who)
    for n in ("a", "b"):
        torch.testing.assert_close(found[n], message[n].median(0).values)
    own = replace(merge, how=lambda values, weight, before: {n: v[2] for n, v in values.items()})
    assert torch.equal(merged(own, message, who)["a"], message["a"][2])


def test_an_unknown_rule_is_refused_where_it_is_declared():
    with pytest.raises(ValueError, match="merge is 'mode'; expected mean, median"):
        Pooled({"*": by_size}, how="mode")


def test_what_follows_a_declaration_is_one():
    message, who = sent()

    def half(server: Tensors, new: Tensors) -> Tensors:
        return {n: (v + server[n]) / 2 for n, v in new.items()}

    plain = DECLARED["by size"]
    found = followed(plain, half)
    assert isinstance(found, Pooled)

    def written(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        return plain(server, message, who, generator)

    other = followed(written, half)
    assert not isinstance(other, Pooled)
    a, b = found(SERVER, message, who, Generator()), other(SERVER, message, who, Generator())
    for n, v in half(SERVER, merged(plain, message, who)).items():
        assert torch.equal(a[n], v)
        assert torch.equal(b[n], v)
