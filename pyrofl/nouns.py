"""Nouns for the holders of rows in texts: client and site, or those of a study, such as hospital.

Texts that users read take the words from `nouns()`, which the commands of a study set with `use`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

PLAIN = re.compile(r"[^\W\d_]+(-[^\W\d_]+)*")  # letters of any alphabet, with hyphens between
LONGEST = 30  # characters of a word
TAKEN = ("server", "row", "round", "draw")  # what texts call something else
EXPECTED = "one word of letters, such as hospital, or a list of singular and plural"


@dataclass(frozen=True)
class Noun:
    """A noun: singular and plural.

    Examples:
        >>> word = Noun.of("hospital")
        >>> word.count(1), word.count(1200), f"at each {word}"
        ('1 hospital', '1,200 hospitals', 'at each hospital')
    """

    one: str
    many: str

    @classmethod
    def of(cls, entry: Any) -> Noun:
        """Return the noun of a singular, or of singular and plural.

        Raises:
            ValueError: if it is no plain word, or a word that texts use for something else.

        Examples:
            >>> Noun.of("facility").many, Noun.of("branch").many, Noun.of(["Klinik", "Kliniken"])
            ('facilities', 'branches', Noun(one='Klinik', many='Kliniken'))
        """
        words = [*entry] if isinstance(entry, list | tuple) else [entry]
        if len(words) not in (1, 2) or not all(map(is_plain, words)):
            raise ValueError(f"unit is {entry!r}; expected {EXPECTED}")
        if taken := [word for word in words if word.lower() in TAKEN]:
            raise ValueError(
                f"unit is {taken[0]!r}, which has another meaning; expected {EXPECTED}"
            )
        return cls(words[0], words[-1] if len(words) == 2 else plural(words[0]))

    def __str__(self) -> str:
        """Return the singular."""
        return self.one

    def count(self, number: int) -> str:
        """Return a number with the noun in singular or plural."""
        return f"{number:,} {self.one if number == 1 else self.many}"

    @property
    def title(self) -> str:
        """The plural as the first word of a heading."""
        return self.many[0].upper() + self.many[1:]


def is_plain(word: object) -> bool:
    """Return whether an entry is a single word of letters."""
    return isinstance(word, str) and len(word) <= LONGEST and bool(PLAIN.fullmatch(word))


def plural(word: str) -> str:
    """Return the regular English plural of a noun.

    >>> plural("school"), plural("city"), plural("class"), plural("day")
    ('schools', 'cities', 'classes', 'days')
    """
    if re.search(r"[^aeiou]y$", word):
        return f"{word[:-1]}ies"
    return f"{word}es" if re.search(r"(s|x|z|ch|sh)$", word) else f"{word}s"


@dataclass(frozen=True)
class Nouns:
    """Nouns of texts: `client` has rows of its own, and `site` has a machine, for its clients."""

    client: Noun = Noun("client", "clients")
    site: Noun = Noun("site", "sites")


USUAL = Nouns()
_nouns: ContextVar[Nouns] = ContextVar("nouns")


def nouns() -> Nouns:
    """Return the nouns of the texts that are now written."""
    return _nouns.get(USUAL)


@contextmanager
def use(some: Nouns) -> Iterator[None]:
    """Use nouns in all texts of the `with` block.

    Examples:
        >>> hospital = Noun.of("hospital")
        >>> with use(Nouns(hospital, hospital)):
        ...     f"at {nouns().client.count(7)}"
        'at 7 hospitals'
        >>> nouns().client.many
        'clients'
    """
    token = _nouns.set(some)
    try:
        yield
    finally:
        _nouns.reset(token)
