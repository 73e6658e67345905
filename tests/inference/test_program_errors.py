"""Errors in programs that users write: one line with the site, the source line and the cause."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.inference.aggregation import Aggregator, uniform
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import sgd
from pyrofl.models import fedpop, priors, pvi
from pyrofl.nets import build
from pyrofl.tensors import Tensors

DATA = Federation.from_arrays(
    {"A": (torch.ones(5, 2), torch.arange(5.0)), "B": (torch.ones(3, 2), torch.arange(3.0))}
)
AXES = r".*\[clients, rows, ...\] in batch.rows\(\).*b\[..., 0\]"
Rows = Callable[[Tensor, Batch], object]


def observed(distribution: object, batch: Batch) -> None:
    pyro.sample("y", distribution, obs=batch.y)


PROGRAMS: dict[str, tuple[Rows, str]] = {
    "first axis": (lambda b, batch: observed(dist.Normal(b[0], 1.0), batch), "site 'y'.*" + AXES),
    "whole vector": (lambda b, batch: observed(dist.Normal(b, 1.0), batch), "site 'y'.*" + AXES),
    "matrix product": (
        lambda b, batch: observed(dist.Normal(batch.x @ b, 1.0), batch),
        r"RuntimeError: .* in .*batch.x @ b.*\(test_program_errors.py:\d+\)" + AXES,
    ),
    "entry": (lambda b, batch: observed(dist.Normal(b[..., 5], 1.0), batch), "IndexError.*" + AXES),
    "text": (lambda b, batch: observed(dist.Normal("a", 1.0), batch), "must be numbers or tensors"),
    "nothing": (lambda b, batch: observed(None, batch), "pyro.sample requires a distribution"),
    "negative rate": (
        lambda b, batch: observed(dist.Poisson(-b[..., 0].abs()), batch),
        "rate of the distribution of 'y' is -",
    ),
    "number observed": (
        lambda b, batch: pyro.sample("y", dist.Normal(b[..., 0], 1.0), obs=3.0),
        "obs of site 'y' is 3.0; expected a tensor",
    ),
    "two sites": (
        lambda b, batch: [observed(dist.Normal(b[..., 0], 1.0), batch) for _ in "ab"],
        "give every site its own name",
    ),
}


BRANCHES: dict[str, Callable[[Tensor, Batch], object]] = {
    "data of a client": lambda b, batch: batch.y.mean() > 1.5,
    "number of clients": lambda b, batch: len(batch) > 1,
    "value of a site, all positive": lambda b, batch: (b > 0).all(),
    "value of a site, any large": lambda b, batch: (b[..., 0] > 1.5).any(),
}


def program(rows: Rows) -> Callable[[Tensors, Tensors, Batch], None]:
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            with batch.rows():
                rows(b, batch)

    return model


def own_method(rows: Rows) -> Method:
    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            pyro.sample("b", dist.Normal(local["m"], 1.0).to_event(1))

    return Method(
        name="own",
        init=lambda generator, clients: {"m": torch.zeros(2)},
        model=program(rows),
        guide=guide,
        phases=(Phase((GradientStep("m", sgd(0.1), elbo()),), 1, 2),),
        init_client=lambda received, cohort, generator: received,
        upload=lambda received, local: local,
        aggregate=Aggregator({"*": uniform}),
    )


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", ["hierarchical", "own"])
def test_an_error_in_a_program_is_one_line_that_names_its_cause(name, kind):
    rows, expected = PROGRAMS[name]

    def fit() -> None:
        own = kind == "own"
        method = own_method(rows) if own else pvi.hierarchical(program(rows), DATA, shared="b")
        pyrofl.fit(method, DATA, 1, progress=False)

    with pytest.raises(ValueError, match=expected) as error:
        fit()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("condition", BRANCHES)
@pytest.mark.parametrize("build", [pyrofl.hierarchical, pvi.hierarchical])
def test_a_site_of_one_branch_alone_is_refused_with_a_remedy(condition, build):
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            more = pyro.sample("more", dist.Normal(0.0, 1.0)) if found(b, batch) else 0.0
            with batch.rows():
                observed(dist.Normal(b[..., 0] + more, 1.0), batch)

    found = BRANCHES[condition]
    with pytest.raises(ValueError, match=r"more.*in every run.*torch\.where") as error:
        pyrofl.fit(build(model, DATA, shared="b"), DATA, 1, progress=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("inside", [True, False])
def test_a_plate_in_the_place_of_the_draws_is_refused_with_a_remedy(inside):
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
            with pyro.plate("wards", 4, dim=-3):
                ward = pyro.sample("ward", dist.Normal(b, 1.0))
            with batch.rows():
                observed(dist.Normal(ward.sum(-3), 1.0), batch)

    def outside(received: Tensors, local: Tensors, batch: Batch) -> None:
        with pyro.plate("wards", 4, dim=-3):
            ward = pyro.sample("ward", dist.Normal(0.0, 1.0))
        with batch.clients(), batch.rows():
            observed(dist.Normal(ward.sum(-3), 1.0), batch)

    with pytest.raises(ValueError, match=r"collide at dim=-3.*inside batch.clients\(\).*dim=-1"):
        pvi.hierarchical(model if inside else outside, DATA, shared="*")


def test_a_prior_of_another_kind_is_refused_where_it_is_given():
    net = build("linear", (2,), 1)
    with pytest.raises(
        ValueError, match=r"prior is 3\.0; expected .*a function \(name, shape, rec"
    ):
        pvi.build(net, prior=3.0)
    with pytest.raises(ValueError, match=r"prior is a complete prior, .*; expected a family"):
        fedpop.build(net, prior=priors.fixed(dist.Normal, 0.0, 1.0))


def test_a_program_with_other_arguments_is_refused():
    with pytest.raises(ValueError, match=r"model is a function \(batch\); expected .* 3 arguments"):
        pvi.hierarchical(lambda batch: None, DATA, shared="b")


def test_an_unknown_argument_names_the_most_similar_one():
    with pytest.raises(TypeError, match=r"'leraning_rate'; did you mean lr\?"):
        pvi.build(build("linear", (2,), 1), leraning_rate=0.1)
    with pytest.raises(TypeError, match=r"'lr_haed'; did you mean lr_head\?"):
        fedpop.build(build("linear", (2,), 1), lr_haed=0.1)


def test_unknown_dimensions_name_the_sites_alone():
    method = own_method(lambda b, batch: observed(dist.Normal(b[..., 0], 1.0), batch))
    run = pyrofl.fit(method, DATA, 1, progress=False)
    with pytest.raises(ValueError, match=r"unknown site in dims 'zz'; expected one of b$"):
        run.to_arviz(dims={"zz": ("a",)})


def with_observation(observation: Callable[[Tensor, Tensor, Batch], object]) -> Callable[..., None]:
    """Return a hierarchical program with the given observation."""

    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
            normal, gamma = dist.Normal(mu, 1.0), dist.Gamma(2.0, 1.0)
            second = observation is second_is_gamma and bool((batch.ids == 1).any())
            u = pyro.sample("u", gamma if second else normal)
            with batch.rows():
                observation(mu, u, batch)

    return program


def second_is_gamma(mu: Tensor, u: Tensor, batch: Batch) -> None:
    observed(dist.Normal(u, 1.0), batch)


WEIGHTS = torch.ones(2, 1)
HIERARCHICAL: dict[str, tuple[Callable[[Tensor, Tensor, Batch], object], str]] = {
    "a NumPy array": (
        lambda mu, u, batch: pyro.sample("y", dist.Normal(u, 1.0), obs=batch.y.numpy()),
        "obs of site 'y' is a ndarray; expected a tensor, as batch.y is",
    ),
    "a number": (
        lambda mu, u, batch: pyro.sample("y", dist.Normal(u, 1.0), obs=0.5),
        "obs of site 'y' is 0.5; expected a tensor, as batch.y is",
    ),
    "two columns": (
        lambda mu, u, batch: pyro.sample(
            "y", dist.Normal(u, 1.0), obs=batch.y[..., None].expand(*batch.y.shape, 2)
        ),
        r"site 'y': its values have shape \[2, 5, 2\], and its Normal has shape .*2, 5\]",
    ),
    "an outside tensor of another type": (
        lambda mu, u, batch: observed(dist.Normal(u + (batch.x @ WEIGHTS)[..., 0], 1.0), batch),
        r"same dtype.* use them as TENSOR.to\(batch.x\)",
    ),
    "one number for all rows": (
        lambda mu, u, batch: pyro.sample("y", dist.Normal(u, 1.0), obs=torch.tensor(3.0)),
        "obs of site 'y' is one number, 3; expected one for each row, as batch.y has",
    ),
    "a standard deviation of 0": (
        lambda mu, u, batch: observed(dist.Normal(u, 0.0), batch),
        "scale of the distribution of 'y' is 0 at all draws of the prior",
    ),
    "a mean that is not a number": (
        lambda mu, u, batch: observed(dist.Normal(u * torch.nan, 1.0), batch),
        "loc of the distribution of 'y' is nan at all draws of the prior",
    ),
    "another distribution for a client": (
        second_is_gamma,
        "site 'u' is a Gamma for some clients, and normal for others",
    ),
}


@pytest.mark.parametrize("case", HIERARCHICAL)
def test_a_hierarchical_program_fails_in_one_line(case):
    observation, line = HIERARCHICAL[case]
    with pytest.raises(ValueError, match=line) as error:
        pyrofl.hierarchical(with_observation(observation), DATA, shared="mu")
    assert "\n" not in str(error.value)


PRIORS: dict[str, tuple[tuple[float, float], Callable[[Tensor], object], str]] = {
    "nan": ((torch.nan, 2.0), lambda mu: dist.Normal(mu, 1.0), "loc .*'mu' is nan"),
    "wide": ((0.0, torch.inf), lambda mu: dist.Normal(mu, 1.0), "scale .*'mu' is inf"),
    "point": ((0.0, 0.0), lambda mu: dist.Normal(mu, 1.0), "scale .*'mu' is 0"),
    "own point": ((0.0, 2.0), lambda mu: dist.Normal(mu, 0.0), "scale .*'u' is 0"),
    "negative": ((0.0, 2.0), lambda mu: dist.Normal(mu, -1.0), "scale .*'u' is -1"),
    "own nan": ((0.0, 2.0), lambda mu: dist.Normal(mu, mu * torch.nan), "scale .*'u'"),
    "one of two": (
        (0.0, 2.0),
        lambda mu: dist.Normal(mu[..., None], torch.tensor([1.0, 0.0])).to_event(1),
        "scale .*'u' is 0",
    ),
    "vector": (
        (0.0, 2.0),
        lambda mu: dist.Normal(mu, torch.ones(2)),
        r"'u' has batch shape .*to_event\(1\)",
    ),
}


@pytest.mark.parametrize("case", PRIORS)
@pytest.mark.parametrize("build", [pyrofl.hierarchical, pvi.hierarchical])
def test_a_prior_with_invalid_parameters_is_refused(build, case):
    of_mu, of_u, line = PRIORS[case]

    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(*of_mu))
            pyro.sample("u", of_u(mu))
            with batch.rows():
                observed(dist.Normal(mu, 1.0), batch)

    with pytest.raises(ValueError, match=line):
        build(program, DATA, shared="mu")
