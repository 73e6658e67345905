"""Hostile files of images: arrays that lack, lie, or are no arrays."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hostile.case import DONE, LIKE, OUT, REFUSED, Case
from hostile.flags import EITHER, LITTLE, RUN, SMALL

ROWS = 12
HOW = ("--partition", "iid", "--net", "softmax", *SMALL, *LITTLE)


def arrays(**changes: Any) -> dict[str, Any]:
    """Return the arrays of a file that is read, but for some; None leaves one out."""
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 6, 6), dtype=np.uint8)
    labels = np.arange(ROWS) % 3
    plain = {
        "images": pixels,
        "labels": labels,
        "is_test": np.arange(ROWS) >= 8,
        "classes": np.array(["ant", "bee", "cat"]),
        "writer": np.array(["jo", "al"])[np.arange(ROWS) % 2],
    }
    made = {name: change(plain) if callable(change) else change for name, change in changes.items()}
    return {name: value for name, value in (plain | made).items() if value is not None}


def saved(path: Path, given: dict[str, Any], compressed: bool = False) -> None:
    """Write arrays, also those that only a pickle can hold."""
    (np.savez_compressed if compressed else np.savez)(path, **given)


def _typed(name: str, kind: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda plain: plain[name].astype(kind)


# name -> arrays that are changed, and words that must be told beside the file.
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {}
for _name in ("images", "labels", "is_test"):
    BAD |= {
        f"no {_name}": ({_name: None}, (_name,)),
        f"{_name} empty": ({_name: np.zeros(0)}, ()),
        f"{_name} one number": ({_name: np.array(3)}, (_name,)),
        f"{_name} objects": ({_name: np.array([None] * ROWS)}, ()),
        f"{_name} complex": ({_name: _typed(_name, complex)}, (_name,)),
        f"{_name} text": ({_name: _typed(_name, str)}, (_name,)),
        f"{_name} bytes": ({_name: _typed(_name, bytes)}, (_name,)),
        f"{_name} dates": ({_name: np.zeros(ROWS, "datetime64[s]")}, (_name,)),
        f"{_name} spans": ({_name: np.zeros(ROWS, "timedelta64[s]")}, (_name,)),
        f"{_name} records": ({_name: np.zeros(ROWS, [("a", int), ("b", float)])}, (_name,)),
        f"{_name} one short": ({_name: lambda p, n=_name: p[n][:-1]}, ()),
        f"{_name} one long": ({_name: lambda p, n=_name: np.concatenate([p[n], p[n][:1]])}, ()),
        f"{_name} with an axis more": ({_name: lambda p, n=_name: p[n][..., None, None]}, (_name,)),
        f"{_name} capitals": ({_name.upper(): lambda p, n=_name: p[n], _name: None}, (_name,)),
    }
# What else is refused, and how, is in tests/data.
BAD |= {
    "no rows": (
        {
            "images": np.zeros((0, 6, 6), np.uint8),
            "labels": np.zeros(0, np.int64),
            "is_test": np.zeros(0, bool),
            "writer": np.zeros(0, str),
        },
        (),
    ),
    "images of no pixels": ({"images": np.zeros((ROWS, 0, 6), np.uint8)}, ("images",)),
    "images of four channels": ({"images": np.zeros((ROWS, 6, 6, 4), np.uint8)}, ("images",)),
    "labels with nan": ({"labels": np.full(ROWS, np.nan)}, ("labels",)),
    "labels one for each class": ({"labels": lambda p: np.eye(3)[p["labels"]]}, ("labels",)),
    "labels in a column": ({"labels": lambda p: p["labels"][:, None]}, ("labels",)),
    "is_test row numbers": ({"is_test": np.array([8, 9, 10, 11])}, ("is_test",)),
    "classes too few": ({"classes": np.array(["ant", "bee"])}, ()),
    "classes empty": ({"classes": np.array([], str)}, ()),
    "classes with an empty name": ({"classes": np.array(["ant", "", "cat"])}, ("classes",)),
    "classes in a table": ({"classes": np.array([["ant", "bee", "cat"]])}, ("classes",)),
    "classes objects": ({"classes": np.array(["ant", None, 3], object)}, ()),
    "classes with nan": ({"classes": np.array([0.0, np.nan, 2.0])}, ("classes",)),
    "jpeg empty": (
        {"images": None, "jpeg": np.zeros(0, np.uint8), "offsets": np.zeros(13, int)},
        ("JPEG",),
    ),
    "jpeg with negative offsets": (
        {"images": None, "jpeg": np.zeros(120, np.uint8), "offsets": np.arange(13) - 20},
        (),
    ),
}
QUESTIONS: dict[str, tuple[str, ...]] = {
    "--target colour": ("colour",),
    "--target labels": ("labels_labels",),
    "--group nobody": ("nobody",),
    "--group images": ("images",),
    "--group classes": ("classes",),
    "--group labels.npy": ("labels.npy",),
    "--features images": ("features",),
    "--likelihood categorical": ("likelihood",),
    "--missing drop": ("missing",),
    "--partition groups": ("groups",),
    "--partition groups:writer": ("groups",),
    "--partition slices:4": ("4",),
    "--partition drift": ("drift",),
    "--clients 9": ("9",),
    "--per-class 0": ("--per-class",),
    "--net cnn-pfedmb": ("cnn-pfedmb",),
    "--net resnet21": ("resnet21",),
    "--server-data npz:t.npz+npz:t.npz": (),
}
GOOD: dict[str, dict[str, Any]] = {  # of the same meaning
    "labels uint8": {"labels": _typed("labels", np.uint8)},
    "labels int8": {"labels": _typed("labels", np.int8)},
    "labels of the other byte order": {"labels": _typed("labels", ">i8")},
    "labels every other": {"labels": lambda p: np.repeat(p["labels"], 2)[::2]},
    "is_test of noughts and ones": {"is_test": _typed("is_test", np.uint8)},
    "images with an axis for one channel": {"images": lambda p: p["images"][..., None]},
    "images in columns": {"images": lambda p: np.asfortranarray(p["images"])},
    "classes as bytes": {"classes": np.array([b"ant", b"bee", b"cat"])},
    "classes as numbers": {"classes": np.array([7, 8, 9])},
    "more arrays": {"other": np.arange(5), "more": np.array("text")},
    "a broken array that nobody reads": {"other": np.array([None])},
    "an empty array that nobody reads": {"other": np.zeros((0, 5))},
}


def npy(shape: tuple[int, ...], kind: str = "|u1", body: bytes = b"") -> bytes:
    """Return a file of one array whose head may lie."""
    head = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    head = head.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode("latin-1") + body


def zipped(path: Path, files: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> None:
    """Write a zip file."""
    with zipfile.ZipFile(path, "w", how) as file:
        for name, body in files.items():
            file.writestr(name, body)


def whole() -> bytes:
    """Return a file that is read."""
    out = io.BytesIO()
    np.savez(out, **arrays())
    return out.getvalue()


class Evil:
    """Writes a file as soon as a pickle of it is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Tell how it is made again."""
        return open, ("written", "w")


def others(**changed: bytes) -> dict[str, bytes]:
    """Return the parts of a file, some changed."""
    with zipfile.ZipFile(io.BytesIO(whole())) as file:
        found = {name: file.read(name) for name in file.namelist()}
    return found | {f"{name}.npy": body for name, body in changed.items()}


def bomb(path: Path) -> None:
    """Tell of 16 GiB of noughts, and begin with some of them."""
    part = bytes(2**24)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, body in others().items():
            if name != "images.npy":
                file.writestr(name, body)
        with file.open("images.npy", "w", force_zip64=True) as out:
            out.write(npy((2**29, 4, 8)))
            for _ in range(8):
                out.write(part)


def _raw(content: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content())


def _lying(**heads: bytes) -> Callable[[Path], None]:
    return lambda path: zipped(path, others(**heads))


def _flipped(at: float) -> bytes:
    raw = bytearray(whole())
    raw[int(at * len(raw))] ^= 0xFF
    return bytes(raw)


FILES: dict[str, Callable[[Path], object]] = {
    "empty": _raw(lambda: b""),
    "text": _raw(lambda: b"images"),
    "one NUL": _raw(lambda: b"\0"),
    "an empty zip": partial(zipped, files={}),
    "a zip of text": partial(zipped, files={"images.npy": b"text", "labels.npy": b"text"}),
    "a zip of other files": partial(zipped, files={"read.me": b"text"}),
    "a zip of folders": partial(zipped, files={"images/": b"", "labels/": b""}),
    "a zip in a zip": lambda path: zipped(path, {"t.npz": whole()}),
    "a bare array": _raw(lambda: npy((ROWS, 6, 6), body=bytes(ROWS * 36))),
    "a bare array whose head lies": _raw(lambda: npy((10**12,))),
    "a pickle": _raw(lambda: pickle.dumps({"images": 3})),
    "a pickle that writes": _raw(lambda: pickle.dumps(Evil())),
    "a pickle within": lambda path: zipped(path, others(images=pickle.dumps(Evil()))),
    "objects that write": lambda path: saved(path, arrays(images=np.array([Evil()] * ROWS))),
    "objects that write among the rest": lambda path: saved(
        path, arrays(writer=np.array([Evil()] * ROWS))
    ),
    "cut in half": _raw(lambda: whole()[: len(whole()) // 2]),
    "cut by ten bytes": _raw(lambda: whole()[:-10]),
    "the end of it": _raw(lambda: whole()[len(whole()) // 2 :]),
    "a flipped bit in the first tenth": _raw(lambda: _flipped(0.1)),
    "a flipped bit in the second tenth": _raw(lambda: _flipped(0.2)),
    "a told trillion of images": _lying(images=npy((10**12, 6, 6))),
    "a told 2**62 of images": _lying(images=npy((2**62, 6, 6))),
    "a told number of images below 0": _lying(images=npy((-1, 6, 6))),
    "a told million of axes": _lying(images=npy((1,) * 50)),
    "a told trillion of labels": _lying(labels=npy((10**12,), "<i8")),
    "a told trillion of classes": _lying(classes=npy((10**12,), "<U3")),
    "a told trillion of tests": _lying(is_test=npy((10**12,), "|b1")),
    "fewer pixels than told": _lying(images=npy((ROWS, 6, 6), body=bytes(5))),
    "a head that is no head": _lying(images=b"\x93NUMPY\x01\x00\xff\xff{"),
    "a head that is code": _lying(
        images=npy((ROWS, 6, 6)).replace(b"'|u1'", b"open('written','w')")
    ),
    "a head of another version": _lying(images=b"\x93NUMPY\x09\x00" + npy((ROWS, 6, 6))[8:]),
    "a type that is none": _lying(images=npy((ROWS, 6, 6), "|q9")),
    "a type of a megabyte": _lying(images=npy((ROWS, 6, 6), "|V1000000")),
    "a bomb": bomb,
}


def cases() -> Iterator[Case]:
    """Yield all that is about files of images."""
    words = (*RUN, "--data", "npz:t.npz", *HOW, "--out", OUT)
    for about, (changes, told) in BAD.items():

        def make(folder: Path, changes: dict[str, Any] = changes) -> None:
            saved(folder / "t.npz", arrays(**changes))

        yield Case(f"npz {about}", "npz", words, (REFUSED,), told, make)
    for about, write in FILES.items():

        def made(folder: Path, write: Callable[[Path], object] = write) -> None:
            write(folder / "t.npz")

        # A bit may flip where nobody looks.
        wanted = EITHER if "flipped" in about else (REFUSED,)
        if about == "objects that write among the rest":
            wanted = EITHER
        told = () if "flipped" in about or "rest" in about else ("t.npz",)
        yield Case(f"npz file {about}", "npz", words, wanted, told, made)
    for about, changes in GOOD.items():

        def both(folder: Path, changes: dict[str, Any] = changes) -> None:
            saved(folder / "t.npz", arrays(**changes), compressed=True)
            saved(folder / "plain.npz", arrays())

        like = (*RUN, "--data", "npz:plain.npz", *HOW, "--out", LIKE)
        wanted = EITHER if "broken" in about else (DONE,)
        yield Case(f"npz {about}", "npz", words, wanted, make=both, like=like)
    for question, told in QUESTIONS.items():

        def plain(folder: Path) -> None:
            saved(folder / "t.npz", arrays())

        asked = (*words, *question.split())
        yield Case(f"npz asked {question}", "npz", asked, told=told, make=plain)
