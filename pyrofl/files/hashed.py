"""Files to go on from: whole or absent, checked before they are read, and without any code.

A checkpoint is a file of `torch.save`, and behind it a hash of all that and the format's name: it
is written and checked piece by piece, and large tensors are mapped, not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

import torch

from pyrofl.data import Federation
from pyrofl.files.run_folder import replacing

FORMAT = b"\npyrofl checkpoint 4\n"
TAIL = 64 + len(FORMAT)  # bytes: the hash and the format
BLOCK = 2**20  # bytes that are hashed at once

_fingerprints: WeakKeyDictionary[Federation, str] = WeakKeyDictionary()


class _Hashed:
    """A file that is hashed as it is written; torch would hide what goes wrong, so it is kept."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.hash = file, hashlib.sha256()
        self.error: BaseException | None = None

    def write(self, content: memoryview | bytes) -> int:
        try:
            if self.error is None:
                self.file.write(content)
                self.hash.update(content)
        except BaseException as error:  # an interrupt too
            self.error = error
        return memoryview(content).nbytes

    def flush(self) -> None:
        pass


def write(path: str | Path, about: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write a checkpoint: content that torch loads as weights, and what the run is, as JSON has it.

    The old one stays until the new one is on the disk.
    """
    with replacing(path) as temporary, open(temporary, "wb") as file:
        hashed = _Hashed(file)
        try:
            torch.save({"about": json.dumps(about), "content": dict(content)}, hashed)  # type: ignore[arg-type]
        finally:
            if hashed.error is not None:
                raise hashed.error
        file.write(hashed.hash.hexdigest().encode() + FORMAT)


def read(path: str | Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint of the same run; no code in the file is run.

    Its tensors lie in the file until used. It may be replaced meanwhile, and writing to a tensor
    does not change it.
    """
    written, content = opened(path)
    same(f"checkpoint {path}", written, json.loads(json.dumps(about)))
    return content


def opened(path: str | Path, device: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint is said to be, and its content as `read` does, of any run.

    Args:
        path: of the file.
        device: that tensors are put on; None leaves them where they were.

    Raises:
        ValueError: if the file is damaged, cut off or of another kind.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
            raise ValueError(f"checkpoint {path} is a pipe or a device; expected a file")
        with open(path, "rb") as file:
            found, claimed, kind = _ends(file)
    except OSError as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if kind != FORMAT:
        raise ValueError(
            f"checkpoint {path} is cut off or of another kind: it ends with {kind!r}; "
            f"expected {FORMAT!r}"
        )
    if found != claimed:
        told = (part[:12].decode("ascii", "backslashreplace") for part in (found, claimed))
        raise ValueError(f"checkpoint {path} is damaged: its hash is {'; expected '.join(told)}")
    try:
        whole = torch.load(path, device, weights_only=True, mmap=os.name == "posix")
        return {**json.loads(whole["about"])}, {**whole["content"]}
    except Exception as error:  # a file with a right hash that torch does not take
        raise ValueError(f"checkpoint {path} cannot be read: {str(error)[:200]}") from error


def remember(data: Federation, fingerprint: str) -> None:
    """Take a hash for that of a federation whose rows are not here."""
    _fingerprints[data] = fingerprint


def fingerprint(data: Federation) -> str:
    """Return a hash of all rows and of who has which; made once, so rows must not change."""
    if data not in _fingerprints:
        found = hashlib.sha256()
        for value in (data.x, data.y, *data.train, *data.test, data.pooled_test, data.unlabelled):
            if value is not None:
                found.update(f"{value.dtype}{list(value.shape)}".encode())
                whole = value.detach().cpu().contiguous()
                flat = whole.as_strided([whole.numel()], [1])  # one row may have any stride
                found.update(flat.view(torch.uint8).numpy().data)
            found.update(b"-")
        if data.weights is not None:
            found.update(data.weights.double().numpy().tobytes())
        found.update(json.dumps([data.names, data.classes, data.held_out]).encode())
        _fingerprints[data] = found.hexdigest()[:16]
    return _fingerprints[data]


def _ends(file: IO[bytes]) -> tuple[bytes, bytes, bytes]:
    """Return the hash of a file without its tail, the hash in the tail, and the format."""
    left = max(0, file.seek(0, os.SEEK_END) - TAIL)
    file.seek(0)
    found = hashlib.sha256()
    while left and (block := file.read(min(left, BLOCK))):
        found.update(block)
        left -= len(block)
    tail = file.read()
    return found.hexdigest().encode(), tail[: -len(FORMAT)], tail[-len(FORMAT) :]


def same(what: str | Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse `what` another run has left, naming all that was `found` and is not `asked`."""
    names = sorted(n for n in found.keys() | asked.keys() if found.get(n) != asked.get(n))
    if names:
        told = ", ".join(f"{n} is {asked.get(n)!r} and was {found.get(n)!r}" for n in names)
        raise ValueError(f"{what} is of another run; now {told}")
