"""Conversion of arrays to ArviZ containers and files, for ArviZ 0.23 and 1.x."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyrofl.arguments import checked
from pyrofl.files.run_folder import replacing, versions

if TYPE_CHECKING:
    import xarray

Fact = str | int | float
"""Type of attributes that netCDF and all versions of ArviZ accept."""

SAMPLE_DIMS = ("chain", "draw")
MAX_TIMESTAMP = 253402300800  # seconds from 1970 to the year 10000, the end of valid dates
# Environment variable that many tools read for reproducible output.
EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
MAX_METADATA_BYTES = 8192  # maximum bytes of a variable's metadata in a file
MAX_TAIL_FRACTION = 0.2  # maximum fraction of draws with smoothed weights
MIN_DRAWS = 25  # draws, of which a fifth suffices for a fit of the tail
ROUNDING_TOLERANCE = 1e-6  # spread of log weights due to rounding, as where a guide is exact


def inference_data(
    groups: Mapping[str, Mapping[str, np.ndarray | Tensor]],
    dims: Mapping[str, tuple[str, ...]],
    coords: Mapping[str, Sequence[Any]],
    along: Mapping[str, tuple[str, Sequence[Any]]] | None = None,
    attrs: Mapping[str, Fact] | None = None,
    listed: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Convert arrays to an ArviZ container: InferenceData (0.x) or xarray.DataTree (1.x).

    A slash is special in such data; in names it becomes a dot. The attributes of the container and
    of every group record the library and the date, as those of ArviZ do.

    Args:
        groups: "posterior", "log_likelihood", "observed_data"... -> variable -> array.
        dims: variable, or "group/variable" -> names of its axes, ("chain", "draw", "client", ...).
            Data without chains and draws may have the same name as a variable with them.
        coords: axis -> labels, such as "client" -> the clients' names; others count from 0.
        along: name -> (axis, further labels of its entries), such as the client of every row.
        attrs: further attributes of the container and of every group.
        listed: group -> further axes with labels but without variables.
    """
    attributes, datasets = _library() | dict(attrs or {}), {}
    for group, variables in groups.items():
        one = _dataset(group, variables, dims, coords, along or {})
        more = {axis: list(coords[axis]) for axis in (listed or {}).get(group, ())}
        datasets[group] = one.assign_coords(more).assign_attrs(attributes)
    return combine_datasets(datasets, attributes)


def _library() -> dict[str, Fact]:
    """Return attributes for ArviZ files: creation time, library name and version."""
    version = versions()["pyrofl"]
    return {
        "created_at": now().isoformat(),
        "creation_library": "pyrofl",
        "creation_library_version": version,
        "creation_library_language": "Python",
        "inference_library": "pyrofl",
        "inference_library_version": version,
    }


def now() -> datetime:
    """Return the current time, or the time in the environment variable SOURCE_DATE_EPOCH."""
    stopped = os.environ.get(EPOCH_VARIABLE)
    if stopped and not (stopped.isdecimal() and int(stopped) < MAX_TIMESTAMP):
        raise ValueError(
            f"{EPOCH_VARIABLE} is {stopped!r}; set it to whole seconds since 1970, or unset it"
        )
    return datetime.fromtimestamp(int(stopped), UTC) if stopped else datetime.now(UTC)


def refuse_no_runs(runs: Sequence[object]) -> None:
    """Raise ValueError unless all objects are runs returned by `fit`."""
    for run in runs:
        if not hasattr(run, "state") or not hasattr(run, "method"):
            raise ValueError(f"runs hold a {type(run).__name__}; expected runs returned by `fit`")


def refuse_no_groups(idata: object) -> None:
    """Raise ValueError unless an object holds ArviZ groups, as the result of `to_arviz`."""
    if not isinstance(idata, Mapping) and not (
        hasattr(idata, "groups") and hasattr(idata, "attrs")
    ):
        kind = type(idata).__name__
        raise ValueError(f"fitted is a {kind}; expected a Run, or the result of `to_arviz`")


def smooth_weights(log_weights: Tensor) -> tuple[Tensor, float]:
    """Return Pareto-smoothed, normalized log weights [S], and the tail's Pareto shape k."""
    log_weights = log_weights.double()
    if float(log_weights.amax() - log_weights.quantile(1 - MAX_TAIL_FRACTION)) < ROUNDING_TOLERANCE:
        return log_weights - log_weights.logsumexp(0), 0.0  # a fit of the tail would divide by 0
    if len(log_weights) < MIN_DRAWS:
        return log_weights - log_weights.logsumexp(0), math.inf
    values, arviz = log_weights.numpy(), import_arviz()
    with np.errstate(over="ignore", invalid="ignore"):  # in the quantiles of a very heavy tail
        if hasattr(arviz, "psislw"):
            weights, k = arviz.psislw(values.copy())
        else:  # ArviZ 1 expects negative weights
            weights, k = import_module("arviz_stats.base").array_stats.psislw(-values)
    if bool(np.isnan(weights).any()) or math.isnan(k):  # the tail is too heavy for a fit
        return log_weights - log_weights.logsumexp(0), math.inf
    return torch.as_tensor(weights), float(k)


def save(data: Any, path: str | Path) -> None:
    """Write ArviZ data to a netCDF-4 file; an error leaves no partial file.

    The data are the result of `inference_data`.

    Raises OSError if the file cannot be written.

    `arviz.from_netcdf` of 0.23 and 1.x, and `xarray.open_datatree`, open it.
    """
    with replacing(path, _has_rows(data)) as temporary:
        _find_room(data, temporary)
        data.to_netcdf(temporary, engine="h5netcdf")


def _has_rows(data: Any) -> bool:
    """Return whether ArviZ data hold values of rows, such as responses."""
    groups = (data.groups() if callable(data.groups) else data.children) or ()
    each = (data[group.strip("/")] for group in groups if group.strip("/"))
    return any("row" in part.dims for part in each)


def _find_room(data: Any, path: Path) -> None:
    """Reserve disk space for a file of ArviZ data; raise OSError before HDF5 could crash."""
    groups = data.groups() if callable(data.groups) else data.children
    parts = [data[group] for group in groups]
    size = sum(part.nbytes + MAX_METADATA_BYTES * (1 + len(part.variables)) for part in parts)
    with open(path, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, max(size, 1))


@checked
def load(path: str | Path) -> Any:
    """Load a netCDF file written by any version of ArviZ into memory, and close the file."""
    import xarray

    with xarray.open_datatree(path, engine="h5netcdf") as tree:
        groups = {name: node.to_dataset().load() for name, node in tree.children.items()}
        return combine_datasets(groups, {str(name): value for name, value in tree.attrs.items()})


def coordinates(array: xarray.DataArray) -> Iterator[tuple[str, dict[Any, int]]]:
    """Yield each entry's label, as in `arviz.summary`, and its index along each dimension."""
    for place in np.ndindex(*array.shape):
        at = dict(zip(array.dims, place, strict=True))
        labels = ", ".join(str(array[d].values[i]) for d, i in at.items())
        yield f"{array.name}[{labels}]" if labels else str(array.name), at


def import_arviz() -> Any:
    """Import and return ArviZ, without the FutureWarning about version 1 that ArviZ 0.23 shows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\nArviZ is undergoing", FutureWarning)
        try:
            return import_module("arviz")
        except OSError:  # without a home directory, ArviZ cannot store the date of the notice
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


def combine_datasets(
    datasets: Mapping[str, xarray.Dataset], attrs: Mapping[str, Fact] | None = None
) -> Any:
    """Combine xarray datasets into an InferenceData (ArviZ 0.x) or a DataTree (ArviZ 1.x)."""
    import xarray

    arviz = import_arviz()
    # By version: 0.23 accepts the calls of 1.x, but handles them differently.
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.InferenceData(attrs=dict(attrs or {}), **datasets)
    tree = xarray.DataTree.from_dict(dict(datasets))
    tree.attrs = dict(attrs or {})
    return tree


def _dataset(
    group: str,
    variables: Mapping[str, np.ndarray | Tensor],
    dims: Mapping[str, tuple[str, ...]],
    coords: Mapping[str, Sequence[Any]],
    along: Mapping[str, tuple[str, Sequence[Any]]],
) -> xarray.Dataset:
    """Return the xarray dataset of one ArviZ group; arguments as in `inference_data`."""
    import xarray

    arrays = {}
    places: dict[str, int] = {}
    for name, value in variables.items():
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        full_name = f"{group}/{name}"
        axes = _axes(full_name, array, dims.get(full_name, dims.get(name)))
        for axis, length in zip(axes, array.shape, strict=True):
            labels = len(coords.get(axis, range(places.get(axis, length))))
            if length != labels:
                raise ValueError(
                    f"{full_name}: axis {axis!r} has length {length}; expected {labels}"
                )
            places[axis] = length
        arrays[_plain(name)] = (tuple(map(_plain, axes)), array)
    if len(arrays) < len(variables):
        raise ValueError(
            f"{group}: names differ only in slashes: {', '.join(variables)}; rename one of them"
        )
    index: dict[str, Any] = {_plain(a): list(coords.get(a, range(n))) for a, n in places.items()}
    index |= {name: (axis, list(v)) for name, (axis, v) in along.items() if axis in places}
    return xarray.Dataset(arrays, index)


def _axes(name: str, array: np.ndarray, axes: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of an array's axes; raise ValueError if they do not fit its shape."""
    if axes is None:
        raise ValueError(f"{name}: its axes have no names; pass {array.ndim} names in dims")
    if axes[:2] == SAMPLE_DIMS and array.ndim == len(axes) - 2:
        axes = axes[2:]
    if array.ndim != len(axes):
        raise ValueError(f"{name} has shape {array.shape}; expected axes {', '.join(axes)}")
    return axes


def _plain(name: str) -> str:
    return name.replace("/", ".")
