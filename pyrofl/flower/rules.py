"""Check of a site's rules on a study with methods or programs; `rule_checks` has regressions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pyrofl.data import Federation
from pyrofl.flower.project import Project
from pyrofl.inference.transport.site_rules import SiteRules, check_each

RULES_WITHOUT_FORMULA = ("min_rows", "min_events", "max_rounds")  # min_events: of two classes


def checked_without_formula(rules: SiteRules) -> str:
    """Return a line on the rules that hold in a study with methods, and on the others.

    An update of a network has no counts, levels or extremes, which the other rules limit.
    """
    values = ", ".join(f"{n.replace('_', '-')} {getattr(rules, n)}" for n in RULES_WITHOUT_FORMULA)
    return f"rules that hold here: {values}; the others are for studies with a formula\n"


def check_rules(rules: SiteRules, project: Project, name: str, data: Federation | None) -> None:
    """Raise BrokenRuleError if a site's rules forbid a study.

    Args:
        rules: the site's rules.
        project: the study.
        name: name of the site.
        data: rows of the site's clients; None for a study with a formula.
    """
    checks: list[Callable[[], None]] = [lambda: rules.check_rounds(name, project.rounds)]
    for client, rows in () if data is None else zip(data.names, data.train, strict=True):
        checks.append(partial(rules.check_rows, client, len(rows)))
        if data is not None and len(project.classes) == 2:
            counts = [float((data.y[rows] == code).sum()) for code in (0, 1)]
            by_class = dict(zip(project.classes, counts, strict=True))
            checks.append(partial(rules.check_events, client, project.target, by_class))
    check_each(checks)
