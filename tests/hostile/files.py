"""Hostile folders of runs, and tables for `pyrofl predict`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hostile.case import DONE, Case
from hostile.flags import fill, places
from hypothesis import strategies as st

LINE = "predict run --data new.csv --out out.csv"
TABLE = "dose,age,site\n1,2,A\n3,4,B\n"
TABLES = {  # and what is told of them
    "": "new.csv",
    "age,dose\n": "new.csv",
    "age\n1\n": "dose",
    "Age,dose\n1,2\n": "age",
    "age,dose\n1,2\n3,two\n5,6\n": "dose",
    "age,dose\n1,\n": "dose",
    "age,dose\n1,nan\n2,3\n": "dose",
    "age,dose\n1,2,3\n": "line 2",
    "age;dose\n1;2\n": "';'",
    "age,age,dose\n1,2,3\n": "age",
    "age,dose\n1e400,2\n1,2\n": "age",
    "a\0e,dose\n1,2\n": "age",
}
RIGHT = ("--client=A", "--client-column site", "--new-client", "--new-client --model global")
RIGHT += ("--client=A --unadapted --draws 2",)


class Evil:
    """What would run code, if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Write a file."""
        return open, ("written", "w")


@cache
def fitted() -> bytes:
    """Return the file of a run on two sites."""
    import pyrofl
    from pyrofl.models import fedavg

    x = np.random.default_rng(0).normal(size=(8, 2))
    sites = {name: (x, np.arange(8) % 2) for name in "AB"}
    data = pyrofl.Federation.from_arrays(sites, classes=("no", "yes"), features=("age", "dose"))
    method = fedavg.build(pyrofl.nets.build("softmax", (2,), 2), epochs=1)
    with TemporaryDirectory() as folder:
        pyrofl.fit(method, data, 1, progress=False).save(folder)
        return Path(folder, "checkpoint.safetensors").read_bytes()


def run_folder(folder: Path, table: str = TABLE, content: bytes | None = None) -> None:
    """Make a run's folder, and tables."""
    places(folder)
    (folder / "run").mkdir()
    made = fitted() if content is None else content
    (folder / "run" / "checkpoint.safetensors").write_bytes(made)
    (folder / "new.csv").write_text(table)
    (folder / "own.csv").write_text("age,dose,y\n1,2,no\n3,4,yes\n5,6,no\n")


@st.composite
def runs(draw: Callable[..., Any]) -> Case:
    """Draw a table that is not as that of training, a damaged run, or a right question."""
    kind = draw(st.sampled_from(["table", "damage", "right"]))
    if kind == "table":
        text = draw(st.sampled_from(sorted(TABLES)))
        return fill(f"{LINE} --client=A", make=partial(run_folder, table=text)).telling(
            TABLES[text]
        )
    if kind == "right":
        line = f"{LINE} {draw(st.sampled_from(RIGHT))}"
        return fill(line, "", (DONE,), make=run_folder, writes=False)
    whole = fitted()
    at = draw(st.integers(0, len(whole) - 1))
    spoilt = (
        whole[:at],
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
        pickle.dumps(Evil()),
        b"hello\n",
    )
    content = draw(st.sampled_from(spoilt))
    make = partial(run_folder, content=content)
    return fill(f"{LINE} --client=A", make=make).telling("checkpoint.safetensors")
