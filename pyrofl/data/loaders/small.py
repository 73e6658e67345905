"""Small data sets, included in the package or simulated, such as the eight schools.

All but the digits have groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pyrofl.data.federation import Dataset
from pyrofl.data.loaders.conjugate import ConjugateTask, gaussian_means, linear_regression
from pyrofl.data.tables.holdout import draw_test_rows
from pyrofl.tensors import generator

# Rubin, "Estimation in parallel randomized experiments", Journal of Educational Statistics 1981.
_EFFECTS = "28 8 -3 7 -1 1 18 12"
_ERRORS = "15 10 16 11 9 11 10 18"

# Efron and Morris, "Data analysis using Stein's estimator", JASA 1975: hits in the first 45
# at-bats of 1970; at-bats and hits of the rest of that season.
_AT_BATS = 45
_BATTERS = (
    "Clemente, F. Robinson, F. Howard, Johnstone, Berry, Spencer, Kessinger, Alvarado, Santo, "
    "Swoboda, Petrocelli, E. Rodriguez, Scott, Unser, Williams, Campaneris, Munson, Alvis"
)
_HITS = "18 17 16 15 14 14 13 12 11 11 10 10 10 10 10 9 8 7"
_LATER_AT_BATS = "367 426 521 275 418 466 586 138 510 200 538 186 435 277 591 558 408 70"
_LATER_HITS = "127 127 144 61 114 126 155 29 137 46 142 42 132 73 195 159 129 14"

# Tarone, "The use of historical control information in testing for a trend in proportions",
# Biometrics 1982: tumours among control rats in 70 experiments and, last, a current one.
_TUMOURS = """
0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 3 2 2 2 2 2 2 2 2 2 1 5 2 5 2 7 7 3 3 2 9 10 4 4
4 4 4 4 4 10 4 4 4 5 11 12 5 5 6 5 6 6 6 6 16 15 15 9 4
"""
_RATS = """
20 20 20 20 20 20 20 19 19 19 19 18 18 17 20 20 20 20 19 19 18 18 27 25 24 23 20 20 20 20 20 20
10 49 19 46 17 49 47 20 20 13 48 50 20 20 20 20 20 20 20 48 19 19 19 22 46 49 20 20 23 19 22 20
20 20 52 46 47 24 14
"""


def _numbers(words: str) -> Tensor:
    return torch.tensor([float(word) for word in words.split()])


def _digits(seed: int) -> Dataset:
    """Return the digits data set; a fixed quarter of each class is test data, for every seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    _, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[test] = True
    x = torch.from_numpy(pixels).float() / 16
    return Dataset("digits", x, torch.from_numpy(labels).long(), is_test, tuple("0123456789"))


def _eight_schools(seed: int) -> Dataset:
    """Return the eight schools data: coaching effects y [8], standard errors x [8, 1]."""
    x, y = _numbers(_ERRORS), _numbers(_EFFECTS)
    return _of_groups("eight_schools", x[:, None], y, "normal_known_sd", "school", "ABCDEFGH")


def _baseball(seed: int) -> Dataset:
    """Return the baseball data: hits y of 18 batters in x at-bats, the first 45 for training."""
    names, hits = _BATTERS.split(", "), _numbers(_HITS)
    x = torch.cat([torch.full_like(hits, _AT_BATS), _numbers(_LATER_AT_BATS)])[:, None]
    y, player = torch.cat([hits, _numbers(_LATER_HITS)]), torch.arange(len(names)).repeat(2)
    data = _of_groups("baseball", x, y, "binomial", "player", names, player)
    return replace(data, is_test=torch.arange(len(y)) >= len(names))


def _rat_tumours(seed: int) -> Dataset:
    """Return the rat tumor data: in 71 experiments, y [71] rats with a tumor out of x [71, 1]."""
    x, y = _numbers(_RATS), _numbers(_TUMOURS)
    names = (str(i + 1) for i in range(len(x)))
    return _of_groups("rat_tumours", x[:, None], y, "binomial", "experiment", names)


def _gaussian(seed: int) -> Dataset:
    """Simulate ten clients with 2-D Gaussian likelihoods, variances 0.05 to 1; no test rows."""
    centers = torch.randn(10, 2, generator=generator(seed))
    return _of_task("gaussian", gaussian_means(centers, torch.linspace(0.05, 1.0, 10)))


def _linear(seed: int) -> Dataset:
    """Simulate linear regressions of 20 clients: 10 to 105 rows, 5 covariates, 20% test rows."""
    task = linear_regression(20, 5, range(10, 110, 5), noise=0.5, between=0.5, seed=seed)
    table = _of_task("linear", task)
    codes = table.groups["client"].numpy()
    return replace(table, is_test=draw_test_rows(codes, np.random.default_rng([seed, 3])))


def _of_task(name: str, task: ConjugateTask) -> Dataset:
    data = task.federation
    codes = torch.arange(len(data.names)).repeat_interleave(data.sizes)
    return _of_groups(name, data.x.float(), data.y.float(), "normal", "client", data.names, codes)


def _of_groups(
    name: str,
    x: Tensor,
    y: Tensor,
    likelihood: str,
    column: str,
    names: Iterable[str],
    codes: Tensor | None = None,
) -> Dataset:
    """Build a data set without test rows from group codes [N]; None: each row is a group."""
    groups = {column: torch.arange(len(y)) if codes is None else codes}
    nobody = torch.zeros(len(y), dtype=torch.bool)
    called = {column: tuple(names)}
    return Dataset(name, x, y, nobody, groups=groups, group_names=called, likelihood=likelihood)


MAKERS: dict[str, Callable[[int], Dataset]] = {
    "digits": _digits,
    "eight_schools": _eight_schools,
    "baseball": _baseball,
    "rat_tumours": _rat_tumours,
    "gaussian": _gaussian,
    "linear": _linear,
}
"""Name of a data set -> function that returns it for a seed."""
