"""Every cell of the evaluation on constants, where FedAvg's weights can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from torch import Generator, Tensor

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.inference.definition.method import Method, View
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation import predict as predicting
from pyrofl.inference.evaluation.evaluate import Scores, calibration, evaluate, uncertainty
from pyrofl.inference.evaluation.predict import Prediction, predict, predict_batch
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.metrics import mean
from pyrofl.models import fedavg, guides, pfedvem, pvi
from pyrofl.models.likelihoods import bernoulli, normal
from pyrofl.nets import build
from pyrofl.tensors import Tensors, role, spread_out, under

# Training responses of three clients and one held out; test responses are one more.
Y = (0.0, 2.0, 10.0, 4.0)
TEST_ROWS = (1, 2, 1, 1)


def constants() -> Federation:
    y = [torch.full((2,), v) for v in Y]
    tests = [torch.full((n,), v + 1) for n, v in zip(TEST_ROWS, Y, strict=True)]
    parts = torch.arange(8 + sum(TEST_ROWS)).split([2, 2, 2, 2, *TEST_ROWS])
    table = torch.cat([*y, *tests]).double()
    return Federation(
        torch.zeros(len(table), 1, dtype=torch.float64),
        table,
        parts[:4],
        parts[4:],
        held_out=1,
        pooled_test=torch.arange(8, len(table)),
    )


@pytest.fixture
def method() -> Method:
    """FedAvg that goes half of the way to a client's response in every epoch."""
    net = build("mean", (1,), 1)
    return fedavg.build(
        net, likelihood=normal(), lr=0.5, momentum=0.0, batch=None, epochs=2, fine_tune=1
    )


@pytest.fixture
def state(method: Method) -> RoundState:
    """One round from 0: the clients reach 3/4 of (0, 2, 10), the server their mean, 3."""
    return next(federate(method, constants(), 1))


def rmse(method: Method, state: RoundState, **what: str) -> list[float]:
    return evaluate(method, constants(), state, **what).values["rmse"].tolist()  # type: ignore[arg-type]


def test_every_cell_is_what_one_gets_by_hand(method: Method, state: RoundState):
    assert float(state.server["w/w"]) == 3.0
    assert rmse(method, state, model="global") == [2.0, 0.0, 8.0]
    assert rmse(method, state, model="global", part="train") == [3.0, 1.0, 7.0]
    assert rmse(method, state, model="global", population="held_out") == [2.0]
    pooled = math.sqrt((2**2 + 2 * 0 + 8**2 + 2**2) / 5)
    assert rmse(method, state, model="global", population="pooled") == pytest.approx([pooled])
    # One epoch leaves half of the distance to the training response, two leave a quarter.
    adapt = [abs(y + (3 - y) / 2 - (y + 1)) for y in Y]
    phases = [abs(y + (3 - y) / 4 - (y + 1)) for y in Y]
    assert rmse(method, state, adaptation="fine_tune") == pytest.approx(adapt[:3])
    assert rmse(method, state, adaptation="train") == pytest.approx(phases[:3])
    assert rmse(method, state, adaptation="fine_tune", population="held_out") == pytest.approx(
        adapt[3:]
    )
    # The global view stays what came down, however long the client trains.
    assert rmse(method, state, model="global", adaptation="train") == [2.0, 0.0, 8.0]


def test_scores_say_what_was_tested_and_weigh_as_asked(method: Method, state: RoundState):
    scores = evaluate(method, constants(), state, model="global")
    setting = (scores.model, scores.adaptation, scores.population, scores.part, scores.draws)
    assert setting == ("global", "none", "training", "test", None)
    assert scores.rows.tolist() == [1, 2, 1]
    assert scores.mean("rmse") == pytest.approx(10 / 3)
    assert scores.mean("rmse", "row") == pytest.approx(10 / 4)
    nll = 0.5 * torch.tensor([2.0, 0.0, 8.0]).double().square() + 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(scores.values["nll"], nll)


def worst(prediction: Prediction, y: Tensor, mask: Tensor) -> Tensor:
    """Return the largest error of each client."""
    return (prediction.mean - y).abs().where(mask, 0).amax(1)


def test_a_metric_of_ones_own_stands_beside_the_others(method: Method, state: RoundState):
    what = {"model": "global", "metrics": {"worst": worst, "rows": lambda p, y, mask: mask.sum(1)}}
    scores = evaluate(method, constants(), state, **what)  # type: ignore[arg-type]
    assert list(scores.values) == ["rmse", "nll", "crps", "worst", "rows"]
    assert scores.values["worst"].tolist() == [2.0, 0.0, 8.0]
    assert scores.values["rows"].tolist() == [1.0, 2.0, 1.0]
    chunked = evaluate(method, constants(), state, chunk_size=1, **what)  # type: ignore[arg-type]
    toys.assert_same(chunked.values, scores.values)


def test_of_many_rows_a_metric_sees_all(monkeypatch):
    data, classifier = toys.blobs(), fedavg.build(toys.net())
    state = toys.last(classifier, data, 1)

    def right(prediction: Prediction, y: Tensor, mask: Tensor) -> Tensor:
        return mean(prediction.mean.argmax(-1) == y, mask)

    monkeypatch.setattr(predicting, "PREDICTION_CHUNK_ROWS", 3)
    scores = evaluate(classifier, data, state, part="train", metrics={"right": right})
    torch.testing.assert_close(scores.values["right"], scores.values["accuracy"])


def test_the_mean_of_a_metric_leaves_out_clients_without_it(method: Method, state: RoundState):
    def odd(prediction: Prediction, y: Tensor, mask: Tensor) -> Tensor:
        return torch.tensor([1.0, math.nan, 4.0])

    scores = evaluate(method, constants(), state, metrics={"odd": odd})
    assert scores.mean("odd") == 2.5
    assert "mean 2.5 over clients, from 1 (" in scores.overview()["odd"]
    assert scores.overview()["odd"].endswith("; NaN for 1 of 3 clients")
    assert scores.to_dataframe()["odd"].isna().tolist() == [False, True, False]


def test_the_smallest_clients_can_be_looked_at_alone():
    values = {"rmse": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    ids = torch.tensor([0, 2, 3, 5])
    scores = Scores(model="personal", ids=ids, rows=torch.ones(4), values=values)
    few = scores.smallest(0.5, torch.tensor([9, 0, 3, 7, 0, 2]))
    assert few.ids.tolist() == [2, 5]
    assert few.mean("rmse") == 3.0


def test_a_model_without_a_response_is_refused_in_one_line():
    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            with batch.rows():
                pyro.factor("density", dist.Normal(mu, 1.0).log_prob(batch.y))

    data = Federation.from_arrays({"a": ([[0.0], [0.0]], [1.0, 2.0])})
    method = pvi.hierarchical(program, data, shared="mu", steps=1)
    with pytest.raises(ValueError, match=r"by pyro\.factor, which cannot predict; use pyro"):
        evaluate(method, data, first(method, data, 0), part="train")


def test_testing_changes_nothing_and_does_not_depend_on_chunks():
    data = toys.blobs(held_out=2)
    method = pfedvem.build(toys.net(), lr_base=0.01, head_epochs=2, base_epochs=1)
    state = toys.last(method, data, 2)
    before = {n: v.clone() for n, v in (state.server | state.client_states).items()}
    for what in (
        {"draws": 3},
        {"model": "global"},
        {"adaptation": "train"},
        {"population": "held_out", "adaptation": "train", "draws": 2},
    ):
        one = evaluate(method, data, state, chunk_size=1, **what)  # type: ignore[arg-type]
        all_ = evaluate(method, data, state, chunk_size=99, **what)  # type: ignore[arg-type]
        toys.assert_same(one.values, all_.values, rtol=1e-9, atol=1e-9)
        assert torch.equal(one.ids, all_.ids)
    toys.assert_same(before, state.server | state.client_states)


def test_clients_without_test_rows_are_left_out_not_counted_as_zero():
    data = toys.blobs()
    none = torch.zeros(0, dtype=torch.long)
    data = replace(data, test=(none, *data.test[1:6], none, *data.test[7:]))
    method = fedavg.build(toys.net())
    scores = evaluate(method, data, toys.last(method, data, 1), model="global")
    assert scores.ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert bool(scores.values["accuracy"].isfinite().all())
    empty = replace(data, test=tuple(none for _ in data.test))
    with pytest.raises(ValueError, match="no client of the training population has test rows"):
        evaluate(method, empty, toys.last(method, data, 1), model="global")


def test_predictions_of_all_clients_are_those_of_their_batches():
    data, method = toys.blobs(), fedavg.build(toys.net())
    state = toys.last(method, data, 1)
    seen = []
    for ids, prediction, y, mask in predict(method, data, state, part="train", chunk_size=5):
        batch = data.batch(ids)
        assert torch.equal(y, batch.y)
        assert torch.equal(mask, batch.mask)
        alone = predict_batch(method, *prepared(method, data, state, data.cohort(ids)), batch)
        toys.assert_same(prediction._asdict(), alone._asdict())
        seen += ids.tolist()
    assert sorted(seen) == list(range(12))
    with pytest.raises(ValueError, match="part is 'rows'"):
        predict(method, data, state, part="rows")  # type: ignore[arg-type]


def test_an_ensemble_averages_probabilities():
    data = toys.blobs()
    method = fedavg.build(toys.net())
    ids = torch.arange(3)
    batch = data.batch(ids, "test")
    members = [toys.stacked(method.init(torch.Generator().manual_seed(s), 3), 3) for s in (1, 2)]
    one, two = (predict_batch(method, {}, member, batch) for member in members)
    both = predict_batch(method, {}, members, batch)
    torch.testing.assert_close(both.mean, (one.mean + two.mean) / 2, rtol=1e-6, atol=1e-8)
    density = (one.log_density.exp() + two.log_density.exp()) / 2
    torch.testing.assert_close(both.log_density, density.log(), rtol=1e-6, atol=1e-6)


def test_draws_average_probabilities_not_logits():
    """With one row and two classes the average over many draws is a one-dimensional integral."""
    net = build("linear", (1,), 1)
    rows = (torch.tensor([0]),), (torch.tensor([1]),)
    data = Federation(torch.ones(2, 1).double(), torch.zeros(2).double(), *rows)
    method = fedavg.build(net, likelihood=bernoulli, guide=guides.mean_field, init_scale=2.0)
    local = {"w/w": torch.tensor([[1.0]]).double(), "spread/w": torch.tensor([[2.0]]).double()}
    noise = [torch.Generator().manual_seed(0)]
    found = predict_batch(method, {}, local, data.batch(torch.tensor([0]), "test"), 40_000, noise)
    sd = torch.nn.functional.softplus(torch.tensor(2.0)).item()
    z = torch.linspace(-8, 8, 4001).double()
    weight = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    expected = float((torch.sigmoid(1 + sd * z) * weight).sum())
    # sd of a sigmoid is below 1/2: four standard errors.
    assert float(found.mean[0, 0, 1]) == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(40_000))
    assert abs(expected - torch.sigmoid(torch.tensor(1.0)).item()) > 0.05


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"modle": "global"}, "unknown argument 'modle'; did you mean model?"),
        (
            {"adaptation": "fine_tune"},
            "adaptation is 'fine_tune', but this method has no adapt phases",
        ),
        (
            {"population": "pooled", "part": "train"},
            "pooled population needs part='test' and adaptation='none'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    method: Method, state: RoundState, what: dict[str, object], message: str
):
    if what == {"adaptation": "fine_tune"}:
        method = replace(method, adapt=())
    with pytest.raises(ValueError, match=message):
        evaluate(method, constants(), state, **what)  # type: ignore[arg-type]


def moments(
    method: Method, data: Federation, state: RoundState, ids: Tensor
) -> tuple[Tensor, Tensor]:
    mean = state.client_states["mu/head.bias"][ids]
    sd = torch.nn.functional.softplus(state.client_states["pi/head.bias"][ids])
    return mean, sd


def test_posterior_draws_follow_the_guide_client_by_client():
    data = toys.blobs()
    method = pfedvem.build(toys.net(), lr_base=0.01)
    state = toys.last(method, data, 2)
    ids = torch.tensor([7, 2, 11])
    count = 4000
    draws = posterior(method, data, state, count, ids=ids)
    assert draws["head.weight"].shape == (count, 3, 5, 6)
    mean, sd = moments(method, data, state, ids)
    error = (draws["head.bias"].mean(0) - mean) / (sd / math.sqrt(count))
    assert float(error.abs().max()) < 4.5  # 15 numbers, seed fixed
    spread = draws["head.bias"].std(0) / sd - 1
    assert float(spread.abs().max()) < 4.5 / math.sqrt(2 * count)
    toys.assert_same(
        draws, posterior(method, data, state, count, ids=ids, chunk_size=1), atol=1e-12
    )


def test_a_point_posterior_repeats_its_point(blobs: Federation):
    method = fedavg.build(toys.net(), fine_tune=1)
    state = toys.last(method, blobs, 1)
    draws = posterior(method, blobs, state, 3, model="personal")
    for name, value in draws.items():
        expected = state.server[f"w/{name}"].expand(3, 12, *value.shape[2:])
        torch.testing.assert_close(value, expected)
    with pytest.raises(ValueError, match="draws is 0; expected a whole number of at least 1"):
        posterior(method, blobs, state, 0)


def test_what_is_deployed_is_tested_but_does_not_travel_in_training():
    plain = fedavg.build(toys.net(), epochs=1)

    def deploy(server: Tensors, cohort: Cohort) -> Tensors:
        return spread_out(server, len(cohort.ids))

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        old = {n: v for n, v in server.items() if n.startswith("w/")}
        return plain.aggregate(server, message, cohort, generator) | under("server/old", old)

    def both(received: Tensors, local: Tensors) -> list[Tensors]:
        return [received, received | under("w", role("server/old/w", received))]

    views = plain.views | {"ensemble": View(both, deploy)}
    method = replace(plain, aggregate=aggregate, views=views)
    data = toys.blobs()
    state = toys.last(method, data, 2)
    before = toys.last(plain, data, 1)
    after = toys.last(plain, data, 2)
    assert torch.equal(state.bytes_down, after.bytes_down)
    toys.assert_same(role("server/old", state.server), before.server)
    one = evaluate(method, data, state, model="global").values
    toys.assert_same(one, evaluate(plain, data, after, model="global").values)
    ensemble = evaluate(method, data, state, model="ensemble").values
    assert not torch.equal(ensemble["nll"], one["nll"])


def test_calibration_gathers_the_rows_of_all_clients(method: Method, state: RoundState):
    data = toys.blobs(held_out=4)
    classifier = fedavg.build(toys.net())
    trained = toys.last(classifier, data, 3)
    what = {"model": "global", "population": "held_out"}
    bins = calibration(classifier, data, trained, **what, chunk_size=3)
    scores = evaluate(classifier, data, trained, **what)
    assert int(bins.rows.sum()) == 4 * 4
    right = (bins.accuracy * bins.rows).nansum() / bins.rows.sum()
    assert float(right) == pytest.approx(scores.mean("accuracy"))
    with pytest.raises(ValueError, match="the method predicts numbers"):
        calibration(method, constants(), state)


@pytest.mark.parametrize("rows", [1, 3, 512])
@pytest.mark.parametrize("model", ["personal", "global"])
def test_a_prediction_that_is_no_number_is_named(blobs, monkeypatch, rows, model):
    monkeypatch.setattr(predicting, "PREDICTION_CHUNK_ROWS", rows)
    method = fedavg.build(toys.net("softmax"), epochs=1, fine_tune=1)
    trained = first(method, blobs, 0)
    trained = replace(trained, server={n: 100 * v for n, v in trained.server.items()})
    x, row = blobs.x.clone(), int(blobs.test[3][2])
    x[row] = 1.7e308 * x[row].sign()  # its logits overflow, and nobody else's do
    hopeless = replace(blobs, x=x)
    told = rf"client 3: its {model} model predicts nan for row {row} of the data, not a finite"
    for ask in (evaluate, calibration, uncertainty):
        with pytest.raises(ValueError, match=told):
            ask(method, hopeless, trained, model=model)
    padded = replace(hopeless, test=(blobs.test[0], *(rows[:2] for rows in blobs.test[1:])))
    assert math.isfinite(evaluate(method, padded, trained).mean("nll"))


def test_a_density_of_zero_is_a_bad_score_and_no_error(method, state):
    far = replace(constants(), y=torch.full_like(constants().y, 1e200))
    scores = evaluate(method, far, state)
    assert scores.mean("rmse") == pytest.approx(1e200)
    assert scores.mean("nll") == pytest.approx(1e30)


def test_a_family_without_a_mean_has_a_density(state):
    def cauchy(outputs: Tensor, x: Tensor) -> dist.TorchDistribution:
        return dist.Cauchy(outputs.squeeze(-1), 1.0)

    scores = evaluate(
        fedavg.build(build("mean", (1,), 1), likelihood=cauchy), constants(), state, model="global"
    )
    gap = torch.tensor([3.0 - (v + 1) for v in Y[:3]], dtype=torch.float64)
    torch.testing.assert_close(scores.values["nll"], (math.pi * (1 + gap.square())).log())
    assert "rmse" not in scores.values
    assert "crps" not in scores.values


def test_the_crps_of_normal_responses_has_a_closed_form(method, state):
    scores = evaluate(method, constants(), state, model="global")
    z = torch.tensor([3.0 - (v + 1) for v in Y[:3]], dtype=torch.float64)
    normal = torch.distributions.Normal(torch.zeros_like(z), 1.0)
    expected = z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp() - 1 / math.sqrt(math.pi)
    torch.testing.assert_close(scores.values["crps"], expected)


def counting(outputs: Tensor, x: Tensor) -> dist.TorchDistribution:
    return dist.Poisson(outputs.squeeze(-1).abs())


@pytest.mark.parametrize("draws", [None, 3])
def test_the_crps_of_other_families_is_drawn_client_by_client(state, draws):
    method = fedavg.build(build("mean", (1,), 1), likelihood=counting)
    data = constants()
    before = torch.get_rng_state()
    how = {"model": "global", "draws": draws}
    scores = evaluate(method, data, state, **how)
    assert torch.equal(torch.get_rng_state(), before)
    alone = evaluate(method, data, state, chunk_size=1, **how)
    toys.assert_same(alone.values, scores.values)
    own = scores.predicted.crps.tolist()
    k = torch.arange(60, dtype=torch.float64)
    cdf = dist.Poisson(torch.tensor(3.0, dtype=torch.float64)).log_prob(k).exp().cumsum(0)
    for got, y in zip(own, data.y[torch.cat(data.test[:3])].tolist(), strict=True):
        exact = float((cdf - (k >= y).double()).square().sum())
        # Of 500 draws: |X - y| has at most the standard deviation of X, √3, and so the pairs.
        assert got == pytest.approx(exact, abs=4 * math.sqrt(3 / 500))


def test_many_draws_of_normals_have_the_crps_of_few(method, state, monkeypatch):
    found = []
    for few in (64, 0):
        monkeypatch.setattr(predicting, "MAX_CLOSED_FORM_NORMALS", few)
        found.append(evaluate(method, constants(), state, model="global").predicted.crps)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=4 / math.sqrt(500))
    assert not torch.equal(*found)
