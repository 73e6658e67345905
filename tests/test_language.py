"""Pages, docstrings and errors use plain terms of the field: patterns that they must not match."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "examples" / "docs"


class Rule(NamedTuple):
    """A pattern that prose must not match, a sentence that it finds, and a better one."""

    pattern: str
    bad: str
    good: str


RULES = (
    Rule(r"t(old|ells?|elling)", "this number tells it", "this number shows it"),
    Rule(r"s(ays?|aid|aying)", "the verdict says so", "the status reports it"),
    Rule(r"anew", "the round is made anew", "the round is repeated"),
    Rule(r"beside", "numbers beside those of NUTS", "numbers compared with those of NUTS"),
    Rule(r"dealt", "rows dealt to clients", "rows partitioned among clients"),
    Rule(r"(un)?heard", "clients that are not heard", "clients that drop out"),
    Rule(r"held back", "rows held back", "validation rows"),
    Rule(r"(made|makes?|making) up", "numbers that it makes up", "simulated numbers"),
    Rule(r"go(es|ne|ing)? on (with|from|as)", "it goes on from there", "it continues there"),
    Rule(r"asked", "when it is asked for", "on request"),
    Rule(r"whoever|whom|everybody|nobody|somebody", "whoever has the key", "anyone with the key"),
    Rule(r"whose (an?|the) ", "columns, whose a row is", "columns that identify the client"),
    Rule(r"lets", "it lets clients lie", "clients can lie"),
    Rule(r"merge[sd]?", "the server merges messages", "the server aggregates messages"),
    Rule(r"verdicts?", "the verdict of a fit", "the status of a fit"),
    Rule(r"newcomers?", "a newcomer", "a new client"),
    Rule(r"told apart|cannot tell", "rows cannot tell", "the difference is inconclusive"),
    Rule(r"the house|letters? to|sheets|crew|desk", "the house", "architecture"),
    Rule(r"as many(?=[.;,)]|$)", "expected as many", "expected the same number"),
    Rule(r"take turns|in turn", "both take turns", "they alternate"),
    Rule(r"nothing but|all else|what is left", "all else follows", "the rest follows"),
    Rule(r"of one's own", "a plate of one's own", "your own plate"),
    Rule(r"by the clock|of the processor(?!')", "seconds by the clock", "wall-clock seconds"),
    Rule(r"takes? part and no more", "takes part and no more", "only takes part"),
    Rule(
        r"(personal|standard|optim|initial|parametr)is(e[sd]?|ing|ation)",
        "a personalised model",
        "a personalized model",
    ),
)
ANY = re.compile("|".join(rf"(?P<r{i}>\b{r.pattern}\b)" for i, r in enumerate(RULES)), re.I)

EXCEPTIONS = {
    "Fisher merging": "name of a method",
    "Personalised Federated": "title of FedPop's paper",
}
"""Phrases that stay, and why."""

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
PAGES += [*sorted((ROOT / "examples").glob("*.md")), *sorted(ROOT.glob("examples/papers/**/*.md"))]
PAGES += sorted((ROOT / "examples" / "tutorials").glob("[0-9]*.py"))
PAGES += sorted((ROOT / "examples" / "tutorials" / "course").glob("*.md"))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page or a tutorial, with their numbers, without code and addresses."""
    code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if path.suffix == ".py":
            if line.startswith("# %%"):
                code = "[markdown]" not in line
            if code or not line.startswith("#"):
                continue
        elif line.lstrip().startswith("```"):
            code = not code
        old_names = path.name == "CHANGELOG.md" and line.startswith("|")
        if code or old_names or line.startswith("    ") or line.lstrip().startswith("```"):
            continue
        yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|\$[^$]*\$", " ", line)


def findings(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    """Yield what breaks a rule in numbered lines of prose, and a better example."""
    for number, line in lines:
        for phrase in EXCEPTIONS:
            line = line.replace(phrase, "")
        for found in ANY.finditer(line):
            rule = RULES[int((found.lastgroup or "r0")[1:])]
            yield f"line {number}: {found[0]!r}; write as in {rule.good!r}: {line.strip()}"


SOURCES = [
    path
    for folder in ("pyrofl", "inference", "models")
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings and the texts of a module, with their numbers.

    Texts, such as errors, help and labels of figures, are strings with a space in them.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            lines = (ast.get_docstring(node, clean=False) or "").splitlines()
            for number, line in enumerate(lines, node.body[0].lineno if lines else 0):
                if not line.lstrip().startswith((">>>", "...")):
                    # Neither code nor the name of an argument is prose.
                    yield number, re.sub(r"`[^`]*`|^\s+[a-z_, *]+: ", " ", line)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_docstring = "Args:" in node.value or ">>>" in node.value  # whose lines are above
            if " " in node.value and not is_docstring:
                yield node.lineno, re.sub(r"(?m)`[^`]*`|^\s+[a-z_, *]+: ", " ", node.value)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_uses_the_terms_of_the_field(path: Path):
    assert list(findings(texts(path))) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_uses_the_terms_of_the_field(page: Path):
    assert list(findings(prose(page))) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.bad)
def test_a_rule_finds_its_bad_sentence_and_accepts_the_good_one(rule: Rule):
    assert re.search(rf"\b{rule.pattern}\b", rule.bad, re.I)
    assert list(findings(iter([(1, rule.good)]))) == []


def test_every_exception_is_needed():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (*PAGES, *SOURCES))
    assert [phrase for phrase in EXCEPTIONS if phrase not in text] == []


def test_the_glossary_defines_the_terms_of_the_pages_in_order():
    terms = re.findall(r"(?m)^(\S.*)\n  \S", (DOCS / "glossary.md").read_text())
    assert terms == sorted(terms, key=str.lower)
    needed = {"row", "message", "client state", "cohort", "cavity", "SNIP", "site", "status"}
    assert needed <= {*terms}
