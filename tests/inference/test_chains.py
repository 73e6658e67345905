"""One call for several seeds: chains that ArviZ compares."""

from __future__ import annotations

import pytest
import toys

import pyrofl
from pyrofl.data import Federation
from pyrofl.inference.fitted_run.chains import Chains
from pyrofl.models import fedabml, fedavg


def fitted(data: Federation, **how) -> Chains:
    return pyrofl.fit(fedabml.build(toys.net()), data, 2, **({"progress": False} | how))


def test_chains_are_fits_of_single_seeds(blobs: Federation):
    seen = []
    chains = fitted(blobs, seeds=3, seed=5, callback=lambda run: seen.append(run.seed))
    assert [run.seed for run in chains] == [5, 6, 7]
    assert seen == [5, 5, 6, 6, 7, 7]
    for run in chains[:2]:
        alone = fitted(blobs, seed=run.seed)
        assert alone.state.server.keys() == run.state.server.keys()
        for name, value in alone.state.server.items():
            assert value.equal(run.state.server[name])
    others = [pyrofl.Seeds(noise=1), pyrofl.Seeds(noise=2)]
    assert [run.seed for run in fitted(blobs, seeds=others)] == others


def test_arviz_compares_them(blobs: Federation):
    import arviz

    chains = fitted(blobs, seeds=4)
    posterior = chains.to_arviz(draws=50)
    assert posterior["posterior"].sizes["chain"] == 4
    assert "r_hat" in arviz.summary(posterior, var_names=[next(iter(posterior["posterior"]))])
    assert pyrofl.to_arviz(chains, 2)["posterior"].sizes["chain"] == 4
    table = chains.parameter_changes()
    assert table["seed"].unique().tolist() == ["0", "1", "2", "3"]
    alone = table[table["seed"] == "2"].drop(columns="seed").reset_index(drop=True)
    assert alone.equals(chains[2].parameter_changes())


def test_they_have_converged_if_all_have(blobs: Federation):
    chains = fitted(blobs, seeds=2)
    still = chains[1].status
    assert str(chains.status) == f"not converged: seed 0: {chains[0].status.why}"
    lost = pyrofl.fit(fedavg.build(toys.net(), lr=10.0), blobs, 3, seed=8, progress=False)
    found = Chains((chains[1], lost)).status
    assert (found.kind, still.kind) == ("diverged", "not converged")
    assert found.why.startswith("seed 8: the loss of")
    assert f"seed 8  3 rounds, {lost.status}" in repr(Chains((chains[1], lost)))


def test_chains_go_on_each_by_itself(blobs: Federation):
    method = fedabml.build(toys.net())
    whole = fitted(blobs, seeds=2)
    half = pyrofl.fit(method, blobs, 1, seeds=2, progress=False)
    rest = pyrofl.fit(method, blobs, 2, resume_from=half, progress=False)
    for a, b in zip(whole, rest, strict=True):
        assert a.seed == b.seed
        assert all(v.equal(b.state.server[n]) for n, v in a.state.server.items())


def test_seeds_that_are_not_several_are_refused(blobs: Federation):
    run = pyrofl.fit(fedavg.build(toys.net()), blobs, 0, progress=False)
    for wrong, told in (
        ({"seeds": 0}, "seeds is 0; expected a whole number of at least 1"),
        ({"seeds": []}, r"seeds are \[\]; expected at least one seed, all different"),
        ({"seeds": [1, pyrofl.Seeds(1, 1, 1)]}, "expected at least one seed, all different"),
        ({"seeds": [1, 2], "seed": 3}, r"seed is 3 and seeds are \[1, 2\]; pass only one"),
        ({"seeds": 2, "seed": pyrofl.Seeds()}, "pass seeds as a list of Seeds"),
        (
            {"seeds": 2, "resume_from": run},
            "resume_from is a Run, which has one seed; pass Chains",
        ),
        (
            {"seeds": 2, "resume_from": Chains((run,))},
            "resume_from is Chains, which have their own seeds",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            fitted(blobs, **wrong)
