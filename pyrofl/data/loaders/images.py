"""Image data sets that torchvision downloads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyrofl.data.federation import Dataset

CACHE = Path("~/.cache/pyrofl")

# Channel means and deviations that pFedVEM's code normalizes by, and those of CINIC-10's authors.
_SCALING = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5074, 0.4867, 0.4411), (0.2011, 0.1987, 0.2025)),
    "cinic10": ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
}

# Superclass of each of CIFAR-100's fine classes, which are in alphabetical order.
_SUPERCLASS_OF_FINE = """
4 1 14 8 0 6 7 7 18 3 3 14 9 18 7 11 3 9 7 11 6 11 5 10 7 6 13 15 3 15 0 11 1 10 12 14 16 9 11 5
5 19 8 8 15 13 14 17 18 10 16 4 17 4 2 0 17 4 18 17 10 3 2 12 12 16 12 1 9 19 2 10 0 1 16 12 9 13 15
13 16 19 2 4 6 19 5 5 8 19 18 1 2 15 6 0 17 8 14 13
"""
_SUPERCLASSES = (
    "aquatic_mammals fish flowers food_containers fruit_and_vegetables "
    "household_electrical_devices household_furniture insects large_carnivores "
    "large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores "
    "medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1 "
    "vehicles_2"
)

Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]


def load_images(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a torchvision data set of images, training rows first; download it if it is missing.

    Pixels are in [0, 1]; CIFAR's are standardized per channel.
    """
    if name == "cifar100-coarse":
        fine = load_images("cifar100", data_dir)
        coarse = torch.tensor([int(code) for code in _SUPERCLASS_OF_FINE.split()])[fine.y]
        classes = tuple(_SUPERCLASSES.split())
        return replace(fine, name=name, y=coarse, types=fine.y, classes=classes)
    folder = Path(data_dir or CACHE).expanduser()
    try:
        from torchvision import datasets
    except Exception as error:  # a torchvision that does not match torch fails in many ways
        raise ValueError(f"{name} needs torchvision, which cannot be imported: {error}") from error
    try:
        parts = [_open(datasets, name, folder, train=train) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"{name} can neither be read in {folder} nor downloaded "
            f"to it ({' '.join(str(error).split())}); expected torchvision's files: copy them "
            "there, or pass their folder as data_dir"
        ) from error
    images = np.concatenate([_pixels(name, part) for part in parts])
    labels = [np.asarray(p.labels if hasattr(p, "labels") else p.targets) for p in parts]
    is_test = np.repeat([False, True], [len(each) for each in labels])
    classes = tuple(getattr(parts[0], "classes", "0123456789"))
    return dataset_of_pixels(name, images, np.concatenate(labels), is_test, classes)


def _open(datasets: Any, name: str, folder: Path, *, train: bool) -> Any:
    maker = getattr(datasets, {"fashion_mnist": "FashionMNIST"}.get(name, name.upper()))
    how: dict[str, Any] = {"split": "byclass"} if name == "emnist" else {}
    how |= {"split": "train" if train else "test"} if name == "svhn" else {"train": train}
    return maker(folder, download=True, **how)


def _pixels(name: str, part: Any) -> Bytes:
    """Return the images of a torchvision data set upright, uint8 [N, H, W] or [N, H, W, 3]."""
    pixels = np.asarray(part.data)
    if name == "emnist":  # its files hold every image mirrored along the diagonal
        return pixels.transpose(0, 2, 1)
    return pixels.transpose(0, 2, 3, 1) if name == "svhn" else pixels


def dataset_of_pixels(
    name: str, images: Bytes, labels: Any, is_test: NDArray[np.bool_], classes: tuple[str, ...]
) -> Dataset:
    """Build a data set from images uint8 [N, H, W] or [N, H, W, C]: x [N, C, H, W] in [0, 1]."""
    channels = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    x: Tensor = torch.from_numpy(np.ascontiguousarray(channels)).float().div_(255)
    if name in _SCALING:
        mean, deviation = (torch.tensor(v)[:, None, None] for v in _SCALING[name])
        x.sub_(mean).div_(deviation)
    y = torch.from_numpy(labels.astype(np.int64))
    return Dataset(name, x, y, torch.from_numpy(is_test), classes)
