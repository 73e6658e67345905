"""What is in a message: sheets, by their labels, as arrays and one text in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pyrofl.inference.halves.wire import Flat

Sheets = dict[str, Flat]
"""Label -> an order, a question, a reply or what else is told: a flat dict."""

Arrays = dict[str, NDArray[Any]]

BETWEEN = "|"  # a label and a name


def packed(sheets: Mapping[str, Mapping[str, Any]]) -> tuple[Arrays, str]:
    """Return the tensors of sheets as arrays, "LABEL|name", and all else as JSON.

    A tensor that is one row for all its clients, as what all of them receive, travels as that row.

    Raises:
        ValueError: if a tensor is of a type that NumPy lacks, or a value is none of a number, a
            text and a list of texts.
    """
    arrays: Arrays = {}
    words: dict[str, dict[str, Any]] = {}
    for label, flat in sheets.items():
        words[label] = {}
        for name, value in flat.items():
            if not torch.is_tensor(value):
                words[label][name] = _word(f"{label}: {name}", value)
                continue
            alike = value.dim() > 0 and len(value) > 1 and not value.stride(0)
            if alike:
                words[label][f"{BETWEEN}{name}"] = len(value)
                value = value[:1]
            try:
                whole = value.detach().cpu().numpy()
            except TypeError as error:
                raise ValueError(
                    f"{label}: {name} is {value.dtype}; expected a type that NumPy has"
                ) from error
            arrays[f"{label}{BETWEEN}{name}"] = whole
    return arrays, json.dumps(words)


def unpacked(arrays: Mapping[str, NDArray[Any]], text: str) -> Sheets:
    """Return the sheets that `packed` took apart.

    Raises:
        ValueError: if they are of another form.
    """
    try:
        words = json.loads(text)
        sheets: Sheets = {}
        alike: dict[tuple[str, str], int] = {}
        for label, flat in words.items():
            sheets[label] = {}
            for name, value in flat.items():
                if name.startswith(BETWEEN):
                    alike[label, name.removeprefix(BETWEEN)] = int(value)
                else:
                    sheets[label][name] = tuple(value) if isinstance(value, list) else value
        for key, value in arrays.items():
            label, _, name = key.partition(BETWEEN)
            tensor = torch.from_numpy(np.array(value, order="C"))  # a copy: theirs is read-only
            if count := alike.get((label, name)):
                tensor = tensor.expand(count, *tensor.shape[1:])
            sheets[label][name] = tensor
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"a message cannot be read ({told}); expected what `packed` makes"
        ) from None
    return sheets


def _word(what: str, value: Any) -> Any:
    """Return what JSON has; refuse anything else."""
    texts = isinstance(value, tuple | list) and all(isinstance(text, str) for text in value)
    if not texts and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{what} is {value!r}; expected a tensor, a number, a text or texts")
    return list(value) if texts else value
