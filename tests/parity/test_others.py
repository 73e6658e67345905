"""What other people's code reached, on the very same clients; see examples/papers/parity.

Fitting anew takes an hour, so only with `-m slow`, and with PARITY naming the folder of partitions;
what the page's table holds is looked at always.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples/papers/parity"
sys.path.insert(0, str(FOLDER))

import others  # noqa: E402

CLIENTS = os.environ.get("PARITY")


def lines(*accuracies: float, theirs: float = 0.8, number: int = 1) -> list[others.Line]:
    """Return what seeds reached after a round."""
    return [
        {"method": "m", "model": "global", "round": number, "theirs": theirs, "ours": value}
        for value in accuracies
    ]


@pytest.mark.slow
@pytest.mark.skipif(CLIENTS is None, reason="PARITY names no folder of partitions")
@pytest.mark.parametrize("name", others.CASES)
def test_it_learns_as_fast_as_the_others(name):
    found = [
        line
        for seed in range(others.SEEDS)
        for line in others.measure(name, seed, Path(str(CLIENTS)))
    ]
    assert not others.too_far(others.compared(found))


def test_the_table_of_the_page_is_of_all_methods_and_within_bounds():
    rows = others.compared(others.read(FOLDER / "found.csv"))
    expected = {(n, m, r) for n, c in others.CASES.items() for m in c.theirs for r in c.theirs[m]}
    assert {(r.method, r.model, r.round) for r in rows} == expected
    assert not others.too_far(rows)


def test_a_single_round_may_be_off_by_chance_but_not_all():
    (row,) = others.compared(lines(0.75, 0.85, 0.80))
    # Seeds have sd 0.05; theirs is one more, so the difference has that times (1 + 1 / 3)^1/2.
    assert row.error == pytest.approx(0.05 / 3**0.5)
    assert row.bound == pytest.approx(3 * 0.05 * (4 / 3) ** 0.5)

    def rounds(*means: float) -> list[others.Line]:
        each = (lines(v - 0.05, v + 0.05, v, number=r) for r, v in enumerate(means))
        return [line for some in each for line in some]

    assert not others.too_far(others.compared(rounds(0.85, 0.75, 0.80)))
    (told,) = others.too_far(others.compared(rounds(0.85, 0.85, 0.80)))
    assert told.startswith("m, global: mean difference +0.033")


def test_without_noise_the_bound_is_a_point_and_a_half():
    assert not others.too_far(others.compared(lines(0.814, 0.814, 0.814)))
    assert len(others.too_far(others.compared(lines(0.816, 0.816, 0.816)))) == 2
