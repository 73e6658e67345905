"""Whatever is given as prior or guide works in a method, or is refused when the method is built."""

from __future__ import annotations

import math
import re
from typing import Any

import prior_table as table
import pyro.distributions as dist
import pytest
import torch
import toys
from pyro.distributions import constraints
from torch import Size

from pyrofl.experiments.settings import argument_types
from pyrofl.inference.definition.prior_conversion import nobody
from pyrofl.inference.definition.programs import Supervised
from pyrofl.inference.engine.federate import federate
from pyrofl.models import fedavg, fedem, guides, likelihoods, priors, pvi
from pyrofl.models.priors import as_family, as_prior, learned_scales
from pyrofl.nets import build

SHAPES = {"weight": Size([2, 3]), "bias": Size([2]), "length": Size([])}
# Some of all cells, in the ordinary suite.
SOME = {
    ("fedavg", "prior"): ("Normal(0, 1)", "HalfNormal(1)", "mixture()", "by_name missing"),
    ("ditto", "prior"): ("StudentT(3)", "Normal(0, 0.1)", "dist.StudentT", "fixed(Normal)"),
    ("fisher", "prior"): ("Normal(0, 0.1)", "Laplace(0, 1)", "learned()"),
    ("pvi", "prior"): ("Normal(0, 0.1)", "learned()"),
    ("fedem", "prior"): ("Dirichlet", "Normal(0, 1)"),
    ("metavd", "prior"): ("Laplace(0, 1)", "Cauchy(0, 1)"),
    ("fedavg", "guide"): ("low_rank", "AutoNormal", "dirichlet", "from_pyro"),
    ("fedrep", "guide"): ("copula", "mean_field"),
    ("pfedmb", "guide"): ("mean_field", "dirichlet"),
}
REFUSED = re.compile(r"[^\n]*\b(prior|guide)\b[^\n]*; (expected|use|add|pass)[^\n]+")


@pytest.mark.parametrize(
    ("method", "argument", "value"),
    [
        pytest.param(*cell, marks=() if cell[2] in SOME.get(cell[:2], ()) else pytest.mark.slow)
        for cell in table.CELLS
    ],
)
def test_it_works_or_is_refused_in_one_line(method: str, argument: str, value: str) -> None:
    kind, line = table.outcome(method, argument, value)
    assert kind in ("works", "refused"), line
    assert kind == "works" or REFUSED.fullmatch(line), line


def kind_of(method: str) -> str:
    """Return what a method's prior is of: "entries", "family", "normal" or "simplex"."""
    if method in ("fedem", "pfedmb"):
        return "simplex"
    if argument_types(table.BUILDS[method])["prior"] == priors.PriorFamily:
        return "family"
    normal = ("fedep", "fedgvi", "fedivon", "fedlap", "fisher", "fola", "ivonadmm")
    return "normal" if method in normal else "entries"


WORKS = {
    "entries": ("Normal(0, 1)", "Laplace(0, 1)", "StudentT(3)", "dist.Laplace", "mixture()"),
    "normal": ("Normal(0, 1)", "Normal(0, 0.1)", "dist.Normal", "fixed(Normal)"),
    "family": ("Normal(0, 1)", "Laplace(0, 1)", "StudentT(3)", "dist.Laplace", "mixture()"),
    "simplex": ("Dirichlet",),
}
BUILT_ALONE = [m for m, build in table.BUILDS.items() if "prior" in argument_types(build)]


@pytest.mark.slow
@pytest.mark.parametrize("method", BUILT_ALONE)
def test_what_makes_sense_works(method: str) -> None:
    works = [v for v in WORKS[kind_of(method)] if table.outcome(method, "prior", v)[0] == "works"]
    no_closed_form = {"StudentT(3)", "mixture()"} if method == "metavd" else set()
    sized = {"Dirichlet"} if kind_of(method) == "simplex" and method == "fedem" else set()
    assert {*WORKS[kind_of(method)]} - {*works} <= no_closed_form | sized


def after_one_round(method: str, prior: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of server and clients after one round."""
    several = {
        n: 3
        for n in ("epochs", "head_epochs", "own_epochs")
        if n in argument_types(table.BUILDS[method])
    }
    made = table.make(method, prior=prior, **several)
    state = next(federate(made, table.data(), 1, chunk_size=3))
    return {**state.server, **{f"client {n}": v for n, v in state.client_states.items()}}


@pytest.mark.parametrize(
    "method",
    [
        m if m in ("fedavg", "ditto", "pvi") else pytest.param(m, marks=pytest.mark.slow)
        for m in BUILT_ALONE
        if kind_of(m) != "simplex"
    ],
)
def test_the_prior_takes_effect(method: str) -> None:
    family = kind_of(method) == "family"
    one, other = (dist.Normal, dist.Laplace) if family else (dist.Normal(0.0, 1.0),) * 2
    other = other if family else dist.Normal(0.5, 0.1)
    first, again, changed = (after_one_round(method, p) for p in (one, one, other))
    toys.assert_same(again, first)
    assert any(not torch.equal(changed[n], v) for n, v in first.items())


@pytest.mark.parametrize("guide", [guides.delta, guides.mean_field])
def test_a_distribution_is_the_fixed_prior(guide: guides.Family) -> None:
    stated, fixed = (
        toys.last(table.make("fedavg", prior=prior, guide=guide), table.data(), 2)
        for prior in (dist.Normal(0.25, 0.5), priors.fixed(dist.Normal, 0.25, 0.5))
    )
    toys.assert_same(stated.server, fixed.server)


def test_the_posterior_of_a_linear_model_is_the_closed_form() -> None:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(30, 2, generator=rng, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0], dtype=torch.float64)
    y = y + torch.randn(30, generator=rng, dtype=torch.float64)
    whole = toys.blobs((12, 18))
    parts = torch.arange(12), torch.arange(12, 30)
    data = type(whole)(x, y, parts, parts)
    method = pvi.build(
        build("linear", (2,), 1),
        likelihood=likelihoods.normal(),
        prior=dist.Normal(0.5, 0.25),
        covariance="full",
        damping=0.5,
        epochs=1,
        lr=1.0,
    )
    *_, state = federate(method, data, 30)
    ones = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], 1)
    ones = ones[:, : state.server["shift"].shape[0]]
    precision = ones.T @ ones + torch.eye(ones.shape[1], dtype=torch.float64) / 0.25**2
    mean = torch.linalg.solve(precision, ones.T @ y + 0.5 / 0.25**2)
    row, column = torch.tril_indices(*precision.shape)
    torch.testing.assert_close(state.server["precision"], precision[row, column], rtol=1e-6, atol=0)
    torch.testing.assert_close(state.server["shift"], precision @ mean, rtol=1e-6, atol=1e-6)


# The conversion alone


@pytest.mark.parametrize(
    ("prior", "told"),
    [
        (3.0, "prior is 3.0; expected a distribution, a family"),
        (None, "prior is None; expected"),
        (
            dist.HalfNormal(1.0),
            "prior is HalfNormal.*support is .*any real number; expected .*Norm",
        ),
        (dist.Uniform(-1.0, 1.0), "support is Interval"),
        (dist.LogNormal(0.0, 1.0), "support is GreaterThan"),
        (dist.Poisson(1.0), "Poisson.*, which is discrete"),
        (dist.Normal(torch.zeros(7), 1.0), "prior is Normal.* for parameter 'weight' of shape"),
        (dist.StudentT, r"arguments are not \(loc, scale\) but \(df, loc, .*student_t"),
        (dist.Exponential, r"arguments are not \(loc, scale\)"),
        (torch.distributions.Normal(0.0, 1.0), "expected .*: pyro.distributions.Normal"),
        (lambda name, shape: 3.0, "returns 3.0"),
        (lambda name, shape, *rest: 3.0, "returns 3.0"),
        (lambda name, shape, *rest: dist.Normal(0.0, 1.0), r"event shape \(\) for parameter"),
        (priors.by_name({"bias": dist.Laplace}), "parameter weight has no prior"),
        (
            priors.by_name({"bias": dist.Normal(torch.zeros(4), 1.0), "*": priors.flat}),
            "for parameter 'bias' of shape",
        ),
    ],
)
def test_what_is_no_prior_is_refused(prior: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        as_prior(prior, SHAPES)


@pytest.mark.parametrize(
    ("family", "told"),
    [
        (dist.Normal(0.0, 2.0), r"a location and scale of its own; expected .*dist.Normal, "),
        (dist.Normal(1.0, 1.0), "a location and scale of its own"),
        (dist.HalfNormal(1.0), "no location and scale"),
        (dist.LogNormal, "support is GreaterThan"),
        (dist.StudentT, r"arguments are not \(loc, scale\)"),
        (priors.fixed(), "a complete prior, with a location and scale of its own"),
        (lambda loc, scale: loc, "returns"),
        (lambda loc, scale: dist.Normal(loc, scale).to_event(1), r"batch shape \(2,\)"),
        (lambda loc, scale: {}["a"], "fails at loc 0 and scale 1: KeyError"),
        ("normal", "prior is 'normal'"),
    ],
)
def test_what_is_no_family_is_refused(family: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        as_family(family)


def test_a_standard_distribution_is_its_family() -> None:
    assert as_family(dist.Laplace(0.0, 1.0)) is dist.Laplace
    loc, scale, x = torch.randn(3, 4, dtype=torch.float64)
    scale = scale.exp()
    found = as_family(dist.StudentT(3.0))(loc, scale).log_prob(x)
    assert torch.equal(found, dist.StudentT(3.0, loc, scale).log_prob(x))


def test_each_entry_gets_the_distribution_in_the_type_of_the_data() -> None:
    half = torch.tensor([0.5, 0.5])
    normals = dist.Normal(torch.zeros(2), torch.tensor([1.0, 0.25]))
    fn = dist.MixtureSameFamily(dist.Categorical(half), normals)
    for name, shape in SHAPES.items():
        prior = as_prior(fn, SHAPES)(name, shape, {}, {}, nobody())
        value = torch.randn(4, *shape, dtype=torch.float64)
        assert prior.event_shape == shape
        found = prior.log_prob(value)
        assert found.dtype == torch.float64
        expected = fn.log_prob(value).reshape(4, -1).sum(1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_family_has_location_0_and_scale_1() -> None:
    prior = as_prior(priors.student_t(4.0), SHAPES)("bias", Size([2]), {}, {}, nobody())
    x = torch.randn(2, dtype=torch.float64)
    torch.testing.assert_close(prior.log_prob(x), dist.StudentT(4.0).log_prob(x).sum())


def test_weights_on_a_simplex_have_a_dirichlet() -> None:
    shapes = {"alpha": Size([2, 3])}
    prior = as_prior(dist.Dirichlet(torch.ones(3)), shapes, constraints.simplex)
    assert prior("alpha", shapes["alpha"], {}, {}, nobody()).event_shape == (2, 3)
    for other in (dist.Normal(0.0, 1.0), dist.Beta(1.0, 1.0), priors.fixed()):
        with pytest.raises(ValueError, match=r"weights that sum to one; expected .*Dirichlet"):
            as_prior(other, shapes, constraints.simplex)
    with pytest.raises(ValueError, match="for parameter 'alpha'"):
        as_prior(dist.Dirichlet(torch.ones(4)), shapes, constraints.simplex)
    with pytest.raises(ValueError, match=r"expected dist.Dirichlet\(torch.ones\(3\)\)"):
        fedem.build(toys.net(), prior=dist.Dirichlet(torch.ones(5)))


def test_a_learned_prior_names_what_is_missing() -> None:
    method = fedavg.build(toys.net(), prior=learned_scales.learned())
    with pytest.raises(ValueError, match=r"prior of 'fc1.weight' is learned.*learning\(method"):
        next(federate(method, table.data(), 1))
    with pytest.raises(ValueError, match="a scale that the server learns, which this method can"):
        pvi.build(toys.net(), prior=learned_scales.learned())


def test_ones_own_model_takes_a_distribution() -> None:
    model = Supervised(toys.net(), likelihoods.categorical, dist.Laplace(0.0, 1.0))
    assert callable(model.prior)
    with pytest.raises(ValueError, match="support"):
        Supervised(toys.net(), likelihoods.categorical, dist.HalfCauchy(1.0))


UNFIT = {
    "masked": (dist.Normal(0.0, 1.0).mask(False), r"prior is masked; .*priors\.flat"),
    "point": (dist.Delta(torch.tensor(0.0)), "prior is a Delta, a point without a density"),
    "infinite": (dist.Normal(0.0, math.inf), "with a parameter that is not finite"),
}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("name", ["fedavg", "pvi", "virtual", "fedlap", "fedivon"])
def test_priors_without_a_proper_density_are_refused(name: str, case: str) -> None:
    prior, reason = UNFIT[case]
    with pytest.raises(ValueError, match=reason):
        table.BUILDS[name](toys.net(), prior=prior)
