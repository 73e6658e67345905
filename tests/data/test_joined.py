"""Data sets joined to one, each of them a domain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pyrofl.data import Dataset
from pyrofl.data.loaders.datasets import join, load, resized


def images(name="gray", shape=(1, 4, 6), classes=("a", "b"), rows=6):
    x = torch.arange(rows * int(np.prod(shape))).reshape(rows, *shape) / 100
    y = torch.arange(rows) % len(classes)
    return Dataset(name, x, y, torch.arange(rows) >= rows - 2, classes)


def test_rows_and_classes_are_side_by_side():
    one, two = images(), images("other", classes=("b", "c", "d"))
    data = join([one, two])
    assert data.name == "gray+other"
    assert data.classes == ("a", "gray b", "other b", "c", "d")
    assert data.y.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 4, 2, 3, 4]
    assert torch.equal(data.x, torch.cat([one.x, two.x]))
    assert data.is_test.tolist() == 2 * ([False] * 4 + [True] * 2)
    assert data.groups["domain"].tolist() == [0] * 6 + [1] * 6
    assert data.group_names["domain"] == ("gray", "other")
    assert data.types is None


def test_finer_types_stay_apart():
    one, two = replace(images(), types=torch.arange(6)), images("other")
    assert join([one, two]).types.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7]
    assert join([two, one]).types.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7]


def test_images_are_brought_to_the_largest_shape():
    gray, color = images(), images("color", (3, 8, 3))
    data = join([gray, color])
    assert data.x.shape == (12, 3, 8, 6)
    assert torch.equal(data.x[:6, 0], data.x[:6, 2])
    assert join([gray, color], shape=(3, 2, 2)).x.shape == (12, 3, 2, 2)


def test_resizing_keeps_what_it_can():
    gray = images(shape=(1, 4, 4))
    assert resized(gray, (1, 4, 4)) is gray
    color = resized(gray, (3, 4, 4)).x
    assert all(torch.equal(color[:, c], gray.x[:, 0]) for c in range(3))
    # Half the size is a mean of neighbors, which keeps the mean of an image.
    flat = replace(gray, x=torch.full((6, 1, 4, 4), 0.7))
    torch.testing.assert_close(resized(flat, (1, 9, 2)).x, torch.full((6, 1, 9, 2), 0.7))
    chess = replace(gray, x=(torch.arange(16).reshape(1, 1, 4, 4) // 4 % 2).float())
    assert resized(chess, (1, 2, 2)).x.std() < 0.2 * chess.x.std()


def test_data_sets_are_joined_by_name(tmp_path):
    paths = []
    for name, kinds in (("a+b", 2), ("c", 3)):
        paths.append(f"npz:{tmp_path / name}.npz")
        pixels = np.arange(12 * 16, dtype=np.uint8).reshape(12, 4, 4)
        labels, is_test = np.arange(12) % kinds, np.arange(12) > 8
        np.savez(tmp_path / f"{name}.npz", images=pixels, labels=labels, is_test=is_test)
    data = load("+".join(paths))
    assert data.group_names["domain"] == ("a+b", "c")
    assert data.classes == ("a+b 0", "a+b 1", "c 0", "c 1", "2")
    assert load(paths[0]).name == "a+b"
    with pytest.raises(
        ValueError, match=r"client_column is 'g'; expected none, as npz:.* does not accept"
    ):
        load("+".join(paths), client_column="g")
    with pytest.raises(ValueError, match="unknown data set 'mnsit'; did you mean mnist"):
        load(f"{paths[0]}+mnsit")
    with pytest.raises(ValueError, match=r"have shapes \[\(1, 4, 4\), \(64,\)\]; expected one"):
        load(f"{paths[0]}+digits")


@pytest.mark.parametrize(
    ("shape", "wanted"), [((64,), (1, 8, 8)), ((3, 4, 4), (1, 4, 4)), ((1, 4, 4), (16,))]
)
def test_refuses_shapes(shape, wanted):
    with pytest.raises(ValueError, match="expected images"):
        resized(images(shape=shape), wanted)
