"""What became of a run: converged, moving or diverged, and how far it moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from torch import Tensor

import pyrofl
from pyrofl.data import Federation
from pyrofl.inference.definition.metadata import INCOMPARABLE, normals
from pyrofl.inference.engine.participation import Stragglers, fraction
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fitted_run.checkpoints import load, save
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.monitoring.losses import Losses, comparable
from pyrofl.inference.monitoring.parameter_changes import Moved, movement
from pyrofl.inference.monitoring.status import (
    ConvergenceMonitor,
    ConvergenceStatus,
    convergence_status,
)
from pyrofl.models import fedavg, likelihoods, local, pfedvem, priors, pvi
from pyrofl.models.shared.gaussians import Normals
from pyrofl.nets import build
from pyrofl.tensors import Tensors, generator

NAN = math.nan
RATE = 10.0  # at which weights explode, and stay finite


def record(
    number: int,
    *,
    loss: Sequence[float] = (1.0, 1.0),
    begun: Sequence[float] | None = None,
    moved: Moved | None = None,
    rejected: tuple[str, ...] = (),
    merged: bool = True,
) -> RoundRecord:
    """Return a round of two clients with the loss of one step."""
    told = {"w": torch.tensor(loss)}
    first = {"w": torch.tensor(loss if begun is None else begun)}
    moved = ({"w": {"norm": 0.1}} if moved is None else moved) if merged else None
    cohort = [0, 1]
    return RoundRecord(
        number, 0.0, 0, 0, rejected, cohort, [1, 1], cohort, [], told, first, moved, {}
    )


def test_no_run_has_converged_whose_chains_have_not_mixed():
    """One such round may pass; after two in succession training stops, with what helps."""
    still = {"w": {"mean": 0.001, "sd": 0.001}}
    why = "r_hat is 3.9: more rounds will not help: use X"
    good = [replace(record(n, moved=still), undamped=True) for n in (1, 2)]
    bad = [replace(record(n, moved=still), undamped=True, unreliable=why) for n in (3, 4)]
    assert convergence_status(good, "w").kind == "converged"
    for records, stops in ((good + bad[:1], False), (good + bad, True)):
        status = convergence_status(records, "w")
        assert (status.kind, status.why, status.ended) == ("not converged", why, stops)
        assert ConvergenceMonitor(records, "w").over == stops
    exact = [replace(one, exact=True) for one in good + bad]
    assert convergence_status(exact, "w").kind == "not converged"


def test_chains_that_do_not_mix_while_sites_move_end_training_after_four_rounds():
    why, far = "r_hat is 5: use X", {"w": {"mean": 3.0, "sd": 0.5}}
    each = [replace(record(n, moved=far), undamped=True, unreliable=why) for n in range(1, 5)]
    mixed = replace(each[1], unreliable="")
    for records, stops in ((each[:3], False), ([*each[:1], mixed, *each[2:]], False), (each, True)):
        status = convergence_status(records, "w")
        assert (status.kind, status.ended) == ("not converged", stops)
        assert (status.why == why) == stops


def test_unreliable_weights_are_in_the_status_of_a_converged_run():
    done, moving = (ConvergenceStatus(kind, "", 1) for kind in ("converged", "not converged"))
    found = done.tested(weights="Pareto k is 2: use X")
    assert (found.kind, found.why, found.ended) == ("not converged", "Pareto k is 2: use X", True)
    assert moving.tested(weights="Pareto k is 2: use X") == moving


@pytest.mark.parametrize(
    ("outcome", "ends"),
    [
        ("", "too narrow; to_arviz corrects its draws where their weights are reliable"),
        ("yes", "too narrow; the draws of to_arviz are corrected"),
        ("no: corrected=False", "too narrow, and its draws are not corrected"),
    ],
)
def test_the_status_states_whether_the_draws_of_a_narrow_guide_are_corrected(outcome, ends):
    done = ConvergenceStatus("converged", "nothing moves", 1)
    found = done.tested(note="the guide is too narrow", corrected=outcome)
    assert str(found) == f"converged: nothing moves; the guide is {ends}"
    assert done.tested(corrected=outcome) == done


def test_the_reason_is_the_change_in_the_last_round():
    """The first change, from the prior, says nothing about what is left."""
    each = [{"mu": {"mean": v, "sd": 0.0}} for v in (9.0, 0.6, 0.07)]
    for undamped in (True, False):
        records = [replace(record(n, moved=m), undamped=undamped) for n, m in enumerate(each, 1)]
        found = convergence_status(records)
        assert str(found) == "not converged: the mean of mu changed by 0.07 sd in the last round"
        assert found.moved == 0.07


WITHIN = (0.4, 0.02, 0.03, 0.025, 0.015, 0.03)  # changes that are noise from the second on
FALLING = (0.06, 0.042, 0.04, 0.038, 0.036, 0.034)  # changes of a slow approach


@pytest.mark.parametrize(
    ("changes", "noise", "kind"),
    [
        (WITHIN, 0.04, "converged"),
        (WITHIN, 0.0, "not converged"),
        (WITHIN[:3], 0.04, "not converged"),  # of three rounds
        (FALLING, 0.045, "not converged"),  # although each is within the error
        ([20 * v for v in WITHIN], 0.8, "not converged"),  # chains of few effective draws
    ],
)
def test_changes_within_monte_carlo_error_show_convergence(changes, noise, kind):
    each = [{"mu": {"mean": v, "sd": v / 2}} for v in changes]
    records = [
        replace(record(n, moved=m), undamped=True, noise=noise) for n, m in enumerate(each, 1)
    ]
    status = convergence_status(records)
    assert status.kind == kind
    if kind == "converged":
        assert "by more than 0.04 sd, their Monte Carlo error, or 0.1%" in status.why


def of_losses(*losses: Sequence[float], begun: Sequence[float] = (1.0, 1.0)) -> ConvergenceStatus:
    """Judge rounds with these losses; `begun` are those of the first steps of round one."""
    first = [begun, *losses[1:]]
    pairs = enumerate(zip(losses, first, strict=True), 1)
    return convergence_status([record(n, loss=a, begun=b) for n, (a, b) in pairs])


def state(
    number: int = 0, server: Tensors | None = None, private: Tensors | None = None
) -> RoundState:
    """Return a round of three clients, of whom 0 and 2 trained."""
    trained = torch.tensor([0, 2])
    return RoundState(number, server or {}, private or {}, torch.ones(3).bool(), trained=trained)


def test_movement_is_a_share_of_the_norm():
    old = state(0, {"w": torch.tensor([3.0, 4.0]), "server/memory": torch.zeros(2)})
    new = state(1, {"w": torch.tensor([3.0, 5.0]), "server/memory": torch.ones(2)})
    found = movement({}, old, new)
    assert found is not None
    assert found.keys() == {"w"}
    assert found["w"]["norm"] == pytest.approx(1 / math.sqrt(34), rel=1e-7)
    assert movement({}, new, replace(new, number=2)) is None
    still = {"w": torch.zeros(3), "n": torch.ones(2).long(), "none": torch.zeros(0)}
    assert movement({}, state(0, still), state(1, dict(still))) == {"w": {"norm": 0.0}}
    assert movement({}, state(0), state(1, {"new": torch.ones(2)})) == {"new": {"norm": 1.0}}


def test_what_has_moments_moves_in_standard_deviations():
    metadata = normals("loc", "log_scale", torch.exp)
    sd = torch.tensor([0.1, 10.0])
    old = {"loc/w": torch.zeros(2), "log_scale/w": torch.tensor([0.1, 5.0]).log()}
    new = {"loc/w": torch.tensor([0.2, 1.0]), "log_scale/w": sd.log(), "base": torch.ones(1)}
    found = movement(metadata, state(0, old), state(1, new))
    assert found is not None
    assert found == {"w": pytest.approx({"mean": 2.0, "sd": 0.5}, rel=1e-6), "base": {"norm": 1.0}}
    other = {"loc/w": torch.zeros(3), "log_scale/w": torch.zeros(3)}  # it has grown
    assert movement(metadata, state(0, other), state(1, new)) == {
        name: {"norm": 1.0} for name in ("loc/w", "log_scale/w", "base")
    }


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_natural_parameters_move_as_far_as_their_mean(covariance: str):
    net, likelihood = build("linear", (2,), 1), likelihoods.normal()
    method = pvi.build(net, likelihood=likelihood, covariance=covariance)  # type: ignore[arg-type]
    full = covariance == "full"
    root = torch.tensor([[2.0, 0.0], [0.3, 0.1]], dtype=torch.float64)
    root = root if full else root.diagonal()
    normals = Normals(2, full)
    mean = torch.tensor([1.0, -2.0], dtype=torch.float64)
    sd = (root @ root.T).diagonal().sqrt() if full else root
    old, new = normals.naturals(mean, 2 * root), normals.naturals(mean + sd * 0.5 * mean, root)
    found = movement(method.metadata.tensors, state(0, old), state(1, new))
    assert found is not None
    (site,) = net.shapes
    assert found == {site: pytest.approx({"mean": 1.0, "sd": 1.0}, rel=1e-6)}


def test_without_a_server_the_client_that_moves_most_counts():
    old = {"own": torch.tensor([[1.0, 0.0], [9.0, 9.0], [4.0, 3.0]])}
    new = {"own": torch.tensor([[1.0, 0.0], [0.0, 0.0], [4.0, 0.0]])}
    found = movement({}, state(0, {}, old), state(1, {}, new))
    assert found is not None
    assert found["own"]["norm"] == pytest.approx(3 / 5, rel=1e-7)


def test_what_clients_keep_is_compared_in_parts(monkeypatch: pytest.MonkeyPatch):
    whole = pyrofl.fit(local.build(toys.net()), toys.blobs(), 3, progress=False)
    monkeypatch.setattr("pyrofl.inference.monitoring.parameter_changes.MAX_COMPARED_BYTES", 0)
    parts = pyrofl.fit(local.build(toys.net()), toys.blobs(), 3, progress=False)
    assert [r.moved for r in parts.records] == [r.moved for r in whole.records]
    assert all(r.moved for r in whole.records)


def judged(*moved: float, part: str = "norm") -> ConvergenceStatus:
    """Judge merges that moved one thing so far."""
    return convergence_status([record(n, moved={"w": {part: v}}) for n, v in enumerate(moved, 1)])


def test_small_steps_of_three_merges_and_more_have_converged():
    assert judged(1.0, *[0.001] * 5).kind == "converged"
    assert judged(1.0, *[0.0] * 5).kind == "converged"
    assert judged(*[0.0] * 2).kind == "not converged"
    still = [record(1, moved={"w": {"norm": 0.0}})]
    assert convergence_status(still, trained="").kind == "stuck"  # nothing has ever changed
    jumped = "nothing changed by more than 0.01 sd or 0.1% in the last round"
    assert str(judged(1.0, 0.0)) == f"not converged: {jumped}; it takes several of these"
    found = judged(*[0.0] * 4, 0.004)
    assert (found.kind, found.site, found.part) == ("not converged", "w", "norm")
    assert str(judged(*[0.004] * 5)) == "not converged: w changed by 0.4 % in the last round"
    assert (
        str(judged(*[0.2] * 5, part="sd"))
        == "not converged: the sd of w changed by 0.2 sd in the last round"
    )
    assert judged(*[0.01] * 5, part="sd").kind == "converged"
    idle = [record(n, moved={"w": {"norm": 0.1}}) for n in (1, 2, 3)]
    idle += [record(n, merged=False) for n in (4, 5, 6, 7, 8)]
    assert (
        convergence_status(idle).kind == "not converged"
    )  # rounds without an aggregation are no sign of rest
    both = {"w": {"norm": 0.002}, "m": {"mean": 0.05, "sd": 0.01}}
    two = convergence_status([record(n, moved=both) for n in (1, 2, 3)])
    assert str(two) == "not converged: the mean of m changed by 0.05 sd in the last round"


def test_what_is_held_back_has_not_converged():
    # Each round goes a share of the way: what is left is that of the last one times (1 - r) / r.
    slow = [0.009 * 0.95**k for k in range(5)]
    found = judged(*slow, part="mean")
    assert str(found) == (
        "not converged: the mean of w changed by 0.0073 sd in the last round, "
        "with an estimated 0.14 sd to go"
    )
    assert judged(*[0.009 * 0.5**k for k in range(5)], part="mean").kind == "converged"
    assert judged(*[0.002 * 0.95**k for k in range(5)], part="mean").kind == "converged"
    growing = judged(*[0.001 * 1.3**k for k in range(5)], part="mean")
    assert (
        str(growing)
        == "not converged: the mean of w changed by 0.0029 sd in the last round, at a growing rate"
    )
    assert judged(*[0.001 * 1.1**k for k in range(5)], part="mean").kind == "converged"  # noise
    assert judged(0.009, 0.008, 0.0085, 0.009, 0.0081, part="mean").kind == "converged"  # hovers


def test_a_loss_that_rose_by_its_size_and_all_its_gains_has_diverged():
    found = of_losses((1.0, 1.0), (9.0, 9.0), (9.0, 8.0), (8.0, 9.0))
    assert str(found) == "diverged since round 2: the loss of w rose from 1 to 8.5"
    assert found.since == 2
    assert (
        of_losses((1.0, 1.0), (2.5, 2.5), (2.5, 2.5), (2.5, 2.5)).kind == "not converged"
    )  # not far
    assert of_losses((9.0, 9.0), (9.0, 9.0), (9.0, 9.0)).since == 1  # in round one already
    assert of_losses((1.0, 1.0), (1.0, 1.0), (9.0, 9.0)).kind == "not converged"  # not for long
    won = of_losses((1.0, 1.0), (-9.0, -9.0), (9.0, 9.0), (9.0, 9.0), (9.0, 9.0))
    assert won.kind == "not converged"  # what it had gained counts too, and its noise
    ramp = of_losses(*[(-50.0 + k, -50.0 + k) for k in range(60)], begun=(-50.0, -50.0))
    assert ramp.kind == "not converged"


def test_clients_are_compared_with_themselves():
    poor, rich = 100.0, 1.0  # only the poor one takes part in the end
    found = of_losses((NAN, rich), (poor, NAN), (poor, NAN), (poor, NAN), begun=(NAN, rich))
    assert found.kind == "not converged"
    rising = [record(1, loss=(NAN, 1.0)), record(2, loss=(99.0, NAN), begun=(1.0, NAN))]
    rising += [record(n, loss=(99.0, NAN)) for n in (3, 4)]
    assert convergence_status(rising).since == 2


def test_copies_of_a_federation_are_judged_apart():
    losses = Losses(2)
    for number, risen in enumerate((1.0, 9.0, 9.0, 9.0), 1):
        table = {"w": torch.tensor([1.0, 1.0, risen, risen])}
        losses.add(number, table, table)
    fine, bad = losses.risen()
    assert fine is None
    assert bad is not None
    assert str(bad) == "since round 2: the loss of w rose from 1 to 9"


def test_a_loss_that_may_rise_is_left_out():
    begun = {"z/*": torch.ones(2), "base/*": torch.ones(2)}
    assert comparable({"z/*": INCOMPARABLE}, begun).keys() == {"base/*"}


def test_bad_messages_alone_are_a_divergence():
    def judged(*merged: bool, rejected: tuple[str, ...] = ("a: w is nan",)) -> ConvergenceStatus:
        each = enumerate(merged, 1)
        return convergence_status(
            [record(n, merged=m, rejected=() if m else rejected) for n, m in each]
        )

    assert str(judged(False)) == (
        "diverged since round 1: no message was aggregated in any round; a: w is nan"
    )
    assert judged(True, False, False, False).since == 2
    assert judged(True, False, False).kind == "not converged"
    assert judged(False, False, False, True).kind == "not converged"
    silent = judged(False, False, rejected=())
    assert (silent.kind, silent.merged) == ("not converged", 0)
    assert (
        str(silent)
        == "not converged: no message was aggregated in any round, as no client reported"
    )
    assert str(convergence_status([])) == "not converged: no round yet"


def test_rates_that_are_far_too_large_are_told(blobs: Federation):
    run = pyrofl.fit(fedavg.build(toys.net(), lr=RATE), blobs, 6, progress=False)
    assert not any(r.rejected for r in run.records)  # all is finite
    assert str(run.status).startswith("diverged since round 1: the loss of w/* rose from 1.")
    assert run.warnings == [str(run.status)]
    assert run.overview()["status"] == str(run.status)  # once


@pytest.mark.slow
def test_pvi_with_few_draws_for_many_weights_converges():
    """Its loss once rose from 5,892 to 95,679."""
    rng = generator(0)
    x = torch.randn(600, 70, generator=rng, dtype=torch.float64)
    y = x @ torch.randn(70, generator=rng, dtype=torch.float64)
    y = y + torch.randn(600, generator=rng, dtype=torch.float64)
    none = tuple(torch.empty(0, dtype=torch.long) for _ in range(4))
    data = Federation(x, y, torch.arange(600).tensor_split(4), none)
    method = pvi.build(
        build("linear", (70,), 1),
        likelihood=likelihoods.normal(),
        prior=priors.fixed(dist.Normal, 0.0, 1.0),
        covariance="full",
        num_particles=16,
    )
    run = pyrofl.fit(method, data, 18, progress=False)
    assert not any(r.rejected for r in run.records)
    assert run.status.kind == "converged"


def test_a_closed_form_converges():
    rng = generator(1)
    x = torch.randn(40, 2, generator=rng, dtype=torch.float64)
    none = tuple(torch.empty(0, dtype=torch.long) for _ in range(4))
    data = Federation(x, x.sum(1), torch.arange(40).split(10), none)
    method = pvi.build(
        build("linear", (2,), 1), likelihood=likelihoods.normal(), covariance="full", damping=0.5
    )
    run = pyrofl.fit(method, data, 25, progress=False)
    assert str(run.status) == (
        "converged: in the last 5 aggregations nothing changed by more than 0.01 sd or 0.1%"
    )


@pytest.mark.parametrize("build_", [fedavg.build, pfedvem.build, local.build])
def test_a_run_that_was_stopped_is_judged_as_one_that_was_not(build_, tmp_path, blobs: Federation):
    method = build_(toys.net())
    options = {"participation": fraction(0.5), "progress": False}
    whole = pyrofl.fit(method, blobs, 4, **options)
    save(pyrofl.fit(method, blobs, 2, **options), tmp_path / "run.safetensors")
    rest = pyrofl.fit(
        method, blobs, 4, resume_from=load(tmp_path / "run.safetensors", method, blobs), **options
    )
    assert rest.status == whole.status
    assert [r.moved for r in rest.records] == [r.moved for r in whole.records]
    assert whole.status.site


def test_a_fit_says_it_in_the_end(blobs: Federation, capsys: pytest.CaptureFixture[str]):
    run = pyrofl.fit(fedavg.build(toys.net()), blobs, 2)
    assert str(run.status) in capsys.readouterr().err
    silent = pyrofl.fit(
        fedavg.build(toys.net()), blobs, 2, stragglers=Stragglers(drop_rate=1.0), progress=False
    )
    assert silent.status.merged == 0


def lost(data: Federation, seed: int = 0) -> pyrofl.Run:
    return pyrofl.fit(fedavg.build(toys.net(), lr=RATE), data, 3, seed=seed, progress=False)


def test_a_run_that_diverged_has_no_posterior_but_for_a_look(blobs: Federation):
    run = lost(blobs)
    told = r"the run of seed 0 diverged since round 1: .* or pass allow_diverged"
    for refused in (
        run.to_arviz,
        partial(pyrofl.checks.loo, run),
        partial(pyrofl.checks.pit, run),
        partial(pyrofl.checks.predictive_checks, run),
    ):
        with pytest.raises(ValueError, match=told):
            refused(draws=2)
    found = run.to_arviz(draws=2, allow_diverged=True)
    assert found["posterior"].attrs["status"] == str(run.status)
    fine = pyrofl.fit(fedavg.build(toys.net()), blobs, 1, progress=False)
    assert fine.to_arviz(draws=2)["sample_stats"].attrs["status"] == str(fine.status)
    two = pyrofl.to_arviz([fine, lost(blobs, 1)], 2, allow_diverged=True)
    assert two["posterior"].attrs["status"].count("; ") >= 1
    with pytest.raises(ValueError, match="the run of seed 1 diverged"):
        pyrofl.to_arviz([fine, lost(blobs, 1)], 2)


def test_the_first_loss_is_that_of_the_state_that_came_down(blobs: Federation):
    method = fedavg.build(toys.net(), batch=None, epochs=3)
    first = next(pyrofl.federate(method, blobs, 1))
    one = fedavg.build(toys.net(), batch=None, epochs=1)
    alone = next(pyrofl.federate(one, blobs, 1))
    close(first.first_loss["w/*"], alone.loss["w/*"], 1e-12)
    table: Tensor = first.of_all(first.first_loss)["w/*"]
    assert table.shape == (blobs.clients,)


def test_a_mean_that_jumps_again_and_again_has_diverged():
    jumps = [{"w": {"mean": far, "sd": 0.5}} for far in (2.0, 3e3, 5e9, 0.1, 2e3, 7e3)]
    found = convergence_status([record(n, moved=far) for n, far in enumerate(jumps, 1)])
    assert (found.kind, found.since) == ("diverged", 2)
    assert found.why == "the mean of w changes by 3000 sd per round"
    # A first jump, as from a wide prior, is none of it.
    once = [{"w": {"mean": far, "sd": 0.5}} for far in (5e9, 0.1, 0.1, 0.1, 0.1)]
    assert (
        convergence_status([record(n, moved=far) for n, far in enumerate(once, 1)]).kind
        == "not converged"
    )
