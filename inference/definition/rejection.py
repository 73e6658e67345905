"""Rejection of points at which a program has no density, as Stan rejects them.

Programs run at many points at once. Where a matrix is singular at one of them, or a distribution
has no valid parameters, torch raises an error for all. Here such a point gets NaN instead, from
which its log density becomes NaN, and no other point changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro.distributions.distribution import COERCIONS
from torch import Tensor
from torch.overrides import TorchFunctionMode

SINGULAR: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
POINT_ERRORS = (SINGULAR, ValueError)  # errors of single points, among others


def _not_positive(a: Tensor) -> Tensor:
    fails: Tensor = torch.linalg.cholesky_ex(a).info != 0
    return fails


def _singular(a: Tensor) -> Tensor:
    fails: Tensor = torch.linalg.lu_factor_ex(a).info != 0
    return fails


def _none(a: Tensor) -> Tensor:
    return torch.zeros(a.shape[:-2], dtype=torch.bool, device=a.device)


def _kinds() -> dict[Any, Callable[[Tensor], Tensor]]:
    """Return functions of matrices [..., m, n], and at which of these, if finite, they fail."""
    la, root = torch.linalg, Tensor.cholesky
    roots: list[Any] = [la.cholesky, root, getattr(torch, "cholesky", root)]
    inverses: list[Any] = [la.inv, torch.inverse, Tensor.inverse, la.solve]
    others: list[Any] = [la.eigh, la.eigvalsh, la.svd, la.svdvals, torch.svd, Tensor.svd, la.pinv]
    others += [torch.pinverse, Tensor.pinverse]
    kinds = (_not_positive, roots), (_singular, inverses), (_none, others)
    return {function: fails for fails, functions in kinds for function in functions}


FAILS = _kinds()


class _NoError(TorchFunctionMode):
    """Torch mode in which functions of matrices return NaN instead of raising an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FAILS or not args:
            return func(*args, **(kwargs or {}))
        matrix, *others = args
        with torch.no_grad():
            finite = matrix.isfinite().all(-1).all(-1)
            one = torch.eye(*matrix.shape[-2:], dtype=matrix.dtype, device=matrix.device)
            one = one * torch.arange(1, len(one) + 1).to(one)[:, None]  # of distinct eigenvalues
            bad = ~finite | FAILS[func](torch.where(finite[..., None, None], matrix, one))
        # A matrix that fails is replaced before, so that its gradient is 0 and not NaN.
        value = func(torch.where(bad[..., None, None], one, matrix), *others, **(kwargs or {}))
        if isinstance(value, Tensor):
            return _nan_where_failed(value, bad)
        return type(value)(_nan_where_failed(part, bad) for part in value)


def _nan_where_failed(value: Tensor, bad: Tensor) -> Tensor:
    """Return results [..., *event] of matrices, with NaN for those that failed."""
    event = 1 if value.dim() == bad.dim() + 1 else 2
    return torch.where(bad.reshape(*bad.shape, *[1] * event), torch.nan, value)


def _unvalidated(cls: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Create a distribution of Pyro without validation of its arguments."""
    kwargs.pop("validate_args", None)


@contextmanager
def rejecting() -> Iterator[None]:
    """Context manager in which points without a density get NaN instead of an error."""
    COERCIONS.append(_unvalidated)
    try:
        with pyro.validation_enabled(False), _NoError():
            yield
    finally:
        COERCIONS.remove(_unvalidated)


class _ZeroNanGradient(torch.autograd.Function):
    """Identity, in whose gradient NaN, which comes from rejected points, is 0."""

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.nan_to_num(0.0, torch.inf, -torch.inf)


def without_rejected_gradients(value: Tensor) -> Tensor:
    """Return values of points [S, ...] through which rejected points have no gradient."""
    points: Tensor = _ZeroNanGradient.apply(value)
    return points
