"""Small data sets with natural groups that come along: every group is a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pyrofl.data.federation import Dataset

# Rubin, "Estimation in parallel randomized experiments", Journal of Educational Statistics 1981.
_EFFECTS = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
_ERRORS = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)

# Efron and Morris, "Data analysis using Stein's estimator", JASA 1975: hits in the first 45
# at-bats of 1970; at-bats and hits of the rest of that season.
_AT_BATS = 45
_BATTERS = {
    "Clemente": (18, 367, 127),
    "F. Robinson": (17, 426, 127),
    "F. Howard": (16, 521, 144),
    "Johnstone": (15, 275, 61),
    "Berry": (14, 418, 114),
    "Spencer": (14, 466, 126),
    "Kessinger": (13, 586, 155),
    "Alvarado": (12, 138, 29),
    "Santo": (11, 510, 137),
    "Swoboda": (11, 200, 46),
    "Petrocelli": (10, 538, 142),
    "E. Rodriguez": (10, 186, 42),
    "Scott": (10, 435, 132),
    "Unser": (10, 277, 73),
    "Williams": (10, 591, 195),
    "Campaneris": (9, 558, 159),
    "Munson": (8, 408, 129),
    "Alvis": (7, 70, 14),
}

# Tarone, "The use of historical control information in testing for a trend in proportions",
# Biometrics 1982: tumours among control rats in 70 experiments and, last, a current one.
_TUMOURS = (
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 3, 2, 2, 2, 2, 2, 2, 2, 2,
    2, 1, 5, 2, 5, 2, 7, 7, 3, 3, 2, 9, 10, 4, 4, 4, 4, 4, 4, 4, 10, 4, 4, 4, 5, 11, 12, 5, 5,
    6, 5, 6, 6, 6, 6, 16, 15, 15, 9, 4,
)  # fmt: skip
_RATS = (
    20, 20, 20, 20, 20, 20, 20, 19, 19, 19, 19, 18, 18, 17, 20, 20, 20, 20, 19, 19, 18, 18, 27,
    25, 24, 23, 20, 20, 20, 20, 20, 20, 10, 49, 19, 46, 17, 49, 47, 20, 20, 13, 48, 50, 20, 20,
    20, 20, 20, 20, 20, 48, 19, 19, 19, 22, 46, 49, 20, 20, 23, 19, 22, 20, 20, 20, 52, 46, 47,
    24, 14,
)  # fmt: skip


def eight_schools(seed: int = 0) -> Dataset:
    """Return the effect of coaching in eight schools: y [8], its standard error x [8, 1]."""
    x, y = torch.tensor(_ERRORS)[:, None], torch.tensor(_EFFECTS)
    return of_clients("eight_schools", x, y, "measured", {"school": "ABCDEFGH"})


def baseball(seed: int = 0) -> Dataset:
    """Return the hits y of 18 batters out of at-bats x: 45 for training, the rest for testing."""
    first, more, later = torch.tensor(list(_BATTERS.values()), dtype=torch.float32).T
    x, y = torch.cat([torch.full_like(first, _AT_BATS), more])[:, None], torch.cat([first, later])
    player = torch.arange(len(_BATTERS)).repeat(2)
    data = of_clients("baseball", x, y, "binomial", {"player": tuple(_BATTERS)}, player)
    return replace(data, is_test=torch.arange(len(y)) >= len(_BATTERS))


def rat_tumours(seed: int = 0) -> Dataset:
    """Return the rats with a tumour, y [71], out of x [71, 1], by experiment."""
    x, y = (torch.tensor(v, dtype=torch.float32) for v in (_RATS, _TUMOURS))
    names = [str(i + 1) for i in range(len(_RATS))]
    return of_clients("rat_tumours", x[:, None], y, "binomial", {"experiment": names})


def of_clients(
    name: str,
    x: Tensor,
    y: Tensor,
    likelihood: str,
    names: Mapping[str, Sequence[str]],
    codes: Tensor | None = None,
) -> Dataset:
    """Return a data set with one column of groups; all rows are for training.

    Args:
        name: of the data set.
        x: [N, *x].
        y: [N], numbers.
        likelihood: that suits y.
        names: the column, and what its groups are called.
        codes: [N], the group of each row; None: each is one of its own.
    """
    (column,) = names
    codes = torch.arange(len(y)) if codes is None else codes
    nobody = torch.zeros(len(y), dtype=torch.bool)
    groups, called = {column: codes}, {column: tuple(names[column])}
    return Dataset(name, x, y, nobody, groups=groups, group_names=called, likelihood=likelihood)
