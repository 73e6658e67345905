"""pFedMB: branches that clients mix, from the gradient of alpha to pairs that find each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import Promises
from pyro.infer import Trace_ELBO
from torch import Size, Tensor, nn

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.inference.definition.averages import average
from pyrofl.inference.definition.elbo import elbo, with_rows
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState, client_inputs
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.training.phases import train
from pyrofl.models import fedavg, guides, pfedmb
from pyrofl.models.pfedmb import layers, merge_branches
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors, cut, generator, role, spread_out, under


def corners(name: str, shape: Size, received: Tensors, local: Tensors, data: Batch) -> Any:
    """Prefer the corners of the simplex a little less than all else."""
    return dist.Dirichlet(data.size.new_full(shape, 1.5)).to_event(1)


PROMISES = {
    "pfedmb": Promises(
        sites={"alpha": ("alpha_dim_0", "alpha_dim_1")},
        statistics={"alpha_entropy": (), "branches_kept": ()},
        message=(5 * toys.ALL + 2 * 5, 5 * toys.ALL),
        prior=corners,
    )
}

EVERYONE = torch.arange(12)


def built(**options: Any) -> Method:
    return pfedmb.build(toys.net(), **{"branches": 3, "epochs": 2, "lr": 0.05} | options)


def begun(method: Method, data: Federation) -> tuple[Tensors, Tensors]:
    """Return what all clients receive and hold before round one, alpha away from its start."""
    state = first(method, data, 0)
    received, private = client_inputs(method, data, state, data.cohort(EVERYONE[: data.clients]), 0)
    moved = {
        n: v + torch.randn(v.shape, generator=generator(8), dtype=v.dtype)
        for n, v in private.items()
    }
    return received, moved | received


# The model and its gradient


def test_the_gradient_of_the_logits_is_that_of_a_softmax(blobs):
    method = built()
    received, local = begun(method, blobs)
    batch, net = blobs.batch(EVERYONE), toys.net()
    free = {n: v.clone().requires_grad_() for n, v in local.items()}
    value = elbo()(method.model, method.guide, received, free, batch).sum()
    found, *of_branches = torch.autograd.grad(value, list(free.values()))

    alpha = local["a/alpha"].softmax(-1)
    w = {n: v.requires_grad_() for n, v in merge_branches(net, received, alpha).items()}
    plain = fedavg.build(net)
    value = elbo()(plain.model, plain.guide, {}, under("w", w), batch).sum()
    slope = dict(zip(w, torch.autograd.grad(value, list(w.values())), strict=True))
    g = torch.zeros_like(alpha)
    for n, at in layers(net.shapes).items():
        g[:, at] += torch.einsum("c...,cb...->cb", slope[n], received[f"branch/{n}"])
    close(found, alpha * (g - (alpha * g).sum(-1, keepdim=True)))
    for n, gradient in zip(net.shapes, of_branches, strict=True):
        weight = alpha[:, layers(net.shapes)[n]]
        close(gradient, torch.einsum("cb,c...->cb...", weight, slope[n]))


@pytest.mark.parametrize("shared", [False, True])
def test_equal_branches_have_no_reason_to_part(blobs, shared):
    method = built(shared=shared)
    one = method.init(generator(0), 12)
    equal = {n: v[:1].expand_as(v).contiguous() for n, v in one.items()}
    local = spread_out(equal, 12) | method.init_client(
        spread_out(one, 12), blobs.cohort(EVERYONE), generator(0)
    )
    free = {n: v.double().requires_grad_() for n, v in local.items()}
    value = elbo()(method.model, method.guide, {}, free, blobs.batch(EVERYONE)).sum()
    for n, g in zip(free, torch.autograd.grad(value, list(free.values())), strict=True):
        if n == "a/alpha":
            close(g, torch.zeros_like(g))
        else:
            assert g.abs().max() > 0.1
            close(g, g[:, :1].expand_as(g))
    with pytest.raises(ValueError, match=r"branches 0 and 1 of .* are equal"):
        toys.last(method, blobs, 1, server_state=equal)


def test_a_network_that_always_starts_the_same_is_refused():
    data = toys.blobs()
    data = replace(data, y=data.y.double(), classes=())
    method = pfedmb.build(build("linear", (8,), 1), likelihood=toys.half_square)
    with pytest.raises(ValueError, match=r"branches 0 and 1 of w are equal"):
        toys.last(method, data, 1)


def test_the_branches_start_as_independent_networks():
    server = built().init(generator(0, 0), 12)
    g = generator(0, 0)
    starts = [toys.net().init(g) for _ in range(3)]
    for n in toys.net().shapes:
        assert torch.equal(server[f"branch/{n}"], torch.stack([start[n] for start in starts]))


def test_a_merged_network_predicts_as_the_branches_do(blobs):
    method = built()
    state = toys.last(method, blobs)
    _, local = prepared(method, blobs, state, blobs.cohort(EVERYONE))
    assert isinstance(local, dict)
    w = merge_branches(toys.net(), local, posterior(method, blobs, state, 1)["alpha"][0])
    assert {n: v.shape[1:] for n, v in w.items()} == toys.net().shapes
    plain = fedavg.build(toys.net())
    one = RoundState(3, {}, {}, state.seen)
    plain = replace(plain, download=lambda server, cohort: cut(under("w", w), cohort.ids))
    for metric in ("accuracy", "nll"):
        a, b = evaluate(method, blobs, state), evaluate(plain, blobs, one, model="global")
        close(a.values[metric], b.values[metric], 1e-10)


# The local schedule


def test_one_branch_is_fedavg_to_the_last_bit(blobs):
    for spec, shared in (("mlp:6", False), ("mlp:50,9", True)):
        options = {"epochs": 3, "batch": 6, "lr": 0.05, "momentum": 0.9}
        one = pfedmb.build(toys.net(spec), branches=1, shared=shared, **options)
        plain = fedavg.build(toys.net(spec), **options)
        for a, b in zip(federate(one, blobs, 3), federate(plain, blobs, 3), strict=True):
            branch, w = role("branch", a.server), role("w", b.server)
            toys.assert_same({n: v[0] for n, v in branch.items()}, w)
            assert torch.equal(a.loss["branch/*"], b.loss["w/*"])


def test_alpha_learns_from_the_received_branches_and_then_they_from_alpha(blobs):
    method = built()
    received, local = begun(method, blobs)
    cohort = blobs.cohort(EVERYONE)
    ends = [local]
    for phase in method.phases[:2]:
        end, *_ = train(method, received, ends[-1], blobs, cohort, seed=0, number=0, phases=[phase])
        ends.append(end)
    before, mixed, after = ends
    for n in before:
        moves = torch.equal(before[n], mixed[n]), torch.equal(mixed[n], after[n])
        assert moves == ((False, True) if n == "a/alpha" else (True, False)), n


def test_alpha_stays_with_its_client(blobs):
    method = built()
    states = list(federate(method, blobs, 2, participation=lambda g, j: EVERYONE[:6]))
    received, private = client_inputs(method, blobs, states[-1], blobs.cohort(EVERYONE), 0)
    assert torch.equal(private["a/alpha"][:6], states[-1].client_states["a/alpha"][:6])
    close(private["a/alpha"][6:].softmax(-1), torch.full((6, 2, 3), 1 / 3), 1e-7)
    assert (states[0].message["alpha"] - 1 / 3).abs().max() > 1e-3
    assert not torch.equal(states[0].message["alpha"], states[1].message["alpha"])
    assert "a/alpha" not in received


def test_fine_tuning_is_one_more_local_training(blobs):
    method = built()
    state = toys.last(method, blobs)
    cohort = blobs.cohort(EVERYONE)
    tuned = [
        prepared(method, blobs, state, cohort, adaptation=a)[1]
        for a in ("none", "fine_tune", "train")
    ]
    for n in ("a/alpha", "branch/fc1.weight"):
        assert torch.equal(tuned[1][n], tuned[2][n])
        assert not torch.equal(tuned[0][n], tuned[1][n])


def test_projected_weights_stay_on_the_simplex(blobs):
    states = list(federate(built(guide="projection", lr_alpha=2.0), blobs, 3))
    for state in states:
        alpha = state.client_states["point/alpha"]
        assert (alpha >= 0).all()
        close(alpha.sum(-1), torch.ones(12, 2))
        assert torch.equal(state.reporters.ids, EVERYONE)
    assert (alpha == 0).any()  # where the gradient of a Dirichlet's density would be NaN
    same = toys.last(built(guide=guides.delta, lr_alpha=2.0), blobs)
    toys.assert_same_round(same, states[-1])


# The server


def aggregated(alpha: Tensor, values: Tensor, rows: Tensor, **options: Any) -> Tensor:
    """Merge branches [C, B] of a network of one number; the server holds 7 in each."""
    method = pfedmb.build(build("mean", (1,), 1), branches=alpha.shape[1], **options)
    message = {"branch/w": values[..., None], "alpha": alpha[:, None]}
    server = {"branch/w": torch.full((alpha.shape[1], 1), 7.0, dtype=torch.float64)}
    merged = method.aggregate(server, message, Cohort(torch.arange(len(rows)), rows), generator(0))
    return merged["branch/w"].squeeze(-1)


ALPHA = torch.tensor([[0.8, 0.2], [0.1, 0.9]], dtype=torch.float64)
VALUES = torch.tensor([[1.0, 2.0], [5.0, 6.0]], dtype=torch.float64)
ROWS = torch.tensor([10.0, 30.0], dtype=torch.float64)


def test_branches_are_averaged_by_rows_times_alpha():
    found = aggregated(ALPHA, VALUES, ROWS)
    close(found, [(8 * 1 + 3 * 5) / 11, (2 * 2 + 27 * 6) / 29])
    close(found, [2.0909, 5.7241], 5e-5)
    # As an M-step: the weighted sum of squares has no slope there.
    slope = (ROWS[:, None] * ALPHA * (found - VALUES)).sum(0)
    close(slope, [0.0, 0.0])
    close(aggregated(ALPHA, VALUES, ROWS, weighted=False), [4.0, 5.0])


def test_equal_alphas_make_the_plain_average():
    alpha = ALPHA[:1].expand(2, 2)
    close(aggregated(alpha, VALUES, ROWS), aggregated(alpha, VALUES, ROWS, weighted=False))


def test_corners_average_within_clusters_and_unused_branches_stay():
    corners = torch.eye(4, dtype=torch.float64)[[0, 0, 2, 2]]
    values = torch.arange(16, dtype=torch.float64).reshape(4, 4)
    rows = torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64)
    close(aggregated(corners, values, rows), [3.0, 7.0, 12.0, 7.0])
    nearly = corners.clone()
    nearly[0, 1] = 1e-13
    assert aggregated(nearly, values, rows)[1] == 7


def test_clients_in_corners_run_fedavg_in_clusters(blobs):
    method = built(guide="projection", lr_alpha=0.0, batch=None)
    cluster = torch.tensor([0, 2] * 6)
    alpha = torch.eye(3, dtype=torch.float64)[cluster][:, None].expand(12, 2, 3)
    start = first(method, blobs, 0)
    start = replace(
        start, client_states={"point/alpha": alpha}, seen=torch.ones(12, dtype=torch.bool)
    )
    state = toys.last(method, blobs, 3, resume_from=start)
    for branch in (0, 2):
        mine = [i for i in range(12) if cluster[i] == branch]
        parts = ([part[i] for i in mine] for part in (blobs.train, blobs.test))
        data = Federation(blobs.x, blobs.y, *parts, classes=blobs.classes)
        server = {n.replace("branch", "w"): v[branch] for n, v in start.server.items()}
        plain = fedavg.build(toys.net(), epochs=2, lr=0.05, momentum=0, batch=None)
        expected = role("w", toys.last(plain, data, 3, server_state=server).server)
        found = {n: v[branch] for n, v in role("branch", state.server).items()}
        toys.assert_same(found, expected, rtol=1e-9, atol=1e-12)
    toys.assert_same(cut(state.server, slice(1, 2)), cut(start.server, slice(1, 2)))


def test_permuting_branches_permutes_results(blobs):
    method, order = built(), torch.tensor([2, 0, 1])
    server = method.init(generator(3), 12)
    a = toys.last(method, blobs, server_state=server)
    b = toys.last(method, blobs, server_state=cut(server, order))
    close_enough = {"rtol": 1e-8, "atol": 1e-10}
    toys.assert_same(b.server, cut(a.server, order), **close_enough)
    close(b.message["alpha"], a.message["alpha"][..., order], 1e-9)
    toys.assert_same(b.loss, a.loss, **close_enough)


# Variants


def test_without_weighting_alpha_stays_at_home(blobs):
    state = toys.last(built(weighted=False), blobs)
    assert "alpha" not in state.message
    toys.assert_same(state.server, average(state.message, state.reporters.size))


def test_layers_without_branches_are_averaged_as_in_fedavg(blobs):
    state = toys.last(built(branched="head.*"), blobs)
    assert state.server.keys() == {
        "w/fc1.weight",
        "w/fc1.bias",
        "branch/head.weight",
        "branch/head.bias",
    }
    assert state.message["alpha"].shape == (12, 1, 3)
    for n in ("w/fc1.weight", "w/fc1.bias"):
        toys.assert_same({n: state.server[n]}, average({n: state.message[n]}, state.reporters.size))


def test_layers_may_share_alpha(blobs):
    assert toys.last(built(shared=True), blobs, 1).message["alpha"].shape == (12, 1, 3)
    assert toys.last(built(), blobs, 1).message["alpha"].shape == (12, 2, 3)


def test_branches_of_small_weight_stay_at_home(blobs):
    whole, thin = (toys.last(built(lr_alpha=3.0, drop=d), blobs, 1) for d in (0.0, 0.3))
    alpha = whole.message["alpha"]
    kept = alpha * (alpha >= 0.3)
    assert (kept == 0).any()
    close(thin.message["alpha"], kept / kept.sum(-1, keepdim=True), 1e-12)
    saved = torch.zeros(12, dtype=torch.long)
    for n, at in layers(toys.net().shapes).items():
        home = kept[:, at] == 0
        saved += 8 * home.sum(1) * toys.net().shapes[n].numel()
        found, expected = (s.message[f"branch/{n}"] for s in (thin, whole))
        assert torch.equal(found, torch.einsum("cb,cb...->cb...", (~home).double(), expected))
    assert torch.equal(whole.bytes_up - thin.bytes_up, saved)
    assert torch.equal(whole.bytes_down, thin.bytes_down)
    toys.assert_same(whole.client_states, thin.client_states)


def test_the_global_model_mixes_evenly(blobs):
    method = built()
    state = toys.last(method, blobs)
    _, local = prepared(
        method, blobs, state, blobs.cohort(EVERYONE), model="global", adaptation="train"
    )
    close(local["a/alpha"].softmax(-1), torch.full((12, 2, 3), 1 / 3), 1e-7)
    toys.assert_same({n: local[n] for n in state.server}, spread_out(state.server, 12))
    # So does a newcomer, before it trains.
    newcomer = replace(state, client_states={}, seen=torch.zeros(12, dtype=torch.bool))
    a, b = evaluate(method, blobs, state, model="global"), evaluate(method, blobs, newcomer)
    assert torch.equal(a.values["nll"], b.values["nll"])


def test_statistics_say_how_many_branches_a_client_uses(blobs):
    method = built(drop=0.2, guide="projection")
    alpha = torch.tensor([[1.0, 0, 0], [0.5, 0.4, 0.1]]).double().expand(12, 2, 3)
    found = method.metadata.statistics({}, {"point/alpha": alpha}, blobs.batch(EVERYONE))
    close(found["alpha_entropy"], torch.full((12,), 0.943348392 / 2), 1e-7)
    close(found["branches_kept"], torch.full((12,), 1.5))


# Bayesian weights


def test_the_bound_is_pyros(blobs):
    # Many draws of one client, whose programs Pyro can run as they are.
    method = built(guide="dirichlet", concentration=0.7)
    received, local = begun(method, blobs)
    one = slice(1, 2)
    received, local, batch = cut(received, one), cut(local, one), blobs.batch(EVERYONE[one])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        found = elbo(3000)(method.model, method.guide, received, local, batch)
        rows = (with_rows(received, 1), with_rows(local, 1), batch)
        draws = torch.tensor(
            [Trace_ELBO().loss(method.model, method.guide, *rows) for _ in range(300)]
        )
    error = draws.std() / 300**0.5
    assert error < 0.05 * draws.mean()
    assert (found - draws.mean()).abs() < 4 * error


def test_the_weight_of_the_prior_scales_the_divergence(blobs):
    # The step minimizes (sum of -log p(y) + kl KL) / n, so that kl = 1 is Bayes for the client.
    for kl in (0.0, 1.0, 3.0):
        method = built(
            guide="dirichlet", kl=kl, concentration=2.0, num_particles=1, epochs=1, batch=None
        )
        received, local = begun(method, blobs)
        step = method.phases[0].updates[0]
        args = (method.model, method.guide, received, local, blobs.batch(EVERYONE))
        losses = []
        for loss in (step.loss, elbo(1, 0.0)):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                losses.append(loss(*args))
        prior = dist.Dirichlet(torch.full((3,), 2.0, dtype=torch.float64))
        q = dist.Dirichlet(local["a/alpha"].exp())
        divergence = torch.distributions.kl_divergence(q, prior.expand((12, 2))).sum(1)
        sizes = blobs.cohort(EVERYONE).size
        close(losses[0] * sizes - losses[1], kl * divergence, 1e-9)


def test_a_point_pays_for_its_prior_only_if_that_says_something(blobs):
    values = {}
    for concentration in (1.0, 2.0):
        method = built(concentration=concentration)
        received, local = begun(method, blobs)
        args = (method.model, method.guide, received, local, blobs.batch(EVERYONE))
        values[concentration] = method.phases[0].updates[0].loss(*args) - elbo(kl=0.0, mean=True)(
            *args
        )
    assert not values[1.0].any()
    alpha = local["a/alpha"].softmax(-1)
    prior = dist.Dirichlet(torch.full((3,), 2.0, dtype=torch.float64))
    close(values[2.0] * blobs.cohort(EVERYONE).size, -prior.log_prob(alpha).sum(1))


def test_draws_of_alpha_lie_on_the_simplex(blobs):
    method = built(guide="dirichlet", num_particles=2)
    state = toys.last(method, blobs, 2)
    alpha = posterior(method, blobs, state, 50)["alpha"]
    assert alpha.shape == (50, 12, 2, 3)
    close(alpha.sum(-1), torch.ones(50, 12, 2))
    assert (alpha.std(0) > 0.005).all()
    # E[alpha] is what the server weighs by.
    mean = state.client_states["a/alpha"].softmax(-1)
    close(state.message["alpha"], mean)
    scores = evaluate(method, blobs, state, draws=20)
    assert scores.values["nll"].isfinite().all()


# What it is for


def pairs(rows: int = 40) -> Federation:
    """Return six clients in three pairs; each pair has other labels for the same rows."""
    g = generator(5)
    x = torch.randn(6 * 2 * rows, 4, generator=g, dtype=torch.float64)
    pair = torch.arange(len(x)) // (4 * rows)
    y = (x[:, :3].argmax(1) + pair) % 3
    parts = torch.arange(len(x)).split(rows)
    return Federation(x, y, parts[::2], parts[1::2], classes=("a", "b", "c"))


@pytest.mark.parametrize("guide", ["softmax", "projection", "dirichlet"])
def test_pairs_find_each_other(guide):
    data, net = pairs(), build("mlp:12", (4,), 3)
    options = {"shared": True, "batch": None, "lr": 0.5, "num_particles": 2}
    options["lr_alpha"] = 0.3 if guide == "projection" else 2.0
    method = pfedmb.build(net, branches=3, guide=guide, **options)
    state = toys.last(method, data, 10)
    alpha = state.message["alpha"].flatten(1)
    apart = torch.cdist(alpha, alpha)
    same = torch.arange(6)[:, None] // 2 == torch.arange(6) // 2
    assert apart[same].max() < 0.5 * apart[~same].min()
    accuracy = evaluate(method, data, state).mean("accuracy")
    # One model for all could at best learn one of three rules, and be right in a third of rows.
    assert accuracy > 0.65


# What is refused


def test_a_norm_layer_has_no_branches_unless_named(blobs):
    module = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    with pytest.raises(ValueError, match=r"of 1.weight, 1.bias are equal"):
        toys.last(pfedmb.build(Network(module), branched="*"), blobs, 1)
    state = toys.last(pfedmb.build(Network(module)), blobs, 1)
    assert state.server["w/1.weight"].shape == (6,)
    assert state.server["branch/2.bias"].shape == (5, 5)
