"""Partitions: exact, seeded, never an empty client, and shaped as the papers say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrofl.partitions import by_label
from pyrofl.partitions.allocation import (
    in_proportion,
    rows_of_classes,
    rows_of_owners,
    same_shares,
    top_up,
)

SEEDS = st.integers(0, 2**32 - 1)
CUTS = ("equal", "shared", "independent")


def table(types, parts):
    """Return the counts [J, K] of a partition."""
    kinds = np.unique(types)
    return np.array([[np.count_nonzero(types[part] == kind) for kind in kinds] for part in parts])


def assert_exact(parts, rows, clients):
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(rows))


def balanced(kinds, each, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(kinds), each))


# Each draws some valid request: a function from generator to parts, its types and its clients.
@st.composite
def requests(draw):
    kinds = draw(st.sampled_from([4, 6, 10]))
    sizes = draw(st.lists(st.integers(30, 90), min_size=kinds, max_size=kinds))
    types = np.random.default_rng(draw(SEEDS)).permutation(np.repeat(np.arange(kinds), sizes))
    clients = draw(st.sampled_from([2, 4, 10, 12]))
    size = draw(st.sampled_from([n for n in range(1, kinds + 1) if kinds % n == 0]))
    group = kinds // size
    cuts = draw(st.sampled_from(CUTS))
    alpha = draw(st.floats(1e-3, 100))
    minimum = draw(st.integers(1, 5))
    return draw(
        st.sampled_from(
            [
                (lambda rng: by_label.iid(types, clients, rng), types, clients),
                (
                    lambda rng: by_label.dirichlet(types, clients, alpha, rng, minimum=minimum),
                    types,
                    clients,
                ),
                (
                    lambda rng: by_label.dirichlet(types, clients, alpha, rng, balance=True),
                    types,
                    clients,
                ),
                (
                    lambda rng: by_label.labels(types, 2 * group, size, rng),
                    types,
                    2 * group,
                ),
                (
                    lambda rng: by_label.label_groups(types, 3 * group, size, rng, cuts=cuts),
                    types,
                    3 * group,
                ),
                (
                    lambda rng: by_label.drift(types, types // 2, 2 * size, rng, cuts=cuts),
                    types,
                    2 * size,
                ),
                (lambda rng: by_label.step(types, group, size, rng, minor=1), types, group),
            ]
        )
    )


@settings(deadline=None, max_examples=150)
@given(requests(), SEEDS)
def test_every_row_has_exactly_one_client_and_no_client_is_empty(request_, seed):
    draw, types, clients = request_
    assert_exact(draw(np.random.default_rng(seed)), len(types), clients)


@settings(deadline=None, max_examples=60)
@given(requests(), SEEDS)
def test_the_same_seed_gives_the_same_partition(request_, seed):
    draw, _, _ = request_
    first, again = (draw(np.random.default_rng(seed)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_another_seed_gives_another_partition():
    types = balanced(10, 50)
    one, two = (by_label.dirichlet(types, 5, 1.0, np.random.default_rng(s)) for s in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_rows_are_shuffled_before_they_are_dealt():
    types = np.arange(2000) % 10
    first = by_label.label_groups(types, 10, 10, np.random.default_rng(0), cuts="equal")[0]
    assert first.max() > 1900
    assert first.min() < 100


def test_iid_sizes_differ_by_at_most_one():
    sizes = [len(p) for p in by_label.iid(np.zeros(103), 10, np.random.default_rng(0))]
    assert sorted(sizes) == [10] * 7 + [11] * 3


class TestDirichlet:
    @settings(deadline=None, max_examples=40)
    @given(st.integers(1, 40), st.integers(1, 30), st.floats(1e-300, 10), SEEDS)
    def test_honors_the_minimum_size(self, clients, minimum, alpha, seed):
        types = balanced(10, 120)
        parts = by_label.dirichlet(
            types, clients, alpha, np.random.default_rng(seed), minimum=minimum
        )
        assert_exact(parts, 1200, clients)
        assert min(len(p) for p in parts) >= minimum

    def test_500_clients_at_a_tiny_alpha(self):
        types = balanced(10, 5000)
        parts = by_label.dirichlet(types, 500, 0.01, np.random.default_rng(0), minimum=10)
        assert_exact(parts, 50_000, 500)
        assert min(len(p) for p in parts) >= 10

    def test_the_minimum_can_use_up_all_rows(self):
        parts = by_label.dirichlet(balanced(5, 20), 10, 0.05, np.random.default_rng(1), minimum=10)
        assert [len(p) for p in parts] == [10] * 10

    def test_a_large_alpha_is_nearly_uniform(self):
        types = balanced(4, 1000)
        counts = table(types, by_label.dirichlet(types, 10, 1e6, np.random.default_rng(2)))
        assert np.abs(counts - 100).max() <= 2

    @pytest.mark.parametrize("alpha", [0.1, 1.0])
    def test_shares_have_the_moments_of_a_dirichlet(self, alpha):
        # A share is Beta(alpha, (J-1) alpha): variance (1/J)(1 - 1/J) / (J alpha + 1).
        clients, rng = 4, np.random.default_rng(3)
        types = np.zeros(2000, dtype=int)
        draws = [by_label.dirichlet(types, clients, alpha, rng) for _ in range(600)]
        share = np.array([len(d[0]) / 2000 for d in draws])
        expected = 0.25 * 0.75 / (clients * alpha + 1)
        error = ((share - 0.25) ** 2).std() / np.sqrt(len(share))
        assert abs(((share - 0.25) ** 2).mean() - expected) < 4 * error
        assert abs(share.mean() - 0.25) < 4 * share.std() / np.sqrt(len(share))

    def test_balance_stops_giving_classes_to_clients_that_hold_their_share(self):
        types, rng = balanced(50, 40), np.random.default_rng(4)
        plain, level = (
            [len(p) for p in by_label.dirichlet(types, 10, 0.1, rng, balance=b)]
            for b in (False, True)
        )
        # Whoever is below 200 rows gains at most one class of 40 before the check is made again.
        assert max(level) < 240 < max(plain)

    @pytest.mark.parametrize("alpha", [0.0, -1.0, np.inf, np.nan])
    def test_refuses_an_alpha_that_is_no_concentration(self, alpha):
        with pytest.raises(ValueError, match=r"alpha is .*expected a number above 0 and finite"):
            by_label.dirichlet(np.zeros(5), 2, alpha, np.random.default_rng(0))

    def test_refuses_a_minimum_that_cannot_be_met(self):
        with pytest.raises(ValueError, match="minimum size is 6; expected 1 to 5"):
            by_label.dirichlet(np.zeros(10), 2, 1.0, np.random.default_rng(0), minimum=6)


class TestLabels:
    @settings(deadline=None, max_examples=30)
    @given(st.integers(1, 10), SEEDS)
    def test_a_client_has_at_most_that_many(self, per_client, seed):
        types = balanced(10, 60)
        parts = by_label.labels(types, 12, per_client, np.random.default_rng(seed))
        counts = table(types, parts)
        assert (counts > 0).sum(1).max() <= per_client
        assert (counts.sum(0) == 60).all()

    def test_shards_are_equal(self):
        types = balanced(10, 100)
        counts = table(types, by_label.labels(types, 20, 2, np.random.default_rng(5)))
        assert set(counts.ravel().tolist()) <= {0, 25, 50}
        assert (counts.sum(1) == 50).all()

    def test_refuses_too_few_hands(self):
        with pytest.raises(ValueError, match="4 clients with 2 labels each cannot hold 10 classes"):
            by_label.labels(balanced(10, 9), 4, 2, np.random.default_rng(0))

    def test_refuses_more_shards_than_rows(self):
        with pytest.raises(ValueError, match="class 0 has 3 rows; expected at least 4"):
            by_label.labels(balanced(2, 3), 4, 2, np.random.default_rng(0))


class TestLabelGroups:
    @settings(deadline=None, max_examples=30)
    @given(st.sampled_from([1, 2, 5, 10]), st.sampled_from(CUTS), SEEDS)
    def test_groups_cover_every_class_once(self, per_client, cuts, seed):
        group = 10 // per_client
        types = balanced(10, 40)
        counts = table(
            types,
            by_label.label_groups(
                types, 3 * group, per_client, np.random.default_rng(seed), cuts=cuts
            ),
        )
        owned = counts > 0
        assert (owned.sum(1) == per_client).all()
        assert (owned.reshape(3, group, 10).sum(1) == 1).all()

    def test_shared_cuts_give_a_client_equally_many_rows_of_each_label(self):
        types = balanced(10, 500)
        parts = by_label.label_groups(types, 100, 5, np.random.default_rng(6))
        counts = table(types, parts)
        assert all(len(set(row[row > 0])) == 1 for row in counts)
        pairs = counts.sum(1).reshape(50, 2)
        assert np.array_equal(pairs[:, 0], pairs[:, 1])

    def test_slices_are_spacings_of_distinct_uniform_points_handed_out_from_the_end(self):
        types = np.repeat([0, 1], 50)
        parts = by_label.label_groups(types, 6, 2, np.random.default_rng(7))
        rng = np.random.default_rng(7)
        for _ in range(6):
            rng.permutation(2)
        cuts = np.sort(rng.choice(49, 5, replace=False)) + 1
        sizes = [b - a for a, b in pairwise([0, *cuts, 50])]
        assert [len(p) // 2 for p in parts] == sizes[::-1]

    @pytest.mark.parametrize(("cuts", "slices"), [("shared", 1), ("independent", 5)])
    def test_spread_of_client_sizes(self, cuts, slices):
        # M uniform spacings vary by (M-1)/(M+1); a client averages `slices` of them.
        types, rng = balanced(10, 5000), np.random.default_rng(8)
        cv = []
        for _ in range(40):
            sizes = [len(p) for p in by_label.label_groups(types, 100, 5, rng, cuts=cuts)]
            assert np.mean(sizes) == 500
            cv.append(np.var(sizes) / 500**2)
        expected = 49 / 51 / slices
        assert abs(np.mean(cv) - expected) < 4 * np.std(cv) / np.sqrt(len(cv))

    def test_shared_cuts_scale_to_classes_of_different_sizes(self):
        types = np.repeat([0, 1, 2, 3], [1000, 500, 100, 10])
        parts = by_label.label_groups(types, 10, 4, np.random.default_rng(9))
        counts = table(types, parts)
        assert counts.min() == 1
        assert (counts[:, 3] == 1).all()
        excess = counts - 1
        assert np.abs(excess[:, 1] - excess[:, 0] * 490 / 990).max() < 1
        assert np.abs(excess[:, 2] - excess[:, 0] * 90 / 990).max() < 1

    @pytest.mark.parametrize(
        ("clients", "per_client", "message"),
        [
            (10, 3, "per_client is 3; expected a divisor of the 10 classes"),
            (9, 5, "clients is 9; expected a multiple of 2"),
            (10, 11, "classes per client is 11; expected 1 to 10"),
            (60, 5, "class 0 has 20 rows; expected at least 30"),
            (0, 5, "clients is 0; expected 1 to 200"),
            (201, 5, "clients is 201; expected 1 to 200"),
        ],
    )
    def test_refuses(self, clients, per_client, message):
        with pytest.raises(ValueError, match=message):
            by_label.label_groups(balanced(10, 20), clients, per_client, np.random.default_rng(0))

    def test_refuses_unknown_cuts(self):
        with pytest.raises(ValueError, match="cuts is 'even'; expected one of equal, shared"):
            by_label.label_groups(balanced(10, 20), 2, 5, np.random.default_rng(0), cuts="even")


class TestDrift:
    def test_one_fine_class_of_every_superclass(self):
        fine = balanced(100, 30)
        coarse = (fine * 7) % 20
        rng = np.random.default_rng(10)
        parts = by_label.drift(fine, coarse, 20, rng)
        assert_exact(parts, 3000, 20)
        for part in parts:
            kinds = np.unique(fine[part])
            assert len(kinds) == 20
            assert len(np.unique((kinds * 7) % 20)) == 20
        owned = table(fine, parts) > 0
        assert (owned.reshape(4, 5, 100).sum(1) == 1).all()
        counts = table(fine, parts)
        assert all(len(set(row[row > 0])) == 1 for row in counts)

    def test_refuses_superclasses_of_different_size(self):
        fine = np.repeat(np.arange(5), 10)
        with pytest.raises(ValueError, match=r"superclasses hold \[2, 3\] fine classes each"):
            by_label.drift(fine, fine // 3, 5, np.random.default_rng(0))

    def test_refuses_a_fine_class_in_two_superclasses(self):
        coarse = np.arange(40) % 2
        with pytest.raises(ValueError, match="each in one superclass"):
            by_label.drift(np.arange(40) // 20, coarse, 2, np.random.default_rng(0))


class TestStep:
    def test_the_counts_of_fedbe(self):
        types = balanced(10, 4000)
        counts = table(types, by_label.step(types, 10, 2, np.random.default_rng(11)))
        assert (np.sort(counts, axis=1) == [10] * 8 + [1960] * 2).all()
        assert (counts.sum(1) == 4000).all()
        assert ((counts == 1960).sum(0) == 2).all()

    def test_the_counts_of_fedbe_on_cifar_100(self):
        types = balanced(100, 400)
        counts = table(types, by_label.step(types, 100, 5, np.random.default_rng(12), minor=1))
        assert (np.sort(counts, axis=1) == [1] * 95 + [61] * 5).all()
        assert ((counts == 61).sum(0) == 5).all()

    @settings(deadline=None, max_examples=30)
    @given(st.sampled_from([(5, 2), (10, 3), (20, 4), (15, 6), (10, 10)]), SEEDS)
    def test_each_class_is_major_equally_often(self, shape, seed):
        clients, majors = shape
        types = balanced(10, 200)
        parts = by_label.step(types, clients, majors, np.random.default_rng(seed), minor=0)
        owned = table(types, parts) > 0
        assert (owned.sum(1) == majors).all()
        assert (owned.sum(0) == clients * majors // 10).all()

    @pytest.mark.parametrize(
        ("clients", "majors", "minor", "message"),
        [
            (7, 2, 1, "7 clients x 2 major classes; expected a multiple of the 10 classes"),
            (10, 2, 50, "class 0 has 50 rows; expected at least 402"),
            (10, 2, -1, "minor is -1; expected a whole number of at least 0"),
            (10, 11, 1, "classes per client is 11; expected 1 to 10"),
        ],
    )
    def test_refuses(self, clients, majors, minor, message):
        with pytest.raises(ValueError, match=message):
            by_label.step(balanced(10, 50), clients, majors, np.random.default_rng(0), minor=minor)


class TestShares:
    @settings(deadline=None, max_examples=30)
    @given(SEEDS)
    def test_owned_classes_are_dealt_in_full_and_others_to_nobody(self, seed):
        types = balanced(20, 100)
        parts = by_label.shares(types, 8, 3, np.random.default_rng(seed))
        counts = table(types, parts)
        owned = counts > 0
        assert (owned.sum(1) == 3).all()
        assert np.array_equal(counts.sum(0), 100 * owned.any(0))

    def test_shares_lie_between_those_of_the_extreme_draws(self):
        types = balanced(2, 1000)
        counts = table(types, by_label.shares(types, 4, 2, np.random.default_rng(13)))
        low, high = 1000 * 0.3 / (0.3 + 3 * 0.7), 1000 * 0.7 / (0.7 + 3 * 0.3)
        assert low - 1 < counts.min() < counts.max() < high + 1

    def test_refuses_a_class_too_small_for_its_owners(self):
        with pytest.raises(ValueError, match="class 0 has 2 rows for 4 clients"):
            by_label.shares(balanced(2, 2), 4, 2, np.random.default_rng(0))


def test_rows_follow_their_owners():
    parts = rows_of_owners(np.array([2, 0, -1, 4, 0]), 5)
    assert [p.tolist() for p in parts] == [[1, 4], [], [0], [], [3]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(1, 8), SEEDS)
def test_a_split_in_proportion_is_exact_and_within_one_row_of_the_quota(sizes, clients, seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 4, (clients, len(sizes)))
    counts = in_proportion(np.array(sizes), weights, rng)
    total = weights.sum(0)
    assert np.array_equal(counts.sum(0), np.where(total > 0, sizes, 0))
    quota = np.array(sizes) * weights / np.where(total > 0, total, 1)
    assert (np.abs(counts - quota) < 1).all()
    assert (counts[weights == 0] == 0).all()


def test_topping_up_takes_from_the_largest_only():
    counts = np.array([[50, 50], [0, 0], [7, 0]])
    fixed = top_up(counts, 5, np.random.default_rng(0))
    assert fixed.sum(1).tolist() == [95, 5, 7]
    assert fixed.sum(0).tolist() == [57, 50]
    assert counts.sum() == 107


@settings(deadline=None, max_examples=30)
@given(SEEDS)
def test_same_shares_follow_the_training_rows(seed):
    rng = np.random.default_rng(seed)
    types = balanced(10, 60)
    parts = by_label.dirichlet(types, 5, 0.3, rng)
    test = balanced(10, 20, seed)
    dealt = same_shares([types[p] for p in parts], test, rng)
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(200))
    assert (np.abs(table(test, dealt) - table(types, parts) / 3) < 1).all()


def test_same_shares_leave_out_classes_that_nobody_trains_on():
    dealt = same_shares(
        [np.array([0]), np.array([0, 0, 0])],
        np.array([0, 1, 0, 0, 0]),
        np.random.default_rng(0),
    )
    assert [len(p) for p in dealt] == [1, 3]
    assert 1 not in np.concatenate(dealt)


def test_same_classes_gives_all_test_rows_of_the_own_classes():
    dealt = rows_of_classes([np.array([0, 1]), np.array([1])], np.array([1, 0, 2, 1]))
    assert [p.tolist() for p in dealt] == [[0, 1, 3], [0, 3]]
