"""Comparisons that tests share, and how far rounding may go."""

from __future__ import annotations

import torch
from torch import Tensor

# Roundings in a row on the way to a number that some ten steps in each of three rounds make of the
# toy clients: each goes through sums over 8 features, 6 hidden units, 5 classes and some 12 rows.
TRAINED = 3 * 10 * (8 + 6 + 5 + 12)
MEAN = 4 * 12  # of a weighted mean of 12 clients: a product, a sum and a quotient, in two orders


def rounding(expected: Tensor, terms: int) -> float:
    """Return how far a tensor may be from one that is made by the same sums in another order.

    Processors, numbers of threads and of clients side by side rule in which order numbers are
    added up. Each of `terms` roundings in a row is off by eps / 2 at most, relative to the largest
    number there is (Higham, 2002, Accuracy and Stability of Numerical Algorithms, section 4.2), in
    each of the two tensors. So the bound is terms * eps times the tensor's largest entry: an entry
    near zero is a difference of larger ones, and rounded as these are.
    """
    if not expected.is_floating_point() or not expected.numel():
        return 0.0
    largest = expected.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()
    return terms * torch.finfo(expected.dtype).eps * float(largest)


def close(found: Tensor, expected: object, atol: float = 1e-12) -> None:
    """Compare with numbers worked out elsewhere, in absolute terms."""
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
