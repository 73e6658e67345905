"""Every method has a card, and what it says is what the method does."""

from __future__ import annotations

import inspect

import pytest
import torch

from pyrofl.cli.output import cards
from pyrofl.cli.parser import main
from pyrofl.experiments.methods import builds
from pyrofl.experiments.settings import arguments


@pytest.mark.parametrize("name", builds())
def test_a_card_says_all_there_is(name):
    found = cards.card(name)
    paper = found.paper
    assert paper.name.lower().replace("-", "") == name
    assert paper.headline
    assert paper.source or name == "local"
    assert any("server" in line for block in paper.equations for line in block)
    assert paper.use.startswith("Use it "), "its module says where to use it"
    assert "It assumes " in paper.use
    told = {setting.name for setting in found.settings}
    assert told >= arguments(builds()[name]).keys() - {"elapsed"}
    assert all(s.kind and s.default and s.about for s in found.settings)
    assert max(map(len, found.told().splitlines())) <= 110  # equations are as they are


def test_the_bytes_of_a_card_are_what_the_paper_says():
    d, head = 64 * 50 + 50 + 50 * 10 + 10, 50 * 10 + 10
    assert cards.wire("fedavg").parameters == (d, head)
    assert (cards.wire("fedavg").down, cards.wire("fedavg").up) == (4 * d, 4 * d)
    assert (cards.wire("pfedvem").down, cards.wire("pfedvem").up) == (4 * d, 4 * (d + 1))
    assert (cards.wire("fedper").down, cards.wire("fedper").up) == (4 * (d - head), 4 * (d - head))
    assert (cards.wire("local").down, cards.wire("local").up) == (0, 0)
    assert cards.wire("pfedmb").down == 5 * 4 * d
    assert "tau" in cards.wire("pfedvem").sent
    assert "mu" in cards.wire("pfedvem").kept


def test_settings_have_the_defaults_of_who_explains_them():
    own = {s.name: s for s in cards.card("pfedvem").settings}
    assert own["confidence"].kind == "full|uncertainty|deviation"
    assert own["lr_head"].default == "0.001"
    assert own["batch"].kind == "a whole number of at least 1, or none"
    handed_on = {s.name: s for s in cards.card("fedbe").settings}
    assert handed_on["samples"].default == "10"
    assert handed_on["lr"].default == "0.01"  # of fedavg


def test_a_card_takes_nothing_from_the_global_stream():
    before = torch.get_rng_state()
    cards.wire.__wrapped__("fedabml")
    assert torch.equal(before, torch.get_rng_state())


def test_explain_prints_the_card(capsys):
    assert main(["explain", "pfedmb"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("pFedMB (pfedmb): multi-branch layers")
    assert "branches=5" in told
    assert main(["explain", "pfedvm"]) == 2
    assert "unknown method 'pfedvm'; did you mean pfedvem?" in capsys.readouterr().err


def test_kinds_are_words():
    hints = inspect.get_annotations(builds()["pfedvem"].__wrapped__, eval_str=True)
    assert not [k for k in map(cards.kind, hints.values()) if "typing" in k]
