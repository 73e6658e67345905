"""FEMNIST and CelebA, from the JSON files of LEAF's preprocessing (Caldas and others, 2018)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrofl.data.federation import Dataset
from pyrofl.data.loaders.image_folders import read_rgb
from pyrofl.data.loaders.images import Bytes
from pyrofl.data.tables.wording import file_error

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LEAF_PIXELS = 28 * 28
CELEBA_SIZE = 84  # pixels, as in LEAF's model


class LeafUser(NamedTuple):
    """Rows of one user in one of LEAF's files."""

    path: Path
    name: str
    x: list[Any]
    y: list[Any]

    def refuse(self, problem: str, expected: str) -> ValueError:
        """Return an error about this user."""
        return file_error(self.path, f"user {self.name} {problem}", expected)


def femnist(folder: Path) -> Dataset:
    """Return FEMNIST: x [N, 1, 28, 28] in [0, 1] with dark ink on white, group column writer."""
    return _leaf("femnist", folder, "writer", tuple(CHARACTERS), _characters)


def celeba(folder: Path) -> Dataset:
    """Return CelebA: x [N, 3, 84, 84] in [0, 1], classes not smiling and smiling."""
    images = folder / "celeba" / "data" / "raw" / "img_align_celeba"

    def faces(user: LeafUser) -> Tensor:
        wrong = [name for name in user.x if not isinstance(name, str)]
        if wrong:
            raise user.refuse(f"has {wrong[0]!r} as an image", "names of files such as 000001.jpg")
        size = (CELEBA_SIZE, CELEBA_SIZE)
        pixels = [read_rgb(images / name, size, crop=False) for name in user.x]
        return _tensor(np.stack(pixels)) if pixels else torch.zeros(0, 3, *size)

    return _leaf("celeba", folder, "celebrity", ("not smiling", "smiling"), faces)


def _leaf(
    name: str,
    folder: Path,
    column: str,
    classes: tuple[str, ...],
    decode: Callable[[LeafUser], Tensor],
) -> Dataset:
    """Load the training and test rows of all users; each user is a group.

    Args:
        name: subfolder of the data set.
        folder: LEAF's folder `data`.
        column: name of the group column.
        classes: names of the labels 0, 1 and so on.
        decode: function that returns the inputs [n, *x] of a user.
    """
    codes = dict[str, int]()
    x, y, owners, is_test = [], [], list[int](), list[bool]()
    for part in ("train", "test"):
        users = set[str]()
        for user in _leaf_users(folder / name / "data" / part):
            if user.name in users:
                raise user.refuse("occurs twice", "each user once: delete older files")
            if part == "test" and user.name not in codes:
                raise user.refuse("has no training rows", "the files of preprocess.sh -t sample")
            users.add(user.name)
            codes.setdefault(user.name, len(codes))
            y.append(_leaf_labels(user, len(classes)))
            x.append(decode(user))
            owners += [codes[user.name]] * len(user.y)
            is_test += [part == "test"] * len(user.y)
    return Dataset(
        name,
        torch.cat(x),
        torch.cat(y),
        torch.tensor(is_test),
        classes,
        groups={column: torch.tensor(owners)},
        group_names={column: tuple(codes)},
    )


def _leaf_users(folder: Path) -> Iterator[LeafUser]:
    """Yield the users of all files of a folder, with as many rows as the files state."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(
            f"{folder} has no .json file; expected the files of LEAF's preprocess.sh -t sample "
            "there, or LEAF's folder data as data_dir"
        )
    for path in paths:
        users, counts, data = _leaf_content(path)
        for name, count in zip(users, counts, strict=True):
            rows = data.get(name)
            x, y = (rows.get(n) if isinstance(rows, dict) else None for n in ("x", "y"))
            user = LeafUser(path, str(name), x or [], y or [])
            if not isinstance(x, list) or not isinstance(y, list):
                raise user.refuse("has no lists x and y in user_data", "them for each of users")
            if not len(x) == len(y) == count:
                numbers = f"has {len(x)} x, {len(y)} y and {count} in num_samples"
                raise user.refuse(numbers, "equal numbers")
            yield user


def _leaf_content(path: Path) -> tuple[list[Any], list[Any], dict[Any, Any]]:
    """Read users, num_samples and user_data of a file."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise file_error(
            path, f"is not JSON ({error})", "a complete file: make it again"
        ) from error
    kinds = {"users": list, "num_samples": list, "user_data": dict}
    for key, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise file_error(path, f"has no {key}", f"{', '.join(kinds)}, as in LEAF's files")
    users, counts, data = (content[key] for key in kinds)
    if len(users) != len(counts):
        numbers = f"has {len(users)} users and {len(counts)} num_samples"
        raise file_error(path, numbers, "one number for each user")
    if unnamed := [name for name in users if not isinstance(name, str)]:
        raise file_error(path, f"has the user {unnamed[0]!r}", "names")
    return users, counts, data


def _leaf_labels(user: LeafUser, count: int) -> Tensor:
    """Return the labels [n] of a user; LEAF stores those of CelebA as 0.0 and 1.0."""
    for label in user.y:
        if not isinstance(label, int | float) or label not in range(count):
            raise user.refuse(f"has the label {label!r}", f"whole numbers from 0 to {count - 1}")
    return torch.tensor(user.y, dtype=torch.float64).long()


def _characters(user: LeafUser) -> Tensor:
    """Return images [n, 1, 28, 28] from lists of 784 numbers."""
    for place, pixels in enumerate(user.x):
        if not isinstance(pixels, list) or len(pixels) != LEAF_PIXELS:
            size = len(pixels) if isinstance(pixels, list) else repr(pixels)
            raise user.refuse(f"has {size} in image {place}", f"{LEAF_PIXELS} numbers")
    try:
        x = torch.tensor(user.x, dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise user.refuse(f"has pixels that are no numbers ({error})", "0 to 1") from error
    if not ((x >= 0) & (x <= 1)).all():
        raise user.refuse(f"has pixels from {x.min():.3g} to {x.max():.3g}", "0 to 1")
    return x.reshape(-1, 1, 28, 28)


def _tensor(images: Bytes) -> Tensor:
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).float().div_(255)
