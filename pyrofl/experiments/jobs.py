"""Jobs: fits of one method to one task, each with its own output folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch

from pyrofl.experiments.experiment import Experiment
from pyrofl.experiments.methods import Scheduled, methods
from pyrofl.experiments.settings import parse
from pyrofl.experiments.tasks import Task, participation, task
from pyrofl.inference.definition.budget import Privacy
from pyrofl.inference.engine.messages import inbox
from pyrofl.inference.engine.participation import Draw, Stragglers
from pyrofl.inference.engine.start import engine_starter, method_schedule
from pyrofl.inference.privacy.differential_privacy import with_privacy
from pyrofl.inference.privacy.preparation import refuse_preparation


@dataclass(frozen=True)
class Job:
    """One of the fits that a command runs: its method, task and output folder."""

    experiment: Experiment
    name: str
    method: Scheduled
    task: Task
    reporting: Draw
    path: Path  # the folder of what comes out
    groups: str | Sequence[str] = "all"  # of posterior.nc
    coords: Mapping[str, Sequence[str]] = field(default_factory=dict)  # labels of its axes
    tuned: str = ""  # what --tune has chosen, in words

    @property
    def training_options(self) -> dict[str, Any]:
        """Keyword arguments of `pyrofl.fit` that are also used in tuning."""
        experiment = self.experiment
        return {
            "seed": self.task.seeds,
            "draws": experiment.draws,
            "progress": not experiment.quiet,
            "participation": self.reporting,
            "chunk_size": experiment.chunk_size,
            "stragglers": Stragglers(experiment.drop_rate, experiment.min_work),
            "on_bad_message": experiment.on_bad_message,
            "keep_messages": not experiment.discard_messages,
            "record": experiment.record or None,
            "engine": experiment.engine,
            "workers": experiment.workers,
        }


def jobs(experiment: Experiment, seeds: Sequence[int], folder: Path | None = None) -> list[Job]:
    """Return a job, a fit to run, for each method and seed, with its own output folder.

    The folders are below `folder`, if it is given.
    """
    names = experiment.methods
    tasks = [task(experiment, seed) for seed in seeds]
    if len({(found.split, found.seeds) for found in tasks}) < len(tasks):
        raise ValueError(
            f"--seeds is {experiment.seeds}, and the seeds of split, init, participation and noise "
            "are all given, so runs would be equal; expected --seeds 1, or one of them left out"
        )
    engine_starter(experiment.engine, experiment.workers, tasks[0].data)
    privacy_of_run, of = privacy(experiment.privacy), list[dict[str, Job]]()
    for at in tasks:
        built = methods(names, experiment.settings, at, experiment.rounds)
        draw = participation(experiment.participation, at.data.clients)
        of.append({})
        for name, method in built.items():
            own = f"{name}-{at.seed}"
            path = folder / own if folder else Path(experiment.out or f"runs/{own}")
            private = with_privacy(method, privacy_of_run, at.data.clients, draw)
            refuse_preparation(method_schedule(private)(0), at.data)
            of[-1][name] = Job(experiment, name, private, at, draw, path)
    for name in names if experiment.discard_messages else ():
        foldable(name, of[0][name].method)
    return [methods_by_seed[name] for name in names for methods_by_seed in of]


def foldable(name: str, method: Scheduled) -> None:
    """Raise ValueError if a method cannot aggregate messages one by one (--discard-messages)."""
    now = method_schedule(method)(0)
    try:
        inbox(now, {}, torch.zeros(0), keep_messages=False)
    except ValueError as error:
        raise ValueError(f"--discard-messages with {name}: {error}") from error


def privacy(text: str | None) -> Privacy | None:
    """Parse the option --privacy, such as "clip=1.0,noise_multiplier=1.1"; None without it."""
    if text is None:
        return None
    kinds = get_type_hints(Privacy)
    words = [word.partition("=") for word in text.split(",")]
    names = [name for name, *_ in words]
    if not {"clip", "noise_multiplier"} <= set(names) <= kinds.keys() or len(set(names)) < len(
        names
    ):
        raise ValueError(
            f"privacy is {text!r}; expected clip=NORM,noise_multiplier=TIMES, optionally "
            "followed by delta=, where=, max_weight= or seed="
        )
    try:
        values: dict[str, Any] = {name: parse(value, kinds[name], name) for name, _, value in words}
        return Privacy(**values)
    except ValueError as error:
        raise ValueError(f"privacy {text!r}: {error}") from error
