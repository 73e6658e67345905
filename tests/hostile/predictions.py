"""Hostile questions to a run's folder: flags of `pyrofl predict`, its tables, and its files."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hostile.case import DONE, REFUSED, Case, named, shown
from hostile.flags import NEITHER, ODD, places

FLAGS = ("--client", "--new-client", "--own-rows", "--model", "--unadapted")
BASE = ("predict", "run", "--data", "new.csv", "--out", "out.csv")
SITE = ("--client", "site A")
TABLE = "dose,age,site\n1,2,site A\n3,4,site B\n"
TABLES = {  # and what is told of them
    "": "new.csv",
    "age,dose": "new.csv",
    "age\n1\n": "dose",
    "Age,dose\n1,2\n": "age",
    "age,dose\n1,two\n": "dose",
    "age,dose\n1,2\n3,two\n5,6\n": "dose",
    "age,dose\n1,\n": "dose",
    "age,dose\n1,nan\n2,3\n": "dose",
    "age,dose\n1,2,3\n": "line 2",
    "age;dose\n1;2\n": "';'",
    "age,age,dose\n1,2,3\n": "age",
    "age,dose\n1e400,2\n1,2\n": "age",
    "a\0e,dose\n1,2\n": "age",
}


class Evil:
    """What would run code, if it were unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        """Touch a file."""
        import os

        return os.system, ("touch touched",)


@cache
def fitted() -> bytes:
    """Return the file of a run on two sites."""
    import pyrofl
    from pyrofl.models import fedavg

    x = np.random.default_rng(0).normal(size=(8, 2))
    sites = {f"site {s}": (x, np.arange(8) % 2) for s in "AB"}
    data = pyrofl.Federation.of(sites, classes=("no", "yes"), features=("age", "dose"))
    method = fedavg.build(pyrofl.nets.build("softmax", (2,), 2), epochs=1)
    with TemporaryDirectory() as folder:
        pyrofl.fit(method, data, 1, progress=False).save(folder)
        return Path(folder, "checkpoint.safetensors").read_bytes()


def made(folder: Path, table: str = TABLE, content: bytes | None = None) -> None:
    """Make a run's folder, and tables."""
    places(folder)
    (folder / "run").mkdir()
    (folder / "run" / "checkpoint.safetensors").write_bytes(
        fitted() if content is None else content
    )
    (folder / "new.csv").write_text(table)
    (folder / "own.csv").write_text("age,dose,y\n1,2,no\n3,4,yes\n5,6,no\n")


def of_flags() -> Iterator[Case]:
    """Yield odd values of every flag."""
    case = partial(Case, kind="flag", make=made)
    for flag, more in (
        ("--client", ()),
        ("--group", ()),
        ("--model", SITE),
        ("--own-rows", ("--new-client",)),
    ):
        for value in sorted(ODD):
            words = (*BASE, *more, f"{flag}={value}")
            told = shown(value) if flag != "--own-rows" else ()
            yield case(f"predict {flag}={named(value)}", words=words, told=told)
    for value in (*NEITHER, "0"):
        words = (*BASE, *SITE, f"--draws={value}")
        yield case(f"predict --draws={named(value)}", words=words, told=("--draws", *shown(value)))
    for value in ("file", "full", "fifo", "new", "x.csv/y", "run", "/dev/full", "", "~"):
        words = (*BASE[:-1], value, *SITE)
        yield case(f"predict into {named(value)}", words=words)
    for words in (
        (),
        ("--client", "site A", "--new-client"),
        ("--group", "site", "--new-client"),
        ("--client", "site A", "--own-rows", "own.csv"),
        ("--group", "age"),
    ):
        yield case(f"predict {' '.join(words)}", words=(*BASE, *words))
    for value in sorted(ODD):
        yield case(f"predict --net={named(value)}", words=(*BASE, *SITE, f"--net={value}"))
    for words in (
        SITE,
        ("--group", "site"),
        ("--new-client",),
        ("--new-client", "--model", "global"),
        (*SITE, "--unadapted", "--draws", "2"),
    ):
        yield case(
            f"predict {' '.join(words)}", words=(*BASE, *words), wanted=(DONE,), writes=False
        )


def of_tables() -> Iterator[Case]:
    """Yield tables that are not as those of training."""
    for text, told in TABLES.items():
        make = partial(made, table=text)
        yield Case(f"predict table {named(text)}", "csv", (*BASE, *SITE), told=(told,), make=make)
    for value in ("missing", "fifo", "full", "/dev/zero", "loop", ""):
        words = ("predict", "run", "--data", value, "--out", "out.csv", *SITE)
        yield Case(f"predict --data={named(value)}", "flag", words, make=made)


def of_folders() -> Iterator[Case]:
    """Yield folders that hold no run, or a damaged one."""
    for value in ("missing", "full", "file", "fifo", "loop", "", "a\0b"):
        words = ("predict", value, *BASE[2:], *SITE)
        yield Case(f"predict by {named(value)}", "flag", words, make=made)
    for name, change in (
        ("nothing", lambda whole: b""),
        ("half", lambda whole: whole[: len(whole) // 2]),
        ("a bit", lambda whole: whole[:500] + bytes([whole[500] ^ 1]) + whole[501:]),
        ("code", lambda whole: pickle.dumps(Evil())),
        ("text", lambda whole: b"hello\n"),
    ):

        def make(folder: Path, change: Callable[[bytes], bytes] = change) -> None:
            made(folder, content=change(fitted()))

        told = ("checkpoint.safetensors",)
        yield Case(f"predict by {name}", "flag", (*BASE, *SITE), (REFUSED,), told, make)


def cases() -> Iterator[Case]:
    """Yield all that is about predictions."""
    for part in (of_flags, of_tables, of_folders):
        yield from part()
