"""Loader of images in .npz files, which validates array headers before reading."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray

from pyrofl.arguments import checked
from pyrofl.data.federation import Dataset
from pyrofl.data.loaders.csv_files import codes_of
from pyrofl.data.loaders.images import Bytes, Shape, dataset_of_pixels
from pyrofl.data.tables.columns import is_missing
from pyrofl.data.tables.wording import refuse_no_file
from pyrofl.tensors import machine_memory

MAX_CLASSES = 2**16  # without names of classes
BYTES_PER_PIXEL = 6  # bytes of memory per pixel during conversion to floats
KINDS = {  # of arrays, by NumPy's kind codes
    "B": "uint8",
    "iu": "whole numbers",
    "biu": "True or False",
    "iuSU": "texts or whole numbers",
}


class Header(NamedTuple):
    """Shape and type that an array's header declares, and its stored number of bytes."""

    shape: Shape
    dtype: np.dtype[Any]
    stored: int


@checked
def load_npz(path: str, *, target: str | None = None, client_column: str | None = None) -> Dataset:
    """Load images from an .npz file; standardize pixels if it is called cifar10 or cifar100.

    Its arrays are `images` (uint8 [N, H, W] or [N, H, W, 3]) or `jpeg` with `offsets` (all files
    one after the other; image i is jpeg[offsets[i]:offsets[i + 1]]), `labels` [N], `is_test` bool
    [N] and, if labels have names, `classes`: name k is that of label k. Without names, the classes
    are the labels that occur. A target T predicts `T_labels` with names `T_classes`
    instead (as "coarse" does for CIFAR-100); partitions still use `labels`. Other arrays are
    ignored.
    """
    arrays = Arrays(path)
    rows, prefix = _count(arrays), f"{target}_" if target else ""
    labels, classes = _labels(arrays, prefix, rows)
    is_test = arrays.read("is_test", "biu", rows)
    if not np.isin(is_test, (0, 1)).all():
        arrays.refuse("is_test", f"has numbers up to {is_test.max()}", "True or False")
    if is_test.all():
        arrays.refuse("is_test", "marks all images", "some to train on")
    types = torch.from_numpy(_labels(arrays, "", rows)[0]) if target else None
    groups = arrays.words(client_column, rows) if client_column else []
    for place, word in enumerate(groups):
        if is_missing(word):
            arrays.refuse(
                str(client_column), f"has {word!r} for image {place}", "a client for each image"
            )
    codes, names = codes_of(groups)
    images = _decoded(arrays) if "jpeg" in arrays.headers else arrays.read("images", "B")
    return replace(
        dataset_of_pixels(Path(path).stem, images, labels, is_test.astype(np.bool_), classes),
        types=types,
        groups={client_column: torch.from_numpy(codes)} if client_column else {},
        group_names={client_column: names} if client_column else {},
    )


class Arrays:
    """Reader of the arrays in an .npz file, which reads headers first and values on request."""

    def __init__(self, path: str) -> None:
        """Read the headers of all arrays; raise ValueError if the file is not a valid .npz file."""
        refuse_no_file(path)
        self.path = path
        self.headers: dict[str, Header] = {}
        with self._open() as archive:
            for info in archive.infolist():
                if info.filename.endswith(".npy"):
                    with archive.open(info) as member:
                        if (version := npy.read_magic(member)) != (1, 0):  # records, long headers
                            raise ValueError(f"it has format {version}; expected (1, 0)")
                        shape, _, dtype = npy.read_array_header_1_0(member)
                        header = Header(shape, dtype, info.file_size - member.tell())
                    self.headers[info.filename.removesuffix(".npy")] = header

    @contextmanager
    def _open(self) -> Iterator[ZipFile]:
        try:
            with ZipFile(self.path) as archive:
                yield archive
        except Exception as error:  # what is damaged in a zip file or a header fails in many ways
            why = str(error) or type(error).__name__
            raise ValueError(f"{self.path} cannot be read as .npz: {why}") from error

    def refuse(self, name: str, actual: str, expected: str) -> None:
        """Raise ValueError that states an invalid property of an array, and the expected one."""
        raise ValueError(f"{self.path}: {name} {actual}; expected {expected}")

    def header(self, name: str) -> Header:
        """Return the header of an array; raise ValueError if it is missing or its size is wrong."""
        if name not in self.headers:
            names = ", ".join(self.headers)
            raise ValueError(f"{self.path} has no array {name}; expected it among {names}")
        array_header = self.headers[name]
        size = prod(array_header.shape) * array_header.dtype.itemsize
        if not array_header.dtype.hasobject and (
            size != array_header.stored or min(array_header.shape, default=0) < 0
        ):
            claimed = f"has shape {list(array_header.shape)} and {array_header.stored} bytes"
            self.refuse(name, claimed, f"{size} bytes for that shape")
        return array_header

    def read(self, name: str, kinds: str, shape: Shape | None = None) -> NDArray[Any]:
        """Read an array of an allowed type; raise ValueError if it is unsuitable or too large."""
        header = self.header(name)
        if not {header.dtype.kind, header.dtype.char} & set(kinds):
            self.refuse(name, f"is an array of {header.dtype}", KINDS[kinds])
        if shape is not None and shape != header.shape:
            shape_text = f"has shape {list(header.shape)}"
            self.refuse(name, shape_text, f"{list(shape)}, one value per image")
        self.fits(name, header.stored * (BYTES_PER_PIXEL if kinds == "B" else 1))
        with self._open() as archive, archive.open(f"{name}.npy") as member:
            return npy.read_array(member, allow_pickle=False)

    def fits(self, name: str, size: int) -> None:
        """Raise ValueError if an array of this size would need over half of the memory."""
        if 2 * size > machine_memory():
            most = f"{machine_memory() / 2**31:.3g} GiB, half of this machine's memory"
            self.refuse(name, f"takes {size / 2**30:.3g} GiB once it is read", f"at most {most}")

    def words(self, name: str, shape: Shape) -> list[str]:
        """Return an array of text or integers as a list of strings."""
        array = self.read(name, "iuSU", shape)
        if array.dtype.kind == "S":
            array = np.char.decode(array, "utf-8", "replace")
        return [str(word) for word in array.tolist()]


def _count(arrays: Arrays) -> Shape:
    """Return the number of images as a tuple (N,); raise ValueError if their array is invalid."""
    if "jpeg" in arrays.headers:
        shape = arrays.header("offsets").shape
        if len(shape) != 1 or shape[0] < 2:
            arrays.refuse("offsets", f"has shape {list(shape)}", "[N + 1], the start of each image")
        return (shape[0] - 1,)
    shape, dtype, _ = arrays.header("images")
    gray, color = len(shape) == 3, len(shape) == 4 and shape[3] in (1, 3)
    if dtype != np.uint8 or not (gray or color) or not min(shape):
        expected = "uint8 (0 to 255) [N, H, W] or [N, H, W, 3], N of at least 1"
        arrays.refuse("images", f"are {dtype} {list(shape)}", expected)
    return shape[:1]


def _labels(arrays: Arrays, prefix: str, rows: Shape) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return class indices [N] and class names, which are the labels if the file has no names."""
    label, names = f"{prefix}labels", f"{prefix}classes"
    labels, has_names = arrays.read(label, "iu", rows), names in arrays.headers
    low, high = int(labels.min()), int(labels.max())
    shape = arrays.header(names).shape if has_names else (MAX_CLASSES,)
    if len(shape) != 1:
        arrays.refuse(names, f"has shape {list(shape)}", "[K], a name for each class")
    (count,) = shape
    if low < 0 or high >= count:
        why = f"as {names} has {count} names" if has_names else f"as there is no array {names}"
        arrays.refuse(label, f"run from {low} to {high}", f"0 to {count - 1}, {why}")
    if not has_names:  # only labels that some image has
        unique_labels, codes = np.unique(labels, return_inverse=True)
        return codes.astype(np.int64), tuple(map(str, unique_labels.tolist()))
    classes = arrays.words(names, shape)
    if len(set(classes)) < len(classes):
        arrays.refuse(names, "has a name twice", "distinct names")
    return labels.astype(np.int64), tuple(classes)


def _decoded(arrays: Arrays) -> Bytes:
    """Decode concatenated JPEG files to RGB [N, H, W, 3]."""
    content, ends = arrays.read("jpeg", "B").ravel(), arrays.read("offsets", "iu").tolist()
    if ends[0] < 0 or ends[-1] > len(content) or sorted(ends) != ends:
        expected_text = f"numbers that rise from 0 to {len(content)}, the bytes of jpeg"
        arrays.refuse("offsets", f"run from {ends[0]} to {ends[-1]}", expected_text)
    pieces = [content[start:end] for start, end in pairwise(ends)]
    first = _rgb(arrays, 0, pieces[0])
    arrays.fits("jpeg", BYTES_PER_PIXEL * len(pieces) * first.size)
    images = np.empty((len(pieces), *first.shape), dtype=np.uint8)
    for place, piece in enumerate(pieces):
        image = _rgb(arrays, place, piece)
        if image.shape != first.shape:
            message = f"has images of {list(first.shape)} and, at {place}, {list(image.shape)}"
            arrays.refuse("jpeg", message, "one size")
        images[place] = image
    return images


def _rgb(arrays: Arrays, place: int, content: Bytes) -> Bytes:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content.tobytes())) as file:
            return np.asarray(file.convert("RGB"))
    except Exception as error:  # what is damaged in an image fails in many ways
        message = f"{arrays.path}: image {place} cannot be decoded ({type(error).__name__})"
        raise ValueError(f"{message}; expected a JPEG file") from error
