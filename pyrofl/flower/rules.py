"""Check of a site's rules on a study with methods or programs; `rule_checks` has regressions."""

from __future__ import annotations

from pyrofl.data import Federation
from pyrofl.flower.project import Project
from pyrofl.inference.transport.site_rules import SiteRules


def check_rules(rules: SiteRules, project: Project, name: str, data: Federation | None) -> None:
    """Raise BrokenRuleError if a site's rules forbid a study.

    Args:
        rules: the site's rules.
        project: the study.
        name: name of the site.
        data: rows of the site's clients; None for a study with a formula.
    """
    rules.check_rounds(name, project.rounds)
    if data is None:
        return
    for client, rows in zip(data.names, data.train, strict=True):
        rules.check_rows(client, len(rows))
        if len(project.classes) == 2:
            counts = [float((data.y[rows] == code).sum()) for code in (0, 1)]
            rules.check_events(
                client, project.target, dict(zip(project.classes, counts, strict=True))
            )
