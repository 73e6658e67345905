"""Metrics against numbers worked by hand, scikit-learn, and their own definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score

from pyrofl.metrics import (
    auroc,
    calibration_bins,
    calibration_error,
    classification,
    classwise_ece,
    crps_of_draws,
    crps_of_normals,
    pool,
    regression,
)
from pyrofl.tensors import generator

# Four rows and two classes: one row is wrong, one is certain.
PROBS = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.55, 0.45], [1, 0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 0, 0])


def everything(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_worked_example(dtype):
    got = classification(PROBS.to(dtype)[None], LABELS[None], everything((1, 4)))
    expected = {
        "accuracy": 0.75,
        "nll": -math.log(0.9 * 0.4 * 0.55) / 4,
        "brier": (2 * 0.1**2 + 2 * 0.6**2 + 2 * 0.45**2) / 4,
        "ece": 0.0625,
        "mce": 0.1,
        "entropy": -sum(p * math.log(p) for p in (0.9, 0.1, 0.6, 0.4, 0.55, 0.45)) / 4,
        "ece_classwise": 0.2,
        "mce_classwise": 0.6,
    }
    assert {n: float(v) for n, v in got.items()} == pytest.approx(expected, abs=1e-6)


# 0.9, 0.6 and 0.4 are edges of bins: they must fall the same way in either precision.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_worked_example_by_class(dtype):
    got = classwise_ece(PROBS.to(dtype), LABELS)
    assert [float(v) for v in got] == pytest.approx([0.2, 0.6], abs=1e-6)


def test_a_probability_on_the_edge_of_a_bin_falls_in_the_upper_one():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.55, 0.25, 0.2]], dtype=torch.float64)
    ece, mce = classwise_ece(probs, torch.tensor([0, 1]))
    # [0.5, 0.6) holds a hit and 0.55, [0.3, 0.4) nothing but 0.3, [0.2, 0.3) a hit, 0.2 and 0.2.
    assert float(ece) == pytest.approx((0.05 + 0.3 + 0.35) / 6)
    assert float(mce) == pytest.approx(0.3)


def test_calibration_by_class_is_its_definition():
    probs, y = random_predictions(1, 40, 3)
    entries = [
        (float(p), int(y[0, i] == k)) for i, row in enumerate(probs[0]) for k, p in enumerate(row)
    ]
    bins = [[e for e in entries if b / 10 <= e[0] < (b + 1) / 10] for b in range(10)]
    gaps = [abs(sum(hit - p for p, hit in some)) / max(1, len(some)) for some in bins]
    ece, mce = classwise_ece(probs, y)
    expected = sum(g * len(some) for g, some in zip(gaps, bins, strict=True)) / len(entries)
    assert float(ece) == pytest.approx(expected)
    assert float(mce) == pytest.approx(max(gaps))


def test_calibration_of_clients_together_is_that_of_their_rows():
    probs, y = random_predictions(3, 50, 4)
    confidence, top = probs.max(-1)
    together = calibration_error(calibration_bins(confidence.flatten(), (top == y).flatten()))
    one = classification(probs.flatten(0, 1)[None], y.flatten()[None], everything((1, 150)))
    for found, name in zip(together, ("ece", "mce"), strict=True):
        torch.testing.assert_close(found, one[name][0])


def random_predictions(clients: int, rows: int, classes: int, seed: int = 0):
    g = generator(seed)
    probs = torch.randn(clients, rows, classes, generator=g, dtype=torch.float64).softmax(-1)
    return probs, torch.randint(classes, (clients, rows), generator=g)


def test_scores_agree_with_scikit_learn():
    probs, y = random_predictions(3, 50, 4)
    got = classification(probs, y, everything((3, 50)))
    for c in range(3):
        p, t = probs[c].numpy(), y[c].numpy()
        assert float(got["accuracy"][c]) == pytest.approx(accuracy_score(t, p.argmax(1)))
        assert float(got["nll"][c]) == pytest.approx(log_loss(t, p, labels=range(4)))
        brier = brier_score_loss(t, p, labels=range(4), scale_by_half=False)
        assert float(got["brier"][c]) == pytest.approx(brier)


def test_calibration_is_its_definition():
    probs, y = random_predictions(1, 200, 3)
    confidence, top = probs[0].max(-1)
    gaps, share = [], []
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            right = (top == y[0])[inside].double().mean()
            gaps.append(float((right - confidence[inside].mean()).abs()))
            share.append(int(inside.sum()) / 200)
    got = classification(probs, y, everything((1, 200)))
    assert len(gaps) > 5
    assert float(got["ece"]) == pytest.approx(sum(g * s for g, s in zip(gaps, share, strict=True)))
    assert float(got["mce"]) == pytest.approx(max(gaps))


@pytest.mark.parametrize(
    ("confidence", "place"), [(0.0, 0), (1 / 15, 0), (0.07, 1), (0.6, 8), (0.601, 9), (1.0, 14)]
)
def test_edges_of_the_bins(confidence, place):
    bins = calibration_bins(torch.tensor([confidence]), torch.tensor([True]))
    assert bins.rows.tolist() == [float(b == place) for b in range(15)]
    assert bins.accuracy[place] == 1
    assert bins.confidence[place] == pytest.approx(confidence)
    assert int(bins.accuracy.isnan().sum()) == 14


@pytest.mark.parametrize("junk", [1e6, -1.0, math.nan])
def test_padding_changes_nothing(junk):
    probs, y = random_predictions(2, 6, 3)
    plain = classification(probs, y, everything((2, 6)))
    mask = torch.cat([everything((2, 6)), ~everything((2, 2))], 1)
    padded = classification(
        torch.cat([probs, probs.new_full((2, 2, 3), junk)], 1),
        torch.cat([y, torch.full((2, 2), 10**6)], 1),
        mask,
    )
    for name, value in plain.items():
        torch.testing.assert_close(padded[name], value, msg=name)

    value = torch.randn(2, 6, generator=generator(1))
    pad = torch.full((2, 2), junk)
    long = torch.cat([value, pad], 1)
    plain = regression(value, value - 1, value + 1, y.float(), everything((2, 6)))
    padded = regression(long, long - 1, long + 1, torch.cat([y.float(), pad], 1), mask)
    for name, score in plain.items():
        torch.testing.assert_close(padded[name], score, msg=name)


def test_clients_do_not_see_each_other():
    probs, y = random_predictions(3, 8, 4)
    together = classification(probs, y, everything((3, 8)))
    for c in range(3):
        alone = classification(probs[c : c + 1], y[c : c + 1], everything((1, 8)))
        for name, value in together.items():
            torch.testing.assert_close(value[c : c + 1], alone[name], msg=name)


def test_a_client_without_rows_or_with_nan_gets_nan():
    probs, y = random_predictions(3, 4, 3)
    mask = everything((3, 4))
    mask[1] = False
    probs[2, 0] = math.nan
    for name, value in classification(probs, y, mask).items():
        assert value.isnan().tolist() == [False, True, True], name
    number = probs[..., 0]
    for name, value in regression(number, number, number, y.double(), mask).items():
        assert value.isnan().tolist() == [False, True, True], name


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 9))
def test_ranges(seed, classes, rows):
    probs, y = random_predictions(2, rows, classes, seed)
    got = classification(probs, y, everything((2, rows)))
    top = {"accuracy": 1, "nll": math.inf, "brier": 2, "ece": 1, "mce": 1}
    top |= {"ece_classwise": 1, "mce_classwise": 1}
    for name, most in (top | {"entropy": math.log(classes) + 1e-12}).items():
        assert bool(((got[name] >= 0) & (got[name] <= most)).all()), name
    assert bool((got["ece"] <= got["mce"] + 1e-12).all())


def test_extremes():
    certain = torch.eye(3)[None]
    best = classification(certain, torch.arange(3)[None], everything((1, 3)))
    assert {n: float(v) for n, v in best.items()} == {
        "accuracy": 1, "nll": 0, "brier": 0, "ece": 0, "mce": 0, "entropy": 0,
        "ece_classwise": 0, "mce_classwise": 0,
    }  # fmt: skip
    worst = classification(certain, torch.tensor([[1, 2, 0]]), everything((1, 3)))
    assert float(worst["nll"]) == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))
    assert [float(worst[n]) for n in ("accuracy", "brier", "ece", "mce")] == [0, 2, 1, 1]
    flat = torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)
    entropy = classification(flat, torch.zeros(1, 3, dtype=torch.long), everything((1, 3)))
    assert float(entropy["entropy"]) == pytest.approx(math.log(3))


def test_regression_by_hand():
    mean = torch.tensor([[1.0, 2.0, 9.0], [0.0, 0.0, 0.0]])
    y = torch.tensor([[1.0, 5.0, 0.0], [2.0, 2.0, 2.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    normal = torch.distributions.Normal(mean, 1.0).log_prob(y)
    crps = torch.tensor([[1.0, 2.0, 9.0], [3.0, 3.0, 6.0]])
    got = regression(mean, normal, crps, y, mask)
    assert got["crps"].tolist() == [1.5, 4.0]
    torch.testing.assert_close(got["rmse"], torch.tensor([math.sqrt(4.5), 2.0]))
    constant = math.log(2 * math.pi) / 2
    torch.testing.assert_close(got["nll"], torch.tensor([constant + 2.25, constant + 2.0]))


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0.1, 3)), min_size=1, max_size=4),
    st.floats(-5, 5),
)
@settings(max_examples=30, deadline=None)
def test_the_crps_of_normals_is_the_area_between_distribution_functions(parts, y):
    def cdf(z):
        return sum(stats.norm.cdf(z, m, s) for m, s in parts) / len(parts)

    below = quad(lambda z: cdf(z) ** 2, -40, y, epsabs=1e-10, limit=200)[0]
    above = quad(lambda z: (1 - cdf(z)) ** 2, y, 40, epsabs=1e-10, limit=200)[0]
    loc, scale = torch.tensor(parts, dtype=torch.float64).T[..., None]
    got = crps_of_normals(loc, scale, torch.tensor([y], dtype=torch.float64))
    assert float(got) == pytest.approx(below + above, abs=1e-7)


def test_the_crps_of_draws_is_its_definition_and_has_no_bias():
    draws, y = torch.randn(7, 5, generator=generator(1)).double(), torch.randn(5).double()
    pairs = (draws[:, None] - draws).abs().sum((0, 1)) / (7 * 6)
    expected = (draws - y).abs().mean(0) - pairs / 2
    torch.testing.assert_close(crps_of_draws(draws, y), expected)
    assert crps_of_draws(draws[:1], y).isnan().all()
    # Of two draws each, many times: a gamma distribution, whose integral is known.
    fn = stats.gamma(2.0)
    found = crps_of_draws(
        torch.from_numpy(fn.rvs((2, 20_000), random_state=0)), torch.full((20_000,), 1.5)
    )
    exact = quad(lambda z: fn.cdf(z) ** 2, 0, 1.5)[0] + quad(lambda z: fn.sf(z) ** 2, 1.5, 40)[0]
    assert float(found.mean()) == pytest.approx(exact, abs=4 * float(found.std()) / 20_000**0.5)


def test_a_prediction_without_spread_has_its_absolute_error_as_crps():
    loc, y = torch.tensor([[1.0, -2.0, 4.0]]), torch.tensor([3.0, -2.0, 0.0])
    error = pytest.approx([2.0, 0.0, 4.0], abs=1e-30)
    assert crps_of_normals(loc, torch.zeros(1, 3), y).tolist() == error
    assert crps_of_draws(loc.expand(5, 3), y).tolist() == error


def test_telling_data_sets_apart_agrees_with_scikit_learn():
    g = generator(3)
    # Rounded, so that there are ties within and between.
    inside = (torch.rand(300, generator=g) * 20).round()
    outside = (torch.rand(200, generator=g) * 20 + 4).round()
    labels = [0] * 300 + [1] * 200
    expected = roc_auc_score(labels, torch.cat([inside, outside]).numpy())
    assert float(auroc(inside, outside)) == pytest.approx(expected, abs=1e-12)
    assert float(auroc(outside, inside)) == pytest.approx(1 - expected, abs=1e-12)


def test_telling_data_sets_apart_at_its_limits():
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])
    assert [float(auroc(a, b)) for a, b in ((low, high), (high, low), (low, low))] == [1, 0, 0.5]
    bad = torch.tensor([0.0, math.nan])
    assert auroc(bad, high).isnan()
    assert auroc(high, bad).isnan()
    assert auroc(low[:0], high).isnan()
    assert auroc(low, high[:0]).isnan()


def test_pooling():
    value = torch.tensor([1.0, 0.0, math.nan])
    size = torch.tensor([3, 1, 100])
    assert float(pool(value, size)) == 0.5
    assert float(pool(value, size, "row")) == 0.75
    assert pool(value[2:], size[2:]).isnan()
    with pytest.raises(ValueError, match="weighting is 'rows'; expected one of client, row"):
        pool(value, size, "rows")


def test_bad_input_is_refused():
    probs, y = random_predictions(2, 4, 3)
    mask = everything((2, 4))
    with pytest.raises(ValueError, match=r"cover rows \(2, 4\), \(2, 3\) and \(2, 4\)"):
        classification(probs, y[:, :3], mask)
    with pytest.raises(ValueError, match="expected probabilities"):
        classification(probs.log(), y, mask)
    with pytest.raises(ValueError, match="labels run from 0 to 3; expected 0 to 2"):
        classification(probs, torch.arange(4).expand(2, 4), mask)
    with pytest.raises(ValueError, match=r"mask is torch\.float32"):
        regression(probs[..., 0], probs[..., 0], probs[..., 0], y, mask.float())
    with pytest.raises(ValueError, match=r"crps, y and mask cover rows \(2, 3\), \(2, 4\)"):
        regression(probs[..., 0], probs[..., 0], probs[:, :3, 0], y, mask)


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e30), (torch.float64, 1e300)])
def test_what_is_finite_stays_finite(dtype, gap):
    y = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)
    mean = torch.tensor([[gap, -gap, gap], [0.0, 3.0, 4.0]], dtype=dtype)
    impossible = torch.full_like(mean, -torch.inf)
    crps = crps_of_normals(mean[None], torch.ones_like(mean)[None], y)
    got = regression(mean, impossible, crps, y, everything((2, 3)))
    assert got["crps"].isfinite().all()
    torch.testing.assert_close(got["rmse"], torch.tensor([gap, (25 / 3) ** 0.5], dtype=dtype))
    torch.testing.assert_close(got["nll"], torch.tensor([1e30, 1e30], dtype=dtype))
    perfect = regression(y, y, y, y, everything((2, 3)))
    assert perfect["rmse"].tolist() == [0, 0]
    most = torch.full((9,), torch.finfo(torch.float32).max)
    assert pool(most, torch.ones(9)) == most[0]
