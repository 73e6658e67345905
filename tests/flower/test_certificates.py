"""A certificate that nodes would not take is refused before anything starts."""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

import hospitals
import pytest

from pyrofl.cli.parser import main
from pyrofl.flower.apps import site_of_nodes
from pyrofl.flower.certificates import refuse_certificate, refuse_unproven, wait_for_server
from pyrofl.flower.processes import free_port, program

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    from certificates import authority

    folder = tmp_path_factory.mktemp("made")
    return {n: authority(folder / n, days) for n, days in (("good", 9), ("old", -1), ("other", 9))}


@pytest.mark.parametrize(
    ("host", "cert", "key", "ca", "told"),
    [
        ("127.0.0.1", "good", "good", "good", None),
        ("localhost", "good", "good", "good", None),
        (
            "10.0.0.1",
            "good",
            "good",
            "good",
            "IP address mismatch.+; expected .+, for 10.0.0.1 and",
        ),
        (
            "127.0.0.1",
            "old",
            "old",
            "old",
            "does not prove who it is: certificate has expired; expe",
        ),
        ("127.0.0.1", "good", "good", "other", "unable to get local issuer certificate; expected"),
        (
            "127.0.0.1",
            "good",
            "other",
            "good",
            "KEY_VALUES_MISMATCH.+; expected a certificate and i",
        ),
    ],
)
def test_a_certificate_is_refused_by_what_is_wrong_with_it(made, host, cert, key, ca, told):
    files = made[cert]["cert"], made[key]["key"], made[ca]["ca"]
    if told is None:
        refuse_certificate(host, *files)
        return
    with pytest.raises(ValueError, match=told):
        refuse_certificate(host, *files)


def test_a_server_is_waited_for_and_refused_if_it_speaks_no_tls(made, capsys):
    port = free_port()
    with pytest.raises(OSError, match="refused"):
        refuse_unproven("127.0.0.1", port, made["good"]["ca"])
    with socket.socket() as server:

        def plain() -> None:
            server.bind(("127.0.0.1", port))
            server.listen()
            with server.accept()[0] as one:
                one.sendall(b"HTTP/1.1 400 \r\n\r\n")

        late = threading.Timer(0.2, plain)
        late.start()
        with pytest.raises(
            ValueError, match=r"does not prove who it is: .+; expected a certificate"
        ):
            wait_for_server(f"127.0.0.1:{port}", made["good"]["ca"])
        late.join()
    assert capsys.readouterr().err.count("no server answers at 127.0.0.1:") == 1


def test_a_server_without_keys_takes_any_node(tmp_path):
    """An empty record is that of a server on this machine without keys."""
    (tmp_path / "nodes.json").write_text("{}")
    assert site_of_nodes(tmp_path / "nodes.json") is None
    assert site_of_nodes(tmp_path / "none.json") is None
    (tmp_path / "nodes.json").write_text('{"12": "bern"}')
    assert site_of_nodes(tmp_path / "nodes.json") == {12: "bern"}


def test_a_machine_without_temporary_files_is_refused(monkeypatch):
    def lacking():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", lacking)
    with pytest.raises(ValueError, match=r"No usable temporary .*; expected .*PrivateTmp=true"):
        program("flower-supernode")


PAGE = Path(__file__).parent.parent.parent / "examples/docs/flower.md"
UNIT = re.compile(r"```ini\n(.*?)```", re.DOTALL)


def test_the_command_of_the_systemd_unit_is_valid(tmp_path, monkeypatch, capsys):
    """Its options are those of `join`, and its only folder that can be written is the state."""
    unit = UNIT.search(PAGE.read_text())[1]
    command = re.search("ExecStart=(.+)", unit)[1].split()
    hospitals.project(tmp_path / "p")
    monkeypatch.chdir(tmp_path / "p")
    assert command[0].endswith("/bin/pyrofl")
    assert main([*command[1:], "--show"]) == 2  # the keys are elsewhere
    assert "--key is 'node.key'; expected a file" in capsys.readouterr().err
    folder = re.search("WorkingDirectory=(.+)", unit)[1]
    state = command[command.index("--state") + 1]
    assert f"ReadWritePaths={folder}/{state}" in unit
    assert "PrivateTmp=true" in unit
