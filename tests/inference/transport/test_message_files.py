"""A study by signed files, each read by a new process, equals one whose messages are passed on."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

pytest.importorskip("cryptography")
pytest.importorskip("formulae")

from certificates import node_key
from messy_hospitals import LOGISTIC, clients_of, hospitals

import pyrofl
from pyrofl import Client, RegressionServer, Server
from pyrofl.data.outlines import outline
from pyrofl.inference import hmc
from pyrofl.inference.transport.correction import Correction
from pyrofl.inference.transport.message_files import (
    message_id,
    read_message,
    read_private_key,
    read_public_key,
    write_message,
)


def keys_of(folder, *names):
    """Make keys; return the private keys and the public keys by name."""
    private = {name: read_private_key(node_key(folder, name)) for name in names}
    return private, {name: read_public_key(folder / f"{name}.pub") for name in names}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Shorten the server's chains."""
    for name, value in {"NUM_METRIC_UPDATES": 1, "THINNING": 1}.items():
        monkeypatch.setattr(hmc, name, value)


class Study:
    """Server and hospitals of a logistic regression; nobody remembers anything but folders.

    Attributes:
        folder: of all states; None keeps states in memory, and passes messages on.
    """

    def __init__(self, folder=None):
        self.folder, self.number = folder, 0
        if folder:
            self.keys, self.public = keys_of(folder / "keys", "server", *hospitals())
        formula, how = LOGISTIC
        self.sides = clients_of(hospitals(), formula, **how)
        self.results, self.is_agreed = {}, False
        while not self.is_agreed:
            server = RegressionServer(formula, list(self.sides), results=self.results, **how)
            replies = self.answered(server.configure_describe(), self.describe)
            server.aggregate_describe(replies)
            self.results, self.is_agreed = server.results, server.is_agreed
        self.agreement, self.plans = server, server.configure_describe()
        self.method, self.kept = server.method, {}

    def describe(self, name, request):
        return self.sides[name].describe(request)

    @property
    def server(self):
        make = lambda: Server(  # noqa: E731
            self.method,
            self.agreement.names,
            self.agreement.sizes,
            torch.float64,
            state=self.folder and self.folder / "server",
        )
        return make() if self.folder else self.kept.setdefault("server", make())

    def client(self, name):
        state = self.folder and self.folder / name
        parts = self.sides[name].build(self.plans[name])
        return Client(*parts, state=state) if state else self.kept.setdefault(name, Client(*parts))

    def answered(self, requests, function):
        """Return the replies of all hospitals, by files if there is a folder."""
        if self.folder is None:
            return {name: function(name, request) for name, request in requests.items()}
        self.number += 1
        for name, request in requests.items():
            path = self.folder / f"{self.number} to {name}.json"
            about = {"study": "deaths", "sender": "server", "recipient": name}
            write_message(path, {"it": request}, self.keys["server"], **about)
        sent = {}
        for name in requests:
            came = read_message(self.folder / f"{self.number} to {name}.json", self.public)
            reply = {"it": function(name, came.records["it"])}
            about = {"study": "deaths", "sender": name, "recipient": "server", "answers": came.id}
            sent[name] = self.folder / f"{self.number} of {name}.json"
            write_message(sent[name], reply, self.keys[name], **about)
        replies = {name: read_message(path, self.public, "deaths") for name, path in sent.items()}
        for name, reply in replies.items():
            assert reply.answers == message_id({"it": requests[name]})
        return {name: reply.records["it"] for name, reply in replies.items()}

    def round(self):
        orders = self.server.configure_train()
        replies = self.answered(orders, lambda name, order: self.client(name).train(order))
        return self.server.aggregate_train(replies)

    def corrected(self):
        replies, rows = (
            [],
            outline(
                self.agreement.names,
                self.agreement.sizes,
                (len(self.agreement.design.places),),
                dtype=torch.float64,
            ),
        )
        while requests := Correction(self.server, rows, 400, replies=replies).configure_weigh():
            correction = Correction(self.server, rows, 400, replies=replies)
            weigh = lambda name, request: self.client(name).weigh(request)  # noqa: E731
            correction.aggregate_weigh(self.answered(requests, weigh))
            replies = correction.replies
        return correction.draws, len(replies)


def test_a_study_by_files_equals_one_in_memory_bit_for_bit(tmp_path):
    by_files, in_memory = Study(tmp_path), Study()
    assert by_files.results == in_memory.results
    for _ in range(2):
        by_files.round()
        in_memory.round()
    for name, value in in_memory.server.state.server.items():
        assert torch.equal(by_files.server.state.server[name], value)
    assert str(by_files.server.status) == str(in_memory.server.status)
    assert by_files.server.status.kind in ("converged", "not converged")
    (found, exchanges), (expected, count) = by_files.corrected(), in_memory.corrected()
    assert exchanges == count > 1
    assert found.outcome == expected.outcome == "yes"
    for name, value in expected.values.items():
        assert torch.equal(found.values[name], value)
    first = json.loads((tmp_path / "1 of bern.json").read_text())
    assert "levels" in first["words"]  # a person can read what leaves


def test_the_status_of_a_server_is_that_of_a_fit():
    study = Study()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the server has them
        tables = pyrofl.federations.from_frames(hospitals())
        method = pyrofl.regression(LOGISTIC[0], tables, **LOGISTIC[1])
    assert study.server.status.kind == "not converged"
    for rounds in (1, 2):
        while study.server.state.number < rounds:
            study.round()
        run = pyrofl.fit(method, tables, rounds, progress=False, chunk_size=1)
        assert study.server.status.kind == run.status.kind


def test_a_correction_with_an_invalid_reply_can_go_on():
    study = Study()
    study.round()
    rows = outline(study.agreement.names, study.agreement.sizes, (5,), dtype=torch.float64)
    correction = Correction(study.server, rows, 400)
    requests = correction.configure_weigh()
    replies = {n: study.client(n).weigh(one) for n, one in requests.items()}
    lost = {n: reply for n, reply in replies.items() if n != "chur"}
    with pytest.raises(ValueError, match=r"^chur: no reply$"):
        correction.aggregate_weigh(lost)
    odd = replies["chur"] | {"up/log_l": replies["chur"]["up/log_l"] * float("nan")}
    with pytest.raises(ValueError, match=r"^chur: its reply has NaN or infinite numbers$"):
        correction.aggregate_weigh(lost | {"chur": odd})
    assert correction.draws is None
    assert list(correction.configure_weigh()) == list(requests)
    correction.aggregate_weigh(replies)
    assert len(correction.replies) == 1
    with pytest.raises(ValueError, match=r"^bern: its reply is of .*; expected "):
        correction.aggregate_weigh(replies)  # of the exchange before


def test_files_that_are_changed_or_foreign_are_refused(tmp_path):
    path, records = tmp_path / "m.json", {"it": {"round": 1, "w": torch.ones(2)}}
    private, public = keys_of(tmp_path, "bern", "chur")
    about = {"study": "deaths", "sender": "bern", "recipient": "server", "number": 3}
    answers = message_id({"it": {"round": 1}})
    write_message(path, records, private["bern"], **about, answers=answers)
    found = read_message(path, public, "deaths")
    assert (found.sender, found.number, found.answers) == ("bern", 3, answers)
    assert found.id == message_id(records)
    assert found.records["it"]["round"] == 1
    assert torch.equal(found.records["it"]["w"], torch.ones(2))
    whole = path.read_text()
    unsigned = "is not signed with the key of"
    for change, study, text in (
        (("round", "rounb"), "", f"{unsigned} bern; expected an unchanged file"),
        (('"bern"', '"chur"'), "", f"{unsigned} chur"),
        (('"number": 3', '"number": 4'), "", f"{unsigned} bern"),
        (('"signature": "', '"signature": "zz'), "", f"{unsigned} bern"),
        (('"bern"', '"basel"'), "", "is of basel; expected a file of bern, chur"),
        (("", ""), "births", "is of study deaths; expected a file of births"),
        (('"version"', '"versiom"'), "", "is no message; expected a file of `pyrofl study`"),
        (('"number": 3', '"number": true'), "", "is no message"),
        (('"version": 2', '"version": 1'), "", "has version 1; expected 2: use one pyrofl"),
        (('"number": 3', f'"number": {"9" * 5000}'), "", "cannot be read"),
        (("{", "["), "", "cannot be read"),
    ):
        path.write_text(whole.replace(*change) if change[0] else whole)
        with pytest.raises(ValueError, match=text):
            read_message(path, public, study)
    path.write_text(whole)
    with pytest.raises(ValueError, match=f"{unsigned} bern"):
        read_message(path, {"bern": public["chur"]})
    with pytest.raises(ValueError, match=r"m2.json cannot be read.*; expected a message"):
        read_message(tmp_path / "m2.json", public)


def test_keys_of_other_kinds_are_refused(tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    key, open_form = ec.generate_private_key(ec.SECP384R1()), serialization.NoEncryption()
    other = ed25519.Ed25519PrivateKey.generate().private_bytes(*form, open_form)
    closed = key.private_bytes(*form, open_form)[:200]
    path = tmp_path / "key"
    for content, text in ((other, "is of another kind"), (closed, "cannot be read"), (b"", "read")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{text}.*expected the private key, without password"):
            read_private_key(path)
