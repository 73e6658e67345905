"""Guides: where they start, what their moments are, and ordinary Pyro guides for every client."""

from __future__ import annotations

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from hypothesis import given
from hypothesis import strategies as st
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import Size
from torch.nn.functional import softplus

from pyrofl import fit
from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import latent, traces
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.models import fedavg, guides, pfedvem
from pyrofl.models.guides.automatic import from_pyro
from pyrofl.tensors import Tensors, generator

SHAPES = {"w": Size([2, 3]), "b": Size([3]), "s": Size([])}


def center(*lead: int) -> Tensors:
    g = generator(4)
    return {
        n: torch.randn((*lead, *s), generator=g, dtype=torch.float64) for n, s in SHAPES.items()
    }


def real(received: Tensors, local: Tensors, batch: Batch) -> None:
    """A model of the sites above, all of them real numbers."""
    with batch.clients():
        for n, s in SHAPES.items():
            zero = torch.zeros(s, dtype=torch.float64)
            pyro.sample(n, dist.Normal(zero, 1.0).to_event(len(s)))


@given(st.floats(1e-6, 1e6))
def test_inverse_softplus_is_the_inverse(value):
    back = softplus(torch.tensor(guides.inverse_softplus(value), dtype=torch.float64))
    assert float(back) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_guide_needs_spread(scale):
    with pytest.raises(ValueError, match=f"init_scale is {scale}; expected a number above 0"):
        guides.mean_field(SHAPES, init_scale=scale)


@pytest.mark.parametrize("lead", [(), (4,)])
def test_mean_field_starts_at_its_center(lead):
    q = guides.mean_field(SHAPES, init_scale=0.3, loc="m", spread="r")
    start = q.start(center(*lead))
    assert start.keys() == {f"{r}/{n}" for r in "mr" for n in SHAPES}
    for n in SHAPES:
        assert torch.equal(start[f"m/{n}"], center(*lead)[n])
        torch.testing.assert_close(
            softplus(start[f"r/{n}"]), torch.full_like(start[f"r/{n}"], 0.3), rtol=1e-9, atol=0
        )


def test_moments_are_those_of_the_draws(blobs):
    q = guides.mean_field(SHAPES, init_scale=0.3)
    local = q.start(center(2))
    local = {n: v + (0.5 * torch.rand_like(v) if n[0] == "p" else 0) for n, v in local.items()}
    batch = blobs.batch(torch.arange(2))
    mean, variance = q.moments({}, local, batch)
    with ClientNoise([generator(1, c) for c in range(2)]):
        trace, _ = traces(real, q.program, {}, local, batch, 4000)
    for n in SHAPES:
        values = trace.nodes[n]["value"].squeeze(2)
        error = (variance[n] / 4000).sqrt()
        assert ((values.mean(0) - mean[n]).abs() < 4.5 * error).all()
        torch.testing.assert_close(values.var(0), variance[n], rtol=0.15, atol=0)


def test_delta_is_a_point(blobs):
    q = guides.delta(SHAPES, loc="m", init_scale=7.0)
    assert not q.random
    mean, variance = q.moments({}, q.start(center(3)), blobs.batch(torch.arange(3)))
    for n, v in center(3).items():
        assert torch.equal(mean[n], v)
        assert not variance[n].any()


# Ordinary Pyro guides.


@pytest.mark.parametrize("make", [AutoNormal, AutoDelta, partial(AutoNormal, init_scale=0.2)])
def test_an_automatic_guide_has_moments(blobs, make):
    q = from_pyro(make, blobs, model=real)
    local = toys.stacked(q.start({}), 3)
    assert all(len(v) == 3 for v in local.values())
    mean, variance = q.moments({}, local, blobs.batch(torch.arange(3)))
    assert {n: v.shape[1:] for n, v in mean.items()} == SHAPES
    for n in SHAPES:
        if make is AutoDelta:
            assert torch.equal(mean[n], local[f"auto/{n}_unconstrained"])
            assert not variance[n].any()
        else:
            assert torch.equal(mean[n], local[f"auto/locs.{n}_unconstrained"])
            scale = local[f"auto/scales.{n}_unconstrained"]
            assert variance[n].shape == scale.shape
            assert (variance[n] > 0).all()


def test_the_parameters_of_a_guide_start_as_it_says(blobs):
    q = from_pyro(partial(AutoNormal, init_scale=0.2), blobs, model=real)
    local = {n: v.expand((2, *v.shape)) for n, v in q.start({}).items()}
    _, variance = q.moments({}, local, blobs.batch(torch.arange(2)))
    for v in variance.values():
        torch.testing.assert_close(v, torch.full_like(v, 0.04), rtol=1e-5, atol=0)
    q = from_pyro(toys.by_hand, blobs, name="mine")
    assert q.names == "mine/*"
    start = q.start({})
    torch.testing.assert_close(start["mine/a"].exp(), torch.full((1,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(start["mine/sd"].exp(), torch.full((5,), 0.3, dtype=torch.float64))


@pytest.mark.parametrize("lead", [(), (4,)])
@pytest.mark.parametrize("make", [AutoNormal, AutoDelta])
def test_an_automatic_guide_starts_at_its_center(blobs, make, lead):
    q = from_pyro(make, blobs, model=real)
    start = q.start(center(*lead))
    assert {v.shape[: len(lead)] for v in start.values()} == {Size(lead)}
    local = start if lead else {n: v.expand(4, *v.shape) for n, v in start.items()}
    mean, _ = q.moments({}, local, blobs.batch(torch.arange(4)))
    toys.assert_same(mean, {n: v.expand_as(mean[n]) for n, v in center(*lead).items()})


def test_a_site_without_a_parameter_for_its_center_starts_at_the_guides_values(blobs):
    for q in (
        from_pyro(AutoNormal, blobs, model=toys.tempered),
        from_pyro(AutoMultivariateNormal, blobs, model=toys.tempered),
        from_pyro(toys.by_hand, blobs),
    ):
        assert not q.has_centers
        toys.assert_same(q.start({"rate": torch.ones(())}), q.start({}))
    start = q.start({"offset": torch.ones(toys.CLASSES).double()})  # of by_hand
    assert start["auto/m"].eq(1).all()
    with pytest.raises(ValueError, match="cannot start at given standard deviations"):
        q.start({}, {})


def test_a_tensor_that_a_program_reads_is_named(blobs):
    model = pfedvem.build(toys.net()).model
    with pytest.raises(ValueError, match=r"read the tensor 'tau'.*`local` of guides.from_pyro"):
        from_pyro(AutoNormal, blobs, model=model)


def normal_heads(received, local, batch):
    """Sample the head of toys.net() from normals, without help of the library."""
    with batch.clients():
        for n, shape in {"head.weight": (5, 6), "head.bias": (5,)}.items():
            mean = pyro.param(f"mean.{n}", torch.zeros(shape))
            sd = pyro.param(f"sd.{n}", torch.ones(shape), constraint=dist.constraints.positive)
            pyro.sample(n, dist.Normal(mean, sd).to_event(len(shape)))


@pytest.mark.parametrize("of_data", [False, True])
def test_a_hand_written_guide_is_a_guide_of_pfedvem(blobs, of_data):
    """The same distributions as log_mean_field give the same heads."""
    guide = from_pyro(normal_heads, blobs) if of_data else normal_heads
    own, named = (pfedvem.build(toys.net(), guide=g) for g in (guide, guides.log_mean_field))
    a, b = (toys.last(m, blobs, 2).server for m in (own, named))
    assert a.keys() == b.keys()
    for n, v in a.items():
        torch.testing.assert_close(v, b[n], rtol=1e-9, atol=1e-9)
    assert own.views.keys() == named.views.keys()


def test_an_autoguide_without_a_family_is_a_guide(blobs):
    method = fedavg.build(
        toys.net(), prior=dist.Normal(0.0, 1.0), guide=AutoLowRankMultivariateNormal, epochs=1
    )
    state = toys.last(method, blobs, 1, chunk_size=1)
    assert {n.partition("/")[0] for n in state.server} == {"auto"}
    assert all(v.isfinite().all() for v in state.server.values())
    with pytest.raises(ValueError, match=r"couples \d+ clients; run with chunk_size=1"):
        toys.last(method, blobs, 1)


def test_a_transformed_site_has_no_variance_in_closed_form(blobs):
    q = from_pyro(AutoNormal, blobs, model=toys.tempered)
    with pytest.raises(ValueError, match="site 'rate' is transformed; its variance has no closed"):
        q.moments({}, toys.stacked(q.start({}), 2), blobs.batch(torch.arange(2)))


COUPLED = [
    AutoMultivariateNormal,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoIAFNormal,
]


@pytest.mark.parametrize("make", COUPLED)
def test_a_joint_guide_runs_for_one_client_and_has_no_moments(blobs, make):
    q = from_pyro(make, blobs, model=real)
    local = toys.stacked(q.start({}), 1)
    with ClientNoise([generator(1)]):
        trace, _ = traces(real, q.program, {}, local, blobs.batch(torch.tensor([4])))
    found = {n: site["value"].shape for n, site in latent(trace) if n in SHAPES}
    assert found == {n: (1, 1, *s) for n, s in SHAPES.items()}
    with pytest.raises(ValueError, match=r"latent' joins others|latent': Transf.* has no mean"):
        q.moments({}, local, blobs.batch(torch.tensor([4])))
    with pytest.raises(
        ValueError, match=f"{make.__name__} couples 2 clients; run with chunk_size=1"
    ):
        q.program({}, toys.stacked(q.start({}), 2), blobs.batch(torch.arange(2)))


def test_neither_store_nor_random_state_is_touched_or_read(blobs):
    pyro.get_param_store().clear()
    pyro.param("a", torch.tensor(77.0))
    starts = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            for guide, options in (
                (toys.by_hand, {}),
                (AutoNormal, {"model": real}),
                (AutoMultivariateNormal, {"model": toys.tempered}),
            ):
                starts.append(from_pyro(guide, blobs, **options).start({}))
            assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(starts[:3], starts[3:], strict=True):
        toys.assert_same(a, b)
    assert pyro.get_param_store().keys() == {"a"}
    assert pyro.param("a") == 77
    pyro.get_param_store().clear()


@pytest.mark.parametrize(
    ("auto", "family"),
    [
        (AutoNormal, guides.mean_field),
        (AutoDelta, guides.delta),
        (AutoMultivariateNormal, guides.full_covariance),
    ],
)
@pytest.mark.parametrize("method", [pfedvem, fedavg])
def test_an_autoguide_class_stands_for_the_family_of_the_same_distributions(method, auto, family):
    states = [toys.last(method.build(toys.net(), guide=g), toys.blobs(), 2) for g in (auto, family)]
    assert states[0].server.keys() == states[1].server.keys()
    assert all(torch.equal(v, states[1].server[n]) for n, v in states[0].server.items())


def test_pfedvem_needs_variances_in_closed_form(blobs):
    method = pfedvem.build(toys.net(), guide=AutoIAFNormal)
    assert "global" not in method.views
    with pytest.raises(ValueError, match=r"Transf.* has no mean|no closed form"):
        toys.last(method, blobs, 1, chunk_size=1)


def test_moments_that_a_flow_of_pyro_lacks_are_said_in_one_line():
    """PFedVEM's confidence needs the variance of the head."""
    method = pfedvem.build(toys.net("mlp:2"), guide=AutoIAFNormal)
    with pytest.raises(ValueError, match=r"^the guide's site [^\n]* guides.flow\(\)[^\n]*$"):
        fit(method, toys.blobs((3, 8)), 1, chunk_size=1, progress=False)
