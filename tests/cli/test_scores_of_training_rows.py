"""Scores of training rows are called so, and small ones are not shown as 0."""

from __future__ import annotations

import numpy as np
import pytest

from pyrofl.cli.parser import main

A = np.random.default_rng(0).normal(size=20)


def written(folder, unit):
    file = folder / "rows.csv"
    rows = (f"{a},{(a + k % 3) * unit},{'pq'[k % 2]}" for k, a in enumerate(A))
    file.write_text("\n".join(["a,y,g", *rows]))
    out = str(folder / "out")
    return [
        "--data",
        f"csv:{file}",
        "--target",
        "y",
        "--client-column",
        "g",
        "--rounds",
        "1",
        "--out",
        out,
    ]


@pytest.mark.parametrize("share", ["0", "0.01"])
def test_a_run_without_test_rows_warns(tmp_path, capsys, share):
    assert main(["run", "fedavg", *written(tmp_path, 1.0), "--test-fraction", share]) == 0
    assert "no client has test rows: all scores are of training rows" in capsys.readouterr().err


def test_scores_of_a_target_of_small_numbers_are_shown(tmp_path, capsys):
    assert main(["run", "fedavg", *written(tmp_path, 1e-7)]) == 0
    told = capsys.readouterr()
    head, line, *_ = told.out.splitlines()
    assert 1e-8 < float(dict(zip(head.split(), line.split(), strict=True))["rmse"]) < 1e-6
    assert "scores are of training rows" not in told.err
