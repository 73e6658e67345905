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
    ({"columns": {"ages": {"unit": "years"}}}, "did you mean age?"),
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
        assert "that would make the study wrong; expected tables as above" in said.err
        assert "What leaves" not in said.out
