"""Tables and facts of a run that were altered or cut off are refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import pyrofl
from pyrofl.cli.parser import main
from pyrofl.files import run_json

SMALL = ["--data", "digits", "--clients", "4", "--rounds", "2", "--quiet", "--net", "softmax"]
SMALL += ["--set", "epochs=1", "--posterior-draws", "0", "--save-predictions", "--per-class", "9"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a comparison, with checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "compare"
    words = ["compare", "fedavg", "local", *SMALL, "--seeds", "1", "--checkpoint-every", "2"]
    assert main([*words, "--out", str(folder)]) == 0
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def last_line(path: Path) -> None:
    path.write_bytes(path.read_bytes().rstrip().rpartition(b"\n")[0] + b"\n")


def digit(path: Path) -> None:
    text = path.read_text()
    at = text.rindex("0.")
    path.write_text(text[: at + 2] + ("1" if text[at + 2] != "1" else "2") + text[at + 3 :])


def empty(path: Path) -> None:
    path.write_bytes(b"")


CHANGES: dict[str, Callable[[Path], None]] = {
    "cut": cut,
    "last line": last_line,
    "digit": digit,
    "empty": empty,
}


@pytest.mark.parametrize("command", ["report", "benefit"])
@pytest.mark.parametrize("name", ["metrics.csv", "rows.csv", "clients.csv"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_altered_table_is_refused(command, name, change, made, tmp_path, capsys):
    folder = Path(shutil.copytree(made, tmp_path / "o"))
    CHANGES[change](folder / "fedavg-0" / name)
    assert main([command, str(folder)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{folder / 'fedavg-0' / name} was altered or cut off after the run wrote it" in line
    assert (
        "run again with --overwrite; after an edit of your own, remove 'hashes' from run.j" in line
    )


def edited(folder: Path, **changes: object) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("command", ["report", "benefit", "conformal", "predict", "resume"])
@pytest.mark.parametrize("change", ["seed", "cut"])
def test_altered_facts_are_refused(command, change, made, tmp_path, capsys):
    folder = Path(shutil.copytree(made, tmp_path / "o"))
    one = folder / "fedavg-0"
    cut(one / "run.json") if change == "cut" else edited(one, seed=7)
    (tmp_path / "rows.csv").write_text("x\n1\n")
    words = {
        "predict": ["predict", str(one), "--data", str(tmp_path / "rows.csv"), "--new-client"],
        "conformal": ["conformal", str(one)],
        "resume": ["compare", "fedavg", "local", *SMALL, "--seeds", "1", "--resume"],
    }.get(command, [command, str(folder)])
    words += ["--out", str(tmp_path / "p.csv")] if command == "predict" else []
    if command == "resume":
        words += ["--out", str(folder)]
        (one / "checkpoint.safetensors").unlink()
    assert main(words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    told = "cannot be read" if change == "cut" else "was altered or cut off after the run wrote"
    assert f"{one / 'run.json'} {told}" in line


def test_what_is_written_in_another_layout_or_removed_is_the_same(made, tmp_path, capsys):
    folder = Path(shutil.copytree(made, tmp_path / "o"))
    path = folder / "fedavg-0/run.json"
    facts = json.loads(path.read_text())
    tables = {"metrics.csv", "clients.csv", "rows.csv"}
    assert facts["hashes"].keys() == {"run.json", "checkpoint.safetensors", *tables}
    path.write_text(json.dumps(dict(reversed(facts.items()))))
    (folder / "fedavg-0/clients.csv").unlink()
    assert main(["report", str(folder)]) == 0
    capsys.readouterr()


def test_a_folder_without_hashes_is_read_as_it_is(made, tmp_path, capsys):
    folder = Path(shutil.copytree(made, tmp_path / "o"))
    for one in folder.glob("*-0"):  # as an older version wrote it, or its owner edited it
        digit(one / "metrics.csv")
        facts = json.loads((one / "run.json").read_text())
        del facts["hashes"]
        (one / "run.json").write_text(json.dumps(facts))
    assert main(["report", str(folder)]) == 2
    assert "compare.csv was altered or is of other runs" in capsys.readouterr().err
    (folder / "compare.csv").unlink()
    for command in ("report", "benefit"):
        assert main([command, str(folder)]) == 0
    capsys.readouterr()


WEEK = "wait,age,home\n" + "\n".join(f"{i % 7 / 2},{i % 5 + 20},{i // 10}" for i in range(40))
TABLE = ["--target", "wait", "--client-column", "home", "--checkpoint-every", "1", "--quiet"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return a folder with runs r0 and r1 of seeds 0 and 1, and long, with more rounds."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "t.csv").write_text(WEEK)
    for name, seed, rounds in (("r0", 0, 2), ("r1", 1, 2), ("long", 0, 3)):
        words = ["--seed", str(seed), "--rounds", str(rounds), "--out", str(folder / name)]
        assert main(["run", "fedavg", f"--data=csv:{folder / 't.csv'}", *TABLE, *words]) == 0
    return folder


def predicting(folder: Path, tables: Path) -> int:
    out = str(folder / "p.csv")
    words = ["predict", str(folder), "--data", str(tables / "t.csv"), "--client-column", "home"]
    return main([*words, "--overwrite", "--out", out])


@pytest.mark.parametrize(("to", "of"), [("r0", "r1"), ("long", "r0")])
def test_a_checkpoint_of_another_run_is_refused(to, of, tables, tmp_path, capsys):
    folder = Path(shutil.copytree(tables / to, tmp_path / "o"))
    capsys.readouterr()
    assert predicting(folder, tables) == 0
    shutil.copy(tables / of / "checkpoint.safetensors", folder)
    capsys.readouterr()
    assert predicting(folder, tables) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    what = "round 2 of 3" if to == "long" else "another run"
    assert f"checkpoint.safetensors is of {what} than {folder / 'run.json'} describes" in line
    with pytest.raises(ValueError, match=f"is of {what} than"):
        pyrofl.load(folder)


def test_a_run_between_its_two_files_is_loaded_and_resumed(tables, tmp_path, capsys):
    folder = Path(shutil.copytree(tables / "r0", tmp_path / "o"))
    shutil.copy(tables / "long/checkpoint.safetensors", folder)  # killed before run.json
    assert pyrofl.load(folder).state.number == 3
    words = ["run", "fedavg", f"--data=csv:{tables / 't.csv'}", *TABLE, "--rounds", "3"]
    assert main([*words, "--out", str(folder), "--resume"]) == 0
    assert predicting(folder, tables) == 0
    capsys.readouterr()


def test_hashes_lead_to_no_other_folder(tmp_path):
    (tmp_path / "outside").write_text("1")
    folder = tmp_path / "run"
    folder.mkdir()
    run_json.write(folder, {"a": float("nan"), "b": (1, 2)}, ("lacking.csv",))
    assert run_json.read(folder / "run.json", tables=True)["b"] == [1, 2]
    facts = json.loads((folder / "run.json").read_text())
    facts["hashes"] |= {"../outside": "0" * 64}
    (folder / "run.json").write_text(json.dumps(facts))
    assert run_json.read(folder / "run.json", tables=True)["b"] == [1, 2]
    facts["hashes"] = "none"
    (folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"run\.json was altered or cut off"):
        run_json.read(folder / "run.json")


def test_a_pipe_in_place_of_facts_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(ValueError, match=r"cannot be read: .*it is no file"):
        run_json.read(tmp_path / "run.json")
