"""Checkpoints: save runs during training, and resume them with bitwise equal results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.files import checkpoint_file
from pyrofl.files.run_folder import METRICS
from pyrofl.inference.definition.description import Description, describe
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed
from pyrofl.inference.engine.start import first, method_schedule
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.fitted_run.saving import RECORDS, save, settings_of_run
from pyrofl.tensors import Tensors

__all__ = ["Keeper", "load", "restore_run", "save"]

MAX_PARTS_IN_ERROR = 3  # parts of a method that differ


def load(
    path: str | Path,
    method: Method | Callable[[int], Method],
    data: Federation,
    about: Mapping[str, Any] | None = None,
    *,
    seed: Seed = 0,
) -> Run:
    """Load a run from a checkpoint that `save` wrote, to resume it with `fit`.

    `fit(resume_from=run)` continues the run with bitwise equal results.

    The clients' state is mapped from the file until the next round has copied it. Frozen weights
    and buffers of the method's networks are set to those of the run.

    Args:
        path: file that `save` wrote.
        method: the method of the saved run, or round number -> method.
        data: the federation of the saved run, on the same device.
        about: the same settings as passed to `save`.
        seed: seed of the saved run.

    Returns:
        The saved run.

    Raises:
        ValueError: if the file is damaged or incomplete, or if method, data or settings differ;
            the message names the difference.
    """
    return restore_run(
        path, checkpoint_file.read(path, settings_of_run(data, seed, about)), method, data, seed
    )


def restore_run(
    path: str | Path,
    content: dict[str, Any],
    method: Method | Callable[[int], Method],
    data: Federation,
    seed: Seed,
) -> Run:
    """Build a run from a checkpoint's content; raise ValueError if the method differs.

    A run that has continued with another method than the given one gets this other method.
    """
    if content.get("records", {}).get("switched") and isinstance(method, Method):
        method = method.metadata.alternative(data) if method.metadata.alternative else method
    try:
        run = _build_run(content, method, data, seed)
        _check_shapes(run)
        was = {n: content[n] for n in ("method", "constants")}
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        with suppress(AttributeError, LookupError, TypeError):  # of an incomplete file
            if was := content["method"]:
                now = describe(method_schedule(method)(0))
                _refuse_other_method(path, was, content["constants"], now)
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"checkpoint {path} is incomplete ({cause}); expected a file written by `save`"
        ) from error
    _refuse_other_method(path, **was, now=describe(run.method))
    _restore_constants(path, was["constants"], method, run)
    return run


def _refuse_other_method(
    path: str | Path, method: dict[str, str], constants: Tensors, now: Description
) -> None:
    """Raise ValueError if a method differs from the saved one, except in frozen weights."""
    alike = {n for n, v in constants.items() if n in now.constants and _layout(v, now.constants[n])}
    names = (n for n in method | now.parts if n not in alike)
    if differ := [n for n in names if method.get(n) != now.parts.get(n)]:
        few = differ[:MAX_PARTS_IN_ERROR]
        named = ({n: parts.get(n) for n in few} for parts in (method, now.parts))
        checkpoint_file.refuse_differences(f"checkpoint {path}", *named)


def _layout(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _restore_constants(
    path: str | Path,
    held: Mapping[str, Tensor],
    method: Method | Callable[[int], Method],
    run: Run,
) -> None:
    """Copy frozen weights and buffers from a checkpoint into the method's networks."""
    with torch.no_grad():
        for name, value in describe(run.method).constants.items():
            if not torch.equal(value, held[name].to(value.device)):
                value.copy_(held[name])
    following = describe(method_schedule(method)(run.state.number)).constants if held else {}
    for name, value in following.items():
        if name in held and not torch.equal(value, held[name].to(value.device)):
            raise ValueError(
                f"checkpoint {path} and the method of round {run.state.number + 1} have different "
                f"frozen values in {name}; build the network once, outside of round -> method"
            )


def _build_run(
    content: dict[str, Any],
    method: Method | Callable[[int], Method],
    data: Federation,
    seed: Seed,
) -> Run:
    """Build a run from the content of a checkpoint."""
    state = content["state"]
    cohort = Cohort(state.pop("ids").clone(), state.pop("size").clone())
    last = RoundState(
        reporters=cohort, client_states=state.pop("client_states"), **_to_memory(state)
    )
    now = method_schedule(method)(max(last.number - 1, 0))
    saved = _to_memory(content["records"])
    rows = list(zip(*(saved[name] for name in RECORDS), strict=True))
    records = [RoundRecord(n, *row) for n, row in enumerate(rows, last.number - len(rows) + 1)]
    scores = {"history": saved["metrics"]} | {n: saved[n] for n in ("ending", "switched")}
    return Run(now, data, last, seed, saved["draws"], records=records, **scores)


def _check_shapes(run: Run) -> None:
    """Raise ValueError if a loaded run has tensors or records of the wrong shape."""
    state, clients = run.state, run.data.clients
    if not isinstance(state.number, int) or state.number < len(run.records):
        raise ValueError(f"round number is {state.number!r} with {len(run.records)} records")
    shapes = {f"private {n}": (v, (clients, *v.shape[1:])) for n, v in state.client_states.items()}
    shapes["seen"] = (state.seen, (clients,))
    begin = first(run.method, run.data, run.seed).server
    for name, value in begin.items() if state.number else ():
        shapes[f"server {name}"] = (state.server[name], value.shape)
    for name, (tensor, expected) in shapes.items():
        if tensor.shape != expected:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(expected)}")
    for row in run.history:
        if row.keys() != set(METRICS):
            raise ValueError(f"a row of metrics has the columns {', '.join(row)}")


def _to_memory(value: Any) -> Any:
    """Copy all tensors in a nested container from a memory-mapped file to memory."""
    if isinstance(value, dict):
        return {n: _to_memory(v) for n, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_memory(v) for v in value)
    return value.clone() if isinstance(value, Tensor) else value


@dataclass
class Keeper:
    """Callback for `fit` that saves checkpoints of a run at intervals."""

    path: Path
    every: int | None = None  # rounds between two checkpoints; None: only `rescue` writes one
    rounds: int | None = None  # last round, which is always written
    about: dict[str, Any] = field(default_factory=dict)  # settings of the run, see `save`
    last: Run | None = None  # after the last whole round
    written: int | None = None  # round in the file

    def __call__(self, run: Run) -> None:
        """Store a copy of the run after a round, and save a checkpoint if one is due."""
        if self.last is not None and run.switched != self.last.switched:
            self.written = None  # the file holds a round of the method that failed
        # A copy: an interrupt in the next round may come between two of its records.
        self.last = run.copy()
        number = run.state.number
        if self.every and (number % self.every == 0 or number == self.rounds):
            self.rescue()

    def rescue(self) -> None:
        """Save the run after its last complete round, unless the file already has it."""
        if self.last is not None and self.written != self.last.state.number:
            save(self.last, self.path, self.about)
            self.written = self.last.state.number
