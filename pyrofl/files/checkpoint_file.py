"""Checkpoint files: tensors in safetensors format, other values as JSON, no code.

A file is replaced as a whole, and a hash of its content is verified before it is used. The header's
metadata has one entry, `pyrofl`: {"sha256": ..., "format": ..., "about": ..., "content": ...}. In
`content` a tensor is {"@tensor": its name in the file}; KINDS lists what else JSON does not have.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyrofl.arguments import checked
from pyrofl.files.run_folder import replacing

FORMAT = 5  # raised when older files can no longer be read
ENTRY = "pyrofl"
HASH = b'{\\"sha256\\": \\"'  # as it stands in the header: JSON inside JSON
BLANK_HASH = "0" * 64  # in place of the hash while it is computed
BLOCK_BYTES = 2**20  # bytes that are hashed at once
# Numbers in a list from which on it is a tensor: safetensors limits the header's size.
MIN_TENSOR_NUMBERS = 99
KINDS: dict[str, Callable[[Any], Any]] = {
    "@tuple": tuple,
    "@numbers": Tensor.tolist,
    "@complex": torch.view_as_complex,
}


def write(path: str | Path, about: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: the old file stays until the new one is on disk.

    Args:
        path: of the file.
        about: settings of the run, as JSON; `read` compares them.
        content: dicts, lists and tuples of tensors, numbers, texts and None.
    """
    tensors: dict[str, Tensor] = {}
    head = {"sha256": BLANK_HASH, "format": FORMAT, "about": about}
    text = json.dumps(head | {"content": _encode(content, "", tensors)})
    seen: set[int] = set()
    for name, value in tensors.items():  # safetensors refuses tensors that share memory
        if (storage := value.untyped_storage().data_ptr()) in seen:
            tensors[name] = value.clone()
        seen.add(storage)
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, {ENTRY: text})
        except SafetensorError as error:
            if number := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise
        with open(temporary, "r+b") as file:
            at, digest, _ = _hashes(file)
            file.seek(at)
            file.write(digest)


def read(path: str | Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Read a checkpoint; raise ValueError if it belongs to a run with other settings.

    On POSIX systems its tensors are mapped: they are read when they are used. The file may be
    replaced meanwhile, and writing to a tensor does not change it.
    """
    written, content = read_any(path)
    refuse_differences(f"checkpoint {path}", written, json.loads(json.dumps(about)))
    return content


@checked
def read_any(path: str | Path, device: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the settings and the content of a checkpoint of any run; see `read`.

    Args:
        path: of the file.
        device: of the tensors; None: that which they were on.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
            raise ValueError(f"checkpoint {path} is a pipe or a device; expected a file")
        with open(path, "rb") as file:
            at, digest, claimed = _hashes(file)
    except OSError as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if not at:
        raise ValueError(
            f"checkpoint {path} is cut off or of another kind; expected format {FORMAT} of pyrofl"
        )
    if digest != claimed:
        shown = claimed[:12].decode("ascii", "backslashreplace")
        raise ValueError(
            f"checkpoint {path} is damaged: its hash is {digest[:12].decode()}; expected {shown}"
        )
    try:
        with safe_open(path, "pt") as tensors:
            head = json.loads(tensors.metadata()[ENTRY])
            if head["format"] != FORMAT:
                raise ValueError(f"it has format {head['format']}; expected {FORMAT}")
            return {**head["about"]}, {**_decode(head["content"], tensors, device)}
    except Exception as error:  # a file with a right hash that was written by something else
        raise ValueError(f"checkpoint {path} cannot be read: {str(error)[:200]}") from error


def refuse_differences(what: str | Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if the settings of a saved run differ from the current settings."""
    if names := sorted(n for n in was.keys() | now.keys() if was.get(n) != now.get(n)):
        each = ", ".join(f"{n} is {now.get(n)!r} and was {was.get(n)!r}" for n in names)
        raise ValueError(f"{what} is of another run; now {each}")


def _hashes(file: IO[bytes]) -> tuple[int, bytes, bytes]:
    """Return the position of a checkpoint's hash (0: none), the computed and the stored hash."""
    length = int.from_bytes(file.read(8), "little")
    left = file.seek(0, os.SEEK_END) - 8
    file.seek(8)
    head = file.read(length) if 0 < length <= left else b""
    at = head.find(HASH) + len(HASH)
    if at < len(HASH):
        return 0, b"", b""
    claimed = head[at : at + len(BLANK_HASH)]
    blank = head[:at] + BLANK_HASH.encode() + head[at + len(BLANK_HASH) :]
    digest = hashlib.sha256(length.to_bytes(8, "little") + blank)
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
    return 8 + at, digest.hexdigest().encode(), claimed


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a nested value to JSON, and collect its tensors in a dict, keyed by their paths."""
    if isinstance(value, Tensor) and value.is_complex():
        return {"@complex": _encode(torch.view_as_real(value.resolve_conj()), path, tensors)}
    if isinstance(value, Tensor):
        while path in tensors:  # a name may hold a slash itself
            path += "'"
        # Results depend on the memory layout to the last bit, so it is kept.
        axes = list(range(value.dim()))
        dense = not value.is_contiguous() and 0 not in value.stride()
        order = sorted(axes, key=value.stride, reverse=True) if dense else axes
        tensors[path] = value.detach().cpu().permute(order).contiguous()
        encoded: dict[str, Any] = {"@tensor": path}
        encoded |= {"order": order} if order != axes else {}
        return encoded | ({"device": str(value.device)} if value.device.type != "cpu" else {})
    if isinstance(value, Mapping):
        below = {n: _encode(v, f"{path}/{n}".lstrip("/"), tensors) for n, v in value.items()}
        return {f"@{n}" if n.startswith("@") else n: v for n, v in below.items()}
    if isinstance(value, tuple):
        return {"@tuple": _encode(list(value), path, tensors)}
    if (
        isinstance(value, list)
        and len(value) > MIN_TENSOR_NUMBERS
        and all(type(v) is int for v in value)
    ):
        return {"@numbers": _encode(torch.tensor(value), path, tensors)}
    if isinstance(value, list):
        return [_encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
    return value


def _decode(value: Any, tensors: Any, device: str | None) -> Any:
    """Restore a nested value from the JSON and the tensors that `_encode` produced."""
    if isinstance(value, list):
        return [_decode(v, tensors, device) for v in value]
    if not isinstance(value, dict):
        return value
    if "@tensor" in value:
        tensor = tensors.get_tensor(value["@tensor"]).to(device or value.get("device", "cpu"))
        if order := value.get("order"):
            tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
        return tensor
    for kind, read_as in KINDS.items():
        if kind in value:
            return read_as(_decode(value[kind], tensors, device))
    return {n.removeprefix("@"): _decode(v, tensors, device) for n, v in value.items()}
