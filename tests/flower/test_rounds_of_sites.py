"""Sites that answer letters make the rounds of the loop, whatever happens to letters and nodes."""

from __future__ import annotations

import hospitals
import pytest
import toys
from hospitals import looped, wire

from pyrofl.flower.coordinator import Settings, coordinate

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SOON = Settings(3, 2, 0.0)
SMALL = ("epochs=1",)


def made(project, out, post, settings=SOON):
    """Make the rounds of a project; return the last states and what was said."""
    said = []
    books = coordinate(project, out, post, settings, said.append)
    return {name: book.server.state for name, book in books.items()}, said


@pytest.mark.parametrize("grouped", [False, True])
def test_many_methods_in_one_run_are_those_of_the_loop(grouped, tmp_path):
    methods = ("fedavg", "pfedvem", "scaffold", "pvi")
    more = {"group": "ward"} if grouped else {}
    project = hospitals.project(tmp_path / "p", methods=methods, settings=SMALL, **more)
    if grouped:
        hospitals.wards(tmp_path / "p")
    post = wire(project, tmp_path)
    states, said = made(project, tmp_path / "out", post)
    for name in methods:
        toys.assert_same(states[name].server, looped(project, name).server, **CLOSE)
    assert len(post.letters) == 3 * (1 + project.rounds + 1)  # hello, rounds, the last questions
    assert "round 2 of 2: 3 of 3 sites replied" in said[-1]
