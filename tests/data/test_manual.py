"""Data sets that users download themselves, read from small files in their layouts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from pyrofl.choices import MANUAL
from pyrofl.data.loaders import datasets
from pyrofl.data.loaders.datasets import load
from pyrofl.partitions.federations import split

sys.path.append(str(Path(__file__).parents[2] / "examples" / "papers"))

import simulated_files


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def content(path: Path) -> dict:
    return json.loads(path.read_text())


def files(folder: Path, name: str, part: str = "train") -> list[Path]:
    return sorted((folder / name / "data" / part).glob("*.json"))


def refused(folder: Path, name: str) -> str:
    """Return the message with which a data set is refused: one line."""
    with pytest.raises(ValueError, match="; expected ") as error:
        load(name, data_dir=folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_name_is_listed_and_says_where_its_files_belong(tmp_path):
    assert datasets.MANUAL.keys() == MANUAL.keys()
    folders = {"femnist": "femnist/data/train", "celeba": "celeba/data/train"}
    folders |= {"digit_five": "Digit-Five/mnist_data.mat", "cinic10": "CINIC-10/train"}
    folders |= {"sun397": "SUN397/ClassName.txt", "sun397-coarse": "SUN397/ClassName.txt"}
    for name in MANUAL:
        assert f"{tmp_path}/{folders[name]}" in refused(tmp_path, name)


# FEMNIST.


def test_femnist_keeps_writers_pixels_and_labels(tmp_path, rng):
    simulated_files.femnist(tmp_path, rng, writers=5, rows=8)
    data = load("femnist", data_dir=tmp_path)
    stored = [
        (name, pixels, label, part == "test")
        for part in ("train", "test")
        for path in files(tmp_path, "femnist", part)
        for name in content(path)["users"]
        for pixels, label in zip(*content(path)["user_data"][name].values(), strict=True)
    ]
    assert len(files(tmp_path, "femnist")) == 2
    assert data.x.shape == (50, 1, 28, 28)
    torch.testing.assert_close(data.x.flatten(1), torch.tensor([row[1] for row in stored]))
    assert data.y.tolist() == [row[2] for row in stored]
    assert data.is_test.tolist() == [row[3] for row in stored]
    names = data.group_names["writer"]
    assert [names[k] for k in data.groups["writer"]] == [row[0] for row in stored]
    assert (len(data.classes), data.classes[9:11], data.classes[35:37]) == (
        62,
        ("9", "A"),
        ("Z", "a"),
    )


def test_femnist_is_partitioned_by_writer(tmp_path, rng):
    simulated_files.femnist(tmp_path, rng, writers=5, rows=8)
    federation = split(load("femnist", data_dir=tmp_path), "groups", held_out=["f0001_1"])
    assert federation.names == ("f0000_0", "f0002_2", "f0003_3", "f0004_4", "f0001_1")
    assert federation.sizes.tolist() == [8, 8, 8, 8, 8]
    assert [len(rows) for rows in federation.test] == [2] * 5


def edited(folder: Path, **changes) -> None:
    """Replace entries of the first training file of FEMNIST; a function changes its first user."""
    (path, *_) = files(folder, "femnist")
    whole = content(path)
    for key, value in changes.items():
        if callable(value):
            value(whole["user_data"][whole["users"][0]])
        else:
            whole[key] = value
    path.write_text(json.dumps(whole))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"users": ["f0000_0", "f9"]}, "user f9 has no lists x and y in user_data; expected them"),
        ({"users": ["f0000_0"]}, "has 1 users and 2 num_samples; expected one number for each"),
        ({"users": ["f0000_0", 7]}, "has the user 7; expected names"),
        ({"users": ["f0000_0", "f0000_0"]}, "user f0000_0 occurs twice; expected each user once"),
        ({"users": None}, "has no users; expected users, num_samples, user_data"),
        ({"num_samples": [8, 9]}, "user f0001_1 has 8 x, 8 y and 9 in num_samples; expected equal"),
        ({"a": lambda u: u["y"].pop()}, "user f0000_0 has 8 x, 7 y and 8 in num_samples"),
        ({"a": lambda u: u["y"].__setitem__(2, 62)}, "has the label 62; expected .* from 0 to 61"),
        ({"a": lambda u: u["y"].__setitem__(2, 1.5)}, "has the label 1.5; expected whole numbers"),
        ({"a": lambda u: u["y"].__setitem__(2, "a")}, "has the label 'a'; expected whole numbers"),
        ({"a": lambda u: u["x"][3].pop()}, "has 783 in image 3; expected 784 numbers"),
        ({"a": lambda u: u["x"].__setitem__(3, "a")}, "has 'a' in image 3; expected 784 numbers"),
        ({"a": lambda u: u["x"][3].__setitem__(0, "a")}, "pixels that are no numbers .* 0 to 1"),
        ({"a": lambda u: u["x"][3].__setitem__(0, 255)}, "has pixels from 0.* to 255; expected 0"),
        ({"a": lambda u: u["x"][3].__setitem__(0, float("nan"))}, "has pixels from nan to nan"),
    ],
)
def test_a_wrong_file_of_femnist_is_named_with_its_user(tmp_path, rng, changes, message):
    simulated_files.femnist(tmp_path, rng, writers=5, rows=8)
    edited(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load("femnist", data_dir=tmp_path)
    assert refused(tmp_path, "femnist").startswith(str(files(tmp_path, "femnist")[0]))


def test_an_incomplete_file_of_femnist_is_named(tmp_path, rng):
    simulated_files.femnist(tmp_path, rng)
    (_, path) = files(tmp_path, "femnist")
    path.write_bytes(path.read_bytes()[:1000])
    assert refused(tmp_path, "femnist").startswith(f"{path}: is not JSON")


def test_femnist_needs_test_rows_of_the_training_writers(tmp_path, rng):
    simulated_files.femnist(tmp_path, rng)
    (path,) = files(tmp_path, "femnist", "test")
    path.unlink()
    assert "femnist/data/test has no .json file" in refused(tmp_path, "femnist")
    rows = {"f7": {"x": [[0.5] * 784], "y": [1]}}
    simulated_files.leaf(tmp_path / "femnist", "test", rows)
    assert "user f7 has no training rows; expected the files of preprocess.sh -t sample" in refused(
        tmp_path, "femnist"
    )


# CelebA.


def test_celeba_reads_the_named_images(tmp_path, rng):
    simulated_files.celeba(tmp_path, rng, people=3, rows=4)
    data = load("celeba", data_dir=tmp_path)
    assert data.x.shape == (15, 3, 84, 84)
    assert data.y.tolist() == [0, 1, 0, 1] * 3 + [0] * 3
    assert data.classes == ("not smiling", "smiling")
    assert data.group_names == {"celebrity": ("1", "2", "3")}
    assert data.groups["celebrity"].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0, 1, 2]
    raw = tmp_path / "celeba" / "data" / "raw" / "img_align_celeba"
    with Image.open(raw / "000006.jpg") as file:
        expected = np.asarray(file.resize((84, 84), Image.Resampling.BILINEAR)) / 255
    torch.testing.assert_close(data.x[5].permute(1, 2, 0), torch.tensor(expected).float())


def test_a_missing_or_damaged_face_is_named(tmp_path, rng):
    simulated_files.celeba(tmp_path, rng)
    path = tmp_path / "celeba" / "data" / "raw" / "img_align_celeba" / "000003.jpg"
    path.write_bytes(path.read_bytes()[:200])
    assert refused(tmp_path, "celeba").startswith(f"{path}: cannot be decoded")
    path.unlink()
    assert refused(tmp_path, "celeba").startswith(f"{path}: does not exist")
    (first,) = files(tmp_path, "celeba")
    whole = content(first)
    whole["user_data"]["1"]["x"][0] = 1
    first.write_text(json.dumps(whole))
    assert "user 1 has 1 as an image; expected names of files" in refused(tmp_path, "celeba")


# Digit-Five.


def mat(folder: Path, name: str) -> dict:
    from scipy.io import loadmat

    return loadmat(folder / "Digit-Five" / f"{name}.mat")


def test_digit_five_has_five_domains_of_ten_classes(tmp_path, rng):
    simulated_files.digit_five(tmp_path, rng, train=30, test=10)
    data = load("digit_five", data_dir=tmp_path)
    assert data.x.shape == (200, 3, 32, 32)
    assert data.y.tolist() == [k % 10 for k in range(40)] * 5
    assert data.group_names["domain"] == ("mnist", "mnist_m", "svhn", "usps", "synthetic_digits")
    assert data.groups["domain"].tolist() == [k for k in range(5) for _ in range(40)]
    assert data.is_test.tolist() == ([False] * 30 + [True] * 10) * 5
    assert torch.equal(data.types, data.groups["domain"] * 10 + data.y)
    # An image of each domain, resized where it has 28 x 28 pixels.
    scenes = {
        0: torch.tensor(mat(tmp_path, "mnist_data")["train_28"][3]).permute(2, 0, 1) / 255,
        1: torch.tensor(mat(tmp_path, "mnistm_with_label")["train"][3]).permute(2, 0, 1) / 255,
        2: torch.tensor(mat(tmp_path, "svhn_train_32x32")["X"][..., 3]).permute(2, 0, 1) / 255,
        3: torch.tensor(mat(tmp_path, "usps_28x28")["dataset"][0][0][3]),
        4: torch.tensor(mat(tmp_path, "syn_number")["train_data"][3]).permute(2, 0, 1) / 255,
    }
    for domain, image in scenes.items():
        size = {"size": (32, 32), "mode": "bilinear", "antialias": True}
        expected = functional.interpolate(image[None].float(), **size)[0].expand(3, -1, -1)
        torch.testing.assert_close(data.x[40 * domain + 3], expected)


def test_clients_of_a_domain_are_tested_on_it(tmp_path, rng):
    simulated_files.digit_five(tmp_path, rng)
    data = load("digit_five", data_dir=tmp_path)
    federation = split(data, "domains:slices:5", 10, seed=0, test="same_classes")
    for j, (train, test) in enumerate(zip(federation.train, federation.test, strict=True)):
        assert set(data.groups["domain"][train].tolist()) == {j % 5}
        assert set(data.groups["domain"][test].tolist()) == {j % 5}
        assert set(data.y[test].tolist()) == set(data.y[train].tolist())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mnist_data", {"train_28": None}, "has no array train_28; expected arrays train_28 and"),
        ("mnist_data", {"train_28": np.zeros((3, 28))}, r"train_28 has shape \[3, 28\]; expected"),
        ("mnist_data", {"label_train": np.ones((60, 10))}, "has labels that are no digits"),
        ("mnist_data", {"label_train": np.full((60, 10), 2)}, "labels that are not one-hot"),
        ("mnist_data", {"label_test": np.eye(10)}, r"has images \[20, 1, 28, 28\] and 10 labels"),
        ("syn_number", {"train_label": np.full((60, 1), 11)}, "has labels that are no digits"),
        ("syn_number", {"train_data": np.full((60, 9, 9, 3), 256)}, "has pixels from 256 to 256"),
        ("usps_28x28", {"dataset": np.zeros(3)}, "has another dataset; expected"),
        ("svhn_test_32x32", b"", "cannot be read as .mat .*; expected a complete file"),
    ],
)
def test_a_wrong_file_of_digit_five_is_named(tmp_path, rng, name, changes, message):
    from scipy.io import savemat

    simulated_files.digit_five(tmp_path, rng)
    path = tmp_path / "Digit-Five" / f"{name}.mat"
    if isinstance(changes, bytes):
        path.write_bytes(path.read_bytes()[:500])
    else:
        arrays = {n: a for n, a in mat(tmp_path, name).items() if n[0] != "_"} | changes
        savemat(path, {n: a for n, a in arrays.items() if a is not None})
    with pytest.raises(ValueError, match=message):
        load("digit_five", data_dir=tmp_path)
    assert refused(tmp_path, "digit_five").startswith(f"{path}: ")


# SUN397.


def test_sun397_has_the_first_images_of_each_class(tmp_path, rng):
    simulated_files.sun397(tmp_path, rng, rows=101)
    data = load("sun397", data_dir=tmp_path)
    assert data.x.shape == (700, 3, 64, 64)
    names = ("ambiguous", "scene0/indoor", "scene1/indoor", "scene0/natural", "scene1/natural")
    assert data.classes == (*names, "scene0/man-made", "scene1/man-made")
    assert torch.bincount(data.y).tolist() == [100] * 7
    assert torch.bincount(data.y[data.is_test]).tolist() == [20] * 7
    assert data.is_test[:100].tolist() == [False] * 80 + [True] * 20
    with Image.open(tmp_path / "SUN397/b/scene0/indoor/sun_0002.jpg") as file:
        square = file.resize((64, 64), Image.Resampling.BILINEAR, box=(1, 0, 9, 8))
    expected = torch.tensor(np.asarray(square)).permute(2, 0, 1) / 255
    torch.testing.assert_close(data.x[102], expected, atol=1e-6, rtol=0)


def test_superclasses_of_sun397_are_labels_and_ambiguous_classes_are_left_out(tmp_path, rng):
    simulated_files.sun397(tmp_path, rng)
    data = load("sun397-coarse", data_dir=tmp_path)
    assert data.classes == ("indoor", "outdoor, natural", "outdoor, man-made")
    assert torch.equal(data.y, torch.arange(3).repeat_interleave(200))
    assert torch.equal(data.types, torch.arange(6).repeat_interleave(100))
    federation = split(data, "drift", 6, seed=0, test="same_classes")
    for rows in federation.train:
        assert len(set(data.types[rows].tolist())) == 3
        assert set(data.y[rows].tolist()) == {0, 1, 2}


def test_only_fifty_classes_of_a_superclass_are_used(tmp_path, rng, monkeypatch):
    from pyrofl.data.loaders import image_folders

    monkeypatch.setattr(image_folders, "SUN_CLASSES", 1)
    simulated_files.sun397(tmp_path, rng)
    data = load("sun397-coarse", data_dir=tmp_path)
    assert torch.bincount(data.types).tolist() == [100] * 3
    with Image.open(tmp_path / "SUN397/o/scene0/natural/sun_0000.jpg") as file:
        square = file.resize((64, 64), Image.Resampling.BILINEAR, box=(1, 0, 9, 8))
    expected = torch.tensor(np.asarray(square)).permute(2, 0, 1) / 255
    torch.testing.assert_close(data.x[100], expected, atol=1e-6, rtol=0)


def test_an_incomplete_sun397_is_named(tmp_path, rng):
    simulated_files.sun397(tmp_path, rng)
    table = tmp_path / "SUN397" / "hierarchy_three_levels" / "three_levels.xlsx"
    scene = tmp_path / "SUN397" / "b" / "scene1" / "indoor"
    (scene / "sun_0099.jpg").unlink()
    message = refused(tmp_path, "sun397")
    assert message.startswith(f"{scene}: has 99 .jpg files; expected at least 100")
    simulated_files.sheet(table, [["category", "indoor"], ["/a/b", 1]])
    assert "has no row of column names in its first sheet" in refused(tmp_path, "sun397-coarse")
    simulated_files.sheet(
        table, [["category", *simulated_files.SUPERCLASSES], ["/b/scene1/indoor", 1]]
    )
    assert "has no class of outdoor, natural" in refused(tmp_path, "sun397-coarse")
    table.write_bytes(table.read_bytes()[:100])
    assert refused(tmp_path, "sun397-coarse").startswith(f"{table}: cannot be read")
    table.unlink()
    assert f"{table} does not exist; expected the extracted" in refused(tmp_path, "sun397-coarse")


# CINIC-10.


def cinic(folder: Path, rng, rows: int = 3) -> dict[tuple[str, str], np.ndarray]:
    pictures = {}
    for part in ("train", "valid", "test"):
        for name in ("airplane", "cat"):
            pictures[part, name] = simulated_files.images(np.zeros(rows, int), (32, 32, 3), rng)
            for i, pixels in enumerate(pictures[part, name]):
                simulated_files.picture(
                    folder / "CINIC-10" / part / name / f"cifar10-{i}.png", pixels
                )
    return pictures


def test_cinic10_is_read_and_standardized(tmp_path, rng):
    pictures = cinic(tmp_path, rng)
    data = load("cinic10", data_dir=tmp_path)
    assert data.classes == ("airplane", "cat")
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert data.is_test.tolist() == [False] * 6 + [True] * 6
    mean, deviation = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
    expected = (pictures["test", "cat"][2] / 255 - mean) / deviation
    np.testing.assert_allclose(data.x[11].permute(1, 2, 0), expected, atol=1e-5)


def test_an_incomplete_cinic10_is_named(tmp_path, rng):
    cinic(tmp_path, rng)
    path = tmp_path / "CINIC-10" / "test" / "cat" / "cifar10-1.png"
    path.write_bytes(path.read_bytes()[:60])
    assert refused(tmp_path, "cinic10").startswith(f"{path}: cannot be decoded")
    path.unlink()
    assert "test: is incomplete: airplane 3, cat 2; expected equal numbers" in refused(
        tmp_path, "cinic10"
    )
