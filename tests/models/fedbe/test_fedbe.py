"""FedBE: its limits, its variants, and what its server does step by step."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pyro
import pytest
import torch
import toys
from checks import TRAINED, close
from promises import Promises, others_slow
from toys import last

import pyrofl
from pyrofl.data.loaders.datasets import load
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.models import fedavg, fedavgm, fedbe, fedprox, guides, likelihoods, priors, scaffold
from pyrofl.models.fedbe.posteriors import mean_and_sd
from pyrofl.models.shared.distillation import predictions
from pyrofl.nets import build
from pyrofl.partitions.federations import split
from pyrofl.tensors import Tensors, generator, role

PROMISES = {
    "fedbe": Promises(
        together="*",
        random=True,
        message=(toys.ALL, toys.ALL),
        settings={"server_data": toys.blobs().x[-30:]},
        unordered={"teachers": "SA"},
        numbers=False,
    )
}

NET = build("mlp:5", (4,), 3)
X = torch.randn(40, 4, generator=generator(1), dtype=torch.float64)
QUICK = {"distil_epochs": 2, "distil_batch": 16, "cycle": 2, "distil_lr": 0.05, "batch": 2}


def made(**options: object) -> Method:
    return fedbe.build(NET, server_data=X, **{**QUICK, **options})  # type: ignore[arg-type]


def student(server: Tensors) -> Tensors:
    return role("w", server)


def held(server: Tensors) -> Tensors:
    return role("server/teacher/w", server)


BASES = {
    "fedavg": fedavg.build(NET, batch=2),
    "fedprox": fedprox.build(NET, mu=1e-3, batch=2),
    "fedavgm": fedavgm.build(NET, server_lr=0.1, batch=2),
    "scaffold": scaffold.build(NET, batch=2),
}


@pytest.mark.parametrize("on", BASES)
def test_without_distillation_it_is_the_method_below(tiny, on):
    for one, other in zip(
        federate(made(on=on, distil="none"), tiny, 3), federate(BASES[on], tiny, 3), strict=True
    ):
        for n, value in other.server.items():
            close(one.server[n], value)


@pytest.mark.parametrize("distil", ["swa", "sgd"])
def test_the_average_teaches_itself_nothing(tiny, distil):
    options = {"sharpen": False, "samples": 0, "distil": distil}
    alone = made(teachers="A", **options)
    for one, other in zip(
        federate(alone, tiny, 3), federate(BASES["fedavg"], tiny, 3), strict=True
    ):
        for n, value in other.server.items():
            close(one.server[n], value, 1e-10)
    sharp = last(made(teachers="A"), tiny, 1)
    assert not torch.allclose(student(sharp.server)["head.bias"], other.server["w/head.bias"])


def test_one_client_is_all_the_teachers(tiny):
    state = last(made(samples=4), tiny, 1, participation=fixed(1))
    for n, value in held(state.server).items():
        assert len(value) == 1 + 1 + 4
        close(value, state.message[f"w/{n}"].expand_as(value), 1e-15)


@pytest.mark.parametrize("teachers", ["S", "A", "C", "SA", "AC", "SC", "SAC"])
def test_teachers_are_what_the_letters_say(tiny, teachers):
    state = last(made(teachers=teachers, samples=4), tiny, 1)
    size = torch.tensor([3, 5, 4], dtype=torch.float64) / 12
    for n, value in held(state.server).items():
        sent = state.message[f"w/{n}"]
        average = torch.tensordot(size, sent, 1)[None]
        parts = {"A": average, "C": sent}
        expected = [parts[letter] for letter in "AC" if letter in teachers]
        known = sum(len(part) for part in expected)
        assert len(value) == known + 4 * ("S" in teachers)
        close(value[:known], torch.cat([*expected, value[:0]]))
        if "S" in teachers:
            deviation = torch.tensordot(size, (sent - average).square(), 1).sqrt()
            assert bool(((value[known:] - average).abs() <= 6 * deviation + 1e-15).all())


@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet"])
def test_the_posterior_is_the_one_asked_for(tiny, posterior):
    state = last(made(teachers="S", posterior=posterior, samples=6), tiny, 1)
    sent, drawn = (
        torch.cat([v.flatten(1) for v in part.values()], 1)
        for part in (role("w", state.message), held(state.server))
    )
    # Mixtures lie in the plane of the three clients, normal draws do not.
    distance = torch.linalg.lstsq(sent.T, drawn.T).solution
    inside = torch.allclose(sent.T @ distance, drawn.T, atol=1e-9)
    assert inside == (posterior == "dirichlet")


def test_the_ensemble_averages_the_teachers_predictions(tiny):
    method = made(samples=3)
    state = last(method, tiny, 2)
    _, local = prepared(method, tiny, state, tiny.cohort(torch.arange(3)), model="ensemble")
    assert len(local) == 1 + 3 + 3
    for m, member in enumerate(local):
        for n, value in held(state.server).items():
            close(role("w", member)[n], value[m].expand(3, *value[m].shape))
    found = evaluate(method, tiny, state, model="ensemble")
    for j in range(3):
        probs = predictions(NET, held(state.server), tiny.x[tiny.test[j]]).mean(0)
        true = probs.gather(1, tiny.y[tiny.test[j]][:, None])
        close(found.values["nll"][j], -true.log().mean().to(found.values["nll"]), 1e-9)


def test_teachers_do_not_travel_while_clients_train(tiny):
    method = made()
    state = last(method, tiny, 2)
    for tensors in (method.download(state.server, state.reporters), state.message):
        assert set(tensors) == {f"w/{n}" for n in NET.shapes}
    assert set(method.views) == {"global", "ensemble"}


def test_before_the_first_round_the_ensemble_is_the_start(tiny):
    method = made()
    begun = first(method, tiny, 0)
    one, other = (evaluate(method, tiny, begun, model=m).values for m in ("ensemble", "global"))
    assert torch.equal(one["nll"], other["nll"])


def test_linear_predictors_agree_with_their_mean(quadratic):
    data = quadratic.federation
    method = fedbe.build(
        build("linear", (2,), 1), teachers="C", distil="none", likelihood=likelihoods.normal()
    )
    state = last(method, data, 1)
    kinds = {m: evaluate(method, data, state, model=m, part="train") for m in method.views}
    # Both clients have two rows, so that FedAvg's model is the mean of the teachers.
    close(kinds["ensemble"].values["rmse"], kinds["global"].values["rmse"], 1e-6)


def test_one_ensemble_never_shows_a_client_an_average(tiny):
    method = made(teachers="C", distil="none", epochs=8)
    state = last(method, tiny, 1)
    plain = fedavg.build(NET, batch=2, epochs=8)
    for j in range(3):
        (alone,) = federate(plain, tiny, 1, participation=lambda g, c, j=j: torch.tensor([j]))
        for n, value in alone.message.items():
            close(held(state.server)[n.removeprefix("w/")][j], value[0])


def test_vanilla_distillation_has_the_clients_as_teachers_and_the_last_iterate(tiny):
    method = made(teachers="C", distil="sgd")
    state = last(method, tiny, 1)
    plain = last(BASES["fedavg"], tiny, 1)
    target = predictions(NET, role("w", plain.message), X).mean(0).square()
    target /= target.sum(1, keepdim=True)
    w = {n: v.clone().requires_grad_() for n, v in student(plain.server).items()}
    optimizer = torch.optim.SGD(w.values(), 0.05, 0.9)
    rng = stream(0, Stream.MERGE, 0)
    for _ in range(2):
        for rows in torch.randperm(40, generator=rng).split(16):
            optimizer.zero_grad()
            log_prob = NET.apply(w, X[rows]).log_softmax(1)
            (-(target[rows] * log_prob).sum() / len(rows)).backward()
            optimizer.step()
    for n, value in w.items():
        close(student(state.server)[n], value.detach())


def test_momentum_of_the_server_starts_the_student(tiny):
    # A student that makes no step is the momentum model itself.
    method = made(on="fedavgm", distil_epochs=0)
    for one, other in zip(
        federate(method, tiny, 3), federate(BASES["fedavgm"], tiny, 3), strict=True
    ):
        for n, value in other.server.items():
            close(one.server[n], value)


VARIANTS = [
    *product(("A", "C", "SAC"), ("swa", "sgd", "none"), ("gaussian",), ("fedavg",)),
    *product(("S",), ("swa", "none"), ("dirichlet",), ("fedprox", "fedavgm", "scaffold")),
    *product(("SAC",), ("sgd",), ("gaussian",), ("fedprox", "fedavgm", "scaffold")),
]


@pytest.mark.parametrize(
    ("teachers", "distil", "posterior", "on"), others_slow(VARIANTS, VARIANTS[::4])
)
def test_every_variant_keeps_the_contract(teachers, distil, posterior, on):
    data = toys.blobs((3, 6, 2, 5))
    method = fedbe.build(
        toys.net(),
        server_data=data.x[-16:],
        teachers=teachers,
        distil=distil,
        posterior=posterior,
        on=on,
        samples=3,
        epochs=1,
        **QUICK,
    )
    begun, second = federate(method, data, 2, participation=fixed(3))
    # The last bit again, taken up again; one by one up to rounding; a NaN client for nobody.
    (again,) = federate(method, data, 2, participation=fixed(3), resume_from=begun)
    toys.assert_same_round(again, second)
    *_, alone = federate(method, data, 2, participation=fixed(3), chunk_size=1)
    toys.assert_same_round(alone, second, rtol=1e-8, atol=1e-9)
    ids = torch.arange(4)
    spoilt = run_round(toys.poisoned(method, 1), data, begun, ids, ids)
    clean = run_round(method, data, begun, ids, torch.tensor([0, 2, 3]))
    toys.assert_same(spoilt.server, clean.server)
    for view in method.views:
        found = evaluate(method, data, second, model=view).values["nll"]
        assert bool(found.isfinite().all())


def test_a_guide_with_spread_is_taught_by_its_means(tiny):
    method = made(guide=guides.mean_field, num_particles=2)
    state = last(method, tiny, 1)
    assert set(held(state.server)) == set(NET.shapes)
    plain = fedavg.build(NET, guide=guides.mean_field, num_particles=2, batch=2)
    other = last(plain, tiny, 1)
    for n, value in role("spread", other.server).items():
        close(state.server[f"spread/{n}"], value)


def test_any_pyro_program_may_be_the_posterior(tiny):
    """One that cannot run for several draws at once: it branches, loops and returns its model."""

    def fit(models: Tensors, size: torch.Tensor):
        def program() -> Tensors:
            along = pyro.sample("along", pyro.distributions.Beta(2.0, 2.0))
            pair = (
                (0, 1) if float(pyro.sample("coin", pyro.distributions.Bernoulli(0.5))) else (1, 2)
            )
            return {n: v[pair[0]].lerp(v[pair[1]], along.to(v)) for n, v in models.items()}

        return program

    state = last(made(teachers="S", posterior=fit, samples=8), tiny, 1)
    sent, drawn = (
        torch.cat([v.flatten(1) for v in part.values()], 1)
        for part in (role("w", state.message), held(state.server))
    )
    pairs = set()
    for one in drawn:
        share = torch.linalg.lstsq(sent.T, one[:, None]).solution[:, 0]
        close(sent.T @ share, one, 1e-9)
        close(share.sum(), 1.0, 1e-9)
        assert float(share[(share.abs() < 1e-9).nonzero().flatten()[0]].abs()) < 1e-9
        pairs |= {tuple((share.abs() > 1e-9).tolist())}
    assert pairs == {(True, True, False), (False, True, True)}
    run = pyrofl.fit(made(teachers="S", posterior=fit), tiny, 1, progress=False)
    assert run.posterior(5)["head.bias"].shape[0] == 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda models: {"head.bias": models["head.bias"][0]},
            "posterior gives no site fc1.weight",
        ),
        (
            lambda models: {n: v[:2] if n == "head.bias" else v[0] for n, v in models.items()},
            r"posterior gives head.bias of shape \[2, 3\]; expected \[3\]",
        ),
    ],
)
def test_a_posterior_of_other_parameters_is_refused(tiny, change, told):
    method = made(teachers="S", posterior=lambda models, size: lambda: change(models))
    with pytest.raises(ValueError, match=told):
        last(method, tiny, 1)


def agreeing(weights: Tensors, teachers: Tensors) -> float:
    """Return on which share of the rows a network says what the teachers' mean does."""
    target = predictions(NET, teachers, X).mean(0).argmax(-1)
    return float((NET.apply(weights, X).argmax(-1) == target).double().mean())


def test_agreement_with_the_teachers_is_told_of_every_round(tiny):
    run = pyrofl.fit(made(), tiny, 3, progress=False)
    server = run.state.server
    after = agreeing(student(server), held(server))
    before = agreeing({n: v[0] for n, v in held(server).items()}, held(server))  # the average
    told = run.rounds.iloc[-1]
    assert told["agreement"] == pytest.approx(after)
    assert told["agreement_lost"] == pytest.approx(before - after)
    wild = pyrofl.fit(made(distil_lr=30.0, distil_lr_end=30.0), tiny, 1, progress=False)
    assert any("the student agrees with its teachers on fewer" in note for note in wild.warnings)
    assert "agreement" not in pyrofl.fit(made(distil="none"), tiny, 1, progress=False).rounds


def test_probabilities_are_squared_for_vanilla_distillation_alone(tiny):
    for teachers, as_usual in (("C", True), ("AC", False), ("SAC", False)):
        one, same, other = (
            student(last(made(teachers=teachers, sharpen=sharpen), tiny, 1).server)
            for sharpen in (None, as_usual, not as_usual)
        )
        toys.assert_same(one, same)
        assert not torch.equal(one["head.bias"], other["head.bias"])


def test_start_of_swa_and_weight_decay_are_settings(tiny):
    # Collected from the last cycle end on, SWA is its iterate: SGD that stops there.
    steps = {"distil_lr": 0.05, "distil_lr_end": 0.05}  # 6 of them, a cycle of 2
    late = student(last(made(swa_start=0.9, **steps), tiny, 1).server)
    plain = student(last(made(distil="sgd", **steps), tiny, 1).server)
    toys.assert_same(late, plain, terms=TRAINED)
    none = student(last(made(distil_epochs=0), tiny, 1).server)
    pulled = last(made(distil_weight_decay=0.5, distil="sgd", distil_epochs=50), tiny, 1)
    size = [
        sum(float(v.square().sum()) for v in w.values()) for w in (student(pulled.server), none)
    ]
    assert size[0] < 0.5 * size[1]


def test_ones_own_method_can_be_distilled(tiny):
    own = fedavg.build(NET, prior=priors.fixed(), batch=2)
    method = fedbe.with_distillation(own, NET, X, distil_epochs=1, samples=2)
    state = last(method, tiny, 1)
    assert len(held(state.server)["head.bias"]) == 6
    plain = last(own, tiny, 1)
    assert not torch.equal(plain.server["w/head.bias"], state.server["w/head.bias"])
    assert torch.equal(plain.message["w/head.bias"], state.message["w/head.bias"])


def test_the_rate_of_the_clients_falls_with_the_rounds(tiny):
    for done, lr in ((None, 0.01), (0.2, 0.01), (0.3, 0.001), (0.9, 0.0001)):
        one = last(made(elapsed=done, decay=True), tiny, 1)
        other = last(fedavg.build(NET, lr=lr, batch=2), tiny, 1)
        for n, value in other.message.items():
            close(one.message[n], value)


def test_the_unlabeled_rows_may_be_of_another_type(tiny):
    one, other = (last(fedbe.build(NET, server_data=x, **QUICK), tiny, 1) for x in (X, X.float()))
    for n, value in one.server.items():
        close(other.server[n], value, 1e-5)


# The server's posterior


def alike(found: object, expected: Tensors) -> None:
    for n, v in expected.items():
        np.testing.assert_allclose(found[n], v, atol=1e-9)  # type: ignore[index]


def test_normal_draws_are_of_the_servers_posterior(tiny):
    run = pyrofl.fit(made(), tiny, 2, progress=False)
    found = run.to_arviz(2000, {n: NET.dims(n) for n in NET.shapes})
    posterior = found["posterior"]
    assert found.attrs["model"] == "ensemble"
    mean, sd = mean_and_sd(role("w", run.state.message), run.state.reporters.size)
    for n, value in mean.items():
        assert posterior[n].dims == ("chain", "draw", *NET.dims(n))
        differ = sd[n].numpy() > 1e-9  # clients agree on what leads to a unit that is dead
        assert differ.any()
        off = ((posterior[n].values[0] - value.numpy()) / sd[n].numpy())[:, differ]
        assert abs(off.mean(0)).max() < 5 / math.sqrt(2000)
        assert abs(off.std(0) - 1).max() < 5 / math.sqrt(2 * 2000)
    student = run.to_arviz(7, model="global")["posterior"]
    for n in NET.shapes:
        assert student[n].dims[:2] == ("chain", "draw")
        assert "client" not in student[n].dims
        np.testing.assert_array_equal(student[n].values[0, 3], run.state.server[f"w/{n}"])
        assert float(student[n].std("draw").max()) < 1e-15


def test_mixtures_have_the_shares_of_the_clients_that_reported(tiny):
    method = made(posterior="dirichlet", teachers="S")
    run = pyrofl.fit(method, tiny, 1, participation=lambda g, j: torch.tensor([2, 0]))
    sent, size = role("w", run.state.message), run.state.reporters.size
    assert run.state.reporters.ids.tolist() in ([2, 0], [0, 2])
    order = run.state.reporters.ids.argsort()
    posterior = run.to_arviz(6)["posterior"]
    gamma = posterior["gamma"]
    assert gamma.dims == ("chain", "draw", "client")
    assert (gamma.sel(client="client 1") == 0).all()
    np.testing.assert_allclose(gamma.sum("client"), 1)
    weight = torch.tensor(gamma.values[0][:, [0, 2]]) * size[order]
    share = weight / weight.sum(1, keepdim=True)
    for n, v in sent.items():
        expected = torch.tensordot(share, v[order], 1)
        np.testing.assert_allclose(posterior[n].values[0], expected, atol=1e-9)
    one = run.posterior(6, ids=torch.tensor([2]))
    np.testing.assert_array_equal(one["gamma"][:, 0], gamma.values[0, :, 2])
    np.testing.assert_array_equal(one["head.bias"][:, 0], posterior["head.bias"].values[0])


@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet"])
def test_rows_are_looked_at_in_draws_of_the_servers_posterior(tiny, posterior):
    run = pyrofl.fit(made(posterior=posterior), replace(tiny, held_out=1), 1, progress=False)
    found = run.to_arviz(4, groups="all", ids=torch.arange(3))
    drawn = found["posterior"]
    for s in range(4):
        weights = {n: torch.tensor(drawn[n].values[0, s]) for n in NET.shapes}
        log_p = NET.apply(weights, tiny.x).log_softmax(-1).gather(1, tiny.y[:, None])[:, 0]
        np.testing.assert_allclose(found["log_likelihood"]["y"][0, s], log_p, atol=1e-9)
    if posterior == "dirichlet":
        assert (drawn["gamma"].sel(client="client 2") == 0).all()
    alike(run.to_arviz(4)["posterior"], {n: drawn[n] for n in NET.shapes})
    assert not {"log_p", "log_q"} & set(found.get("sample_stats", ()))
    with pytest.raises(
        ValueError, match="adaptation is 'train'; only 'none' is valid, as the posterior"
    ):
        run.to_arviz(4, adaptation="train")


def test_before_the_first_round_the_servers_posterior_is_the_start(tiny):
    run = pyrofl.fit(made(), tiny, 0, progress=False)
    alike(run.to_arviz(2)["posterior"].isel(chain=0, draw=1), role("w", run.state.server))


@pytest.mark.slow
def test_the_defaults_are_not_below_fedavg_on_digits():
    net, gaps = build("mlp:50", (64,), 10), []
    for seed in range(5):
        data = split(load("digits"), "slices:5", 20, seed=seed, server_data=0.2)
        methods = fedavg.build(net), fedbe.build(net, server_data=data.server_data)
        runs = [pyrofl.fit(one, data, 20, seed=seed, progress=False) for one in methods]
        plain, taught = (run.evaluate(model="global").mean("accuracy") for run in runs)
        gaps.append(taught - plain)
    gap = torch.tensor(gaps)
    assert gap.mean() > -gap.std() / len(gap) ** 0.5  # one standard error over seeds
