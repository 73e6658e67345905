"""The core runs without the parts around it, and imports none of them."""

from __future__ import annotations

import pytest
import torch
import toys

import pyrofl
from pyrofl import extensions
from pyrofl.models import fedabml, fedavg, metavd, pfedmb, pfedvem


@pytest.fixture
def bare(monkeypatch):
    """Register nothing."""
    monkeypatch.setattr(extensions, "_places", {})
    monkeypatch.setattr(extensions, "_functions", {})


SLOW = [pytest.param(paper, marks=pytest.mark.slow) for paper in (fedabml, metavd, pfedmb)]


@pytest.mark.parametrize("paper", [fedavg, pfedvem, *SLOW])
def test_rounds_without_extensions_have_the_same_results(blobs, monkeypatch, paper):
    known = toys.last(paper.build(toys.net()), blobs, 3)
    with monkeypatch.context() as bare:
        bare.setattr(extensions, "_places", {})
        bare.setattr(extensions, "_functions", {})
        state = toys.last(paper.build(toys.net()), blobs, 3)
    for name, value in known.server.items():
        torch.testing.assert_close(state.server[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("bare")
def test_arguments_of_removed_parts_are_refused(blobs):
    method, privacy = fedavg.build(toys.net()), pyrofl.Privacy(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"privacy needs .*, a part of pyrofl that was removed"):
        pyrofl.fit(method, blobs, 1, privacy=privacy)
    with pytest.raises(ValueError, match=r"engine='ray' needs .*, a part of pyrofl that was remo"):
        pyrofl.fit(method, blobs, 1, engine="ray")


def test_an_extension_replaces_another_and_is_imported_when_it_is_needed(monkeypatch):
    monkeypatch.setattr(extensions, "_places", {})
    monkeypatch.setattr(extensions, "_functions", {})
    assert extensions.extension("point") is None
    extensions.register({"point": "math:sqrt"})
    assert extensions.extension("point")(4.0) == 2.0
    extensions.register({"point": "pyrofl.no_such_part.module:function"})
    assert extensions.extension("point") is None
    extensions.register({"point": "pyrofl.extensions:no_such_function"})
    with pytest.raises(AttributeError, match="no_such_function"):
        extensions.extension("point")
