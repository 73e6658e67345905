"""The list of long tests names tests that exist, and no file has long tests only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from long_tests import LIST, function_of, long_tests

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
    long = {item.nodeid for item in here if "long" in item.keywords}
    assert not [
        item.nodeid
        for item in here
        if {item.nodeid, function_of(item.nodeid)} & listed and item.nodeid not in long
    ]


@pytest.mark.parametrize(("seconds", "count"), [(3.0, 1), (1.5, 2), (4.0, 0)])
def test_durations_of_setup_and_call_are_summed(seconds, count):
    report = "2.00s setup    tests/a.py::b[c d]\n1.50s call     tests/a.py::b[c d]\n"
    report += "1.60s call     tests/a.py::e\n"
    assert len(long_tests(report, seconds)) == count
    assert "tests/c.py::d" in long_tests(report, seconds, ["tests/c.py::d"])


def test_a_function_is_listed_by_its_mean_and_a_test_by_four_times_that():
    report = "".join(
        f"{seconds:.2f}s call     tests/a.py::{test}\n"
        for test, seconds in {"b[0]": 1, "b[1]": 2, "c[0]": 4.1, "c[1]": 0, "c[2]": 0}.items()
    )
    assert long_tests(report, 1.5) == ["tests/a.py::b"]
    assert long_tests(report, 1.01) == ["tests/a.py::b", "tests/a.py::c"]
    assert long_tests(report, 1.38) == ["tests/a.py::b"]
    report += "".join(f"{9 * (n == 0)}.00s call     tests/a.py::d[{n}]\n" for n in range(9))
    assert long_tests(report, 1.5) == ["tests/a.py::b", "tests/a.py::d[0]"]
