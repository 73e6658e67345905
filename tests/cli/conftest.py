"""Commands tested here write empty files for figures, which take longer than all else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pyrofl.cli import report


def blank(folder: Path, shown: Iterable[tuple[str, Callable[..., object]]]) -> list[str]:
    """Write an empty file in place of each figure."""
    for name, _ in shown:
        path = folder / f"figures/{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return []


@pytest.fixture(autouse=True)
def figures_are_blank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no figure, but in tests that are marked with `draws`."""
    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr(report, "drawn", blank)
