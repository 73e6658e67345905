"""A study of a hierarchical program has the posterior of one process, and says what it is."""

from __future__ import annotations

import json
from types import SimpleNamespace

import arviz
import hospitals
import pytest
import torch
from hospitals import weighed, wire
from promises import others_slow

from pyrofl.cli import main
from pyrofl.experiments.console import Stopped
from pyrofl.flower.coordinator import ServerSettings, coordinate
from pyrofl.flower.disclosure import leaving
from pyrofl.flower.results import ResultStore
from pyrofl.flower.rows import rows_of
from pyrofl.inference import hmc as sampler
from pyrofl.inference.posteriors.importance_sampling import Weights
from pyrofl.inference.posteriors.shared import SharedDraws

SOON = ServerSettings(3, 2, 0.0)


@pytest.fixture(autouse=True)
def short(monkeypatch, request):
    """Shorten the server's chains, except those whose draws are to be exact."""
    settings = {} if "schools" in request.node.name else {"NUM_METRIC_UPDATES": 1, "THINNING": 1}
    for setting, value in settings.items():
        monkeypatch.setattr(sampler, setting, value)


def finished(project, tmp_path, transport, settings=SOON):
    """Run a study; return its only store, after the results were written, and the log."""
    said: list[str] = []
    (store,) = coordinate(project, tmp_path / "out", transport, settings, said.append).values()
    assert store.finish() == []
    return store, said


NAMES = ["mixed", "eight_schools", "of_levels", "of_rows", "partitioned"]


@pytest.mark.parametrize("name", others_slow(NAMES, ["mixed", "eight_schools"]))
def test_a_study_has_the_posterior_of_one_process(name, tmp_path):
    """The server has no row; clients have 1 to 90 rows, and some lack a level."""
    project = hospitals.hierarchical(
        tmp_path / "p", name, rounds=3 if name == "partitioned" else 12
    )
    transport = wire(project, tmp_path)
    store, said = finished(project, tmp_path, transport)
    run = hospitals.in_one_process(project)
    assert store.method.name == run.method.name
    assert store.run.state.number == run.state.number
    assert str(store.run.status) == str(run.status)
    stored = tmp_path / "out" / name / "server/server.safetensors"
    if name in ("eight_schools", "mixed", "partitioned"):  # whose clients train alone
        hospitals.same_draws(stored, run)
    run = hospitals.at_server(stored, run)
    hospitals.same_posteriors(tmp_path / "out" / name, tmp_path, run)
    status = "not converged" if name == "partitioned" else "converged"
    assert status == run.status.kind
    line = {
        "converged": f"converged after {run.state.number} of at most 12 rounds: ",
        "not converged": "not converged after 3 of at most 3 rounds: ",
    }[status]
    facts = json.loads((tmp_path / "out" / name / "run.json").read_text())
    for told in (store.table(), facts["ending"], "\n".join(said)):
        assert line in told
        assert ("raise rounds in the study file" in told) == (status == "not converged")
    is_exact = name == "eight_schools"
    assert facts["corrected"] == ("no: the draws are of the exact posterior" if is_exact else "yes")
    assert bool(weighed(transport)) != is_exact
    assert ("draws are corrected by importance weights; Pareto k" in store.table()) != is_exact


def test_the_folder_of_a_hierarchical_study_is_that_of_a_run(tmp_path):
    project = hospitals.hierarchical(tmp_path / "p", "mixed")
    finished(project, tmp_path, wire(project, tmp_path))
    assert main(["report", str(tmp_path / "out/mixed")]) == 0


@pytest.mark.parametrize("name", ["eight_schools", "mixed"])
def test_what_leaves_is_told_before_anything_leaves(name, tmp_path):
    """Also of one client with one row."""
    project = hospitals.hierarchical(tmp_path / "p", name)
    rows = rows_of(project, str(tmp_path / "p/sites/hospital_2.csv"), "hospital_2")
    told = leaving(project, rows)
    assert "up/precision" in told
    assert ("weights, after the last round" in told) == (name == "mixed")
    assert ("up/log_l, noise" in told) == (name == "mixed")
    project = hospitals.changed(tmp_path / "p", corrected=False)
    assert "weights" not in leaving(project, rows)


@pytest.mark.slow
def test_a_site_that_is_lost_at_the_last_exchange_is_named(tmp_path):
    """The draws stay those of the guide; the same command corrects them later."""
    project = hospitals.hierarchical(tmp_path / "p", "mixed", rounds=1)
    transport = wire(project, tmp_path)

    def lose(number, node, answer):
        return None if node == 11 and any("weights/" in what for what in answer) else answer

    transport.spoil = lose
    store, said = finished(project, tmp_path, transport)
    why = "not all clients have sent their marginal likelihoods (hospital_2: no reply)"
    assert any(line.startswith(f"mixed: draws are not corrected: {why}; draws of") for line in said)
    assert f"posterior.nc: draws are not corrected; {why}" in store.table()
    found = arviz.from_netcdf(tmp_path / "out/mixed/posterior.nc")
    assert found["posterior"].attrs["corrected"] == f"no: {why}"
    assert len(weighed(transport)) == 2 + 3  # the site that is silent was asked three times
    transport.spoil = lambda number, node, answer: answer
    store, said = finished(project, tmp_path, transport)
    assert store.draws.outcome == "yes"
    again, before = wire(project, tmp_path), len(weighed(transport))
    store, _ = finished(project, tmp_path, again)
    assert store.draws.outcome == "yes"
    assert before == 5 + 3 * 4  # three sites, and four exchanges
    assert not weighed(again)
    hospitals.same_posteriors(tmp_path / "out/mixed", tmp_path, hospitals.in_one_process(project))


def test_a_site_that_is_away_at_the_end_is_named(tmp_path):
    project = hospitals.hierarchical(tmp_path / "p", "mixed", rounds=1)
    transport = wire(project, tmp_path)

    def leave(number, node, answer):
        if node == 12 and any("told/" in what for what in answer):
            transport.sites.pop(12, None)
        return answer

    transport.spoil = leave
    store, _ = finished(project, tmp_path, transport)
    assert "(hospital_3: not connected)" in store.table()
    assert not weighed(transport)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("mixed", {"corrected": False}, "corrected is false in the project"),
        ("summed", {}, "clients send sums, and a correction needs a number of each client"),
    ],
)
def test_draws_that_must_not_be_corrected_say_so(name, change, why, tmp_path):
    project = hospitals.hierarchical(tmp_path / "p", name, rounds=1, **change)
    transport = wire(project, tmp_path)
    store, said = finished(project, tmp_path, transport)
    assert f"posterior.nc: draws are not corrected; {why}" in store.table()
    assert any(line.startswith(f"{name}: posterior.nc: draws are not corrected") for line in said)
    assert not weighed(transport)


def test_a_site_does_not_answer_what_its_project_forbids(tmp_path):
    project = hospitals.hierarchical(tmp_path / "p", "mixed", rounds=1)
    transport = wire(project, tmp_path)

    def forbid(node, message):
        if any("weigh/" in what for what in message):
            hospitals.changed(tmp_path / "p", corrected=False)
        return message

    transport.tamper = forbid
    store, _ = finished(project, tmp_path, transport)
    assert "hospital_1: mixed: corrected is false in this project" in store.table()
    assert not weighed(transport)


@pytest.mark.parametrize("name", ["of_rows", "mixed"])
def test_the_largest_number_of_rows_is_sent_where_it_is_needed(name, tmp_path):
    project = hospitals.hierarchical(tmp_path / "p", name, rounds=1)
    transport = wire(project, tmp_path)
    finished(project, tmp_path, transport)
    sent = {
        flat.get("rows")
        for _, message, _ in transport.messages
        for what, flat in message.items()
        if "/" in what
    }
    assert sent == ({3} if name == "of_rows" else {None})


def test_a_client_whose_rows_contradict_the_structure_is_named(tmp_path):
    project = hospitals.hierarchical(tmp_path / "p", "eight_schools")
    code = hospitals.EFFECTS.replace("(theta,", "(theta + tau * (batch.x[..., 0] > 17),")
    (tmp_path / "p/effects.py").write_text(code)
    transport, said = wire(project, tmp_path), []
    why = "hospital_3: eight_schools: hospital_3/H: the response of a client is not linear"
    with pytest.raises(Stopped, match="round 1: 2 sites replied; expected at least 3") as stop:
        coordinate(project, tmp_path / "out", transport, ServerSettings(3, 3, 0.0), said.append)
    assert why in str(stop.value)
    assert any(line.startswith(why) for line in said)


@pytest.mark.slow
def test_a_study_continues_with_more_rounds(tmp_path):
    """The draws are then those after the last round, corrected again."""
    project = hospitals.hierarchical(tmp_path / "p", "mixed", rounds=1)
    store, _ = finished(project, tmp_path, wire(project, tmp_path))
    assert store.draws.outcome == "yes"
    project = hospitals.changed(tmp_path / "p", rounds=9)
    transport = wire(project, tmp_path)
    store, said = finished(project, tmp_path, transport)
    run = hospitals.in_one_process(project)
    assert any(line.startswith(f"mixed: converged after {run.state.number} of") for line in said)
    assert len(weighed(transport)) == 12  # three sites, and four exchanges
    hospitals.same_posteriors(tmp_path / "out/mixed", tmp_path, run)


def test_stored_draws_have_all_diagnostics(tmp_path):
    """A resumed study has the Pareto k of each estimate, and does not ask its sites again."""
    about = {"method": "effects", "clients": ["a"]}
    store = SimpleNamespace(
        folder=tmp_path,
        project=SimpleNamespace(corrected=True),
        server=SimpleNamespace(state=SimpleNamespace(number=3)),
        _checkpoint_identity=about,
    )
    weights = Weights(torch.ones(1) / 2, torch.ones(1), 5, shapes={"mu": torch.ones(4)})
    row = torch.zeros(2)
    ResultStore._write_draws(store, SharedDraws({"mu": row}, "yes", weights, row, row))
    ResultStore._read_draws(store)
    assert store.draws.diagnostics.shapes["mu"].tolist() == [1.0] * 4
    assert store.draws.values.keys() == {"mu"}
