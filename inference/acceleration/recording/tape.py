"""Recording of all tensor operations that a function executes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {getattr(Tensor, name) for name in ("tolist", "numpy", "data_ptr", "__array__")}
UNKNOWN = {
    torch.Tag.nondeterministic_seeded: "it draws random numbers that are not normal",
    torch.Tag.data_dependent_output: "Python reads numbers of a tensor",
    torch.Tag.dynamic_output_shape: "a shape depends on numbers of a tensor",
}


class NotRecorded(Exception):
    """Exception raised if a function cannot be replaced by its recorded operations."""


class Call(NamedTuple):
    """One recorded tensor operation, with the memory that it creates, reads and modifies.

    The tensors exist as long as the call, so that no storage is reused.
    """

    op: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    out: Any
    created: set[int]
    read: set[int]
    written: set[int]


class Tape(TorchDispatchMode):
    """Context manager that records tensor operations, including those of autograd and optimizers.

    Attributes:
        calls: the operations.
        reason: why they cannot replace the function, or "".
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.reason = ""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        out = op(*args, **options)
        if self.reason:
            return out
        inputs = tensors((*args, *options.values()))
        modified = [args[i] if i < len(args) else options.get(name) for i, name in _written(op)]
        groups = (tensors((out,)), inputs, tensors(modified))
        self.calls.append(Call(op, args, options, out, *({storage(v) for v in g} for g in groups)))
        self.reason = _obstacle(op, any(v.dtype == torch.bool for v in inputs[1:]))
        return out

    def replay_seconds(self, clock: Callable[[], float]) -> float:
        """Run the recorded operations that modify no argument once more; return their seconds."""
        begin = clock()
        with torch.no_grad():
            for call in self.calls:
                if not call.written:
                    call.op(*call.args, **call.options)
        return clock() - begin


# PyTorch wraps this method in a function that imports its compiler, which takes a second.
Tape.__torch_dispatch__ = unwrap(Tape.__torch_dispatch__)  # type: ignore[method-assign]


class Reads(TorchFunctionMode):
    """Context manager that detects conversions of tensors to Python or NumPy values."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in READS and not self.tape.reason:
            self.tape.reason = f"Python reads numbers of a tensor (Tensor.{func.__name__})"
        return func(*args, **(kwargs or {}))


@cache
def _obstacle(op: Any, masked: bool) -> str:
    """Return the reason why an operation cannot be replayed, or "" if it can.

    `masked` states whether the operation has a boolean mask.
    """
    if "check_errors" in op.__name__:
        return "a matrix may be singular, which is handled in Python"
    if "index" in op.__name__ and not masked:  # its shape depends on the numbers of masks alone
        return ""
    return next((f"{why} ({op})" for tag, why in UNKNOWN.items() if tag in op.tags), "")


@cache
def _written(op: Any) -> list[tuple[int, str]]:
    """Return positions and names of the arguments that an operation modifies in place."""
    arguments = [(i, a.name, a.alias_info) for i, a in enumerate(op._schema.arguments)]
    return [(i, name) for i, name, alias in arguments if alias is not None and alias.is_write]


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the given values, including those in nested lists and tuples."""
    flat = []
    for value in values:
        if isinstance(value, Tensor):
            flat.append(value)
        elif isinstance(value, (list, tuple)):
            flat += tensors(value)
    return flat


def storage(value: Tensor) -> int:
    """Return a key that identifies the memory of a tensor."""
    return int(value.untyped_storage()._cdata)
