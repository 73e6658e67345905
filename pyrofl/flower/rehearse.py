"""The command `pyrofl study rehearse`: an attack on a site's own messages; nothing is sent."""

from __future__ import annotations

from argparse import Namespace

from pyrofl.data.tables.wording import number_of
from pyrofl.experiments.console import show
from pyrofl.files import text_tables
from pyrofl.flower.disclosure import leaving
from pyrofl.flower.project import Project, of_study
from pyrofl.flower.tables import read_site_tables, regression_arguments
from pyrofl.inference.transport.site_rules import BrokenRuleError, SiteRules
from pyrofl.models.regression.rehearsal import rehearse as attack


@of_study
def rehearse(args: Namespace) -> None:
    """Print whether a site's rules permit a study, and which rows its messages would reveal."""
    project: Project = args.project
    if not project.formula:
        raise ValueError(
            f"{project.file} has no formula; expected a study with one, as attacks on other "
            "methods are not supported"
        )
    rules = SiteRules.read(args.rules)
    tables = read_site_tables(project, args.data, args.name)
    verdict = "the rules permit this study"
    try:
        rules.check_rounds(args.name, project.rounds)
        leaving(project, tables, rules=rules)
    except BrokenRuleError as error:
        verdict = f"the rules forbid this study: {error}"
    recovered = attack(project.formula, tables, rules=rules, **regression_arguments(project))
    total = sum(map(len, tables.frames.values()))
    rows = len(recovered.drop_duplicates(["client", "row"]))
    lines = [verdict, f"recovered from the messages: {rows} of {number_of(total, 'row')}"]
    if rows:
        lines.append(text_tables.table(tuple(recovered), recovered.astype(str).to_numpy().tolist()))
    show("\n".join(lines))
