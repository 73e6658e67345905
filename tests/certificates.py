"""An authority of one's own, a server's certificate and keys of nodes, made for a test."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any


def authority(folder: Path, days: int = 30) -> dict[str, str]:
    """Write ca.crt, server.pem and server.key for 127.0.0.1; with days < 0 they have expired."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    names = {
        name: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        for name in ("ca", "server")
    }
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}

    def certificate(name: str, *more: tuple[Any, bool], until: datetime.datetime) -> Any:
        made = x509.CertificateBuilder().subject_name(names[name]).issuer_name(names["ca"])
        made = made.public_key(keys[name].public_key()).serial_number(x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(days=60)).not_valid_after(until)
        made = made.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(keys[name].public_key()), False
        )
        made = made.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(keys["ca"].public_key()), False
        )
        for extension, critical in more:
            made = made.add_extension(extension, critical)
        return made.sign(keys["ca"], hashes.SHA256())

    here = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    far = now + datetime.timedelta(days=30)
    ca = certificate("ca", (x509.BasicConstraints(True, None), True), (usage, True), until=far)
    server = certificate("server", (here, False), until=now + datetime.timedelta(days=days))
    files = {"ca": folder / "ca.crt", "cert": folder / "server.pem", "key": folder / "server.key"}
    files["ca"].write_bytes(_pem(ca))
    files["cert"].write_bytes(_pem(server))
    files["key"].write_bytes(_private(keys["server"]))
    return {name: str(file) for name, file in files.items()}


def node_key(folder: Path, name: str) -> str:
    """Write NAME.key and NAME.pub, as ssh-keygen does, and return the former."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    (folder / f"{name}.key").write_bytes(_private(key, ssh=True))
    (folder / f"{name}.key").chmod(0o600)
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(*form))
    return str(folder / f"{name}.key")


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _private(key: Any, ssh: bool = False) -> bytes:
    from cryptography.hazmat.primitives import serialization

    form = serialization.PrivateFormat.OpenSSH if ssh else serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
