"""What other people's code reached, on the very same clients; minutes, so only with `-m slow`.

The folder that PARITY names holds fashion20.npz and pfedvem_slices100.npz, which say which rows of
../fashion_mnist.npz each client has. The numbers are of one seed of PFLlib, and of one of the
pFedVEM authors' code; ours are means of three seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pyrofl
from pyrofl import nets
from pyrofl.data import Federation, datasets
from pyrofl.inference.method import Method
from pyrofl.models import (
    apfl,
    ditto,
    fedavg,
    fedbabu,
    fedrep,
    local,
    perfedavg,
    pfedme,
    pfedvem,
)

FOLDER = os.environ.get("PARITY")
WITHIN = 0.015
SEEDS = (0, 1, 2)
NET = nets.build("mlp:100", (1, 28, 28), 10)
STEPS = {"batch": 10, "epochs": 1, "lr": 0.01, "momentum": 0.0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="PARITY names no folder of partitions"),
]

# Method, model, how it is adapted before a test, round -> accuracy over all clients' test rows.
PFLLIB: dict[str, tuple[Callable[[], Method], str, str, Mapping[int, float]]] = {
    "fedavg": (
        lambda: fedavg.build(NET, **STEPS),
        "global",
        "none",
        {5: 0.597, 10: 0.685, 15: 0.711, 20: 0.721},
    ),
    "fedrep": (
        lambda: fedrep.build(NET, head_epochs=1, **STEPS),
        "personal",
        "none",
        {5: 0.802, 10: 0.850, 15: 0.863, 20: 0.876},
    ),
    "fedbabu": (
        lambda: fedbabu.build(NET, fine_tune=5, **STEPS),
        "personal",
        "adapt",
        {20: 0.872},
    ),
    "ditto": (
        lambda: ditto.build(NET, strength=0.1, **STEPS),
        "personal",
        "none",
        {5: 0.814, 10: 0.853, 15: 0.870, 20: 0.883},
    ),
    "pfedme": (
        lambda: pfedme.build(NET, strength=5.0, steps=5, lr_centre=0.05, beta=1.0, **STEPS),
        "personal",
        "none",
        {5: 0.839, 10: 0.860, 15: 0.872, 20: 0.885},
    ),
    "perfedavg": (
        # A step takes 21 rows, 7 for the inner gradient and 14 for the outer one, where PFLlib has
        # 10 and 10: as many steps in an epoch.
        lambda: perfedavg.build(NET, order="first", inner_lr=0.01, **STEPS | {"batch": 7}),
        "personal",
        "adapt",
        {5: 0.754, 10: 0.799, 15: 0.786, 20: 0.821},
    ),
    "apfl": (
        lambda: apfl.build(NET, alpha=0.5, lr_alpha=0.01, **STEPS),
        "personal",
        "none",
        {5: 0.831, 10: 0.866, 15: 0.877, 20: 0.885},
    ),
    "local": (lambda: local.build(NET, **STEPS), "personal", "none", {10: 0.855}),
}
AUTHORS = {  # round -> personal, global
    1: (0.643, 0.352),
    6: (0.805, 0.633),
    11: (0.831, 0.714),
    16: (0.841, 0.748),
    21: (0.851, 0.760),
}


@cache
def held(name: str) -> dict[str, Any]:
    with np.load(Path(str(FOLDER)) / name) as file:
        return dict(file)


@cache
def images() -> Any:
    return datasets.load(f"npz:{Path(str(FOLDER)).parent / 'fashion_mnist.npz'}")


def federation(train: list[Tensor], test: list[Tensor], pooled: Tensor | None = None) -> Federation:
    whole = images()
    return Federation(
        whole.x, whole.y, tuple(train), tuple(test), classes=whole.classes, pooled_test=pooled
    )


def parts(file: Mapping[str, Any], rows: str, offsets: str) -> list[Tensor]:
    at = file[offsets].tolist()
    index = torch.from_numpy(file[rows].astype(np.int64))
    return [index[a:b] for a, b in pairwise(at)]


@cache
def twenty() -> Federation:
    file = held("fashion20.npz")
    return federation(*(parts(file, n, f"{n}_offsets") for n in ("train", "test")))


@cache
def slices() -> Federation:
    file, whole = held("pfedvem_slices100.npz"), images()
    rows = whole.is_test.nonzero().flatten()
    owned = torch.from_numpy(file["labels"].astype(np.int64))
    test = [rows[torch.isin(whole.y[rows], own)] for own in owned]
    return federation(parts(file, "rows", "offsets"), test, rows)


def by_row(scores: pyrofl.Scores, data: Federation) -> float:
    """Return accuracy over all test rows, where each counts the same."""
    sizes = torch.tensor([len(data.test[i]) for i in scores.ids.tolist()])
    return float((scores.values["accuracy"] * sizes).sum() / sizes.sum())


def told(
    found: Mapping[int, list[float]], expected: Mapping[int, float], errors: float = 0.0
) -> str:
    """Say which rounds are too far apart: more than `WITHIN`, and than so many standard errors.

    Those are of the difference between a mean over our seeds and the other code's single one.
    """
    far = []
    for r, v in expected.items():
        error = float(np.std(found[r], ddof=1)) * (1 + 1 / len(found[r])) ** 0.5
        if abs(float(np.mean(found[r])) - v) > max(WITHIN, errors * error):
            seeds = ", ".join(f"{one:.3f}" for one in found[r])
            far.append(f"round {r}: {np.mean(found[r]):.3f} ({seeds}) for {v}")
    return "; ".join(far)


@pytest.mark.parametrize("name", PFLLIB)
def test_it_learns_as_fast_as_in_pfllib(name):
    make, model, adapted, expected = PFLLIB[name]
    data, found = twenty(), {r: [] for r in expected}
    for seed in SEEDS:
        run = None
        for number in expected:
            run = pyrofl.fit(make(), data, number, seed=seed, start=run, progress=False)
            found[number].append(by_row(run.evaluate(model=model, adapted=adapted), data))
    print(name, found)
    assert not told(found, expected)


def test_pfedvem_learns_as_fast_as_in_the_authors_code():
    """Ten of a hundred clients report: who they are moves the models by points in early rounds."""
    data = slices()
    found = {model: {r: [] for r in AUTHORS} for model in ("personal", "global")}
    for seed in SEEDS:
        run = None
        for number in AUTHORS:
            run = pyrofl.fit(
                pfedvem.build(NET),
                data,
                number,
                seed=seed,
                start=run,
                participation=pyrofl.participation.bernoulli(0.1),
                progress=False,
            )
            asked = ({"model": "personal"}, {"model": "global", "population": "pooled"})
            for how in asked:
                found[how["model"]][number].append(run.evaluate(**how).mean("accuracy"))
    print(found)
    both = {m: {r: v[i] for r, v in AUTHORS.items()} for i, m in enumerate(found)}
    assert not "".join(told(found[m], both[m], errors=2) for m in found)
