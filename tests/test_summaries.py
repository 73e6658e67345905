"""What a notebook shows of a federation, a method and a run."""

from __future__ import annotations

import re
from base64 import b64decode
from html.parser import HTMLParser

import pytest
import toys

import pyrofl
from pyrofl.models import fedavg, pfedvem


class Tags(HTMLParser):
    """Refuse tags that are not closed, or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def pictures(text: str) -> list[bytes]:
    Tags(text)
    found = [b64decode(data) for data in re.findall(r"data:image/png;base64,([^\"]+)", text)]
    assert all(data.startswith(b"\x89PNG") for data in found)
    return found


def test_a_federation_draws_who_holds_what():
    data = toys.blobs((3, 9))
    text = data._repr_html_()
    assert len(pictures(text)) == 1
    assert "2, and 0 held out" in text
    numbers = pyrofl.Federation.from_arrays({"<b>": ([[1.0], [2.0]], [0.5, 1.5])})
    assert len(pictures(numbers._repr_html_())) == 1


def test_a_method_shows_its_card():
    text = pfedvem.build(toys.net())._repr_html_()
    pictures(text)
    assert "<caption>Method pfedvem</caption>" in text
    assert "<td>all clients train</td>" in text
    assert "Aggregator(loc/*, base/*; mean)" in text


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_shows_its_course_and_its_verdict(every):
    run = pyrofl.fit(fedavg.build(toys.net()), toys.blobs(), 2, eval_every=every, progress=False)
    text = run._repr_html_()
    assert len(pictures(text)) == 1
    assert str(run.status)[:20] in text
    begun = pyrofl.fit(fedavg.build(toys.net()), toys.blobs(), 0, progress=False)
    assert pictures(begun._repr_html_()) == []
