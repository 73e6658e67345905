"""Splitting a data set by a partition's one-line name, with every test policy."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrofl.data import Dataset
from pyrofl.data.fingerprint import fingerprint
from pyrofl.data.loaders.datasets import join, load
from pyrofl.partitions import by_label
from pyrofl.partitions.federations import PARTITIONS, TEST_POLICIES, class_counts, read, split


def toy(kinds=10, each=60, tests=20):
    """Return classes with a coarser grouping: rows 0..K-1 in turn, training rows first."""
    y = torch.cat([torch.arange(kinds * n) % kinds for n in (each, tests)])
    is_test = torch.arange(len(y)) >= kinds * each
    return Dataset(
        "toy",
        x=torch.arange(len(y), dtype=torch.float32)[:, None],
        y=y,
        is_test=is_test,
        classes=tuple("abcdefghij"[:kinds]),
    )


def superclasses():
    fine = toy()
    return Dataset("toy", fine.x, fine.y // 2, fine.is_test, tuple("vwxyz"), types=fine.y)


def regression():
    return load("linear")


EACH = [
    "iid",
    "dirichlet:0.3",
    "dirichlet:0.3,min=10",
    "dirichlet:0.1,balance",
    "labels:2",
    "label-groups:5",
    "slices:5",
    "slices:5,independent",
    "step:1,minor=1",
    "step:2,minor=3",
    "shares:5",
]


@pytest.mark.parametrize("partition", EACH)
@pytest.mark.parametrize("test", TEST_POLICIES)
def test_parts_hold_rows_of_their_own_kind_only(partition, test):
    data = toy(tests=60)
    federation = split(data, partition, 8, test=test, held_out=2, seed=3)
    assert federation.clients == 8
    assert federation.held_out == 2
    assert federation.names == tuple(f"client {j}" for j in range(10))
    assert federation.classes == data.classes
    assert not data.is_test[torch.cat(federation.train)].any()
    assert data.is_test[torch.cat(federation.test)].all()
    assert torch.equal(federation.pooled_test, data.is_test.nonzero().flatten())
    assert federation.x is data.x


@pytest.mark.parametrize("partition", [p for p in EACH if not p.startswith("shares")])
def test_all_rows_are_dealt_once(partition):
    data = toy()
    federation = split(data, partition, 10)
    assert torch.equal(torch.cat(federation.train).sort().values, torch.arange(600))
    assert torch.equal(torch.cat(federation.test).sort().values, torch.arange(600, 800))


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(EACH), st.integers(0, 2**31))
def test_the_seed_decides_and_the_test_policy_leaves_training_rows_alone(partition, seed):
    data = toy(tests=60)
    one, again = (split(data, partition, 10, seed=seed) for _ in range(2))
    other = split(data, partition, 10, seed=seed, test="independent")
    for a, b in ((one.train, again.train), (one.test, again.test), (one.train, other.train)):
        assert all(torch.equal(r, s) for r, s in zip(a, b, strict=True))


@pytest.mark.parametrize("words", ["drift", "drift,independent", "drift,equal"])
def test_drift_gives_one_fine_class_of_every_superclass(words):
    data = superclasses()
    federation = split(data, words, 6)
    for rows in federation.train:
        assert sorted(set(data.y[rows].tolist())) == [0, 1, 2, 3, 4]
        assert len(set(data.types[rows].tolist())) == 5


def test_options_reach_the_partition():
    data = toy()
    assert min(split(data, "dirichlet:0.01,min=25", 20).sizes) >= 25
    assert class_counts(split(data, "step:2,minor=3", 10)).min() == 3
    equal, sliced = (split(data, f"{n}:5", 20, seed=1).sizes for n in ("label-groups", "slices"))
    assert set(equal.tolist()) == {30}
    assert sliced.max() > 60
    plain, level = (split(data, f"dirichlet:0.05{b}", 5).sizes.max() for b in ("", ",balance"))
    assert level < plain


def test_same_shares_keep_the_shares_of_every_class():
    federation = split(toy(), "dirichlet:0.5", 5)
    train, test = class_counts(federation), class_counts(federation, "test")
    assert (test - train / 3).abs().max() < 1
    assert torch.equal(test.sum(0), torch.full((10,), 20))


def test_same_classes_gives_the_test_set_of_the_own_labels():
    federation = split(toy(), "slices:5", 4, test="same_classes")
    train, test = class_counts(federation), class_counts(federation, "test")
    assert torch.equal(test, 20 * (train > 0))


def test_independent_draws_the_partition_anew():
    federation = split(toy(tests=60), "labels:2", 10, test="independent", seed=5)
    train, test = class_counts(federation), class_counts(federation, "test")
    assert ((test > 0).sum(1) <= 2).all()
    assert not torch.equal(train > 0, test > 0)


@pytest.mark.parametrize("test", ["same_shares", "independent", "uniform"])
def test_the_seed_decides_the_test_rows(test):
    data = toy(tests=60)
    one, again, other = (split(data, "labels:10", 10, test=test, seed=s).test for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(torch.cat(one), torch.cat(other))


def test_uniform_deals_test_rows_at_random():
    federation = split(toy(), "labels:1", 10, test="uniform")
    assert {len(rows) for rows in federation.test} == {20}
    assert (class_counts(federation, "test") > 0).sum(1).min() > 3


def test_independent_says_when_the_test_rows_are_too_few():
    with pytest.raises(ValueError, match="test policy independent cannot be met: class 0 has 2"):
        split(toy(tests=2), "label-groups:5", 20, test="independent")


def test_a_response_that_is_a_number_splits_at_random_in_proportion():
    data = regression()
    federation = split(data, "iid", 7)
    sizes = torch.tensor([len(rows) for rows in federation.test])
    assert int(sizes.sum()) == 230
    assert sizes.max() - sizes.min() <= 1
    with pytest.raises(
        ValueError, match="linear has no classes for labels; expected iid or groups"
    ):
        split(data, "labels:2", 7)
    with pytest.raises(ValueError, match="same_classes, but linear has no classes"):
        split(data, "iid", 7, test="same_classes")
    with pytest.raises(ValueError, match="expected data with classes for class counts"):
        class_counts(federation)


def test_groups_are_the_clients():
    data = regression()
    federation = split(data, "groups", held_out=3)
    assert federation.clients == 17
    assert federation.names == data.group_names["client"]
    for part in (federation.train, federation.test):
        for j, rows in enumerate(part):
            assert (data.groups["client"][rows] == j).all()
    assert sum(len(r) for r in federation.train) + sum(len(r) for r in federation.test) == 1150
    assert split(data, "groups:client", 20).clients == 20


def test_groups_are_held_out_by_name():
    data = regression()
    names = data.group_names["client"]
    out = (names[4], names[0])
    federation = split(data, "groups", held_out=out)
    assert federation.names == (*(n for n in names if n not in out), *out)
    assert (federation.clients, federation.held_out) == (18, 2)
    for part in (federation.train, federation.test):
        for name, rows in zip(federation.names, part, strict=True):
            assert (data.groups["client"][rows] == names.index(name)).all()
    last = split(data, "groups", held_out=names[-2:])
    same = split(data, "groups", held_out=np.int64(2))
    assert last.names == same.names
    assert all(map(torch.equal, last.train, same.train))
    with pytest.raises(ValueError, match="unknown group to hold out: 'nobody'"):
        split(data, "groups", held_out=["nobody"])
    with pytest.raises(ValueError, match="held_out is a, and partition iid has no names"):
        split(data, "iid", 3, held_out=["a"])
    with pytest.raises(ValueError, match="held_out: expected distinct names"):
        split(data, "groups", held_out=[names[0], names[0]])


def every_split(seed):
    """Split small data by every partition and test policy; each data set suits some of them."""
    fine, coarse = toy(), superclasses()
    grouped = replace(fine, groups={"site": torch.arange(len(fine.y)) % 6})
    data = {"drift": coarse, "groups": grouped, "domains": join([fine, replace(fine, name="b")])}
    words = {read(w)[0]: w for w in ("drift", "groups", "domains:dirichlet:0.3", *EACH[::-1])}
    for name in PARTITIONS:
        for test in TEST_POLICIES:
            if (name, test) != ("groups", "independent"):  # natural groups are not drawn
                clients = None if name == "groups" else 10
                yield split(data.get(name, fine), words[name], clients, seed=seed, test=test)


@pytest.mark.parametrize("seed", range(10))
def test_a_hash_of_any_split_does_not_depend_on_how_its_rows_lie_in_memory(seed):
    for data in every_split(seed):
        train = [torch.stack([rows, rows], 1)[:, 0] for rows in data.train]
        sliced = replace(data, x=torch.stack([data.x, data.x], 1)[:, 0], train=train)
        assert fingerprint(data) == fingerprint(sliced)
        one = replace(data, test=[rows[:1].clone() for rows in data.test])
        spread = replace(data, test=[rows.sum().expand(len(rows)) for rows in one.test])
        assert any(rows.stride() == (0,) for rows in spread.test)
        assert fingerprint(one) == fingerprint(spread) != fingerprint(data)


def test_eight_schools_have_no_test_rows():
    federation = split(load("eight_schools"), "groups:school")
    assert federation.names == tuple("ABCDEFGH")
    assert [rows.tolist() for rows in federation.train] == [[j] for j in range(8)]
    assert all(len(rows) == 0 for rows in federation.test)
    assert federation.pooled_test is None


@pytest.mark.parametrize("test", ["uniform", "same_classes", "independent"])
def test_data_without_test_rows_have_empty_test_parts(test):
    federation = split(toy(tests=0), "iid", 4, test=test)
    assert [len(rows) for rows in federation.test] == [0] * 4


def test_groups_may_share_test_rows_by_label():
    data = toy()
    data = Dataset("toy", data.x, data.y, data.is_test, data.classes, groups={"odd": data.y % 2})
    federation = split(data, "groups", test="same_classes")
    assert federation.names == ("odd 0", "odd 1")
    assert [len(rows) for rows in federation.test] == [100, 100]


def test_a_group_without_training_rows_is_named():
    data = toy(kinds=2, each=5, tests=5)
    groups = {"site": data.is_test.long()}
    names = {"site": ("Bonn", "Kiel")}
    data = Dataset("toy", data.x, data.y, data.is_test, data.classes, None, groups, names)
    with pytest.raises(ValueError, match="group Kiel has no training row"):
        split(data, "groups")


def test_several_columns_of_groups_need_a_name():
    data = toy()
    two = Dataset("toy", data.x, data.y, data.is_test, groups={"a": data.y, "b": data.y})
    with pytest.raises(ValueError, match="groups in columns a, b; expected one of them by name"):
        split(two, "groups")
    assert split(two, "groups:b").clients == 10


# Domains.


def domains():
    """Return two domains of ten and of four classes."""
    small = toy(kinds=4, each=30, tests=20)
    return join([toy(), replace(small, name="small", x=-small.x)])


@pytest.mark.parametrize("within", ["iid", "dirichlet:0.5", "labels:2", "step:2,minor=1"])
@pytest.mark.parametrize("test", TEST_POLICIES)
def test_domains_are_dealt_to_clients_in_turn(within, test):
    data = domains()
    federation = split(data, f"domains:{within}", 16, held_out=4, test=test, seed=1)
    for j, rows in enumerate(federation.train):
        assert set(data.groups["domain"][rows].tolist()) == {j % 2}
    if test != "uniform":
        for j, rows in enumerate(federation.test):
            assert set(data.groups["domain"][rows].tolist()) <= {j % 2}
    assert int(federation.sizes.sum()) == 720
    assert federation.clients == 16


def test_a_partition_within_domains_is_that_partition():
    data = domains()
    federation = split(data, "domains:labels:2", 9)
    assert ((class_counts(federation) > 0).sum(1) <= 2).all()
    sizes = split(data, "domains:iid", 9).sizes
    assert sizes.tolist() == [120, 30] * 4 + [120]


def test_other_partitions_spread_the_domains_over_all_clients():
    counts = class_counts(split(domains(), "dirichlet:5", 6))
    assert (counts[:, :10].sum(1) > 0).all()
    assert (counts[:, 10:].sum(1) > 0).all()
    assert split(domains(), "groups").names == ("toy", "small")


@pytest.mark.parametrize(
    ("data", "partition", "clients", "message"),
    [
        (toy, "domains:iid", 4, "toy has no domains; expected data sets joined"),
        (domains, "domains:iid", 1, "clients is 1; expected one for each of 2 domains"),
        (domains, "domains:groups", 4, "has 'groups'; expected one that is drawn"),
        (domains, "domains:labels", 4, "lacks its number; expected labels:S"),
        (domains, "domains:iid,x", 4, "has 'x'; expected iid"),
        (domains, "domains:labels:5", 4, "classes per client is 5; expected 1 to 4"),
    ],
)
def test_refuses_domains(data, partition, clients, message):
    with pytest.raises(ValueError, match=message):
        split(data(), partition, clients)


# Rows of the server.


@pytest.mark.parametrize("server", [100, 1 / 6])
def test_the_server_withholds_rows_of_every_class_from_all_clients(server):
    data = toy()
    federation = split(data, "dirichlet:0.5", 5, server_data=server)
    withheld = federation.server_data[:, 0].long()
    assert torch.bincount(data.y[withheld]).tolist() == [10] * 10
    together = torch.cat([*federation.train, withheld]).sort().values
    assert torch.equal(together, torch.arange(600))


def test_exact_counts_survive_what_the_server_takes():
    # FedBE's CIFAR-10, ten times smaller: 1,000 of 5,000 rows, then 2 x 196 + 8 x 1.
    federation = split(toy(each=500), "step:2,minor=1", 10, server_data=1000)
    assert set(class_counts(federation).flatten().tolist()) == {196, 1}


def test_the_seed_decides_what_the_server_takes():
    data = toy()
    one, again, other = (
        split(data, "iid", 4, server_data=50, seed=s).server_data for s in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    elsewhere = split(data, "labels:2", 10, server_data=50, seed=1, test="uniform").server_data
    assert torch.equal(one, elsewhere)


def test_the_server_may_hold_other_rows():
    data, other = toy(), toy(kinds=4, each=3)
    plain = split(data, "iid", 4)
    given = split(data, "iid", 4, server_data=other)
    assert plain.server_data is None
    assert torch.equal(given.server_data, other.x[:12])  # its training rows
    assert all(torch.equal(a, b) for a, b in zip(plain.train, given.train, strict=True))
    assert torch.equal(split(data, "iid", 4, server_data=other.x).server_data, other.x)


def test_the_server_takes_from_natural_groups_but_empties_none():
    data = regression()
    federation = split(data, "groups", server_data=0.1)
    assert len(federation.server_data) == round(0.1 * int((~data.is_test).sum()))
    assert int(federation.sizes.sum()) == int((~data.is_test).sum()) - len(federation.server_data)
    with pytest.raises(
        ValueError, match=r"has no training row, as the server took 9\d\d; expected"
    ):
        split(data, "groups", server_data=int((~data.is_test).sum()) - 15)


def test_there_may_be_fewer_test_rows_than_clients():
    federation = split(toy(tests=1), "iid", 20, test="uniform")
    assert sorted(len(rows) for rows in federation.test) == [0] * 10 + [1] * 10


@pytest.mark.parametrize("server", [0, -1, 600, 0.0, 1.0, 1.5, float("nan")])
def test_the_server_takes_some_rows_but_not_all(server):
    with pytest.raises(ValueError, match=f"server_data is {server}; expected a number of rows"):
        split(toy(), "iid", 4, server_data=server)


def test_a_former_name_is_refused_in_a_line():
    with pytest.raises(TypeError, match="'server'; it is server_data now"):
        split(toy(), "iid", 4, server=0.1)


def test_rows_of_another_shape_do_not_fit_the_server():
    with pytest.raises(ValueError, match=r"server_data is torch.float32 \[1347, 64\]; expected"):
        split(toy(), "iid", 4, server_data=load("digits"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 19}, "clients is 19 with 0 held out; expected 20 together"),
        (
            {"test": "independent"},
            "policy is independent; expected another, as groups are not drawn",
        ),
        ({"partition": "groups:clients"}, "did you mean client"),
    ],
)
def test_refuses_arguments_of_groups(arguments, message):
    with pytest.raises(ValueError, match=message):
        split(regression(), **({"partition": "groups"} | arguments))


def test_every_partition_is_described_by_the_name_it_answers_to():
    for name, about in PARTITIONS.items():
        assert about.startswith(name)
    assert {read(p)[0] for p in [*EACH, "step:2", "drift", "groups", "domains:iid"]} == set(
        PARTITIONS
    )


def test_the_callers_random_state_is_left_alone():
    states = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    split(load("digits"), "dirichlet:0.1", 20)
    assert np.array_equal(states[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(states[1], torch.get_rng_state())


# Partitions of one's own.


def by_halves(types, clients, rng):
    """Give every client a run of the rows, by their class."""
    return np.array_split(np.argsort(types, kind="stable"), clients)


def test_a_function_is_as_good_as_a_name():
    data = toy(tests=60)
    named = split(data, "dirichlet:0.3", 4, seed=3, test="independent", held_out=1)
    own = split(
        data,
        lambda types, clients, rng: by_label.dirichlet(types, clients, 0.3, rng),
        4,
        seed=3,
        test="independent",
        held_out=1,
    )
    assert fingerprint(own) == fingerprint(named)
    federation = split(data, by_halves, 5, test="same_classes", server_data=100)
    assert federation.sizes.tolist() == [100] * 5
    assert all(len(data.y[rows].unique()) == 2 for rows in federation.train)
    lists = split(data, lambda types, clients, rng: [[0], [2, 1]], 2)
    assert [rows.tolist() for rows in lists.train] == [[0], [2, 1]]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([[0]], "returns a list of 1; expected row numbers of each of 2 clients"),
        (None, "returns a NoneType; expected row numbers"),
        ("ab", "returns a str of 2; expected row numbers"),
        ([[0], []], "client 1 gets no row; expected at least one"),
        ([[0], [600]], "client 1 gets row 600; expected 0 to 599"),
        ([[-1], [0]], "client 0 gets row -1; expected 0 to 599"),
        ([[0.0], [1.0]], "client 0 gets float64 of shape [1]; expected integer row numbers"),
        ([[[0]], [1]], "client 0 gets int64 of shape [1, 1]; expected integer row numbers"),
        ([[True], [False]], "client 0 gets bool of shape [1]; expected integer row numbers"),
        ([[3, 4], [1, 4]], "client 1 gets row 4, as client 0; expected each row at most once"),
        ([[3, 3], [1]], "client 0 gets a row twice; expected each row at most once"),
    ],
)
def test_wrong_row_numbers_of_a_function_are_refused(parts, told):
    def mine(types, clients, rng):
        return parts

    with pytest.raises(
        ValueError, match=re.escape(f"partition mine{':' * ('client' in told[:7])} ")
    ) as caught:
        split(toy(), mine, 2)
    assert told in str(caught.value)
