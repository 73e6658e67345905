"""Stored results of a method in a Flower study: rounds, scores, tables and figures."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyrofl.data import Federation
from pyrofl.data.outlines import facts, outline, outline_federation
from pyrofl.data.tables.preprocessor import ColumnPreprocessing, Preprocessor
from pyrofl.data.tables.source import Source
from pyrofl.experiments.experiment import Experiment, default_interval
from pyrofl.experiments.results import (
    TABLES,
    drawn,
    facts_of,
    failure_reason,
    figures_of_rounds,
    score_table,
    write_tables,
)
from pyrofl.files import checkpoint_file, run_folder, run_json
from pyrofl.files.link_safe_files import subfolder
from pyrofl.flower.project import Project
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Supervised
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.evaluation.specification import EvaluationFields
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.fitted_run.saving import RECORDS, save
from pyrofl.inference.monitoring.status import monitor_of
from pyrofl.inference.posteriors import export
from pyrofl.inference.posteriors.importance_sampling import Weights
from pyrofl.inference.posteriors.shared import (
    AskClients,
    SharedDraws,
    corrected_shared,
    shared_to_arviz,
)
from pyrofl.inference.transport import Server
from pyrofl.inference.transport.message_checks import Flat
from pyrofl.inference.transport.weighing import reason_against
from pyrofl.nouns import nouns
from pyrofl.tensors import role, under

RECORDS_FILE = "records.safetensors"
CORRECTION_FILE = "correction.safetensors"
NUMBER_OF_DRAWS = 1000  # in posterior.nc
MAX_EVALUATION_ATTEMPTS = 3  # of an evaluation without answers
# Fields of a project that are those of an experiment.
EXPERIMENT_FIELDS = ("target", "likelihood", "net", "settings", "rounds", "seed", "test_fraction")


class ResultStore:
    """Store of one method's rounds and scores, written to disk after each round."""

    def __init__(
        self, folder: Path, project: Project, name: str, method: Method, server: Server
    ) -> None:
        """Load a method's stored results up to the server's current round."""
        self.folder, self.project, self.name = folder, project, name
        self.method, self.server = method, server
        self.scores: list[Scores] = []
        self.site_warnings: list[str] = []  # of the checks of the sites' tables
        self._tries = 0
        self.draws: SharedDraws | None = None  # of the shared sites, after the last round
        self.run = Run(method, self._federation_without_rows(), server.state, server.seed)
        subfolder(folder)
        if (folder / RECORDS_FILE).exists():
            self._restore_records(
                checkpoint_file.read(folder / RECORDS_FILE, self._checkpoint_identity)
            )
        self._read_draws()
        self._convergence_monitor = monitor_of(method, self.run.data, self.run.records)

    def _federation_without_rows(self) -> Federation:
        """Return a federation of the study's shapes without rows."""
        roster, features, project = self.server.roster, self.project.features, self.project
        shape = (roster.names, roster.sizes, (len(features),), (), project.classes, project.type)
        columns = Preprocessor(tuple(map(ColumnPreprocessing, features)))  # read as they are
        source = Source(project.target, features, preparation=columns)
        return outline_federation(facts(replace(outline(*shape), source=source)))

    @property
    def evaluation_requests(self) -> list[EvaluationFields]:
        """Evaluations to request after a round: every model, and the fine-tuned personal model."""
        part: EvaluationFields = {"part": "test" if self.project.test_fraction else "train"}
        requests: list[EvaluationFields] = [{"model": view, **part} for view in self.method.views]
        if self.method.adapt and "personal" in self.method.views:
            requests.append({"model": "personal", "adaptation": "fine_tune", **part})
        return requests

    @property
    def needs_evaluation(self) -> bool:
        """Whether the last round of the method still needs an evaluation."""
        number, over = self.server.state.number, self.stopped
        every = default_interval(self.project.rounds)
        tested = {row["round"] for row in self.run.history} if self.scores or not over else ()
        now = self.evaluation_requests and number and (number % every == 0 or over)
        return bool(now) and number not in tested and self._tries < MAX_EVALUATION_ATTEMPTS

    @property
    def stopped(self) -> bool:
        """Whether the method has converged, is stuck or has diverged, or its rounds are complete.

        It is that of `fit` with `stop_when="converged"`, without the tests that need rows.
        """
        number = self.server.state.number
        return number >= self.project.rounds or (number > 0 and self._convergence_monitor.over)

    @property
    def over(self) -> bool:
        """Whether the method has stopped, and its last round is evaluated."""
        return self.stopped and not self.needs_evaluation

    @property
    def stop_reason(self) -> str:
        """Reason why the method has stopped, as one line."""
        number, rounds, status = self.server.state.number, self.project.rounds, self.run.status
        more = "; to continue, raise rounds in the study file at the server and at all "
        more += nouns().site.many
        more = more if status.kind == "not converged" else ""
        return f"{status.kind} after {number} of at most {rounds} rounds: {status.why}{more}"

    @property
    def needs_correction(self) -> bool:
        """Whether there are draws of shared sites, whose correction has not been tried yet."""
        can = bool(self.method.shared) and self.run.status.kind != "diverged"
        return can and self.draws is None

    @property
    def needs_reports(self) -> bool:
        """Whether a correction of the draws needs reports of all clients."""
        exact = getattr(self.method.views[self.method.posterior_view], "exact", None)
        is_exact = exact is not None and exact(self.server.state.server)
        return self.needs_correction and not (self._correction_refusal or is_exact)

    @property
    def _correction_refusal(self) -> str:
        """Reason why the draws must not be corrected, or ""."""
        reason = "" if self.project.corrected else "corrected is false in the project"
        return reason or reason_against(self.method)

    @property
    def shared_draws_for_clients(self) -> SharedDraws | None:
        """Draws of the shared sites if those of the clients' own sites belong to them, else None.

        Networks have none, and neither have posteriors of the server alone.
        """
        method, draws = self.method, self.draws
        is_program = not isinstance(method.model, Supervised)
        own = is_program and not getattr(method.views[method.posterior_view], "posterior", None)
        return draws if own and draws and draws.values else None

    def correct_draws(self, report: AskClients) -> list[str]:
        """Correct the posterior draws of the shared sites; return lines for the server's log.

        Args:
            report: asks all clients for their marginal likelihoods.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.draws = draws = corrected_shared(
                self.run, report, NUMBER_OF_DRAWS, self._correction_refusal
            )
        if not draws.values:
            return []
        self._write_draws(draws)
        return [str(one.message) for one in caught] or [self._correction_line]

    def scored(self, answers: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[str]:
        """Store the scores of an evaluation, given the sites' replies to each request.

        Returns the reasons for leaving out replies.
        """
        try:
            self.scores = [self.server.aggregate_evaluate(each) for each in answers]
        except ValueError as error:  # no valid answers
            self._tries += 1
            return [f"no site: {error}"] if any(answers) else []
        self._tries, number = 0, self.server.state.number
        self.run.history[:] = [row for row in self.run.history if row["round"] != number]
        for s in self.scores:
            key = (number, s.model, s.adaptation, s.population)
            lines = [(*key, metric, s.mean(metric)) for metric in s.values]
            row = run_folder.METRICS
            self.run.history += [dict(zip(row, line, strict=True)) for line in lines]
        self._write()
        return list(dict.fromkeys(reason for s in self.scores for reason in s.rejected))

    def made(self, new: RoundState, seconds: float) -> None:
        """Store a completed round: the server's state after it, and its duration."""
        self.run = self.run.copy(state=new)
        self.run.records.append(replace(self.server.records[-1], seconds=seconds))
        self._convergence_monitor.add(self.run.records[-1])
        self.draws = None
        self._tries = 0
        self._write()

    def finish(self) -> list[str]:
        """Write a method's tables and figures; return an error message for each failed figure."""
        run, scores, folder = self.run, self.scores, self.folder
        write_tables(folder, run, scores, {})
        save(run, folder / run_folder.CHECKPOINT)
        if run.status.kind != "diverged":
            posterior = shared_to_arviz(run, NUMBER_OF_DRAWS, self.draws)
            if posterior is not None:
                export.save(posterior, folder / "posterior.nc")
        run_json.write(folder, self._run_json_content(), TABLES)
        return drawn(folder, figures_of_rounds(run, scores, self.name, self.project.seed))

    @property
    def problem(self) -> str:
        """Return the reason why the method's run diverged or aggregated no update, or ""."""
        return failure_reason(self.run)

    def table(self) -> str:
        """Format a table of the method's scores, with lines on its end and its posterior draws."""
        more = [self.stop_reason] + (
            [self._correction_line] if self.draws and self.draws.values else []
        )
        if not self.scores:
            return "\n".join([f"{self.name}: no scores", *more])
        scored, clients = len(self.scores[0].ids), self.server.roster.clients
        few = (
            f"; {scored} of {nouns().client.count(clients)} sent scores" if scored < clients else ""
        )
        return "\n".join([f"{self.name}{few}", score_table(self.scores), *more])

    @property
    def _correction_line(self) -> str:
        """Whether the draws in posterior.nc are corrected, as one line."""
        draws = self.draws or SharedDraws()
        if draws.resampled_index is None or draws.diagnostics is None:
            return f"posterior.nc: draws are not corrected; {draws.outcome.removeprefix('no: ')}"
        weights = draws.diagnostics
        return (
            f"posterior.nc: draws are corrected by importance weights; Pareto k is "
            f"{float(weights.k):.2f}, and the effective sample size of {weights.tried:,} weighted "
            f"draws is {float(weights.ess):,.0f}"
        )

    def _run_json_content(self) -> dict[str, Any]:
        """Return the content of run.json for one method of the study."""
        run, project, names = self.run, self.project, self.server.roster.names
        same: dict[str, Any] = {name: getattr(project, name) for name in EXPERIMENT_FIELDS}
        experiment = Experiment(
            methods=(self.name,),
            data=f"{nouns().site.many} of {project.folder}",
            features=",".join(project.features),
            partition="groups",
            out=str(self.folder),
            **same,
        )
        content = facts_of(experiment, run, self.scores, project.seed, project.likelihood)
        return content | {
            "warnings": [*run.warnings, *self.site_warnings],
            "project": self.project.agreed,
            "ending": self.stop_reason,
            **({"corrected": self.draws.outcome} if self.draws and self.draws.values else {}),
            "sizes": dict(zip(names, self.server.roster.sizes.tolist(), strict=True)),
            "each_round": [
                {n: v for n, v in record.told(names).items() if not n.startswith("loss ")}
                for record in run.records
            ],
        }

    @property
    def _checkpoint_identity(self) -> dict[str, Any]:
        return {"method": self.name, "clients": list(self.server.roster.names)}

    def _write_draws(self, draws: SharedDraws) -> None:
        """Store draws that clients have weighed, so that a resumed study does not ask again."""
        if (weights := draws.diagnostics) is None:
            return
        content: Flat = {"round": self.server.state.number, "outcome": draws.outcome}
        content |= {"k": weights.k, "ess": weights.ess, "tried": weights.tried}
        content |= {"log_w": draws.log_w, "chosen": draws.resampled_index}
        content |= under("value", draws.values) | under("shape", weights.shapes)
        checkpoint_file.write(self.folder / CORRECTION_FILE, self._checkpoint_identity, content)

    def _read_draws(self) -> None:
        """Restore draws that clients have weighed after the last round."""
        path = self.folder / CORRECTION_FILE
        content = checkpoint_file.read(path, self._checkpoint_identity) if path.exists() else {}
        if self.project.corrected and content.get("round") == self.server.state.number:
            shapes = role("shape", content)
            weights = Weights(content["k"], content["ess"], content["tried"], shapes=shapes)
            some = (
                role("value", content),
                content["outcome"],
                weights,
                content["log_w"],
                content["chosen"],
            )
            self.draws = SharedDraws(*some)

    def _restore_records(self, content: dict[str, Any]) -> None:
        last = self.server.state.number
        rows = zip(*(content[name] for name in RECORDS), strict=True)
        records = [RoundRecord(n, *row) for n, row in zip(content["number"], rows, strict=True)]
        self.run.records += [record for record in records if record.number <= last]
        self.run.history += [row for row in content["history"] if row["round"] <= last]

    def _write(self) -> None:
        records = self.run.records
        content: Flat = {name: [getattr(r, name) for r in records] for name in RECORDS}
        content |= {"number": [r.number for r in records], "history": self.run.history}
        checkpoint_file.write(self.folder / RECORDS_FILE, self._checkpoint_identity, content)
