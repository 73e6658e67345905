"""A run's directory is refused whole and written whole."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrofl.files import run_folder
from pyrofl.files.run_folder import (
    prepare,
    read_csv,
    replacing,
    versions,
    write_csv,
    write_json,
)
from pyrofl.files.text_tables import table


def test_a_missing_directory_is_made_with_its_parents(tmp_path):
    path = prepare(tmp_path / "a" / "b")
    assert path.is_dir()
    assert prepare(str(path)) == path


def test_a_directory_that_holds_something_is_refused_unless_asked(tmp_path):
    (tmp_path / "old.txt").write_text("old")
    with pytest.raises(ValueError, match=r"is not empty, it holds old\.txt"):
        prepare(tmp_path)
    assert prepare(tmp_path, overwrite=True) == tmp_path
    assert (tmp_path / "old.txt").read_text() == "old"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_is_refused_as_directory(tmp_path, below, overwrite):
    (tmp_path / "file").write_text("old")
    with pytest.raises(ValueError, match="file is a file; expected a directory"):
        prepare(tmp_path / "file" / below, overwrite)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    # Permissions do not bind the superuser, as whom tests may run.
    monkeypatch.setattr(run_folder.os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"cannot write to {tmp_path}"):
        prepare(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


def test_a_name_that_the_disk_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be made"):
        prepare(tmp_path / ("x" * 300))
    assert not list(tmp_path.iterdir())


def test_a_relative_path_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert prepare("out/run") == Path("out/run")
    assert (tmp_path / "out" / "run").is_dir()


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "metrics.csv"
    write_csv(path, ("a",), [(1,)])

    def rows():
        yield (2,)
        raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        write_csv(path, ("a",), rows())
    with pytest.raises(ValueError, match=r"row 1 has 2 entries; expected 1"):
        write_csv(path, ("a",), [(2,), (3, 4)])
    with pytest.raises(TypeError):
        write_json(tmp_path / "run.json", {"a": object()})
    assert os.listdir(tmp_path) == ["metrics.csv"]
    assert path.read_text() == "a\n1\n"


def test_the_old_file_is_whole_until_the_new_one_is(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"round": 1})
    with replacing(path) as temporary:
        temporary.write_text("{")
        assert json.loads(path.read_text()) == {"round": 1}
        temporary.write_text('{"round": 2}')
    assert json.loads(path.read_text()) == {"round": 2}


def test_what_is_renamed_is_on_the_disk(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def spy(*args, name=name, real=real):
            order.append(name)
            return real(*args)

        monkeypatch.setattr(run_folder.os, name, spy)
    write_json(tmp_path / "run.json", {})
    assert order == ["fsync", "replace", "fsync"]  # of the file; of the folder


def test_a_folder_that_cannot_be_brought_to_the_disk_is_no_matter(tmp_path, monkeypatch):
    def no(path, flags):
        raise PermissionError(13, "a folder")

    monkeypatch.setattr(run_folder.os, "open", no)
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "a").read_text() == "new"


def test_a_directory_that_only_seems_writable_is_refused(tmp_path, monkeypatch):
    def touch(path):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(run_folder.Path, "touch", touch)
    with pytest.raises(ValueError, match="be made or written to: Read-only file system; expected"):
        prepare(tmp_path / "a")


def test_what_a_killed_process_left_is_swept_at_any_depth(tmp_path):
    deep = tmp_path / "figures" / "more"
    deep.mkdir(parents=True)
    left = [f".{'0a' * 16}", f".{'0a' * 16}.png"]
    kept = [".keep", "0a", f".{'0a' * 16}.tar.gz"]
    for name in (*left, *kept):
        (tmp_path / name).touch()
        (deep / name).touch()
    run_folder.sweep(tmp_path)
    run_folder.sweep(tmp_path / "nowhere")
    assert sorted(os.listdir(deep)) == sorted(kept)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "figures"])


def test_json_round_trip(tmp_path):
    value = {"seed": 3, "seconds": [0.1, 2.0], "versions": versions()}
    write_json(tmp_path / "run.json", value)
    assert json.loads((tmp_path / "run.json").read_text()) == value


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.text("ab,\"'\n é", max_size=5), st.floats(allow_nan=False), st.integers()),
        max_size=4,
    )
)
def test_csv_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    write_csv(path, ("name", "value", "size"), rows)
    got = [(r["name"], float(r["value"]), int(r["size"])) for r in read_csv(path)]
    assert got == rows


def test_names_are_written_alike_in_every_locale(tmp_path, monkeypatch):
    def in_a_plain_locale(path, mode="r", **options):
        return open(path, mode, **({} if "b" in mode else {"encoding": "ascii"}) | options)

    monkeypatch.setattr(run_folder, "open", in_a_plain_locale, raising=False)
    write_csv(tmp_path / "a.csv", ("client",), [("Orléans",)])
    assert read_csv(tmp_path / "a.csv") == [{"client": "Orléans"}]
    write_json(tmp_path / "a.json", {"client": "Orléans"})
    assert json.loads((tmp_path / "a.json").read_bytes()) == {"client": "Orléans"}


def test_columns_are_the_promised_ones(tmp_path):
    row = (1, "personal", "none", "training", "nll", 0.5)
    write_csv(tmp_path / "metrics.csv", run_folder.METRICS, [row])
    head = (tmp_path / "metrics.csv").read_text().splitlines()[0]
    assert head == "round,model,adaptation,population,metric,value"
    assert ",".join(run_folder.CLIENTS) == "client,size,model,adaptation,metric,value"
    assert ",".join(run_folder.COMPARE) == "method,seed,model,adaptation,metric,value,tuned"


def test_versions_name_what_a_result_depends_on(monkeypatch):
    import torch

    assert list(versions()) == ["python", "pyrofl", "torch", "pyro", "numpy", "arviz"]
    assert versions()["torch"] == torch.__version__.partition("+")[0]

    def missing(package):
        raise run_folder.PackageNotFoundError(package)

    monkeypatch.setattr(run_folder, "version", missing)
    run_folder._installed_version.cache_clear()
    assert versions()["pyrofl"] == "unknown"
    run_folder._installed_version.cache_clear()


def test_tables_line_up():
    got = table(("method", "n", "nll"), [("pfedvem", 10, 0.25), ("a", 5, None)])
    assert got == "method    n     nll\npfedvem  10  0.2500\na         5       -"
    assert table(("method", "n"), []) == "method  n"


def test_texts_are_no_formulas_of_spreadsheets_and_come_back(tmp_path):
    texts = [
        "=cmd|'/C calc'!A0",
        "+1+1",
        "-2+3",
        "@SUM(A1)",
        "\t=1",
        "'=1",
        "''@a",
        "=",
        "-",
    ]
    plain = ["-1.5", "+2", "-1e-5", "1,5", "a=b", "it's", "'quoted'", "", " = ", "-inf"]
    write_csv(tmp_path / "t.csv", ("text", "=number"), [(text, -1.5) for text in texts + plain])
    with open(tmp_path / "t.csv", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["text", "'=number"]
    assert [cell for cell, _ in rows] == [f"'{text}" for text in texts] + plain
    assert {number for _, number in rows} == {"-1.5"}
    found = read_csv(tmp_path / "t.csv")
    assert [row["text"] for row in found] == texts + plain
    assert set(found[0]) == {"text", "=number"}
