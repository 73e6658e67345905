"""posterior.nc of every method looks the same whichever ArviZ wrote and opens it.

Both versions give what the methods promise: 0.23 on Python 3.11, 1.x on 3.12 and 3.13.
"""

from __future__ import annotations

import promises
import pytest
import toys
from promises import others_slow
from test_contract import METHODS, MODULES

import pyrofl
from pyrofl.experiments.results import posterior_view
from pyrofl.inference.posteriors import export
from pyrofl.tensors import matches

NAMES = ("Ada", "Bea", "Cleo")
SIZES = {"fc1_in": 8, "fc1_out": 6, "head_in": 6, "head_out": 5, "client": 3, "chain": 1, "draw": 2}


@pytest.mark.parametrize("name", others_slow(METHODS))
def test_the_file_of_a_method_has_these_axes(name, tmp_path):
    data = toys.blobs((3, 5, 4))
    data = pyrofl.Federation(data.x, data.y, data.train, data.test, NAMES)
    net = toys.net()
    run = pyrofl.fit(
        MODULES[name].build(net, **promises.of(name).settings), data, 1, progress=False
    )
    view, adaptation = posterior_view(run)
    dims = {n: net.dims(n) for n in net.shapes}
    path = tmp_path / "posterior.nc"
    export.save(run.to_arviz(2, dims, model=view, adaptation=adaptation), path)
    found = export.import_arviz().from_netcdf(path)

    promised = promises.of(name)
    expected = {
        n: ("chain", "draw", *(() if matches(n, promised.together) else ("client",)), *axes)
        for n, axes in promised.sites.items()
    }
    posterior = found["posterior"]
    assert {n: v.dims for n, v in posterior.data_vars.items()} == expected
    points = {n for n, v in posterior.data_vars.items() if float(v.std("draw").max()) < 1e-15}
    assert points == (set() if promised.random else set(expected))
    assert found.attrs.get("points", "") == ", ".join(n for n in expected if n in points)
    for axis, size in posterior.sizes.items():
        assert size == SIZES.get(axis, size)
        assert posterior[axis].values.tolist() == (
            list(NAMES) if axis == "client" else list(range(size))
        )
    stats = found["sample_stats"]
    moved = {n: stats[n].dims for n in stats.data_vars if n.startswith("moved_")}
    assert set(moved.values()) <= {("chain", "round", "site")}
    assert {n: v.dims for n, v in stats.data_vars.items() if n not in moved} == {
        "loss": ("chain", "round", "client", "step"),
        **{n: ("chain", "client", *own) for n, own in promised.statistics.items()},
    }
    assert stats["client"].values.tolist() == list(NAMES)
    assert stats["round"].values.tolist() == [1]
    assert set(stats["step"].values.tolist()) == set(run.records[0].loss)
