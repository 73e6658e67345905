"""Statements of the pages in examples/docs that code can check."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import toys

import pyrofl
from pyrofl import docstrings
from pyrofl.cli import cards
from pyrofl.cli.methods import builds

DOCS = Path(__file__).parent.parent / "examples" / "docs"
CARD = re.compile(r"\]\(made/methods/(\w+)\.md\)")
INTERVALS = r"\*\*Must 95% intervals hold\?\*\*"
ROUGH = r"\*\*Is a rough uncertainty enough\?\*\*"
UNMEASURED = "The simulation does not have these:"


@pytest.fixture
def making(monkeypatch) -> ModuleType:
    """Return the package that makes pages."""
    for needed in ("jupytext", "docutils"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(str(DOCS))
    return import_module("making")


def paper(name: str) -> docstrings.Paper:
    return docstrings.paper(import_module(f"pyrofl.models.{name}").__doc__ or "")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def between(text: str, begin: str, end: str) -> str:
    found = re.search(f"{begin}(.*?){end}", text, re.DOTALL)
    assert found
    return found.group(1)


def test_advice_on_intervals_follows_the_calibration_table(making):
    rows = import_module("making.calibrated").intervals()
    assert len(rows) > 20
    holds = {row.method for row in rows if row.calibrated}
    text = page("which")
    assert {*CARD.findall(between(text, INTERVALS, ROUGH))} == holds
    rough = between(text, ROUGH, UNMEASURED)
    assert {*CARD.findall(rough)} == {row.method for row in rows} - holds
    stated = re.findall(CARD.pattern + r" \((\d+)(?: to (\d+))?%", rough)
    assert len(stated) == len(CARD.findall(rough))
    for method, low, high in stated:
        percents = [row.percent for row in rows if row.method == method]
        assert (min(percents), max(percents)) == (int(low), int(high or low)), method
    unmeasured = CARD.findall(between(text, UNMEASURED, r"\*\*Is one model"))
    assert len(unmeasured) >= 5
    assert not {*unmeasured} & {row.method for row in rows}
    names = {"PVI": "pvi", "FedEP": "fedep", "Fisher merging": "fisher"}
    diagonal = re.findall(r"(\d+)(?: to (\d+))?% \((PVI|FedEP|Fisher merging)\)", text)
    assert len(diagonal) == len(names)
    for low, high, name in diagonal:
        own = [r for r in rows if r.method == names[name] and "diagonal" in r.setting]
        assert not any(r.calibrated for r in own)
        percents = [r.percent for r in own]
        assert (min(percents), max(percents)) == (int(low), int(high or low)), name


def test_the_decision_figure_follows_the_calibration_table(making):
    rows = import_module("making.calibrated").intervals()
    questions = dict(import_module("making.which").QUESTIONS)
    chosen = {q: " ".join(m for _, m in answers).split() for q, answers in questions.items()}
    first, rough, *_ = chosen.values()
    assert {*first} == {row.method for row in rows if row.calibrated}
    assert {row.method for row in rows if not row.calibrated} - {*first} <= {*rough}
    every = [method for some in chosen.values() for method in some]
    assert sorted(every) == sorted(builds().keys() - {"local"})


@pytest.mark.parametrize("name", ["pvi", "pfedvem", "fedpop", "fola", "fedavg"])
def test_a_card_reports_how_often_intervals_hold(name, making):
    rows = [r for r in import_module("making.calibrated").intervals() if r.method == name]
    text = import_module("making.cards").page(cards.card(name))
    assert ("95% intervals contain the truth" in text) == bool(rows)
    for row in rows:
        kind = "not calibrated" if not row.calibrated else "calibrated"
        stated = between(text, "contain the truth", "See ")
        assert re.search(rf"(?<!not ){kind}: [^;]*\b{row.percent}%", stated), row


def test_no_card_promises_intervals_that_do_not_hold(making):
    holds = {r.method for r in import_module("making.calibrated").intervals() if r.calibrated}
    for name in builds().keys() - holds:
        use = paper(name).use
        assert not re.search(r"intervals (?!are too narrow)|how sure|calibrated", use), name


def test_guarantees_name_the_methods_without_secure_sums():
    net, refused = toys.net(), set()
    for name, build in builds().items():
        needs = "unlabelled" in inspect.signature(build).parameters
        try:
            pyrofl.privacy.summed(build(net, **({"unlabelled": toys.blobs().x} if needs else {})))
        except ValueError:
            refused.add(name)
    (stated,) = re.findall(r"The servers of (.+?)\s+need every message apart", page("guarantees"))
    assert {name.lower() for name in re.split(r", | and ", stated)} == refused
    (apart,) = re.findall(r"robust merges, (.+?)\. PVI", page("privacy"), re.DOTALL)
    assert {n.lower() for n in re.split(r",\s|\sand ", apart)} == refused - {"pvi"}


def test_no_page_claims_that_a_method_is_missing():
    missing = re.compile(r"([A-Z]\w+(?:, \w+)*(?: and \w+)?) (?:is|are) (?:not here|missing)")
    names = {paper(name).name.lower() for name in builds()} | builds().keys()
    for path in DOCS.glob("*.md"):
        for found in missing.findall(path.read_text()):
            some = {n.lower() for n in re.split(r", | and ", found)}
            assert not some & names, (path.name, found)
