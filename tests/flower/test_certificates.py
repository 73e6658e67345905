"""A certificate that nodes would not take is refused before anything starts."""

from __future__ import annotations

import socket
import threading

import pytest

from pyrofl.flower.certificates import refuse_certificate, refuse_unproven, wait_for_server
from pyrofl.flower.processes import free_port

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
