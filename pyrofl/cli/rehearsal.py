"""What a run needs at its end, tried before its first round."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch

from pyrofl import figures
from pyrofl.cli.methods import Job
from pyrofl.inference.loop.rounds import by_round, first
from pyrofl.inference.posteriors import export
from pyrofl.inference.posteriors.draws import posterior


def rehearse(jobs: Sequence[Job]) -> None:
    """Load what writes results, and look for room for draws; jobs differ in method and seed.

    Raises:
        ValueError: if there is no memory for so many draws.
        OSError: if a library finds no place for its files.
    """
    figures.try_out()
    if jobs[0].args.posterior_draws:
        export.import_arviz()
        import_module("h5netcdf")
    for job in {job.name: job for job in jobs}.values():
        _find_room(job)


def _find_room(job: Job) -> None:
    """Refuse more draws than there is memory for; a test has those of one client or more."""
    args, task = job.args, job.task
    asked = [("--draws", args.draws or 0, 1)]
    asked += [("--posterior-draws", args.posterior_draws, task.data.clients)]
    if max(draws for _, draws, _ in asked) < 1000:
        return  # as many as people ask for
    method = by_round(job.method)(0)
    state = first(method, task.data, task.seeds)
    ids = torch.zeros(1, dtype=torch.long)
    one = posterior(method, task.data, state, 1, ids=ids, model=method.main_view)
    size = sum(value.numel() for value in one.values())
    for flag, draws, clients in asked:
        try:
            torch.empty(draws * clients * size)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{flag} is {draws}, with {job.name} {draws * clients * size:,} numbers, for which "
                "there is no memory; expected fewer"
            ) from error
