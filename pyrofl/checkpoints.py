"""Files to go on from: whole or absent, checked before they are read, and without any code."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.records import replacing

FORMAT = b"pyrofl checkpoint 1\n"


def write(path: str | Path, about: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write a checkpoint; the old one stays until the new one is on the disk.

    Args:
        path: of the file.
        about: what the run is, as JSON has it; `read` refuses the file if any of it differs.
        content: tensors, numbers, texts, None, and lists, tuples and dicts of these.
    """
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    rest = json.dumps(about, sort_keys=True).encode() + b"\n" + buffer.getvalue()
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(FORMAT + _hash(rest) + b"\n")
        file.write(rest)


def read(path: str | Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint of the same run.

    Raises:
        ValueError: if there is none, it is damaged, or of another run; in one line that says what
            differs. No code in the file is run.
    """
    try:
        file = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if not file.startswith(FORMAT):
        found = file[:40].split(b"\n")[0]
        raise ValueError(f"checkpoint {path} begins with {found!r}; expected {FORMAT[:-1]!r}")
    claimed, _, rest = file[len(FORMAT) :].partition(b"\n")
    if _hash(rest) != claimed:
        raise ValueError(
            f"checkpoint {path} is damaged or cut off: its hash is {_hash(rest)[:12].decode()}; "
            f"expected {claimed[:12]!r}"
        )
    written, _, payload = rest.partition(b"\n")
    _compare(path, json.loads(written), json.loads(json.dumps(about)))
    try:
        content: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True)
    except Exception as error:  # a file with a right hash that torch does not take
        raise ValueError(f"checkpoint {path} cannot be read: {str(error)[:200]}") from error
    return content


def fingerprint(data: Federation) -> str:
    """Return a hash of all rows and of who has which."""
    found = hashlib.sha256()
    for value in (data.x, data.y, *data.train, *data.test, data.pooled_test, data.unlabelled):
        found.update(b"-" if value is None else _bytes(value))
    found.update(json.dumps([data.names, data.classes, data.held_out]).encode())
    return found.hexdigest()[:16]


def _bytes(value: Tensor) -> bytes:
    array = value.detach().cpu().contiguous().numpy()
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _compare(path: str | Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run, naming all that differs."""
    names = sorted(n for n in found.keys() | asked.keys() if found.get(n) != asked.get(n))
    if names:
        _refuse(path, [f"{n} is {asked.get(n)!r} and was {found.get(n)!r}" for n in names])


def _refuse(path: str | Path, reasons: list[str]) -> NoReturn:
    raise ValueError(f"checkpoint {path} is of another run; now {', '.join(reasons)}")
