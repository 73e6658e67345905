"""Small files with random images, in the layouts of the data sets that the papers use.

Size smoke of the studies trains on them, and tests of the loaders read them.
"""

import json
from pathlib import Path
from zipfile import ZipFile

import numpy as np
from numpy.random import Generator, default_rng

ARRAYS = {  # file -> pixels, colors, classes
    "mnist": (8, 1, 10),
    "fashion_mnist": (8, 1, 10),
    "cifar10": (8, 3, 10),
    "cifar100": (8, 3, 100),
    "svhn": (8, 3, 10),
    "emnist": (8, 1, 62),
    "tiny_imagenet": (8, 3, 20),
}
SUPERCLASSES = ("indoor", "outdoor, natural", "outdoor, man-made")
XLSX = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'


def write_all(folder: Path) -> None:
    """Write files of all data sets into a folder."""
    rng = default_rng(0)
    for name, layout in ARRAYS.items():
        arrays(folder / f"{name}.npz", *layout, rng)
    femnist(folder, rng)
    celeba(folder, rng)
    sun397(folder, rng)
    digit_five(folder, rng)


def images(labels: np.ndarray, shape: tuple[int, ...], rng: Generator) -> np.ndarray:
    """Return random images uint8 [n, *shape], each near the center of its class."""
    centers = rng.uniform(40, 215, (int(labels.max()) + 1, *shape))
    noise = rng.normal(0, 30, (len(labels), *shape))
    return np.clip(centers[labels] + noise, 0, 255).astype(np.uint8)


def arrays(path: Path, pixels: int, colors: int, classes: int, rng: Generator) -> None:
    """Write a file of arrays; that of CIFAR-100 has superclasses."""
    each = 16 if classes <= 20 else 10
    labels = np.tile(np.arange(classes), each)
    shape = (pixels, pixels, colors) if colors > 1 else (pixels, pixels)
    content = {
        "images": images(labels, shape, rng),
        "labels": labels,
        "is_test": np.arange(len(labels)) >= classes * (each - 2),
        "classes": np.array([f"{path.stem} {label}" for label in range(classes)]),
    }
    if path.stem == "cifar100":
        content["coarse_labels"] = labels % 20
        content["coarse_classes"] = np.array([f"super {c}" for c in range(20)])
    np.savez(path, **content)


def leaf(folder: Path, part: str, rows: dict[str, dict[str, list]], number: int = 0) -> Path:
    """Write a file of LEAF: user -> x and y."""
    content = {"users": [*rows], "num_samples": [len(of["y"]) for of in rows.values()]}
    path = folder / "data" / part / f"all_data_{number}_niid_0_keep_0_{part}_9.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {"user_data": rows}))
    return path


def femnist(folder: Path, rng: Generator, writers: int = 5, rows: int = 16) -> None:
    """Write FEMNIST with two files for training and one for testing."""
    for part, count in (("train", rows), ("test", rows // 4)):
        of = {}
        for writer in range(writers):
            labels = rng.integers(0, 62, count)
            x = images(labels, (28 * 28,), rng) / 255
            of[f"f{writer:04}_{writer}"] = {"x": x.round(4).tolist(), "y": labels.tolist()}
        cut = writers // 2 if part == "train" else writers
        names = [*of]
        for number, some in enumerate((names[:cut], names[cut:])):
            if some:
                leaf(folder / "femnist", part, {name: of[name] for name in some}, number)


def celeba(folder: Path, rng: Generator, people: int = 5, rows: int = 8) -> None:
    """Write CelebA with images of 10 x 12 pixels and labels 0.0 and 1.0."""
    raw, number = folder / "celeba" / "data" / "raw" / "img_align_celeba", 0
    for part, count in (("train", rows), ("test", rows // 4)):
        of = {}
        for person in range(people):
            labels = np.arange(count) % 2
            names = [f"{number + i + 1:06}.jpg" for i in range(count)]
            for name, pixels in zip(names, images(labels, (12, 10, 3), rng), strict=True):
                picture(raw / name, pixels)
            number += count
            of[str(person + 1)] = {"x": names, "y": [float(label) for label in labels]}
        leaf(folder / "celeba", part, of)


def sun397(folder: Path, rng: Generator, each: int = 2, rows: int = 100) -> None:
    """Write SUN397 with this number of classes of each superclass, and one class of two of them."""
    root, table = folder / "SUN397", {}
    for k in range(len(SUPERCLASSES)):
        for i in range(each):
            table[f"/{'bot'[k]}/scene{i}/{SUPERCLASSES[k].split()[-1]}"] = {k}
    table["/a/ambiguous"] = {0, 2}
    for name in table:
        for i, pixels in enumerate(images(np.zeros(rows, int), (8, 10, 3), rng)):
            picture(root / name[1:] / f"sun_{i:04}.jpg", pixels)
    (root / "ClassName.txt").write_text("".join(f"{name}\n" for name in sorted(table)))
    words = ["category", *SUPERCLASSES]
    rows_of = [
        ["", "level 1"],
        words,
        *([n, *(k in of for k in range(3))] for n, of in table.items()),
    ]
    path = root / "hierarchy_three_levels" / "three_levels.xlsx"
    sheet(path, [[cell if isinstance(cell, str) else int(cell) for cell in row] for row in rows_of])


def sheet(path: Path, rows: list[list[str | int]]) -> None:
    """Write an .xlsx file with one sheet; texts are shared strings, as Excel writes them."""
    texts = sorted({cell for row in rows for cell in row if isinstance(cell, str)})
    lines = []
    for i, row in enumerate(rows, 1):
        cells = [
            f'<c r="{"ABCDEFG"[j]}{i}" t="s"><v>{texts.index(cell)}</v></c>'
            if isinstance(cell, str)
            else f'<c r="{"ABCDEFG"[j]}{i}"><v>{cell}</v></c>'
            for j, cell in enumerate(row)
        ]
        lines.append(f'<row r="{i}">{"".join(cells)}</row>')
    path.parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(path, "w") as archive:
        shared = "".join(f"<si><t>{text}</t></si>" for text in texts)
        archive.writestr("xl/sharedStrings.xml", f"<sst {XLSX}>{shared}</sst>")
        body = f"<worksheet {XLSX}><sheetData>{''.join(lines)}</sheetData></worksheet>"
        archive.writestr("xl/worksheets/sheet1.xml", body)


def digit_five(folder: Path, rng: Generator, train: int = 60, test: int = 20) -> None:
    """Write the six .mat files of Digit-Five."""
    from scipy.io import savemat

    def part(count: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % 10
        return images(labels, shape, rng), labels

    root = folder / "Digit-Five"
    root.mkdir(parents=True, exist_ok=True)
    content: dict[str, dict] = {"mnist_data": {}, "mnistm_with_label": {}, "syn_number": {}}
    for name, count in (("train", train), ("test", test)):
        x, y = part(count, 28, 28, 1)
        content["mnist_data"] |= {f"{name}_28": x, f"label_{name}": np.eye(10)[y]}
        x, y = part(count, 28, 28, 3)
        content["mnistm_with_label"] |= {name: x, f"label_{name}": np.eye(10)[y]}
        x, y = part(count, 32, 32, 3)
        content["syn_number"] |= {f"{name}_data": x, f"{name}_label": y[:, None]}
        x, y = part(count, 32, 32, 3)
        tens = np.where(y == 0, 10, y)[:, None]
        content[f"svhn_{name}_32x32"] = {"X": x.transpose(1, 2, 3, 0), "y": tens}
    usps = np.empty((2, 2), dtype=object)
    for i, count in enumerate((train, test)):
        x, y = part(count, 1, 28, 28)
        usps[i, 0], usps[i, 1] = (x / 255).astype(np.float32), y[:, None]
    content["usps_28x28"] = {"dataset": usps}
    for name, values in content.items():
        savemat(root / f"{name}.mat", values)


def picture(path: Path, pixels: np.ndarray) -> None:
    """Write an image in the format of its suffix."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
