"""Messages as signed files, for clients without open ports: by e-mail or in a shared folder.

    write_message(path, {"train": request}, key, study="mortality", sender="server")
    records = read_message(path, key, study="mortality", sender="server")           at the client
    write_message(path, {"train": client.train(records["train"])}, key, study="mortality",
                  sender="bern", answers=message_id(records))
    reply = read_message(path, key, study="mortality", sender="bern",
                         answers=message_id({"train": request}))                    at the server

A file is a JSON text. Its signature is an HMAC with SHA-256 of a key that the server shares with
one client, so that neither the sender nor the content can be changed on the way. A reply names the
request that it answers, by the hash of its content, and is refused as a reply to any other: a reply
to an earlier round cannot be sent again. Requests do not change until they are answered, so nothing
has to be stored in between; weeks may pass. Files are signed, not encrypted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyrofl.files.run_folder import write_json
from pyrofl.inference.transport.message_checks import MAX_QUOTED_CHARACTERS, one_line
from pyrofl.inference.transport.records import Records, deserialize, serialize

VERSION = 1
MIN_KEY_BYTES = 16  # bytes
MAX_FILE_BYTES = 2_000_000_000  # bytes of a file
ENTRIES = ("version", "study", "sender", "answers", "words", "tensors", "signature")


def message_id(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a hash of the content of a message, which its reply names."""
    content, text = serialize(records)
    return hashlib.sha256(b"%d " % len(content) + content + text.encode()).hexdigest()


def write_message(
    path: str | Path,
    records: Mapping[str, Mapping[str, Any]],
    key: bytes,
    *,
    study: str,
    sender: str,
    answers: str = "",
) -> None:
    """Write a signed message to a file, which is replaced if it exists.

    Args:
        path: the file.
        records: label -> request or reply.
        key: secret that the server shares with this client, at least 16 bytes.
        study: name of the study.
        sender: name of the client, or "server".
        answers: `message_id` of the request that a reply answers; "" for requests.

    Raises:
        ValueError: if the key is too short, or a record has other values than messages have.
    """
    content, words = serialize(records)
    body = {"version": VERSION, "study": study, "sender": sender, "answers": answers}
    body |= {"words": words, "tensors": base64.b64encode(content).decode()}
    write_json(path, body | {"signature": _signature(body, key)})


def read_message(
    path: str | Path, key: bytes, *, study: str, sender: str, answers: str = ""
) -> Records:
    """Return the records of a signed message in a file.

    Args:
        path: the file.
        key: secret that the server shares with this client.
        study: expected name of the study.
        sender: expected sender.
        answers: `message_id` of the open request, for replies.

    Raises:
        ValueError: if the file is damaged or not signed with the key, or it is of another study or
            sender, or a reply to another request.
    """
    body = _read(Path(path))
    signature = body.pop("signature")
    if not hmac.compare_digest(str(signature).encode(), _signature(body, key).encode()):
        raise ValueError(
            f"{path} is not signed with the key of {sender}; expected an unchanged file of "
            f"{sender}, and the same key at both sides"
        )
    for name, expected in (("version", VERSION), ("study", study), ("sender", sender)):
        if body[name] != expected:
            shown = one_line(body[name], MAX_QUOTED_CHARACTERS)
            raise ValueError(f"{path}: {name} is {shown}; expected {expected}")
    if body["answers"] != answers:
        kind = "a reply to another request, such as of an earlier round" if answers else "a reply"
        expected = "the reply to the last request" if answers else "a request"
        raise ValueError(f"{path} is {kind}; expected {expected}")
    return deserialize(base64.b64decode(body["tensors"]), body["words"])


def _read(path: Path) -> dict[str, Any]:
    """Return the entries of a file; raise ValueError if it is no message."""
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"{path} has {size:,} bytes; expected at most {MAX_FILE_BYTES:,}")
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); expected a message") from error
    is_message = isinstance(body, dict) and tuple(body) == ENTRIES
    if not is_message or not all(isinstance(body[n], str) for n in ENTRIES[1:]):
        raise ValueError(f"{path} is no message; expected a file of write_message")
    entries: dict[str, Any] = body
    return entries


def _signature(body: Mapping[str, Any], key: bytes) -> str:
    """Return the signature of a message's entries."""
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"the key has {len(key)} bytes; expected at least {MIN_KEY_BYTES}")
    text = json.dumps(body, sort_keys=True).encode()
    return hmac.new(key, text, hashlib.sha256).hexdigest()
