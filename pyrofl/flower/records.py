"""What is in a message: records, by their labels, as one array of bytes and one text in JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyrofl.files.run_folder import replacing
from pyrofl.inference.transport.wire import Flat

Records = dict[str, Flat]
"""Label -> an order, a question, a reply or what else is told: a flat dict."""

BETWEEN = "|"  # the sign before the place of a tensor


def serialize(records: Mapping[str, Mapping[str, Any]]) -> tuple[NDArray[np.uint8], str]:
    """Return the bytes of all tensors of records, one behind the other, and all else as JSON.

    They are one array, as Flower stores each by itself, and answers late where there are hundreds.
    A tensor that is one row for all its clients, as what all of them receive, travels as that row.

    Raises:
        ValueError: if a tensor is of a type that NumPy lacks, or a value is none of a number, a
            text and a list of texts.
    """
    parts, at = list[NDArray[Any]](), 0
    words: dict[str, dict[str, Any]] = {}
    for label, flat in records.items():
        words[label] = {}
        for name, value in flat.items():
            if not torch.is_tensor(value):
                words[label][name] = _word(f"{label}: {name}", value)
                continue
            alike = value.dim() > 0 and len(value) > 1 and not value.stride(0)
            whole = _array(f"{label}: {name}", value[:1] if alike else value)
            words[label][f"{BETWEEN}{name}"] = [
                str(whole.dtype),
                at,
                list(whole.shape),
                len(value) if alike else 0,
            ]
            parts.append(whole.reshape(-1).view(np.uint8))
            at += whole.nbytes
    return np.concatenate([np.zeros(0, np.uint8), *parts]), json.dumps(words)


def deserialize(content: NDArray[np.uint8], text: str) -> Records:
    """Return the records that `serialize` took apart.

    Raises:
        ValueError: if they are of another form.
    """
    try:
        records: Records = {}
        for label, flat in json.loads(text).items():
            records[label] = {}
            for name, value in flat.items():
                if name.startswith(BETWEEN):
                    records[label][name.removeprefix(BETWEEN)] = _tensor(content, *value)
                else:
                    records[label][name] = tuple(value) if isinstance(value, list) else value
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"a message cannot be read ({told}); expected what `serialize` makes"
        ) from None
    return records


def save(path: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Write records to a file, which replaces one that is there."""
    content, text = serialize(records)
    with replacing(path) as new, open(new, "wb") as file:
        np.savez(file, tensors=content, words=np.array(text))


def load(path: Path) -> Records:
    """Return the records in a file.

    Raises:
        ValueError: if it is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            return deserialize(found["tensors"], str(found["words"]))
    except (OSError, BadZipFile, LookupError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); expected what a site writes") from error


def _array(what: str, value: Tensor) -> NDArray[Any]:
    try:
        return np.ascontiguousarray(value.detach().cpu().numpy()).reshape(value.shape)
    except TypeError as error:
        raise ValueError(f"{what} is {value.dtype}; expected a type that NumPy has") from error


def _tensor(content: NDArray[np.uint8], kind: str, at: int, shape: list[int], alike: int) -> Tensor:
    """Return the tensor that lies at a place; alike: for how many clients it is, 0 for its own."""
    dtype = np.dtype(kind)
    if dtype.kind not in "biuf" or at < 0 or min(shape, default=0) < 0:
        raise ValueError(f"{kind} {shape} at {at}")
    size = math.prod(shape) * dtype.itemsize
    if at + size > len(content):
        raise ValueError(f"{size} bytes at {at} of {len(content)}")
    own = content[at : at + size].copy()  # theirs is read-only
    tensor = torch.from_numpy(own.view(dtype).reshape(shape))
    return tensor.expand(alike, *tensor.shape[1:]) if alike else tensor


def _word(what: str, value: Any) -> Any:
    """Return what JSON has; refuse anything else."""
    texts = isinstance(value, tuple | list) and all(isinstance(text, str) for text in value)
    if not texts and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{what} is {value!r}; expected a tensor, a number, a text or texts")
    return list(value) if texts else value
