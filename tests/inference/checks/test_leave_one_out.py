"""Leave-one-out of variational posteriors is exact where theory has a number."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from inspect import signature

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.data.loaders.conjugate import ConjugateTask, linear_regression
from pyrofl.inference.definition.metadata import SHARED, Metadata
from pyrofl.inference.definition.method import Method
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.export import import_arviz
from pyrofl.models import guides
from pyrofl.models.guides.correlated import full_covariance
from pyrofl.tensors import Tensors

D, TAU = 3, 2.0
SHAPES = {"w": torch.Size([D])}


@cache
def task() -> ConjugateTask:
    return linear_regression(4, D, [30, 50, 80, 40], between=0.7, seed=5)


def model(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Regress with w ~ Normal(0, I / tau)."""
    with batch.clients():
        width = received["tau"].rsqrt()[..., None].expand(-1, -1, D)
        w = pyro.sample("w", dist.Normal(torch.zeros_like(width), width).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((w * batch.x).sum(-1), 1.0), obs=batch.y)


def exact(narrow: float = 1.0, tau: float = TAU, shared: str = "") -> Method:
    """Return what holds the exact posterior, its standard deviations times `narrow`."""
    taus = torch.full((4,), tau, dtype=torch.float64)
    mean, covariance = task().posterior(torch.zeros(D), taus)
    if shared:
        w, s = task().pooled(torch.zeros(D), tau * torch.eye(D))
        mean, covariance = w.expand(4, D), s.expand(4, D, D)
    root = narrow * torch.linalg.cholesky(covariance)
    sd = root.diagonal(dim1=1, dim2=2)
    row, column = torch.tril_indices(D, D, -1)
    parameters = {
        "mu/w": mean,
        "pi/log_sd": sd.log(),
        "pi/below": (root / sd[..., None])[:, row, column],
    }
    return Method(
        init=lambda generator, clients: {"tau": taus[0]},
        init_client=lambda received, cohort, generator: {
            n: v[cohort.ids] for n, v in parameters.items()
        },
        model=model,
        guide=full_covariance(SHAPES).program,
        phases=(),
        aggregate=lambda server, message, cohort, generator: server,
        metadata=Metadata({shared: SHARED}),
    )


def run(method: Method, seed: int = 0) -> pyrofl.Run:
    return pyrofl.fit(method, task().federation, 0, seed=seed, progress=False)


def left_out(tau: float = TAU, pooled: bool = False) -> Tensor:
    """Return log p(y_i | all other rows of the client, or of all clients), in closed form."""
    found = []
    for rows in [torch.arange(200)] if pooled else task().federation.train:
        x, y = task().federation.x[rows], task().federation.y[rows]
        for i in range(len(rows)):
            others = torch.arange(len(rows)) != i
            precision = tau * torch.eye(D, dtype=x.dtype) + x[others].T @ x[others]
            covariance = torch.linalg.inv(precision)
            mean = x[i] @ covariance @ (x[others].T @ y[others])
            sd = (1 + x[i] @ covariance @ x[i]).sqrt()
            found.append(dist.Normal(mean, sd).log_prob(y[i]))
    return torch.stack(found)


def elpd(loo: object) -> float:
    return float(loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo)  # type: ignore[attr-defined]


def in_standard_errors(method: Method, expected: float, draws: int = 500) -> tuple[float, float]:
    """Return the error of leave-one-out over ten seeds in its standard errors, and in nats."""
    found = torch.tensor([elpd(pyrofl.checks.loo(run(method, seed), draws)) for seed in range(10)])
    error = float(found.mean()) - expected
    return error / float(found.std() / math.sqrt(10)), error


@pytest.mark.filterwarnings("ignore:Pareto k is above")  # 500 draws are few
def test_leave_one_out_of_the_exact_posterior_is_exact():
    expected = left_out()
    deviation, error = in_standard_errors(exact(), float(expected.sum()))
    assert abs(deviation) < 4
    assert abs(error) < 0.3  # of -298 nats
    one = pyrofl.checks.loo(run(exact()), 4000)
    by_row = one.elpd_i if hasattr(one, "elpd_i") else one.loo_i
    torch.testing.assert_close(torch.from_numpy(by_row.values), expected, atol=0.15, rtol=0)
    assert float(one.pareto_k.max()) < 0.7
    assert one.n_data_points == 200
    assert one.pareto_k["row_client"].values[[0, 29, 30, 199]].tolist() == [
        "client 0", "client 0", "client 1", "client 3",
    ]  # fmt: skip
    # The correction does nothing where the guide is exact.
    plain = import_arviz().loo(run(exact()).to_arviz(4000, groups="all"))
    assert elpd(plain) == pytest.approx(elpd(one), abs=0.1)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_a_guide_that_is_too_narrow_is_corrected_and_k_grows():
    expected = float(left_out().sum())
    narrow = run(exact(narrow=0.7)).to_arviz(4000, groups="all")
    plain = elpd(import_arviz().loo(narrow))
    with pytest.warns(UserWarning, match=r"Pareto k is above 0.70 in \d+ of 200 rows"):
        corrected = pyrofl.checks.loo(narrow)
    assert abs(plain - expected) > 2.0  # it looks better than it is
    assert abs(elpd(corrected) - expected) < 0.25 * abs(plain - expected)
    straight = pyrofl.checks.loo(run(exact()), 4000)
    assert float(corrected.pareto_k.median()) > float(straight.pareto_k.median()) + 0.3


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_a_guide_that_is_too_wide_is_corrected_without_a_warning():
    wide = run(exact(narrow=1.5)).to_arviz(4000, groups="all")
    expected = float(left_out().sum())
    assert abs(elpd(import_arviz().loo(wide)) - expected) > 2.0
    assert elpd(pyrofl.checks.loo(wide)) == pytest.approx(expected, abs=0.2)


def test_sites_that_all_share_are_left_out_for_by_all_rows():
    expected = left_out(pooled=True)
    loo = pyrofl.checks.loo(run(exact(shared="w _pi")), 4000)
    by_row = loo.elpd_i if hasattr(loo, "elpd_i") else loo.loo_i
    torch.testing.assert_close(torch.from_numpy(by_row.values), expected, atol=0.05, rtol=0)


def test_leave_one_out_and_comparisons_use_corrected_draws():
    narrow, expected = run(exact(narrow=0.4, shared="w _pi")), left_out(pooled=True)
    straight = pyrofl.checks.loo(narrow, 2000, corrected=False)
    corrected = pyrofl.checks.loo(narrow, 2000)  # without a warning
    assert float(corrected.pareto_k.median()) < float(straight.pareto_k.median()) - 0.3
    assert abs(elpd(straight) - float(expected.sum())) > 1.0  # nats
    assert abs(elpd(corrected) - float(expected.sum())) < 0.5
    by_row = corrected.elpd_i if hasattr(corrected, "elpd_i") else corrected.loo_i
    torch.testing.assert_close(torch.from_numpy(by_row.values), expected, atol=0.05, rtol=0)
    table = pyrofl.checks.compare_loo({"a": narrow, "b": run(exact(shared="w _pi"))}, 2000)
    assert (table["largest_k"] < 0.7).all()
    assert float(table["elpd_diff"].abs().max()) < 0.2  # of the same model


def test_chains_count_the_same():
    runs = [run(exact(), seed) for seed in (0, 1)]
    data = pyrofl.to_arviz(runs, 1000, groups=["log_likelihood"])
    both = elpd(pyrofl.checks.loo(data))
    assert elpd(pyrofl.checks.loo(runs, 1000)) == both
    assert both == pytest.approx(float(left_out().sum()), abs=0.2)
    # A chain whose densities lie far lower, as under another server, is no less a posterior.
    stats = data["sample_stats"]
    stats["log_p"] = stats["log_p"] - 1000.0 * stats["chain"]
    assert elpd(pyrofl.checks.loo(data)) == pytest.approx(both, abs=1e-6)


def test_models_are_compared_in_one_call():
    runs = {"weak": run(exact()), "strong": run(exact(tau=30.0))}
    table = pyrofl.checks.compare_loo(runs, 2000)
    assert list(table.index) == ["weak", "strong"]
    assert table["rank"].tolist() == [0, 1]
    expected = {"weak": left_out().sum(), "strong": left_out(30.0).sum()}
    column = "elpd" if "elpd" in table else "elpd_loo"
    for name in runs:
        assert float(table[column][name]) == pytest.approx(float(expected[name]), abs=3.0)
        assert table["largest_k"][name] < 0.7
    gap = abs(float(table["elpd_diff"]["strong"]))
    assert gap == pytest.approx(float(expected["weak"] - expected["strong"]), rel=0.1)


@pytest.mark.filterwarnings("ignore:Pareto k is above")
def test_what_cannot_be_compared_is_refused():
    other = linear_regression(4, D, [30, 50, 81, 39], seed=5).federation
    runs = {"a": run(exact()), "b": pyrofl.fit(exact(), other, 0, progress=False)}
    with pytest.raises(ValueError, match="'a' and 'b' have different rows"):
        pyrofl.checks.compare_loo(runs, 2000)


def test_what_leave_one_out_needs_is_asked_for():
    with pytest.raises(
        ValueError, match=r"var_name is None; expected one of the sites in log_likelihood: \[\]"
    ):
        pyrofl.checks.loo(run(exact()).to_arviz(5))
    with pytest.raises(ValueError, match=r"var_name is 'z'; .* log_likelihood: \['y'\]"):
        pyrofl.checks.loo(run(exact()), 5, var_name="z")
    some = run(exact(shared="w _pi"))
    with pytest.raises(ValueError, match="sample_stats lack log_p and log_q"):
        pyrofl.checks.loo(some, 5, ids=torch.tensor([1]))


def test_a_point_has_no_leave_one_out():
    point = guides.delta(SHAPES)
    method = exact()
    made = Method(
        init=method.init, init_client=method.init_client, model=model, guide=point.program,
        phases=(),
        aggregate=method.aggregate,
    )  # fmt: skip
    told = "all draws are equal because the guide is a point estimate"
    with pytest.raises(ValueError, match=told):
        pyrofl.checks.loo(run(made), 5)
    found = run(made).to_arviz(5, groups=("posterior", "log_likelihood"))
    # As rounding does where a model is run on some draws at once, and on fewer then.
    found["log_likelihood"]["y"].values[:, -1] *= 1 + 2e-7
    with pytest.raises(ValueError, match=told):
        pyrofl.checks.loo(found)


def parted(hide: int, how: str) -> Method:
    """Return the method with the likelihood in two halves, or with `hide` rows hidden."""

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            width = received["tau"].rsqrt()[..., None].expand(-1, -1, D)
            w = pyro.sample("w", dist.Normal(torch.zeros_like(width), width).to_event(1))
            fn = dist.Normal((w * batch.x).sum(-1), 1.0)
            shown = torch.arange(batch.y.shape[1]).expand_as(batch.mask) >= hide
            with batch.rows():
                if how == "mask":
                    with pyro.poutine.mask(mask=shown):
                        pyro.sample("y", fn, obs=batch.y)
                elif how == "masked distribution":
                    pyro.sample("y", fn.mask(shown), obs=batch.y)
                elif how == "factor":
                    pyro.factor("all", fn.log_prob(batch.y))
                else:
                    pyro.sample("y", fn.mask(shown), obs=batch.y)
                    pyro.factor("others", torch.where(shown, 0.0, fn.log_prob(batch.y)))

    return replace(exact(), model=program)


def by_row(loo: object) -> Tensor:
    found = loo.elpd_i if hasattr(loo, "elpd_i") else loo.loo_i  # type: ignore[attr-defined]
    return torch.from_numpy(found.values)


@pytest.mark.parametrize("how", ["factor", "mask and factor"])
def test_all_that_is_observed_of_a_row_is_left_out_with_it(how):
    found, expected = (pyrofl.checks.loo(run(m), 1000) for m in (parted(5, how), exact()))
    torch.testing.assert_close(by_row(found), by_row(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Pareto k is above")  # the guide is that of all rows
@pytest.mark.parametrize("how", ["mask", "masked distribution"])
def test_rows_that_a_mask_hides_are_not_taken_for_perfect_predictions(how):
    made = run(parted(5, how))
    log_lik = made.to_arviz(20, groups=("log_likelihood",))["log_likelihood"]["y"]
    assert int(log_lik.isnull().all(("chain", "draw")).sum()) == 4 * 5
    with pytest.warns(UserWarning, match="20 of 200 rows are hidden by a mask"):
        elpd = pyrofl.checks.loo(made, 1000)
    assert elpd.n_data_points == 180


WEIGHTS = torch.tensor([2.0, 1.0, 1.0, 0.5, 0.2, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]).double()


@cache
def weighted(weights: tuple[float, ...] | None) -> pyrofl.Run:
    """Return a run of a normal mean, whose posterior without a row is a closed form."""
    y = torch.randn(12, generator=torch.Generator().manual_seed(3)).double()
    rows = torch.arange(12).split([6, 6])
    made = None if weights is None else torch.tensor(weights).double()
    data = Federation(torch.zeros(12, 1).double(), y, rows, rows, weights=made)

    def mean(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(mu, 1.0), obs=batch.y)

    return pyrofl.fit(pyrofl.hierarchical(mean, data, shared="mu"), data, progress=False)


def without_row(y: Tensor, i: int) -> tuple[float, float]:
    """Return log E[p(y_i | mu)^w_i] and P(new response < y_i) without row i, by quadrature."""
    others, mu = torch.arange(len(y)) != i, torch.linspace(-8, 8, 40001).double()
    log_p = -0.5 * mu**2 - 0.5 * (WEIGHTS * (y - mu[:, None]) ** 2)[:, others].sum(1)
    log_p = log_p - log_p.logsumexp(0)
    density = dist.Normal(mu, 1.0).log_prob(y[i])
    place = (log_p.exp() * dist.Normal(mu, 1.0).cdf(y[i])).sum()
    return float((log_p + WEIGHTS[i] * density).logsumexp(0)), float(place)


def test_a_row_of_weight_w_is_left_out_as_w_rows() -> None:
    run, arviz = weighted(tuple(WEIGHTS.tolist())), import_arviz()
    found = run.to_arviz(4000, groups="all")
    y = run.data.y
    right = [without_row(y, i)[0] for i in range(12)]
    for loo in (arviz.loo(found, pointwise=True), pyrofl.checks.loo(found)):
        by_row = loo.elpd_i if hasattr(loo, "elpd_i") else loo.loo_i
        assert by_row.values == pytest.approx(right, abs=0.03)
    assert found["log_likelihood"]["row_weight"].values.tolist() == WEIGHTS.tolist()
    if "y" in signature(arviz.loo_pit).parameters:
        places = arviz.loo_pit(found, y="y")
    else:
        places = arviz.loo_pit(found, var_names="y")["y"].values.ravel()
    assert places == pytest.approx([without_row(y, i)[1] for i in range(12)], abs=0.03)


def test_rows_of_weight_zero_are_excluded() -> None:
    found = pyrofl.checks.loo(weighted((0.0, *[1.0] * 11)))
    assert found.n_data_points == 11
    assert bool((found.pareto_k < 0.5).all())


def test_models_and_chains_of_different_row_weights_are_refused() -> None:
    one, other = weighted(tuple(WEIGHTS.tolist())), weighted(None)
    with pytest.raises(ValueError, match="'a' and 'b' have different row weights"):
        pyrofl.checks.compare_loo({"a": one, "b": other})
    with pytest.raises(ValueError, match="client 0 has different row weights in two runs"):
        to_arviz([one, replace(other, seed=1)], 10)
