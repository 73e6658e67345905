"""List the tests that take long, which the ordinary suite leaves out.

Run: python -m pytest -m "not slow" --durations=0 -vv > times.txt
     python tests/long_tests.py times.txt [--seconds 3]

Tests of at least so many seconds, set up and run, are listed in tests/long_tests.txt; conftest.py
marks them as long. Listed tests that the report lacks stay: the first of a file bears the set-up of
all, so a second report, of the tests that were left, may add some.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
LINE = re.compile(r"([\d.]+)s (?:setup|call) +(tests/.+)")


def long_tests(report: str, seconds: float, listed: Collection[str] = ()) -> list[str]:
    """Return the tests of a report of durations that take so many seconds, and those it lacks."""
    times: dict[str, float] = defaultdict(float)
    for duration, test in LINE.findall(report):
        times[test] += float(duration)
    long = {test for test, duration in times.items() if duration >= seconds}
    return sorted(long | {test for test in listed if test not in times})


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    listed = LIST.read_text().splitlines()
    tests = long_tests(arguments.times.read_text(), arguments.seconds, listed)
    LIST.write_text("".join(f"{test}\n" for test in tests))
    print(f"{len(tests)} tests")


if __name__ == "__main__":
    main()
