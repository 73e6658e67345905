"""Exchanges of reports by which clients of a regression agree on levels, means, sums and counts.

Code that needs all clients' rows calls `Agreement.agree` with a function of one client's rows. If
all rows are in one process, the result is there at once. A server without rows and a client with
its own rows run the same code up to the first result that is lacking, which raises `ReportNeeded`;
then the clients report, the server combines, and both run the code again with the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

PRIVATE = "server: "  # start of the labels of results that clients do not receive
MAX_REPORTED_NUMBER = 1e300  # absolute value of a reported number

Report = Any
"""Numbers, texts, None, and lists and dicts of them, as JSON has them."""


class ReportNeeded(BaseException):
    """Signal that the clients' reports for a result are needed; it is not an error.

    It is no Exception, so that no handler of errors on the way takes it for one.

    Attributes:
        label: name of the result.
        reports: client -> report, of the clients whose rows are here.
        combine: function of all reports, by client, that returns results by their labels.
        check: function of one report that raises ValueError if it is invalid.
    """

    def __init__(
        self,
        label: str,
        reports: dict[str, Report],
        combine: Callable[[Mapping[str, Report]], dict[str, Any]],
        check: Callable[[Report], None],
    ) -> None:
        super().__init__(label)
        self.label, self.reports, self.combine, self.check = label, reports, combine, check


@dataclass(frozen=True)
class Agreement:
    """Results that all clients agree on.

    Attributes:
        results: label -> result.
        is_remote: whether rows of some clients are elsewhere.
    """

    results: dict[str, Any] = field(default_factory=dict)
    is_remote: bool = False

    @property
    def public(self) -> dict[str, Any]:
        """Results that clients need to build their columns, and receive."""
        return {n: v for n, v in self.results.items() if not n.startswith(PRIVATE)}

    def agree(
        self,
        label: str,
        frames: Mapping[str, pd.DataFrame],
        report: Callable[[pd.DataFrame], Report],
        combine: Callable[[Mapping[str, Report]], dict[str, Any]],
        check: Callable[[Report], None],
    ) -> Any:
        """Return the result of a label, or raise ReportNeeded.

        Args:
            label: name of the result, among those that `combine` returns.
            frames: rows of the clients that are here.
            report: function of a client's rows that returns what the client sends.
            combine: function of all reports, by client, that returns results by their labels.
            check: function of a received report that raises ValueError if it is invalid.
        """
        if label not in self.results:
            reports = {name: report(frame) for name, frame in frames.items()}
            if self.is_remote:
                raise ReportNeeded(label, reports, combine, check)
            self.results.update(combine(reports))
        return self.results[label]


def refuse_unlike(report: Report, example: Report, path: str = "") -> None:
    """Raise ValueError unless a report has the names, lengths and types of an example.

    Numbers must be finite.
    """
    where = f"{path}: " if path else ""
    if isinstance(example, dict):
        if not isinstance(report, dict) or report.keys() != example.keys():
            got = ", ".join(map(str, report)) if isinstance(report, dict) else _kind(report)
            raise ValueError(f"{where}got {got[:100]}; expected {', '.join(example) or 'nothing'}")
        for name, part in example.items():
            refuse_unlike(report[name], part, f"{path}/{name}".strip("/"))
    elif isinstance(example, list):
        if not isinstance(report, list) or len(report) != len(example):
            got = f"{len(report)} entries" if isinstance(report, list) else _kind(report)
            raise ValueError(f"{where}got {got}; expected {len(example)} entries")
        for one, part in zip(report, example, strict=True):
            refuse_unlike(one, part, path)
    else:
        refuse_no_number(report, path)


def refuse_no_number(value: Report, path: str) -> None:
    """Raise ValueError unless a value is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or abs(value) > MAX_REPORTED_NUMBER:
        shown = f"{value!r:.40}" if is_number else _kind(value)
        raise ValueError(f"{path}: got {shown}; expected a finite number")


def _kind(value: Report) -> str:
    return f"a {type(value).__name__}"
