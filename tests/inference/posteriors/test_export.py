"""Posteriors reach ArviZ with named axes, and come back from files as they were."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray

from pyrofl.inference.posteriors.export import (
    import_arviz,
    inference_data,
    load,
    save,
    smooth_weights,
)

ROOT = Path(__file__).parents[3]
CLIENTS = ["Ada", "Émile", "client 3"]
DIMS = {
    "head.weight": ("chain", "draw", "client", "head_out", "head_in"),
    "tau": ("chain", "draw", "client"),
    "y": ("chain", "draw", "client", "row"),
}


def example() -> dict[str, dict[str, np.ndarray | torch.Tensor]]:
    g = np.random.default_rng(0)
    return {
        "posterior": {
            "head.weight": torch.from_numpy(g.normal(size=(2, 50, 3, 4, 5))).requires_grad_(),
            "tau": g.gamma(2.0, size=(2, 50, 3)).astype(np.float32),
        },
        "log_likelihood": {"y": g.normal(size=(2, 50, 3, 6))},
        "observed_data": {"y": g.integers(0, 4, (3, 6))},
    }


def build():
    return inference_data(example(), DIMS, {"client": CLIENTS})


def test_axes_and_clients_have_names():
    data = build()
    weight = data["posterior"]["head.weight"]
    assert weight.dims == DIMS["head.weight"]
    assert data["posterior"]["client"].values.tolist() == CLIENTS
    assert data["posterior"]["head_in"].values.tolist() == [0, 1, 2, 3, 4]
    assert data["observed_data"]["y"].dims == ("client", "row")
    one = weight.sel(client="Émile", chain=1, draw=3, head_out=2, head_in=0)
    assert float(one) == example()["posterior"]["head.weight"][1, 3, 1, 2, 0].item()


def test_the_container_is_the_one_of_the_installed_arviz():
    arviz = import_arviz()
    expected = arviz.InferenceData if arviz.__version__.startswith("0.") else xarray.DataTree
    assert type(build()) is expected


def test_arviz_summarizes_it():
    summary = import_arviz().summary(build(), var_names=["tau"])
    assert list(summary.index) == [f"tau[{name}]" for name in CLIENTS]
    expected = example()["posterior"]["tau"].mean((0, 1))
    np.testing.assert_allclose(summary["mean"], expected, atol=5e-3)


def same(a, b) -> None:
    for group, variables in example().items():
        for name in variables:
            xarray.testing.assert_identical(a[group][name], b[group][name])


def test_a_file_comes_back_as_it_was(tmp_path):
    path = tmp_path / "posterior.nc"
    data = build()
    save(data, path)
    assert [p.name for p in tmp_path.iterdir()] == ["posterior.nc"]
    same(load(path), data)
    # Loaded data need the file no more: it can be written again, and deleted.
    again = load(path)
    save(again, path)
    path.unlink()
    same(again, data)


def test_others_open_the_file(tmp_path):
    path = tmp_path / "posterior.nc"
    save(build(), path)
    same(import_arviz().from_netcdf(path, engine="h5netcdf"), build())
    with xarray.open_datatree(path, engine="h5netcdf") as tree:
        assert set(tree.children) == set(example())
        same(tree, build())


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "posterior.nc"
    save(build(), path)
    before = path.read_bytes()

    class Broken:
        groups, children = (), ()

        def to_netcdf(self, file, engine):
            file.write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(Broken(), path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_slashes_become_dots():
    axes = ("chain", "draw", "client", "loc/w_dim_0")
    data = inference_data(
        {"posterior": {"loc/w": np.zeros((1, 2, 3, 4))}}, {"loc/w": axes}, {"loc/w_dim_0": "abcd"}
    )
    assert data["posterior"]["loc.w"].dims == ("chain", "draw", "client", "loc.w_dim_0")
    assert data["posterior"]["loc.w_dim_0"].values.tolist() == ["a", "b", "c", "d"]


def test_groups_may_name_axes_and_places_may_have_further_labels():
    data = inference_data(
        {"posterior": {"tau": np.zeros((1, 2, 3))}, "sample_stats": {"tau": np.zeros((1, 4))}},
        {"tau": ("chain", "draw", "row"), "sample_stats/tau": ("chain", "step")},
        {},
        {"row_client": ("row", ["Ada", "Ada", "Bea"])},
    )
    assert data["sample_stats"]["tau"].dims == ("chain", "step")
    assert "row_client" not in data["sample_stats"].coords
    tau = data["posterior"]["tau"]
    assert tau["row_client"].values.tolist() == ["Ada", "Ada", "Bea"]
    assert tau.isel(row=tau["row_client"] == "Ada").shape == (1, 2, 2)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"z": np.zeros(3)}, "posterior/z: its axes have no names; pass 1 names in dims"),
        ({"tau": np.zeros((1, 2, 3, 4))}, r"posterior/tau has shape \(1, 2, 3, 4\); expected axes"),
        ({"tau": np.zeros((1, 2, 4))}, "posterior/tau: axis 'client' has length 4; expected 3"),
        (
            {"tau": np.zeros((1, 2, 3)), "y": np.zeros((1, 5, 3, 6))},
            "posterior/y: axis 'draw' has length 5; expected 2",
        ),
        ({"a/b": np.zeros(3), "a.b": np.zeros(3)}, "names differ only in slashes: a/b, a.b"),
    ],
)
def test_arrays_that_do_not_fit_their_names_are_refused(variables, message):
    dims = DIMS | {"a/b": ("client",), "a.b": ("client",)}
    with pytest.raises(ValueError, match=message):
        inference_data({"posterior": variables}, dims, {"client": CLIENTS})


@pytest.mark.slow
def test_importing_arviz_warns_of_nothing(tmp_path):
    # 0.23 gives its notice on the first import of a day, of which it keeps a note in the cache.
    subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", SCRIPT],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        check=True,
    )


@pytest.mark.slow
def test_the_notice_fails_no_test_that_imports_arviz_first(tmp_path):
    (tmp_path / "test_first.py").write_text("import arviz\n\ndef test_one():\n    pass\n")
    options = ["-n", "0", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        check=True,
    )


SCRIPT = """
import warnings
from pyrofl.inference.posteriors.export import import_arviz
before = list(warnings.filters)
import_arviz()
assert warnings.filters == before
"""


@pytest.mark.parametrize("rounding", [0.0, 1e-17, 1e-16, 1e-9])
def test_weights_that_are_equal_but_for_rounding_stay_equal(rounding):
    source = torch.Generator().manual_seed(0)
    log_w = rounding * torch.randn(500, generator=source, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, _ = smooth_weights(log_w)
    torch.testing.assert_close(weights.exp(), torch.full_like(weights, 1 / 500), rtol=1e-6, atol=0)
