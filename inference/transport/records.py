"""Serialization of messages: tensors as one array of bytes, other values as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from pyrofl.inference.transport.message_checks import Flat

Records = dict[str, Flat]
"""Label -> an order, a question, a reply or another flat dict."""

TENSOR_PREFIX = "|"  # in front of the name of a tensor


def serialize(records: Mapping[str, Mapping[str, Any]]) -> tuple[bytes, str]:
    """Serialize the records of a message: tensors as safetensors bytes, other values as JSON.

    The tensors are one array, as Flower stores each array by itself and slows down with hundreds.
    A tensor that is one row for all its clients, as what all of them receive, travels as that row.
    """
    tensors: dict[str, torch.Tensor] = {}
    words: dict[str, dict[str, Any]] = {}
    for label, flat in records.items():
        words[label] = {}
        for name, value in flat.items():
            if torch.is_tensor(value):
                same = value.dim() > 0 and len(value) > 1 and not value.stride(0)
                key, clients = str(len(tensors)), len(value) if same else 0
                words[label][f"{TENSOR_PREFIX}{name}"] = [key, clients]
                row = (value[:1] if same else value).detach().cpu()
                tensors[key] = row.clone(memory_format=torch.contiguous_format)
            else:
                words[label][name] = _word(f"{label}: {name}", value)
    return save(tensors), json.dumps(words)


def deserialize(content: bytes, text: str) -> Records:
    """Restore the records of a message from the bytes and the JSON text of `serialize`."""
    try:
        tensors = load(content)
        return {
            label: dict(_entry(name, value, tensors) for name, value in flat.items())
            for label, flat in json.loads(text).items()
        }
    except Exception as e:  # whatever the bytes of others cause
        raise ValueError(
            f"a message cannot be read ({type(e).__name__}: {e}); expected what `serialize` makes"
        ) from None


def _entry(name: str, value: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[str, Any]:
    """Decode one serialized entry of a record: return its name, and its value or tensor."""
    if not name.startswith(TENSOR_PREFIX):
        return name, tuple(value) if isinstance(value, list) else value
    key, clients = value
    row = tensors[key]
    if clients < 0:
        raise ValueError(f"{name} is for {clients} clients")
    return name.removeprefix(TENSOR_PREFIX), row.expand(clients, *row.shape[1:]) if clients else row


def _word(what: str, value: Any) -> Any:
    """Convert a number, a string or strings to a JSON value; raise ValueError for other values."""
    texts = isinstance(value, tuple | list) and all(isinstance(text, str) for text in value)
    if not texts and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{what} is {value!r}; expected a tensor, a number, a string or strings")
    return list(value) if texts else value
