"""Equations of docstrings, which are plain text, as MathML: no network and no script is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from docutils.utils.math.latex2mathml import tex2mathml

GREEK = (
    "alpha beta gamma delta epsilon eta theta lambda mu nu pi phi psi rho sigma tau zeta xi Sigma"
)
SIGNS = {"sum": r"\sum ", "prod": r"\prod ", "grad": r"\nabla "}
SIGNS |= {name: rf"\{name} " for name in (*GREEK.split(), "log", "exp", "min", "max")}
OPERATORS = {"<-": r"\leftarrow ", "->": r"\rightarrow ", "...": r"\ldots ", "~": r"\sim "}
OPERATORS |= {"||": r"\text{‖}", "|": r"\mid ", "-=": r"\text{ -= }"}
OPERATORS |= {
    "{": r"\{",
    "}": r"\}",
    "*": r"\cdot ",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
}
ACCENTS = {"phat": r"\hat{p}", "wbar": r"\bar{w}"}

TOKEN = re.compile(
    r"(?P<code>`[^`]*`|\"[^\"]*\")"
    r"|(?P<name>[A-Za-z][A-Za-z0-9]*)"
    r"|(?P<script>[_^](?:\{[^{}]*\}|\([^()]*\)|-?[A-Za-z0-9]+(?:/[0-9]+|,[a-z]\b)?))"
    r"|(?P<space>\s+)"
    r"|(?P<number>[0-9][0-9.,]*[0-9]|[0-9])"
    r"|(?P<sign><-|->|\.\.\.|\|\||-=|.)"
)


def block(lines: tuple[str, ...]) -> str:
    """Write a block of equations as HTML: who does it, what, and a note; others as they are."""
    if not are_equations(lines):
        return f"<pre>{escape(chr(10).join(lines))}</pre>"
    rows = []
    for cohort, formula, note in map(columns, lines):
        cells = f"<td>{escape(cohort)}</td><td>{mathml(formula)}</td><td>{words(note)}</td>"
        rows.append(f"<tr>{cells}</tr>")
    return f'<div class="equations" tabindex="0"><table>{"".join(rows)}</table></div>'


def are_equations(lines: tuple[str, ...]) -> bool:
    """Tell equations from tables and code, which are indented too."""
    first = columns(lines[0])[1]
    return '"' not in first and bool(re.search(r"[=~]|^[pq]\(", first))


def columns(line: str) -> tuple[str, str, str]:
    """Split a line where it has three spaces or more, but not around its sign of equality.

    >>> columns("server   w     = sum_j tau_j mu_j   eq. 9")
    ('server', 'w = sum_j tau_j mu_j', 'eq. 9')
    """
    cohort = re.match(r"(client|server|test)\s\s+|\s*", line)
    begun = line[cohort.end() :] if cohort else line
    begun = re.sub(r"\s+(=|-=|~|<-)\s", r" \1 ", begun, count=1)
    formula, *note = re.split(r"\s{3,}", begun.strip(), maxsplit=1)
    return (cohort[1] or "" if cohort else ""), formula, " ".join(note)


def words(note: str) -> str:
    """Write a note, which is prose with a formula here and there."""
    if re.search(r"[_^=]", note.replace("`", "")) and "`" not in note:
        return mathml(note)
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(re.sub(r"\s+", " ", note)))


def mathml(text: str) -> str:
    """Write a line as MathML."""
    return tex2mathml(tex(text), as_block=False) if text else ""


def tex(text: str) -> str:
    r"""Write a line as TeX.

    >>> print(tex("w = sum_j tau_j mu_j"))
    w = \sum _{j} \tau _{j} \mu _{j}
    """
    return re.sub(r"\s+", " ", "".join(_tex(text))).strip()


def _tex(text: str) -> Iterator[str]:
    found = [(m.lastgroup or "", m[0]) for m in TOKEN.finditer(text)]
    for i, (kind, token) in enumerate(found):
        following = found[i + 1][0] if i + 1 < len(found) else ""
        if kind == "code":
            yield rf"\text{{{_safe(token.strip('`'))}}}"
        elif kind == "name":
            prose = _is_word(found, i - 2) and _is_word(found, i + 2)
            yield r"\text{a}" if token == "a" and prose else _name(token, following)
        elif kind == "script":
            inner = token[1:].removeprefix("{").removesuffix("}")
            letters = inner if re.fullmatch("[a-z]{2,3}", inner) and inner not in SIGNS else ""
            yield f"{token[0]}{{{' '.join(letters) or tex(inner)}}}"
        elif kind == "space":
            beside = [*found[max(i - 1, 0) : i], *found[i + 1 : i + 2]]
            yield (
                r"\ "
                if ("name", "a") in beside or _is_word(found, i - 1) or _is_word(found, i + 1)
                else " "
            )
        else:
            yield OPERATORS.get(token, token)


def _is_word(found: list[tuple[str, str]], i: int) -> bool:
    """Say whether a token is a word of prose, which keeps its distance."""
    if not 0 <= i < len(found) or found[i][0] not in ("name", "code"):
        return False
    return len(found[i][1]) > 1 and found[i][1] not in SIGNS


def _name(token: str, following: str) -> str:
    """Write a name: a sign, a letter, or a word."""
    if token in SIGNS:
        return SIGNS[token]
    if len(token) == 1:
        return f"{token} " if following == "name" else token
    if token in ACCENTS:
        return ACCENTS[token]
    if match := re.fullmatch(rf"d([A-Z]|{GREEK.replace(' ', '|')})", token):
        return f"d{SIGNS.get(match[1], match[1])}"
    return rf"\text{{{_safe(token)}}}"


def _safe(text: str) -> str:
    return re.sub(r"[{}^\\$#%&~]", "", text)
