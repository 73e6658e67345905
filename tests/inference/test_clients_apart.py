"""Programs that mix clients, read padding, cut gradients or draw by themselves: `check` refuses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Generator, Tensor
from torch.nn.functional import softplus

from pyrofl.data import Batch, Federation
from pyrofl.inference.aggregation import Aggregator, by_size
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import adam, sgd
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.fit import fit
from pyrofl.inference.validation.validate import validate_method
from pyrofl.models import fedavg, likelihoods, pvi
from pyrofl.nets import Network
from pyrofl.tensors import Tensors

FULL, MINI = None, 2
MIXES = "depends on the other clients of the batch"
PADDING = "depends on padding"
ROWS = "depends on other rows"
OTHER = "gives other numbers each time"


def numbers(sizes: tuple[int, ...] = (20, 7, 11), dtype: torch.dtype = torch.float64) -> Federation:
    """Return clients whose x and y are drawn from normal distributions."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.arange(sum(sizes)).split(list(sizes))
    x = torch.randn(sum(sizes), 2, generator=rng, dtype=torch.float64)
    y = 1 + x[:, 0] + torch.randn(sum(sizes), generator=rng, dtype=torch.float64)
    return Federation(x.to(dtype), y.to(dtype), rows, rows)


def model_of(
    mean: Callable[[Tensor, Batch], Tensor] = lambda u, batch: u,
    extra: Callable[[Tensor, Batch], object] = lambda u, batch: None,
    observe: bool = True,
) -> Program:
    """Return a model of one effect for each client; its rows are normal around `mean`."""

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            u = pyro.sample("u", dist.Normal(0.0, 10.0))
            extra(u, batch)
            with batch.rows():
                center = mean(u, batch)
                if observe:
                    pyro.sample("y", dist.Normal(center, 1.0), obs=batch.y)

    return model


def guide_of(
    change: Callable[[Tensor], Tensor] = lambda value: value, scale: bool = False
) -> Program:
    """Return a normal guide; `change` is made to its mean, or to its scale as well."""

    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        spread = softplus(local["q/pi"])
        with batch.clients():
            spread = change(spread) if scale else spread
            pyro.sample("u", dist.Normal(change(local["q/mu"]), spread))

    return guide


def init(generator: Generator, clients: int) -> Tensors:
    zero = torch.zeros((), dtype=torch.float64)
    return {"q/mu": zero, "q/pi": zero}


def method(
    model: Program | None = None,
    guide: Program | None = None,
    batch: int | None = MINI,
    updates: tuple[object, ...] = (),
    **changes: object,
) -> Method:
    """Return a method that trains the guide and makes some moves of its own."""
    step = GradientStep("q/*", sgd(0.01), elbo(4))
    phases = (Phase((step,), 2, batch), *((Phase(updates, 1, batch),) if updates else ()))
    made = Method(
        init, model or model_of(), guide or guide_of(), phases, Aggregator({"*": by_size})
    )
    return replace(made, **changes)


def with_factor(u: Tensor, batch: Batch) -> None:
    pyro.factor("cost", -u.square().sum())


def twice(u: Tensor, batch: Batch) -> None:
    with batch.rows():
        pyro.sample("again", dist.Normal(u, 2.0), obs=batch.y)


def as_a_cost(u: Tensor, batch: Batch) -> None:
    with batch.rows():
        pyro.factor("again", dist.Normal(u, 1.0).log_prob(batch.y))


def shared_out(u: Tensor, batch: Batch) -> None:
    pyro.deterministic("share", u.softmax(-2), event_dim=0)


MODELS = {
    "centered over clients": (model_of(lambda u, b: u - u.mean(-2, keepdim=True)), MIXES),
    "softmax over clients": (model_of(lambda u, b: u.softmax(-2)), MIXES),
    "mean of everything": (model_of(lambda u, b: u - u.mean()), MIXES),
    "the first client as a reference": (model_of(lambda u, b: u - u[..., :1, :]), MIXES),
    "the last client as a reference": (model_of(lambda u, b: u - u[..., -1:, :]), MIXES),
    "a scalar factor": (model_of(extra=with_factor), MIXES),
    "number of clients": (model_of(lambda u, b: u * len(b)), MIXES),
    "a deterministic": (model_of(extra=shared_out), MIXES),
    "number of columns": (model_of(lambda u, b: u * b.y.shape[-1]), ROWS),
    "rows of the minibatch": (model_of(lambda u, b: u * b.mask.sum(-1, keepdim=True)), ROWS),
    "the first response": (model_of(lambda u, b: u + b.y[..., :1]), ROWS),
    "nothing observed": (model_of(observe=False), "observes nothing; pass obs=batch.y"),
    "y observed twice": (model_of(extra=twice), "'again' and 'y' both observe the same"),
    "y observed and a cost": (model_of(extra=as_a_cost), "'again' and 'y' both observe the same"),
    "torch's generator": (
        model_of(lambda u, b: u + torch.randn(b.y.shape)),
        "the model draws from the global generator of torch",
    ),
    "NumPy's generator": (
        model_of(lambda u, b: u + np.random.normal()),  # noqa: NPY002
        "the model draws from the global generator of NumPy",
    ),
    "Python's generator": (
        model_of(lambda u, b: u + random.random()),
        "the model draws from the global generator of Python",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_wrong_model_is_refused(kind):
    model, told = MODELS[kind]
    with pytest.raises(ValueError, match=told) as caught:
        validate_method(method(model), numbers())
    assert "\n" not in str(caught.value)
    assert re.search("; (expected|draw|pass|remove|return|use) ", str(caught.value))


def unstable(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    """Depend on the other clients where clients have few rows, as rounding errors may."""
    few = batch.mask.sum(-1) <= 3
    return {"q/mu": local["q/mu"] + few * len(batch)}


def test_differences_of_few_rows_are_compared_with_those_of_all_rows():
    made = method(batch=FULL, updates=(unstable,))
    validate_method(made, numbers())
    validate_method(made, numbers((300, 250)))
    with pytest.raises(ValueError, match=MIXES):
        validate_method(made, numbers((3, 3, 2)))


"""The same, where draws of the global generators are put back behind the program."""


def forked(u: Tensor, batch: Batch) -> Tensor:
    with torch.random.fork_rng():
        return u + torch.randn(batch.y.shape)


SOURCE = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("mean", "told"),
    [(forked, OTHER), (lambda u, batch: u + SOURCE.normal(), OTHER)],
)
def test_numbers_that_no_seed_of_the_run_fixes_are_refused(mean, told):
    with pytest.raises(ValueError, match=told):
        validate_method(method(model_of(mean)), numbers())


def test_the_global_generators_stay_as_they_were():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    for kind in ("torch's generator", "NumPy's generator", "Python's generator"):
        with pytest.raises(ValueError, match="global generator"):
            validate_method(method(MODELS[kind][0]), numbers())
    validate_method(method(), numbers())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert random.getstate() == before[2]


def without_gradient(value: Tensor) -> Tensor:
    with torch.no_grad():
        return value * 1.0


def through_numpy(value: Tensor) -> Tensor:
    return torch.from_numpy(value.detach().numpy().copy())


def as_a_number(value: Tensor) -> Tensor:
    return torch.full_like(value, value[0, 0].item())


def filled(value: Tensor) -> Tensor:
    value = value.clone()
    value[...] = 0.5
    return value


CUTS = {
    "detach": lambda value: value.detach(),
    "no_grad": without_gradient,
    "NumPy": through_numpy,
    "item": as_a_number,
}


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("kind", CUTS)
def test_a_guide_without_gradients_is_refused(kind, scale):
    """The posterior of what stays without a gradient would be where it began."""
    with pytest.raises(ValueError, match=r"q/mu|has no gradient|client"):
        validate_method(method(guide=guide_of(CUTS[kind], scale)), numbers())


@pytest.mark.parametrize("kind", ["detach", "no_grad", "NumPy"])
def test_a_model_that_cuts_what_rows_say_of_a_site_is_refused(kind):
    """The posterior would be the prior."""
    model = model_of(lambda u, batch: CUTS[kind](u))
    with pytest.raises(ValueError, match=r"no gradient .* 'u'"):
        validate_method(method(model), numbers())


def clamped(u: Tensor, batch: Batch) -> Tensor:
    u.data.mul_(2.0)
    return u


def added(received: Tensors, local: Tensors, batch: Batch) -> None:
    local["q/mu"].data.add_(0.1)
    guide_of()(received, local, batch)


@pytest.mark.parametrize(
    "wrong", [method(model_of(clamped)), method(guide=added)], ids=["site", "local"]
)
def test_writing_behind_the_back_of_gradients_is_refused(wrong):
    with pytest.raises(ValueError, match=r"writes into .* in place; (compute|return) "):
        validate_method(wrong, numbers())


def average_of_clients(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    return {"q/mu": local["q/mu"].mean(0, keepdim=True).expand(len(batch))}


def mean_with_padding(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    return {"q/mu": batch.y.mean(1)}


def masked_mean(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    return {"q/mu": (batch.counts * batch.y).sum(1) / batch.counts.sum(1)}


def noisy(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    return {"q/mu": local["q/mu"] + torch.randn(len(batch))}


def written(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    return {"q/mu": local["q/mu"].data.add_(1.0)}


@pytest.mark.parametrize("batch", [FULL, MINI])
@pytest.mark.parametrize(
    ("move", "told"),
    [
        (average_of_clients, rf"average_of_clients .*'q/mu', which {MIXES}"),
        (mean_with_padding, rf"mean_with_padding .*'q/mu', which {PADDING}"),
        (noisy, "noisy draws from the global generator of torch"),
        (written, "written writes into 'q/mu' in place; (return|expected)"),
    ],
)
def test_a_wrong_closed_form_is_refused(move, told, batch):
    with pytest.raises(ValueError, match=told):
        validate_method(method(updates=(move,), batch=batch), numbers())


@pytest.mark.parametrize("batch", [FULL, MINI])
def test_a_right_closed_form_passes(batch):
    validate_method(method(updates=(masked_mean,), batch=batch), numbers())


def own_loss(cost: Callable[[Tensor, Batch], Tensor]) -> Method:
    """Return a method whose step has a loss of its own, of the guide's mean [C, 1]."""

    def loss(model: Program, guide: Program, r: Tensors, local: Tensors, batch: Batch) -> Tensor:
        prior = 0.01 * (local["q/mu"].square() + local["q/pi"].square())
        return prior + cost(local["q/mu"][:, None], batch)

    return method(phases=(Phase((GradientStep("q/*", sgd(0.01), loss),), 2),))


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        (lambda mu, b: (mu - b.y).square().sum(1), PADDING),
        (lambda mu, b: (b.counts * (mu - mu.mean() - b.y).square()).sum(1), MIXES),
        (lambda mu, b: (b.counts * (mu - b.y).square()).sum().expand(len(b)), MIXES),
    ],
)
def test_a_wrong_loss_is_refused(cost, told):
    with pytest.raises(ValueError, match=told):
        validate_method(own_loss(cost), numbers())
    validate_method(own_loss(lambda mu, b: (b.counts * (mu - b.y).square()).sum(1)), numbers())


def sent(mix: Callable[[Tensor], Tensor]) -> Callable[[Tensors, Tensors], Tensors]:
    return lambda received, local: {n: mix(local[n]) for n in received}


@pytest.mark.parametrize(
    ("upload", "told"),
    [
        (
            sent(lambda v: v.mean(0, keepdim=True).expand_as(v)),
            f"upload gives a client 'q/mu', which {MIXES}",
        ),
        (
            sent(lambda v: v.mean(0)),
            r"upload sends 'q/mu' of shape \[\] for 2 clients; expected \[2",
        ),
        (sent(lambda v: v + torch.randn(len(v))), "upload draws from the global generator of to"),
    ],
)
def test_a_wrong_upload_is_refused(upload, told):
    with pytest.raises(ValueError, match=told):
        validate_method(method(upload=upload), numbers())


def test_wrong_statistics_are_refused():
    wrong = method(
        metadata=Metadata(statistics=lambda r, local, b: {"rank": local["q/mu"].softmax(0)})
    )
    with pytest.raises(ValueError, match=f"statistics .*'rank'.* {MIXES}"):
        validate_method(wrong, numbers())
    wrong = method(metadata=Metadata(statistics=lambda r, local, b: {"mean": b.y.mean(1)}))
    with pytest.raises(ValueError, match=f"statistics .*'mean'.* {PADDING}"):
        validate_method(wrong, numbers())


def test_a_view_that_mixes_clients_is_refused():
    def mean(received: Tensors, local: Tensors) -> Tensors:
        return local | {"q/mu": local["q/mu"].mean(0, keepdim=True).expand_as(local["q/mu"])}

    with pytest.raises(ValueError, match=f"view 'personal' gives a client 'q/mu', which {MIXES}"):
        validate_method(method(views={"personal": mean}), numbers())


def test_weights_with_an_axis_too_many_are_refused():
    wrong = method(aggregate=Aggregator({"*": lambda message, cohort: cohort.size[:, None]}))
    with pytest.raises(ValueError, match=r"weight .*\[2, 1\]; expected \[2\]"):
        validate_method(wrong, numbers())


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "poutine.scale": lambda: poutine.scale(scale=0.1),
    "poutine.mask": lambda: poutine.mask(mask=False),
    "plate": lambda: pyro.plate("all", 3, dim=-3),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("kind", AROUND)
def test_what_is_around_a_fit_is_refused(kind):
    with AROUND[kind](), pytest.raises(ValueError, match=f"inside .*{kind}.*; call fit outside"):
        fit(method(), numbers(), 1, progress=False, check=False)


def partial_likelihood(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let x be a covariate and whether the event was seen, y the time; strata are clients."""
    seen = (batch.x[..., 1] > 0) & batch.mask
    at_risk = batch.mask[:, None, :] & (batch.y[:, None, :] >= batch.y[:, :, None])
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        by_x = b * batch.x[..., 0]
        all_at_risk = by_x[..., None, :].masked_fill(~at_risk, -torch.inf).logsumexp(-1)
        cost = torch.where(seen, by_x - all_at_risk, 0.0).sum(-1, keepdim=True)
        pyro.factor("events", cost)


def test_a_cox_model_stratified_by_client_needs_all_rows():
    data = numbers((12, 9, 7))
    validate_method(pvi.hierarchical(partial_likelihood, data, shared="b"), data)
    with pytest.raises(ValueError, match=r"'events' .*depends on other rows.*batch=None"):
        validate_method(pvi.hierarchical(partial_likelihood, data, shared="b", batch=4), data)


def unmasked(received: Tensors, local: Tensors, batch: Batch) -> None:
    partial_likelihood(received, local, replace(batch, mask=torch.ones_like(batch.mask)))


def test_a_cox_model_that_counts_padding_is_refused():
    data = numbers((12, 9, 7))
    with pytest.raises(ValueError, match=r"'events' .* or on padding; use"):
        validate_method(pvi.hierarchical(unmasked, data, shared="b"), data)


def test_single_precision_finds_the_same():
    for kind in ("centered over clients", "a scalar factor", "the first response"):
        model, told = MODELS[kind]
        with pytest.raises(ValueError, match=told):
            validate_method(method(model), numbers(dtype=torch.float32))
    validate_method(method(), numbers(dtype=torch.float32))
    with pytest.raises(ValueError, match=MIXES):
        validate_method(method(updates=(average_of_clients,)), numbers(dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_adam_are_no_excuse(dtype):
    """Rounding errors are told from real differences by steps without Adam's division."""

    def by_adam(**parts: object) -> Method:
        made = method(**parts)
        step = replace(made.phases[0].updates[0], optim=adam(0.01))
        return replace(made, phases=(replace(made.phases[0], updates=(step,)), *made.phases[1:]))

    for kind in ("centered over clients", "the first response"):
        model, told = MODELS[kind]
        with pytest.raises(ValueError, match=told):
            validate_method(by_adam(model=model), numbers(dtype=dtype))
    with pytest.raises(ValueError, match=MIXES):
        validate_method(by_adam(updates=(average_of_clients,)), numbers(dtype=dtype))
    validate_method(by_adam(), numbers(dtype=dtype))


def test_one_client_may_do_what_it_likes():
    data = numbers((20,))
    validate_method(
        method(model_of(lambda u, b: u - 0.5 * u.mean(-2, keepdim=True)), batch=FULL), data
    )


def new_row(u: Tensor, batch: Batch) -> None:
    pyro.sample("new", dist.Normal(u, 1.0))


def steps(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let each of twelve rows be a step of a random walk."""
    with batch.clients():
        sd = pyro.sample("sd", dist.HalfNormal(1.0))
        step = pyro.sample("step", dist.Normal(0.0, 1.0).expand([12]).to_event(1))
        with batch.rows():
            walk = (sd[..., None] * step).cumsum(-1).squeeze(-2)
            pyro.sample("y", dist.Normal(walk, 1.0), obs=batch.y)


def lagged(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let rows depend on the row before."""
    with batch.clients():
        phi = pyro.sample("phi", dist.Normal(0.0, 1.0))
        with batch.rows():
            before = torch.nn.functional.pad(batch.y[:, :-1], (1, 0))
            pyro.sample("y", dist.Normal(phi * before, 1.0), obs=batch.y)


def with_new_row(received: Tensors, local: Tensors, batch: Batch) -> None:
    model_of(extra=new_row)(received, local, batch)


def tempered(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        u = pyro.sample("u", dist.Normal(0.0, 10.0))
        with batch.rows(), poutine.scale(scale=0.5):
            pyro.sample("y", dist.Normal(u, 1.0), obs=batch.y)
            pyro.sample("again", dist.StudentT(4.0, u, 1.0), obs=batch.y)


@pytest.mark.parametrize(
    ("program", "shared", "sizes"),
    [
        (steps, "sd", (12, 12)),
        (lagged, "phi", (12, 9)),
        (with_new_row, "u", (12, 9)),
        (tempered, "u", (12, 9)),
    ],
)
def test_unusual_programs_that_are_right_pass(program, shared, sizes):
    data = numbers(sizes)
    validate_method(pvi.hierarchical(program, data, shared=shared), data)


class LowRank(torch.nn.Module):
    """A layer whose factor is zero at the start, so that the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
        self.a, self.b = (torch.nn.Parameter(torch.zeros(n)) for n in ((1, 2), (3, 1)))

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.a)
        torch.nn.init.zeros_(self.b)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + x @ self.a.T @ self.b.T))


def test_a_gradient_that_is_zero_at_the_start_is_no_mistake():
    made = fedavg.build(Network(LowRank()), likelihood=likelihoods.normal(), batch=None)
    validate_method(made, numbers())


def test_a_method_may_have_no_program():
    def nothing(*_: object) -> None:
        return None

    validate_method(method(nothing, nothing, phases=(Phase((masked_mean,), 1, None),)), numbers())


def half_of_the_rows(u: Tensor, batch: Batch) -> None:
    some = torch.arange(batch.y.shape[1]) < batch.y.shape[1] // 2
    with batch.rows(), poutine.mask(mask=some):
        pyro.sample("half", dist.Normal(u, 1.0), obs=batch.x[..., 0])


def mask_of_the_first(u: Tensor, batch: Batch) -> None:
    with batch.rows(), poutine.mask(mask=batch.mask[:1]):
        pyro.sample("some", dist.Normal(u, 1.0), obs=batch.x[..., 0])


SEEN_IN_ALL_ROWS = {
    "a size": (model_of(lambda u, b: u * (2 if b.size.max() > 9 else 1)), MIXES),
    "the first draw": (model_of(lambda u, b: u[:1]), MIXES),
    "half of the padded rows": (model_of(extra=half_of_the_rows), PADDING),
    "mask of the first client": (model_of(extra=mask_of_the_first), PADDING),
}


@pytest.mark.parametrize("name", SEEN_IN_ALL_ROWS)
def test_clients_are_compared_with_all_their_rows(name: str) -> None:
    model, why = SEEN_IN_ALL_ROWS[name]
    with pytest.raises(ValueError, match=why):
        validate_method(method(model, batch=FULL), numbers((12, 7, 15)))


def test_a_loss_that_compares_clients_is_refused() -> None:
    """Before the first step they are equal."""

    def loss(model: Program, guide: Program, got: Tensors, own: Tensors, batch: Batch) -> Tensor:
        apart = (own["q/mu"] - own["q/mu"].mean()).square()
        return elbo(4)(model, guide, got, own, batch) + apart

    phases = (Phase((GradientStep("q/*", sgd(0.01), loss),), 2),)
    with pytest.raises(ValueError, match=MIXES):
        validate_method(replace(method(), phases=phases), numbers())


def test_a_first_state_from_a_global_generator_is_refused() -> None:
    def drawn(generator: Generator, clients: int) -> Tensors:
        return {"q/mu": torch.randn(()).double(), "q/pi": torch.zeros(()).double()}

    with pytest.raises(ValueError, match="init draws from the global generator of torch"):
        validate_method(replace(method(), init=drawn), numbers())
