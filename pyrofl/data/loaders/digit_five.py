"""Digit-Five: five data sets of digits as domains, from the .mat files of Peng et al. (2019)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pyrofl.data.federation import Dataset
from pyrofl.data.tables.wording import file_error

DIGIT_SIZE = 32  # pixels


class DigitFile(NamedTuple):
    """Where a domain of Digit-Five has its images and labels, for training and testing."""

    domain: str
    files: tuple[str, str]
    images: tuple[str, str]
    labels: tuple[str, str]
    axes: tuple[int, ...]  # of the images, in the order rows, channels, height, width
    largest: int = 255  # value of a pixel


def _of_one(domain: str, file: str, images: str, labels: str) -> DigitFile:
    """Return a domain with its training and test rows in one file; {} stands for the part."""
    names = [(text.format("train"), text.format("test")) for text in (images, labels)]
    return DigitFile(domain, (file, file), names[0], names[1], (0, 3, 1, 2))


DIGIT_FILES = (
    _of_one("mnist", "mnist_data.mat", "{}_28", "label_{}"),
    _of_one("mnist_m", "mnistm_with_label.mat", "{}", "label_{}"),
    DigitFile(
        "svhn",
        ("svhn_train_32x32.mat", "svhn_test_32x32.mat"),
        ("X", "X"),
        ("y", "y"),
        (3, 2, 0, 1),
    ),
    DigitFile(
        "usps",
        ("usps_28x28.mat", "usps_28x28.mat"),
        ("dataset", "dataset"),
        ("dataset", "dataset"),
        (0, 1, 2, 3),
        1,
    ),
    _of_one("synthetic_digits", "syn_number.mat", "{}_data", "{}_label"),
)


def digit_five(folder: Path) -> Dataset:
    """Return Digit-Five: x [N, 3, 32, 32] in [0, 1], ten classes, group column domain.

    Partitions use pairs of domain and digit, so that clients of one domain are tested on it.
    """
    x, y, domains, is_test = [], [], [], []
    for code, domain in enumerate(DIGIT_FILES):
        for part in range(2):
            images, labels = _digits(folder / "Digit-Five", domain, part)
            size = (DIGIT_SIZE, DIGIT_SIZE)
            if tuple(images.shape[2:]) != size:
                images = functional.interpolate(images, size, mode="bilinear", antialias=True)
            x.append(images.expand(-1, 3, *size))
            y.append(labels)
            domains.append(torch.full_like(labels, code))
            is_test.append(torch.full(labels.shape, bool(part)))
    digits, codes = torch.cat(y), torch.cat(domains)
    return Dataset(
        "digit_five",
        torch.cat(x),
        digits,
        torch.cat(is_test),
        tuple("0123456789"),
        types=10 * codes + digits,
        groups={"domain": codes},
        group_names={"domain": tuple(one.domain for one in DIGIT_FILES)},
    )


def _digits(folder: Path, domain: DigitFile, part: int) -> tuple[Tensor, Tensor]:
    """Return images [n, C, H, W] in [0, 1] and digits [n] of a domain."""
    path = folder / domain.files[part]
    names = domain.images[part], domain.labels[part]
    arrays = _mat(path, names)
    if domain.domain == "usps":
        try:
            arrays = tuple(np.asarray(a) for a in arrays[0][part])
            pixels, labels = arrays
        except (TypeError, ValueError, IndexError) as error:
            raise file_error(path, "has another dataset", "[[images, labels]] twice") from error
    else:
        pixels, labels = arrays
    if pixels.ndim != 4 or pixels.dtype.kind not in "uif" or labels.dtype.kind not in "uif":
        raise file_error(
            path, f"{names[0]} has shape {list(pixels.shape)}", "images with four axes"
        )
    x = torch.from_numpy(np.ascontiguousarray(pixels.transpose(domain.axes), dtype=np.float32))
    y = _digit_labels(path, labels)
    if len(x) != len(y) or not len(x) or x.shape[1] not in (1, 3):
        numbers = f"has images {list(x.shape)} and {len(y)} labels"
        raise file_error(path, numbers, "one label per image, and one or three channels")
    if not ((x >= 0) & (x <= domain.largest)).all():
        levels = f"has pixels from {x.min():.3g} to {x.max():.3g}"
        raise file_error(path, levels, f"0 to {domain.largest}")
    return x / domain.largest, y


def _digit_labels(path: Path, labels: NDArray[Any]) -> Tensor:
    """Return digits [n] from one-hot rows [n, 10] or a column [n, 1], where 10 stands for 0."""
    one_hot = labels.ndim == 2 and labels.shape[1] == 10
    if one_hot and not ((labels == 0) | (labels == 1)).all():
        raise file_error(path, "has labels that are not one-hot", "rows of nine 0 and one 1")
    digits = labels.argmax(1) if one_hot else labels.reshape(-1)
    if (one_hot and (labels.sum(1) != 1).any()) or not np.isin(digits, range(11)).all():
        raise file_error(path, "has labels that are no digits", "0 to 9, or 10 for 0")
    return torch.from_numpy(digits.astype(np.int64) % 10)


def _mat(path: Path, names: Sequence[str]) -> tuple[NDArray[Any], ...]:
    """Read arrays of a .mat file."""
    from scipy.io import loadmat

    if not path.is_file():
        files = sorted({file for domain in DIGIT_FILES for file in domain.files})
        raise ValueError(
            f"{path} does not exist; expected the files of Digit-Five there ({', '.join(files)}), "
            "or another data_dir, which has their folder Digit-Five"
        )
    try:
        content = loadmat(path, variable_names=list(names))
    except Exception as error:  # what is damaged in such a file fails in many ways
        problem = f"cannot be read as .mat ({' '.join(str(error).split()) or type(error).__name__})"
        raise file_error(path, problem, "a complete file: copy it again") from error
    for name in names:
        if name not in content:
            raise file_error(path, f"has no array {name}", f"arrays {' and '.join(names)}")
    return tuple(content[name] for name in names)
