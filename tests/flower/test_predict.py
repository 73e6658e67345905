"""A site predicts from the state that its clients keep and the server's last message."""

from __future__ import annotations

import csv

import hospitals
import pytest
import torch
from hospitals import NAMES, looped, wire

from pyrofl.cli import main
from pyrofl.flower.coordinator import ServerSettings, coordinate
from pyrofl.flower.rows import rows_of
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.fitted_run.run import Run

METHODS = ("pfedvem", "ditto")
SOON = ServerSettings(3, 2, 0.0)


def finished(folder, **changes):
    """Return a project whose rounds are made."""
    more = {"methods": METHODS, "settings": ("epochs=1",)} | changes
    project = hospitals.project(folder / "p", **more)
    if project.client_column:
        hospitals.wards(folder / "p")
    stores = coordinate(project, folder / "out", wire(project, folder), SOON, lambda _: None)
    return project, stores


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("group", ["", "ward"])
def test_it_predicts_as_the_run_in_one_process(group, tmp_path, capsys):
    project, _ = finished(tmp_path, client_column=group)
    for name in METHODS:
        data = hospitals.whole(project)
        method = method_schedule(project.build(data.clients, server=True)[name])(project.rounds - 1)
        run = Run(method, data, looped(project, name), project.seed)
        for site in NAMES[:2]:
            file, out = project.folder / f"sites/{site}.csv", tmp_path / f"{name}-{site}.csv"
            words = ["study", "predict", str(tmp_path / site), "--rows", str(file)]
            assert main([*words, "--out", str(out), "--method", name]) == 0
            found = table(out)
            x = torch.tensor(
                [[float(row[n]) for n in project.features] for row in table(file)]
            ).double()
            owners = [row["client"] for row in found]
            assert set(owners) == set(rows_of(project, str(file), site).names)
            for owner in set(owners):
                mine = [i for i, one in enumerate(owners) if one == owner]
                expected = run.predict(x[mine], owner).mean
                told = [[float(found[i][f"p({n})"]) for n in project.classes] for i in mine]
                torch.testing.assert_close(
                    torch.tensor(told).double(), expected, rtol=1e-6, atol=1e-6
                )
    if group:  # rows of several clients are not those of one
        refused = [*words, "--out", str(tmp_path / "no.csv"), "--method", name]
        assert main([*refused, "--client", owners[0]]) == 2
        assert "leave out --client, to predict each row for its own" in capsys.readouterr().err


def test_what_cannot_be_predicted_is_one_line(tmp_path, monkeypatch, capsys):
    project, stores = finished(tmp_path, rounds=1)
    monkeypatch.setattr("pyrofl.flower.results.drawn", lambda *_: [])
    stores["ditto"].finish()
    rows, out = str(project.folder / "sites/hospital_1.csv"), str(tmp_path / "p.csv")
    words = [
        "study",
        "predict",
        str(tmp_path / "hospital_1"),
        "--rows",
        rows,
        "--out",
        out,
    ]

    def refused(*more):
        assert main([*words, *more]) == 2
        return capsys.readouterr().err

    assert "several methods; expected --method pfedvem or ditto" in refused()
    assert "expected one of" in refused("--method", "pfedvem", "--model", "ensemble")
    assert "unknown client 'hospital_2'" in refused("--method", "ditto", "--client", "hospital_2")
    for folder in ("out", "out/ditto"):
        assert main(["benefit", str(tmp_path / folder)]) == 2
        told = capsys.readouterr().err
        assert "a Flower study, and the predictions of its test rows stay at the sites" in told
    words[2] = str(tmp_path / "nowhere")
    assert "site.json cannot be read" in refused("--method", "ditto")
