"""Every number of an array under a name of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray


def coordinates(array: xarray.DataArray) -> Iterator[tuple[str, dict[Any, int]]]:
    """Yield the name of every place of an array, as in `arviz.summary`, and its index."""
    for place in np.ndindex(*array.shape):
        at = dict(zip(array.dims, place, strict=True))
        labels = ", ".join(str(array[d].values[i]) for d, i in at.items())
        yield f"{array.name}[{labels}]" if labels else str(array.name), at
