"""Calibrated runs: rows that calibrate, thresholds, sets of new rows, and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf, isnan
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import promises
import pyro.distributions as dist
import pytest
import torch
import toys
from scipy.stats import betabinom
from test_contract import METHODS, MODULES

import pyrofl
from pyrofl.data import Federation
from pyrofl.inference.conformal.conformal import _calibration_rows
from pyrofl.inference.conformal.quantiles import new_client_quantile, quantile
from pyrofl.inference.conformal.scores import aps_scores
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models import fedavg, fedper, likelihoods, perfedavg, pvi
from pyrofl.nets import build

ONE = torch.ones((), dtype=torch.float64)


def clients(
    train: tuple[int, ...], test: tuple[int, ...], held_out: int = 0, seed: int = 7
) -> Federation:
    """Return clients with these numbers of rows, which disagree about some of the labels."""
    rng = np.random.default_rng(seed)
    rows = sum(train) + sum(test)
    y = rng.integers(0, toys.CLASSES, rows)
    noise = rng.standard_normal((rows, toys.FEATURES))
    x = 1.2 * rng.standard_normal((toys.CLASSES, toys.FEATURES))[y] + noise
    parts = torch.arange(rows).split([*train, *test])
    for j in range(0, len(train), 2):
        some = torch.cat([parts[j], parts[len(train) + j]]).numpy()
        y[some] = (y[some] + (rng.random(len(some)) < 0.05 * j)) % toys.CLASSES
    return Federation(
        torch.from_numpy(x),
        torch.from_numpy(y),
        parts[: len(train)],
        parts[len(train) :],
        classes=tuple("abcde"),
        held_out=held_out,
    )


SIZES, TESTS = (20, 40, 30, 25, 20, 30), (41, 60, 200, 30, 50, 40)


@cache
def fitted(module: ModuleType = fedavg, held_out: int = 1) -> Run:
    data = clients(SIZES, TESTS, held_out)
    return pyrofl.fit(module.build(toys.net("softmax"), epochs=2), data, 3, progress=False)


def by_hand(run: Run, found: pyrofl.inference.conformal.sets.Conformal, i: int, **how: object):
    """Return scores of all classes [N, K] and y of a client's test rows, from its predictions."""
    rows = run.data.test[i]
    probs = run.predict(run.data.x[rows], run.data.names[i], **how).mean
    u = torch.rand(
        len(rows),
        generator=pyrofl.inference.definition.seeds.stream(
            run.seed,
            pyrofl.inference.definition.seeds.Stream.CONFORMAL,
            run.data.names[i],
            "scores",
        ),
        dtype=torch.float64,
    )
    return aps_scores(probs, u), run.data.y[rows]


@pytest.mark.parametrize("module", [fedavg, fedper, perfedavg, pvi])
def test_thresholds_and_coverage_are_those_of_single_predictions(module):
    run = fitted(module)
    found = pyrofl.conformal(run, 0.2, num_quantiles=1000)
    table = found.frame().set_index(["client", "pooling"])
    marked = _calibration_rows(run.data, 0.5, run.seed)
    scores, parts = {}, []
    for i in range(run.data.clients):
        every, y = by_hand(run, found, i)
        scores[i] = every, y
        own = every.gather(1, y[:, None])[:, 0][marked[i]]
        parts.append(own)
        assert len(own) == -(-TESTS[i] // 2)
        assert float(found.thresholds[i]) == pytest.approx(
            float(quantile(own, torch.ones(len(own)), 0.2, ONE)), abs=1e-9
        )
    whole = torch.cat(parts)
    pooled = quantile(whole, torch.ones(len(whole)), 0.2, torch.tensor(float(len(parts))))
    assert found.pooled == pytest.approx(float(pooled), abs=1e-9)
    for i, (every, y) in scores.items():
        for kind, q in (("client", float(found.thresholds[i])), ("pooled", found.pooled)):
            sets = (every <= q + 1e-9)[~marked[i]]
            line = table.loc[run.data.names[i], kind]
            held = sets.gather(1, y[~marked[i]][:, None])[:, 0]
            assert line["coverage"] == pytest.approx(float(held.double().mean()))
            assert line["size"] == pytest.approx(float(sets.double().sum(1).mean()))
            assert line["empty"] == pytest.approx(float((sets.sum(1) == 0).double().mean()))
            assert line["test_rows"] == TESTS[i] // 2


def test_new_rows_have_the_sets_of_their_threshold():
    run = fitted()
    found = pyrofl.conformal(run, 0.2, randomized=False)
    x = run.data.x[:30]
    for client, pooling, q in (
        ("client 1", None, float(found.thresholds[1])),
        ("client 1", "pooled", found.pooled),
        (None, None, float(new_client_quantile(list(found.messages.values()), 0.2))),
        (None, "pooled", found.pooled),
    ):
        sets = found.predict(x, client, pooling=pooling)
        zeros = torch.zeros(30, dtype=torch.float64)
        assert torch.equal(sets.sets, aps_scores(run.predict(x, client).mean, zeros) <= q)
        assert sets.size.tolist() == [len(some) for some in sets.labels]
        assert sets.frame()["set"].tolist() == ["|".join(some) for some in sets.labels]


def test_sets_without_randomization_are_never_empty_and_not_smaller():
    run = fitted()
    exact, wide = (pyrofl.conformal(run, 0.6, randomized=r).frame() for r in (True, False))
    assert (exact["empty"] > 0).any()
    assert (wide["empty"] == 0).all()
    sizes = {k: t[t["pooling"] == "client"]["size"].mean() for k, t in (("r", exact), ("d", wide))}
    assert sizes["d"] > sizes["r"]


def test_intervals_of_numbers_are_scaled_by_the_predictive_deviation():
    data = clients(SIZES, TESTS)
    data = replace(data, y=data.x[:, 0] + 0.3 * data.x[:, 1] ** 2, classes=())
    net = build("softmax", (toys.FEATURES,), 2)
    method = fedavg.build(net, likelihood=likelihoods.learned_normal(), lr=0.01)
    run = pyrofl.fit(method, data, 5, progress=False)
    found = pyrofl.conformal(run, 0.2)
    for i, marked in enumerate(_calibration_rows(data, 0.5, 0)):
        rows = data.test[i]
        p = run.predict(data.x[rows], data.names[i])
        own = ((data.y[rows] - p.mean).abs() / p.values["sd"])[marked]
        q = quantile(own, torch.ones(len(own)), 0.2, ONE)
        assert float(found.thresholds[i]) == pytest.approx(float(q), rel=1e-6)
        low, high = found.predict(data.x[rows], data.names[i]).sets.T
        assert torch.allclose(low, p.mean - q * p.values["sd"])
        assert torch.allclose(high, p.mean + q * p.values["sd"])
        inside = ((low <= data.y[rows]) & (data.y[rows] <= high))[~marked]
        line = found.frame().set_index(["client", "pooling"]).loc[data.names[i], "client"]
        assert line["coverage"] == pytest.approx(float(inside.double().mean()))
    with pytest.raises(ValueError, match="predicts numbers, which have no labels"):
        found.predict(data.x[:2], "client 0").labels  # noqa: B018


def test_a_binary_response_has_two_classes():
    data = clients(SIZES, TESTS)
    data = replace(data, y=(data.y > 2).double(), classes=())
    net = build("linear", (toys.FEATURES,), 1)
    method = fedavg.build(net, likelihood=likelihoods.bernoulli)
    found = pyrofl.conformal(pyrofl.fit(method, data, 3, progress=False))
    assert {*found.predict(data.x[:40], "client 2").labels} <= {(), ("0",), ("1",), ("0", "1")}


def test_held_out_clients_measure_the_threshold_for_new_clients():
    run = fitted(held_out=2)
    found = pyrofl.conformal(run, 0.25)  # four training clients: 4 / 5 > 0.75
    table = found.frame()
    lines = table[table["population"] == "held_out"].set_index("client")
    assert lines["pooling"].tolist() == ["new_client"] * 2
    assert lines["test_rows"].tolist() == [*TESTS[-2:]]
    q = float(new_client_quantile(list(found.messages.values()), 0.25))
    assert lines["threshold"].tolist() == [q, q]


def test_few_clients_give_infinite_thresholds_for_new_ones():
    found = pyrofl.conformal(fitted(), 0.1)
    with pytest.warns(UserWarning, match="3 of 3 rows have unbounded sets, as there are too few"):
        sets = found.predict(fitted().data.x[:3], None)
    assert bool(sets.sets.all())


def test_weights_by_class_give_a_threshold_for_each_class():
    run, weights = fitted(), {"a": 3.0, "b": 0.0}
    found = pyrofl.conformal(run, 0.2, weights=weights, num_quantiles=1000)
    plain = pyrofl.conformal(run, 0.2, num_quantiles=1000)
    assert found.pooled == plain.pooled
    assert found.thresholds.tolist() == plain.thresholds.tolist()
    w = torch.tensor([3.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    marked = _calibration_rows(run.data, 0.5, 0)
    scores, mass = [], []
    for i in range(run.data.clients):
        every, y = by_hand(run, found, i)
        scores.append(every.gather(1, y[:, None])[:, 0][marked[i]])
        mass.append(w[y[marked[i]]])
    q = quantile(torch.cat(scores), torch.cat(mass), 0.2, run.data.clients * w)
    assert q.unique().numel() > 1
    assert torch.allclose(found.threshold("new_client", 4), q.expand(4, 5))


def test_weights_of_one_give_the_pooled_threshold():
    run = fitted()
    by_class = pyrofl.conformal(run, 0.2, weights={})
    by_rows = pyrofl.conformal(run, 0.2, weights=lambda x: torch.ones(len(x)))
    x = run.data.x[:9]
    for found in (by_class, by_rows):
        sets = found.predict(x, None).sets
        assert torch.equal(sets, found.predict(x, None, pooling="pooled").sets)
        assert (found.threshold("new_client", 9, x=x) == found.pooled).all()


def test_weights_of_rows_reach_the_scores_of_the_same_rows():
    run = fitted()
    found = pyrofl.conformal(run, 0.2, weights=lambda x: x[:, 0].exp(), num_quantiles=1000)
    marked = _calibration_rows(run.data, 0.5, 0)
    scores, mass = [], []
    for i in range(run.data.clients):
        every, y = by_hand(run, found, i)
        scores.append(every.gather(1, y[:, None])[:, 0][marked[i]])
        mass.append(run.data.x[run.data.test[i][marked[i]], 0].exp())
    x = run.data.x[:7]
    atom = run.data.clients * x[:, 0].exp()
    q = quantile(torch.cat(scores), torch.cat(mass), 0.2, atom)
    assert torch.allclose(found.threshold("new_client", 7, x=x)[:, 0], q)


def test_a_new_client_needs_the_model_that_was_calibrated():
    run = fitted(fedper)
    found, data = pyrofl.conformal(run, 0.25), run.data
    with pytest.raises(ValueError, match="scores are those of personal models; pass own="):
        found.predict(data.x[:3], None)
    own = data.x[data.train[5]], [data.classes[k] for k in data.y[data.train[5]].tolist()]
    sets = found.predict(data.x[:3], None, own)
    assert torch.equal(sets.predictions.mean, run.predict(data.x[:3], None, own).mean)
    with pytest.raises(ValueError, match="new client has no scores; use pooling='new_client'"):
        found.predict(data.x[:3], None, own, pooling="client")


def test_rows_that_several_clients_test_have_one_use():
    data = fitted().data
    shared = torch.cat(data.test[:3])
    data = replace(data, test=(shared, shared[10:], *data.test[2:]))
    marked = _calibration_rows(data, 0.4, 0)
    use = {}
    for rows, some in zip(data.test, marked, strict=False):
        for row, mine in zip(rows.tolist(), some.tolist(), strict=True):
            assert use.setdefault(row, mine) == mine
    assert sum(use.values()) == -(-len(use) * 2 // 5)


def test_the_result_depends_on_the_seed_alone():
    run = fitted()
    one, other = (pyrofl.conformal(run, chunk_size=n).frame() for n in (None, 1))
    assert one.drop(columns="threshold").equals(other.drop(columns="threshold"))
    assert not pyrofl.conformal(run, seed=1).frame()["coverage"].equals(one["coverage"])


def test_the_share_of_calibration_rows():
    run = fitted()
    found = pyrofl.conformal(run, share=1.0)
    table = found.frame().query("population == 'training'")
    assert table["test_rows"].tolist() == [0] * 2 * run.data.clients
    assert table["coverage"].isna().all()
    assert [int(part.num_scores) for part in found.messages.values()] == [*TESTS[:5]]
    assert "coverage" in repr(found)


def test_rows_that_trained_the_model_are_refused():
    run = fitted()
    data = run.data
    none = replace(data, test=tuple(rows[:0] for rows in data.test))
    with pytest.raises(ValueError, match="no client has test rows, and rows that trained"):
        pyrofl.conformal(run.copy(data=none))
    same = replace(data, test=(torch.cat([data.test[0], data.train[1][:4]]), *data.test[1:]))
    with pytest.raises(ValueError, match="client 0: 4 of 45 test rows are training rows"):
        pyrofl.conformal(run.copy(data=same))


def test_too_few_rows_are_refused_or_marked():
    run = fitted()
    data = run.data
    few = replace(data, test=tuple(rows[:16] for rows in data.test))
    with pytest.raises(ValueError, match=r"needs at least 9 .* as \(n \+ 1\)\(1 - alpha\) > n"):
        pyrofl.conformal(run.copy(data=few))
    one = replace(data, test=(data.test[0][:16], data.test[1][:17], *data.test[2:]))
    with pytest.warns(UserWarning, match=r"client 0 \(1 of 5 clients\) have infinite sets"):
        found = pyrofl.conformal(run.copy(data=one))
    lines = found.frame().set_index(["client", "pooling"])
    assert lines.loc[("client 0", "client"), ["threshold", "coverage", "size"]].tolist() == [
        inf,
        1.0,
        toys.CLASSES,
    ]
    assert lines.loc[("client 1", "client"), "threshold"] < inf


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"alpha": 0.0}, "alpha is 0.0; expected a number above 0 to below 1"),
        ({"share": 0.0}, "share is 0.0; expected"),
        ({"model": "personal"}, "no 'personal' model in this method"),
        ({"weights": {"z": 2.0}}, "unknown class 'z'"),
        ({"weights": {"a": -2.0}}, r"weights\['a'\] is -2.0; expected a number >= 0"),
        ({"weights": lambda x: x}, r"weights returns shape \[\d+, 8\]; expected .*shape \[\d+\]"),
        ({"weights": lambda x: -x[:, 0].abs()}, "weights returns a negative or infinite number"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(how, error):
    with pytest.raises(ValueError, match=error) as caught:
        pyrofl.conformal(fitted(), **how)
    assert "\n" not in str(caught.value)


def test_a_likelihood_without_variance_is_refused():
    data = clients(SIZES, TESTS)
    data = replace(data, y=data.x[:, 0], classes=())

    def heavy(outputs: torch.Tensor, x: torch.Tensor) -> dist.StudentT:
        return dist.StudentT(2.0, outputs.squeeze(-1), 1.0)

    net = build("linear", (toys.FEATURES,), 1)
    run = pyrofl.fit(fedavg.build(net, likelihood=heavy), data, 1, progress=False)
    with pytest.raises(
        ValueError, match=r"client \d: the predictive standard deviation of a row is"
    ):
        pyrofl.conformal(run)


def test_a_private_run_warns_of_the_exchange():
    pytest.importorskip("dp_accounting")
    from pyrofl.inference.privacy import Privacy, private

    data = clients(SIZES, TESTS)
    promise = Privacy(clip=1.0, noise_multiplier=1.0)
    method = private(fedavg.build(toys.net("softmax")), promise, 6)
    run = pyrofl.fit(method, data, 1, progress=False)
    with pytest.warns(UserWarning, match="calibration scores are sent without noise"):
        pyrofl.conformal(run)


def outside(lines: object, alpha: float) -> tuple[int, float]:
    """Return rows outside of the correct law: number, and the smallest p value, two-sided."""
    ps = []
    for line in lines.itertuples():
        k = int(np.ceil((1 - alpha) * (line.calibration_rows + 1) - 1e-9))
        law = betabinom(line.test_rows, k, line.calibration_rows + 1 - k)
        hits = round(line.coverage * line.test_rows)
        ps.append(min(1.0, 2 * min(law.cdf(hits), law.sf(hits - 1))))
    return len(ps), min(ps)


@pytest.mark.parametrize("name", promises.others_slow(METHODS))
def test_every_client_is_covered_by_every_method(name):
    """Twenty clients that differ, 100 calibration and 100 test rows each, alpha 0.1.

    The number of covered rows of a client is beta-binomial. The smallest of its p values must not
    be below 0.001 / 20 (Bonferroni), and the mean coverage of the clients, with standard error
    sqrt(0.09 (1/101 + 1/100) / 20) = 0.0095, must be within 4 of them of that of the rank, 91/101.
    """
    data = clients(tuple(range(10, 50, 2)), (200,) * 20)
    method = MODULES[name].build(toys.net(), **promises.of(name).settings)
    run = pyrofl.fit(method, data, 2, progress=False)
    lines = pyrofl.conformal(run, 0.1).frame().query("pooling == 'client'")
    count, smallest = outside(lines, 0.1)
    assert count == 20
    assert smallest > 0.001 / count
    assert abs(lines["coverage"].mean() - 91 / 101) < 4 * (0.09 * (1 / 101 + 1 / 100) / 20) ** 0.5
    assert not any(map(isnan, lines["size"]))


EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_page_has_the_numbers_of_the_table():
    """Of 36 methods each p value is corrected for 20 clients; here also for the methods."""
    page = " ".join((EXAMPLES / "NUMBERS.md").read_text().split())
    table = pd.read_csv(EXAMPLES / "conformal.csv")
    methods = sorted(METHODS)
    assert table["method"].tolist() == methods
    assert set(table["clients"]) == {20}
    assert table["p"].min() > 0.01 / len(methods)

    def span(name: str, digits: int) -> str:
        return f"{table[name].min():.{digits}f} to {table[name].max():.{digits}f}"

    for phrase in (
        f"mean coverage of the clients is {span('coverage', 3)} for the {len(methods)} methods",
        f"with a standard error of {table['error'].max():.3f}. Of the {20 * len(methods)}",
        f"coverages of single clients {table['in_range'].sum()} are in their 95% range",
        f"corrected for its 20 clients, is {table['p'].min():.2f}. Sets have {span('size', 1)}",
        f"the lowest coverage at a client is {span('pooled_lowest', 2)}",
        f"mean coverage of {span('uncalibrated', 2)}, and {span('uncalibrated_lowest', 2)} at",
    ):
        assert phrase in page, phrase
