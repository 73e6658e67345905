"""A small ragged federation, guides of every kind for it, and ways to compare runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from checks import rounding
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.poutine.messenger import Messenger
from torch import Generator, Size, Tensor
from torch.distributions import transform_to
from torch.nn.functional import softplus

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.inference.definition.averages import average
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import Optim, sgd
from pyrofl.inference.definition.programs import Program, Supervised
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.training.noise import is_unset_latent
from pyrofl.models import guides
from pyrofl.models.guides import correlated
from pyrofl.models.guides.automatic import from_pyro
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import fixed
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors, spread_out, under

SIZES = (3, 40, 7, 12, 25, 16, 5, 33, 9, 20, 4, 28)
CLASSES, FEATURES = 5, 8
HEAD, BASE = 6 * CLASSES + CLASSES, FEATURES * 6 + 6  # scalars of the default network
ALL = BASE + HEAD
BASE_AXES = {"fc1.weight": ("fc1_out", "fc1_in"), "fc1.bias": ("fc1_out",)}
HEAD_AXES = {"head.weight": ("head_out", "head_in"), "head.bias": ("head_out",)}
AXES = BASE_AXES | HEAD_AXES  # of its parameters, as ArviZ has them
POSITIVE = transform_to(dist.constraints.positive)


def blobs(
    sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float64, held_out: int = 0
) -> Federation:
    """Return clients of these sizes, with four test rows each, from five normal classes."""
    rng = np.random.default_rng(7)
    rows = sum(sizes) + 4 * len(sizes)
    y = rng.integers(0, CLASSES, rows)
    x = 2 * rng.standard_normal((CLASSES, FEATURES))[y] + rng.standard_normal((rows, FEATURES))
    parts = torch.arange(rows).split([*sizes, *(4 for _ in sizes)])
    return Federation(
        torch.from_numpy(x).to(dtype),
        torch.from_numpy(y),
        parts[: len(sizes)],
        parts[len(sizes) :],
        classes=tuple("abcde"),
        held_out=held_out,
    )


def crossed(clients: int = 6) -> Federation:
    """Return clients who agree on x but not on its label: odd ones have labels of their own."""
    data = blobs((20,) * clients)
    y = data.y.clone()
    for rows in data.train[1::2] + data.test[1::2]:
        y[rows] = (y[rows] + 2) % CLASSES
    return replace(data, y=y)


def net(spec: str = "mlp:6") -> Network:
    return build(spec, (FEATURES,), CLASSES)


def who(data: Federation, *ids: int) -> Cohort:
    return data.cohort(torch.tensor(ids))


def last(method: Method, data: Federation, rounds: int = 3, **options: object) -> RoundState:
    """Return the state after some rounds."""
    return list(federate(method, data, rounds, **options))[-1]  # type: ignore[arg-type]


def assert_same(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    rtol: float = 0.0,
    atol: float = 0.0,
    terms: int = 0,
) -> None:
    """Compare dicts of tensors, by default to the last bit; for `terms` see `checks.rounding`."""
    assert a.keys() == b.keys()
    for n in a:
        torch.testing.assert_close(
            a[n],
            b[n],
            rtol=rtol,
            atol=atol + rounding(b[n], terms),
            msg=lambda m, n=n: f"{n}: {m}",
            equal_nan=True,
        )


def assert_same_round(a: RoundState, b: RoundState, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare all that two rounds hold."""
    for part in ("server", "client_states", "message", "loss"):
        assert_same(getattr(a, part), getattr(b, part), rtol, atol)
    assert_same({"ids": a.reporters.ids, "seen": a.seen}, {"ids": b.reporters.ids, "seen": b.seen})
    assert torch.equal(a.trained, b.trained)
    assert torch.equal(a.bytes_down, b.bytes_down)
    assert torch.equal(a.bytes_up, b.bytes_up)
    assert (a.number, a.rejected) == (b.number, b.rejected)


class SigmaPoints(Messenger):
    """Put the 2d draws of a normal [2d, C, 1, *p] at mean +- sqrt(d) sd along every axis.

    They match its mean and variance, so that the average of a quadratic is its expectation.
    """

    def _pyro_sample(self, msg: Any) -> None:
        if is_unset_latent(msg):
            event = msg["fn"].event_shape
            axes = torch.eye(event.numel(), dtype=torch.float64) * event.numel() ** 0.5
            points = torch.cat([axes, -axes]).view(-1, 1, 1, *event)
            msg["value"] = msg["fn"].mean + points * msg["fn"].variance.sqrt()
            msg["done"] = True


# A model with a positive, a bounded and a real site, none of them a network's.


def tempered(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Classify by distances to fixed centers, with a rate, a mixing share and offsets."""
    centers = torch.eye(FEATURES, CLASSES, dtype=batch.x.dtype)
    with batch.clients():
        one = torch.ones((), dtype=batch.x.dtype)
        rate = pyro.sample("rate", dist.Gamma(2.0 * one, 3.0 * one))
        share = pyro.sample("share", dist.Beta(2.0 * one, 3.0 * one))
        offset = pyro.sample("offset", dist.Normal(0.0 * one, 1.0).expand([CLASSES]).to_event(1))
        with batch.rows():
            logits = rate[..., None] * (batch.x @ centers) + offset
            logits = (1 - share[..., None]) * logits
            pyro.sample("y", dist.Categorical(logits=logits), obs=batch.y)


def stochastic(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Guess `tempered` by a gamma, a beta (implicit reparametrization) and a normal."""
    with batch.clients():
        pyro.sample("rate", dist.Gamma(softplus(local["q/a"]) + 0.5, softplus(local["q/b"])))
        pyro.sample("share", dist.Beta(softplus(local["q/a"]) + 0.5, softplus(local["q/c"]) + 0.5))
        sd = softplus(local["q/sd"])
        pyro.sample("offset", dist.Normal(local["q/m"], sd).to_event(1))


def switched(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Choose between two sets of class offsets by a discrete latent site."""
    with batch.clients():
        one = torch.ones((), dtype=batch.x.dtype)
        on = pyro.sample("on", dist.Bernoulli(0.3 * one))
        side = pyro.sample("side", dist.Categorical(probs=one.new_tensor([0.2, 0.3, 0.5])))
        offset = pyro.sample("offset", dist.Normal(0.0 * one, 1.0).expand([CLASSES]).to_event(1))
        with batch.rows():
            logits = offset * (1 + on + side)[..., None] + batch.x[..., :CLASSES]
            pyro.sample("y", dist.Categorical(logits=logits), obs=batch.y)


def switching(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Guess `switched`; its discrete sites need a score function."""
    with batch.clients():
        pyro.sample("on", dist.Bernoulli(logits=local["q/a"]))
        pyro.sample("side", dist.Categorical(logits=local["q/side"]))
        pyro.sample("offset", dist.Normal(local["q/m"], softplus(local["q/sd"])).to_event(1))


def by_hand(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Guess `tempered` as an ordinary Pyro program, parameters in pyro.param statements."""
    one = torch.ones(1, dtype=batch.x.dtype)
    concentration = pyro.param("a", 2.0 * one, constraint=dist.constraints.positive)
    mean = pyro.param("m", one.new_zeros(CLASSES))
    sd = pyro.param("sd", one.new_full((CLASSES,), 0.3), constraint=dist.constraints.positive)
    with batch.clients():
        pyro.sample("rate", dist.Gamma(concentration.squeeze(-1), 2.0 * one))
        pyro.sample("share", dist.Beta(concentration.squeeze(-1), 1.5 * one))
        pyro.sample("offset", dist.Normal(mean, sd).to_event(1))


START = {"a": (), "b": (), "c": (), "m": (CLASSES,), "sd": (CLASSES,), "side": (3,)}


def own_parameters(generator: Generator, clients: int) -> Tensors:
    """Draw parameters for `stochastic` and `switching`, in float64."""
    return {
        f"q/{n}": 0.5 * torch.randn(clients, *s, generator=generator, dtype=torch.float64)
        for n, s in START.items()
    }


Family = Callable[[Federation], tuple[Program, guides.Guide]]


def _networks(guide: guides.Family) -> Family:
    def make(data: Federation) -> tuple[Program, guides.Guide]:
        model = Supervised(net(), categorical, fixed(dist.Normal, 0.1, 0.7))
        return model, guide(net().shapes, init_scale=0.1)

    return make


def written(model: Program, program: Program) -> Family:
    def make(data: Federation) -> tuple[Program, guides.Guide]:
        def start(center: Tensors) -> Tensors:
            return {n: v[0] for n, v in own_parameters(torch.Generator().manual_seed(1), 1).items()}

        def moments(*_: object) -> tuple[Tensors, Tensors]:
            raise ValueError("not requested")

        return model, guides.Guide(program, start, moments, "q/*")

    return make


FAMILIES: dict[str, Family] = {
    "delta": _networks(guides.delta),
    "mean_field": _networks(guides.mean_field),
    "full covariance": _networks(correlated.full_covariance),
    "low rank": _networks(correlated.low_rank(2)),
    "copula": _networks(correlated.copula),
    "flow": _networks(correlated.flow(2, 4)),
    "AutoNormal": lambda data: (tempered, from_pyro(AutoNormal, data, model=tempered)),
    "AutoDelta": lambda data: (tempered, from_pyro(AutoDelta, data, model=tempered)),
    "pyro.param": lambda data: (tempered, from_pyro(by_hand, data)),
    "gamma and beta": written(tempered, stochastic),
    "discrete": written(switched, switching),
}
"""name -> (data -> model, guide): one of every kind that trains side by side."""


def trained(
    family: Family,
    data: Federation,
    *,
    optim: Optim | None = None,
    draws: int | None = 2,
    epochs: int | Callable[[Tensor], Tensor] = 2,
    batch: int | None = 6,
) -> Method:
    """Return a method that averages the parameters of a guide, with private velocity to keep."""
    model, guide = family(data)
    shapes: dict[str, Size] = net().shapes

    def init(generator: Generator, clients: int) -> Tensors:
        return guide.start(net().init(generator) if "mu/*" in guide.names else {})

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        return under("mine", received)

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        return average(message, cohort.size)

    def keep(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return under("mine", {n: local[n] for n in received})

    step = GradientStep(guide.names, optim or sgd(0.02, 0.9), elbo(draws, mean=True))
    phases = (Phase((step,), epochs, batch), Phase((keep,)))
    assert shapes
    return Method(init, model, guide, phases, aggregate, init_client=init_client)


def poisoned(method: Method, *ids: int) -> Method:
    """Return the method with a last move that turns some clients' state NaN."""

    def poison(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        bad = torch.isin(batch.ids, torch.tensor(ids))
        return {
            n: torch.where(bad.reshape(-1, *(1 for _ in v.shape[1:])), torch.nan, v)
            for n, v in local.items()
            if v.is_floating_point()
        }

    return replace(method, phases=(*method.phases, Phase((poison,))))


def stacked(tensors: Tensors, clients: int, seed: int = 0) -> Tensors:
    """Give every client its own noisy copy of tensors [*p]: [C, *p] leaves in float64."""
    g = torch.Generator().manual_seed(seed)
    return {
        n: v.to(torch.float64) + 0.1 * torch.randn(v.shape, generator=g, dtype=torch.float64)
        for n, v in spread_out(tensors, clients).items()
    }


def half_square(outputs: Tensor, x: Tensor) -> dist.TorchDistribution:
    """Measure with noise of standard deviation one."""
    return dist.Normal(outputs.squeeze(-1), 1.0)
