"""Numbers are right-aligned in tables of the terminal, of Markdown pages and of HTML pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyrofl.files.text_tables import is_mostly_numeric, looks_numeric, markdown, table
from pyrofl.reports.page import Section, page

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = ["NUMBERS.md", "CALIBRATION.md", "POSTERIORS.md", "docs/speed.md", "papers/README.md"]
PAGES += [
    f"papers/{name}/README.md" for name in ("fedabml", "fedbe", "metavd", "pfedmb", "pfedvem")
]


NUMBERS = ["0", "-1.5", "**0.41, 0.63 to 0.81**!", "1,234", "85%", "*91*", "0.9 ± 0.1 *", "2.1 s"]
NUMBERS += ["<0.1", "1.500e-07", "+0.2 (-0.1 to 0.5)", ".5", "3 of 9"]


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_are_told_from_text(text):
    assert looks_numeric(text)


@pytest.mark.parametrize("text", ["", "-", "fedavg", "5 branches", "lr=0.1", "`1`", "2 clients"])
def test_text_is_no_number(text):
    assert not looks_numeric(text)


def test_a_column_with_a_few_words_is_one_of_numbers():
    assert is_mostly_numeric(["0.1", "0.2", "failed", "", None])
    assert not is_mostly_numeric(["0.1", "failed"])
    assert not is_mostly_numeric(["", "-", None])


def test_the_terminal_aligns_texts_of_numbers_with_and_without_a_star():
    rows = [("fedavg", "1,200", "9.9 ± 0.1 *"), ("pvi", "7", "10.1 ± 0.1"), ("local", "-", "-")]
    assert table(("method", "rows", "NLL"), rows).split("\n") == [
        "method   rows         NLL",
        "fedavg  1,200   9.9 ± 0.1 *",
        "pvi         7  10.1 ± 0.1",
        "local       -           -",
    ]


def test_markdown_aligns_columns_of_numbers():
    lines = markdown(("method", "accuracy", "note"), [("a", "9.1", "x"), ("b", 10, "")]).split("\n")
    assert lines == [
        "| method | accuracy | note |",
        "|---|---:|---|",
        "| a | 9.1 | x |",
        "| b | 10 |  |",
    ]
    assert markdown(("a", "b"), []) == "| a | b |\n|---|---|"


def test_a_report_aligns_headings_and_cells_of_numbers():
    section = Section("Scores").table(("method", "NLL"), [("a", "9.1 ± 0.1 *"), ("b", "-")])
    text = page("t", [section])
    assert '<th class="number">NLL</th>' in text
    assert '<td class="number">9.1 ± 0.1 *</td>' in text
    assert '<td class="number">-</td>' in text
    assert "<th>method</th>" in text


@pytest.mark.parametrize("name", PAGES)
def test_pages_of_results_have_no_column_of_numbers_at_the_left(name):
    lines = (EXAMPLES / name).read_text("utf-8").split("\n")
    rules = [i for i, line in enumerate(lines) if re.fullmatch(r"\|(-+:?\|)+", line)]
    assert rules
    for i in rules:
        end = next((j for j in range(i, len(lines)) if not lines[j].startswith("|")), len(lines))
        rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[i + 1 : end]]
        found = [cell.endswith(":") for cell in lines[i][1:-1].split("|")]
        numeric = [is_mostly_numeric(column) for column in zip(*rows, strict=True)]
        assert found == numeric, lines[i - 1]
