"""Runs in which nothing is learned, and losses that fall without bound: what the verdict says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from torch import Size, Tensor

import pyrofl
from pyrofl import GradientStep, Method, Phase, adam, aggregation, elbo, guides, sgd
from pyrofl.data import Batch, Federation
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.monitoring.status import convergence_status, unused_by
from pyrofl.models import fedavg, pfedgp, pvi
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, generator

q = guides.log_mean_field({"w": Size([2])}, init_scale=0.1)
everything = aggregation.Aggregator({"*": aggregation.uniform})


def lines() -> Federation:
    """Return three clients that measure one line."""
    source = generator(0)
    x = torch.randn(30, 2, generator=source).double()
    y = x @ torch.tensor([1.0, -2.0]).double() + 0.3 * torch.randn(30, generator=source)
    parts = torch.arange(30).split(10)
    return Federation(x, y, parts, tuple(p[:0] for p in parts))


def model(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 2.0).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((w * batch.x).sum(-1), 0.3), obs=batch.y)


def without_slope(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Draw from the guide, with a mean that has no gradient."""
    with batch.clients():
        fn = dist.Normal(local["mu/w"].detach(), local["pi/w"].exp())
        pyro.sample("w", fn.to_event(1))


def solved(name: str) -> Callable[[Tensors, Tensors, Batch], Tensors]:
    """Return a closed-form update of the mean, under some name."""

    def update(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        x = batch.x * batch.counts[..., None]
        precision = torch.einsum("cbi,cbj->cij", x, batch.x) / 0.09 + torch.eye(2) / 4
        slope = torch.einsum("cbi,cb->ci", x, batch.y) / 0.09
        return {name: torch.linalg.solve(precision, slope), "pi/w": 0 * local["pi/w"] - 2}

    return update


def wrong(*args: object) -> Tensor:
    """Return the loss with the wrong sign."""
    return -elbo(num_particles=8, mean=True)(*args)  # type: ignore[arg-type]


USUAL = Method(
    init=lambda source, clients: q.start({"w": torch.zeros(2)}),
    model=model,
    guide=q,
    phases=(
        Phase((GradientStep(q.names, adam(0.05), elbo(num_particles=8, mean=True)),), epochs=2),
    ),
    aggregate=everything,
)


def fitted(rounds: int = 3, **changed: object) -> Run:
    method = replace(USUAL, **changed)  # type: ignore[arg-type]
    return pyrofl.fit(method, lines(), rounds, progress=False, check=False)


NOTHING = "no learned tensor has changed in any round"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"upload": lambda received, local: {}}, NOTHING),
        ({"upload": lambda received, local: dict(received)}, NOTHING),
        (
            {
                "aggregate": aggregation.Aggregator(
                    {"*": aggregation.uniform}, server_step=lambda s, p: s
                )
            },
            NOTHING,
        ),
        (
            {"upload": lambda received, local: {"pi/w": local["pi/w"]}},
            "mu/w is trained, but unchanged in every round; check the upload",
        ),
        ({"guide": without_slope}, "mu/w is trained, but unchanged .* for .detach()"),
    ],
    ids=["empty", "as received", "then", "forgotten", "detach"],
)
def test_a_run_that_learns_nothing_is_stuck_and_says_so_after_round_one(changed, words):
    with pytest.warns(UserWarning, match=f"after round 1: {words}"):
        run = fitted(**changed)
    assert run.status.kind == "stuck"
    assert str(run.status) in run.warnings
    assert run.copy(records=run.records[:1]).status.kind == "stuck"


def test_what_is_not_to_learn_is_not_stuck():
    for optim, epochs in ((adam(0.0), 2), (adam(0.1), 0)):
        run = fitted(phases=(Phase((GradientStep(q.names, optim),), epochs=epochs),))
        assert run.status.kind == "converged"
        assert "nothing is trained: all learning rates or epochs are 0" in str(run.status)


def test_what_was_not_compared_in_every_round_is_not_stuck():
    site, kept = {"w": {"mean": 1.0, "sd": 1.0}}, {"mean": {"norm": 0.0}}
    still = {"w": {"mean": 0.0, "sd": 0.0}}
    moved = [site, *[still | kept] * 5]
    record = fitted(1).records[0]
    records = [replace(record, number=i + 1, moved=dict(m)) for i, m in enumerate(moved)]
    assert convergence_status(records, "mean").kind == "converged"
    records[0] = replace(record, moved=site | kept)
    assert convergence_status(records, "mean").kind == "stuck"


def test_a_rate_of_zero_is_wanted_also_where_others_learn():
    moves = (
        GradientStep("mu/*", adam(0.0)),
        GradientStep("pi/*", adam(0.1)),
        lambda received, local, batch: {},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted(phases=(Phase(moves, epochs=2),)).status.kind == "not converged"


def test_until_stops_a_run_that_is_stuck():
    with pytest.warns(UserWarning, match=NOTHING):
        run = pyrofl.fit(
            replace(USUAL, upload=lambda received, local: {}),
            lines(),
            9,
            progress=False,
            stop_when="converged",
        )
    assert run.state.number == 3


def test_a_closed_form_that_the_guide_reads_converges():
    run = fitted(6, phases=(Phase((solved("mu/w"),)),))
    assert run.status.kind == "converged"
    again = pyrofl.fit(run.method, run.data, 9, resume_from=run.state, progress=False)
    assert again.status.kind == "converged"  # it began at the optimum


def test_a_closed_form_under_a_name_that_nobody_reads_is_named_before_round_one():
    with pytest.warns(UserWarning, match="mu/w is read by the guide but never updated"):
        pyrofl.fit(replace(USUAL, phases=(Phase((solved("mean/w"),)),)), lines(), 3, progress=False)


@pytest.mark.parametrize("optim", [sgd(0.002), adam(0.2)], ids=["sgd", "adam"])
def test_a_loss_with_the_wrong_sign_has_diverged(optim):
    run = fitted(30, phases=(Phase((GradientStep(q.names, optim, wrong),), epochs=8),))
    assert run.records[-1].loss[q.names].mean() < -1e4
    assert run.status.kind == "diverged"
    assert "without bound; check its sign" in str(run.status)


def test_losses_of_pvi_against_different_cavities_are_not_compared():
    # The free energy of a client holds the normalizer of its cavity: it may rise while q improves.
    run = pyrofl.fit(pvi.hierarchical(model, lines(), shared="w"), lines(), 3, progress=False)
    assert run.records[0].loss.keys() == {"mean root"}
    high = {n: v + 1e3 * v.abs() for n, v in run.records[-1].loss.items()}
    later = [replace(run.records[-1], number=n, loss=high) for n in (4, 5, 6)]
    assert convergence_status([*run.records, *later]).kind != "diverged"


def test_gradients_that_have_vanished_are_not_called_converged():
    method = pfedgp.build(toys.net("mlp:16"), lr=5.0)
    run = pyrofl.fit(method, toys.blobs((12, 12, 12)), 8, progress=False, check=False)
    assert run.status.kind == "stuck"
    assert "predictions are the same for all rows of a client" in str(run.status)
    assert run.evaluate().mean("accuracy") < 0.5


class Unused(torch.nn.Module):
    """Network with a layer that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 5), torch.nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_network_with_an_unused_parameter_is_not_stuck():
    method = fedavg.build(Network(Unused(), head="used.*"), epochs=1)
    run = pyrofl.fit(method, toys.blobs(), 3, progress=False)
    assert run.status.kind == "not converged"
    assert run.status.site.startswith("used.") or "/used." in run.status.site
    assert unused_by(method, toys.blobs()) == {"unused.weight", "unused.bias"}
