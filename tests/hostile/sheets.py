"""Hostile tables: cells, whole files and what is asked of them."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hostile.case import DONE, ENDED, LIKE, NOBODY, OUT, REFUSED, Case, named
from hostile.flags import EITHER, LITTLE, RUN, SMALL

HEADER = ("y", "c", "a", "b", "g")
ROWS: tuple[tuple[str, ...], ...] = tuple(
    (f"{i % 5}.25", "uv"[i % 2], f"{i}.5", f"{i * i % 7}", "pqr"[i % 3]) for i in range(12)
)
SPOILT = 5  # the row whose cells are replaced
DEALT = ("--partition", "iid", *SMALL, *LITTLE)
GROUPED = ("--group", "g", "--partition", "groups", *SMALL[2:], *LITTLE)
# Where a cell is: its column, and what is asked.
PLACES: dict[str, tuple[int, tuple[str, ...]]] = {
    "target": (0, ("--target", "y", "--features", "a,b", *DEALT)),
    "class": (1, ("--target", "c", "--features", "a,b", *DEALT)),
    "feature": (2, ("--target", "y", "--features", "a,b", *DEALT)),
    "any feature": (2, ("--target", "y", *DEALT)),
    "group": (4, ("--target", "y", "--features", "a,b", *GROUPED)),
}
NUMERIC = ("target", "feature", "any feature")
MISSING = ("", " ", ".", "NA", "na", "n/a", "N/A", "NaN", "nan", "-nan", "null", "NULL", '""')
NOT_THERE = ("#N/A", "None", "?", "-", "--", "missing", "<NA>", "#REF!", "#DIV/0!", "nil", "NAN()")
NO_NUMBERS = ("inf", "-inf", "Infinity", "1e999", "-1e999", "1e39", "5%", "0x10", '"1,5"', "1 000")
NO_NUMBERS += (
    "1_000",
    '"1,000"',
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
)
NO_NUMBERS += ("1'000", "ten", "TRUE", "2020-01-01", "12:30", "3+", "<3", "~3", "1/2", "1d5", "0b1")
NO_NUMBERS += ("1j", "1.#INF", "(3)", "3 kg", "'3'", "=3", "3\u200b", 400 * "1", '"3""4"', "²")
NO_NUMBERS += ("\x1b[31m3", "1e+", "0o7", "1.5f")
SAME = ("+1.5", " 1.5 ", "\t1.5", "1.50", "1.5e0", "15E-1", "01.5", '"1.5"', '" 1.5"', "\u00a01.5")
SAME += ("1.500000000000000000000001", "\uff11.\uff15", "\u0661.\u0665", "1.5\u3000")
GIANTS = ("123456789012345678901234567890", "3e38", "-3e38", "16777217", "1e-400", "-0.0", "1e20")


def text(spoilt: Mapping[int, str] | None = None, without: int = -1, end: str = "\n") -> str:
    """Return the table, with other cells in one row, or without a row."""
    lines = [HEADER, *(row for i, row in enumerate(ROWS) if i != without)]
    if spoilt:
        row = list(lines[SPOILT + 1])
        for column, cell in spoilt.items():
            row[column] = cell
        lines[SPOILT + 1] = tuple(row)
    return end.join(",".join(line) for line in lines) + end


def making(content: str | bytes, plain: str = "") -> Callable[[Path], None]:
    """Make the table, and a plain one beside it."""
    raw = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content

    def make(folder: Path) -> None:
        (folder / "t.csv").write_bytes(raw)
        if plain:
            (folder / "plain.csv").write_text(plain, encoding="utf-8")

    return make


def asked(how: tuple[str, ...], file: str = "t.csv", out: str = OUT) -> tuple[str, ...]:
    """Return the words of a run on a table."""
    return (*RUN, "--data", f"csv:{file}", *how, "--out", out)


def of_cells() -> Iterator[Case]:
    """Yield a cell in the target, among classes, features and groups."""
    for place, (column, how) in PLACES.items():
        words, drop = asked(how), ("--missing", "drop")

        def case(cell: str, wanted: tuple[str, ...], told: tuple[str, ...] = ()) -> Case:
            make = making(text({column: cell}))  # noqa: B023
            name = f"csv {place} {named(cell)}"  # noqa: B023
            return Case(name, "csv", words, wanted, told, make)  # noqa: B023

        def compared(about: str, cell: str, plain: str, more: tuple[str, ...] = ()) -> Case:
            make = making(text({column: cell}), plain)  # noqa: B023
            like = asked(how, "plain.csv", LIKE)  # noqa: B023
            name = f"csv {place} {named(cell)} {about}"  # noqa: B023
            wanted = (DONE,) if more else EITHER
            return Case(name, "csv", (*words, *more), wanted, (), make, like)  # noqa: B023

        for cell in MISSING:
            yield case(cell, (REFUSED,), ("t.csv", HEADER[column]))
            yield compared("dropped", cell, text(without=SPOILT), drop)
        for cell in NOT_THERE:
            yield case(cell, (REFUSED,) if place in NUMERIC else EITHER)
        if place in NUMERIC:
            for cell in NO_NUMBERS:
                yield case(cell, (REFUSED,), ("t.csv", HEADER[column]))
                if place == "target":  # it must not be dropped either
                    dropped = case(cell, (REFUSED,), ("t.csv",))
                    name = f"{dropped.id} dropped"
                    yield Case(name, "csv", (*words, *drop), make=dropped.make)
            for cell in SAME:
                yield compared("as 1.5", cell, text({column: "1.5"}))
            for cell in GIANTS:
                giant = case(cell, (*EITHER, NOBODY, ENDED))
                yield replace(giant, warned="from which nearly all its variance comes")
        else:
            for cell in NO_NUMBERS[::4]:
                yield case(cell, EITHER)


BASE = text()
LINES = BASE.splitlines()
ZIPPED = io.BytesIO()
with zipfile.ZipFile(ZIPPED, "w") as _file:
    _file.writestr("t.csv", BASE)
# Files that are no tables, or not this one.
BAD_FILES: dict[str, str | bytes] = {
    "empty": "",
    "blank": " \n\n \n",
    "NUL alone": "\0",
    "NULs": 1000 * "\0",
    "header only": LINES[0],
    "header only, with its line's end": f"{LINES[0]}\n",
    "no header": "\n".join(LINES[1:]),
    "semicolons": BASE.replace(",", ";"),
    "tabs": BASE.replace(",", "\t"),
    "spaces": BASE.replace(",", " "),
    "bars": BASE.replace(",", "|"),
    "semicolons and decimal commas": BASE.replace(",", ";").replace(".", ","),
    "a short row": BASE.replace(LINES[3], "1,u,2"),
    "a long row": BASE.replace(LINES[3], f"{LINES[3]},9"),
    "a long last row": f"{BASE}1,u,2,3,p,4,5\n",
    "a short last row": f"{BASE}1,u\n",
    "a last row cut off": BASE[:-5],
    "all rows longer than the header": BASE.replace(LINES[0], "y,c,a,b"),
    "all rows shorter than the header": BASE.replace(LINES[0], "y,c,a,b,g,h"),
    "two columns alike": BASE.replace(LINES[0], "y,c,a,a,g"),
    "two columns alike but for a blank": BASE.replace(LINES[0], "y,c,a,a ,g"),
    "two targets": BASE.replace(LINES[0], "y,y,a,b,g"),
    "header in capitals": BASE.replace(LINES[0], LINES[0].upper()),
    "header twice": f"{LINES[0]}\n{BASE}",
    "header again at the end": f"{BASE}{LINES[0]}\n",
    "two tables": f"{BASE}\n{BASE}",
    "a comment before": f"# made by hand\n{BASE}",
    "a title before": f"Results,,,,\n{BASE}",
    "a units row": BASE.replace(LINES[1], f"kg,-,m,m,-\n{LINES[1]}"),
    "a sum at the end": f"{BASE}Sum,,66,31,\n",
    "quote left open": BASE.replace("0.5", '"0.5', 1),
    "quote inside": BASE.replace("0.5", '0"5', 1),
    "utf-16": BASE.encode("utf-16"),
    "utf-16 without a mark": BASE.encode("utf-16-le"),
    "utf-32": BASE.encode("utf-32"),
    "latin-1": BASE.replace("p", "é").encode("latin-1"),
    "a NUL in a number": BASE.replace("2.5", "2\0.5"),
    "a byte that is no text": BASE.replace("2.5", "2.5\udcff"),
    "gzip": gzip.compress(BASE.encode()),
    "zip": ZIPPED.getvalue(),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtins\x94.",
    "html": "<html><body><table><tr><td>1</td></tr></table></body></html>\n",
    "json": '[{"y": 1, "a": 2}, {"y": 2, "a": 3}]\n',
    "an error page": "404 Not Found\nnginx\n",
    "a pointer to a large file": "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n",
    "one row": "\n".join(LINES[:2]),
    "one target": BASE.replace(".25", "")
    .replace("\n1,", "\n0,")
    .replace("\n2,", "\n0,")
    .replace("\n3,", "\n0,")
    .replace("\n4,", "\n0,"),
    "no features": "y,g\n1,p\n2,q\n3,p\n",
    "features without values": "y,a,b\n1,,\n2,,\n3,,\n",
    "target without values": "y,a,b\n,1,2\n,2,3\n,3,4\n",
    "text only": "y,a,b\nu,v,w\nv,w,u\nu,u,u\n",
    "a column without a name": BASE.replace(LINES[0], "y,c,,b,g"),
    "a number as a name": BASE.replace(LINES[0], "1,2,3,4,5"),
    "a name with quotes": BASE.replace(LINES[0], 'y,c,"""a""",b,g'),
    "a name with an escape": BASE.replace(LINES[0], "y,c,\x1b[2Ja,b,g"),
    "a field of a megabyte": BASE.replace("2.5", 10**6 * "x"),
    "a header of a megabyte": BASE.replace(LINES[0], f"y,c,{10**6 * 'a'},b,g"),
}
# Files that mean the same as the plain one.
GOOD_FILES: dict[str, str | bytes] = {
    "a byte order mark": BASE.encode("utf-8-sig"),
    "ends of lines as in DOS": BASE.replace("\n", "\r\n"),
    "ends of lines as in old Macs": BASE.replace("\n", "\r"),
    "both ends of lines": BASE.replace("\n", "\r\n", 4),
    "no end of the last line": BASE[:-1],
    "blank lines": BASE.replace("\n", "\n\n"),
    "blank lines at the end": f"{BASE}\n\n\n",
    "a line of commas": f"{BASE},,,,\n",
    "blanks around": BASE.replace(",", " , "),
    "quotes around all": "\n".join(
        ",".join(f'"{cell}"' for cell in line.split(",")) for line in LINES
    ),
    "quotes and marks": "\ufeff" + BASE.replace(LINES[0], '"y","c","a","b","g"'),
    "text in another column": BASE.replace(",p\n", ',"p, with\na line"\n'),
    "other letters": BASE.replace(",p\n", ",名\n"),
    "an escape in another column": BASE.replace(",p\n", ",\x1b[2J\n"),
    "a long text in another column": BASE.replace(",p\n", f",{10**5 * 'x'}\n"),
    "columns in another order": "\n".join(
        ",".join(line.split(",")[i] for i in (4, 2, 0, 3, 1)) for line in LINES
    ),
}


def of_files() -> Iterator[Case]:
    """Yield whole files."""
    words = asked(PLACES["feature"][1])
    for about, content in BAD_FILES.items():
        yield Case(f"csv file {about}", "csv", words, told=("t.csv",), make=making(content))
    for about, content in GOOD_FILES.items():
        like, make = asked(PLACES["feature"][1], "plain.csv", LIKE), making(content, BASE)
        wanted = EITHER if "Macs" in about or "commas" in about else (DONE,)
        yield Case(f"csv file {about}", "csv", words, wanted, make=make, like=like)


# What one of two sites may send; the other one has the table.
SITES: dict[str, str] = {
    "nothing": "",
    "a header only": LINES[0],
    "a column less": "\n".join(line.rpartition(",")[0] for line in LINES),
    "a column more": "\n".join(f"{line},7" for line in LINES),
    "a column under another name": BASE.replace(LINES[0], "y,c,a,beta,g"),
    "names in capitals": BASE.replace(LINES[0], LINES[0].upper()),
    "no header": "\n".join(LINES[1:]),
    "semicolons": BASE.replace(",", ";"),
    "text in a column of numbers": text({2: "3 kg"}),
    "a column of another kind": "\n".join(
        [LINES[0], *(line.replace(".5,", ".5 mg,") for line in LINES[1:])]
    ),
    "a gap": text({2: ""}),
    "a column twice": BASE.replace(LINES[0], "y,c,a,a,g"),
}


def of_sites() -> Iterator[Case]:
    """Yield a file of one site beside that of another."""
    how = ("--target", "y", "--group", "site", *SMALL[2:], *LITTLE)
    for about, content in SITES.items():

        def make(folder: Path, content: str = content) -> None:
            (folder / "sites").mkdir()
            (folder / "sites/a.csv").write_text(BASE)
            (folder / "sites/b.csv").write_text(content)

        yield Case(f"csv site with {about}", "csv", asked(how, "sites"), told=("b.csv",), make=make)


def cases() -> Iterator[Case]:
    """Yield all that is about tables."""
    yield from of_sites()
    yield from of_cells()
    yield from of_files()
