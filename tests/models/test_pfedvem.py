"""pFedVEM on conjugate clients, where every step of variational EM can be written down."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import log, pi

import pytest
import torch
import toys
from checks import close
from hypothesis import given, settings
from hypothesis import strategies as st
from promises import Promises
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from toys import last

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.data.loaders.conjugate import ConjugateTask, conjugate, gaussian_means
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.state import client_inputs
from pyrofl.models import guides, likelihoods, pfedvem
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors, generator, role, spread_out, sum_per_client

PROMISES = {
    "pfedvem": Promises(
        random=True,
        sites=toys.HEAD_AXES,
        statistics={"tau": (), "deviation": ()},
        message=(toys.ALL + 1, toys.ALL),
        sent=frozenset({"tau"}),
    )
}

# Two clients in the plane, worked by hand: tau per client and the server's head, each round.
TRACE = [
    ((1.0, 1.0), (0.333333, 0.8)),
    ((1.410658, 1.737452), (0.380251, 1.051517)),
    ((1.633912, 2.601008), (0.370331, 1.181235)),
]


def inverse_softplus(value: Tensor) -> Tensor:
    return value + torch.log(-torch.expm1(-value))


def gaussian(d: int, **options: object) -> Method:
    """Build pFedVEM for y = x'w + Normal(0, 1), with w personal and Bayesian throughout."""
    options = {"num_particles": 2 * d} | options
    return pfedvem.build(build("linear", (d,), 1), likelihood=likelihoods.normal(), **options)


def solved(method: Method, task: ConjugateTask) -> Method:
    """Put the exact optimum over independent normals in the place of gradient steps."""

    def e_step(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        mean, covariance = task.posterior(received["loc/w"], local["tau"])
        inverse = torch.linalg.inv(covariance).diagonal(dim1=1, dim2=2)
        return {"mu/w": mean, "pi/w": inverse_softplus(inverse.rsqrt())}

    confide, *_, settle = method.phases
    return replace(method, phases=(confide, Phase((e_step,)), settle))


def head(*values: float) -> Tensors:
    return {"loc/w": torch.tensor(values, dtype=torch.float64)}


def bound(method: Method, data: Federation, received: Tensors, local: Tensors) -> Tensor:
    """Return the exact ELBO of every client."""
    clients = torch.arange(data.clients)
    with toys.SigmaPoints():
        return -elbo(2 * data.x.shape[1])(
            method.model, method.guide, received, local, data.batch(clients)
        )


# The steps of one round


def test_three_rounds_follow_the_closed_form():
    task = gaussian_means(means=[[1.0, 0.0], [0.0, 2.0]], variances=[0.5, 0.25])
    method = solved(gaussian(2), task)
    rounds = federate(method, task.federation, 3, server_state=head(0.0, 0.0), check=False)
    for (tau, center), state in zip(TRACE, rounds, strict=True):
        close(state.message["tau"], tau, 1e-6)
        close(state.server["loc/w"], center, 1e-6)
        if state.number == 1:
            close(state.message["mean/w"], [[0.666667, 0.0], [0.0, 1.6]], 1e-6)
            variance = softplus(state.client_states["pi/w"]).square()
            close(variance, [[0.333333] * 2, [0.2] * 2], 1e-6)
        if state.number == 2:
            close(state.message["mean/w"], [[0.724265, 0.330882], [0.100942, 1.636608]], 1e-6)


@pytest.fixture
def regression() -> ConjugateTask:
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]).double()
    y = torch.tensor([1.0, -1.0, 0.5]).double()
    return conjugate([x / 0.5**0.5], [y / 0.5**0.5])


def test_the_elbo_is_largest_at_the_mean_field_posterior(regression):
    method, data = gaussian(2), regression.federation
    received = {"loc/w": torch.tensor([[0.2, -0.1]]).double()}
    tau = torch.tensor([1 / 0.7]).double()
    mu, spread = (torch.zeros(1, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ascent = torch.optim.LBFGS([mu, spread], max_iter=200, tolerance_change=0)

    def step() -> Tensor:
        ascent.zero_grad()
        loss = -bound(method, data, received, {"mu/w": mu, "pi/w": spread, "tau": tau}).sum()
        loss.backward()
        return loss

    ascent.step(step)
    mean, covariance = regression.posterior(received["loc/w"], tau)
    precision = torch.linalg.inv(covariance)[0]
    close(mean[0], [0.7553, -0.4072], 5e-5)
    close(covariance[0], [[0.1969, -0.0345], [-0.0345, 0.0935]], 5e-5)
    close(mu, mean, 1e-7)
    close(softplus(spread[0]).square(), 1 / precision.diagonal(), 1e-7)

    evidence = regression.evidence(received["loc/w"], tau)
    assert float(evidence - 1.5 * log(0.5)) == pytest.approx(-3.7961, abs=5e-5)
    gap = 0.5 * (precision.diagonal().log().sum() - torch.logdet(precision))
    assert float(gap) == pytest.approx(0.0333, abs=5e-5)
    found = bound(method, data, received, {"mu/w": mu, "pi/w": spread, "tau": tau})
    close(found, evidence - gap, 1e-10)


@pytest.mark.filterwarnings("ignore:.*belongs? to more than one client")
def test_the_head_phase_climbs_to_the_posterior(regression):
    # Many equal clients differ in their noise alone.
    clients = 200
    data = regression.federation
    data = Federation(data.x, data.y, data.train * clients, data.test * clients)
    method = gaussian(2, head_epochs=500, num_particles=20, lr_head=0.02, momentum=0.0)
    state = last(method, data, 1, server_state=head(0.2, -0.1))
    ends = torch.cat(
        [state.client_states["mu/w"], softplus(state.client_states["pi/w"]).square()], 1
    )
    error = ends.std(0) / clients**0.5
    mean, covariance = regression.posterior(torch.tensor([0.2, -0.1]), torch.ones(1))
    exact = torch.cat([mean[0], 1 / torch.linalg.inv(covariance)[0].diagonal()])
    assert (error < 0.005).all()
    assert ((ends.mean(0) - exact).abs() < 4 * error).all()


def test_the_pull_towards_the_server_is_tau_times_the_distance():
    task = gaussian_means([[1.0, 0.0, 2.0], [0.0, 2.0, 1.0]], [0.5, 0.25])
    method, batch = gaussian(3), task.federation.batch(torch.arange(2))
    rng = generator(1)
    received = {"loc/w": torch.randn(2, 3, generator=rng, dtype=torch.float64)}
    tau = torch.tensor([0.7, 3.0]).double()
    mu = torch.randn(2, 3, generator=rng, dtype=torch.float64).requires_grad_()
    local = {"mu/w": mu, "pi/w": torch.zeros(2, 3).double(), "tau": tau}
    with toys.SigmaPoints():
        with_kl, without = (
            elbo(6, kl=kl)(method.model, method.guide, received, local, batch).sum()
            for kl in (1, 0)
        )
    (gradient,) = torch.autograd.grad(with_kl - without, mu)
    close(gradient, tau[:, None] * (mu.detach() - received["loc/w"]))


# Variational EM as a whole


def random_task() -> ConjugateTask:
    # Far enough apart that no client's prior variance collapses.
    rng = generator(4)
    radius = 1 + torch.rand(40, generator=rng).double()
    means = radius[:, None] * torch.randn(40, 12, generator=rng).double()
    return gaussian_means(means, 0.05 + 0.15 * torch.rand(40, generator=rng).double())


def test_no_step_of_em_lowers_the_bound_and_the_e_step_makes_it_the_evidence():
    task = random_task()
    data, cohort = task.federation, task.federation.cohort(torch.arange(40))
    method = solved(gaussian(12), task)
    states = list(federate(method, data, 12, server_state={"loc/w": torch.ones(12)}, check=False))
    bounds = []
    for before, after in pairwise(states):
        received = method.download(before.server, cohort)
        old, new = (
            {n: state.client_states[n] for n in ("mu/w", "pi/w")} | {"tau": after.message["tau"]}
            for state in (before, after)
        )
        reached = bound(method, data, received, new)
        close(reached, task.evidence(before.server["loc/w"], after.message["tau"]), 1e-9)
        following = method.download(after.server, cohort)
        bounds += [
            bound(method, data, received, old).sum(),  # tau has moved
            reached.sum(),  # so has q
            bound(method, data, following, new).sum(),  # so has the server's head
        ]
    steps = torch.stack(bounds).diff()
    assert (steps > -1e-9).all()
    assert steps.sum() > 1


def test_em_ends_at_the_marginal_precision_weighting():
    task = random_task()
    state = last(
        solved(gaussian(12), task),
        task.federation,
        150,
        server_state=head(*[0.0] * 12),
        check=False,
    )
    w, mean, v = state.server["loc/w"], task.mean, 1 / task.precision[:, 0, 0]
    spread = (mean - w).square().sum(1) / 12
    assert (spread > v).all()  # as the task was made for
    close(w, (mean / spread[:, None]).sum(0) / (1 / spread).sum())
    tau = state.message["tau"]
    close(1 / tau, spread - v)
    close(
        state.message["mean/w"],
        (mean / v[:, None] + tau[:, None] * w) / (1 / v + tau)[:, None],
    )
    close(
        softplus(state.client_states["pi/w"]).square(), (1 / (1 / v + tau))[:, None].expand(40, 12)
    )


def test_the_corners_of_a_tetrahedron_agree_on_its_center():
    corners = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]).double()
    task = gaussian_means(corners, [0.25] * 4)
    state = last(
        solved(gaussian(3), task), task.federation, 200, server_state=head(0.3, 0.1, 0), check=False
    )
    close(state.server["loc/w"], [0, 0, 0], 1e-9)
    close(state.message["tau"], [4 / 3] * 4, 1e-9)
    close(state.message["mean/w"], 0.75 * corners, 1e-9)
    close(softplus(state.client_states["pi/w"]).square(), torch.full((4, 3), 3 / 16), 1e-9)
    evidence = task.evidence(state.server["loc/w"], state.message["tau"]).sum()
    # The rows are whitened: as measured each has a density smaller by log sd.
    measured = float(evidence) - 4 * 3 / 2 * log(0.25)
    assert measured == pytest.approx(-17.027262, abs=1e-6)
    assert measured == pytest.approx(-6 * (log(2 * pi) + 1), abs=1e-9)


def test_the_confidence_of_one_of_two_clients_grows_without_limit():
    pair = gaussian_means([[0.0], [2.0]], [1.0, 0.25])
    method = solved(gaussian(1, lr_head=1e-12), pair)
    cohort, batch = (f(torch.arange(2)) for f in (pair.federation.cohort, pair.federation.batch))
    moves = [update for phase in method.phases for update in phase.updates]
    server, local, found = head(0.0), {}, {}
    for number in range(1, 10_001):
        received = spread_out(server, 2)
        local = local or method.init_client(received, cohort, generator(0))
        for move in moves:
            local = local | move(received, local, batch)
        message = method.upload(received, local)
        server = method.aggregate(server, message, cohort, generator(0))
        found[number] = float(message["tau"][1])
    assert [round(found[n]) for n in (12, 100, 10_000)] == [28, 352, 37_104]
    state = last(method, pair.federation, 12, server_state=head(0.0), check=False)
    assert float(state.message["tau"][1]) == pytest.approx(found[12])


# The server


def merged(mean: list[float], tau: Tensor, variance: float, m_step_iters: int) -> float:
    """Return the head [1] that the server makes of the clients' means and confidences."""
    message = {
        "mean/w": torch.tensor(mean)[:, None].double(),
        "tau": tau,
        "variance": torch.full((3,), variance).double(),
    }
    method = gaussian(1, m_step_iters=m_step_iters)
    server = method.aggregate(
        head(0.0), message, Cohort(torch.arange(3), torch.ones(3)), generator(0)
    )
    return float(server["loc/w"])


@pytest.mark.parametrize(("start", "end"), [(1.3, 0.0125), (3.5, 3.9483)])
def test_alternating_at_the_server_climbs_to_the_maximum_nearby(start, end):
    mean = torch.tensor([0.0, 0.0, 4.0]).double()
    tau = pfedvem.precision(torch.full((3,), 0.1).double(), (mean - start).square(), 1)
    path = [start, *(merged([0.0, 0.0, 4.0], tau, 0.1, n) for n in (*range(1, 15), 200))]
    assert path[-1] == pytest.approx(end, abs=5e-5)
    objective = [float((0.1 + (mean - w).square()).log().sum()) for w in path]
    assert all(b <= a + 1e-12 for a, b in pairwise(objective))


def test_without_variance_alternating_ends_at_a_client_and_stays():
    for n in (100, 101):
        assert merged([0.0, 1.0, 5.0], torch.ones(3).double(), 0.0, n) == pytest.approx(1, abs=1e-6)


def test_equal_confidences_give_the_plain_mean():
    found = merged([0.0, 2.0, 7.0], torch.full((3,), 4.2).double(), 0.3, 1)
    assert found == pytest.approx(3)
    same = pfedvem.precision(torch.full((3,), 0.3), torch.tensor([0.0, 4, 9]), 1, "uncertainty")
    assert merged([0.0, 2.0, 7.0], same.double(), 0.3, 1) == pytest.approx(3)


def test_a_precise_client_outweighs_a_vague_one():
    vague, precise = pfedvem.precision(torch.tensor([4.0, 1.0]), torch.tensor([1.0, 1.0]), d=2)
    assert precise == pytest.approx(2.5 * vague)


@given(
    variance=st.floats(0, 1e3),
    deviation=st.floats(0, 1e3),
    more=st.floats(1e-3, 1e3),
    d=st.integers(1, 1000),
)
@settings(deadline=None, max_examples=50)
def test_confidence_is_positive_finite_and_falls_with_spread(variance, deviation, more, d):
    v, g = torch.tensor([variance] * 3).double(), torch.tensor([deviation] * 3).double()
    step = torch.tensor([0, more, 0]).double(), torch.tensor([0, 0, more]).double()
    base, vaguer, further = pfedvem.precision(v + step[0], g + step[1], d).tolist()
    assert 0 < vaguer <= base <= pfedvem.MAX_CONFIDENCE
    assert further == pytest.approx(vaguer)
    only = pfedvem.precision(v + step[0], g + step[1], d, "uncertainty").tolist()
    assert only[0] == only[2] >= only[1]
    only = pfedvem.precision(v + step[0], g + step[1], d, "deviation").tolist()
    assert only[0] == only[1] >= only[2]


# Variants


@pytest.fixture
def task() -> ConjugateTask:
    return gaussian_means(means=[[1.0, 0.0], [0.0, 2.0]], variances=[0.5, 0.25])


def test_fresh_tau_reports_the_confidence_after_training(task):
    method = solved(gaussian(2, confidence_after_training=True), task)
    state = last(method, task.federation, 1, server_state=head(0.0, 0.0), check=False)
    # d / (d Sigma + |mu|^2), with the q of round one of the trace above.
    tau = torch.tensor([2 / (2 / 3 + 4 / 9), 2 / (2 / 5 + 1.6**2)], dtype=torch.float64)
    close(state.message["tau"], tau)
    mean = torch.tensor([[2 / 3, 0], [0, 1.6]], dtype=torch.float64)
    close(state.server["loc/w"], (tau[:, None] * mean).sum(0) / tau.sum())


def test_more_m_steps_alternate_at_the_server(task):
    once, twice = (
        last(
            solved(gaussian(2, m_step_iters=n), task),
            task.federation,
            1,
            server_state=head(0, 0),
            check=False,
        )
        for n in (1, 2)
    )
    mean, variance = twice.message["mean/w"], twice.message["variance"]
    close(variance, [2 / 3, 2 / 5])
    tau = 2 / (variance + (mean - once.server["loc/w"]).square().sum(1))
    close(twice.server["loc/w"], (tau[:, None] * mean).sum(0) / tau.sum())
    assert "variance" not in once.message


def test_beta_keeps_a_part_of_the_old_server(tiny):
    net = build("mlp:5", (4,), 3)
    start = pfedvem.build(net).init(generator(0), 3)
    half, new = (
        last(pfedvem.build(net, beta=beta), tiny, 1, server_state=start).server for beta in (0.5, 0)
    )
    for name, value in half.items():
        close(value, 0.5 * start[name] + 0.5 * new[name])


def test_ablations_look_at_one_term_each(task):
    full, *ablations = (
        list(
            federate(
                solved(gaussian(2, confidence=which, init_scale=0.5), task),
                task.federation,
                2,
                server_state=head(0.3, 0.1),
                check=False,
            )
        )
        for which in ("full", "uncertainty", "deviation")
    )
    before = full[0]
    variance = softplus(before.client_states["pi/w"]).square().sum(1)
    deviation = (before.client_states["mu/w"] - before.server["loc/w"]).square().sum(1)
    assert all(
        torch.equal(rounds[0].server["loc/w"], before.server["loc/w"]) for rounds in ablations
    )
    for rounds, term in zip(ablations, (variance, deviation), strict=True):
        # In round one the means are the server's: each ablation starts at 1 / scale^2.
        close(rounds[0].message["tau"], [4.0, 4.0])
        close(rounds[1].message["tau"], 2 / term)


def test_a_client_that_made_the_server_keeps_its_confidence(task):
    # It reported alone, so its deviation is zero, about which the ablation cannot divide.
    method = solved(gaussian(2, confidence="deviation"), task)
    alone = federate(
        method,
        task.federation,
        3,
        server_state=head(0.0, 0.0),
        check=False,
        participation=lambda *_: torch.tensor([0]),
    )
    taus = [float(state.client_states["tau"][0]) for state in alone]
    assert taus == [1.0, 1.0, 1.0]


@pytest.mark.filterwarnings("ignore:.*belongs? to more than one client")
@pytest.mark.parametrize("options", [{"confidence": "deviation"}, {"guide": guides.delta}])
def test_steps_can_follow_the_pull_of_clients_that_agree(tiny, options):
    net = build("mlp:5", (4,), 3)
    rows = (torch.arange(12), torch.arange(11), torch.arange(1, 12))
    alike = Federation(tiny.x, tiny.y, rows, rows)
    method = pfedvem.build(net, lr_head=0.02, lr_base=0.01, base_epochs=2, batch=None, **options)
    states = list(federate(method, alike, 15))
    taus = torch.stack([state.message["tau"] for state in states])
    assert taus.max() == 1 / 0.02
    assert not any(state.rejected for state in states)
    assert (states[-1].loss["base/*"] < states[0].loss["base/*"]).all()


def test_own_base_decides_which_base_the_personal_model_has(tiny):
    net = build("mlp:5", (4,), 3)
    for own in (True, False):
        method = pfedvem.build(net, personal_base=own, lr_base=0.1)
        state = last(method, tiny, 2)
        cohort = tiny.cohort(torch.arange(3))
        received, private = client_inputs(method, tiny, state, cohort, seed=0)
        personal = method.views["personal"](received, private | received)
        common = method.views["global"](received, private | received)
        trained = state.message if own else received
        for n in role("base", state.server):
            assert torch.equal(personal[f"base/{n}"], trained[f"base/{n}"])
            assert torch.equal(common[f"base/{n}"], received[f"base/{n}"])
        for n in role("loc", state.server):
            assert torch.equal(personal[f"mu/{n}"], state.message[f"mean/{n}"])
            assert torch.equal(common[f"mu/{n}"], received[f"loc/{n}"])


def test_the_whole_network_can_be_bayesian(tiny):
    net = build("mlp:5", (4,), 3)
    method = pfedvem.build(net, head="*")
    state = last(method, tiny, 2)
    assert set(state.server) == {f"loc/{n}" for n in net.shapes}
    assert set(state.message) == {f"mean/{n}" for n in net.shapes} | {"tau"}
    d = sum(shape.numel() for shape in net.shapes.values())
    first = pfedvem.build(net, head="*").init(generator(0), 3)
    one = next(federate(method, tiny, 1, server_state=first))
    gap = {n: one.message[f"mean/{n}"] - one.server[f"loc/{n}"] for n in net.shapes}
    spread = sum_per_client({n: v.square() for n, v in gap.items()}) + sum_per_client(
        {n: softplus(one.client_states[f"pi/{n}"]).square() for n in net.shapes}
    )
    two = next(federate(method, tiny, 2, resume_from=one))
    close(two.message["tau"], d / spread)


def test_draws_average_the_noise_of_the_gradient():
    clients = 400
    task = gaussian_means([[1.0, 0.0]] * clients, [0.5] * clients)

    def scatter(draws: int) -> Tensor:
        method = gaussian(2, num_particles=draws, head_epochs=1)
        return last(method, task.federation, 1).message["mean/w"].std(0)

    # The logarithm of a standard deviation has a standard error of 1 / sqrt(2 clients).
    ratio = scatter(1) / scatter(16)
    assert ((ratio / 4).log().abs() < 4 / clients**0.5).all()


def test_a_guide_without_variance_measures_deviation_alone(task):
    method = gaussian(2, guide=guides.delta, head_epochs=3, lr_head=0.05)
    one, two = federate(method, task.federation, 2, server_state=head(0.0, 0.0), check=False)
    close(one.message["tau"], [1.0, 1.0])
    deviation = (one.message["mean/w"] - one.server["loc/w"]).square().sum(1)
    close(two.message["tau"], 2 / deviation, 1e-9)
    assert set(one.client_states) == {"mu/w", "tau"}


def test_statistics_are_the_confidence_and_the_deviation_per_parameter(task):
    method = gaussian(2)
    state = last(method, task.federation, 2, server_state=head(0.5, 0.0))
    cohort = task.federation.cohort(torch.arange(2))
    received, private = client_inputs(method, task.federation, state, cohort, seed=0)
    batch = task.federation.batch(cohort.ids)
    found = method.metadata.statistics(received, private | received, batch)
    close(found["tau"], state.message["tau"])
    deviation = (state.message["mean/w"] - state.server["loc/w"]).square().mean(1)
    close(found["deviation"], deviation)


class Plain(nn.Module):
    """A network that cannot be cut in two, as it is no `Sequential`."""

    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        self.fc1, self.head = chain.fc1, chain.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc1(x)))


@pytest.mark.parametrize("likelihood", ["normal", "normal_known_sd", "binomial"])
def test_features_of_the_frozen_base_change_nothing(likelihood):
    rng = generator(2)
    x = torch.rand(12, 4, generator=rng, dtype=torch.float64).clamp(min=0.1)
    x[:, 0] = torch.arange(12) % 4 + 2  # standard error, or trials
    y = torch.arange(12).double() % 3
    rows = torch.arange(12).split([3, 5, 4])
    data = Federation(x, y, rows, rows)
    chain = build("mlp:6", (4,), 1)
    whole = Network(Plain(chain.module))
    assert chain.split(chain.head)
    assert whole.split(whole.head) is None
    cut, recomputed = (
        last(
            pfedvem.build(
                net,
                likelihood=likelihoods.named(likelihood),
                batch=2,
                lr_head=0.01,
                lr_base=0.01,
            ),
            data,
            2,
        )
        for net in (chain, whole)
    )
    assert set(cut.client_states) == set(recomputed.client_states)
    for name, value in (cut.server | cut.client_states).items():
        close(value, (recomputed.server | recomputed.client_states)[name])


@pytest.mark.parametrize(
    ("spec", "classes", "up", "down"),
    [("cnn-pfedvem", 10, 121_183, 121_182), ("cnn-pfedvem-100", 20, 620_937, 620_936)],
)
def test_a_client_sends_one_scalar_more_than_it_receives(spec, classes, up, down):
    x, rows = torch.zeros(2, 3, 32, 32), (torch.tensor([0]), torch.tensor([1]))
    data = Federation(x, torch.tensor([0, 1]), rows, rows, classes=tuple(map(str, range(classes))))
    method = pfedvem.build(
        build(spec, (3, 32, 32), classes), num_particles=1, head_epochs=1, base_epochs=1
    )
    state = next(federate(method, data, 1))
    assert (state.bytes_up.tolist(), state.bytes_down.tolist()) == ([4 * up] * 2, [4 * down] * 2)


# Against plain torch


def test_without_prior_or_variance_it_is_fedrep(tiny):
    net = build("mlp:5", (4,), 3)
    options = {"head_epochs": 4, "base_epochs": 3, "lr_head": 0.02, "lr_base": 0.3}
    method = pfedvem.build(net, guide=guides.delta, batch=None, **options)
    settle = method.phases[-1]

    def no_confidence(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        return {"tau": torch.full_like(local["tau"], 1e-30)}

    method = replace(
        method,
        phases=(
            Phase((no_confidence, *method.phases[0].updates[1:])),
            *method.phases[1:-1],
            settle,
        ),
    )
    start = method.init(generator(7), 3)
    state = last(method, tiny, 2, server_state=start)

    shared = {n: v.double() for n, v in role("base", start).items()}
    heads = [{n: v.double() for n, v in role("loc", start).items()} for _ in range(3)]
    for _ in range(2):
        bases = []
        for j, rows in enumerate(tiny.train):
            x, y = tiny.x[rows], tiny.y[rows]
            base = shared
            heads[j] = descend(net, heads[j], base, x, y, 0.02, 4, "sum")
            bases.append(descend(net, base, heads[j], x, y, 0.3, 3, "mean"))
        shared = {
            n: sum(len(r) * b[n] for r, b in zip(tiny.train, bases, strict=True)) / 12
            for n in shared
        }
    for n, value in role("base", state.server).items():
        close(value, shared[n])
    for n, value in role("loc", state.server).items():
        close(value, torch.stack([h[n] for h in heads]).mean(0))
        close(state.client_states[f"mu/{n}"], torch.stack([h[n] for h in heads]))


def descend(
    net: Network,
    free: Tensors,
    frozen: Tensors,
    x: Tensor,
    y: Tensor,
    lr: float,
    steps: int,
    reduction: str,
) -> Tensors:
    params = {n: v.clone().requires_grad_() for n, v in free.items()}
    optimizer = torch.optim.SGD(params.values(), lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(net.apply(params | frozen, x), y, reduction=reduction).backward()
        optimizer.step()
    return {n: v.detach() for n, v in params.items()}
