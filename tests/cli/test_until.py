"""Runs that stop by themselves, by command line."""

from __future__ import annotations

import json
from pathlib import Path

from pyrofl.cli.parser import main

# Nothing moves, so that the third round, the first that can be judged, is the last.
STILL = ["--data", "eight_schools", "--partition", "iid", "--clients", "2", "--quiet"]
STILL += ["--posterior-draws", "2", "--set", "lr=0"]
RUN = ["run", "fedavg", *STILL]
UNTIL = ["--stop-when", "converged"]


def left(out: Path) -> list[bytes]:
    """Return what a run leaves that its clock does not change."""
    return [(out / name).read_bytes() for name in ("metrics.csv", "clients.csv", "posterior.nc")]


def test_a_run_stops_and_its_folder_says_so(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert main([*RUN, *UNTIL, "--rounds", "9", "--eval-every", "2", "--out", str(whole)]) == 0
    facts = json.loads((whole / "run.json").read_text())
    assert facts["rounds"] == 3
    assert facts["status"]["kind"] == "converged"
    assert all(moved == {"norm": 0.0} for moved in facts["moved"][0].values())
    assert "3,global" in (whole / "metrics.csv").read_text().splitlines()[-1]  # tested in the end
    part = [*RUN, *UNTIL, "--eval-every", "2", "--checkpoint-every", "1", "--out", str(out)]
    assert main([*part, "--rounds", "2"]) == 0
    assert main([*part, "--rounds", "9", "--resume"]) == 0
    assert left(out) == left(whole)
    assert main([*part, "--rounds", "9", "--resume"]) == 0  # there is no more to do
    assert left(out) == left(whole)


def test_a_run_that_went_on_does_not_stop_in_its_past(tmp_path, capsys):
    words = [*RUN, "--checkpoint-every", "1", "--out", str(tmp_path / "run"), "--rounds", "5"]
    assert main(words) == 0
    assert main([*words, *UNTIL, "--resume"]) == 2
    told = capsys.readouterr().err
    assert (
        "checkpoint.safetensors holds round 5 of a run that was to stop after round 3: conv" in told
    )


def test_each_run_of_a_comparison_stops_by_itself(tmp_path, capsys):
    out = tmp_path / "both"
    words = ["compare", "fedavg", "local", *STILL, *UNTIL, "--rounds", "9", "--seeds", "1"]
    assert main([*words, "--out", str(out)]) == 0
    # What clients keep is not there before round one, so that it seems to move in it.
    for name, rounds in (("fedavg-0", 3), ("local-0", 6)):
        assert json.loads((out / name / "run.json").read_text())["rounds"] == rounds
