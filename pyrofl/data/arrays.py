"""Conversion of each client's arrays or data frames into the fields of a federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyrofl.arguments import check_name, did_you_mean
from pyrofl.data.roster import names_of
from pyrofl.data.tables.source import Source
from pyrofl.data.tables.wording import listed
from pyrofl.data.weights import refuse_other_index
from pyrofl.extensions import find_extension
from pyrofl.user_warnings import warn_user

MAX_ROUNDING_SDS = 0.01  # largest change of a column by rounding, in standard deviations
KINDS = "fiub"  # NumPy kind codes of real numbers
Floats = NDArray[np.float64]
Words = tuple[str, ...]


class ClientRows(NamedTuple):
    """Training or test rows of a client, and the names of its features and target, if known."""

    x: Floats  # [N, *x]
    y: Tensor  # [N, ...]
    features: Words
    target: str


def federation_fields(
    sites: Mapping[str, Sequence[Any]],
    classes: Sequence[str] | int | None,
    features: Sequence[str] | None,
    held_out: Sequence[str],
) -> dict[str, Any]:
    """Validate the clients' arrays and return the fields of a `Federation`.

    See `Federation.from_arrays`. Rows are ordered by client; held-out clients come last.
    """
    if not isinstance(sites, Mapping) or not sites:
        kind = f"a {type(sites).__name__}" if not isinstance(sites, Mapping) else "empty"
        raise ValueError(f"sites is {kind}; expected a non-empty dict: name -> (x, y)")
    for name, value in sites.items():
        if not isinstance(value, tuple | list) or len(value) not in (2, 4):
            count = f" of {len(value)}" if isinstance(value, tuple | list) else ""
            message = f"{name} has a {type(value).__name__}{count}"
            raise ValueError(f"{message}; expected (x, y) or (x, y, x_test, y_test)")
    out = names_of("held_out", held_out)
    for name in out:
        check_name(name, [str(n) for n in sites], "held-out site")
    names = names_of("names of sites", [n for n in sites if n not in out] + list(out))
    labels = _classes(sites, classes)
    wanted = names_of("features", features) if features is not None else ()
    parts = [part for name in names for part in _site(name, sites[name], labels, wanted)]
    _refuse_unlike(parts, names)
    ends = torch.tensor([len(part.y) for part in parts]).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    rows = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    test, called = tuple(rows[1::2]), wanted or parts[0].features
    pooled, preprocessor = torch.cat(test), find_extension("preprocessor")
    columns = preprocessor.of_columns(called) if preprocessor else None
    return {
        "x": _as_floats(np.concatenate([part.x for part in parts]), called),
        "y": torch.cat([part.y for part in parts]),
        "train": tuple(rows[::2]),
        "test": test,
        "names": names,
        "classes": labels,
        "held_out": len(out),
        "pooled_test": pooled if len(pooled) else None,
        "source": Source(parts[0].target, called, preparation=columns) if called else None,
    }


def _classes(sites: Mapping[str, Sequence[Any]], classes: Sequence[str] | int | None) -> Words:
    """Return the class names: as given, or the labels in y if they are texts or booleans."""
    if isinstance(classes, int) and not isinstance(classes, bool):
        if classes < 2:
            raise ValueError(f"classes is {classes}; expected 2 or more, or their names")
        return tuple(map(str, range(classes)))
    if classes is not None:
        return names_of("classes", classes)  # type: ignore[arg-type]
    texts: set[str] = set()
    numbers: list[str] = []  # sites with a number or a boolean in y
    truths: list[str] = []  # sites with a boolean in y
    for name, parts in sites.items():
        for y in parts[1::2]:
            labels = y.flatten().tolist() if torch.is_tensor(y) else np.asarray(y).ravel().tolist()
            texts |= {label for label in labels if isinstance(label, str)}
            numbers += [str(name) for label in labels if isinstance(label, Real) and label == label]
            truths += [str(name) for label in labels if isinstance(label, bool)]
    if texts and numbers:  # 1 may be any of the classes
        raise ValueError(
            f"{numbers[0]}: y holds numbers, and elsewhere text such as {min(texts)!r}; expected "
            "one kind, or the names of the classes in the order of the numbers: classes=(...)"
        )
    if 0 < len(truths) < len(numbers):  # 1 may be a number
        raise ValueError(
            f"{truths[0]}: y holds True or False, and there are other numbers; expected one kind, "
            "booleans for two classes or numbers: y.astype(float)"
        )
    if truths:
        return "False", "True"
    look = find_extension("checks of words")
    if look and (text := look("y", sorted(texts), "classes")):
        warn_user(text)
    return _declared_classes(sites, texts) or tuple(sorted(texts))


def _declared_classes(sites: Mapping[str, Sequence[Any]], texts: set[str]) -> Words:
    """Return the categories of pandas that every y declares in one order of its own, or ()."""
    orders = {
        tuple(getattr(getattr(y, "dtype", None), "categories", ()))
        for parts in sites.values()
        for y in parts[1::2]
    }
    if len(orders) != 1 or not texts or not texts <= set(order := orders.pop()):
        return ()
    return () if list(order) == sorted(order) else tuple(n for n in order if n in texts)


def _site(name: str, parts: Sequence[Any], classes: Words, wanted: Words) -> list[ClientRows]:
    """Return the training and test rows of a client after validation."""
    train = rows_of(f"{name}:", parts[0], parts[1], classes, wanted)
    if len(parts) == 2:
        return [train, train._replace(x=train.x[:0], y=train.y[:0])]
    return [train, rows_of(f"{name}: test", parts[2], parts[3], classes, wanted)]


def rows_of(where: str, x: Any, y: Any, classes: Words, wanted: Words = ()) -> ClientRows:
    """Validate and return the rows of one client; `where` is the prefix of error messages."""
    values, features = inputs(f"{where} x", x, wanted)
    answers = responses_of(f"{where} y", y, classes)
    if len(values) != len(answers):
        raise ValueError(
            f"{where} x has {len(values)} rows and y has {len(answers)}; expected the same number"
        )
    refuse_other_index(where, x, y, "y")
    return ClientRows(values, answers, features, str(getattr(y, "name", None) or "y"))


def inputs(where: str, x: Any, wanted: Words = ()) -> tuple[Floats, Words]:
    """Return features x as floats [N, *x], and column names; `wanted` selects columns."""
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):
        return _columns(where, x, wanted)
    array = _array(where, x)
    if array.dtype == np.uint8:
        raise ValueError(
            f"{where} is uint8, 0 to 255 as in images; expected numbers around 1: x / 255.0"
        )
    if array.dtype.kind not in KINDS:
        raise ValueError(f"{where} is {array.dtype}; expected numbers")
    if array.ndim < 2 or not min(array.shape[1:]):
        cure = ": x[:, None] for a single column" if array.ndim == 1 else ""
        raise ValueError(f"{where} has shape {list(array.shape)}; expected [N, columns]{cure}")
    if wanted and array.shape[1:] != (len(wanted),):
        message = f"{where} has rows of shape {list(array.shape[1:])}"
        raise ValueError(f"{message}; expected [{len(wanted)}], one column per feature")
    values = array.astype(np.float64)
    bad = ~np.isfinite(values)
    if bad.any():
        place = np.argwhere(bad)[0, 1:].tolist()
        at = wanted[place[0]] if wanted else ", ".join(map(str, place))
        _refuse_gaps(f"{where}: column {at}", bad.reshape(len(bad), -1).any(1))
    return values, wanted


def _columns(where: str, frame: Any, wanted: Words) -> tuple[Floats, Words]:
    """Return the columns of a data frame as floats, in the order of `wanted`."""
    names = tuple(frame.columns)
    if not wanted and names == tuple(range(len(names))):
        return inputs(where, frame.to_numpy())
    names = names_of(f"{where}: columns", names)
    if lacking := [name for name in wanted if name not in names]:
        message = f"{where} lacks column {listed(lacking)}"
        close = did_you_mean(lacking[0], names)
        raise ValueError(f"{message}; expected its name among {listed(names)}{close}")
    columns = [_column(f"{where}: column {name}", frame[name]) for name in wanted or names]
    if not columns:
        raise ValueError(f"{where} has no column; expected at least one")
    return np.stack(columns, axis=1), wanted or names


def _column(where: str, column: Any) -> Floats:
    """Return a column of a data frame as floats; raise ValueError for missing or other values."""
    _refuse_gaps(where, np.asarray(column.isna()))
    array = np.asarray(column)
    if array.dtype.kind == "O":  # as of a nullable numeric column of pandas
        array = np.array(column.tolist())
    if array.dtype.kind not in KINDS:
        odd = next((v for v in column.tolist() if not isinstance(v, Real)), array.dtype)
        raise ValueError(f"{where} holds {odd!r}; expected numbers: code it, or leave it out")
    values: Floats = array.astype(np.float64)
    _refuse_gaps(where, ~np.isfinite(values))
    return values


def _refuse_gaps(where: str, bad: Any) -> None:
    """Raise ValueError if the mask `bad` [N] marks any row as missing, NaN or infinite."""
    if bad.any():
        raise ValueError(
            f"{where} is missing, NaN or infinite in {bad.sum()} rows, first in row "
            f"{bad.argmax()}; expected finite numbers: fill them, or leave these rows out"
        )


def _array(where: str, value: Any) -> NDArray[Any]:
    """Return a tensor, list or array as a NumPy array with rows along its first axis."""
    is_sparse = torch.is_tensor(value) and value.layout is not torch.strided
    if is_sparse or hasattr(value, "tocsr"):  # a SciPy sparse array has `tocsr`
        raise ValueError(f"{where} is sparse; expected a dense array: .to_dense() or .toarray()")
    if torch.is_tensor(value):
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        message = f"{where} is a {type(value).__name__}"
        raise ValueError(f"{message}; expected an array, a tensor or a data frame")
    mask = np.ma.getmaskarray(value) if isinstance(value, np.ma.MaskedArray) else np.zeros(0)
    if rows := sorted(set(np.argwhere(mask)[:, 0].tolist())):
        message = f"{where} is masked in {len(rows)} rows, first in row {rows[0]}"
        raise ValueError(f"{message}; expected a value in all: fill them, or leave these rows out")
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of several lengths
        raise ValueError(f"{where} is ragged; expected rows of one length") from error


def responses_of(where: str, responses: Any, classes: Words) -> Tensor:
    """Return responses y as class indices (int64), or as floats if there are no classes."""
    y = _array(where, responses)
    if classes:
        return torch.from_numpy(_labels(where, y, classes))
    if y.dtype.kind == "O":
        y = np.array(y.tolist())
    if y.dtype.kind not in KINDS:
        raise ValueError(f"{where} is {y.dtype}; expected numbers, or classes=(...) by name")
    if not y.ndim or (y.ndim > 1 and y.shape[1:] == (1,)):
        message = f"{where} has shape {list(y.shape)}"
        raise ValueError(f"{message}; expected [N]: y[:, 0], as [N, 1] would broadcast")
    values = y.astype(np.float64)
    _refuse_gaps(where, ~np.isfinite(values).all(tuple(range(1, values.ndim))))
    return _as_floats(values, (where,))


def _labels(where: str, y: NDArray[Any], classes: Words) -> NDArray[np.int64]:
    """Convert class labels, given as names or numbers, to class indices [N]."""
    if y.ndim != 1:
        raise ValueError(f"{where} has shape {list(y.shape)}; expected a label for each row, [N]")
    places: dict[str | int, int] = {name: place for place, name in enumerate(classes)}
    named = all(name.lstrip("-").isdecimal() for name in classes)  # then numbers match names
    if not named:
        places |= {place: place for place in range(len(classes))}

    def key(label: Any) -> str | int | None:
        if isinstance(label, str):
            return label
        whole = isinstance(label, int | float) and label == label // 1
        return None if not whole else str(int(label)) if named else int(label)

    codes = [places.get(key(label), -1) for label in y.tolist()]  # type: ignore[arg-type]
    if -1 in codes:
        row = codes.index(-1)
        message = f"{where} is {y.tolist()[row]!r} in row {row}"
        raise ValueError(f"{message}; expected one of {listed(classes)}")
    return np.array(codes, dtype=np.int64)


def _refuse_unlike(parts: Sequence[ClientRows], names: Words) -> None:
    """Raise ValueError if two clients' arrays differ in their columns or in the shape of a row."""
    first = parts[0]
    for place, part in enumerate(parts):
        name, shapes = names[place // 2], (part.x.shape[1:], first.x.shape[1:])
        if part.features != first.features and set(part.features) == set(first.features):
            raise ValueError(
                f"{name}: its columns are {listed(part.features)}, in another order than those of "
                f"{names[0]}; expected one order: features={list(first.features)}"
            )
        if part.features != first.features:
            odd = sorted(set(part.features) ^ set(first.features))
            raise ValueError(
                f"{name} and {names[0]} differ in columns: only one has {listed(odd)}; expected "
                "the same columns for all sites"
            )
        if shapes[0] != shapes[1]:
            message = f"{name}: x has rows of shape {list(shapes[0])}"
            raise ValueError(f"{message}; expected {list(shapes[1])}, the shape of {names[0]}")
        if part.y.shape[1:] != first.y.shape[1:]:
            message = f"{name}: y has {list(part.y.shape[1:])} per row"
            raise ValueError(
                f"{message}; expected {list(first.y.shape[1:])}, the shape of {names[0]}"
            )


def _as_floats(values: Floats, names: Words) -> Tensor:
    """Convert values to torch's default float type; raise ValueError if distinct ones coincide."""
    with np.errstate(over="ignore", invalid="ignore"):
        tensor = torch.from_numpy(values).to(torch.get_default_dtype())
        if values.ndim > 2 or not len(values):
            return tensor
        flat = values if values.ndim > 1 else values[:, None]
        off, spread = np.abs(flat - tensor.double().numpy().reshape(flat.shape)), flat.std(0)
        varies = flat.max(0) > flat.min(0)  # `spread` has rounding errors, and may be 0
        bad = ((off > MAX_ROUNDING_SDS * spread) & varies | ~np.isfinite(off)).any(0)
    if bad.any():
        place = int(bad.argmax())
        low, high = flat[:, place].min(), flat[:, place].max()
        raise ValueError(
            f"{names[place] if names else f'column {place}'} runs from {low:.12g} to {high:.12g}; "
            f"expected numbers that {tensor.dtype} distinguishes: subtract the smallest from "
            "all of them, or call torch.set_default_dtype(torch.float64)"
        )
    return tensor
