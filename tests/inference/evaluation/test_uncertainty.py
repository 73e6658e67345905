"""Entropies split as they should, for draws and for ensembles, on any rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.evaluation import predict
from pyrofl.inference.evaluation.evaluate import Uncertainty
from pyrofl.metrics import calibration_error
from pyrofl.models import fedavg, pfedvem
from pyrofl.tensors import Tensors

SCORES = ("total", "aleatoric", "epistemic", "doubt")


def coins(width: float, members: int = 0) -> Method:
    """Return what gives x w as the logit of class 1, w_j ~ N(j, width^2); or an ensemble."""

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
            with batch.rows():
                logit = w * batch.x[..., 0]
                logits = torch.stack([torch.zeros_like(logit), logit], -1)
                pyro.sample("y", dist.Categorical(logits=logits), obs=batch.y)

    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            pyro.sample("w", dist.Normal(local["at"], width))

    def ensemble(received: Tensors, local: Tensors) -> list[Tensors]:
        signs = torch.linspace(-1, 1, members)
        return [{"at": local["at"] + s} for s in signs.tolist()]

    views = {"ensemble": ensemble} if members else {"personal": lambda received, local: local}
    return Method(
        init=lambda generator, clients: {},
        init_client=lambda received, cohort, generator: {"at": cohort.ids.to(cohort.size)},
        model=model,
        guide=guide,
        phases=(Phase((lambda received, local, batch: {"at": local["at"]},)),),
        aggregate=lambda server, message, cohort, generator: server,
        views=views,  # type: ignore[arg-type]
    )


def federation(held_out: int = 0) -> Federation:
    """Return three clients with 3, 0 and 2 test rows."""
    x = torch.linspace(0.5, 4, 8, dtype=torch.float64)[:, None]
    y = torch.tensor([0, 1] * 4)
    train = torch.arange(3).split(1)
    test = (torch.tensor([3, 4, 5]), torch.arange(0), torch.tensor([6, 7]))
    return Federation(x, y, train, test, names=("a", "b", "c"), held_out=held_out)


def asked(method: Method, data: Federation | None = None, **what: object) -> Uncertainty:
    data = data or federation()
    state = toys.last(method, data, 1)
    return pyrofl.checks.uncertainty(method, data, state, **what)  # type: ignore[arg-type]


def test_draws_that_agree_leave_nothing_epistemic():
    found = asked(coins(1e-9), draws=20)
    assert found.ids.tolist() == [0, 2]
    assert found.rows.tolist() == [3, 2]
    data = federation()
    owner = torch.tensor([0.0, 0.0, 0.0, 2.0, 2.0]).double()
    p = torch.sigmoid(owner * data.x[3:, 0])
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    close(found.values["total"], entropy, 1e-6)
    close(found.values["aleatoric"], entropy, 1e-6)
    close(found.values["epistemic"], torch.zeros(5), 1e-6)
    close(found.values["doubt"], torch.minimum(p, 1 - p), 1e-6)
    close(found.mean("total"), [entropy[:3].mean(), entropy[3:].mean()], 1e-6)


def test_members_that_are_sure_and_disagree_leave_nothing_aleatoric():
    data = federation()
    far = torch.full((4, 1), 1e3, dtype=torch.float64)
    found = asked(coins(1e-9, members=2), data, x=far, draws=None)
    # The first client's members say w = -1 and w = 1: each is certain, of another class.
    assert found.rows.tolist() == [4, 4, 4]
    first = {n: found.by_client(n)[0] for n in SCORES}
    close(first["total"], torch.full((4,), math.log(2), dtype=torch.float64))
    close(first["aleatoric"], torch.zeros(4))
    close(first["epistemic"], torch.full((4,), math.log(2), dtype=torch.float64))
    close(first["doubt"], torch.full((4,), 0.5))
    # Those of the third, w = 1 and w = 3, agree.
    close(found.mean("epistemic")[2:], [0.0])


def test_members_and_draws_count_alike():
    # With draws, each of three members is drawn from: their mean is that of all draws.
    data, method = federation(), coins(0.5, members=3)
    found = asked(method, data, draws=4000)
    w = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).double() * 0.5
    w = (w[:, None] + torch.tensor([-1.0, 0.0, 1.0])).flatten()
    p = torch.sigmoid(w[:, None] * data.x[3:6, 0])
    aleatoric = torch.special.entr(torch.stack([p, 1 - p], -1)).sum(-1).mean(0)
    close(found.by_client("aleatoric")[0], aleatoric, 0.01)
    total = found.values["total"]
    close(total, found.values["aleatoric"] + found.values["epistemic"])
    assert (found.by_client("epistemic")[0] > 0.1).all()


@pytest.mark.parametrize("draws", [None, 7])
def test_the_total_is_the_entropy_of_what_predict_says(draws, blobs, monkeypatch):
    method = pfedvem.build(toys.net(), lr_base=0.01)
    state = toys.last(method, blobs, 1)
    found = pyrofl.checks.uncertainty(method, blobs, state, draws=draws)
    scores = pyrofl.evaluate(method, blobs, state, draws=draws)
    close(found.mean("total"), scores.values["entropy"], 1e-9)
    if draws is None:
        close(found.values["epistemic"], torch.zeros(48), 1e-12)
    # Rows come in blocks, here of three; nothing depends on that, but for which draws they see.
    monkeypatch.setattr(predict, "PREDICTION_CHUNK_ROWS", 3)
    again = pyrofl.checks.uncertainty(method, blobs, state, draws=draws)
    assert {n: v.shape for n, v in again.values.items()} == dict.fromkeys(SCORES, (48,))
    if draws is None:
        toys.assert_same(again.values, found.values, 1e-12, 1e-12)


def test_chunks_change_nothing(blobs):
    method = pfedvem.build(toys.net(), lr_base=0.01)
    state = toys.last(method, blobs, 1)
    one, all_ = (
        pyrofl.checks.uncertainty(method, blobs, state, draws=5, chunk_size=c) for c in (1, None)
    )
    toys.assert_same(one.values, all_.values, 1e-9, 1e-12)


def test_held_out_clients_are_asked_too():
    found = asked(coins(0.1), federation(held_out=1), population="held_out")
    assert found.ids.tolist() == [2]


def test_a_bernoulli_is_two_classes():
    method = coins(0.3)

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
            with batch.rows():
                logits = w * batch.x[..., 0]
                pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y.double())

    both = [asked(m, draws=50) for m in (method, replace(method, model=model))]
    toys.assert_same(both[0].values, both[1].values, 1e-9, 1e-12)


def test_strange_rows_are_told_apart_by_each_client():
    one = Uncertainty(torch.tensor([0, 1]), torch.tensor([2, 1]), {"s": torch.tensor([1.0, 2, 3])})
    two = Uncertainty(torch.tensor([0, 1]), torch.tensor([1, 2]), {"s": torch.tensor([3.0, 3, 1])})
    close(one.told_apart(two, "s"), torch.tensor([1.0, 0.25]))
    with pytest.raises(ValueError, match="both must have the same clients"):
        one.told_apart(replace(two, ids=torch.tensor([0, 2])), "s")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"draws": 0}, "draws is 0"),
        ({"part": "train"}, "unknown argument 'part'; expected one of model, adaptation"),
        ({"chunk_size": 0}, "chunk_size is 0; expected a whole number of at least 1"),
        (
            {"x": torch.tensor([[1.0], [1.7e308]], dtype=torch.float64), "draws": None},
            "c: its personal model predicts nan for row 1 of x, not a finite",
        ),
        ({"x": torch.tensor([[1.0], [torch.inf]])}, "x is NaN or infinite in 1 rows.* in row 1"),
        ({"x": torch.zeros(3, 2)}, r"x has shape \[3, 2\]; expected at least one row of \[1\]"),
        ({"x": torch.zeros(0, 1)}, "x has shape"),
        ({"population": "held_out"}, "no client of the held_out population"),
        ({"model": "global"}, "no 'global' model"),
    ],
)
def test_what_cannot_be_asked_is_refused(what, words):
    with pytest.raises(ValueError, match=words):
        asked(coins(0.1), **what)


def test_numbers_have_no_classes():
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y.double())

    method = replace(coins(0.1), model=model)
    with pytest.raises(ValueError, match="the response is a Normal; class probabilities need"):
        asked(method)
    state = toys.last(method, federation(), 1)
    with pytest.raises(ValueError, match="predicts numbers"):
        pyrofl.checks.calibration_by_client(method, federation(), state)


# Calibration of each client.


def test_bins_of_clients_add_up_to_the_pooled_ones(blobs):
    method = fedavg.build(toys.net())
    state = toys.last(method, blobs, 2)
    found = pyrofl.checks.calibration_by_client(method, blobs, state)
    assert tuple(found) == blobs.names
    pooled = pyrofl.checks.calibration(method, blobs, state)
    close(sum(b.rows for b in found.values()), pooled.rows)
    right = sum((b.rows * b.accuracy).nan_to_num() for b in found.values())
    close(right, (pooled.rows * pooled.accuracy).nan_to_num())
    ece = torch.stack([calibration_error(b)[0] for b in found.values()])
    close(ece, pyrofl.evaluate(method, blobs, state).values["ece"], 1e-9)
    few = pyrofl.checks.calibration_by_client(method, blobs, state, bins=4, part="train")
    assert few["client 0"].rows.shape == (4,)
    assert few["client 1"].rows.sum() == len(blobs.train[1])
    with pytest.raises(ValueError, match="bins is 0"):
        pyrofl.checks.calibration_by_client(method, blobs, state, bins=0)


def test_clients_without_rows_have_no_bins():
    state = toys.last(coins(0.1), federation(), 1)
    found = pyrofl.checks.calibration_by_client(coins(0.1), federation(), state, draws=3)
    assert list(found) == ["a", "c"]
