"""Every number on a page is compared with code or a stored table, or listed as prose.

`CLAIMS` compares. What no claim has seen is in `prose_numbers.txt`, a line for each page, so that a
new number is either given a claim or listed: `python tests/test_page_numbers.py` lists again what
the pages have, and the difference of the two files shows what nobody has compared.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_claims import CLAIMS, ROOT, Claim, value

LISTED = Path(__file__).parent / "prose_numbers.txt"
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *(ROOT / "examples" / name for name in ("NUMBERS.md", "CALIBRATION.md", "FAULTS.md")),
        ROOT / "examples" / "posteriors" / "words.md",  # of which POSTERIORS.md is made
        *sorted((ROOT / "examples" / "docs").glob("*.md")),
        *sorted((ROOT / "examples" / "papers").glob("**/README.md")),
    )
}
# Their tables are made from files, or compared with what is measured, by other tests.
MADE = {
    *("README.md", "examples/NUMBERS.md", "examples/CALIBRATION.md"),
    *(f"examples/docs/{name}.md" for name in ("speed", "regression_gallery")),
    "examples/FAULTS.md",
    "examples/papers/parity/README.md",
}
UNREAD = re.compile(  # code, which other tests run; addresses, formulas and tables that are made
    r"(?s)```.*?```|<!-- table: .*?<!-- end -->|<!--.*?-->|\]\([^)]*\)|\$\$.*?\$\$"
    r"|`[^`]*`|\$[^$\n]+\$|(?m:^    [^\n]*$|^ *\d+\. )|\b(?:19|20)\d\d\b"
)
TABLE = re.compile(r"(?m)^\|.*$")
NUMBER = re.compile(r"(?<![\w.])(?:\d[\d,]*\d|\d)(?:\.\d+)?(?![\w])|(?<![\w.])\.\d+")


def matches(claim: Claim) -> Iterator[re.Match[str]]:
    """Find a claim on its page; a blank of its pattern is any white space."""
    text = PAGES[claim.page].read_text(encoding="utf-8")
    return re.finditer(re.sub(r" ", r"\\s+", claim.pattern), text)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda one: f"{one.page}: {one.pattern[:50]}")
def test_what_a_page_says_is_so(claim: Claim):
    found = [*matches(claim)]
    assert found, f"{claim.page} no longer says {claim.pattern!r}; expected it, or another claim"
    expected = [*claim.expected()]
    for one in found:
        said = [group for group in one.groups() if group is not None]
        assert len(said) == len(expected), (said, expected)
        for text, number in zip(said, expected, strict=True):
            number_said, rounding = value(text)
            assert abs(number_said - number) <= rounding + 1e-9, (one.group(), text, number)


def unseen(page: str) -> Counter[str]:
    """Count the numbers in the text of a page that no claim compares."""
    text = PAGES[page].read_text(encoding="utf-8")
    kept = list(text)
    zones = [m.span() for m in UNREAD.finditer(text)]
    zones += [m.span() for m in TABLE.finditer(text)] if page in MADE else []
    for claim in (one for one in CLAIMS if one.page == page):
        zones += [m.span(i + 1) for m in matches(claim) for i in range(len(m.groups()))]
    for begin, end in zones:
        kept[begin:end] = " " * (end - begin)
    tabled = {n for row in TABLE.findall(text) for n in NUMBER.findall(row)}
    found = Counter(NUMBER.findall("".join(kept)))
    return Counter({n: count for n, count in found.items() if n not in tabled or is_short(n)})


def is_short(number: str) -> bool:
    """Say whether a number is in a table of its page by chance, rather than from it."""
    return "." not in number or len(number.strip("0.").replace(".", "")) < 3


def lines() -> dict[str, Counter[str]]:
    """Return the numbers that are listed as prose: page -> number -> how often."""
    rows = (line.partition(": ") for line in LISTED.read_text(encoding="utf-8").splitlines())
    return {page: Counter(numbers.split()) for page, _, numbers in rows}


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_compared_or_listed_as_prose(page: str):
    found, listed = unseen(page), lines().get(page, Counter[str]())
    new, gone = ({*(some - other)} for some, other in ((found, listed), (listed, found)))
    how = "write a claim in tests/page_claims.py, or run `python tests/test_page_numbers.py`"
    assert not new, f"{page} has the numbers {sorted(new)}, which nothing compares; {how}"
    assert not gone, f"{page} no longer has the numbers {sorted(gone)}; {how}"


def test_a_number_that_nothing_compares_is_found(monkeypatch, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("There are 99 methods, `lr=0.1`, 1,024 draws of .5 (see [5](a6.md)).\n    7\n")
    monkeypatch.setitem(PAGES, "README.md", page)
    assert unseen("README.md") == Counter(["99", "1,024", ".5", "5"])


def main() -> None:
    """List the numbers of all pages that no claim compares."""
    rows = {page: sorted(unseen(page).elements(), key=lambda n: value(n)[0]) for page in PAGES}
    text = "".join(f"{page}: {' '.join(numbers)}\n" for page, numbers in rows.items() if numbers)
    LISTED.write_text(text, encoding="utf-8")
    print(f"{sum(map(len, rows.values()))} numbers of {len(rows)} pages listed in {LISTED}")


if __name__ == "__main__":
    sys.exit(main())
