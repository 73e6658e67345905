"""Stored results of a regression in a Flower study: estimates, posterior, figures and page."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from pyrofl.data import Federation
from pyrofl.data.outlines import facts, outline, outline_federation
from pyrofl.experiments.regressions import RegressionExperiment
from pyrofl.experiments.results import facts_of
from pyrofl.files import run_json
from pyrofl.files.link_safe_files import subfolder
from pyrofl.flower.results import NUMBER_OF_DRAWS, ResultStore
from pyrofl.inference.evaluation.specification import EvaluationFields
from pyrofl.inference.posteriors.shared import shared_to_arviz
from pyrofl.models.regression.prediction import ServerRun
from pyrofl.nouns import nouns
from pyrofl.reports.regression_folder import write_regression

EXPERIMENT_FIELDS = ("formula", "family", "link", "priors", "levels", "rounds", "seed")
"""Fields of a project that are those of an experiment."""


class RegressionStore(ResultStore):
    """Store of the rounds and results of a study's regression.

    Attributes:
        column_warnings: warnings about the columns, which the page shows.
    """

    column_warnings: list[str]
    tables: tuple[str, ...] = ()

    def _federation_without_rows(self) -> Federation:
        """Return a federation of the design's shapes without rows."""
        design: Any = self.method.design  # type: ignore[attr-defined]
        roster = self.server.roster
        bare = outline(roster.names, roster.sizes, (len(design.places),), dtype=roster.dtype)
        return outline_federation(facts(replace(bare, source=design.source)))

    @property
    def evaluation_requests(self) -> list[EvaluationFields]:
        """No evaluations: a regression is judged by its posterior."""
        return []

    def finish(self) -> list[str]:
        """Write estimates, posterior, figures and page; return why figures are lacking."""
        run, folder = self.run, self.folder
        posterior = None
        if run.status.kind != "diverged":
            posterior = shared_to_arviz(run, NUMBER_OF_DRAWS, self.draws)
        if posterior is None:
            run_json.write(folder, self._run_json_content(), ())
            return []
        subfolder(folder / "figures")
        same = {f.name: getattr(run, f.name) for f in fields(run)}
        tables, lacking, _ = write_regression(
            folder,
            ServerRun(**same, shared_draws=posterior),
            lambda: posterior,
            self._run_json_content(),
            [*self.column_warnings, *self.site_warnings],
            data=self.project.folder.absolute().name,
            question=self.project.question or None,
            units={name: one.unit for name, one in self.project.columns.items() if one.unit},
        )
        self.tables = tuple(tables)
        return lacking

    def table(self) -> str:
        """Format the tables of estimates, with lines on the end and the posterior draws."""
        more = [self.stop_reason] + (
            [self._correction_line] if self.draws and self.draws.values else []
        )
        return "\n".join([self.name, *self.tables, *more])

    def _run_json_content(self) -> dict[str, Any]:
        """Return the content of run.json."""
        run, project, names = self.run, self.project, self.server.roster.names
        same: dict[str, Any] = {name: getattr(project, name) for name in EXPERIMENT_FIELDS}
        experiment = RegressionExperiment(
            methods=(run.method.name,),
            data=f"{nouns().site.many} of {project.folder}",
            client_column=project.client_column or None,
            question=project.question or None,
            out=str(self.folder),
            **same | {"link": project.link or None},
        )
        return facts_of(experiment, run, (), project.seed, project.family) | {
            "warnings": [*self.column_warnings, *run.warnings, *self.site_warnings],
            "project": project.agreed,
            "ending": self.stop_reason,
            **({"corrected": self.draws.outcome} if self.draws and self.draws.values else {}),
            "sizes": dict(zip(names, self.server.roster.sizes.tolist(), strict=True)),
        }
