"""FedPop: chains with the law they promise, and a population that maximizes the evidence."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor
from toys import last

from pyrofl.data import Federation
from pyrofl.data.loaders.conjugate import gaussian_means
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.models import fedpop, guides, likelihoods
from pyrofl.nets import build
from pyrofl.tensors import Tensors, role

PROMISES = {
    "fedpop": Promises(
        random=True,
        settings={"epochs": 2},
        sites=toys.HEAD_AXES,
        message=(toys.BASE + 2 * toys.HEAD, toys.BASE + 2 * toys.HEAD),
    )
}

# Scalar clients: estimates and their variance, and what maximizes the evidence of Normal(m, s2).
B, V = torch.tensor([-2, -0.5, 0.4, 3], dtype=torch.float64), 0.3
M, S2 = 0.225, 3.001875


def means(copies: int = 1) -> Federation:
    return gaussian_means(B.repeat(copies)[:, None], torch.full((4 * copies,), V)).federation


def chains(g: float, **options: object) -> Method:
    settings = {
        "head": "*",
        "likelihood": likelihoods.normal(),
        "batch": None,
        "lr_head": g,
        "memory": 0.0,
    }
    return fedpop.build(build("linear", (1,), 1), **(settings | options))  # type: ignore[arg-type]


def beta(m: float, s2: float) -> Tensors:
    both = {"loc/w": torch.tensor([m]), "log_scale/w": torch.tensor([s2]).log() / 2}
    return {n: v.double() for n, v in both.items()}


def found(server: Tensors) -> tuple[float, float]:
    return float(server["loc/w"]), float((2 * server["log_scale/w"]).exp())


def test_the_evidence_has_its_maximum_there():
    task = gaussian_means(B[:, None], torch.full_like(B, V))

    def evidence(at: Tensor) -> Tensor:
        return task.evidence(at[:1], (1 / at[1]).expand(4)).sum()

    at = torch.tensor([M, S2], dtype=torch.float64)
    close(torch.func.grad(evidence)(at), [0.0, 0.0])
    for near in (at + step for step in 0.1 * torch.cat([torch.eye(2), -torch.eye(2)])):
        assert evidence(near) < evidence(at)


def test_a_chain_has_the_law_of_langevin_steps():
    # An AR(1) of coefficient 1 - g P: its mean is exact, its variance 1 / (P (1 - g P / 2)).
    g, precision = 0.08, 1 / V + 1 / S2
    method = chains(g, burn_in=40, epochs=60)
    data = means(100)
    state = last(method, data, 1, server_state=beta(M, S2))
    mean = (B / V + M / S2) / precision
    sent = {n: role(n, state.message)["w"][:, 0].view(100, 4) for n in ("mean", "square")}
    variance = 1 / (precision * (1 - g * precision / 2))
    rho = 1 - g * precision
    error = (variance * (1 + rho) / (1 - rho) / 60 / 100) ** 0.5
    assert bool(((sent["mean"].mean(0) - mean).abs() < 4 * error).all())
    spread = (sent["square"] + 2 * (M - mean) * (sent["mean"] - M) + (M - mean) ** 2).mean()
    error = variance * (2 * (1 + rho**2) / (1 - rho**2) / 60 / 400) ** 0.5
    assert abs(float(spread) - variance) < 4 * error
    assert abs(variance - 1 / precision) > 8 * error


def test_long_chains_find_the_population():
    method, data = chains(0.03, burn_in=10, epochs=30, init_scale=0.5), means(50)
    *_, state = federate(method, data, 8)
    m, s2 = found(state.server)
    # Standard errors of 50 chains of 30 draws; steps of g inflate s2 by 0.01.
    assert m == pytest.approx(M, abs=4 * 0.027)
    assert s2 == pytest.approx(S2, abs=4 * 0.1)


def test_a_small_population_far_from_zero_is_found_in_float32():
    # Squares of 1,000 are exact to 0.06 in float32; the population's variance is 0.01.
    centers = 1000 + 0.1 * torch.linspace(-1, 1, 8)
    data = gaussian_means(centers[:, None].double(), torch.full((8,), 1e-4)).federation
    data = data.to(torch.float32)
    method = chains(1e-5, temperature=0.0, burn_in=100, epochs=20)
    start = {"loc/w": torch.tensor([1000.0]), "log_scale/w": torch.tensor([0.1]).log()}
    *_, state = federate(method, data, 4, server_state=start)
    m, s2 = found(state.server)
    assert m == pytest.approx(1000, abs=1e-3)
    assert s2 == pytest.approx(float(centers.var(correction=0)), rel=0.05)


def test_without_noise_chains_go_to_the_mode(quadratic):
    # The personal model of Ditto with lambda = 1 at the product of the posteriors.
    center = quadratic.pooled(torch.zeros(2), torch.zeros(2, 2))[0]
    close(center, (0.3895, 1.3263), 5e-5)
    method = fedpop.build(
        build("linear", (2,), 1),
        head="*",
        likelihood=likelihoods.normal(),
        temperature=0.0,
        batch=None,
        lr_head=0.4,
        memory=0.0,
        burn_in=200,
        epochs=1,
    )
    start = {"loc/w": center, "log_scale/w": torch.zeros(2, dtype=torch.float64)}
    state = last(method, quadratic.federation, 1, server_state=start)
    close(state.client_states["z/w"][0], (0.8779, 0.6632), 5e-5)
    mode = quadratic.posterior(center, torch.ones(2))[0]
    close(state.client_states["z/w"], mode, 1e-9)
    close(state.server["loc/w"], mode.mean(0), 1e-9)
    width = (2 * state.server["log_scale/w"]).exp()
    close(width, mode.var(0, correction=0), 1e-9)


def test_a_round_by_hand(tiny):
    net = build("mlp:5", (4,), 3)
    method = fedpop.build(net, temperature=0.0, burn_in=0, epochs=1, batch=None, lr_head=0.01)
    start = {n: v.double() for n, v in method.init(torch.Generator().manual_seed(0), 3).items()}
    state = last(method, tiny, 1, server_state=start)
    for j, rows in enumerate(tiny.train):
        w = {n: start[f"loc/{n}"].clone() for n in ("head.weight", "head.bias")}
        base = {n: v.clone() for n, v in role("base", start).items()}

        def loss(w: Tensors, base: Tensors, rows: Tensor = rows) -> Tensor:
            return torch.nn.functional.cross_entropy(
                net.apply(w | base, tiny.x[rows]), tiny.y[rows], reduction="sum"
            )

        # The prior's mean is where the chain starts, so its gradient there is zero.
        slope = torch.func.grad(loss)(w, base)
        w = {n: v - 0.01 * slope[n] / len(rows) for n, v in w.items()}
        slope = torch.func.grad(loss, 1)(w, base)
        for n, v in w.items():
            close(state.client_states[f"z/{n}"][j], v)
            close(state.message[f"square/{n}"][j], (v - start[f"loc/{n}"]).square())
        for n, v in base.items():
            close(state.message[f"base/{n}"][j], v - 0.01 * slope[n] / len(rows))


def test_the_base_counts_by_rows_and_heads_evenly(tiny):
    old, state = federate(fedpop.build(build("mlp:5", (4,), 3), batch=2), tiny, 2)
    share = torch.tensor([3, 5, 4], dtype=torch.float64) / 12
    for n, v in role("base", state.server).items():
        close(v, torch.tensordot(share, state.message[f"base/{n}"], 1))
    for n, v in role("loc", state.server).items():
        close(v, state.message[f"mean/{n}"].mean(0))
        change = v - old.server[f"loc/{n}"]
        variance = state.message[f"square/{n}"].mean(0) - change.square()
        close((2 * state.server[f"log_scale/{n}"]).exp(), variance)


def test_draws_of_earlier_rounds_count_less_and_less(tiny):
    net, usual = build("mlp:5", (4,), 3), {"batch": None, "epochs": 2}
    first, second = federate(fedpop.build(net, memory=0.5, **usual), tiny, 2)
    *_, alone = federate(fedpop.build(net, memory=0.0, **usual), tiny, 2, resume_from=first)
    for n, v in second.client_states.items():
        if n.startswith("average/"):
            mean, squares = (n.replace("average", part) for part in ("mean", "squares"))
            close(v, second.message[mean])
            close(v, (first.message[mean] + 2 * alone.message[mean]) / 3)
            apart = first.message[mean] - alone.message[mean]  # of the rounds' means, weights 1, 2
            both = 0.5 * first.client_states[squares] + alone.client_states[squares]
            close(second.client_states[squares], both + 2 / 3 * apart.square())
    close(second.client_states["draws"], [3.0, 3.0, 3.0])


def test_the_guide_has_the_moments_of_the_draws_and_the_global_model_those_of_the_population(tiny):
    method = fedpop.build(build("mlp:5", (4,), 3), batch=2)
    start = method.init(torch.Generator().manual_seed(0), 3)
    start = {n: v.double() for n, v in start.items()}
    state = last(method, tiny, 1, server_state=start)
    cohort = tiny.cohort(torch.arange(3))
    q = guides.mean_field(build("mlp:5", (4,), 3).select_params("head.*"))
    received, local = prepared(method, tiny, state, cohort, model="personal")
    assert not isinstance(local, list)
    mean, variance = q.moments(received, local, tiny.batch(cohort.ids))
    for n, v in mean.items():
        close(v, state.message[f"mean/{n}"])
        gap = state.message[f"square/{n}"] - (v - start[f"loc/{n}"]).square()
        close(variance[n], gap.clamp(min=1e-8))
    received, local = prepared(method, tiny, state, cohort, model="global")
    assert not isinstance(local, list)
    mean, variance = q.moments(received, local, tiny.batch(cohort.ids))
    for n, v in mean.items():
        close(v, state.server[f"loc/{n}"].expand_as(v))
        close(variance[n], (2 * state.server[f"log_scale/{n}"]).exp().expand_as(v))
