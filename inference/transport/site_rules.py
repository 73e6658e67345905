"""Rules of a site: what its messages may contain, checked before anything leaves.

Defaults follow the disclosure thresholds of DataSHIELD (nfilter.tab 3, nfilter.subset 3,
nfilter.glm 0.33, nfilter.levels.max 40, nfilter.string 80) and the (n, k) dominance rule of
official statistics (Hundepool et al., Statistical Disclosure Control, Wiley 2012, section 4.2).
They are for messages of an honest server: a server that chooses its own requests, or combines
several studies of the same rows, can learn more.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pyrofl.arguments import Count, PositiveShare, Whole, check_fields
from pyrofl.data.tables.wording import refuse_no_file


class BrokenRuleError(ValueError):
    """Error for a study that a rule of the site forbids.

    Its text has numbers of the site's rows and stays there.

    Attributes:
        rule: name of the rule, such as "min-rows"; of several, the first.
        every: the errors that this one joins; itself, of one rule.
    """

    def __init__(self, client: str, rule: str, text: str) -> None:
        super().__init__(f"{client}: rule {rule}: {text}")
        self.rule = rule
        self.every: tuple[BrokenRuleError, ...] = (self,)

    @classmethod
    def join(cls, errors: Sequence[BrokenRuleError]) -> BrokenRuleError:
        """Return one error with the texts of several."""
        joined = cls("", errors[0].rule, "")
        joined.args, joined.every = ("; ".join(map(str, errors)),), tuple(errors)
        return joined

    @property
    def for_server(self) -> str:
        """Return a text without numbers and columns, which may be sent."""
        names = ", ".join(dict.fromkeys(one.rule for one in self.every))
        return f"the rules of this site forbid the study ({names})"


def check_each(checks: Iterable[Callable[[], object]]) -> None:
    """Run checks; raise one BrokenRuleError of all rules that they find broken."""
    errors: list[BrokenRuleError] = []
    for check in checks:
        try:
            check()
        except BrokenRuleError as error:
            errors += error.every
    if errors:
        raise errors[0] if len(errors) == 1 else BrokenRuleError.join(errors)


@dataclass(frozen=True)
class SiteRules:
    """Rules of a site, which its messages must satisfy before they leave.

    Counts are of rows: if a person has several rows, raise them.

    Attributes:
        min_rows: smallest number of rows of a client. Reports have four sums of a column (of its
            numbers, squares, logarithms and their squares), which determine four numbers.
        min_level_rows: smallest number of rows of each level of a factor or group that leaves.
        min_events: smallest number of events, and of rows of each of two responses.
        rows_per_parameter: smallest number of rows for each coefficient and each effect of a group.
        max_share: largest share of a column's squared deviations from its median, or of the rows'
            weights, that fewer than `min_level_rows` rows may have: sums with a larger share are
            nearly the values of these rows.
        max_levels: largest number of levels of a factor or group; identifiers have more.
        max_level_characters: largest number of characters of a level's name; notes have more.
        max_rounds: largest number of rounds, each of which sends further numbers.
        exact_values: whether the smallest and largest number of a column, and its quantiles, may
            leave. If not, ranges are rounded outward, and splines need bounds and knots.

    Raises:
        ValueError: if a rule is out of its range.

    Examples:
        >>> SiteRules(min_rows=20).min_rows
        20
    """

    min_rows: Count = 5
    min_level_rows: Count = 3
    min_events: Whole = 3
    rows_per_parameter: Count = 3
    max_share: PositiveShare = 0.9
    max_levels: Count = 40
    max_level_characters: Count = 80
    max_rounds: Count = 100
    exact_values: bool = False

    def __post_init__(self) -> None:
        """Validate the rules."""
        check_fields(self)

    @classmethod
    def read(cls, path: str | Path | None) -> SiteRules:
        """Return the rules in a TOML file with lines such as `min-rows = 20`, or the defaults.

        Args:
            path: file; "" and None are the defaults.

        Raises:
            ValueError: if the file cannot be read, or a rule is unknown or out of its range.
        """
        if not path:
            return cls()
        refuse_no_file(str(path))
        try:
            entries: Mapping[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}; expected rules") from error
        except (tomllib.TOMLDecodeError, UnicodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}; expected TOML") from error
        names = {field.name.replace("_", "-"): field.name for field in fields(cls)}
        if unknown := sorted(entries.keys() - names):
            raise ValueError(
                f"{path}: no rule is called {' or '.join(map(repr, unknown))}; expected some of "
                f"{', '.join(names)}"
            )
        try:
            return cls(**{names[name]: value for name, value in entries.items()})
        except ValueError as error:
            field, rest = str(error).split(" ", 1)
            raise ValueError(f"{path}: {field.replace('_', '-')} {rest}") from error

    def check_rows(self, client: str, rows: int) -> None:
        """Raise BrokenRuleError if a client has too few rows, but some."""
        if 0 < rows < self.min_rows:
            counted = "row is" if rows == 1 else "rows are"
            raise BrokenRuleError(
                client,
                "min-rows",
                f"{rows} {counted} complete; expected at least {self.min_rows}: join this client "
                "with another, or leave the study",
            )

    def check_events(self, client: str, what: str, counts: Mapping[str, float]) -> None:
        """Raise BrokenRuleError if there are too few rows of an event or of a response.

        Args:
            client: name of the client.
            what: name of the response.
            counts: name of the event or response -> number.
        """
        for name, count in counts.items():
            if count < self.min_events:
                raise BrokenRuleError(
                    client,
                    "min-events",
                    f"response {what} has {count:g} of {name}; expected at least "
                    f"{self.min_events}: choose another response, or leave the study",
                )

    def check_rounds(self, client: str, rounds: int) -> None:
        """Raise BrokenRuleError if a study may have too many rounds."""
        if rounds > self.max_rounds:
            raise BrokenRuleError(
                client,
                "max-rounds",
                f"the study has up to {rounds} rounds; expected at most {self.max_rounds}: ask the "
                "server for fewer",
            )
