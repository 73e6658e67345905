"""Certificates and keys: who has good ones takes part, who has not is told so in one line."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hospitals
import pytest
from certificates import authority, node_key
from deployed import end_started, left, same, started, until
from hospitals import NAMES

from pyrofl.flower.commands import safe_server, serve_on
from pyrofl.flower.processes import free_port, process_group
from pyrofl.flower.project import Project

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    end_started()


@dataclass
class Study:
    """A server and sites, each in a process of its own that writes NAME.log."""

    folder: Path
    project: Project
    port: int

    def serve(self, name: str, made: dict[str, str]) -> subprocess.Popen[bytes]:
        safe = ["--cert", made["cert"], "--cert-key", made["key"], "--ca", made["ca"]]
        more = ["--port", str(self.port), "--nodes", str(self.folder / "nodes")]
        out = ["--out", str(self.folder / f"out-{name}"), "--timeout", "300"]
        folder = str(self.project.folder)
        return started(self.folder / f"{name}.log", "serve", folder, *safe, *more, *out)

    def join(self, log: str, name: str, key: str, ca: str, port: int) -> subprocess.Popen[bytes]:
        rows = ["--data", str(self.project.folder / f"sites/{name}.csv"), "--name", name]
        more = ["--state", str(self.folder / log), "--study", str(self.project.folder)]
        safe = ["--key", key, "--ca", ca]
        words = [f"127.0.0.1:{port}", *rows, *more, *safe]
        return started(self.folder / f"{log}.log", "join", *words)

    def says(self, log: str, text: str) -> bool:
        path = self.folder / log
        return path.exists() and text in path.read_text()

    def lines(self, log: str) -> list[str]:
        """Return what a site is told beside what will leave."""
        return (self.folder / f"{log}.log").read_text().partition(" joins ")[2].splitlines()[1:]


def test_good_sites_make_the_rounds_of_the_loop_and_others_are_told_why_not(tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("scaffold",), settings=("epochs=1",))
    good, old = authority(tmp_path / "good"), authority(tmp_path / "old", days=-1)
    keys = {name: node_key(tmp_path / "nodes", name) for name in NAMES}
    stranger = node_key(tmp_path / "strangers", "stranger")
    study = Study(tmp_path, project, free_port())
    no_proof(study, good, old, keys["hospital_3"])
    server = study.serve("good", good)
    until(lambda: study.says("good.log", "listening on"))

    def join(log: str, name: str, key: str) -> subprocess.Popen[bytes]:
        return study.join(log, name, key, good["ca"], study.port)

    fine = [join(name, name, keys[name]) for name in NAMES[:2]]
    odd = [join("unknown", "hospital_3", stranger)]
    until(lambda: all(study.says("out-good/server.log", f"{name} is there") for name in NAMES[:2]))
    odd.append(join("twice", "hospital_1", keys["hospital_1"]))
    second = join("second", "hospital_1", keys["hospital_3"])
    told = "hospital_1 is refused: its node has the key of hospital_3; expected hospital_1.pub's"
    until(lambda: study.says("second.log", f"by the server: {told}"))
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 130
    for log, process, key in zip(
        ("unknown", "twice"), odd, (stranger, keys["hospital_1"]), strict=True
    ):
        assert process.wait(300) == 2
        first, _, last = study.lines(log)
        why = f"does not let in the node of {key}: it does not know the key, or a node with it"
        assert why in first
        assert last.startswith("pyrofl: ")
        assert why in last
    assert not (tmp_path / "out-good/sites.json").exists()  # it still waits for the third
    assert not study.says("out-good/server.log", "hospital_3 is there")
    fine.append(join("hospital_3", "hospital_3", keys["hospital_3"]))
    assert server.wait(300) == 0
    assert [process.wait(60) for process in fine] == [0, 0, 0]
    assert study.lines("hospital_3") == ["the study is complete"]
    assert not left(tmp_path)
    same(tmp_path / "out-good", project)


def no_proof(study: Study, good: dict[str, str], old: dict[str, str], key: str) -> None:
    """See that nobody serves with an old certificate, or joins a server that has one."""
    assert study.serve("expired", old).wait(120) == 2
    assert study.says("expired.log", f"--cert {old['cert']} does not prove who it is: certificate")
    assert not (study.folder / "out-expired").exists()
    files = {"--cert": old["cert"], "--cert-key": old["key"], "--ca": old["ca"]}
    safe = safe_server("127.0.0.1", files, sorted((study.folder / "nodes").glob("*.pub")))
    port = free_port()
    with process_group(study.folder / "out-old") as group:
        serve_on(group, "127.0.0.1", port, safe)
        for log, ca, why in (
            ("old", old["ca"], "certificate has expired"),
            ("other", good["ca"], "unable to get local issuer certificate"),
        ):
            assert study.join(log, "hospital_3", key, ca, port).wait(120) == 2
            assert study.says(f"{log}.log", f"does not prove who it is: {why}; expected")
        assert "activate-node" not in (group.home / "superlink.log").read_text().lower()
