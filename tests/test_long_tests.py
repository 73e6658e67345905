"""The list of long tests names tests that exist, and no file has long tests only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from long_tests import LIST, long_tests

ROOT = Path(__file__).parents[1]


def test_listed_tests_exist():
    for name in LIST.read_text().splitlines():
        file, _, test = name.partition("::")
        function = re.escape(test.partition("[")[0])
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.M), name


def test_listed_tests_are_marked(request):
    listed = {*LIST.read_text().splitlines()}
    here = [item for item in request.session.items if item.nodeid.startswith("tests/")]
    assert here
    assert not [
        item.nodeid for item in here if item.nodeid in listed and "long" not in item.keywords
    ]


@pytest.mark.parametrize(("seconds", "count"), [(3.0, 1), (1.5, 2), (4.0, 0)])
def test_durations_of_setup_and_call_are_summed(seconds, count):
    report = "2.00s setup    tests/a.py::b[c d]\n1.50s call     tests/a.py::b[c d]\n"
    report += "1.60s call     tests/a.py::e\n"
    assert len(long_tests(report, seconds)) == count
    assert "tests/c.py::d" in long_tests(report, seconds, ["tests/c.py::d"])
