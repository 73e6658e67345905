"""A folder belongs to one run; what lies in it and is no file is refused before any work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyrofl.cli.commands import fitting
from pyrofl.cli.parser import main
from pyrofl.files.lock import lock_folder

SMALL = ["--per-class", "6", "--clients", "2", "--net", "softmax", "--rounds", "1", "--quiet"]
SMALL += ["--posterior-draws", "0"]
RUN = ["run", "local", *SMALL]


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.setattr(fitting, "fit", lambda *_, **__: pytest.fail("trained"))


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume"]])
def test_two_runs_do_not_share_a_folder(more, tmp_path, capsys):
    out = tmp_path / "local-0"
    out.mkdir()
    (out / "run.json").touch() if more else None
    for at, words in (
        (out, [*RUN, "--out", str(out)]),
        (out, ["compare", "local", *SMALL, "--seeds", "1", "--out", str(tmp_path)]),
        (tmp_path, ["compare", "local", *SMALL, "--seeds", "1", "--out", str(tmp_path)]),
    ):
        with lock_folder(at):
            assert main([*words, *more]) == 2
            told = capsys.readouterr().err
        full = "is not empty, it holds local-0" in told and not more and "compare" in words
        assert full or f"{at} is in use by process {os.getpid()} on " in told
        assert told.count("\n") == 1


def test_the_lock_goes_however_a_run_ends(tmp_path, monkeypatch):
    for error, code in ((KeyboardInterrupt, 130), (RuntimeError, 3), (None, 0)):

        def end(*args, error=error, **options):
            assert (tmp_path / "o/.lock").exists()
            raise error

        if error:
            monkeypatch.setattr(fitting, "fit", end)
        assert main([*RUN, "--out", str(tmp_path / "o")]) == code
        assert not (tmp_path / "o/.lock").exists()
        monkeypatch.undo()


def test_a_lock_that_a_killed_run_left_is_taken_over(tmp_path, capsys):
    import json
    import socket

    gone = {"host": socket.gethostname(), "pid": 4194304, "since": "2026-01-01T00:00:00+00:00"}
    (tmp_path / ".lock").write_text(json.dumps(gone))
    assert main([*RUN, "--out", str(tmp_path)]) == 0
    assert "was left by process 4194304 on " in capsys.readouterr().err
    assert not (tmp_path / ".lock").exists()


def directory(path: Path) -> None:
    path.mkdir()


def nowhere(path: Path) -> None:
    path.symlink_to("nothing")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("make", [directory, os.mkfifo, nowhere, device])
def test_a_checkpoint_that_is_no_file_is_refused(make, tmp_path, capsys):
    make(tmp_path / "checkpoint.safetensors")
    assert main([*RUN, "--out", str(tmp_path), "--resume"]) == 2
    told = capsys.readouterr().err
    assert "checkpoint.safetensors" in told
    assert told.count("\n") == 1
    assert os.listdir(tmp_path) == ["checkpoint.safetensors"]


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("name", ["metrics.csv", "figures/curves.png", "run.json"])
def test_a_directory_in_the_place_of_a_result_is_refused(name, tmp_path, capsys):
    (tmp_path / name).mkdir(parents=True)
    assert main([*RUN, "--out", str(tmp_path), "--overwrite"]) == 2
    assert f"{name} is a directory; expected a file, or nothing" in capsys.readouterr().err


@pytest.mark.usefixtures("idle")
def test_a_folder_of_another_method_or_version_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    words = ["--out", str(tmp_path), "--checkpoint-every", "1"]
    assert main([*RUN, *words]) == 0
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    capsys.readouterr()
    assert main(["run", "fedavg", *SMALL, *words, "--resume"]) == 2
    assert "now method is 'fedavg' and was 'local'" in capsys.readouterr().err
    from pyrofl.files.run_folder import compared_versions

    other = compared_versions() | {"version of pyrofl": "0.0.1"}
    monkeypatch.setattr("pyrofl.inference.fitted_run.saving.compared_versions", lambda: other)
    assert main([*RUN, *words, "--resume"]) == 2
    assert "now version of pyrofl is '0.0.1' and was " in capsys.readouterr().err
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
