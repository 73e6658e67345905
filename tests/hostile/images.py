"""Hostile files of images: arrays that lack, lie, or are no arrays."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hostile.case import DONE, OUT, Case
from hostile.files import Evil
from hostile.flags import EITHER, LITTLE, SMALL, fill, twin
from hypothesis import strategies as st

ROWS = 12
LINE = f"run fedavg --data npz:t.npz --partition iid --net softmax --clients 2 {SMALL} {LITTLE}"
LINE = f"{LINE} --out {OUT}"
PLAIN = twin(LINE.replace("t.npz", "plain.npz"))
Change = Callable[[Any], Any]


@cache
def arrays() -> dict[str, Any]:
    """Return the arrays of a file that is read."""
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 6, 6), dtype=np.uint8)
    return {
        "images": pixels,
        "labels": np.arange(ROWS) % 3,
        "is_test": np.arange(ROWS) >= 8,
        "classes": np.array(["ant", "bee", "cat"]),
        "writer": np.array(["jo", "al"])[np.arange(ROWS) % 2],
    }


# What may be wrong with any of three arrays, and whether its name must be told.
CHANGES: tuple[tuple[Change, bool], ...] = (
    (lambda v: None, True),
    (lambda v: np.zeros(0), False),
    (lambda v: np.array(3), True),
    (lambda v: np.array([None] * ROWS), False),
    (lambda v: v.astype(complex), True),
    (lambda v: v.astype(str), True),
    (lambda v: v.astype(bytes), True),
    (lambda v: np.zeros(ROWS, "datetime64[s]"), True),
    (lambda v: np.zeros(ROWS, "timedelta64[s]"), True),
    (lambda v: np.zeros(ROWS, [("a", int), ("b", float)]), True),
    (lambda v: v[:-1], False),
    (lambda v: np.concatenate([v, v[:1]]), False),
    (lambda v: v[..., None, None], True),
)
NO_ROWS = {
    "labels": np.zeros(0, np.int64),
    "is_test": np.zeros(0, bool),
    "writer": np.zeros(0, str),
}
# What else is refused: arrays that are replaced, and a word that must be told.
BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"images": np.zeros((0, 6, 6), np.uint8), **NO_ROWS}, ""),
    ({"images": np.zeros((ROWS, 0, 6), np.uint8)}, "images"),
    ({"images": np.zeros((ROWS, 6, 6, 4), np.uint8)}, "images"),
    ({"labels": np.full(ROWS, np.nan)}, "labels"),
    ({"labels": np.eye(3)[np.arange(ROWS) % 3]}, "labels"),
    ({"labels": np.arange(ROWS)[:, None] % 3}, "labels"),
    ({"is_test": np.array([8, 9, 10, 11])}, "is_test"),
    ({"classes": np.array(["ant", "bee"])}, ""),
    ({"classes": np.array([], str)}, ""),
    ({"classes": np.array(["ant", "", "cat"])}, "classes"),
    ({"classes": np.array([["ant", "bee", "cat"]])}, "classes"),
    ({"classes": np.array(["ant", None, 3], object)}, ""),
    ({"classes": np.array([0.0, np.nan, 2.0])}, "classes"),
    ({"images": None, "jpeg": np.zeros(0, np.uint8), "offsets": np.zeros(13, int)}, "JPEG"),
    ({"images": None, "jpeg": np.zeros(120, np.uint8), "offsets": np.arange(13) - 20}, ""),
)
QUESTIONS = """--target=color>color --target=labels>labels_labels --client-column=nobody>nobody
--client-column=images>images --client-column=classes>classes --client-column=labels.npy>labels.npy
--features=images>features --likelihood=categorical>likelihood --missing=drop>missing
--partition=groups>groups --partition=groups:writer>groups --partition=slices:4>4
--partition=drift>drift --clients=9>9 --per-class=0>--per-class --net=cnn-pfedmb>cnn-pfedmb
--net=resnet21>resnet21 --server-data=npz:t.npz+npz:t.npz>"""
GOOD: tuple[dict[str, Any], ...] = (  # of the same meaning
    *({"labels": (np.arange(ROWS) % 3).astype(kind)} for kind in (np.uint8, np.int8, ">i8")),
    {"labels": np.repeat(np.arange(ROWS) % 3, 2)[::2]},
    {"is_test": (np.arange(ROWS) >= 8).astype(np.uint8)},
    {"images": arrays()["images"][..., None]},
    {"images": np.asfortranarray(arrays()["images"])},
    {"classes": np.array([b"ant", b"bee", b"cat"])},
    {"classes": np.array([7, 8, 9])},
    {"other": np.arange(5), "more": np.array("text")},
    {"other": np.zeros((0, 5))},
)


def saved(**changes: Any) -> bytes:
    """Return a file with other arrays, also those that only a pickle can hold; None lacks."""
    out = io.BytesIO()
    np.savez(out, **{n: v for n, v in (arrays() | changes).items() if v is not None})
    return out.getvalue()


def npy(shape: tuple[int, ...], kind: str = "|u1", body: bytes = b"") -> bytes:
    """Return a file of one array whose head may lie."""
    head = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    head = head.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode("latin-1") + body


def zipped(**files: bytes) -> bytes:
    """Return a zip file; without names of its own it has those of a file that is read."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, body in files.items():
            file.writestr(name if "." in name or "/" in name else f"{name}.npy", body)
    return out.getvalue()


def lying(**heads: bytes) -> bytes:
    """Return a file some of whose arrays are replaced byte by byte."""
    with zipfile.ZipFile(io.BytesIO(saved())) as file:
        return zipped(**{name[:-4]: file.read(name) for name in file.namelist()} | heads)


FILES: tuple[Callable[[], bytes], ...] = (
    *(lambda raw=raw: raw for raw in (b"", b"images", b"\0", zipped())),
    lambda: zipped(images=b"text", labels=b"text"),
    lambda: zipped(**{"read.me": b"text"}),
    lambda: zipped(**{"images/": b"", "labels/": b""}),
    lambda: zipped(**{"t.npz": saved()}),
    lambda: npy((ROWS, 6, 6), body=bytes(ROWS * 36)),
    lambda: npy((10**12,)),
    lambda: pickle.dumps(Evil()),
    lambda: lying(images=pickle.dumps(Evil())),
    lambda: saved(images=np.array([Evil()] * ROWS)),
    *(
        lambda shape=shape: lying(images=npy(shape))
        for shape in ((10**12, 6, 6), (2**62, 6, 6), (-1, 6, 6), (1,) * 50)
    ),
    lambda: lying(labels=npy((10**12,), "<i8")),
    lambda: lying(classes=npy((10**12,), "<U3")),
    lambda: lying(is_test=npy((10**12,), "|b1")),
    lambda: lying(images=npy((ROWS, 6, 6), body=bytes(5))),
    lambda: lying(images=b"\x93NUMPY\x01\x00\xff\xff{"),
    lambda: lying(images=npy((ROWS, 6, 6)).replace(b"'|u1'", b"open('written','w')")),
    lambda: lying(images=b"\x93NUMPY\x09\x00" + npy((ROWS, 6, 6))[8:]),
    *(lambda kind=kind: lying(images=npy((ROWS, 6, 6), kind)) for kind in ("|q9", "|V1000000")),
    lambda: lying(images=npy((2**29, 4, 8), body=bytes(2**26))),  # a bomb of 16 GiB
)


@st.composite
def images(draw: Callable[..., Any]) -> Case:
    """Draw a file, or a question that it cannot answer."""
    kind = draw(st.sampled_from(["change", "bad", "good", "file", "cut", "question"]))
    more: tuple[str, ...] = ()
    if kind == "good":

        def both(folder: Path, changes: dict[str, Any]) -> None:
            (folder / "t.npz").write_bytes(saved(**changes))
            (folder / "plain.npz").write_bytes(saved())

        changes = draw(st.sampled_from(GOOD))
        return fill(LINE, "", (DONE,), make=lambda folder: both(folder, changes), like=PLAIN)
    if kind == "question":
        question, _, told = draw(st.sampled_from(QUESTIONS.split())).partition(">")
        line, content, more = f"{LINE} {question}", saved(), (told,)
    elif kind == "change":
        name = draw(st.sampled_from(["images", "labels", "is_test"]))
        change, named = draw(st.sampled_from(CHANGES))
        line, content = LINE, saved(**{name: change(arrays()[name])})
        more = (name,) if named else ()
    elif kind == "bad":
        changes, told = draw(st.sampled_from(BAD))
        line, content, more = LINE, saved(**changes), (told,)
    elif kind == "file":
        line, content, more = LINE, draw(st.sampled_from(FILES))(), ("t.npz",)
    else:  # cut somewhere, or a byte is another; it may lie where nobody looks
        whole = saved()
        at = draw(st.integers(0, len(whole) - 1))
        spoilt = whole[:at], whole[at:], whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :]
        content = draw(st.sampled_from(spoilt))
        wanted = EITHER if content == whole or len(content) == len(whole) else EITHER[1:]
        return fill(LINE, "", wanted, make=lambda folder: (folder / "t.npz").write_bytes(content))
    return fill(line, make=lambda folder: (folder / "t.npz").write_bytes(content)).telling(*more)
