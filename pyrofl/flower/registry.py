"""Registry of the sites of a Flower study, with the node that currently represents each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pyrofl.data.tables.wording import listed
from pyrofl.flower.project import Project
from pyrofl.flower.site import GREETING, HAS_BEGUN, LOG_FILE, REFUSAL, WARNED, greeting
from pyrofl.inference.transport.message_checks import (
    EXPECTED_NAME,
    MAX_QUOTED_CHARACTERS,
    Flat,
    client_names,
    column,
    is_name,
    one_line,
)
from pyrofl.inference.transport.records import Records
from pyrofl.nouns import nouns

NODES_FILE = "nodes.json"  # node -> the site whose key it has
MOST_CLIENTS, MOST_ROWS = 100_000, 100_000_000  # of a site
# Seconds that a node has at least to introduce its site; it is asked again later.
GREETING_TIMEOUT = 60.0


class Transport(Protocol):
    """Interface for sending messages to nodes and receiving their replies."""

    def present(self) -> Sequence[int]:
        """Return the ids of the connected Flower nodes."""

    def exchange(self, messages: Mapping[int, Records], timeout: float) -> dict[int, Records]:
        """Send messages to nodes by id, and return the replies received before the timeout."""

    def tell(self, messages: Mapping[int, Records]) -> None:
        """Send messages to Flower nodes without waiting for replies."""


def _refuse_introduction(site: Any, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise ValueError if a site's name, its clients' names or their numbers of rows are odd."""
    if not is_name(site):
        raise ValueError(f"site is {one_line(site, MAX_QUOTED_CHARACTERS)!r}; {EXPECTED_NAME}")
    if not 0 < len(names) <= MOST_CLIENTS:
        many = nouns().client.count(len(names))
        raise ValueError(f"it has {many}; expected 1 to {MOST_CLIENTS:,}")
    if others := [name for name in names if name != site and not name.startswith(f"{site}/")]:
        raise ValueError(
            f"{others[0]} is no {nouns().client} of {site}; expected {site}, or {site}/GROUP"
        )
    if min(sizes) < 1 or sum(sizes) > MOST_ROWS:
        raise ValueError(
            f"its {nouns().client.many} have {min(sizes):,} to {max(sizes):,} training rows; "
            f"expected at least one each, and at most {MOST_ROWS:,} in all"
        )


def _columns_warned_of(said: Flat, project: Project) -> tuple[str, ...]:
    """Return the columns that a site's check warns of; raise ValueError if they are odd."""
    columns: Any = said.get(WARNED)
    possible = {*project.used_columns, project.client_column, ""}
    if not isinstance(columns, tuple | list) or not all(
        isinstance(one, str) and one in possible for one in columns
    ):
        text = one_line(columns, MAX_QUOTED_CHARACTERS)
        raise ValueError(f"its check warns of {text}; expected columns of the study")
    return tuple(columns)


def _contents(names: Sequence[str], sizes: Sequence[int]) -> str:
    """Return how many clients and rows a site has; a site that is its own client has rows."""
    rows = f"{sum(sizes):,} training rows"
    is_client = nouns().client == nouns().site and len(names) == 1
    return rows if is_client else f"{nouns().client.count(len(names))}, {rows}"


@dataclass(frozen=True)
class Member:
    """Connected site: its current node, its clients, and their numbers of training rows.

    The check warns of the columns `warned` of its table.
    """

    node: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    warned: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """The warnings of the check in words, without values."""
        texts = [name or "rows" for name in self.warned]
        return [f"the check warns of {listed(texts)}; see its {LOG_FILE}"] if texts else []


@dataclass
class Registry:
    """Registry of a study's connected sites and of the Flower nodes that represent them."""

    project: Project
    transport: Transport
    say: Callable[[str], None]
    sites: dict[str, Member] = field(default_factory=dict)  # name -> site
    # Site -> clients and sizes of the run; None before it has begun.
    expected: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] | None = None
    whose: Mapping[int, str] | None = None  # node -> the site whose key it has; None without keys
    by_files: bool = False  # requests must be equal when they are written again
    _met: dict[int, Flat | None] = field(default_factory=dict)  # what a node said; None: refused
    _said: set[tuple[int, str]] = field(default_factory=set)

    def look(self, timeout: float = 0.0) -> None:
        """Update the registry of sites: greet new nodes, and remove disconnected nodes.

        Args:
            timeout: seconds that new nodes have to introduce their sites, at least
                `GREETING_TIMEOUT`.
        """
        present = set(self.transport.present())
        self._met = {node: said for node, said in self._met.items() if node in present}
        self.sites = {n: site for n, site in self.sites.items() if site.node in present}
        if strangers := sorted(present - self._met.keys()):
            about = greeting(self.project)[GREETING] | {
                HAS_BEGUN: not self.by_files and self.expected is not None
            }
            messages = {node: {GREETING: about} for node in strangers}
            within = max(timeout, GREETING_TIMEOUT)
            answers = self.transport.exchange(messages, within)
            for node, answer in sorted(answers.items()):
                self._met[node] = self._heard(node, answer)
            if silent := len(messages) - len(answers):
                self.say(
                    f"{silent} of {len(messages)} connected nodes have not introduced their "
                    f"{nouns().site.many} within {within:g} s; see their logs; they are "
                    "greeted again"
                )
        for node, said in sorted(self._met.items()):
            if said is not None:
                self._place(node, said)

    def _heard(self, node: int, answer: Records) -> Flat | None:
        """Validate a node's reply to the server's greeting; return it, or None if it is refused."""
        if odd := answer.get(REFUSAL):
            site = one_line(odd.get("site"), MAX_QUOTED_CHARACTERS)
            self._tell(node, f"{site} is refused: {one_line(odd.get('why'))}")
            return None
        try:
            said = answer[GREETING]
            names, site = client_names(said), said["site"]
            sizes = column(said, "sizes", len(names), torch.int64).tolist()
            _refuse_introduction(site, names, sizes)
            said = said | {WARNED: _columns_warned_of(said, self.project)}
        except (LookupError, ValueError) as error:
            reason = one_line(str(error))
            self._tell(node, f"a node is refused: its introduction cannot be read ({reason})")
            return None
        return said

    def _place(self, node: int, said: Flat) -> None:
        """Register a node as the current node of its site, or refuse the node with a reason."""
        name, names = said["site"], tuple(said["names"])
        site = Member(node, names, tuple(said["sizes"].tolist()), said[WARNED])
        if (other := self.sites.get(name)) and other.node == node:
            return
        if why := self._refusal(name, site):
            self._tell(node, f"{name} is refused: {why}")
            return
        self.sites[name] = site
        if not (self.by_files and self.expected is not None):
            self.say(f"{name} is there: {_contents(names, site.sizes)}")
            for text in site.warnings:
                self.say(f"warning: {name}: {text}")

    def _refusal(self, name: str, site: Member) -> str:
        """Return the reason why a node may not represent a site, or "" if it may."""
        if self.whose is not None and (owner := self.whose.get(site.node)) != name:
            has = f"the key of {owner}" if owner else "none of the keys"
            return f"its node has {has}; expected {name}.pub's"
        if name in self.sites:
            return "a second node has this name, and the first is still there"
        taken = {n: own for own, member in self.sites.items() for n in member.names}
        if both := sorted(taken.keys() & set(site.names)):
            return f"{taken[both[0]]} has a {nouns().client} {both[0]} too"
        if self.expected is None:
            return ""
        if name not in self.expected:
            return f"the run has begun without it; expected one of {', '.join(self.expected)}"
        now = site.names, site.sizes
        if self.expected[name] != now:
            was, are = (dict(zip(*of, strict=True)) for of in (self.expected[name], now))
            return (
                f"its {nouns().client.many} have {are} rows; expected {was}, as when the run began"
            )
        return ""

    def _tell(self, node: int, text: str) -> None:
        """Report once why a node was refused, in the server's log and to the node's site."""
        if (node, text) not in self._said:
            self._said.add((node, text))
            self.say(text)
            self.transport.tell({node: {REFUSAL: {"why": text}}})
