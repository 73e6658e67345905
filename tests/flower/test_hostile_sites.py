"""A site that sends what no site sends is named, and the study goes on with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hospitals
import pytest
import torch
import toys
from hospitals import looped, wire

from pyrofl.experiments.console import Stopped
from pyrofl.flower import apps
from pyrofl.flower.coordinator import ServerSettings, coordinate
from pyrofl.inference.transport.records import Records, deserialize, serialize

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SOON = ServerSettings(3, 2, 0.0)
LONG = "x" * 1_000_000
EVIL = "\x1b[2J\n12:00 over: the study is complete\u202e"
Change = Callable[[dict[str, Any]], Any]


def studied(tmp_path, spoil, methods=("fedavg",), **more: Any) -> tuple[Any, list[str], Any]:
    """Run a study whose answers are changed on the way; return stores, log and project."""
    project = hospitals.project(tmp_path / "p", methods=methods, settings=("epochs=1",), **more)
    said: list[str] = []
    transport = wire(project, tmp_path, spoil=spoil)
    stores = coordinate(project, tmp_path / "out", transport, SOON, said.append)
    for line in said:
        assert line.isprintable()
        assert len(line) < 2500
    return stores, said, project


def changed(what: str, change: Change, node: int, at: int, answer: Records, here: int) -> Records:
    """Change the records of one kind in the answers of one site."""
    del here
    if at == node:
        return {n: change(f) if n.startswith(what) else f for n, f in answer.items()}
    return answer


def on_the_way(what: str, change: Change, node: int = 12) -> Any:
    return lambda number, at, answer: changed(what, change, node, at, answer, number)


def put(name: str, value: Any) -> Change:
    return lambda flat: flat | {name: value}


HELLO: dict[str, tuple[Change, str]] = {
    "2^62 rows": (
        put("sizes", torch.tensor([2**62])),
        "its clients have 4,611,686,018,427,387,904",
    ),
    "no row": (put("sizes", torch.tensor([0])), "its clients have 0 to 0 training rows; expected"),
    "negative": (put("sizes", torch.tensor([-5])), "its clients have -5 to -5 training rows"),
    "warned of a text": (put("warned", "age"), "its check warns of age; expected columns of the"),
    "warned of another": (put("warned", ("<b>",)), "its check warns of ('<b>',); expected columns"),
    "sizes of two": (put("sizes", torch.tensor([5, 6])), "sizes is torch.int64 [2]; expected"),
    "sizes of text": (put("sizes", "many"), "sizes is 'many'; expected torch.int64 [1]"),
    "site of a number": (put("site", 3), "site is '3'; expected a printable name"),
    "site of control characters": (put("site", EVIL), "expected a printable name of at most"),
    "long site": (put("site", LONG), "(1,000,000 characters)"),
    "no site": (lambda f: {n: v for n, v in f.items() if n != "site"}, "cannot be read ('site')"),
    "no client": (
        lambda f: f | {"names": (), "sizes": torch.zeros(0, dtype=torch.long)},
        "it has 0 clients; expected 1 to 100,000",
    ),
    "client of another site": (put("names", ("hospital_1",)), "hospital_1 is no client of hospit"),
    "client of control characters": (put("names", (f"hospital_3/{EVIL}",)), "expected a printable"),
    "names of a number": (put("names", 7), "names is 7; expected a tuple of texts"),
}


@pytest.mark.parametrize("kind", HELLO)
def test_a_hostile_introduction_is_refused(kind, tmp_path):
    change, told = HELLO[kind]
    with pytest.raises(Stopped, match=r"2 of 3 sites are there .+ \(hospital_1, hospital_2\); exp"):
        studied(tmp_path, on_the_way("hello", change))
    project = tmp_path / "again"
    project.mkdir()
    said: list[str] = []
    made = hospitals.project(project / "p", methods=("fedavg",), settings=("epochs=1",))
    transport = wire(made, project, spoil=on_the_way("hello", change))
    with pytest.raises(Stopped):
        coordinate(made, project / "out", transport, SOON, said.append)
    (line,) = [line for line in said if "refused" in line]
    assert told in line
    assert line.isprintable()
    assert len(line) < 2500


LOST: dict[str, tuple[Any, str]] = {
    "a number": (3, "names is 3; expected a tuple of texts"),
    "another's": (("hospital_1",), "its reply is of hospital_1; expected a reply of its own clie"),
    "control characters": ((EVIL,), "expected a printable name"),
    "long": ((LONG,), "expected a printable name"),
}


@pytest.mark.parametrize("kind", LOST)
def test_a_hostile_loss_ends_nothing(kind, tmp_path):
    names, told = LOST[kind]

    def spoil(number: int, node: int, answer: Records) -> Records:
        lost = {"lost/pfedvem/0": {"names": names}} if (number, node) == (1, 12) else {}
        return answer | lost

    stores, said, project = studied(tmp_path, spoil, ("fedavg", "pfedvem"))
    (line,) = [line for line in said if line.startswith("hospital_3 cannot rejoin pfedvem: ")]
    assert told in line
    assert not any("restart" in line for line in said)
    toys.assert_same(
        stores["pfedvem"].server.state.server, looped(project, "pfedvem").server, **CLOSE
    )


SCORES: dict[str, Change] = {
    "far below": put("score/accuracy", torch.tensor([-1e9]).double()),
    "NaN": put("score/accuracy", torch.tensor([torch.nan]).double()),
    "rows": put("rows", torch.tensor([10**12])),
    "another's": put("names", ("hospital_1",)),
    "no scores": lambda flat: {n: v for n, v in flat.items() if not n.startswith("score/")},
    "another round": put("round", 9),
}


@pytest.mark.parametrize("kind", SCORES)
def test_hostile_scores_leave_those_of_the_others(kind, tmp_path):
    stores, said, _ = studied(tmp_path, on_the_way("told/", SCORES[kind]))
    store = stores["fedavg"]
    assert store.scores[0].ids.tolist() == [0, 1]
    assert 0 <= store.scores[0].mean("accuracy") <= 1
    assert len(store.run.history) > 0
    assert any(line.startswith("fedavg: scores of hospital_3: ") for line in said)


def test_a_site_answers_for_no_other(tmp_path):
    def spoil(number: int, node: int, answer: Records) -> Records:
        return changed("reply/", put("names", ("hospital_3",)), 10, node, answer, number)

    stores, said, project = studied(tmp_path, spoil)
    expected = looped(project, "fedavg", [{"hospital_1"}] * 2)
    toys.assert_same(stores["fedavg"].server.state.server, expected.server, **CLOSE)
    told = "fedavg: hospital_1: its reply is of hospital_3; expected a reply of its own clients"
    assert said.count(told) == 2


@pytest.mark.parametrize("why", [EVIL, LONG, 7, ["a"]])
def test_a_refusal_is_one_short_line(why, tmp_path):
    def spoil(number: int, node: int, answer: Records) -> Records:
        return {"refused": {"site": "hospital_1", "why": why}} if number and node == 12 else answer

    _, said, _ = studied(tmp_path, spoil)
    assert any(line.startswith("hospital_3: ") for line in said)


def test_the_log_of_a_site_keeps_one_line_for_what_the_server_says(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=("epochs=1",))
    transport = wire(project, tmp_path)
    transport.tell({10: {"refused": {"why": EVIL}}})
    (_, line) = (tmp_path / "hospital_1/site.log").read_text().splitlines()
    assert line.endswith("refused: by the server:  [2J 12:00 over: the study is complete ")


def test_a_site_answers_no_more_rounds_than_its_project_has(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=("epochs=1",))
    transport = wire(project, tmp_path)
    coordinate(project, tmp_path / "out", transport, SOON, lambda _: None)
    orders = [m["order/fedavg/0"] for _, m, _ in transport.messages if "order/fedavg/0" in m]
    more = {"order/fedavg/0": orders[-1] | {"round": project.rounds + 1}}
    answer = transport.exchange({10: more}, 0.0)[10]
    assert "takes part in 2 rounds" in answer["refused"]["why"]


def test_no_message_has_the_seed_of_participation(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=("epochs=1",))
    transport = wire(project, tmp_path)
    coordinate(project, tmp_path / "out", transport, SOON, lambda _: None)
    names = {n for _, message, _ in transport.messages for flat in message.values() for n in flat}
    assert {n for n in names if n.startswith("seed/")} == {"seed/init", "seed/noise"}


BYTES: dict[str, Any] = {
    "nested": ("a" * 0, "[" * 100_000),
    "numbers": (b"", "7"),
    "long expansion": (
        serialize({"a": {"w": torch.zeros(1, 2)}})[0],
        '{"a": {"|w": ["0", 1e400]}}',
    ),
    "huge expansion": (
        serialize({"a": {"w": torch.zeros(1, 2)}})[0],
        f'{{"a": {{"|w": ["0", {10**30}]}}}}',
    ),
    "bytes of a header": (b"\xff" * 64, "{}"),
    "no text": (b"", None),
}


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_that_are_no_message_are_refused(kind):
    content, text = BYTES[kind]
    with pytest.raises(ValueError, match="a message cannot be read"):
        deserialize(content or b"", text)


def test_records_that_raise_are_refused():
    class Odd:
        def __getitem__(self, name: str) -> Any:
            raise EOFError(EVIL)

    (flat,) = apps._read(Odd()).values()
    assert flat["why"].isprintable()
    assert flat["why"].startswith("EOFError: ")
