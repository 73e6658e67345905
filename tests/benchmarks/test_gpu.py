"""The script for a GPU runs on a CPU with small files: equality, and a table of each paper."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import gpu
import pytest


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> None:
    words = ("gpu.py", "--device", "cpu", "--size", "smoke", "--out", str(out), *words)
    monkeypatch.setattr(sys, "argv", [*words])
    gpu.main()


def test_a_table_of_each_paper_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without time every row has one round of two; 5 seeds and a grid of three settings count."""
    monkeypatch.setattr(gpu, "perf_counter", lambda: 0.0)
    run(monkeypatch, tmp_path, "--parts", "table", "--seconds", "0")
    table = rows(tmp_path / "gpu_table.csv")
    expected = [(paper, row) for paper, of in gpu.PAPERS.items() for row in of[2]]
    assert [(line["paper"], line["row"]) for line in table] == expected
    assert not [line["note"] for line in table if line["note"]]
    assert {line["rounds"] for line in table} == {"1"}
    assert all(line["personal"] or line["global"] for line in table)


def test_rounds_are_run_until_the_time_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A clock that advances by a second at every look leaves time for both rounds."""
    study = gpu.reproduce.studies("pfedmb")["table2"]
    gpu.simulated_files.write_all(tmp_path)
    trial = study.trial("smoke", next(iter(study.cases)), "FedAvg", "lr=0.06", 0, tmp_path)
    ticks = iter(range(1000))
    monkeypatch.setattr(gpu, "perf_counter", lambda: float(next(ticks)))
    row = gpu.run_row(trial, share=100.0, runs=15)
    assert row["rounds"] == 2
    assert row["hours"] == pytest.approx(row["round_s"] * 2 * 15 / 3600)
    assert gpu.run_row(trial, share=1.0, runs=15)["rounds"] == 1


def test_what_does_not_fit_into_the_time_or_lacks_data_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run(
        monkeypatch,
        tmp_path,
        "--parts",
        "table",
        "equality",
        "--methods",
        "fedavg",
        "--seconds",
        "-1",
    )
    assert {line["note"] for line in rows(tmp_path / "gpu_table.csv")} == {"left out: no time"}
    assert [line["note"] for line in rows(tmp_path / "gpu_equality.csv")] == ["left out: no time"]
    for name in ("cifar10", "cifar100", "fashion_mnist"):
        (tmp_path / f"{name}.npz").write_bytes(b"")
    monkeypatch.setattr(gpu, "PAPERS", {n: of for n, of in gpu.PAPERS.items() if n != "fedbe"})
    run(monkeypatch, tmp_path, "--parts", "table", "--data-dir", str(tmp_path))
    notes = [line["note"] for line in rows(tmp_path / "gpu_table.csv")]
    assert len(notes) == 9
    assert all("left out: " in note and "cannot be read as .npz" in note for note in notes)


def test_a_method_has_the_same_state_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(monkeypatch, tmp_path, "--parts", "equality", "--methods", "fedavg", "fedbe")
    for line in rows(tmp_path / "gpu_equality.csv"):
        assert (line["difference"], line["note"]) == ("0", "")
