"""Fitting: drain the rounds, test every few of them, and keep what came out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from pyrofl.arguments import Count, CountOrNone, checked
from pyrofl.data import Federation
from pyrofl.files.pickles import Pickled
from pyrofl.files.run_folder import CLIENTS, METRICS
from pyrofl.inference.evaluation.asked import ModelAsked, RowsAsked
from pyrofl.inference.evaluation.evaluate import Metric, Scores, calibration, evaluate
from pyrofl.inference.evaluation.prepare import statistics
from pyrofl.inference.loop.messages import OnBadMessage
from pyrofl.inference.loop.participation import Draw, Stragglers, everyone
from pyrofl.inference.loop.rounds import federate, first
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.records import RoundRecord, Row
from pyrofl.inference.seeds import Seed, continued
from pyrofl.metrics import Bins
from pyrofl.summaries import Summarised
from pyrofl.tensors import Tensors

if TYPE_CHECKING:
    from pandas import DataFrame

ClientRow = tuple[str, int, str, str, str, float]
"""client, size, model, adapted, metric, value: one line of clients.csv."""


@dataclass(repr=False)
class Run(Pickled, Summarised):
    """A fitted method.

    Attributes:
        method: as of the last round.
        data: the federation.
        state: the last round.
        seed: of the run.
        draws: of the guide, for predictions while fitting; None takes its mean.
        own_metrics: name -> function, scored beside the metrics that there are; see `evaluate`.
        records: what each round left; `rounds` is a table of them.
        history: every score so far, averaged over clients; `metrics` is a table of them.
    """

    method: Method
    data: Federation
    state: Round
    seed: Seed = 0
    draws: int | None = None
    own_metrics: Mapping[str, Metric] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)
    history: list[Row] = field(default_factory=list)

    def copy(self, **changes: Any) -> Run:
        """Return the run with lists of its own, so that it goes on by itself."""
        own: dict[str, Any] = {"records": [*self.records], "history": [*self.history]}
        return replace(self, **(own | changes))

    def evaluate(
        self, metrics: Mapping[str, Metric] | None = None, **asked: Unpack[RowsAsked]
    ) -> Scores:
        """Test a model, as `pyrofl.evaluate`; seed, draws and metrics are the run's by default."""
        own = self.own_metrics if metrics is None else metrics
        return evaluate(*self._fitted, metrics=own, **self._asked(asked))

    def calibration(self, **asked: Unpack[RowsAsked]) -> Bins:
        """Gather predictions by confidence, as `pyrofl.calibration`."""
        return calibration(*self._fitted, **self._asked(asked))

    def posterior(
        self, draws: int = 100, *, ids: Tensor | None = None, **asked: Unpack[ModelAsked]
    ) -> Tensors:
        """Draw from every client's posterior: site -> [S, C, *p]; see `pyrofl.posterior`."""
        how: ModelAsked = {"seed": self.seed, **asked}
        return posterior(*self._fitted, draws, ids=ids, **how)

    def statistics(self) -> Tensors:
        """Return what the paper reports about clients besides scores: name -> [J]."""
        return statistics(*self._fitted, self.seed)

    def to_arviz(
        self, draws: int = 100, dims: Mapping[str, tuple[str, ...]] | None = None, **what: Any
    ) -> Any:
        """Return the posterior for ArviZ, or all groups; arguments of `pyrofl.to_arviz`."""
        return to_arviz([self], draws, dims, **what)

    def scores(self) -> list[Scores]:
        """Test all that the method and the data offer.

        Every view on training and held-out clients, the personal one also after the method's
        adaptation, the global one also on all test rows; on training rows if there are no others.
        """
        data, views = self.data, self.method.views
        tested = any(len(rows) for rows in data.test[: data.clients])
        clients: list[RowsAsked] = [{"part": "test" if tested else "train"}]
        if any(len(rows) for rows in (data.test if tested else data.train)[data.clients :]):
            clients.append({**clients[0], "population": "held_out"})
        asked: list[RowsAsked] = [{"model": view, **some} for view in views for some in clients]
        if self.method.adapt and "personal" in views:
            asked += [{"model": "personal", "adapted": "adapt", **some} for some in clients]
        if "global" in views and data.pooled_test is not None and len(data.pooled_test):
            asked.append({"model": "global", "population": "pooled"})
        return [self.evaluate(**one) for one in asked]

    def test(self) -> list[Scores]:
        """Test all there is and write it down in `history`, clients weighing the same."""
        found = self.scores()
        self.history += [
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

    @property
    def metrics(self) -> DataFrame:
        """Every score so far, averaged over clients: the table metrics.csv."""
        from pandas import DataFrame

        return DataFrame(self.history, columns=list(METRICS))

    @property
    def clients(self) -> DataFrame:
        """Every score and statistic of every client, tested now: the table clients.csv."""
        from pandas import DataFrame

        return DataFrame(self.client_rows(), columns=list(CLIENTS))

    @property
    def rounds(self) -> DataFrame:
        """What every round took, who did what, and the mean loss of every step over clients."""
        from pandas import DataFrame

        return DataFrame([record.told(self.data.names) for record in self.records])

    def client_rows(
        self, scores: list[Scores] | None = None, statistics: Tensors | None = None
    ) -> Iterator[ClientRow]:
        """Yield the rows of `clients`; scores and statistics of the last round may be known.

        All but scores is told of the main view before any adaptation.
        """
        names, sizes = self.data.names, self.data.sizes.tolist()
        for found in self.scores() if scores is None else scores:
            for metric, values in found.values.items() if found.population != "pooled" else ():
                for i, value in zip(found.ids.tolist(), values.tolist(), strict=True):
                    yield names[i], sizes[i], found.model, found.adapted, metric, value
        told = self.statistics() if statistics is None else statistics
        about = self.work() | {name: values.tolist() for name, values in told.items()}
        for metric, of in about.items():
            for i in range(self.data.clients):
                yield names[i], sizes[i], self.method.main_view, "none", metric, of[i]

    def work(self) -> dict[str, Counter[int]]:
        """Count rounds in which clients trained, reported or failed to, and gradient steps."""
        found: dict[str, Counter[int]] = {
            f"rounds_{did}": Counter(i for r in self.records for i in getattr(r, did))
            for did in ("trained", "reported", "silent")
        }
        found["gradient_steps"] = Counter()
        for record in self.records:
            found["gradient_steps"].update(dict(zip(record.trained, record.steps, strict=True)))
        return found

    @property
    def _fitted(self) -> tuple[Method, Federation, Round]:
        return self.method, self.data, self.state

    def _asked(self, asked: RowsAsked) -> RowsAsked:
        return {"seed": self.seed, "draws": self.draws, **asked}

    @property
    def title(self) -> str:
        """How far it went."""
        seconds = sum(record.seconds for record in self.records)
        return f"Run of {self.state.number} rounds, seed {self.seed}, {seconds:.1f} s"

    def summary(self) -> dict[str, str]:
        """Tell what it is; of the scores, the first two metrics of clients that train."""
        data, records, last = self.data, self.records, self.history[-1:]
        scores: dict[str, list[str]] = {}
        for r in self.history:
            if (r["round"], r["population"]) == (last[0]["round"], "training"):
                model = f"{r['model']}{'' if r['adapted'] == 'none' else ' adapted'}"
                scores.setdefault(model, []).append(f"{r['metric']} {r['value']:.4g}")
        shown = "; ".join(f"{model} {', '.join(some[:2])}" for model, some in scores.items())
        bad = [reason for record in records for reason in record.rejected]
        sent = f"{sum(r.down for r in records):,} down, {sum(r.up for r in records):,} up"
        return {
            "views": ", ".join(self.method.views),
            "clients": f"{data.clients} that train, {data.held_out} held out",
            "scores": f"round {last[0]['round']}: {shown}" if last else "not tested yet",
            "bytes": f"{sent}; {len(bad)} rejected{f', the last {bad[-1]}' if bad else ''}",
        }


@checked
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
    every: CountOrNone = 0,
    draws: Count | None = None,
    metrics: Mapping[str, Metric] | None = None,
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
        metrics: name -> one of your own, scored too; see `evaluate`. None: those of a start's Run.
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

    at = method if not isinstance(method, Method) else lambda _: method
    known, begun = (start, start.state) if isinstance(start, Run) else (None, start)
    seed = continued(seed, known.seed if known else None)
    state = begun or first(at(0), data, seed, server)
    run = (known or Run(at(0), data, state)).copy(
        method=at(max(state.number - 1, 0)),
        data=data,
        seed=seed,
        draws=draws or (known.draws if known else None),
        own_metrics=(known.own_metrics if known else {}) if metrics is None else metrics,
    )

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
        if known and all(row["round"] != state.number for row in run.history):
            test_if_due()
        clock = perf_counter()
        for state in states:
            seconds = perf_counter() - clock
            run.state, run.method = state, at(state.number - 1)
            run.records.append(RoundRecord.of(state, data, seconds))
            if after:
                after(run)
            test_if_due()
            idle = () if len(state.who.ids) else ("nobody reports; server unchanged",)
            for told in (*state.rejected, *idle):
                bar.write(f"round {state.number}: {told}", sys.stderr)
            losses = {n: v[v.isfinite()].mean() for n, v in state.loss.items()}
            bar.set_postfix_str(", ".join(f"{n} {v:.3g}" for n, v in losses.items()))
            bar.update()
            clock = perf_counter()
    return run
