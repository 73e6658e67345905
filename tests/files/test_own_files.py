"""Files in folders of another person are written without following links."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import hospitals
import pytest
import torch

import pyrofl
from pyrofl.cli.parser import main
from pyrofl.files.link_safe_files import append, subfolder
from pyrofl.files.lock import LOCK_FILE, lock_folder
from pyrofl.files.run_folder import write_csv
from pyrofl.flower.processes import ProcessGroup
from pyrofl.flower.site import greeting, reply_or_refuse

SMALL = ["--data", "eight_schools", "--partition", "iid", "--clients", "3", "--rounds", "2"]
SMALL += ["--quiet", "--set", "epochs=1", "--posterior-draws", "2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folders of a run and of a comparison."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["run", "fedavg", *SMALL, "--out", str(folder / "run")]) == 0
    words = ["compare", "fedavg", "local", *SMALL, "--seeds", "1", "--save-predictions"]
    assert main([*words, "--out", str(folder / "compare")]) == 0
    return folder


@pytest.fixture
def precious(tmp_path):
    """Return a file that nothing may write to."""
    path = tmp_path / "precious"
    path.write_text("mine")
    return path


def received(made: Path, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / name, tmp_path / name))


COMMANDS = {
    "report": ("compare", ["report", "{}"]),
    "benefit": ("compare", ["benefit", "{}"]),
    "conformal": ("run", ["conformal", "{}"]),
    "run": ("run", ["run", "fedavg", *SMALL, "--overwrite", "--out", "{}"]),
    "compare": (
        "compare",
        ["compare", "fedavg", "local", *SMALL, "--seeds", "1", "--overwrite", "--out", "{}"],
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_lock_that_is_a_link_is_refused(command, kind, made, precious, tmp_path, capsys):
    name, words = COMMANDS[command]
    folder = received(made, name, tmp_path)
    if kind == "symbolic":
        (folder / LOCK_FILE).symlink_to(precious)
    else:
        os.link(precious, folder / LOCK_FILE)
    assert main([word.format(folder) for word in words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    told = f"a link to {precious}" if kind == "symbolic" else "a second name of another file"
    assert f"{folder / LOCK_FILE} is {told}" in line
    assert "remove it" in line
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("command", ["report", "benefit", "run", "compare", "conformal"])
def test_a_folder_of_figures_that_is_a_link_is_refused(command, made, tmp_path, capsys):
    name, words = COMMANDS[command]
    folder, elsewhere = received(made, name, tmp_path), tmp_path / "elsewhere"
    shutil.rmtree(folder / "figures")
    elsewhere.mkdir()
    (folder / "figures").symlink_to(elsewhere)
    code = main([word.format(folder) for word in words])
    told = capsys.readouterr()
    assert (code, list(elsewhere.iterdir())) == (2, [])
    assert f"{folder / 'figures'} is a link to {elsewhere}" in told.err


def test_the_folder_of_a_run_of_a_comparison_that_is_a_link_is_refused(made, tmp_path, capsys):
    folder, elsewhere = received(made, "compare", tmp_path), tmp_path / "elsewhere"
    shutil.move(folder / "local-0", elsewhere)
    before = {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")}
    (folder / "local-0").symlink_to(elsewhere)
    assert main([word.format(folder) for word in COMMANDS["compare"][1]]) == 2
    assert f"{folder / 'local-0'} is a link to {elsewhere}" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")} == before


def test_a_lock_that_leads_nowhere_creates_nothing(tmp_path):
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "new")
    with pytest.raises(ValueError, match=r"is a link to .*new; expected"):
        lock_folder(tmp_path).__enter__()
    assert not (tmp_path / "new").exists()


def test_logs_follow_no_links_and_wait_for_no_pipe(precious, tmp_path):
    log = tmp_path / "server.log"
    log.symlink_to(precious)
    with pytest.raises(ValueError, match="is a link to"):
        append(log, "text")
    log.unlink()
    os.link(precious, log)
    with pytest.raises(ValueError, match="is a second name of another file"):
        append(log, "text")
    log.unlink()
    os.mkfifo(log)
    with pytest.raises(ValueError, match="is no file; expected"):
        append(log, "text")
    log.unlink()
    append(log, "one\n")
    append(log, "two\n")
    assert (log.read_text(), precious.read_text()) == ("one\ntwo\n", "mine")


def test_the_files_of_a_site_follow_no_links(precious, tmp_path):
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=("epochs=1",))
    site = hospitals.site(project, tmp_path, "hospital_1")
    assert "hello" in reply_or_refuse(site, greeting(project))
    log = tmp_path / "hospital_1/site.log"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600  # its errors show values of rows
    log.unlink()
    log.symlink_to(precious)
    with pytest.raises(ValueError, match=r"site\.log is a link to"):
        reply_or_refuse(site, greeting(project))
    assert precious.read_text() == "mine"


def test_the_folder_of_flower_holds_no_links(precious, tmp_path):
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower/superlink.db").symlink_to(precious)
    with pytest.raises(ValueError, match=r"superlink\.db is a link to"):
        ProcessGroup(tmp_path / "flower")


def test_a_subfolder_is_made_unless_it_is_a_link(tmp_path):
    assert subfolder(tmp_path / "a/b").is_dir()
    (tmp_path / "c").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="c is a link to"):
        subfolder(tmp_path / "c")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_with_values_of_rows_are_of_their_owner_alone(made, tmp_path, blobs):
    own = {"rows.csv", "posterior.nc", "checkpoint.safetensors"}  # with observed_data
    modes = {path.name: mode(path) for path in (made / "run").iterdir() if path.is_file()}
    assert {name for name, one in modes.items() if one == 0o600} == own
    (made / "run/rows.csv").chmod(0o644)  # as an older version wrote it
    words = ["run", "fedavg", *SMALL, "--overwrite", "--out", str(made / "run")]
    assert main(words) == 0
    assert mode(made / "run/rows.csv") == 0o600
    assert main([*words, "--arviz-groups", "posterior"]) == 0
    assert mode(made / "run/posterior.nc") != 0o600
    write_csv(tmp_path / "public.csv", ("a",), [(1,)])
    assert mode(tmp_path / "public.csv") != 0o600
    assert torch.equal(pyrofl.load(made / "run").state.seen, torch.ones(3, dtype=torch.bool))
