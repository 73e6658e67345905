"""Image sets, read from small files in the formats of the real ones."""

from __future__ import annotations

import bz2
import pickle
import struct
import sys
from urllib.error import URLError

import numpy as np
import pytest
import torch

from pyrofl.choices import IMAGES
from pyrofl.data.loaders.datasets import load
from pyrofl.partitions.federations import split

rng = np.random.default_rng(0)


def pixels(*shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)


def idx(path, array):
    """Write an array in the format of MNIST's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(head + array.tobytes())


def gray(folder, train, test):
    """Write both parts, four and two images, in a folder of torchvision."""
    images, labels = pixels(6, 28, 28), np.array([3, 0, 9, 1, 2, 9], dtype=np.uint8)
    for prefix, part in ((train, slice(4)), (test, slice(4, 6))):
        idx(folder / "raw" / f"{prefix}-images-idx3-ubyte", images[part])
        idx(folder / "raw" / f"{prefix}-labels-idx1-ubyte", labels[part])
    return images, labels


def assert_same(data, images, labels):
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == list(labels)
    assert data.is_test.tolist() == [False] * 4 + [True] * 2
    torch.testing.assert_close(data.x, torch.from_numpy(images).float() / 255)


@pytest.mark.parametrize(
    ("name", "folder", "first"),
    [("mnist", "MNIST", "0 - zero"), ("fashion_mnist", "FashionMNIST", "T-shirt/top")],
)
def test_mnist_and_fashion_mnist(tmp_path, name, folder, first):
    images, labels = gray(tmp_path / folder, "train", "t10k")
    data = load(name, data_dir=tmp_path)
    assert_same(data, images[:, None], labels)
    assert len(data.classes) == 10
    assert data.classes[0] == first


def test_emnist_is_turned_upright(tmp_path):
    images, labels = gray(tmp_path / "EMNIST", "emnist-byclass-train", "emnist-byclass-test")
    data = load("emnist", data_dir=tmp_path)
    assert_same(data, images.transpose(0, 2, 1)[:, None], labels)
    assert len(data.classes) == 62
    assert data.classes[9:11] == ("9", "A")


def test_usps(tmp_path):
    levels = rng.integers(0, 256, (6, 256))
    labels = [3, 0, 9, 1, 2, 9]
    lines = [
        f"{y + 1} " + " ".join(f"{k}:{v / 127.5 - 1:.6f}" for k, v in enumerate(row, 1))
        for y, row in zip(labels, levels, strict=True)
    ]
    for name, part in (("usps.bz2", slice(4)), ("usps.t.bz2", slice(4, 6))):
        (tmp_path / name).write_bytes(bz2.compress("\n".join(lines[part]).encode()))
    data = load("usps", data_dir=tmp_path)
    assert data.x.shape == (6, 1, 16, 16)
    assert data.y.tolist() == labels
    assert data.classes == tuple("0123456789")
    expected = torch.from_numpy(levels).reshape(6, 1, 16, 16) / 255
    torch.testing.assert_close(data.x, expected.float(), atol=1.01 / 255, rtol=0)


def test_svhn(tmp_path, monkeypatch):
    from scipy.io import savemat
    from torchvision.datasets import svhn

    monkeypatch.setattr(svhn, "check_integrity", lambda *args: True)
    monkeypatch.setattr(svhn, "download_url", lambda *args: None)
    images, labels = pixels(6, 32, 32, 3), np.array([3, 0, 9, 1, 2, 9])
    stored = np.where(labels == 0, 10, labels)[:, None]
    for name, part in (("train", slice(4)), ("test", slice(4, 6))):
        savemat(
            tmp_path / f"{name}_32x32.mat",
            {"X": images[part].transpose(1, 2, 3, 0), "y": stored[part]},
        )
    data = load("svhn", data_dir=tmp_path)
    assert_same(data, images.transpose(0, 3, 1, 2), labels)
    assert len(data.classes) == 10


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    from torchvision.datasets import cifar

    monkeypatch.setattr(cifar, "check_integrity", lambda *args: True)

    def write(folder, batches, labels, names):
        """Write files of images, one per entry of `batches`; return all images."""
        (tmp_path / folder).mkdir()
        images = pixels(len(labels), 3, 32, 32)
        start = 0
        for name, count in batches.items():
            part = slice(start, start + count)
            entry = {"data": images[part].reshape(-1, 3072), names[0]: list(labels[part])}
            (tmp_path / folder / name).write_bytes(pickle.dumps(entry))
            start += count
        meta = {names[1]: [f"class {k}" for k in range(names[2])]}
        (tmp_path / folder / names[3]).write_bytes(pickle.dumps(meta))
        return images

    return write


def test_cifar10_is_normalized(tmp_path, cifar):
    labels = [0, 1, 2, 3, 9, 5]
    batches = {f"data_batch_{i}": n for i, n in enumerate((1, 1, 1, 1, 0), 1)} | {"test_batch": 2}
    names = ("labels", "label_names", 10, "batches.meta")
    images = cifar("cifar-10-batches-py", batches, labels, names)
    data = load("cifar10", data_dir=tmp_path)
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    for c in range(3):
        expected = (images[:, c] / 255 - mean[c]) / deviation[c]
        np.testing.assert_allclose(data.x[:, c], expected, atol=1e-5)
    assert data.y.tolist() == labels
    assert data.is_test.tolist() == [False] * 4 + [True] * 2
    assert data.classes[9] == "class 9"


def test_cifar100_with_fine_and_coarse_labels(tmp_path, cifar):
    labels = list(range(100)) * 2
    names = ("fine_labels", "fine_label_names", 100, "meta")
    images = cifar("cifar-100-python", {"train": 100, "test": 100}, labels, names)
    fine, coarse = (load(name, data_dir=tmp_path) for name in ("cifar100", "cifar100-coarse"))
    expected = (images[:, 0] / 255 - 0.5074) / 0.2011
    np.testing.assert_allclose(fine.x[:, 0], expected, atol=1e-5)
    assert len(fine.classes) == 100
    assert torch.equal(fine.y, coarse.types)
    assert torch.equal(fine.x, coarse.x)
    assert torch.bincount(coarse.y).tolist() == [10] * 20
    # apple, beaver, maple_tree and wolf, as published
    named = {k: coarse.classes[coarse.y[k]] for k in (0, 4, 47, 97)}
    assert named == {
        0: "fruit_and_vegetables",
        4: "aquatic_mammals",
        47: "trees",
        97: "large_carnivores",
    }
    assert split(coarse, "drift", 5).sizes.tolist() == [20] * 5


def test_without_a_network_the_folder_is_named(tmp_path, monkeypatch):
    from torchvision.datasets import mnist

    def refuse(*args, **kwargs):
        raise URLError("no route")

    monkeypatch.setattr(mnist, "download_and_extract_archive", refuse)
    with pytest.raises(ValueError, match=f"mnist can neither be read in {tmp_path}") as error:
        load("mnist", data_dir=tmp_path)
    assert "\n" not in str(error.value)
    assert "data_dir" in str(error.value)


def test_without_torchvision_the_others_still_load(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match="mnist needs torchvision"):
        load("mnist", data_dir=tmp_path)
    assert len(load("digits").y) == 1797


def test_every_name_is_loadable_by_torchvision():
    from torchvision import datasets

    from pyrofl.data.loaders import images

    class Recorder:
        def __getattr__(self, name):
            assert hasattr(datasets, name)
            return lambda *args, **kwargs: name

    opened = {images._open(Recorder(), n, None, train=True) for n in IMAGES if "coarse" not in n}
    assert opened == {"MNIST", "FashionMNIST", "EMNIST", "USPS", "SVHN", "CIFAR10", "CIFAR100"}
