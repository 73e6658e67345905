"""Validation of tables and row numbers, with error messages that name the first invalid row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def check_table(x: Tensor, y: Tensor, classes: tuple[str, ...] = ()) -> None:
    """Validate features x and targets y; raise ValueError that names the first invalid row.

    Raises:
        ValueError: if x or y is no tensor, their lengths differ, a value is not finite, or a label
            is not 0 to K - 1.
    """
    check_tensor("x", x)
    check_tensor("y", y)
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} rows and y has {len(y)}; expected the same number")
    check_finite("x", x)
    check_finite("y", y)
    if classes and len(y):
        if y.is_floating_point() or y.dtype == torch.bool or y.dim() != 1:
            message = f"y is {y.dtype}{'' if y.dim() == 1 else f' of shape {list(y.shape)}'}"
            raise ValueError(f"{message}; expected integer labels for {len(classes)} classes")
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= len(classes):
            raise ValueError(f"labels run from {low} to {high}; expected 0 to {len(classes) - 1}")


def check_tensor(name: str, value: object) -> None:
    """Raise ValueError if the value is not a dense tensor of real numbers."""
    if not torch.is_tensor(value):
        numpy = isinstance(value, np.ndarray)
        kind, make = ("numpy.ndarray", "from_numpy") if numpy else (type(value).__name__, "tensor")
        last = name.split()[-1]
        raise ValueError(f"{name} is a {kind}; expected a torch tensor: torch.{make}({last})")
    if value.is_complex() or value.layout != torch.strided or value.is_meta or not value.dim():
        message = f"{name} is {value.dtype} {list(value.shape)}, {value.layout} on {value.device}"
        raise ValueError(f"{message}; expected real numbers in memory, along one axis or more")


def row_numbers(name: str, rows: Tensor, total: int) -> Tensor:
    """Return row numbers as int64; raise ValueError if they are not integers within range."""
    check_tensor(name, rows)
    if rows.dim() != 1:
        raise ValueError(f"{name} has shape {list(rows.shape)}; expected row numbers on one axis")
    mask = rows.dtype == torch.bool
    if len(rows) and (mask or rows.is_floating_point() or rows.is_complex()):
        cure = ".nonzero().flatten()" if mask else ".long(), if they are whole"
        last = name.split()[-1]
        raise ValueError(f"{name} is {rows.dtype}; expected int64 row numbers: {last}{cure}")
    rows = rows.long()
    bad = rows[(rows < 0) | (rows >= total)]
    if len(bad):
        raise ValueError(f"{name} names row {int(bad[0])}; expected 0 to {total - 1}")
    return rows


def check_finite(name: str, value: Tensor) -> None:
    """Raise ValueError that names the first row with NaN or infinite values, if there is one."""
    if value.is_floating_point() and not bool(value.isfinite().all()):
        bad = (~value.isfinite().reshape(len(value), -1).all(1)).nonzero()
        where = f"{len(bad)} rows, first in row {int(bad[0])}"
        raise ValueError(f"{name} is NaN or infinite in {where}; expected finite numbers")


def check_alike(server_data: Tensor, x: Tensor) -> None:
    """Raise ValueError if the server's unlabeled rows differ in shape or type from the clients'."""
    check_tensor("server_data", server_data)
    shape, expected = list(server_data.shape), list(x.shape[1:])
    if not len(server_data) or shape[1:] != expected or server_data.dtype != x.dtype:
        raise ValueError(
            f"server_data is {server_data.dtype} {shape}; expected {x.dtype} rows of shape "
            f"{expected}, at least one"
        )
    check_finite("server_data", server_data)
