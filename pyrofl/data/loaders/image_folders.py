"""SUN397 and CINIC-10, from their folders of images."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch

from pyrofl.data.federation import Dataset
from pyrofl.data.loaders.images import Bytes, dataset_of_pixels
from pyrofl.data.tables.wording import file_error, listed

SUN_SIZE = 64  # pixels, as in pFedVEM
SUN_IMAGES = 100  # of each class, as in pFedVEM: every class has at least as many
SUN_TRAINING = 80  # of them
SUN_CLASSES = 50  # of each superclass, as in pFedVEM
SUPERCLASSES = ("indoor", "outdoor, natural", "outdoor, man-made")
SHEET = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


def cinic10(folder: Path) -> Dataset:
    """Return CINIC-10: x [N, 3, 32, 32], standardized; folder `valid` is not used."""
    root = folder / "CINIC-10"
    names = tuple(sorted(path.name for path in (root / "train").glob("*") if path.is_dir()))
    if not names:
        raise file_error(
            root / "train", "has no folder of a class", "CINIC-10's train and test there"
        )
    paths, labels, is_test = list[Path](), list[int](), list[bool]()
    for part in ("train", "test"):
        of = [sorted((root / part / name).glob("*.png")) for name in names]
        numbers = [len(files) for files in of]
        if min(numbers) != max(numbers) or not min(numbers):
            counts = listed([f"{n} {m:,}" for n, m in zip(names, numbers, strict=True)], len(names))
            raise file_error(root / part, f"is incomplete: {counts}", "equal numbers of .png files")
        for label, files in enumerate(of):
            paths += files
            labels += [label] * len(files)
            is_test += [part == "test"] * len(files)
    images = np.stack([read_rgb(path, (32, 32)) for path in paths])
    return dataset_of_pixels("cinic10", images, np.array(labels), np.array(is_test), names)


def sun397(folder: Path) -> Dataset:
    """Return the first 100 images of all classes: x [N, 3, 64, 64] in [0, 1]."""
    names = _sun_classes(folder / "SUN397")
    return _scenes("sun397", folder / "SUN397", names)


def sun397_coarse(folder: Path) -> Dataset:
    """Return SUN397 as in pFedVEM: y is one of three superclasses, of which each has 50 classes.

    Classes of several superclasses are left out.
    """
    root = folder / "SUN397"
    names, of = _sun_classes(root), _sun_superclasses(root)
    chosen = [
        (name, k)
        for k in range(len(SUPERCLASSES))
        for name in [n for n in names if of.get(n) == (k,)][:SUN_CLASSES]
    ]
    if missing := [n for k, n in enumerate(SUPERCLASSES) if k not in {c for _, c in chosen}]:
        raise file_error(root / "ClassName.txt", f"has no class of {missing[0]}", "all of SUN397")
    fine = _scenes("sun397-coarse", root, [name for name, _ in chosen])
    coarse = torch.tensor([k for _, k in chosen])
    return replace(fine, y=coarse[fine.y], types=fine.y, classes=SUPERCLASSES)


def _sun_classes(root: Path) -> list[str]:
    """Return names of the classes, such as a/abbey, from ClassName.txt."""
    path = root / "ClassName.txt"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; expected the extracted SUN397.tar.gz there, or another "
            "data_dir, which has its folder SUN397"
        )
    names = [line.strip().strip("/") for line in path.read_text("utf-8", "replace").splitlines()]
    return [name for name in names if name]


def _scenes(name: str, root: Path, names: Sequence[str]) -> Dataset:
    """Load the first images of each class, sorted by file name; the last fifth is for testing."""
    paths = list[Path]()
    for scene in names:
        files = sorted((root / scene).glob("*.jpg"))
        if len(files) < SUN_IMAGES:
            number = f"has {len(files)} .jpg files"
            raise file_error(
                root / scene, number, f"at least {SUN_IMAGES}: extract the archive again"
            )
        paths += files[:SUN_IMAGES]
    images = np.stack([read_rgb(path, (SUN_SIZE, SUN_SIZE)) for path in paths])
    labels = np.arange(len(names)).repeat(SUN_IMAGES)
    is_test = np.arange(len(paths)) % SUN_IMAGES >= SUN_TRAINING
    classes = tuple(scene.partition("/")[2] for scene in names)
    return dataset_of_pixels(name, images, labels, is_test, classes)


def _sun_superclasses(root: Path) -> dict[str, tuple[int, ...]]:
    """Return the superclasses of each class, from the first sheet of three_levels.xlsx."""
    path = root / "hierarchy_three_levels" / "three_levels.xlsx"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; expected the extracted hierarchy_three_levels.zip of SUN397 "
            "there"
        )
    rows = list(_sheet_rows(path))
    heads = [row for row in rows if {"category", *SUPERCLASSES} <= set(row.values())]
    if not heads:
        columns = ", ".join(["category", *SUPERCLASSES])
        raise file_error(path, "has no row of column names in its first sheet", columns)
    column = {name: letter for letter, name in heads[0].items()}
    return {
        row[column["category"]].strip("'/ "): tuple(
            k for k, name in enumerate(SUPERCLASSES) if row.get(column[name]) in ("1", "1.0")
        )
        for row in rows[rows.index(heads[0]) + 1 :]
        if column["category"] in row
    }


def _sheet_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of the first sheet of an .xlsx file: letters of a column -> text."""
    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
            texts = list[str]()
            if "xl/sharedStrings.xml" in names:
                shared = ElementTree.fromstring(archive.read("xl/sharedStrings.xml"))
                texts = ["".join(one.itertext()) for one in shared.iter(f"{SHEET}si")]
            sheet = ElementTree.fromstring(archive.read("xl/worksheets/sheet1.xml"))
        for row in sheet.iter(f"{SHEET}row"):
            cells = dict[str, str]()
            for cell in row.iter(f"{SHEET}c"):
                kind = "is" if cell.get("t") == "inlineStr" else "v"
                text = "".join(t for e in cell.iter(SHEET + kind) for t in e.itertext())
                if text:
                    value = texts[int(text)] if cell.get("t") == "s" else text
                    cells[re.sub(r"\d", "", cell.get("r", ""))] = value.strip()
            yield cells
    except (BadZipFile, ElementTree.ParseError, KeyError, IndexError, ValueError, OSError) as error:
        raise file_error(path, f"cannot be read ({error})", "the .xlsx file of SUN397") from error


def read_rgb(path: Path, size: tuple[int, int], *, crop: bool = True) -> Bytes:
    """Decode an image to RGB [H, W, 3]; crop its center to a square before resizing it."""
    from PIL import Image, ImageOps

    if not path.is_file():
        raise file_error(path, "does not exist", "the image there: copy or extract all files again")
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except Exception as error:  # what is damaged in an image fails in many ways
        problem = f"cannot be decoded ({type(error).__name__})"
        raise file_error(path, problem, "a complete image: copy or extract it again") from error
    if image.size == size:
        return np.asarray(image)
    bilinear = Image.Resampling.BILINEAR
    fitted = ImageOps.fit(image, size, bilinear) if crop else image.resize(size, bilinear)
    return np.asarray(fitted)
