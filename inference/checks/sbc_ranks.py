"""Ranks of a truth among draws: whether they are uniform, and what intervals cover."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    import pandas
    import xarray

LEVELS = (0.5, 0.8, 0.95)
EXPECTED = 10  # replications in a bin


@dataclass(frozen=True)
class Ranks:
    """Ranks of the truth among the draws.

    Attributes:
        ranks: of every site, 0 to L, dims replication, client (not for shared sites) and the
            site's own; NaN where the fit failed.
        draws: L.
        bins: of the test for uniform ranks.
        failed: "replication: what was not finite". These replications count nowhere else, so a
            method is as good as its ranks only if this is empty.
    """

    ranks: xarray.Dataset
    draws: int
    bins: int
    failed: tuple[str, ...] = ()

    @property
    def places(self) -> xarray.Dataset:
        """Ranks between 0 and 1: (rank + 1/2) / (L + 1), uniform as they are."""
        return (self.ranks + 0.5) / (self.draws + 1)

    def of_client(self, client: str) -> dict[str, Any]:
        """Return the places [R] of what a client has or shares, by coordinate."""
        known = self.places
        if "client" in known.dims:
            known = known.sel(client=client)
        return {
            f"{name}[{label}]" if label else name: known[name].isel(at).to_numpy()
            for name in map(str, known)
            for label, at in _coordinates(known[name].isel(replication=0))
        }

    def coverage(self, levels: Sequence[float] = LEVELS) -> xarray.Dataset:
        """Return how often central intervals held the truth, with a new dim, level.

        An interval ends at draws, so that no error comes from interpolation; levels are rounded to
        those that such intervals have, (L + 1 - 2 k) / (L + 1). By chance alone, a share of
        replications R is off by (level (1 - level) / R)^1/2.

        Raises:
            ValueError: if a level is not between 0 and 1.
        """
        import xarray

        if not all(0 < level < 1 for level in levels):
            raise ValueError(f"levels are {list(levels)}; expected numbers between 0 and 1")
        known = self.ranks.dropna("replication")
        tails = [round((1 - level) / 2 * (self.draws + 1)) for level in levels]
        inside = [((known >= k) & (known <= self.draws - k)).mean("replication") for k in tails]
        exact = [1 - 2 * k / (self.draws + 1) for k in tails]
        return xarray.concat(inside, xarray.Variable("level", exact))

    def p_values(self) -> xarray.Dataset:
        """Return the p value of uniform ranks by the chi-square test, one for each coordinate.

        Replications are independent, and so are ranks of one coordinate. Those of two clients in
        one replication are not, as long as something is shared, nor are those of two coordinates
        of a client: they are never thrown together here.
        """
        import xarray

        known = self.ranks.dropna("replication")
        found: xarray.Dataset = xarray.apply_ufunc(
            self._p_value, known, input_core_dims=[["replication"]]
        )
        return found

    def _p_value(self, ranks: Any) -> Any:
        from scipy.stats import chisquare

        width = (self.draws + 1) // self.bins
        counts = [((ranks // width) == b).sum(-1) for b in range(self.bins)]
        return chisquare(np.stack(counts, -1), axis=-1).pvalue

    def table(self) -> pandas.DataFrame:
        """Return a row for each coordinate, named as in `arviz.summary`.

        Columns: variable; p, see `p_values`; p_holm, adjusted for the number of rows, which holds
        whatever depends on what (Holm 1979); and the coverage of 50%, 80% and 95% intervals.
        """
        import pandas

        p, coverage = self.p_values(), self.coverage()
        rows = {}
        for name in map(str, p):
            for label, at in _coordinates(p[name]):
                covered = coverage[name].isel(at)
                rows[f"{name}[{label}]" if label else name] = {
                    "variable": name,
                    "p": float(p[name].isel(at)),
                    **{f"{v:.0%}": float(covered.isel(level=i)) for i, v in enumerate(LEVELS)},
                }
        table = pandas.DataFrame.from_dict(rows, orient="index")
        table.insert(2, "p_holm", _holm(table["p"].to_numpy()))
        return table

    @property
    def p_value(self) -> float:
        """Smallest p value after Holm's adjustment: that all ranks are uniform."""
        return float(self.table()["p_holm"].min())


def rank(draws: Tensor, truth: Tensor, source: Generator) -> Tensor:
    """Return how many draws [S, ...] are below the truth [...]; `source` breaks ties at random."""
    ties = (draws == truth).sum(0)
    chance = torch.rand(ties.shape, generator=source, dtype=torch.float64).to(draws.device)
    return (draws < truth).sum(0) + (chance * (ties + 1)).floor()


def usual_bins(replications: int, draws: int, bins: int | None) -> int:
    """Return the number of bins, checked; None asks for the usual one."""
    if replications < 2 or draws < 1:
        raise ValueError(
            f"replications is {replications}, draws {draws}; expected at least 2 and 1"
        )
    most = min(20, max(2, replications // EXPECTED))
    fitting = [b for b in range(2, most + 1) if (draws + 1) % b == 0]
    if bins is None and fitting:
        return fitting[-1]
    if bins is None or bins < 2 or (draws + 1) % bins:
        raise ValueError(
            f"draws is {draws}, bins {bins}; expected draws + 1 to be a multiple of the number of "
            f"bins, such as 199 draws and 20 bins; by default at most {most} bins"
        )
    return bins


def _coordinates(array: xarray.DataArray) -> Iterator[tuple[str, dict[Any, int]]]:
    """Yield the labels of every place of an array, and its index."""
    for place in np.ndindex(*array.shape):
        at = dict(zip(array.dims, place, strict=True))
        yield ", ".join(str(array[d].values[i]) for d, i in at.items()), at


def _holm(p: Any) -> Any:
    """Adjust p values [m] for their number (Holm, Scandinavian Journal of Statistics 1979)."""
    order, m = np.argsort(p), len(p)
    found = np.empty(m)
    found[order] = np.maximum.accumulate(np.minimum(1.0, p[order] * (m - np.arange(m))))
    return found
