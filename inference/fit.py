"""Fitting: drain the rounds, test every few of them, and keep what came out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypedDict

import torch

from pyrofl.data import Federation
from pyrofl.inference.evaluation.evaluate import Scores, calibration, evaluate
from pyrofl.inference.evaluation.prepare import statistics
from pyrofl.inference.loop.messages import OnBadMessage
from pyrofl.inference.loop.participation import Draw, Stragglers, everyone
from pyrofl.inference.loop.rounds import federate, first
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.seeds import Seed, continued
from pyrofl.metrics import Bins
from pyrofl.tensors import Tensors


class Row(TypedDict):
    """One line of metrics.csv."""

    round: int
    model: str
    adapted: str
    population: str
    metric: str
    value: float


@dataclass
class Run:
    """A fitted method.

    Attributes:
        method: as of the last round.
        data: the federation.
        state: the last round.
        seed: of the run.
        draws: of the guide, for predictions while fitting; None takes its mean.
        metrics: every score so far, averaged over clients: the rows of metrics.csv.
        seconds: of each round, without testing.
        down, up: bytes sent to and by all clients, each round.
        rejected: of each round, the clients whose message or state was bad, and why.
        trained: of each round, ids of the clients that trained.
        steps: of each round, gradient steps that each of these made.
        reported: of each round, ids of those whose message was merged.
        silent: of each round, ids of those that were to report and failed to.
        loss: of each round, mean loss of every step by its names, [J]; NaN where none trained.
    """

    method: Method
    data: Federation
    state: Round
    seed: Seed = 0
    draws: int | None = None
    metrics: list[Row] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    up: list[int] = field(default_factory=list)
    rejected: list[tuple[str, ...]] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    reported: list[list[int]] = field(default_factory=list)
    silent: list[list[int]] = field(default_factory=list)
    loss: list[Tensors] = field(default_factory=list)

    def copy(self, **changes: Any) -> Run:
        """Return the run with lists of its own, so that it goes on by itself."""
        own = {n: list(v) for n, v in vars(self).items() if isinstance(v, list)}
        return replace(self, **(own | changes))

    def evaluate(self, **what: Any) -> Scores:
        """Test a model; `what` are the arguments of `pyrofl.evaluate` after the state."""
        return evaluate(
            self.method, self.data, self.state, **({"seed": self.seed, "draws": self.draws} | what)
        )

    def scores(self) -> list[Scores]:
        """Test all that the method and the data offer.

        Every view on training and held-out clients, the personal one also after the method's
        adaptation, the global one also on all test rows; on training rows if there are no others.
        """
        data, tested = self.data, any(len(rows) for rows in self.data.test[: self.data.clients])
        part = "test" if tested else "train"
        populations = ["training"]
        if any(len(r) for r in (data.test if tested else data.train)[data.clients :]):
            populations.append("held_out")
        views = self.method.views
        asked = [(m, "none", p, part) for m in views for p in populations]
        if self.method.adapt and "personal" in views:
            asked += [("personal", "adapt", p, part) for p in populations]
        if "global" in views and data.pooled_test is not None and len(data.pooled_test):
            asked.append(("global", "none", "pooled", "test"))
        return [self.evaluate(model=m, adapted=a, population=p, part=r) for m, a, p, r in asked]

    def test(self) -> list[Scores]:
        """Test all there is and write it down in `metrics`, clients weighing the same."""
        found = self.scores()
        self.metrics += [
            Row(
                round=self.state.number,
                model=s.model,
                adapted=s.adapted,
                population=s.population,
                metric=metric,
                value=s.mean(metric),
            )
            for s in found
            for metric in s.values
        ]
        return found

    def calibration(self, **what: Any) -> Bins:
        """Gather predictions by confidence; `what` are arguments of `pyrofl.evaluate`."""
        return calibration(
            self.method, self.data, self.state, **({"seed": self.seed, "draws": self.draws} | what)
        )

    def posterior(self, draws: int = 100, **what: Any) -> Tensors:
        """Draw from every client's posterior: site -> [S, C, *p]; see `pyrofl.posterior`."""
        return posterior(self.method, self.data, self.state, draws, **({"seed": self.seed} | what))

    def statistics(self) -> Tensors:
        """Return what the paper reports about clients besides scores: name -> [J]."""
        return statistics(self.method, self.data, self.state, self.seed)

    def to_arviz(
        self, draws: int = 100, dims: Mapping[str, tuple[str, ...]] | None = None, **what: Any
    ) -> Any:
        """Return the posterior for ArviZ, or all groups; arguments of `pyrofl.to_arviz`."""
        return to_arviz([self], draws, dims, **what)


def fit(
    method: Method | Callable[[int], Method],
    data: Federation,
    rounds: int,
    *,
    seed: Seed | None = None,
    participation: Draw = everyone,
    trains: Draw | None = None,
    chunk: int | None = None,
    server: Tensors | None = None,
    start: Round | Run | None = None,
    every: int = 0,
    draws: int | None = None,
    progress: bool = True,
    stragglers: Stragglers | None = None,
    on_bad_message: OnBadMessage = "reject",
    state_memory: int | None = None,
    keep_messages: bool = True,
    after: Callable[[Run], None] | None = None,
) -> Run:
    """Run all rounds, with a progress bar, and test on the way.

    Args:
        method: a method, or round number (from 0) -> method.
        data: the federation.
        rounds: number of the last round.
        seed: fixes all random numbers; `Seeds` for several. None is that of a Run that is gone on
            from, otherwise 0.
        participation: draws who reports; see `federate`.
        trains: draws who trains.
        chunk: clients trained side by side.
        server: first state.
        start: a Round to go on from, or a Run, whose records are continued.
        every: test after every so many rounds; 0 leaves testing to the caller.
        draws: of the guide, for predictions; None takes its mean, or as many as a start's Run.
        progress: show rounds, loss and the time left.
        stragglers: clients that do part of their work, or are not heard.
        on_bad_message: "reject" goes on without the client, "raise" stops the run.
        state_memory: bytes of private state that may be in memory; see `federate`.
        keep_messages: whether the last round has its messages; see `federate`.
        after: called after every round, before its test, such as a `Keeper`: what stops a test
            loses no round. If the last round of a start's Run lacks its test, that is made first.

    Raises:
        ValueError: as `federate`; if `every` is negative, `draws` none, or a start's seed another.
        BadMessage: as `federate`.
    """
    from tqdm import tqdm

    if every < 0 or (draws is not None and draws < 1):
        raise ValueError(f"every is {every}, draws {draws}; expected >= 0, and None or >= 1")
    at = method if not isinstance(method, Method) else lambda _: method
    known, begun = (start, start.state) if isinstance(start, Run) else (None, start)
    seed = continued(seed, known.seed if known else None)
    state = begun or first(at(0), data, seed, server)
    now, draws = at(max(state.number - 1, 0)), draws or (known.draws if known else None)
    run = Run(now, data, state, seed, draws)
    if known:
        run = known.copy(method=now, data=data, seed=seed, draws=draws)
    none = torch.full((data.clients,), torch.nan, dtype=data.dtype)

    def test_if_due() -> None:
        number = run.state.number
        if every and number and (number % every == 0 or number == rounds):
            run.test()

    states = federate(
        method,
        data,
        rounds,
        seed=seed,
        participation=participation,
        trains=trains,
        chunk=chunk,
        start=state,
        stragglers=stragglers,
        on_bad_message=on_bad_message,
        state_memory=state_memory,
        keep_messages=keep_messages,
    )
    with tqdm(total=rounds, initial=state.number, disable=not progress, unit="round") as bar:
        if known and all(row["round"] != state.number for row in run.metrics):
            test_if_due()
        clock = perf_counter()
        for state in states:
            run.seconds.append(perf_counter() - clock)
            run.state, run.method = state, at(state.number - 1)
            run.down.append(int(state.down.sum()))
            run.up.append(int(state.up.sum()))
            run.rejected.append(state.rejected)
            run.trained.append(state.trained.tolist())
            run.steps.append(state.steps.tolist())
            run.reported.append(state.who.ids.tolist())
            run.silent.append(state.silent.tolist())
            losses = state.loss.items()
            run.loss.append({n: none.scatter(0, state.trained, v.to(none)) for n, v in losses})
            if after:
                after(run)
            test_if_due()
            idle = () if run.reported[-1] else ("nobody reports; server unchanged",)
            for told in (*state.rejected, *idle):
                bar.write(f"round {state.number}: {told}", sys.stderr)
            bar.set_postfix_str(", ".join(f"{n} {v[v.isfinite()].mean():.3g}" for n, v in losses))
            bar.update()
            clock = perf_counter()
    return run
