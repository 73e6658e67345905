"""Entries of a study file that are wrong are refused in one line; words and dictionary hold."""

from __future__ import annotations

import re

import pytest
from hospitals import written

from pyrofl.cli.parser import main
from pyrofl.flower.project import Project
from pyrofl.flower.template import new
from pyrofl.nouns import Noun, nouns, use

RIGHT = {
    "formula": "recovered ~ age + dose + (1 | hospital)",
    "family": "bernoulli",
    "unit": "hospital",
}
WORD = "expected one word of letters, such as hospital"
WRONG = [
    ({"unit": 5}, f"unit is 5; {WORD}"),
    ({"unit": "health center"}, f"unit is 'health center'; {WORD}"),
    ({"unit": ""}, f"unit is ''; {WORD}"),
    ({"unit": None}, f"unit is None; {WORD}"),
    ({"unit": "<b>x</b>"}, f"unit is '<b>x</b>'; {WORD}"),
    ({"unit": ["a", "b", "c"]}, WORD),
    ({"unit": "server"}, "unit is 'server', which has another meaning"),
    ({"columns": ["age"]}, "columns is ['age']; expected lines such as"),
    ({"columns": {"ages": {"unit": "years"}}}, "the formula has age, and columns has ages"),
    (
        {"formula": "recovered ~ agee + (1 | hospital)", "columns": {"age": {"unit": "years"}}},
        "the formula has agee, and columns has age; expected one spelling",
    ),
    ({"priors": ["age=Normal(0"]}, "priors is 'age=Normal(0'; expected NAME=DIST"),
    ({"columns": {"age": {"units": "years"}}}, "unknown entry of column age: 'units'"),
    ({"columns": {"age": "years"}}, "column age is 'years'; expected some of type, unit"),
    ({"columns": {"age": {"range": [1]}}}, "expected [LOWEST, HIGHEST]"),
    ({"columns": {"age": {"range": [9, 1]}}}, "expected [LOWEST, HIGHEST]"),
    ({"columns": {"age": {"range": [True, 1]}}}, "expected [LOWEST, HIGHEST]"),
    ({"columns": {"age": {"unit": ""}}}, "unit of column age is ''; expected a text"),
    ({"columns": {"age": {"type": "float"}}}, "expected one of number, integer, category"),
    ({"columns": {"recovered": {"levels": ["yes"]}}}, "expected two or more different words"),
    ({"columns": {"recovered": {"levels": ["a,b", "c"]}}}, "has a comma; expected none"),
    (
        {"columns": {"recovered": {"levels": ["no", "yes"], "range": [0, 1]}}},
        "is a category with range; expected only levels",
    ),
    ({"levels": ["age=1,2"]}, "levels is no entry; expected them under columns"),
    ({"methods": ["fedavg"]}, "formula and methods are given; expected one of them"),
    ({"quesion": "Who?"}, "unknown entry 'quesion'; did you mean question?"),
    ({"formula": "recovered ~ age + (1 | hospital"}, "study.yaml: formula is"),
    ({"family": "normall"}, "study.yaml: unknown family 'normall'; did you mean"),
    ({"priors": ["age=Normal(0, -1)"]}, "its scale is invalid; expected one that is greater"),
]


@pytest.mark.parametrize(("change", "told"), WRONG)
def test_wrong_entries_are_refused_with_the_file_and_the_cure(tmp_path, change, told):
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        written(tmp_path, RIGHT | change)
    assert str(error.value).startswith(f"{tmp_path}/study.yaml")
    assert "\n" not in str(error.value)


def test_words_of_a_study_are_those_of_its_unit_and_of_its_client_column(tmp_path):
    plain = written(tmp_path, RIGHT)
    assert (plain.nouns.site.count(3), plain.nouns.client.count(1)) == ("3 hospitals", "1 hospital")
    assert plain.client_name == "hospital"
    own = written(tmp_path, RIGHT | {"unit": ["Klinik", "Kliniken"]})
    assert own.nouns.site == Noun("Klinik", "Kliniken")
    assert own.client_name == "client"  # no term of the formula has the word
    wards = written(tmp_path, RIGHT | {"client-column": "ward"})
    assert (wards.nouns.client.many, wards.nouns.site.many) == ("wards", "hospitals")
    assert wards.client_name == "ward"
    odd = written(tmp_path, RIGHT | {"client-column": "ward_id"})
    assert odd.nouns.client.many == "clients"
    with use(own.nouns):
        assert f"{nouns().client.title}, {nouns().site}" == "Kliniken, Klinik"
    assert nouns().client.many == "clients"


def test_yes_and_no_are_words_in_a_study_file(tmp_path):
    (tmp_path / "study.yaml").write_text(
        "formula: recovered ~ age\nfamily: bernoulli\ncolumns:\n"
        "  recovered: {levels: [no, yes]}\n  age: {range: [18, null]}\ncorrected: true\n"
    )
    study = Project.read(tmp_path)
    assert study.levels == ("recovered=no,yes",)
    assert study.corrected is True
    assert study.columns["age"].range == "at least 18"


@pytest.mark.parametrize(
    ("column", "cell", "told"),
    [
        ("age", "61", "has 1 of 40 numbers that are not from -6 to 6 decades from 60 years"),
        ("recovered", "Yes", "has 'Yes' in 1 row, which is no level write 'yes'"),
        ("recovered", "ja", "has 'ja' in 1 row, which is no level write 'yes'"),
        ("recovered", "maybe", "which is no level write one of no, yes, or leave it out"),
        ("dose", "1,5", "'1,5' in line 2"),
    ],
)
def test_a_table_that_contradicts_the_dictionary_sends_nothing(
    tmp_path, capsys, column, cell, told
):
    new(tmp_path / "s")
    path = tmp_path / "s/sites/hospital_1.csv"
    header, row, *rest = path.read_text().splitlines()
    cells = dict(zip(header.split(","), row.split(","), strict=True)) | {column: f'"{cell}"'}
    path.write_text("\n".join([header, ",".join(cells.values()), *rest]) + "\n")
    words = ["--data", str(path), "--name", "hospital_1", "--study", str(tmp_path / "s")]
    state = ["--state", str(tmp_path / "state")]
    for command in (
        ["check", str(tmp_path / "s"), str(path)],
        ["join", "127.0.0.1:1", *words, *state],
    ):
        assert main(["study", *command]) == 2
        said = capsys.readouterr()
        assert told in " ".join(said.out.split())
        assert re.search("that would make the study wrong.*; expected tables as above", said.err)
        assert "What leaves" not in said.out


def test_the_dictionary_may_have_columns_that_the_formula_lacks(tmp_path):
    entries = {"weight": {"unit": "kg"}, "arm": {"levels": ["a", "b"]}}
    study = written(tmp_path, RIGHT | {"columns": entries})
    assert study.levels == ()


def test_an_error_of_yaml_names_the_file_alone(tmp_path):
    (tmp_path / "study.yaml").write_text("formula: [died")
    with pytest.raises(ValueError, match="cannot be read") as error:
        Project.read(tmp_path)
    assert "<unicode string>" not in str(error.value)


def spoiled(path, column, word, rows):
    """Write a word into the first rows of a column."""
    header, *lines = path.read_text().splitlines()
    at = header.split(",").index(column)
    for i in range(min(rows, len(lines))):
        cells = lines[i].split(",")
        cells[at] = word
        lines[i] = ",".join(cells)
    path.write_text("\n".join([header, *lines]) + "\n")


def few_events(folder):
    spoiled(folder / "sites/hospital_1.csv", "recovered", "no", 40)
    spoiled(folder / "sites/hospital_2.csv", "recovered", "yes", 65)


def few_rows(folder):
    path = folder / "sites/hospital_1.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:4]) + "\n")


def copied(folder):
    (folder / "sites/hospital_4.csv").write_text((folder / "sites/hospital_1.csv").read_text())


def entry(old, new):
    def change(folder):
        path = folder / "study.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return change


BEFORE_ROUNDS = {
    "min-rows": (few_rows, "hospital_1.csv rule min-rows: 3 rows are complete at least 5: join"),
    "min-events": (
        few_events,
        "hospital_1.csv rule min-events: response recovered has 0 of .* "
        "hospital_2.csv rule min-events: response recovered has 0 of",
    ),
    "response on both sides": (
        entry("recovered ~ age", "recovered ~ recovered + age"),
        "recovered",
    ),
    "link": (entry("family: bernoulli", "family: bernoulli\nlink: cauchit"), "link"),
    "log link": (entry("family: bernoulli", "family: bernoulli\nlink: log"), "link"),
    "family": (entry("family: bernoulli", "family: poisson"), "recovered"),
    "prior": (entry("seed: 0", 'seed: 0\npriors: ["agee=Normal(0, 1)"]'), "agee"),
    "copy": (copied, "hospital_4.csv has the same rows as hospital_1.csv"),
    "code": (
        lambda folder: (
            entry(", range: [-6, 6]", "")(folder),
            spoiled(folder / "sites/hospital_2.csv", "age", "-999", 17),
        ),
        "hospital_2.csv age holds -999 in 17 rows",
    ),
    "empty file": (
        lambda folder: (folder / "sites/hospital_2.csv").write_bytes(b""),
        "hospital_2.csv is empty replace it",
    ),
    "thousands": (
        lambda folder: spoiled(folder / "sites/hospital_2.csv", "dose", '"1;088"', 99),
        "write 1088 if the comma marks thousands, and 1.088 if",
    ),
    "unit": (
        entry("unit: hospital", "unit: Spital"),
        r"hospital is missing add it, or write \(1 \| Spital\), as the unit is Spital",
    ),
    "client column": (
        entry("seed: 0", "seed: 0\nclient-column: ward"),
        "all files ward is missing add it, or leave client-column out of the study file",
    ),
}


@pytest.mark.parametrize("kind", BEFORE_ROUNDS)
def test_check_refuses_what_run_refuses_before_round_one(kind, tmp_path, capsys):
    change, text = BEFORE_ROUNDS[kind]
    new(tmp_path)
    change(tmp_path)
    for path in (tmp_path / "sites").glob("*.csv"):
        path.write_text(path.read_text().replace("1;088", "1,088"))
    for words in (["check", str(tmp_path), str(tmp_path / "sites")], ["run", str(tmp_path)]):
        assert main(["study", *words]) == 2
        said = capsys.readouterr()
        assert re.search(text, " ".join(f"{said.out} {said.err}".split()))
        assert not (tmp_path / "run").exists()


def test_warnings_are_marked_and_counted(tmp_path, capsys):
    new(tmp_path)
    path = tmp_path / "sites/hospital_1.csv"
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *lines, *lines]) + "\n")
    words = ["study", "check", str(tmp_path), str(tmp_path / "sites")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "warning: " in said
    assert re.search("that would make the study wrong; see [0-9]+ warnings? above", said)
    spoiled(tmp_path / "sites/hospital_2.csv", "dose", "x", 1)
    assert main(words) == 2
    assert re.search(r"1 problem that .* wrong, and [0-9]+ warning", capsys.readouterr().err)
