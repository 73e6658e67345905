"""The check of files names every fault of every file, with its cure, and none of clean files."""

from __future__ import annotations

import numpy as np
import pytest

from pyrofl.cli.parser import main
from pyrofl.data.tables.file_checks import check_files, guess_format

N = 40


def cells(seed, count=N):
    """Return clean cells of a hospital, by column."""
    random = np.random.default_rng(seed)
    i = np.arange(count)
    return {
        "age": [f"{v:.1f}" for v in random.normal(60, 10, count)],
        "creatinine": [f"{v:.2f}" for v in random.lognormal(0, 0.4, count)],
        "sex": ["f" if v else "m" for v in i % 2],
        "smoker": ["yes" if v else "no" for v in i % 3],
        "died": [str(v) for v in random.integers(0, 2, count)],
        "note": [f"text {v}" for v in i],
    }


def write(folder, name, table, separator=",", encoding="utf-8"):
    """Write a file, and return its path."""
    lines = [separator.join(table), *map(separator.join, zip(*table.values(), strict=True))]
    path = folder / f"{name}.csv"
    path.write_bytes(("\n".join(lines) + "\n").encode(encoding))
    return str(path)


def renamed(table, name, other):
    return {other if n == name else n: v for n, v in table.items()}


def first(table, name, *words):
    return table | {name: [*words, *table[name][len(words) :]]}


NEEDED = ["age", "creatinine", "sex", "smoker", "died"]
FAULTS = {
    "header in capitals": (
        lambda t: renamed(t, "creatinine", "Creatinine "),
        "creatinine",
        "is called 'Creatinine'",
        "rename it creatinine",
    ),
    "misspelt header": (
        lambda t: renamed(t, "creatinine", "creatinin"),
        "creatinine",
        "is called 'creatinin'",
        "rename it creatinine",
    ),
    "no column": (
        lambda t: {n: v for n, v in t.items() if n != "age"},
        "age",
        "is missing",
        "add it, or leave it out of the study",
    ),
    "other case": (
        lambda t: t | {"smoker": [w.capitalize() for w in t["smoker"]]},
        "smoker",
        "has 'Yes' in 26 rows, elsewhere 'yes'",
        "write 'yes'",
    ),
    "other language": (
        lambda t: t | {"smoker": ["ja" if w == "yes" else "nein" for w in t["smoker"]]},
        "smoker",
        "has 'ja' in 26 rows, elsewhere 'yes'",
        "write 'yes'",
    ),
    "decimal comma": (
        lambda t: first(t, "age", "71;5".replace(";", ",")),
        "age",
        "has '71,5' in line 2, and 39 numbers",
        "write a full stop before decimals",
    ),
    "text among numbers": (
        lambda t: first(t, "creatinine", "<0.2", "high"),
        "creatinine",
        "has '<0.2' in line 2, 'high' in line 3, and 38 numbers",
        "write numbers, or name these texts by --na",
    ),
    "code for missing": (
        lambda t: first(t, "age", "-999", "-999", "-999"),
        "age",
        "holds -999 in 3 rows",
        "leave these cells empty if they are missing values",
    ),
    "no value": (
        lambda t: t | {"creatinine": ["NA"] * N},
        "creatinine",
        "has no value",
        "fill it, or leave it out of the study",
    ),
    "other unit": (
        lambda t: t | {"creatinine": [f"{88.42 * float(w):.1f}" for w in t["creatinine"]]},
        "creatinine",
        "as if they had another unit",
        "one unit in all clients: convert the column",
    ),
    "too large": (
        lambda t: first(t, "age", "1e301"),
        "age",
        "has 1e301 in line 2, which is too large",
        "write numbers of at most 3.4e+38",
    ),
    "dates": (
        lambda t: t | {"age": [f"{1 + k % 28}.03.195{k % 9}" for k in range(N)]},
        "age",
        "has dates such as '1.03.1950'",
        "write numbers, such as days since a date",
    ),
}


def quoted(table):
    """Quote cells with commas."""
    return {n: [f'"{w}"' if "," in w else w for w in v] for n, v in table.items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_file_column_and_cure(fault, tmp_path):
    change, column, text, cure = FAULTS[fault]
    files = [write(tmp_path, name, cells(k)) for k, name in enumerate(("basel", "chur"))]
    files.append(write(tmp_path, "bern", quoted(change(cells(2)))))
    problems = check_files(files, NEEDED).problems
    assert problems
    assert {one.column for one in problems} == {column}
    assert any(text in one.text and cure in one.cure for one in problems), problems
    assert any(one.file in ("bern.csv", "all files") for one in problems)


def test_all_faults_of_all_files_are_named_at_once(tmp_path):
    one = renamed(first(cells(0), "age", "x"), "sex", "Sex")
    other = cells(1) | {"smoker": ["ja" if w == "yes" else "nein" for w in cells(1)["smoker"]]}
    files = [write(tmp_path, "a", one), write(tmp_path, "b", other), write(tmp_path, "c", cells(2))]
    found = {(p.file, p.column) for p in check_files(files, NEEDED).problems}
    assert found == {("a.csv", "age"), ("a.csv", "sex"), ("b.csv", "smoker")}


def test_clean_files_and_unused_columns_have_no_problem(tmp_path):
    files = [write(tmp_path, str(k), cells(k)) for k in range(3)]
    files.append(write(tmp_path, "odd", cells(4) | {"note": ["1,5;x"] * 0 + ["-999"] * N}))
    assert check_files(files, NEEDED).problems == ()


def test_the_format_of_a_file_is_guessed_and_may_be_given(tmp_path):
    table = cells(0)
    german = {n: [w.replace(".", ",") for w in v] for n, v in table.items()}
    german["note"] = ["männlich"] * N
    path = write(tmp_path, "g", german, ";", "cp1252")
    guess = guess_format(path)
    assert (guess.separator, guess.encoding, guess.decimal) == (";", "cp1252", ",")
    report = check_files([path], NEEDED)
    assert (
        "g.csv: 40 rows, 40 complete; separator ';', encoding cp1252, decimal mark ','"
        in (report.guesses[0])
    )
    (problem,) = report.problems
    assert problem.cure == "save it as CSV UTF-8, with commas between cells and decimal points"
    tabs = write(tmp_path, "t", table, "\t", "utf-16")
    assert guess_format(tabs)[:2] == ("\t", "utf-16")
    assert guess_format(path, decimal=".").decimal == "."


def test_missing_values_may_have_words_of_their_own(tmp_path):
    path = write(tmp_path, "a", first(cells(0), "age", "unknown", "unknown"))
    assert check_files([path], NEEDED).problems
    report = check_files([path], NEEDED, na=("unknown",))
    assert report.problems == ()
    assert "40 rows, 38 complete" in report.guesses[0]


def test_rows_of_other_lengths_and_copies_are_named(tmp_path):
    path = write(tmp_path, "a", cells(0))
    with open(path, "a") as file:
        file.write("1,2\n")
    other = write(tmp_path, "b", cells(0))
    texts = [f"{p.file} {p.text}" for p in check_files([path, other], NEEDED).problems]
    assert "a.csv line 42 has 2 cells, and the header 6" in texts
    assert any(text.startswith("all files ") and "same rows" in text for text in texts), texts


def test_rows_with_line_breaks_are_named_by_their_first_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('note,x\n"two\nlines",1\n"and\nmore",2,3\n"a\n\nb",four\nc,5\nd,6\n')
    texts = [p.text for p in check_files([str(path)], ("x",)).problems]
    assert "line 4 has 3 cells, and the header" in " ".join(texts)
    assert "line 6" in " ".join(texts)


def test_the_command_prints_a_line_for_each_problem(tmp_path, capsys):
    write(tmp_path, "bern", renamed(cells(0), "creatinine", "Creatinine "))
    write(tmp_path, "chur", cells(1))
    words = ["check", str(tmp_path), "--formula", "died ~ age + creatinine + (1 | client)"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "bern.csv: 40 rows, 40 complete; separator ','" in said.out
    assert "is called 'Creatinine'" in said.out
    assert "1 problem in 2 files" in said.err
    write(tmp_path, "bern", cells(0))
    assert main(words) == 0
    assert capsys.readouterr().out.endswith("no problem in 2 files\n")
    assert main(["check", str(tmp_path / "none.csv")]) == 2
    assert "none.csv cannot be read: No such file or directory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([f"{k},{100 + k}" for k in range(N)], "text that reads as numbers, such as '0,100'"),
        ([f"{1 + k % 28}.03.195{k % 9}" for k in range(N)], "text that reads as dates"),
    ],
)
def test_measurements_that_are_text_in_all_files_are_a_problem(words, text, tmp_path):
    files = [
        write(tmp_path, str(k), quoted(cells(k) | {"age": words[k:] + words[:k]})) for k in range(3)
    ]
    (problem,) = check_files(files, NEEDED).problems
    assert (problem.file, problem.column) == ("all files", "age")
    assert text in problem.text


def test_a_response_of_a_numeric_family_holds_numbers(tmp_path, capsys):
    table = cells(0)
    path = write(tmp_path, "a", table | {"score": ["low", "high"] * (N // 2)})
    assert main(["check", path, "--formula", "score ~ age"]) == 2
    assert "has 'low' in line 2, 'high' in line 3" in " ".join(capsys.readouterr().out.split())
    assert main(["check", path, "--formula", "score ~ age", "--family", "bernoulli"]) == 0


def test_row_numbers_are_to_be_left_out_of_the_study(tmp_path):
    path = write(tmp_path, "a", {"id": [str(k) for k in range(N)], **cells(0)})
    (problem,) = check_files([path], [*NEEDED, "id"]).problems
    assert problem.cure == "measurements: leave it out"


def test_a_file_may_hold_the_rows_of_several_clients(tmp_path, capsys):
    tables = {"bern": cells(0), "chur": first(cells(1), "creatinine", "high")}
    rows = {n: tables["bern"][n] + tables["chur"][n] for n in tables["bern"]}
    path = write(tmp_path, "all", {"ward": ["bern"] * N + ["chur"] * N, **rows})
    words = ["--formula", "died ~ age + creatinine + (1 | ward)", "--client-column", "ward"]
    assert main(["check", path, *words]) == 2
    printed = capsys.readouterr().out
    assert "bern: 40 rows, 40 complete" in printed
    assert "chur  creatinine  has 'high' in line 42, and 39 numbers" in printed
    assert main(["describe", path, "--client-column", "ward", "--columns", "age"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert header.split() == ["column", "statistic", "bern", "chur", "all"]
    again = write(tmp_path, "more", {"ward": ["bern"] * N, **cells(2)})
    assert main(["check", path, again, *words]) == 2
    assert "more.csv has rows of 'bern', and so has an earlier file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected the name of a client in every row"):
        check_files([write(tmp_path, "gap", {"ward": [""] * N, **cells(2)})], client="ward")


def test_parquet_files_are_checked_beside_csv_files(tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    table = cells(0)
    paths = [write(tmp_path, "a", table), str(tmp_path / "b.parquet")]
    pd.DataFrame(first(cells(1), "sex", "F")).to_parquet(paths[1])
    report = check_files(paths, NEEDED)
    assert [(one.file, one.column) for one in report.problems] == [("b.parquet", "sex")]
    assert report.guesses[1] == "b.parquet: 40 rows, 40 complete"


def test_files_of_one_name_are_checked_apart(tmp_path):
    paths = []
    for seed, name in enumerate(("bern", "chur")):
        (tmp_path / name).mkdir()
        table = first(cells(seed), "age", "unknown") if name == "bern" else cells(seed)
        paths.append(write(tmp_path / name, "rows", table))
    report = check_files(paths, NEEDED)
    assert [one.file for one in report.problems if not one.is_warning] == [paths[0]]
    assert len(report.guesses) == 2


@pytest.mark.parametrize("name", ["all", "-rf", "q,r"])
def test_names_that_no_client_may_have_are_problems(name, tmp_path, capsys):
    """Of files and of clients in a column, in both commands."""
    path = write(tmp_path, name, cells(0))
    paths = [path] if "," not in name else [str(tmp_path)]
    for command in ("check", "describe"):
        assert main([command, *paths]) == 2
        assert f"a client is called {name!r}, " in capsys.readouterr().out
    ward = [f'"{name}"'] * N
    (problem,) = check_files(
        [write(tmp_path, "w", {"ward": ward, **cells(0)})], NEEDED, client="ward"
    ).problems
    assert problem.text.startswith(f"a client is called {name!r}, ")


def test_files_that_start_with_a_dot_are_named(tmp_path):
    write(tmp_path, "bern", cells(0))
    write(tmp_path, "..x", cells(1))
    with pytest.warns(UserWarning, match=r"\.\.x\.csv not read; rename tables that start with"):
        assert main(["check", str(tmp_path)]) in (0, 2)


@pytest.mark.parametrize(
    "content", [bytes(range(256)) * 4, b"PK\x03\x04" + bytes(50), b"a,b\n\x90,1\n"]
)
def test_a_file_that_is_no_text_is_named(content, tmp_path):
    (tmp_path / "x.csv").write_bytes(content)
    (problem,) = check_files([str(tmp_path / "x.csv")]).problems
    assert problem[:3] == ("x.csv", "", "is no text table")
    assert "save it as CSV UTF-8" in problem.cure
