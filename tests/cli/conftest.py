"""Commands tested here write empty files for figures, which take longer than all else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from pyrofl.cli import main
from pyrofl.experiments import results


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
        monkeypatch.setattr(results, "drawn", blank)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of pFedVEM with everything asked for; a test that writes there copies it."""
    out = tmp_path_factory.mktemp("cli") / "run"
    small = ["--per-class", "12", "--clients", "4", "--net", "mlp:6", "--rounds", "2", "--quiet"]
    extra = ["--held-out", "2", "--set", "head_epochs=2", "base_epochs=1", "batch=none"]
    extra += [
        "--posterior-draws",
        "7",
        "--eval-every",
        "1",
        "--seed",
        "3",
        "--participation",
        "0.5",
    ]
    extra += ["--draws", "2"]
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(results, "drawn", blank)
    before = torch.get_num_threads(), torch.get_rng_state()
    assert main(["run", "pfedvem", *small, *extra, "--out", str(out)]) == 0
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    monkeypatch.undo()
    return out
