"""Images from .npz files: what they hold, and what is refused before memory is taken for it."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch
from numpy.lib import format as npy

from pyrofl.cli import main
from pyrofl.data.loaders import npz_files
from pyrofl.data.loaders.datasets import load
from pyrofl.partitions.federations import split

rng = np.random.default_rng(0)


def pixels(*shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)


def jpeg(image):
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image).save(out, "jpeg", quality=95)
    return out.getvalue()


@pytest.fixture
def arrays():
    return {
        "images": pixels(6, 28, 28),
        "labels": np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8),
        "is_test": np.array([0, 0, 0, 0, 1, 1], dtype=bool),
        "classes": np.array(["ant", "bee", "cat"]),
    }


def save(path, arrays):
    np.savez(path, **arrays)
    return f"npz:{path}"


def test_npz_of_gray_images(tmp_path, arrays):
    data = load(save(tmp_path / "zoo.npz", arrays))
    assert data.name == "zoo"
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.is_test.tolist() == [False] * 4 + [True] * 2
    torch.testing.assert_close(data.x, torch.from_numpy(arrays["images"][:, None]).float() / 255)
    assert data.classes == ("ant", "bee", "cat")
    assert data.types is None


def test_npz_without_names_of_classes(tmp_path, arrays):
    del arrays["classes"]
    assert load(save(tmp_path / "zoo.npz", arrays)).classes == ("0", "1", "2")
    for labels in ([1, 2, 3, 1, 2, 3], [0, 2, 10, 0, 2, 10]):  # no class without an image
        data = load(save(tmp_path / "zoo.npz", {**arrays, "labels": np.array(labels)}))
        assert data.classes == tuple(map(str, labels[:3]))
        assert data.y.tolist() == [0, 1, 2, 0, 1, 2]


def test_npz_of_jpeg_images_with_another_target_and_groups(tmp_path, arrays):
    flat = np.full((6, 8, 8, 3), (200, 100, 50), dtype=np.uint8) + np.arange(6)[:, None, None, None]
    files = [jpeg(image.astype(np.uint8)) for image in flat]
    del arrays["images"]
    arrays |= {
        "jpeg": np.frombuffer(b"".join(files), dtype=np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "coarse_labels": np.array([1, 0, 1, 1, 0, 1]),
        "coarse_classes": np.array(["insect", "mammal"]),
        "writer": np.array(["jo", "al", "jo", "al", "jo", "al"]),
    }
    data = load(save(tmp_path / "zoo.npz", arrays), target="coarse", client_column="writer")
    assert data.x.shape == (6, 3, 8, 8)
    expected = torch.from_numpy(flat.astype(np.float32)).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(data.x, expected, atol=3 / 255, rtol=0)
    assert data.classes == ("insect", "mammal")
    assert data.y.tolist() == [1, 0, 1, 1, 0, 1]
    assert data.types.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.group_names["writer"] == ("al", "jo")
    assert split(data, "groups").names == ("al", "jo")


def test_npz_called_cifar10_is_scaled_like_cifar10(tmp_path, arrays):
    arrays["images"] = pixels(6, 32, 32, 3)
    data = load(save(tmp_path / "cifar10.npz", arrays))
    expected = (arrays["images"][..., 2] / 255 - 0.4465) / 0.2010
    np.testing.assert_allclose(data.x[:, 2], expected, atol=1e-5)


ENDS = np.arange(7) * 5  # of six files in thirty bytes
FILES = {"images": None, "jpeg": np.zeros(30, np.uint8)}
MANY = np.array([0, 1, 2, 0, 1, 2 * 10**12])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "has no array labels; expected it among images, is_test, classes"),
        ({"images": None}, "has no array images"),
        ({"is_test": None}, "has no array is_test"),
        ({"jpeg": FILES["jpeg"]}, "has no array offsets"),
        ({"images": np.zeros((6, 4))}, r"images are float64 \[6, 4\]; expected uint8"),
        ({"images": np.full((6, 4, 4), np.nan)}, "images are float64 .*; expected uint8"),
        ({"images": np.zeros((6, 3, 4, 4), np.uint8)}, r"images are uint8 \[6, 3, 4, 4\]"),
        ({"images": np.zeros((0, 4, 4), np.uint8)}, r"images are uint8 \[0, 4, 4\]"),
        ({"images": np.uint8(3)}, r"images are uint8 \[\]; expected uint8 .* \[N, H, W\]"),
        ({"images": np.array([None] * 6)}, r"images are object \[6\]"),
        ({"labels": MANY}, "labels run from 0 to 2000000000000; expected 0 to 2, as classes has 3"),
        (
            {"labels": MANY, "classes": None},
            "to 2000000000000; expected 0 to 65535",
        ),
        ({"labels": MANY.astype(np.uint64) * 2**20}, "labels run from 0 to 2097152000000000000;"),
        ({"labels": np.arange(6) - 1}, "labels run from -1 to 4"),
        ({"labels": np.zeros(6)}, "labels is an array of float64; expected whole numbers"),
        ({"labels": np.zeros(6, dtype=object)}, "labels is an array of object; expected whole"),
        ({"labels": np.array(3)}, r"labels has shape \[\]; expected \[6\], one value per image"),
        ({"is_test": np.zeros(5, dtype=bool)}, r"is_test has shape \[5\]; expected \[6\]"),
        ({"is_test": np.full(6, np.nan)}, "is_test is an array of float64; expected True or False"),
        ({"is_test": np.array(["no"] * 6)}, "is_test is an array of <U2"),
        ({"is_test": np.arange(6)}, "is_test has numbers up to 5; expected True or False"),
        ({"is_test": np.ones(6, bool)}, "is_test marks all images; expected some to train on"),
        ({"classes": np.array("ant")}, r"classes has shape \[\]; expected \[K\], a name for each"),
        ({"classes": np.array(["ant"] * 3)}, "classes has a name twice"),
        (FILES | {"offsets": np.array(3)}, r"offsets has shape \[\]; expected \[N \+ 1\]"),
        (FILES | {"offsets": np.arange(5)}, r"labels has shape \[6\]; expected \[4\]"),
        (FILES | {"offsets": ENDS * 1.0}, "offsets is an array of float64; expected whole numbers"),
        (FILES | {"offsets": ENDS[::-1].copy()}, "offsets run from 30 to 0; expected numbers that"),
        (FILES | {"offsets": ENDS * 2}, "offsets run from 0 to 60; expected .* from 0 to 30"),
        (FILES | {"offsets": ENDS}, "image 0 cannot be decoded .*; expected a JPEG file"),
        (FILES | {"jpeg": ENDS, "offsets": ENDS}, "jpeg is an array of int64; expected uint8"),
    ],
)
def test_refuses_arrays(tmp_path, arrays, change, message):
    kept = {n: v for n, v in (arrays | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path / "zoo.npz", kept))


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (np.array("jo"), r"who has shape \[\]; expected \[6\]"),
        (np.zeros(6), "who is an array of float64; expected texts or whole numbers"),
        (np.array(["jo", "", "jo", "al", "jo", "al"]), "who has '' for image 1"),
    ],
)
def test_refuses_groups(tmp_path, arrays, owners, message):
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path / "zoo.npz", arrays | {"who": owners}), client_column="who")


def test_images_of_two_sizes_are_refused(tmp_path, arrays):
    files = [jpeg(pixels(8, 8 + (k == 4), 3)) for k in range(6)]
    del arrays["images"]
    arrays["jpeg"] = np.frombuffer(b"".join(files), dtype=np.uint8)
    arrays["offsets"] = np.cumsum([0, *map(len, files)])
    with pytest.raises(ValueError, match=r"images of \[8, 8, 3\] and, at 4, \[8, 9, 3\]; expected"):
        load(save(tmp_path / "zoo.npz", arrays))


def test_arrays_that_are_not_asked_for_are_not_read(tmp_path, arrays):
    notes = {"notes": np.array([{}], dtype=object)}
    assert len(load(save(tmp_path / "zoo.npz", arrays | notes)).y) == 6


def claiming(path, arrays, name, shape):
    """Write arrays, one of them with a header that claims another shape."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, value in arrays.items():
            with archive.open(f"{each}.npy", "w") as file:
                head = npy.header_data_from_array_1_0(value)
                npy.write_array_header_1_0(file, head | ({"shape": shape} if each == name else {}))
                file.write(value.tobytes())
    return f"npz:{path}"


@pytest.mark.parametrize(
    ("name", "shape"),
    [("images", (10**12, 28, 28)), ("images", (6, -28, -28)), ("labels", (10**12,))],
)
def test_a_header_that_lies_is_refused_at_the_command_line(tmp_path, arrays, name, shape, capsys):
    data = claiming(tmp_path / "zoo.npz", arrays, name, shape)
    assert main(["run", "local", "--data", data, "--out", str(tmp_path / "out")]) == 2
    told = f"zoo.npz: {name} has shape {list(shape)} and {arrays[name].nbytes} bytes; expected"
    assert told in capsys.readouterr().err


def test_what_does_not_fit_into_memory_is_not_read(tmp_path, arrays, monkeypatch):
    data = save(tmp_path / "zoo.npz", arrays)
    size = 2 * npz_files.BYTES_PER_PIXEL * arrays["images"].size
    monkeypatch.setattr(npz_files, "machine_memory", lambda: size)
    assert len(load(data).y) == 6
    monkeypatch.setattr(npz_files, "machine_memory", lambda: size - 1)
    read, shapes = npz_files.npy.read_array, []

    def watched(*args, **options):
        found = read(*args, **options)
        shapes.append(found.shape)
        return found

    monkeypatch.setattr(npz_files.npy, "read_array", watched)
    with pytest.raises(ValueError, match=r"images takes 2\.63e-05 GiB once it is read; expected"):
        load(data)
    assert set(shapes) == {(6,), (3,)}


def test_a_damaged_file_is_refused_or_read(tmp_path, arrays):
    path = tmp_path / "zoo.npz"
    np.savez_compressed(path, **arrays)
    whole = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    refused = 0
    for _ in range(300):
        broken = whole.copy()
        broken[rng.integers(len(whole), size=2)] = rng.integers(256, size=2)
        path.write_bytes(broken[: rng.integers(1, len(whole)) if rng.random() < 0.2 else None])
        try:
            load(f"npz:{path}")
        except ValueError as error:
            refused += "zoo.npz" in str(error)
    assert refused > 150


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "color"}, "has no array color_labels"),
        ({"client_column": "writer"}, "has no array writer"),
        ({"likelihood": "normal"}, "likelihood is 'normal'; expected none"),
        ({"features": ["a"]}, r"features is \['a'\]; expected none"),
    ],
)
def test_refuses_arguments(tmp_path, arrays, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path / "zoo.npz", arrays), **arguments)


def test_refuses_what_is_no_npz_file(tmp_path):
    path = tmp_path / "zoo.npz"
    path.write_text("images")
    for name in (path, tmp_path / "none.npz"):
        with pytest.raises(ValueError, match=r"cannot be read as \.npz"):
            load(f"npz:{name}")
