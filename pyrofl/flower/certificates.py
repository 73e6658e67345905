"""Validation of TLS certificates before Flower starts, since Flower nodes retry silently."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

from pyrofl.experiments.console import tell

SERVER_TIMEOUT = 10.0  # seconds that a server has to answer
RETRY_INTERVAL = 1.0  # seconds between two tries


def wait_for_server(address: str, ca: str | None) -> None:
    """Wait until a server listens at HOST:PORT; verify its certificate if `ca` is given."""
    host, _, port = address.rpartition(":")
    for tries in count():
        try:
            if ca:
                refuse_unproven(host, int(port), ca)
            else:
                socket.create_connection((host, int(port)), SERVER_TIMEOUT).close()
            return
        except OSError as error:
            if not tries:
                tell(f"no server answers at {address} yet ({error.strerror or error}); waiting\n")
            time.sleep(RETRY_INTERVAL)


def refuse_unproven(host: str, port: int, ca: str) -> None:
    """Raise an error if the server does not present a valid TLS certificate."""
    trusted = _trusting(ca)
    with _refused(f"the server at {host}:{port}", ca):
        plain = socket.create_connection((host, port), SERVER_TIMEOUT)
        with plain, trusted.wrap_socket(plain, server_hostname=host):
            pass


def refuse_certificate(host: str, cert: str, key: str, ca: str) -> None:
    """Raise ValueError for a server certificate that nodes or Flower's commands would reject."""
    trusted, serving = _trusting(ca), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        serving.load_cert_chain(cert, key, password="")
    except OSError as error:
        raise ValueError(
            f"--cert {cert} and --cert-key {key} cannot be used ({error}); expected a certificate "
            "and its own key, in PEM and without password"
        ) from error
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusted.wrap_bio(down, up, server_hostname=host)
    sides = [client, serving.wrap_bio(up, down, server_side=True)]
    with _refused(f"--cert {cert}", ca, host):
        for side in sides + sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()


def _trusting(ca: str) -> ssl.SSLContext:
    """Return an SSL context that trusts certificates signed by the given authority."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        message = f"--ca {ca} cannot be used ({error})"
        raise ValueError(f"{message}; expected a certificate in PEM") from error


@contextmanager
def _refused(party: str, ca: str, host: str = "") -> Iterator[None]:
    """Convert TLS errors in the `with` block to a ValueError with the reason."""
    try:
        yield
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason or "no TLS"
        name = f"for {host}" if host else "of that name"
        expected = f"a certificate that {ca} has signed, {name} and of today"
        raise ValueError(f"{party} does not prove who it is: {why}; expected {expected}") from error
