"""What the simulation of examples/CALIBRATION.md says of the intervals of each method."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parents[2] / "CALIBRATION.md"
COLUMNS = (1, 2, 6, 8)  # method, setting, 95%, calibrated


class Interval(NamedTuple):
    """How often the 95% intervals of a method and setting contain the truth, in percent."""

    method: str
    setting: str
    percent: int
    calibrated: bool


def intervals() -> list[Interval]:
    """Return the rows of the table."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > max(COLUMNS) and cells[COLUMNS[-1]] in ("yes", "**no**"):
            method, setting, percent, calibrated = (cells[i] for i in COLUMNS)
            found.append(Interval(method, setting, int(percent[:-1]), calibrated == "yes"))
    return found


def sentence(method: str) -> str:
    """Return what a method's card says of its intervals; "" if it is not in the table."""
    mine = [one for one in intervals() if one.method == method]
    if not mine:
        return ""
    parts = []
    for holds, words in ((True, "calibrated"), (False, "not calibrated")):
        some = [
            f"{one.percent}%{f' ({one.setting})' if one.setting else ''}"
            for one in mine
            if one.calibrated == holds
        ]
        parts += [f"{words}: {', '.join(some)}"] if some else []
    return (
        "How often 95% intervals contain the truth in the simulation of a small linear model: "
        f"{'; '.join(parts)}."
    )
