"""Sites that answer messages make the rounds of the loop, whatever happens on the way."""

from __future__ import annotations

import json
import shutil

import arviz
import hospitals
import pytest
import torch
import toys
from hospitals import looped, site, wire

import pyrofl
from pyrofl.cli import main
from pyrofl.experiments.console import Stopped
from pyrofl.files.lock import lock_folder
from pyrofl.flower.coordinator import ServerSettings, coordinate
from pyrofl.flower.site import GREETING, label
from pyrofl.inference.transport.message_checks import code_hash

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SOON = ServerSettings(3, 2, 0.0)
SMALL = ("epochs=1",)


def made(project, out, transport, settings=SOON):
    """Make the rounds of a project; return the last states and what was said."""
    said = []
    stores = coordinate(project, out, transport, settings, said.append)
    return {name: store.server.state for name, store in stores.items()}, said


@pytest.mark.parametrize("grouped", [False, True])
def test_many_methods_in_one_run_are_those_of_the_loop(grouped, tmp_path):
    methods = ("fedavg", "pvi") if grouped else ("pfedvem", "scaffold", "metavd")
    more = {"client_column": "ward"} if grouped else {}
    project = hospitals.project(tmp_path / "p", methods=methods, settings=SMALL, **more)
    if grouped:
        hospitals.wards(tmp_path / "p")
    transport = wire(project, tmp_path)
    states, said = made(project, tmp_path / "out", transport)
    for name in methods:
        toys.assert_same(states[name].server, looped(project, name).server, **CLOSE)
    rounds = [m for _, m, _ in transport.messages if not any("weigh/" in what for what in m)]
    assert len(rounds) == 3 * (1 + project.rounds + 2)  # hello, rounds, last questions, the end
    assert any(line.startswith("round 2 of at most 2: 3 of 3 sites replied") for line in said)


FAULTY = ("fedavg", "scaffold")


def without(project, transport, tmp_path, absent):
    """Make the rounds, and compare them with a loop that leaves clients out of those rounds."""
    states, said = made(project, tmp_path / "out", transport)
    for name in project.labels:
        expected = looped(project, name, absent)
        toys.assert_same(states[name].server, expected.server, **CLOSE)
    return states, said


def test_lost_bad_and_refused_replies_are_left_out_of_their_round(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=FAULTY, settings=SMALL, rounds=4)

    def spoil(number, node, answer):
        if (number, node) == (1, 10):  # the reply of round 1 is lost on its way
            return None
        if (number, node) == (2, 11):  # a reply that is NaN, in one method after the other
            for flat in answer.values():
                for name in [n for n in flat if n.startswith("up/")]:
                    flat[name] = flat[name] * float("nan")
        if (number, node) == (3, 12):  # the site raises after it has saved
            return {"refused": {"site": "hospital_3", "why": "OSError; see its log"}}
        return answer

    transport = wire(project, tmp_path, spoil=spoil)
    absent = [{"hospital_1"}, {"hospital_2"}, {"hospital_3"}]
    states, said = without(project, transport, tmp_path, absent)
    assert "no reply of hospital_1" in said
    assert "hospital_3: OSError; see its log" in said
    named = [line for line in said if line.startswith("fedavg: hospital_2: ") and "is nan" in line]
    assert len(named) == 1
    assert all(server.number == 4 for server in states.values())


def test_a_round_with_too_few_replies_is_repeated(tmp_path):
    """The site is lost during the round; the repeated round is the one without the loss."""
    project = hospitals.project(tmp_path / "p", methods=FAULTY, settings=SMALL, rounds=3)

    def lose(number, node, answer):
        return None if (number, node) in ((1, 10), (3, 12)) else answer

    transport = wire(project, tmp_path, spoil=lose)
    states, said = made(project, tmp_path / "out", transport, ServerSettings(3, 3, 0.0))
    told = "2 sites replied; expected at least 3 (--min-sites); the round is repeated"
    assert [line for line in said if "repeated" in line] == [f"round 1: {told}", f"round 2: {told}"]
    for name in FAULTY:
        assert states[name].number == 3
        toys.assert_same(states[name].server, looped(project, name).server, **CLOSE)


def test_a_round_is_not_repeated_for_ever(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SMALL)
    transport = wire(project, tmp_path)
    transport.spoil = lambda number, node, answer: None if number and node == 11 else answer
    with pytest.raises(Stopped, match=r"^round 1: 2 sites replied; .* it was repeated 3 times$"):
        made(project, tmp_path / "out", transport, ServerSettings(3, 3, 0.0))


def test_a_server_that_is_stopped_goes_on_from_its_folder(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=FAULTY, settings=SMALL, rounds=3)

    def stop(number, node, answer):
        if (number, node) == (2, 11):  # others have trained and wait
            raise KeyboardInterrupt
        return answer

    with pytest.raises(KeyboardInterrupt):
        made(project, tmp_path / "out", wire(project, tmp_path, spoil=stop))
    transport = wire(project, tmp_path)
    transport.sites = {
        node + 5: site for node, site in transport.sites.items()
    }  # Flower's numbers change
    without(project, transport, tmp_path, [])
    # And once more when it is over: tables are written again, with the scores of the end.
    stores = coordinate(project, tmp_path / "out", transport, SOON, lambda _: None)
    for store in stores.values():
        assert [record.number for record in store.run.records] == [1, 2, 3]
        assert {row["round"] for row in store.run.history} == {1, 2, 3}
        assert len(store.run.history) == len({tuple(row.items())[:5] for row in store.run.history})
        assert store.scores
    with pytest.raises(ValueError, match=r"holds a run of 3 sites .+; expected these, or another"):
        coordinate(project, tmp_path / "out", transport, ServerSettings(2, 2, 0.0), lambda _: None)


def test_only_one_server_works_in_a_folder(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SMALL)
    (tmp_path / "out").mkdir()
    with lock_folder(tmp_path / "out"), pytest.raises(ValueError, match="is in use by process"):
        made(project, tmp_path / "out", wire(project, tmp_path))


def test_a_site_that_restarts_takes_its_place_and_a_second_is_refused(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("pfedvem",), rounds=3)
    transport = wire(project, tmp_path)
    second = site(project, tmp_path, "hospital_2")

    def come_and_go(number, node, answer):
        if (number, node) == (1, 12):
            transport.sites[13] = second
        if (number, node) == (3, 12):  # after round 2 the first is gone, and starts as another node
            transport.sites[14] = transport.sites.pop(11)
            del transport.sites[13]
        return answer

    transport.spoil = come_and_go
    _, said = without(project, transport, tmp_path, [])
    told = "hospital_2 is refused: a second node has this name, and the first is still there"
    assert said.count(told) == 1
    assert said.count("hospital_2 is there: 1 client, 52 training rows") == 2


def test_a_site_takes_part_with_its_own_key_alone(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SMALL)
    whose = {10: "hospital_1", 11: "hospital_3"}
    said: list[str] = []
    with pytest.raises(Stopped, match=r"1 of 3 sites are there .+ \(hospital_1\); expected all"):
        coordinate(
            project,
            tmp_path / "out",
            wire(project, tmp_path),
            ServerSettings(3, 3, 0.0, whose),
            said.append,
        )
    assert said[1:] == [
        "hospital_2 is refused: its node has the key of hospital_3; expected hospital_2.pub's",
        "hospital_3 is refused: its node has none of the keys; expected hospital_3.pub's",
    ]
    log = (tmp_path / "hospital_2/site.log").read_text()
    assert f"refused: by the server: {said[1]}" in log


@pytest.mark.parametrize("rejoin", [False, True])
def test_a_lost_state_is_said_and_rejoin_makes_a_newcomer(rejoin, tmp_path):
    methods = ("fedavg", "scaffold", "pfedvem")
    settings = (*SMALL, "remember=true")
    project = hospitals.project(tmp_path / "p", methods=methods, settings=settings, rounds=3)
    transport = wire(project, tmp_path)
    transport.sites[11]["rejoin"] = rejoin

    def lose(number, node, answer):
        if (number, node) == (2, 10):
            shutil.rmtree(tmp_path / "hospital_2")
        return answer

    transport.spoil = lose
    states, said = made(project, tmp_path / "out", transport)
    if rejoin:
        assert "hospital_2 has lost its state of pfedvem: hospital_2 restart" in said
        assert "hospital_2 has lost its state of scaffold: hospital_2 restart" in said
        assert sum("has lost its state" in line for line in said) == 2  # once of each method
        assert not [line for line in said if "of fedavg" in line]  # which keeps nothing
        assert [len(states[name].reporters.ids) for name in methods] == [3] * 3
    else:
        assert any("or --rejoin, by which the site returns as a new client" in one for one in said)
        assert [len(states[name].reporters.ids) for name in methods] == [2] * 3


ODD_STATES = {
    "a lost state": (
        "hospital_2 has no state of this study, which has begun; expected the --state of earlier"
        " replies, or --rejoin, by which the site returns as a new client"
    ),
    "other rows": "hospital_2.csv has changed since numbers of its rows left; expected the same",
}


@pytest.mark.parametrize("kind", ODD_STATES)
@pytest.mark.parametrize("at", [1, 2], ids=["round 2", "last evaluation"])
@pytest.mark.parametrize("node", [11, 21], ids=["running", "restarted"])
def test_a_site_whose_state_or_rows_are_others_is_refused_in_every_exchange(
    kind, at, node, tmp_path
):
    """At the rounds and the last evaluation, of a method whose clients have no state."""
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SMALL)
    transport = wire(project, tmp_path)
    table = tmp_path / "p/sites/hospital_2.csv"

    def spoil(number, sender, answer):
        if (number, sender) == (at, 12):
            if kind == "a lost state":
                shutil.rmtree(tmp_path / "hospital_2")
            else:
                table.write_text(table.read_text().replace("yes", "no", 1))
            transport.sites[node] = transport.sites.pop(11)
        return answer

    transport.spoil = spoil
    _, said = made(project, tmp_path / "out", transport)
    assert any(ODD_STATES[kind] in line for line in said)
    assert f"refused: {ODD_STATES[kind]}" in (tmp_path / "hospital_2/site.log").read_text()
    if at == 1:
        assert any("2 of 3 sites replied" in line for line in said)


def test_warnings_of_the_check_are_in_logs_and_results_without_values(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SMALL)
    table = tmp_path / "p/sites/hospital_1.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines, *lines[1:]]) + "\n")
    said = []
    stores = coordinate(project, tmp_path / "out", wire(project, tmp_path), SOON, said.append)
    stores["fedavg"].finish()
    text = "hospital_1: the check warns of rows; see its site.log"
    assert f"warning: {text}" in said
    assert json.loads((tmp_path / "out/fedavg/run.json").read_text())["warnings"] == [text]
    logs = {name: (tmp_path / name / "site.log").read_text() for name in hospitals.NAMES}
    assert "warning: " in logs["hospital_1"]
    assert "warning: " not in logs["hospital_2"]


def test_rows_may_change_until_the_study_begins(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SMALL)
    table = tmp_path / "p/sites/hospital_2.csv"
    transport = wire(project, tmp_path)
    late = transport.sites.pop(12)
    with pytest.raises(Stopped, match="2 of 3 sites are there"):
        made(project, tmp_path / "out", transport)
    table.write_text(table.read_text().replace("yes", "no", 1))
    transport = wire(project, tmp_path)
    assert late == transport.sites[12]
    states, _ = made(project, tmp_path / "out", transport)
    toys.assert_same(states["fedavg"].server, looped(project, "fedavg").server, **CLOSE)


def test_a_site_without_loss_is_not_said_to_have_lost_its_state(tmp_path):
    """A reply of the first round cannot be lost, as the server has aggregated none before."""
    project = hospitals.project(tmp_path / "p", methods=("scaffold",), settings=SMALL)
    transport = wire(project, tmp_path)

    def claims(number, node, answer):
        if (number, node) == (1, 11):
            return {label("lost", "scaffold"): {"names": ("hospital_2",)}}
        return answer

    transport.spoil = claims
    _, said = made(project, tmp_path / "out", transport)
    assert not [line for line in said if "has lost its state" in line]
    assert any(line.startswith("round 1 of at most 2: 3 of 3 sites replied") for line in said)


def test_the_log_of_a_site_has_the_reason_for_a_round_without_it(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SMALL)
    transport = wire(project, tmp_path)
    late = (1, 11)
    transport.spoil = lambda number, node, answer: None if (number, node) == late else answer
    made(project, tmp_path / "out", transport)
    logs = {name: (tmp_path / name / "site.log").read_text() for name in hospitals.NAMES}
    text = "not in the last round: no reply arrived within 0 s"
    assert [log.count(text) for log in logs.values()] == [0, 1, 0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"features": ("dose", "age", "pressure")}, "features is"),
        ({"dtype": "float32"}, 'dtype is "float32", and "float64" at the server'),
        ({"seed": 3}, "seed is 3, and 0 at the server"),
        ({"settings": ("epochs=2",)}, 'settings is ["epochs=2"], and ["epochs=1"] at the server'),
        ({"version of torch": "1.0"}, ", and 1.0 at the server; expected the same"),
        ({"version of pyrofl's code": "1f"}, ", and 1f at the server; expected the same"),
    ],
)
def test_a_site_with_another_project_is_refused_by_name(change, told, tmp_path, monkeypatch):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SMALL)
    shutil.copytree(tmp_path / "p", tmp_path / "other")
    transport = wire(project, tmp_path)
    if next(iter(change)).startswith("version"):
        transport.tamper = lambda node, message: (
            {GREETING: message[GREETING] | change} if node == 12 else message
        )
    else:
        hospitals.changed(tmp_path / "other", **change)
        transport.sites[12]["project"] = str(tmp_path / "other")
    said: list[str] = []
    with pytest.raises(Stopped, match=r"2 of 3 sites are there .+, hospital_2\); expected all"):
        coordinate(project, tmp_path / "out", transport, SOON, said.append)
    assert (
        len([line for line in said if line.startswith("hospital_3 is refused: ") and told in line])
        == 1
    )


def test_the_hash_of_the_code_follows_every_file_and_no_other_thing(tmp_path):
    package = tmp_path / "one"
    (package / "sub").mkdir(parents=True)
    (package / "a.py").write_text("lr = 0.1\n")
    (package / "sub/b.py").write_text("")
    first = code_hash(package)
    (package / "sub/__pycache__").mkdir()
    (package / "sub/__pycache__/b.pyc").write_bytes(b"1")
    moved = tmp_path / "two"
    shutil.copytree(package, moved)
    (moved / "a.py").write_bytes(b"lr = 0.1\r\n")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/a.py").write_text("lr = 0.1\n")
    (tmp_path / "linked/sub").symlink_to(package / "sub")
    assert code_hash(moved) == code_hash(tmp_path / "linked") == first
    code_hash.cache_clear()
    (moved / "sub/b.py").write_text("lr = 0.3\n")
    assert code_hash(moved) != first
    (package / "sub/b.py").rename(package / "sub/c.py")
    assert code_hash(package) != first


def test_a_code_that_differs_is_refused_by_the_part_of_the_method(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("own.py:own",), rounds=1)
    code = "from pyrofl.models import fedavg\nfrom pyrofl.nets import build\n\n\ndef own(data):\n"
    code += "    return fedavg.build(build('softmax', (3,), 2), epochs={})\n"
    (tmp_path / "p/own.py").write_text(code.format(1))
    shutil.copytree(tmp_path / "p", tmp_path / "other")
    (tmp_path / "other/own.py").write_text(code.format(2))
    transport = wire(project, tmp_path)
    transport.sites[12]["project"] = str(tmp_path / "other")
    states, said = made(project, tmp_path / "out", transport)
    assert states["own"].reporters.ids.tolist() == [0, 1]
    assert any(line.startswith("hospital_3: own: method of phases is ") for line in said)


def test_an_error_at_a_site_tells_the_server_its_kind_and_no_value(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SMALL)
    rows = project.folder / "sites/hospital_3.csv"
    transport = wire(project, tmp_path)
    rows.write_text(rows.read_text().replace("yes", "secret"))
    said: list[str] = []
    with pytest.raises(Stopped):
        coordinate(project, tmp_path / "out", transport, SOON, said.append)
    assert "hospital_3 is refused: ValueError; see its log, site.log" in said
    assert not any("secret" in str(answer) for *_, answer in transport.messages)
    assert "secret" in (tmp_path / "hospital_3/site.log").read_text()


def test_no_tensor_that_leaves_has_an_axis_of_rows(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=FAULTY, settings=SMALL)
    transport = wire(project, tmp_path)
    made(project, tmp_path / "out", transport)
    shapes = {}
    for _, _, answer in transport.messages:
        for what, flat in answer.items():
            for name, value in flat.items():
                if hasattr(value, "shape"):
                    shapes.setdefault((what, name), set()).add(tuple(value.shape))
    assert len(shapes) > 12
    assert all(len(found) == 1 for found in shapes.values())  # 32, 52 and 72 rows, one shape


def test_the_folder_of_a_study_is_that_of_a_run(tmp_path, capsys):
    project = hospitals.project(tmp_path / "p", methods=("pfedvem", "fisher"))
    stores = coordinate(project, tmp_path / "out", wire(project, tmp_path), SOON, lambda _: None)
    for store in stores.values():
        assert store.finish() == []
    assert "accuracy" in stores["pfedvem"].table()
    folder, table = tmp_path / "out/pfedvem", project.folder / "sites/hospital_1.csv"
    assert (folder / "figures/curves.png").exists()
    facts = json.loads((folder / "run.json").read_text())
    assert facts["sizes"] == {"hospital_1": 32, "hospital_2": 52, "hospital_3": 72}
    assert [row["reported"] for row in facts["each_round"]] == [3, 3]
    run = pyrofl.load(folder)
    toys.assert_same(run.state.server, stores["pfedvem"].server.state.server)
    assert run.metrics.equals(stores["pfedvem"].run.metrics)
    words = ["predict", str(folder), "--data", str(table), "--out", str(tmp_path / "p.csv")]
    assert main([*words, "--client", "hospital_1"]) == 2
    assert "the state of 'hospital_1' is stored at the client" in capsys.readouterr().err
    assert main([*words, "--client", "hospital_1", "--model", "global"]) == 0
    x = torch.as_tensor([[1.0, 2.0, 3.0]], dtype=run.data.dtype)
    assert run.predict(x, None).mean.shape == (1, 2)
    assert main(["report", str(folder)]) == 0
    assert not (folder / "posterior.nc").exists()  # its posterior is of each site's own head
    drawn = arviz.from_netcdf(tmp_path / "out/fisher/posterior.nc")["posterior"]
    assert drawn["head.weight"].shape[:2] == (1, 1000)
    assert drawn.attrs["corrected"] == "yes"


def test_a_site_that_is_slow_to_start_is_waited_for(tmp_path):
    """A node has as long for its introduction as the operator says, not a fixed minute."""
    project = hospitals.project(tmp_path / "p", rounds=1)
    transport, said = hospitals.wire(project, tmp_path), []
    usual = transport.exchange

    def slow(messages, timeout):
        is_greeting = any("hello" in records for records in messages.values())
        replies = usual(messages, timeout)
        return {} if is_greeting and timeout < 300 else replies

    transport.exchange = slow
    with pytest.raises(Stopped, match=r"0 of 3 sites are there after 0 s \(none\)"):
        coordinate(project, tmp_path / "out", transport, ServerSettings(3, 3, 0.0), said.append)
    assert any("3 of 3 connected nodes have not introduced their sites within" in s for s in said)
    coordinate(project, tmp_path / "out", transport, ServerSettings(3, 3, 300.0), said.append)
    assert any("round 1 of at most 1: 3 of 3 sites replied" in line for line in said)
