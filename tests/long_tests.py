"""List the tests that take long, which the ordinary suite leaves out.

Run: python -m pytest -m "not slow" --durations=0 -vv > times.txt
     python tests/long_tests.py times.txt [--seconds 0.25]

A function whose tests, set up and run, take at least so many seconds on average is listed in
tests/long_tests.txt, and so is a single test that takes four times as long; conftest.py marks them
as long. What is listed and not in the report stays: the first test of a file bears the set-up of
all, so a second report, of the tests that were left, may add some.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from statistics import mean

LIST = Path(__file__).with_suffix(".txt")
LINE = re.compile(r"([\d.]+)s (?:setup|call) +(tests/.+)")


def long_tests(report: str, seconds: float, listed: Collection[str] = ()) -> list[str]:
    """Return the functions and single tests of a report that take long, and those it lacks."""
    times: dict[str, float] = defaultdict(float)
    for duration, test in LINE.findall(report):
        times[test] += float(duration)
    of_function: dict[str, list[float]] = defaultdict(list)
    for test, duration in times.items():
        of_function[function_of(test)].append(duration)
    long = {function for function, of in of_function.items() if mean(of) >= seconds}
    long |= {
        test
        for test, duration in times.items()
        if duration >= 4 * seconds and function_of(test) not in long
    }
    return sorted(long | {test for test in listed if test not in times.keys() | of_function.keys()})


def function_of(test: str) -> str:
    """Return the file and function of a test, without its parameters."""
    return test.partition("[")[0]


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", type=Path)
    parser.add_argument("--seconds", type=float, default=0.25)
    arguments = parser.parse_args()
    listed = LIST.read_text().splitlines()
    tests = long_tests(arguments.times.read_text(), arguments.seconds, listed)
    LIST.write_text("".join(f"{test}\n" for test in tests))
    print(f"{len(tests)} functions and tests")


if __name__ == "__main__":
    main()
