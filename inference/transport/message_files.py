"""Messages as signed files, for clients without open ports: by e-mail or in a shared folder.

    write_message(path, {"train": request}, server_key, study="mortality", sender="server",
                  recipient="bern")
    message = read_message(path, {"server": public_key}, study="mortality")          at the client
    write_message(path, {"train": client.train(message.records["train"])}, client_key,
                  study="mortality", sender="bern", recipient="server", answers=message.id)

A file is a JSON text with tensors in safetensors format; it has no code. Its signature is ECDSA
with SHA-384 and the sender's key, as `ssh-keygen -t ecdsa` makes it, so that neither sender nor
content can be changed on the way. A reply names the request that it answers, by the hash of its
content, so that a reply to an earlier round cannot be sent again. Files are signed, not encrypted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pyrofl.data.tables.wording import refuse_no_file
from pyrofl.files.run_folder import write_json
from pyrofl.inference.transport.message_checks import MAX_QUOTED_CHARACTERS, one_line
from pyrofl.inference.transport.records import Records, deserialize, serialize

VERSION = 2
MAX_FILE_BYTES = 2_000_000_000  # bytes of a file
MAX_KEY_BYTES = 10_000  # bytes of a file with a key
TEXTS = ("study", "sender", "recipient", "answers", "words", "tensors", "signature")
ENTRIES = ("version", "number", *TEXTS)


@dataclass(frozen=True)
class Message:
    """Message of a signed file, whose sender is verified.

    Attributes:
        study: name of the study.
        sender: name of the client, or "server".
        recipient: as `sender`.
        number: of a request, counted from 1 for each client; that of the request for replies.
        answers: `message_id` of the request that a reply answers; "" for requests.
        records: label -> request or reply.
        id: `message_id` of the records.
    """

    study: str
    sender: str
    recipient: str
    number: int
    answers: str
    records: Records
    id: str


def message_id(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a hash of the content of a message, which its reply names."""
    return _id(*serialize(records))


def _id(content: bytes, words: str) -> str:
    return hashlib.sha256(b"%d " % len(content) + content + words.encode()).hexdigest()


def write_message(
    path: str | Path,
    records: Mapping[str, Mapping[str, Any]],
    key: Any,
    *,
    study: str,
    sender: str,
    recipient: str,
    number: int = 1,
    answers: str = "",
) -> None:
    """Write a signed message to a file, which is replaced if it exists.

    Args:
        path: the file.
        records: label -> request or reply.
        key: private key of the sender, see `read_private_key`.
        study: as in `Message`, and so are the others.
        sender: name of the client, or "server".
        recipient: as `sender`.
        number: of the request.
        answers: `message_id` of the request that a reply answers; "" for requests.

    Raises:
        ValueError: if a record has other values than messages have.
    """
    content, words = serialize(records)
    body: dict[str, Any] = {"version": VERSION, "number": number, "study": study}
    body |= {"sender": sender, "recipient": recipient, "answers": answers, "words": words}
    body |= {"tensors": base64.b64encode(content).decode()}
    write_json(path, body | {"signature": key.sign(_signed_text(body), _algorithm()).hex()})


def read_message(path: str | Path, keys: Mapping[str, Any], study: str = "") -> Message:
    """Return the message of a signed file.

    Args:
        path: the file.
        keys: name of each possible sender -> its public key, see `read_public_key`.
        study: expected name of the study; "" is any.

    Raises:
        ValueError: if the file is damaged, not signed with the key of its sender, or of another
            study.
    """
    body = _read(Path(path))
    signature, sender = body.pop("signature"), one_line(body["sender"], MAX_QUOTED_CHARACTERS)
    if body["sender"] not in keys:
        raise ValueError(f"{path} is of {sender}; expected a file of {', '.join(keys)}")
    try:
        keys[body["sender"]].verify(bytes.fromhex(signature), _signed_text(body), _algorithm())
    except (ValueError, import_module("cryptography.exceptions").InvalidSignature):
        raise ValueError(
            f"{path} is not signed with the key of {sender}; expected an unchanged file of "
            f"{sender}, and the public key that belongs to its key"
        ) from None
    if study and body["study"] != study:
        shown = one_line(body["study"], MAX_QUOTED_CHARACTERS)
        raise ValueError(f"{path} is of study {shown}; expected a file of {study}")
    content = base64.b64decode(body["tensors"])
    about = {n: body[n] for n in ("study", "sender", "recipient", "number", "answers")}
    records = deserialize(content, body["words"])
    return Message(**about, records=records, id=_id(content, body["words"]))


def read_private_key(path: str | Path) -> Any:
    """Read the private key of a file that `ssh-keygen -t ecdsa -b 384 -N ""` made.

    Raises:
        ValueError: if it cannot be read, or is of another kind.
    """
    serialization = _cryptography("hazmat.primitives.serialization")
    return _ecdsa(path, lambda text: serialization.load_ssh_private_key(text, None), "PrivateKey")


def read_public_key(path: str | Path) -> Any:
    """Read the public key of a file NAME.pub that `ssh-keygen` made; see `read_private_key`."""
    serialization = _cryptography("hazmat.primitives.serialization")
    return _ecdsa(path, serialization.load_ssh_public_key, "PublicKey")


def fingerprint(key: Any) -> str:
    """Return the fingerprint of a public key, as `ssh-keygen -l` prints it."""
    serialization = _cryptography("hazmat.primitives.serialization")
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    content = base64.b64decode(key.public_bytes(*form).split()[1])
    return f"SHA256:{base64.b64encode(hashlib.sha256(content).digest()).decode().rstrip('=')}"


def _ecdsa(path: str | Path, load: Any, kind: str) -> Any:
    """Return the ECDSA key of a file; raise ValueError if there is none."""
    ec = _cryptography("hazmat.primitives.asymmetric.ec")
    is_private = kind == "PrivateKey"
    name = "private key, without password," if is_private else "public key NAME.pub"
    expected = f'expected the {name} of `ssh-keygen -t ecdsa -b 384 -N "" -f NAME`'
    refuse_no_file(str(path))
    try:
        with open(path, "rb") as file:
            key = load(file.read(MAX_KEY_BYTES))
    except OSError as error:
        raise ValueError(f"key {path} cannot be read: {error.strerror}; {expected}") from error
    except Exception as error:  # whatever the file holds
        reason = one_line(str(error), MAX_QUOTED_CHARACTERS)
        raise ValueError(f"key {path} cannot be read: {reason}; {expected}") from error
    if not isinstance(key, getattr(ec, f"EllipticCurve{kind}")):
        raise ValueError(f"key {path} is of another kind; {expected}")
    return key


def _cryptography(module: str) -> Any:
    try:
        return import_module(f"cryptography.{module}")
    except ImportError as error:
        raise ValueError(
            f"cryptography cannot be imported ({error}); expected pip install -e '.[flower]' in "
            "the clone"
        ) from error


def _algorithm() -> Any:
    hashes = _cryptography("hazmat.primitives.hashes")
    return _cryptography("hazmat.primitives.asymmetric.ec").ECDSA(hashes.SHA384())


def _read(path: Path) -> dict[str, Any]:
    """Return the entries of a file; raise ValueError if it is no message."""
    exists = os.path.exists(path)
    if exists and not path.is_file():
        raise ValueError(f"{path} is no file; expected a message")
    if exists and (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; expected at most {MAX_FILE_BYTES:,}")
    try:
        body = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a message") from error
    except (ValueError, RecursionError) as error:
        reason = one_line(str(error), MAX_QUOTED_CHARACTERS)
        raise ValueError(
            f"{path} cannot be read ({reason}); expected a message, which may be cut off here"
        ) from error
    is_message = isinstance(body, dict) and tuple(body) == ENTRIES
    if is_message and body["version"] != VERSION:
        shown = one_line(body["version"], MAX_QUOTED_CHARACTERS)
        raise ValueError(f"{path} has version {shown}; expected {VERSION}: use one pyrofl")
    is_valid = is_message and type(body["number"]) is int
    if not is_valid or not all(isinstance(body[n], str) for n in TEXTS):
        raise ValueError(f"{path} is no message; expected a file of `pyrofl study`")
    entries: dict[str, Any] = body
    return entries


def _signed_text(body: Mapping[str, Any]) -> bytes:
    """Return the text of a message's entries, which is signed."""
    return json.dumps(body, sort_keys=True).encode()
