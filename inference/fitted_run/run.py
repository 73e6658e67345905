"""Fitted runs: scores, predictions, posteriors and records of a federated method."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from pyrofl.data import Federation
from pyrofl.data.tables.wording import number_of
from pyrofl.extensions import find_extension
from pyrofl.files import run_folder
from pyrofl.files.lock import lock_folder
from pyrofl.files.pickles import Pickled
from pyrofl.files.run_folder import CLIENTS, METRICS
from pyrofl.inference.definition.budget import PrivacySpent
from pyrofl.inference.definition.metadata import Monitor, metadata_of_class
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed
from pyrofl.inference.definition.table_method import TableMethod, variables_of
from pyrofl.inference.engine.origin import refuse_other_clients
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import Metric, Scores, calibration, evaluate
from pyrofl.inference.evaluation.predictions import PredictionOptions, Predictions, predictions
from pyrofl.inference.evaluation.prepare import statistics, warning_of_untrained
from pyrofl.inference.evaluation.specification import EvaluationFields, ModelOptions
from pyrofl.inference.fitted_run import saving
from pyrofl.inference.fitted_run.records import RoundRecord, taken_part
from pyrofl.inference.monitoring.parameter_changes import table
from pyrofl.inference.monitoring.status import ConvergenceMonitor, ConvergenceStatus, monitor_of
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.posteriors.hypotheses import hypotheses
from pyrofl.inference.posteriors.optimum import optimum
from pyrofl.inference.posteriors.summary import summarize
from pyrofl.inference.posteriors.widths import unlearned_widths
from pyrofl.metrics import Bins
from pyrofl.summaries import Summarized, picture
from pyrofl.tensors import Tensors

if TYPE_CHECKING:
    from pandas import DataFrame

NUM_COMPARED, PREDICTION_TOLERANCE = 8, 1e-6  # clients and rows; predictions that differ by no more
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(repr=False)
class Run(Pickled, Summarized):
    """Fitted method with its final state, round records and scores, as returned by `fit`.

    Attributes:
        method: as of the last round.
        data: the federation.
        state: the last round.
        seed: of the run.
        draws: number of posterior draws for predictions; None uses the mean of the guide.
        custom_metrics: name -> function, computed in addition to the built-in metrics; see
            `evaluate`.
        records: the record of each round; `rounds` is a table of them.
        history: all recorded scores, averaged over clients, as rows of the table `metrics`.
        ending: results of `test_ending` after the last round, and of `record_correction`.
        switched: why `fit` continued with another method, the `method`; "" if it did not.
    """

    method: Method
    data: Federation
    state: RoundState
    seed: Seed = 0
    draws: int | None = None
    custom_metrics: Mapping[str, Metric] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    ending: dict[str, str] = field(default_factory=dict)
    switched: str = ""

    def __post_init__(self) -> None:
        refuse_other_clients(self.method, self.data, self.state, has_records=bool(self.records))

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save the run in a folder for `pyrofl.load`, except its custom metrics.

        The files contain no training rows of clients, but they contain client states, and the
        server's rows where a method was built with some (FedBE).

        Args:
            folder: a new or empty folder.
            overwrite: replace a run that was saved there.

        Raises:
            ValueError: if the folder holds other files, or cannot be written to.
        """
        path = run_folder.prepare(folder, holding=re.escape(run_folder.CHECKPOINT) * overwrite)
        with lock_folder(path):
            saving.save(self, path / run_folder.CHECKPOINT)

    def copy(self, **changes: Any) -> Run:
        """Return a copy of the run with separate lists of records and scores."""
        lists = {"records": [*self.records], "history": [*self.history]}
        return replace(self, **{**lists, **changes})

    def evaluate(
        self, metrics: Mapping[str, Metric] | None = None, **asked: Unpack[EvaluationFields]
    ) -> Scores:
        """Compute evaluation metrics of a model on each client's rows, as `pyrofl.evaluate`.

        Seed, draws and custom metrics are those of the run unless given.

        Examples:
            >>> import pyrofl
            >>> from pyrofl import datasets, federations, nets
            >>> from pyrofl.models import pfedvem
            >>> data = federations.split(datasets.load("digits"), "slices:5", clients=4)
            >>> method = pfedvem.build(nets.build("softmax", (64,), 10))
            >>> run = pyrofl.fit(method, data, rounds=1, progress=False)
            >>> scores = run.evaluate(model="personal")
            >>> tuple(scores.values["accuracy"].shape)
            (4,)
        """
        custom = self.custom_metrics if metrics is None else metrics
        return evaluate(*self._fitted, metrics=custom, **self._with_defaults(asked))

    def predict(
        self,
        x: Any,
        client: str | None,
        own: Sequence[Any] | None = None,
        **asked: Unpack[PredictionOptions],
    ) -> Predictions:
        """Predict the responses of new rows of one client.

        Predictions use the mean of the guide, unless `draws` is given here or to `fit`: draws=100
        averages predictions over draws of the guide, as `to_arviz` has them without correction. A
        regression always averages over draws of its posterior.

        Args:
            x: [N, *x], an array, a tensor, or a data frame with the columns of training by name.
            client: name of a client; None is a new client, or that named by each row of a table
                with the client column of training. A new client is initialized and adapted to its
                `own` rows, by all phases if the method defines no adaptation; without rows the
                global model predicts, if the method has one.
            own: (x, y), labeled rows of a new client.
            asked: model, adaptation, draws, seed and chunk_size of `evaluate`. By default the main
                model, with the method's adaptation if it is personal.

        Returns:
            The predictions of all rows; see `Predictions`.

        Raises:
            ValueError: if there is no such client or model, or columns, rows or names do not fit.
        """
        how: PredictionOptions = {"seed": self.seed, "draws": self.draws, **asked}
        if isinstance(self.method, TableMethod) and not isinstance(x, Tensor):
            of_table: Predictions = self.method.predict_table(self, x, client, own, how)
            return of_table
        return predictions(*self._fitted, x, client, own, **how)

    def calibration(self, **asked: Unpack[EvaluationFields]) -> Bins:
        """Return predictions binned by confidence, for a reliability diagram."""
        return calibration(*self._fitted, **self._with_defaults(asked))

    def posterior(
        self, draws: int = 100, *, ids: Tensor | None = None, **asked: Unpack[ModelOptions]
    ) -> Tensors:
        """Draw from each client's posterior: sample site -> draws [S, C, *p].

        See `pyrofl.posterior`.
        """
        how: ModelOptions = {"seed": self.seed, **asked}
        return posterior(*self._fitted, draws, ids=ids, **how)

    def statistics(self) -> Tensors:
        """Return the method's client statistics, as counts of pruned weights: name -> [J, *p]."""
        return statistics(*self._fitted, self.seed)

    def to_arviz(
        self, draws: int = 100, dims: Mapping[str, tuple[str, ...]] | None = None, **what: Any
    ) -> Any:
        """Return posterior draws and diagnostics of the run for ArviZ; see `pyrofl.to_arviz`.

        Examples:
            >>> import pyrofl
            >>> from pyrofl import datasets, federations, nets
            >>> from pyrofl.models import pfedvem
            >>> data = federations.split(datasets.load("digits"), "slices:5", clients=4)
            >>> method = pfedvem.build(nets.build("softmax", (64,), 10))
            >>> run = pyrofl.fit(method, data, rounds=1, progress=False)
            >>> found = run.to_arviz(draws=10, corrected=False, allow_diverged=True)
            >>> dict(found["posterior"]["head.bias"].sizes)
            {'chain': 1, 'draw': 10, 'client': 4, 'head.bias_dim_0': 10}
        """
        return to_arviz([self], draws, dims, **what)

    def summary(self, draws: int = 4000, prob: float = 0.95, **what: Any) -> DataFrame:
        """Return posterior means, intervals and diagnostics of the parameters as a table.

        See `pyrofl.inference.posteriors.summary.summarize`; `what` are arguments of `to_arviz`.
        """
        return summarize(self.to_arviz(draws, **what), prob, variables_of(self.method))

    def hypothesis(
        self, statements: str | Sequence[str], draws: int = 4000, prob: float = 0.95, **what: Any
    ) -> DataFrame:
        """Return the posterior probability of statements such as "b[treat] < 0" as a table.

        See `pyrofl.inference.posteriors.hypotheses.hypotheses`; `what` are arguments of `to_arviz`.
        """
        return hypotheses(self.to_arviz(draws, **what), statements, prob, variables_of(self.method))

    def evaluate_all(self) -> list[Scores]:
        """Evaluate every model on training and held-out clients, and on all test rows pooled.

        The personal model is also evaluated after the method's adaptation, the global one on all
        test rows together. Without test rows, training rows are used.
        """
        data, views = self.data, self.method.views
        tested = any(map(len, data.test[: data.clients]))
        clients: list[EvaluationFields] = [{"part": "test" if tested else "train"}]
        if any(map(len, (data.test if tested else data.train)[data.clients :])):
            clients.append({**clients[0], "population": "held_out"})
        options: list[EvaluationFields] = [
            {"model": view, **some} for view in views for some in clients
        ]
        if self.method.adapt and "personal" in views:
            options += [
                {"model": "personal", "adaptation": "fine_tune", **some} for some in clients
            ]
        if "global" in views and data.pooled_test is not None and len(data.pooled_test):
            options.append({"model": "global", "population": "pooled"})
        return [self.evaluate(**one) for one in options]

    def record_scores(self) -> list[Scores]:
        """Evaluate all models, and append their scores, averaged over clients, to `history`."""
        all_scores = self.evaluate_all()
        for s in all_scores:
            columns = (self.state.number, s.model, s.adaptation, s.population)
            lines = [(*columns, metric, s.mean(metric)) for metric in s.values]
            self.history += [dict(zip(METRICS, line, strict=True)) for line in lines]
        return all_scores

    @property
    def metrics(self) -> DataFrame:
        """Table of all recorded scores, averaged over clients, as in metrics.csv."""
        from pandas import DataFrame

        return DataFrame(self.history, columns=list(METRICS))

    @property
    def clients(self) -> DataFrame:
        """Table of current scores and statistics of each client, as in clients.csv."""
        from pandas import DataFrame

        return DataFrame(self.client_rows(), columns=list(CLIENTS))

    @property
    def rounds(self) -> DataFrame:
        """Table of all rounds: seconds, bytes, clients and mean loss of each gradient step."""
        from pandas import DataFrame

        return DataFrame([record.told(self.data.names) for record in self.records])

    def client_rows(
        self, scores: list[Scores] | None = None, statistics: Tensors | None = None
    ) -> Iterator[tuple[str, int, str, str, str, float]]:
        """Yield the rows of the table `Run.clients`, from given or newly computed scores."""
        names, sizes = self.data.names, self.data.sizes.tolist()
        for client_scores in self.evaluate_all() if scores is None else scores:
            for metric, values in (
                client_scores.values.items() if client_scores.population != "pooled" else ()
            ):
                for i, value in zip(client_scores.ids.tolist(), values.tolist(), strict=True):
                    yield (
                        names[i],
                        sizes[i],
                        client_scores.model,
                        client_scores.adaptation,
                        metric,
                        value,
                    )
        client_statistics = self.statistics() if statistics is None else statistics
        about = self.workload() | {
            name: v.tolist() for name, v in client_statistics.items() if v.dim() == 1
        }
        about |= {spent.label: list(spent.clients)} if (spent := self.privacy) else {}
        for metric, of in about.items():  # other columns belong to the main view, unadapted
            for i in range(self.data.clients):
                yield names[i], sizes[i], self.method.main_view, "none", metric, of[i]

    def workload(self) -> dict[str, Counter[int]]:
        """Count each client's rounds trained, reported and missed, and its gradient steps."""
        steps: Counter[int] = Counter()
        for record in self.records:
            steps.update(dict(zip(record.trained, record.steps, strict=True)))
        did: dict[str, Counter[int]] = {}
        for what in ("trained", "reported", "silent"):
            did[f"rounds_{what}"] = Counter(i for r in self.records for i in getattr(r, what))
        return did | {"gradient_steps": steps}

    @property
    def status(self) -> ConvergenceStatus:
        """Convergence status of the run: converged, not converged, stuck or diverged.

        A run with Pareto k above 0.7 in `to_arviz` has not converged.
        """
        ending = {name: text for name, text in self.ending.items() if name != "draws"}
        return self._monitor.status().tested(**ending)

    @property
    def _monitor(self) -> ConvergenceMonitor:
        return monitor_of(self.method, self.data, self.records)

    def test_ending(self) -> None:
        """Test whether a converged run is at the optimum of its objective; store the result.

        Methods with a posterior of shared sites, such as PVI, have one: see
        `pyrofl.inference.posteriors.optimum`. For other methods, predictions for some training
        rows are compared: if they are equal, and were not before the first round, gradients have
        vanished.
        """
        if self._monitor.status().kind != "converged":
            return
        try:
            gap = optimum(self.method, self.data, self.state, self.seed)
            alike = not gap and self._alike(self.state)
            vanished = alike and not self._alike(first(self.method, self.data, self.seed))
        except FAILURES:  # a program may only support training; the run is kept without the test
            return
        if gap:
            self.ending = gap._asdict()
        elif vanished:
            self.ending = {"blind": "predictions are the same for all rows of a client"}

    def record_correction(self, outcome: str, why: str = "", notes: Sequence[str] = ()) -> None:
        """Store the outcome of the last correction by `to_arviz`, for the status.

        The outcome is "yes", or "no" and the reason; "" removes what an earlier correction stored.
        `why` states why the weights are unreliable, if they are, and `notes` are for `warnings`.
        """
        correction = {"corrected": outcome, "weights": why, "draws": "\n".join(notes)}
        old = self.ending
        if not outcome:
            old = {n: v for n, v in old.items() if n not in correction}
        self.ending = old | {n: v for n, v in correction.items() if v}

    def _alike(self, state: RoundState) -> bool:
        """Return whether the predictions of each tested client are the same for all of its rows."""
        data, same_predictions = self.data, []
        for name, rows in zip(
            data.names, data.train[: min(NUM_COMPARED, data.clients)], strict=False
        ):
            x = data.x[rows[:NUM_COMPARED]]
            if bool((x != x[:1]).any()):
                mean = replace(self, state=state).predict(x, name).mean
                same_predictions.append(
                    bool(((mean - mean[:1]).abs() <= PREDICTION_TOLERANCE).all())
                )
        return bool(same_predictions) and all(same_predictions)

    @property
    def monitors(self) -> dict[str, Monitor]:
        """Metadata of the numbers in the server state that are recorded in each round, by name."""
        monitors_by_name = metadata_of_class(self.method.metadata.tensors, Monitor)
        return {names.removeprefix("server/"): fact for names, fact in monitors_by_name}

    @property
    def warnings(self) -> list[str]:
        """Warnings about numbers above their limit, unlearned widths, untrained models and draws.

        Those about draws are of the last `to_arviz`. The first one is `switched`, the second is the
        status of a diverged or stuck run.
        """
        last, status = self.records[-1] if self.records else None, self.status
        texts = [self.switched, str(status) if status.kind in ("diverged", "stuck") else ""]
        texts += [
            f"{name} is {last.watched[name]:.2g} in round {last.number}: {fact.why}"
            for name, fact in self.monitors.items()
            if last and fact.exceeded(last.watched.get(name, 0.0))
        ]
        texts += self.ending.get("draws", "").split("\n")
        with suppress(*FAILURES):  # a program may only support training
            texts.append(warning_of_untrained(*self._fitted))
            if last and last.number >= 3:
                texts.append(unlearned_widths(*self._fitted, self.seed))
        return [text for text in texts if text]

    def parameter_changes(self) -> DataFrame:
        """Return a table of how much each sample site's parameters changed in each round.

        Columns: round, site; mean and sd, the largest change of any entry's mean and standard
        deviation since the previous round, in standard deviations; norm, the change of a tensor
        without a distribution, as a fraction of its norm. `status` is computed from the last
        rounds.
        """
        return table(self.records)

    @property
    def _fitted(self) -> tuple[Method, Federation, RoundState]:
        return self.method, self.data, self.state

    def _with_defaults(self, options: EvaluationFields) -> EvaluationFields:
        return {"seed": self.seed, "draws": self.draws, **options}

    @property
    def privacy(self) -> PrivacySpent | None:
        """Differential privacy spent in all rounds of the run, or None without privacy."""
        promise, rounds = self.method.metadata.privacy, self.state.number
        took = taken_part(self.records, rounds, self.data.clients)
        return promise.spent(rounds, took) if promise else None

    @property
    def title(self) -> str:
        """Title of the printed summary: number of rounds, seed and training time of the run."""
        seconds = sum(record.seconds for record in self.records)
        return f"Run of {number_of(self.state.number, 'round')}, seed {self.seed}, {seconds:.1f} s"

    def _more_html(self) -> str:
        """Return an HTML figure of scores by round, or of parameter changes if there are none."""
        draw = find_extension("figure of run")
        drawn = draw(self) if draw else None
        return picture(drawn, "scores or parameter changes by round") if drawn else ""

    def overview(self) -> dict[str, str]:
        """Return the printed summary of the run, as label -> text."""
        data, records, last = self.data, self.records, self.history[-1:]
        scores: dict[str, list[str]] = {}
        for r in self.history:
            if (r["round"], r["population"]) == (last[0]["round"], "training"):
                model = f"{r['model']}{'' if r['adaptation'] == 'none' else ' adapted'}"
                scores.setdefault(model, []).append(f"{r['metric']} {r['value']:.4g}")
        shown = "; ".join(f"{model} {', '.join(some[:2])}" for model, some in scores.items())
        bad = [reason for record in records for reason in record.rejected]
        down, up = sum(r.bytes_down for r in records), sum(r.bytes_up for r in records)
        sent = f"{down:,} down, {up:,} up"
        return {
            "status": "; ".join(dict.fromkeys([str(self.status), *self.warnings])),
            "views": ", ".join(self.method.views),
            "clients": f"{data.clients} training, {data.held_out} held out",
            "scores": f"round {last[0]['round']}: {shown}" if last else "not evaluated yet",
            "bytes": f"{sent}; {len(bad)} rejected{f', the last {bad[-1]}' if bad else ''}",
            **({"privacy": str(self.privacy)} if self.method.metadata.privacy else {}),
        }
