"""Hostile tables: cells, whole files, and what is asked of them."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hostile.case import DONE, ENDED, NOBODY, OUT, Case
from hostile.flags import EITHER, GAP, LITTLE, SMALL, TEXTS, fill, twin
from hypothesis import strategies as st

HEADER = ("y", "c", "a", "b", "g")
ROWS: tuple[tuple[str, ...], ...] = tuple(
    (f"{i % 5}.25", "uv"[i % 2], f"{i}.5", f"{i * i % 7}", "pqr"[i % 3]) for i in range(12)
)
SPOILT = 5  # the row whose cells are replaced
RUN, DEALT = (
    f"run fedavg --data csv:t.csv --out {OUT}",
    f"--partition iid --clients 2 {SMALL} {LITTLE}",
)
FEATURES = "--target y --features a,b"
# Where a cell is: its column, and what is asked.
PLACES: dict[str, tuple[int, str]] = {
    "target": (0, f"{RUN} {FEATURES} {DEALT}"),
    "class": (1, f"{RUN} --target c --features a,b {DEALT}"),
    "feature": (2, f"{RUN} {FEATURES} {DEALT}"),
    "any feature": (2, f"{RUN} --target y {DEALT}"),
    "group": (4, f"{RUN} {FEATURES} --client-column g --partition groups {SMALL} {LITTLE}"),
}
NUMERIC = ("target", "feature", "any feature")
NUMBER = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
MISSING = ("", " ", ".", "NA", "na", "n/a", "N/A", "NaN", "nan", "-nan", "null", "NULL")
ODD = ("#N/A", "None", "?", "-", "--", "missing", "<NA>", "#REF!", "#DIV/0!", "nil", "NAN()", "inf")
ODD += (
    "-inf",
    "Infinity",
    "1e999",
    "-1e999",
    "1e39",
    "5%",
    "0x10",
    "1,5",
    "1 000",
    "1_000",
    "1,000",
)
ODD += (
    "½",
    "3;4",
    "$5",
    "€5",
    "1.5.2",
    "--5",
    "+-5",
    "1e",
    "e5",
    "\u22125",
    "1'000",
    "ten",
    "TRUE",
)
ODD += ("2020-01-01", "12:30", "3+", "<3", "~3", "1/2", "1d5", "0b1", "1j", "1.#INF", "(3)", "3 kg")
ODD += ("'3'", "=3", "3\u200b", 400 * "1", '"3"', "²", "\x1b[31m3", "1e+", "0o7", "1.5f")
SAME = ("+1.5", " 1.5 ", "\t1.5", "1.50", "1.5e0", "15E-1", "01.5", "\u00a01.5", "1.5\u3000")
SAME += ("1.500000000000000000000001", "\uff11.\uff15", "\u0661.\u0665")
GIANTS = ("123456789012345678901234567890", "3e38", "-3e38", "16777217", "1e-400", "-0.0", "1e20")


def text(spoilt: Mapping[int, str] | None = None, without: int = -1) -> str:
    """Return the table, with other cells in one row, or without a row."""
    lines = [HEADER, *(row for i, row in enumerate(ROWS) if i != without)]
    if spoilt:
        row = list(lines[SPOILT + 1])
        for column, cell in spoilt.items():
            row[column] = '"' + cell.replace('"', '""') + '"'
        lines[SPOILT + 1] = tuple(row)
    return "\n".join(",".join(line) for line in lines) + "\n"


def making(content: str | bytes, plain: str = "") -> Callable[[Path], None]:
    """Make the table, and a plain one beside it."""
    raw = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content

    def make(folder: Path) -> None:
        (folder / "t.csv").write_bytes(raw)
        if plain:
            (folder / "plain.csv").write_text(plain, encoding="utf-8")

    return make


def plain_of(line: str) -> tuple[str, ...]:
    """Return the words of the same run on the plain table."""
    return twin(line.replace("t.csv", "plain.csv"))


@st.composite
def cells(draw: Callable[..., Any]) -> Case:
    """Draw a cell in the target, among classes, features and groups."""
    place = draw(st.sampled_from(sorted(PLACES)))
    column, line = PLACES[place]
    drop = draw(st.booleans())
    wanted = line + " --missing drop" * drop
    some = st.sampled_from(MISSING) | st.sampled_from(ODD) | st.sampled_from(SAME)
    cell = draw(some | st.sampled_from(GIANTS) | TEXTS)
    content = text({column: cell})
    if cell in MISSING:
        if drop:
            more = {"like": plain_of(line), "make": making(content, text(without=SPOILT))}
            return fill(wanted, "", (DONE,), **more)
        return fill(line, make=making(content)).telling("t.csv", HEADER[column])
    if place not in NUMERIC:
        return fill(wanted, "", EITHER, make=making(content))
    if cell in SAME:
        same = making(content, text({column: "1.5"}))
        return fill(wanted, "", EITHER, make=same, like=plain_of(line))
    if re.fullmatch(NUMBER, cell.strip()) and abs(float(cell)) < 3.4e38:
        warned = "from which nearly all its variance comes"
        return fill(wanted, "", (*EITHER, NOBODY, ENDED), make=making(content), warned=warned)
    # What is no number must not be dropped from the target either.
    if cell not in ODD or (drop and place != "target"):
        return fill(wanted, "", EITHER, make=making(content))
    return fill(wanted, make=making(content)).telling("t.csv")


BASE = text()
LINES = BASE.splitlines()
FIRST, MEGA = LINES[0], 10**6 * "x"
ZIPPED = io.BytesIO()
with zipfile.ZipFile(ZIPPED, "w") as _file:
    _file.writestr("t.csv", BASE)


def titled(header: str) -> str:
    """Return the table with another header."""
    return BASE.replace(FIRST, header)


# Files that are no tables, or not this one.
BAD_FILES: tuple[str | bytes, ...] = (
    *("", " \n\n \n", "\0", 1000 * "\0", FIRST, f"{FIRST}\n", "\n".join(LINES[1:])),
    *(BASE.replace(",", mark) for mark in ";\t |"),
    BASE.replace(",", ";").replace(".", ","),
    BASE.replace(LINES[3], "1,u,2"),  # a short row
    BASE.replace(LINES[3], f"{LINES[3]},9"),
    *(f"{BASE}1,u,2,3,p,4,5\n", f"{BASE}1,u\n", BASE[:-5]),  # the last row
    *map(titled, ("y,c,a,b", "y,c,a,b,g,h", "y,c,a,a,g", "y,c,a,a ,g", "y,y,a,b,g", FIRST.upper())),
    *(f"{FIRST}\n{BASE}", f"{BASE}{FIRST}\n", f"{BASE}\n{BASE}"),
    *(f"# made by hand\n{BASE}", f"Results,,,,\n{BASE}", f"{BASE}Sum,,66,31,\n"),
    BASE.replace(LINES[1], f"kg,-,m,m,-\n{LINES[1]}"),
    *(BASE.replace("0.5", cell, 1) for cell in ('"0.5', '0"5')),
    *(BASE.encode(code) for code in ("utf-16", "utf-16-le", "utf-32")),
    BASE.replace("p", "é").encode("latin-1"),
    *(BASE.replace("2.5", cell) for cell in ("2\0.5", "2.5\udcff", MEGA)),
    *(gzip.compress(BASE.encode()), ZIPPED.getvalue(), b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtins\x94.",  # a pickle
    "<html><body><table><tr><td>1</td></tr></table></body></html>\n",
    '[{"y": 1, "a": 2}, {"y": 2, "a": 3}]\n',
    "404 Not Found\nnginx\n",
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n",
    "\n".join(LINES[:2]),  # one row
    re.sub(r"\n\d.25", "\n0", BASE),  # one target
    *("no,g\n1,p\n2,q\n", "y,a,b\n1,,\n2,,\n3,,\n", "y,a,b\n,1,2\n,2,3\n,3,4\n"),
    "y,a,b\nu,v,w\nv,w,u\nu,u,u\n",
    *map(
        titled, ("y,c,,b,g", "1,2,3,4,5", 'y,c,"""a""",b,g', "y,c,\x1b[2Ja,b,g", f"y,c,{MEGA},b,g")
    ),
)
# Files that mean the same as the plain one.
GOOD_FILES: dict[str, str | bytes] = {
    "mark": BASE.encode("utf-8-sig"),
    "ends of lines": BASE.replace("\n", "\r\n"),
    "ends of lines as in old Macs": BASE.replace("\n", "\r"),
    "both ends of lines": BASE.replace("\n", "\r\n", 4),
    "no end of the last line": BASE[:-1],
    "blank lines": BASE.replace("\n", "\n\n"),
    "a line of commas": f"{BASE},,,,\n",
    "blanks around": BASE.replace(",", " , "),
    "quotes": "\ufeff" + re.sub(r"([^,\n]+)", r'"\1"', BASE),
    "text in another column": BASE.replace(",p\n", ',"p, with\na line"\n'),
    "an escape in another column": BASE.replace(",p\n", ",\x1b[2J\n"),
    "a long text in another column": BASE.replace(",p\n", f",{10**5 * '名'}\n"),
    "another order": "\n".join(
        ",".join(line.split(",")[i] for i in (4, 2, 0, 3, 1)) for line in LINES
    ),
}
# What one of two sites may send; the other one has the table.
SITES: tuple[str, ...] = (
    *("", FIRST, "\n".join(LINES[1:]), BASE.replace(",", ";"), text({2: "3 kg"}), text({2: ""})),
    *map(titled, ("y,c,a,beta,g", FIRST.upper(), "y,c,a,a,g")),
    "\n".join(line.rpartition(",")[0] for line in LINES),
    "\n".join(f"{line},7" for line in LINES),
    BASE.replace(".5,", ".5 mg,"),
)
LIKELIHOODS = "normal:nan normal:0 normal:-1 normal:inf normal: normal:x normal:1:2 normal:1,5 "
LIKELIHOODS += "binomial:0 binomial:-1 binomial:2.5 binomial: binomial:x binomial:nan binomial:inf "
LIKELIHOODS += "poisson:3 bernoulli:1 categorical:3 normal_known_sd:1 Normal gaussian norml : :3 "
LIKELIHOODS += "binomial:5 poisson bernoulli binomial categorical"  # y has decimals
# What is asked of the table, and what must be told.
QUESTIONS = """--features=a,,b>column --features=a,>column --features=,a>column --features=,>column
--features=a,a>a,~a --features=y>y --features=a,y>y --features=zzz>zzz --features=A>'A'
--features=a;b>a;b --features=2>'2' --features=a~--features=zzz>zzz --features=g~--client-column=g>g
--client-column=y>y --client-column=zzz>zzz --client-column=G>'G' --target=Y>'Y' --target=0>'0'
--target=y,c>y,c
--target=zzz>zzz --target=c~--likelihood=normal~--features=a,b>c --missing=mode>mode
--target=c~--likelihood=poisson~--features=a,b>c --likelihood=categorical~--features=a,b>y
--target=a~--features=b~--likelihood=categorical>a --scaling=scale>scale --categories=zzz>zzz
--categories=y>y --categories=a,,b>column --features=a~--categories=b>b --test-column=c>'u'
--test-column=y>y --test-column=zzz>zzz --test-last=c>'u' --test-last=zzz>zzz
--test-last=a~--test-column=b>test_last --test-fraction=1>--test-fraction --missing=Drop>Drop
--missing>--missing --features=a,b~--client-column=g~--partition=groups:c>c
--features=a,b~--partition=groups>groups --features=a,b~--partition=slices:2>slices
--features=a,b~--partition=dirichlet:0.5>dirichlet --target=c~--features=a,b~--partition=slices:3>3
--target=c~--features=a,b~--partition=domains:iid>domains --features=a,b~--per-class=2>class
--features=a,b~--clients=13>13 --features=a,b~--held-out=12> --features=a,b~--net=mean:3>mean:3
--features=a,b~--net=cnn-pfedmb>cnn-pfedmb --features=a,b~--server-data=12>12
--target=c~--features=a,b~--net=mean>mean"""
COUNTS = "n,k,x,g\n5,{},1.5,p\n5,2,2.5,q\n5,3,0.5,p\n5,1,2.0,q\n5,4,1.0,p\n5,0,3.0,q\n"
GROUPS = "--client-column g --partition groups"
MIXED: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # tables of another kind
    ("y,a\n" + "".join(f"name{i},{i}\n" for i in range(12)), "", EITHER[1:]),
    ("y,a\nu,1\nu,2\nu,3\nu,4\n", "", EITHER[1:]),
    ("y,a,g\n1,2,1\n2,3,1.0\n3,4,2\n4,5,2\n", f"{GROUPS} --clients 2", EITHER[1:]),
    ("y,a\n1,2\n1.0,3\n2,4\n2,5\n1,3\n", "--likelihood categorical", EITHER[1:]),
    ("y,a\nu,1\nu ,2\nv,3\n v,4\nu,5\nv,6\n", "--likelihood categorical", EITHER),
    ("y,a\n1700000001,1\n1700000002,2\n1700000003,3\n1700000001,4\n", "", EITHER[1:]),
    (
        "y,a,g\n" + "".join(f"{i}.5,{i % 4},g{i}\n" for i in range(6)),
        f"{GROUPS} --clients 6",
        EITHER[:1],
    ),
    ("y,a,g\n1,2,p\n2,3,p\n3,4,p\n4,5,p\n", f"{GROUPS} --clients 1", EITHER[:1]),
    ("y,a\n\x1b[2J,1\nv,2\n\x1b[2J,3\nv,4\nv,5\n\x1b[2J,6\n", "", EITHER),
    ("y,a,g\n1,2,../p\n2,3,../p\n3,4,/q\n4,5,/q\n", f"{GROUPS} --clients 2", EITHER[:1]),
    ('y,a,g\n1,2,"p\nq"\n2,3,"p\nq"\n3,4,r\n4,5,r\n', f"{GROUPS} --clients 2", EITHER),
    (
        "y,"
        + ",".join(f"x{i}" for i in range(3000))
        + "\n"
        + "".join(",".join(str((i * j) % 7) for j in range(1, 3002)) + "\n" for i in range(1, 9)),
        "",
        EITHER[:1],
    ),
    ("y,a\n" + "".join(f"{i % 3},{i}e30\n" for i in range(1, 9)), "", (*EITHER, NOBODY, ENDED)),
    ("y,a,b\n1,2,7\n2,3,7\n3,4,7\n4,1,7\n", "", EITHER),
)


@st.composite
def tables(draw: Callable[..., Any]) -> Case:
    """Draw a file, what a site sends, or a question that a table cannot answer."""
    kind = draw(
        st.sampled_from(["bad", "good", "site", "question", "likelihood", "count", "mixed"])
    )
    line = PLACES["feature"][1]
    if kind == "bad":
        return fill(line, make=making(draw(st.sampled_from(BAD_FILES)))).telling("t.csv")
    if kind == "good":
        about = draw(st.sampled_from(sorted(GOOD_FILES)))
        wanted = EITHER if "Macs" in about or "commas" in about else (DONE,)
        make = making(GOOD_FILES[about], BASE)
        return fill(line, "", wanted, make=make, like=plain_of(line))
    if kind == "site":
        content = draw(st.sampled_from(SITES))

        def make_sites(folder: Path) -> None:
            (folder / "sites").mkdir()
            (folder / "sites/a.csv").write_text(BASE)
            (folder / "sites/b.csv").write_text(content)

        asked = f"--target y --client-column site {SMALL} {LITTLE}"
        line = f"run fedavg --data csv:sites --out {OUT} {asked}"
        return fill(line, make=make_sites).telling("b.csv")
    if kind == "question":
        question, _, told = (
            draw(st.sampled_from(QUESTIONS.split())).replace("~", " ").partition(">")
        )
        return fill(f"{RUN} --target y {DEALT} {question}", make=making(BASE)).telling(told)
    if kind == "likelihood":
        value = draw(st.sampled_from(LIKELIHOODS.split()))
        return fill(f"{line} --likelihood={GAP}", value, make=making(BASE))
    if kind == "mixed":
        content, question, wanted = draw(st.sampled_from(MIXED))
        line = f"{RUN} --target y {DEALT} {question}"
        return fill(line, "", wanted, make=making(content))
    line = f"{RUN} --target k --features n,x {DEALT} --likelihood {GAP}"
    likelihood = draw(
        st.sampled_from(["poisson", "binomial", "binomial:5", "bernoulli", "normal_known_sd"])
    )
    if likelihood == "normal_known_sd":
        cell = draw(st.sampled_from(["0,1", "-1,1", "0.0,1"]))
        return fill(line, likelihood, make=making(COUNTS.replace("5,{}", cell)))
    cell = draw(st.sampled_from(["-1", "1.5", "6", "1e30", "-0.001"]))
    if likelihood == "poisson" and cell in ("6", "1e30"):
        wanted = (*EITHER, NOBODY, ENDED)
        return fill(line, likelihood, wanted, make=making(COUNTS.format(cell)))
    return fill(line, likelihood, make=making(COUNTS.format(cell))).telling("target")
