"""Posteriors for ArviZ: named axes, labelled clients, files that 0.23 and 1.x both open."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyrofl.files.run_folder import replacing

if TYPE_CHECKING:
    import xarray

SAMPLES = ("chain", "draw")
VARIABLE = 8192  # bytes in a file that tell what a variable is, at most


def inference_data(
    groups: Mapping[str, Mapping[str, np.ndarray | Tensor]],
    dims: Mapping[str, tuple[str, ...]],
    coords: Mapping[str, Sequence[Any]],
    along: Mapping[str, tuple[str, Sequence[Any]]] | None = None,
    attrs: Mapping[str, str] | None = None,
) -> Any:
    """Gather arrays for ArviZ: an InferenceData for ArviZ 0.x, an xarray.DataTree for 1.x.

    A slash has a meaning of its own in such data; in names it becomes a dot.

    Args:
        groups: "posterior", "log_likelihood", "observed_data"... -> variable -> array.
        dims: variable, or "group/variable" -> names of its axes, ("chain", "draw", "client", ...).
            Data without chains and draws may have the same name as a variable with them.
        coords: axis -> labels, such as "client" -> the clients' names; others count from 0.
        along: name -> (axis, further labels of its places), such as the client of every row.
        attrs: what every group says of itself.

    Raises:
        ValueError: if a variable's axes are unnamed or too few or too many, if there are not as
            many labels as places, or if two names become the same.
    """
    along = along or {}
    made = {group: _dataset(group, v, dims, coords, along) for group, v in groups.items()}
    return gathered({group: one.assign_attrs(attrs or {}) for group, one in made.items()})


def refuse_no_runs(runs: Sequence[object]) -> None:
    """Refuse what `fit` has not returned."""
    for run in runs:
        if not hasattr(run, "state") or not hasattr(run, "method"):
            raise ValueError(f"runs hold a {type(run).__name__}; expected what `fit` returns")


def refuse_no_groups(found: object) -> None:
    """Refuse what `to_arviz` has not made."""
    if not isinstance(found, Mapping) and not (
        hasattr(found, "groups") and hasattr(found, "attrs")
    ):
        kind = type(found).__name__
        raise ValueError(f"found is a {kind}; expected a Run, or what `to_arviz` made of runs")


def smoothed(log_weights: Tensor) -> tuple[Tensor, float]:
    """Return log importance weights [S], normalised, with a Pareto tail, and its shape."""
    values, arviz = log_weights.double().numpy(), import_arviz()
    if hasattr(arviz, "psislw"):
        weights, k = arviz.psislw(values.copy())
    else:  # ArviZ 1, which takes their negative
        weights, k = import_module("arviz_stats.base").array_stats.psislw(-values)
    return torch.as_tensor(weights), float(k)


def save(data: Any, path: str | Path) -> None:
    """Write what `inference_data` made as netCDF-4; the file is whole, or not there: OSError.

    `arviz.from_netcdf` of 0.23 and 1.x, and `xarray.open_datatree`, open it.
    """
    with replacing(path) as temporary:
        _find_room(data, temporary)
        data.to_netcdf(temporary, engine="h5netcdf")


def _find_room(data: Any, path: Path) -> None:
    """Raise if a disk is full: HDF5 would find out half-way, and may take the process with it."""
    groups = data.groups() if callable(data.groups) else data.children
    parts = [data[group] for group in groups]
    size = sum(part.nbytes + VARIABLE * (1 + len(part.variables)) for part in parts)
    with open(path, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, max(size, 1))


def load(path: str | Path) -> Any:
    """Read such a file, whichever version wrote it, into memory: the file is free afterwards."""
    import xarray

    with xarray.open_datatree(path, engine="h5netcdf") as tree:
        return gathered({name: node.to_dataset().load() for name, node in tree.children.items()})


def coordinates(array: xarray.DataArray) -> Iterator[tuple[str, dict[Any, int]]]:
    """Yield the name of every place of an array, as in `arviz.summary`, and its index."""
    for place in np.ndindex(*array.shape):
        at = dict(zip(array.dims, place, strict=True))
        labels = ", ".join(str(array[d].values[i]) for d, i in at.items())
        yield f"{array.name}[{labels}]" if labels else str(array.name), at


def import_arviz() -> Any:
    """Import ArviZ without the notice of its version 1 that 0.23 gives once a day."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\nArviZ is undergoing", FutureWarning)
        try:
            return import_module("arviz")
        except OSError:  # there is no home to note the day of that notice in
            with TemporaryDirectory() as folder, _environment(XDG_CACHE_HOME=folder):
                return import_module("arviz")


@contextmanager
def _environment(**words: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(words)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def gathered(datasets: Mapping[str, xarray.Dataset]) -> Any:
    """Put groups into the container of the installed ArviZ."""
    import xarray

    arviz = import_arviz()
    # By version: 0.23 takes the calls of 1.x without a word and does something else.
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.InferenceData(**datasets)
    return xarray.DataTree.from_dict(dict(datasets))


def _dataset(
    group: str,
    variables: Mapping[str, np.ndarray | Tensor],
    dims: Mapping[str, tuple[str, ...]],
    coords: Mapping[str, Sequence[Any]],
    along: Mapping[str, tuple[str, Sequence[Any]]],
) -> xarray.Dataset:
    """Build one group; arguments as of `inference_data`."""
    import xarray

    arrays = {}
    places: dict[str, int] = {}
    for name, value in variables.items():
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        known = f"{group}/{name}"
        axes = _axes(known, array, dims.get(known, dims.get(name)))
        for axis, length in zip(axes, array.shape, strict=True):
            labels = len(coords.get(axis, range(places.get(axis, length))))
            if length != labels:
                raise ValueError(f"{known}: axis {axis!r} has {length} places; expected {labels}")
            places[axis] = length
        arrays[_plain(name)] = (tuple(map(_plain, axes)), array)
    if len(arrays) < len(variables):
        raise ValueError(f"{group}: names differ only in slashes: {', '.join(variables)}")
    index: dict[str, Any] = {_plain(a): list(coords.get(a, range(n))) for a, n in places.items()}
    index |= {name: (axis, list(v)) for name, (axis, v) in along.items() if axis in places}
    return xarray.Dataset(arrays, index, {"inference_library": "pyrofl"})


def _axes(name: str, array: np.ndarray, axes: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of an array's axes."""
    if axes is None:
        raise ValueError(f"{name}: its axes have no names; expected {array.ndim} in dims")
    if axes[:2] == SAMPLES and array.ndim == len(axes) - 2:
        axes = axes[2:]
    if array.ndim != len(axes):
        raise ValueError(f"{name} has shape {array.shape}; expected axes {', '.join(axes)}")
    return axes


def _plain(name: str) -> str:
    return name.replace("/", ".")
