"""A study by signed files has the results of a study over a network, at any pace."""

from __future__ import annotations

import io
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import arviz
import hospitals
import pandas as pd
import pytest
import torch
from hospitals import NAMES, lenient, wire
from promises import others_slow

pytest.importorskip("cryptography")

from certificates import node_key
from messy_hospitals import LOGISTIC, study

from pyrofl.cli import main
from pyrofl.files import checkpoint_file
from pyrofl.flower.coordinator import ServerSettings, coordinate
from pyrofl.flower.project import Project
from pyrofl.inference import hmc
from pyrofl.inference.transport.message_files import (
    read_message,
    read_private_key,
    read_public_key,
    write_message,
)
from pyrofl.tensors import role


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Shorten the server's chains."""
    for name, value in {"NUM_METRIC_UPDATES": 1, "THINNING": 1}.items():
        monkeypatch.setattr(hmc, name, value)


@dataclass
class ByFiles:
    """A server and sites that share only files, with commands in this process.

    Attributes:
        folder: of keys, states, messages and results.
        project: the study.
        names: names of the sites.
    """

    folder: Path
    project: Project
    names: tuple[str, ...] = NAMES
    options: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            node_key(self.folder / "nodes", name)
        node_key(self.folder / "keys", "server")
        self.messages, self.out = self.folder / "mail", self.folder / "out"

    def exchange(self, *more: str) -> int:
        words = ["exchange", str(self.project.folder), "--nodes", str(self.folder / "nodes")]
        words += ["--key", str(self.folder / "keys/server.key"), "--out", str(self.out)]
        return main(["study", *words, "--messages", str(self.messages), *more])

    def answer(self, name: str, *more: str, request: Path | None = None, yes: bool = True) -> int:
        words = ["answer", str(request or self.request(name)), "--name", name]
        words += ["--data", str(self.project.folder / f"sites/{name}.csv")]
        words += ["--state", str(self.folder / name), "--study", str(self.project.folder)]
        words += ["--key", str(self.folder / f"nodes/{name}.key")]
        words += ["--server-key", str(self.folder / "keys/server.pub")]
        words += ["--rules", lenient(self.folder), *(["--yes"] if yes else [])]
        return main(["study", *words, *more])

    def request(self, name: str) -> Path:
        (path,) = self.messages.glob(f"{name}-request-*.json")
        return path

    def reply(self, name: str) -> Path:
        (path,) = self.messages.glob(f"{name}-reply-*.json")
        return path

    def open_sites(self) -> list[str]:
        return [name for name in self.names if [*self.messages.glob(f"{name}-request-*.json")]]

    @property
    def is_over(self) -> bool:
        return bool([*self.out.glob("*/run.json")])

    def run(self, calls: int = 40) -> None:
        """Exchange files until the study is over."""
        while calls and not self.is_over:
            assert self.exchange() == 0
            for name in self.open_sites():
                assert self.answer(name) == 0
            calls -= 1
        assert self.is_over


def over_network(project, folder, transport, least=3, sites=3):
    """Run the study by messages in this process."""
    settings = ServerSettings(sites, least, 0.0)
    (store,) = coordinate(project, folder / "out", transport, settings, lambda text: None).values()
    assert store.finish() == []
    return store


def same_results(study, other, name):
    """Compare states and posteriors of two runs bit for bit."""
    states = [
        role("state", checkpoint_file.read_any(out / name / "server/server.safetensors")[1])
        for out in (study.out, other / "out")
    ]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    pairs = [(study.out / name, other / "out" / name)]
    pairs += [(study.folder / site / name, other / site / name) for site in study.names]
    for pair in pairs:
        has = [(folder / "posterior.nc").exists() for folder in pair]
        assert has[0] == has[1]
        if has[0]:
            found, expected = (arviz.from_netcdf(p / "posterior.nc")["posterior"] for p in pair)
            assert found.attrs["corrected"] == expected.attrs["corrected"]
            assert found.drop_attrs().identical(expected.drop_attrs())


KINDS = ["methods", "eight_schools", "mixed", "regression"]


def study_of(kind, folder):
    """Write a study of a kind; return it, the names of its sites and that of its method."""
    if kind == "methods":
        return hospitals.project(folder), NAMES, "pfedvem"
    if kind == "regression":
        formula, how = LOGISTIC
        names = ("basel", "bern", "chur")
        return study(folder, formula, rounds=3, **how), names, "regression"
    return hospitals.hierarchical(folder, kind, rounds=2), NAMES, kind


def wire_of(project, folder, names):
    if names == NAMES:
        return wire(project, folder)
    sites = {10 + j: hospitals.site(project, folder, name) for j, name in enumerate(names)}
    return hospitals.Wire(sites)


@pytest.mark.parametrize("kind", others_slow(KINDS, ["mixed", "regression"]))
def test_a_study_by_files_equals_one_by_messages_bit_for_bit(kind, tmp_path, capsys):
    project, names, method = study_of(kind, tmp_path / "p")
    by_files = ByFiles(tmp_path / "files", project, names)
    by_files.run()
    for _ in range(2):  # the last request may be answered again
        assert by_files.answer(names[0]) == 0
    over_network(project, tmp_path / "network", wire_of(project, tmp_path / "network", names))
    same_results(by_files, tmp_path / "network", method)
    said = capsys.readouterr()
    assert "What leaves this site, and no row of it" in said.out
    assert "waiting for replies of" in said.err
    assert sorted(p.name for p in by_files.messages.iterdir()) == sorted(
        f"{n}-request-{by_files.request(n).stem.rpartition('-')[2]}.json" for n in names
    )
    folder = str(by_files.out / method)
    assert main(["report", folder]) == 0
    assert (by_files.out / method / "report.html").is_file()
    table = str(project.folder / f"sites/{names[0]}.csv")
    if kind == "methods":
        words = ["--data", table, "--new-client", "--out", str(tmp_path / "new.csv")]
        assert main(["predict", folder, *words]) == 0
        assert len((tmp_path / "new.csv").read_text().splitlines()) > 40
    else:
        words = ["--data", table, "--client", names[0], "--out", str(tmp_path / "new.csv")]
        assert main(["predict", folder, *words]) == 2
        assert "`pyrofl study predict STATE` at a site" in capsys.readouterr().err
    if kind in ("mixed", "regression"):
        pd.read_csv(table).dropna().to_csv(tmp_path / "rows.csv", index=False)
        words = [str(by_files.folder / names[0]), "--rows", str(tmp_path / "rows.csv")]
        words += ["--out", str(tmp_path / "o.csv")]
        assert main(["study", "predict", *words]) == 0


def test_a_site_that_is_late_by_a_round_misses_it(tmp_path, capsys):
    """Its late reply is refused, and it takes part in the next round."""
    project = hospitals.project(tmp_path / "p", rounds=3)
    by_files = ByFiles(tmp_path / "files", project)
    assert by_files.exchange() == 0
    for name in NAMES:
        assert by_files.answer(name) == 0
    assert by_files.exchange() == 0
    for name in NAMES:
        assert by_files.answer(name) == 0
    late = by_files.reply("hospital_2")
    late = late.rename(tmp_path / late.name)
    assert by_files.exchange() == 0
    assert "waiting for replies of hospital_2 in" in capsys.readouterr().err
    assert by_files.exchange("--without", "hospital_2") == 0
    assert "round 1 of at most 3: 2 of 3 sites replied" in capsys.readouterr().err
    late.rename(by_files.messages / late.name)
    assert by_files.exchange() == 0
    said = capsys.readouterr().err
    assert (
        "a file of hospital_2 replies to its request 2; expected a reply to its request 3" in said
    )
    (by_files.messages / late.name).unlink()
    by_files.run()
    transport = wire(project, tmp_path / "network")
    transport.spoil = lambda number, node, reply: None if (number, node) == (1, 11) else reply
    over_network(project, tmp_path / "network", transport, least=2)
    same_results(by_files, tmp_path / "network", "pfedvem")


def test_an_interrupted_command_continues(tmp_path, monkeypatch):
    from pyrofl.flower import file_transport
    from pyrofl.inference.transport import Server

    project = hospitals.project(tmp_path / "p")
    by_files = ByFiles(tmp_path / "files", project)
    assert by_files.exchange() == 0
    calls = []

    def interrupted(function, *when):
        def call(*args, **options):
            calls.append(None)
            if len(calls) in when:
                raise KeyboardInterrupt
            return function(*args, **options)

        return call

    for name in NAMES:
        assert by_files.answer(name) == 0
    monkeypatch.setattr(
        file_transport, "write_message", interrupted(file_transport.write_message, 2)
    )
    assert by_files.exchange() == 130
    assert by_files.open_sites() == ["hospital_1"]
    assert by_files.answer("hospital_1") == 0
    assert by_files.exchange() == 0
    assert by_files.open_sites() == ["hospital_2", "hospital_3"]
    for name in NAMES[1:]:
        assert by_files.answer(name) == 0
    calls.clear()
    monkeypatch.setattr(Server, "aggregate_train", interrupted(Server.aggregate_train, 1))
    assert by_files.exchange() == 130
    by_files.run()
    over_network(project, tmp_path / "network", wire(project, tmp_path / "network"))
    same_results(by_files, tmp_path / "network", "pfedvem")


@pytest.fixture
def begun(tmp_path, capsys):
    """Return a study whose first request all sites have answered, with their second request."""
    by_files = ByFiles(tmp_path / "files", hospitals.project(tmp_path / "p"))
    assert by_files.exchange() == 0
    old = tmp_path / "old"
    old.mkdir()
    for name in NAMES:
        shutil.copy(by_files.request(name), old)
        assert by_files.answer(name) == 0
        shutil.copy(by_files.reply(name), old)
    assert by_files.exchange() == 0
    capsys.readouterr()
    return by_files


def edited(path, change):
    path.write_text(change(path.read_text()))


def another_study(begun, tmp_path):
    """Return the request and reply of a second study with the same project and keys."""
    other = ByFiles(tmp_path / "other", begun.project)
    shutil.copytree(begun.folder / "nodes", tmp_path / "other/nodes", dirs_exist_ok=True)
    shutil.copytree(begun.folder / "keys", tmp_path / "other/keys", dirs_exist_ok=True)
    assert other.exchange() == 0
    assert other.answer("hospital_1") == 0
    return other


def foreign_key(begun, tmp_path):
    """Let hospital_2 write as hospital_1."""
    for end in ("key", "pub"):
        shutil.copy(begun.folder / f"nodes/hospital_1.{end}", tmp_path / f"own.{end}")
    shutil.copy(begun.folder / "nodes/hospital_2.key", begun.folder / "nodes/hospital_1.key")
    edited(begun.folder / "hospital_1/answered.json", lambda text: text.replace('"key"', '"x"'))


REFUSED_REPLIES = {
    "older round": (
        lambda s, t: shutil.copy(t / "old/hospital_1-reply-1.json", s.messages),
        "a file of hospital_1 replies to its request 1; expected a reply to its request 2",
    ),
    "other study": (
        lambda s, t: shutil.copy(another_study(s, t).reply("hospital_1"), s.messages),
        r"hospital_1-reply-1.json is of study p \w+; expected a file of p \w+",
    ),
    "edited": (
        lambda s, t: (s.answer("hospital_1"), edited(s.reply("hospital_1"), change_digit)),
        "is not signed with the key of hospital_1; expected an unchanged file",
    ),
    "cut off": (
        lambda s, t: (s.answer("hospital_1"), edited(s.reply("hospital_1"), lambda x: x[:500])),
        "cannot be read .*; expected a message, which may be cut off here",
    ),
    "empty": (lambda s, t: (s.messages / "a.json").write_text(""), "a.json cannot be read"),
    "folder": (lambda s, t: (s.messages / "a.json").mkdir(), "a.json is no file"),
    "another text": (
        lambda s, t: (s.messages / "a.txt").write_text("Dear all,"),
        "a.txt cannot be read",
    ),
    "JSON": (lambda s, t: (s.messages / "a.json").write_text("[1]"), "a.json is no message"),
    "own request": (
        lambda s, t: shutil.copy(s.request("hospital_1"), s.messages / "mine.json"),
        "mine.json is of server; expected a file of hospital_1, hospital_2, hospital_3",
    ),
    "foreign key": (
        lambda s, t: (foreign_key(s, t), s.answer("hospital_1")),
        "is not signed with the key of hospital_1",
    ),
    "huge": (
        lambda s, t: truncate(s.messages / "huge.json", 3_000_000_000),
        "huge.json has 3,000,000,000 bytes; expected at most 2,000,000,000",
    ),
    "deep": (lambda s, t: (s.messages / "a.json").write_text("[" * 10**6), "a.json cannot be read"),
}


def change_digit(text):
    at = text.index('"tensors": "') + 500
    return text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]


def truncate(path, size):
    with open(path, "wb") as file:
        file.truncate(size)


@pytest.mark.parametrize("kind", REFUSED_REPLIES)
def test_a_reply_that_is_odd_is_refused_in_one_line(kind, begun, tmp_path, capsys):
    change, text = REFUSED_REPLIES[kind]
    before = sorted(path.name for path in (begun.out / "replies").iterdir())
    change(begun, tmp_path)
    capsys.readouterr()
    assert begun.exchange() == 0
    said = capsys.readouterr().err.splitlines()
    (line,) = (line for line in said if line.startswith("refused: "))
    assert re.search(text, line)
    assert said[-1].startswith("waiting for replies of hospital_1, hospital_2, hospital_3 in")
    assert sorted(path.name for path in (begun.out / "replies").iterdir()) == before


def test_an_empty_signed_reply_names_the_flags_that_help(begun, capsys):
    """The names of the sites are printed by the first command, and by no later one."""
    for name in NAMES[:2]:
        assert begun.answer(name) == 0
    request = read_message(begun.request("hospital_3"), {"server": server_key(begun)})
    head = {"sender": "hospital_3", "recipient": "server", "number": request.number}
    key = read_private_key(begun.folder / "nodes/hospital_3.key")
    path = begun.messages / "hospital_3-reply-2.json"
    write_message(path, {}, key, study=request.study, answers=request.id, **head)
    assert begun.exchange() == 3
    said = capsys.readouterr().err
    assert "is there" not in said
    flags = "--ask-again NAME after a mistake there, or --without NAME, of hospital_3"
    assert f"round 1: 2 sites replied; expected at least 3 ({flags})" in said
    assert "--min-sites" not in said
    assert begun.exchange("--ask-again", "hospital_3") == 0
    shutil.rmtree(begun.folder / "hospital_3")
    assert begun.answer("hospital_3") == 0


def server_key(by_files):
    return read_public_key(by_files.folder / "keys/server.pub")


def test_a_second_reply_does_not_replace_the_first(begun, tmp_path, capsys):
    assert begun.answer("hospital_1") == 0
    path, request = begun.reply("hospital_1"), begun.request("hospital_1")
    assert begun.answer("hospital_1") == 0  # as its first file was lost
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as some programs save files
    first = path.read_bytes()
    shutil.copy(request, tmp_path / "request.json")
    assert begun.exchange() == 0
    assert not path.exists()
    path.write_bytes(first)
    capsys.readouterr()
    assert begun.exchange() == 0
    assert "refused" not in capsys.readouterr().err  # the same file once more
    assert not path.exists()
    assert begun.answer("hospital_1", request=tmp_path / "request.json", yes=True) == 0
    shutil.copy(tmp_path / path.name, begun.messages)
    assert begun.exchange() == 0
    assert "hospital_1 has replied before; that reply counts" in capsys.readouterr().err
    assert (begun.out / "replies" / path.name).read_bytes() == first


def of_name(study, name):
    return study.answer("hospital_1", request=study.request(name))


REFUSED_REQUESTS = {
    "of another site": (
        lambda s, t: of_name(s, "hospital_2"),
        "is for hospital_2; expected a request for hospital_1",
    ),
    "of an older round": (
        lambda s, t: (
            s.answer("hospital_1"),
            s.answer("hospital_1", request=t / "old/hospital_1-request-1.json"),
        )[1],
        "request 1 came after request 2, which is answered",
    ),
    "of another study": (
        lambda s, t: s.answer("hospital_1", request=another_study(s, t).request("hospital_1")),
        r"is of study p \w+, and the request of p \w+; expected another --state",
    ),
    "edited": (
        lambda s, t: (
            edited(s.request("hospital_1"), change_digit),
            s.answer("hospital_1"),
        )[1],
        "is not signed with the key of server",
    ),
    "a reply": (
        lambda s, t: s.answer("hospital_1", request=t / "old/hospital_1-reply-1.json"),
        "is of hospital_1; expected a file of server",
    ),
    "no file": (
        lambda s, t: s.answer("hospital_1", request=t / "none.json"),
        "none.json cannot be read: No such file or directory",
    ),
    "other rows": (
        lambda s, t: (
            s.answer("hospital_1"),
            s.reply("hospital_1").unlink(),
            edited(s.project.folder / "sites/hospital_1.csv", lambda x: x.replace("yes", "no", 1)),
            s.answer("hospital_1"),
        )[-1],
        "hospital_1.csv has changed since numbers of its rows left; expected the same rows in all",
    ),
    "no key": (
        lambda s, t: ((s.folder / "nodes/hospital_1.key").unlink(), s.answer("hospital_1"))[1],
        "hospital_1.key cannot be read: No such file or directory; expected the private key",
    ),
    "public as private key": (
        lambda s, t: s.answer("hospital_1", "--key", str(s.folder / "nodes/hospital_1.pub")),
        "hospital_1.pub cannot be read",
    ),
    "other project": (
        lambda s, t: (
            edited(s.project.folder / "study.yaml", lambda x: x.replace("{", '{"seed": 1,', 1)),
            s.answer("hospital_1"),
        )[1],
        "study.yaml has changed since request 1; expected the study file of the server",
    ),
    "out is the table": (
        lambda s, t: s.answer(
            "hospital_1", "--out", str(s.project.folder / "sites/hospital_1.csv")
        ),
        "hospital_1.csv exists and is no reply of hospital_1; expected another --out",
    ),
    "no state": (
        lambda s, t: s.answer("hospital_1", "--state", str(t / "none")),
        "none has no state of this study, which has begun; expected the --state of earlier replies",
    ),
    "key of another site": (
        lambda s, t: s.answer("hospital_1", "--key", str(s.folder / "nodes/hospital_2.key")),
        "--key is SHA256:.*; expected the key of the first reply, SHA256:",
    ),
    "damaged state": (
        lambda s, t: (
            (s.folder / "hospital_1/answered.json").write_text("{"),
            s.answer("hospital_1"),
        )[1],
        "answered.json is damaged .*; restore it from a backup",
    ),
    "out is a folder": (
        lambda s, t: s.answer("hospital_1", "--out", str(t)),
        "is a folder; expected a file such as hospital_1-reply-2.json",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_REQUESTS)
def test_a_request_that_is_odd_is_refused_in_one_line(kind, begun, tmp_path, capsys):
    call, text = REFUSED_REQUESTS[kind]
    assert call(begun, tmp_path) == 2
    said = capsys.readouterr().err.splitlines()
    assert re.search(text, said[-1])
    assert said[-1].startswith("pyrofl: ")
    if kind != "of an older round":
        assert not [*begun.messages.glob("*-reply-*")]


def test_nothing_is_written_without_consent(begun, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda: "n")
    assert begun.answer("hospital_1", yes=False) == 2
    assert "no reply was written, as you did not agree" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.undo()
    assert begun.answer("hospital_1", "--show", yes=False) == 0
    said = capsys.readouterr().out
    assert "asks for:\npfedvem: the update of round 1" in said
    assert "What leaves this site, and no row of it" in said
    assert not [*begun.messages.glob("*-reply-*")]
    monkeypatch.setattr("builtins.input", lambda: "y")
    assert begun.answer("hospital_1", yes=False) == 0
    said = capsys.readouterr().out
    assert "reply/pfedvem/0: up/mean/head.weight [1, 2, 3] 48 bytes" in said
    log = (begun.folder / "hospital_1/site.log").read_text()
    assert "not sent: no consent" in log
    assert "leaves: reply/pfedvem/0" in log


def test_a_site_that_lost_its_state_returns_as_a_new_client(tmp_path, capsys):
    by_files = ByFiles(tmp_path / "files", hospitals.project(tmp_path / "p", rounds=3))
    for _ in range(2):
        assert by_files.exchange() == 0
        for name in NAMES:
            assert by_files.answer(name) == 0
    assert by_files.exchange() == 0
    shutil.rmtree(tmp_path / "files/hospital_2")
    rows = tmp_path / "p/sites/hospital_2.csv"
    table = rows.read_text()
    rows.write_text(table.rpartition("\n")[0].rpartition("\n")[0] + "\n")
    assert by_files.answer("hospital_2") == 2
    said = capsys.readouterr().err
    assert "hospital_2 has no state of this study, which has begun; expected the --state" in said
    assert not (tmp_path / "files/hospital_2").exists()
    rows.write_text(table)
    assert by_files.answer("hospital_2", "--rejoin") == 0
    by_files.run()
    assert "hospital_2 has lost its state of pfedvem: hospital_2 restart" in capsys.readouterr().err


def test_rules_of_a_site_are_checked_before_anything_leaves(begun, tmp_path, capsys):
    strict = tmp_path / "strict.toml"
    strict.write_text("min-rows = 1000\n")
    assert begun.answer("hospital_1", "--rules", str(strict)) == 2
    assert "rule min-rows: " in capsys.readouterr().err
    assert not [*begun.messages.glob("*-reply-*")]


def test_a_trial_of_the_study_comes_before_the_names_of_a_site_leave(tmp_path, capsys):
    """The reply to the greeting has no number of a column, and would break no rule itself."""
    project = study(tmp_path / "p", LOGISTIC[0], **LOGISTIC[1])
    by_files = ByFiles(tmp_path / "files", project, ("basel", "bern", "chur"))
    assert by_files.exchange() == 0
    strict = tmp_path / "strict.toml"
    strict.write_text("min-rows = 1\nmin-level-rows = 1\nmin-events = 0\nrows-per-parameter = 99\n")
    assert by_files.answer("bern", "--rules", str(strict)) == 2
    assert "rule rows-per-parameter: " in capsys.readouterr().err
    assert not [*by_files.messages.glob("*-reply-*")]
    assert not (tmp_path / "files/bern").exists()


def test_a_site_with_an_error_in_its_table_is_asked_again(tmp_path, capsys):
    names = ("basel", "bern", "chur")
    project = study(tmp_path / "p", LOGISTIC[0], rounds=1, **LOGISTIC[1])
    by_files = ByFiles(tmp_path / "files", project, names)
    table = tmp_path / "p/sites/basel.csv"
    right = table.read_text()
    table.write_text(right.replace(",f,", ",1,").replace(",m,", ",2,"))
    assert by_files.exchange() == 0
    for name in names:
        assert by_files.answer(name) == 0
    assert by_files.exchange() == 0
    for name in names:
        assert by_files.answer(name) == 0
    capsys.readouterr()
    assert by_files.exchange() == 2
    assert "text at bern, chur; expected one type at all clients" in capsys.readouterr().err
    table.write_text(right)
    assert by_files.exchange("--ask-again", "basel") == 0
    assert by_files.answer("basel") == 2
    assert "basel.csv has changed since numbers of its rows left" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "files/basel")
    by_files.run()
    over_network(project, tmp_path / "network", wire_of(project, tmp_path / "network", names))
    same_results(by_files, tmp_path / "network", "regression")


def test_the_server_keeps_the_key_of_its_first_request(begun, tmp_path, capsys):
    for name in NAMES:
        assert begun.answer(name) == 0
    node_key(tmp_path / "other", "server")
    assert begun.exchange("--key", str(tmp_path / "other/server.key")) == 2
    said = capsys.readouterr().err
    assert "--key is SHA256:" in said
    assert "expected the key of the first request, SHA256:" in said
    assert begun.open_sites() == [*NAMES]
    begun.run()


def test_another_study_is_refused_once_a_site_has_replied(begun, capsys):
    requests = sorted(path.name for path in begun.messages.iterdir())
    edited(begun.project.file, lambda text: text.replace("{", '{"seed": 7,', 1))
    assert begun.exchange() == 2
    assert "out is of another run; now seed is 7 and was" in capsys.readouterr().err
    assert sorted(path.name for path in begun.messages.iterdir()) == requests
    edited(begun.project.file, lambda text: text.replace('"seed": 7,', ""))
    begun.run()
    edited(begun.project.file, lambda text: text.replace("{", '{"seed": 7,', 1))
    assert begun.exchange() == 2


def test_results_of_another_command_are_not_mixed_with_an_exchange(tmp_path, capsys):
    by_files = ByFiles(tmp_path / "files", hospitals.project(tmp_path / "p"))
    result = by_files.out / "pfedvem/run.json"
    result.parent.mkdir(parents=True)
    result.write_text("{}")
    assert by_files.exchange() == 2
    said = capsys.readouterr().err
    assert "out has the results of another command; expected another --out" in said
    assert [path.name for path in by_files.out.iterdir()] == ["pfedvem"]
    assert not by_files.messages.exists()


def test_odd_options_of_the_server_are_refused(tmp_path, capsys):
    by_files = ByFiles(tmp_path / "files", hospitals.project(tmp_path / "p"))
    for words, text in (
        (("--without", "hospital_9"), "unknown site 'hospital_9'; did you mean"),
        (("--without", ",".join(NAMES)), "--without has all sites"),
        (("--nodes", str(tmp_path)), "has no NAME.pub; expected the public key of each site"),
        (("--key", str(tmp_path / "none")), "none cannot be read: No such file"),
    ):
        assert by_files.exchange(*words) == 2
        assert text in capsys.readouterr().err
    by_files.messages.write_text("a file")
    assert by_files.exchange() == 2
    assert "mail is a file; expected a directory" in capsys.readouterr().err
    node_key(tmp_path / "files/nodes", "server")
    assert by_files.exchange() == 2
    assert "no site may be called server" in capsys.readouterr().err


MESSY = {
    "name of a column": ("age,sex", "Age ,sex", "age .*is called 'Age' +rename it age"),
    "spelling": (",f,", ",F,", r"sex +has 'F' in 1 row, elsewhere 'f' +write 'f'"),
    "text among numbers": (None, "unknown", "age +has 'unknown' in line .* write numbers"),
}


@pytest.mark.parametrize("kind", MESSY)
@pytest.mark.parametrize("command", ["answer", "join"])
def test_problems_of_a_table_are_printed_before_anything_leaves(kind, command, tmp_path, capsys):
    old, new, text = MESSY[kind]
    names = ("basel", "bern", "chur")
    project = study(tmp_path / "p", LOGISTIC[0], **LOGISTIC[1])
    by_files = ByFiles(tmp_path / "files", project, names)
    path = tmp_path / "p/sites/bern.csv"
    table = path.read_text()
    old = old or table.splitlines()[1].partition(",")[0]
    path.write_text(table.replace(old, new, 1))
    assert by_files.exchange() == 0
    capsys.readouterr()
    if command == "answer":
        assert by_files.answer("bern") == 2
    else:
        words = ["--name", "bern", "--study", str(project.folder), "--data", str(path)]
        assert main(["study", "join", "127.0.0.1:1", *words, "--state", str(tmp_path / "s")]) == 2
    said = capsys.readouterr()
    assert re.search(text, said.out)
    assert "bern.csv has 1 problem that would make the study wrong" in said.err
    assert "What leaves" not in said.out
    assert not [*by_files.messages.glob("*-reply-*")]


def test_warnings_on_a_table_do_not_stop_a_site(tmp_path, capsys):
    by_files = ByFiles(tmp_path / "files", hospitals.project(tmp_path / "p"))
    path = tmp_path / "p/sites/hospital_1.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, *lines[1:]]) + "\n")
    assert by_files.exchange() == 0
    assert by_files.answer("hospital_1") == 0
    said = capsys.readouterr().out
    assert re.search(r"^column +problem +fix", said, re.MULTILINE)
    assert re.search("rows.* (copies|copy|equal)", said)
