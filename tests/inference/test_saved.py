"""What is saved predicts the same bits in another process; other folders are refused."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
import test_contract as contract
import torch
import toys

import pyrofl
from pyrofl import Federation, recipes
from pyrofl.files import checkpoint_file
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models import fedavg, likelihoods, perfedavg, priors, pvi

NAMES = ("ward 1", "ward 2", "ward 3", "ward 4")


@cache
def data() -> Federation:
    return replace(toys.blobs((3, 9, 7, 12), held_out=1), names=NAMES)


@cache
def run(name: str) -> Run:
    return fit(contract.built(name), data(), 2, seed=4, draws=3, progress=False)


def mine(client: str, part: str = "test") -> tuple[torch.Tensor, torch.Tensor]:
    rows = getattr(data(), part)[NAMES.index(client)]
    return data().x[rows], data().y[rows]


# Saved and loaded.


@contract.on_archetypes
def test_every_method_is_loaded_with_its_predictions(name, tmp_path):
    run(name).save(tmp_path / "kept")
    for rows in (None, data()):
        again = pyrofl.load(tmp_path / "kept", data=rows)
        toys.assert_same_round(again.state, run(name).state)
        assert (again.seed, again.draws, again.history) == (4, 3, run(name).history)
        for client in NAMES:
            x, _ = mine(client)
            for view in again.method.views:
                how = {"model": view, "adaptation": "none"}
                a, b = (r.predict(x, client, **how) for r in (again, run(name)))
                assert a.about == b.about
                toys.assert_same({"mean": a.mean, **a.values}, {"mean": b.mean, **b.values})
    assert again.evaluate().values.keys() == run(name).evaluate().values.keys()


CODE = """
import sys, torch, pyrofl
sys.path.insert(0, {tests!r})
x = torch.load({x!r}, weights_only=True)
for name in {names!r}:
    run = pyrofl.load(f"{root}/{{name}}")
    torch.save(run.predict(x, "ward 2", adaptation="none").mean, f"{root}/{{name}}.pt")
"""
KINDS = ("fedavg", "pfedvem", "pfedmb", "metavd", "fedbe", "fedabml", "pvi", "fedpop", "perfedavg")


def test_chains_are_saved_together(tmp_path):
    chains = fit(contract.built("fedavg"), data(), 1, seeds=3, progress=False)
    chains.save(tmp_path / "chains")
    loaded = pyrofl.Chains.load(tmp_path / "chains", data=data())
    assert [one.seed for one in loaded] == [one.seed for one in chains] == [0, 1, 2]
    for one, other in zip(loaded, chains, strict=True):
        toys.assert_same_round(one.state, other.state)
    pyrofl.Chains(chains[:2]).save(tmp_path / "chains", overwrite=True)
    assert len(pyrofl.Chains.load(tmp_path / "chains")) == 2
    with pytest.raises(ValueError, match="is not empty, it holds chain-0; expected an empty"):
        chains.save(tmp_path / "chains")
    with pytest.raises(ValueError, match="holds no folder chain-0; expected a folder of Chains"):
        pyrofl.Chains.load(tmp_path)
    with pytest.raises(ValueError, match="runs of method fedavg; expected those of a regression"):
        chains.predict(mine("ward 1")[0], "ward 1")


def test_a_fresh_process_predicts_the_same_bits(tmp_path):
    x = mine("ward 2")[0]
    torch.save(x, tmp_path / "x.pt")
    for name in KINDS:
        run(name).save(tmp_path / name)
    code = CODE.format(tests="tests", x=str(tmp_path / "x.pt"), names=KINDS, root=tmp_path)
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in KINDS:
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert torch.equal(found, run(name).predict(x, "ward 2", adaptation="none").mean), name


def test_a_program_of_ones_own_is_given_again(tmp_path):
    schools = pyrofl.federations.split(pyrofl.datasets.load("eight_schools"), "groups")

    def built(scale: float):
        import pyro
        import pyro.distributions as dist

        def model(received, local, batch):
            with batch.clients():
                mu = pyro.sample("mu", dist.Normal(0.0, scale))
                tau = pyro.sample("tau", dist.HalfCauchy(5.0))
                eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
                with batch.rows():
                    fn = dist.Normal(mu + tau * eta, batch.x[..., 0])
                    pyro.sample("effect", fn, obs=batch.y)

        return pvi.hierarchical(model, schools, shared="mu tau")

    done = fit(built(5.0), schools, 2, progress=False)
    done.save(tmp_path / "kept")
    with pytest.raises(
        ValueError, match=r"rebuilt: it is a custom method, or a part of it was replaced; build"
    ):
        pyrofl.load(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"is of another run; now .*scale is '6.0' and was '5.0'"):
        pyrofl.load(tmp_path / "kept", method=built(6.0))
    again = pyrofl.load(tmp_path / "kept", method=built(5.0))
    x = np.array([[10.0], [15.0]])
    for client in (*schools.names, None):
        a, b = (r.predict(x, client, draws=50) for r in (again, done))
        toys.assert_same({"mean": a.mean, **a.values}, {"mean": b.mean, **b.values})


def test_what_was_replaced_is_to_be_given(tmp_path):
    own = replace(contract.built("fedavg"), views=dict(contract.built("pfedvem").views))
    fit(own, data(), 1, progress=False, check=False).save(tmp_path)
    with pytest.raises(ValueError, match=r"rebuilt: it is .* a part of it was replaced; build"):
        pyrofl.load(tmp_path)
    assert pyrofl.load(tmp_path, method=own).method is own


def test_a_run_goes_on_where_its_rows_are(tmp_path):
    method = contract.built("pfedvem")
    whole = fit(method, data(), 3, seed=4, progress=False)
    fit(method, data(), 1, seed=4, progress=False).save(tmp_path)
    start = pyrofl.load(tmp_path, data=data())
    toys.assert_same_round(
        fit(start.method, data(), 3, resume_from=start, progress=False).state, whole.state
    )


def test_another_method_is_named_as_such(tmp_path):
    run("fedavg").save(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"is of another run; now init is "):
        pyrofl.load(tmp_path / "kept", method=run("pvi").method)


def test_without_rows_nothing_is_made_up(tmp_path):
    run("perfedavg").save(tmp_path / "kept")
    loaded = pyrofl.load(tmp_path / "kept")
    assert loaded.data.names == NAMES
    assert loaded.data.sizes.tolist() == data().sizes.tolist()
    asked = [
        lambda: loaded.evaluate(),
        lambda: loaded.evaluate(part="train"),
        lambda: loaded.predict(mine("ward 2")[0], "ward 2"),
        lambda: fit(loaded.method, loaded.data, 3, progress=False),
        lambda: loaded.to_arviz(2, groups="all"),
    ]
    for ask in asked:
        with pytest.raises(ValueError, match=r"rows of this run's clients are not here"):
            ask()
    loaded.save(tmp_path / "again")
    assert pyrofl.load(tmp_path / "again", data=data()).state.number == 2


def test_a_folder_is_not_shared_with_other_files(tmp_path):
    run("fedavg").save(tmp_path / "kept")
    with pytest.raises(
        ValueError, match=r"is not empty, it holds checkpoint.safetensors; expected"
    ):
        run("fedavg").save(tmp_path / "kept")
    run("fedavg").save(tmp_path / "kept", overwrite=True)
    (tmp_path / "kept" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"is not empty, it holds thesis.tex"):
        run("fedavg").save(tmp_path / "kept", overwrite=True)


def test_other_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        pyrofl.load(tmp_path)
    run("fedavg").save(tmp_path / "kept")
    path = tmp_path / "kept" / "checkpoint.safetensors"
    whole = path.read_bytes()
    for content, told in (
        (whole[:99], "is cut off"),
        (whole[:-9], "damaged"),
        (whole[:99] + b"x" + whole[100:], "damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=told):
            pyrofl.load(tmp_path / "kept")
    path.write_bytes(whole)
    about, content = checkpoint_file.read_any(path)
    for changed, told in (
        ({"recipe": {"made": {"call": "os:system", "with": {}}}}, "expected a function of the lib"),
        ({"recipe": {"made": {"call": "pyrofl.models.nothing:build", "with": {}}}}, "expected a f"),
        (
            {"recipe": {"made": {"name": "pyrofl.models.likelihoods:poisson"}}},
            "specifies a function",
        ),
        ({"recipe": {"made": {"with": 3}}}, "cannot be rebuilt"),
        ({"recipe": {}}, "cannot be rebuilt|incomplete"),
        ({"data": {}}, "is incomplete"),
        ({"data": {**content["data"], "sizes": [1]}}, "is incomplete|differ in length"),
    ):
        checkpoint_file.write(path, about, content | changed)
        with pytest.raises(ValueError, match=told) as caught:
            pyrofl.load(tmp_path / "kept")
        assert "\n" not in str(caught.value)
    checkpoint_file.write(path, about | {"version of torch": "1.0"}, content)
    with pytest.raises(
        ValueError, match=r"is of another run; now version of torch is .* was '1.0'"
    ):
        pyrofl.load(tmp_path / "kept")
    path.write_bytes(whole)
    other = replace(data(), held_out=0)
    with pytest.raises(ValueError, match="hash of the data is"):
        pyrofl.load(tmp_path / "kept", data=other)


# Predictions.


@contract.on_archetypes
def test_predictions_score_as_the_evaluation_says(name):
    done = run(name)
    for view in done.method.views:
        kinds = ["none"] + ["fine_tune"] * bool(done.method.adapt and view == "personal")
        for adaptation in kinds:
            for population in ("training", "held_out"):
                how = {"model": view, "adaptation": adaptation}
                scores = done.evaluate(population=population, **how)
                for i, right, nll, entropy in zip(
                    scores.ids.tolist(),
                    *(scores.values[n] for n in ("accuracy", "nll", "entropy")),
                    strict=True,
                ):
                    x, y = mine(NAMES[i])
                    found = done.predict(x, NAMES[i], **how)
                    got = [data().classes.index(label) for label in found.labels]
                    assert np.mean(np.array(got) == y.numpy()) == float(right)
                    own = found.mean[torch.arange(len(y)), y].log().mean()
                    torch.testing.assert_close(-own, nll, rtol=1e-6, atol=1e-9)
                    torch.testing.assert_close(
                        found.values["entropy"].mean(), entropy, rtol=1e-6, atol=1e-9
                    )
                    assert ("epistemic" in found.values) == (done.draws is not None)


def test_the_usual_model_is_the_adapted_one():
    x = mine("ward 2")[0]
    found, said = (
        run("perfedavg").predict(x, "ward 2", **how) for how in ({}, {"adaptation": "fine_tune"})
    )
    assert torch.equal(found.mean, said.mean)
    assert found.about == "personal model of ward 2, adapted to its training rows, 3 draws"


def normal_run(draws: int | None = None) -> Run:
    x = np.linspace(-1, 1, 40)[:, None]
    sites = {
        f"site {s}": (x, s * x[:, 0] + 0.1 * np.sin(99 * x[:, 0])) for s in "123" for s in [int(s)]
    }
    net = pyrofl.nets.build("linear", (1,), 1)
    method = fedavg.build(net, likelihood=likelihoods.normal(0.5), lr=0.1)
    return fit(method, Federation.from_arrays(sites), 3, progress=False, draws=draws)


def test_intervals_of_a_normal_are_its_quantiles():
    done = normal_run()
    found = done.predict(np.linspace(-1, 1, 30)[:, None], "site 2")
    assert found.classes == ()
    assert torch.allclose(found.values["sd"], torch.tensor(0.5))
    for name, z in (("5%", -1.6449), ("50%", 0.0), ("95%", 1.6449)):
        off = (found.values[name] - found.mean) / 0.5 - z
        # The standard error of a quantile of n draws: sqrt(q (1 - q) / n) over the density.
        q = {"5%": 0.05, "50%": 0.5, "95%": 0.95}[name]
        error = (q * (1 - q) / 4000) ** 0.5 / (np.exp(-(z**2) / 2) / (2 * np.pi) ** 0.5)
        assert float(off.abs().max()) < 4.5 * error
    with pytest.raises(ValueError, match="predicts numbers"):
        _ = found.labels
    assert list(found.frame()) == ["mean", "sd", "5%", "50%", "95%"]


def test_draws_widen_what_is_uncertain():
    x = mine("ward 1")[0]
    found = run("pfedvem").predict(x, "ward 1", draws=64)
    assert float(found.values["epistemic"].max()) > 0
    assert bool((found.values["epistemic"] <= found.values["entropy"]).all())
    point = run("fedavg").predict(x, "ward 1", draws=64)
    assert float(point.values["epistemic"].abs().max()) < 1e-12


def test_columns_are_found_by_name():
    frame = pd.DataFrame(np.random.default_rng(1).normal(size=(20, 2)), columns=["age", "dose"])
    sites = {"A": (frame, (frame.age > 0).astype(int)), "B": (frame, (frame.dose > 0).astype(int))}
    rows = Federation.from_arrays(sites, classes=("no", "yes"))
    done = fit(fedavg.build(pyrofl.nets.build("softmax", (2,), 2)), rows, 2, progress=False)
    found = done.predict(frame, "A")
    other = frame[["dose", "age"]].assign(more="text")
    assert torch.equal(done.predict(other, "A").mean, found.mean)
    assert list(found.frame()) == ["class", "p(no)", "p(yes)", "entropy"]
    for x, told in (
        (frame[["age"]], "x lacks column dose; expected its name among age"),
        (
            frame.rename(columns={"age": "Age"}),
            "x lacks column age; expected its name among Age, dose",
        ),
        (frame.assign(age="old"), "x: column age holds 'old'; expected numbers"),
        (frame.assign(age=np.nan), "x: column age is missing, NaN or infinite in 20 rows"),
        (frame.to_numpy()[:, :1], "x has rows of shape [1]; expected [2]"),
        (frame.to_numpy()[:0], "x has shape [0, 2]; expected at least one row of [2]"),
        ("rows", "x is a str"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)) as caught:
            done.predict(x, "A")
        assert "\n" not in str(caught.value)


# Clients that were never seen.


def test_a_new_client_is_as_one_that_was_held_out():
    """Its rows train as those of a held-out client do, and it predicts the same."""
    x, y = mine("ward 4")
    own = mine("ward 4", "train")
    for name, adaptation in (("pfedvem", "train"), ("perfedavg", "fine_tune"), ("fedrep", "train")):
        done = run(name)
        renamed = replace(data(), names=(*NAMES[:3], "new client"))
        as_held_out = done.copy(data=renamed).predict(x, "new client", adaptation=adaptation)
        found = done.predict(x, None, own=own)
        torch.testing.assert_close(found.mean, as_held_out.mean, rtol=1e-9, atol=1e-12)
        assert "new client with its own rows" in found.about
    assert len(y) == len(found.mean)


def test_a_new_client_without_rows_gets_the_global_model():
    x = mine("ward 4")[0]
    done = run("pfedvem")
    found = done.predict(x, None, draws=None)
    assert torch.equal(found.mean, done.predict(x, "ward 4", model="global", draws=None).mean)
    assert found.about == "global model of new client without rows"
    with pytest.warns(UserWarning, match="head.weight, head.bias of a new client .* untrained"):
        found = run("fedrep").predict(x, None)
    assert found.about.startswith("personal model of new client")


def test_a_new_client_without_rows_has_no_model_where_nothing_travels():
    """Local training leaves no network for others: the predictions would be of its start."""
    x, own = mine("ward 4")[0], mine("ward 4", "train")
    told = "local sends nothing to clients, so a new client without rows has an untrained model"
    with pytest.raises(ValueError, match=told):
        run("local").predict(x, None)
    assert len(run("local").predict(x, None, own=own).mean) == len(x)


def test_what_does_not_suit_a_client_is_refused():
    x, y = mine("ward 4")
    done = run("pfedvem")
    for ask, told in (
        (lambda: done.predict(x, "ward"), "unknown client 'ward'"),
        (lambda: done.predict(x, "ward 1", own=(x, y)), "own rows are given for the known client"),
        (lambda: done.predict(x, None, own=x), "own is a Tensor; expected (x, y)"),
        (lambda: done.predict(x, None, own=(x, y[:2])), "the same number of rows; got 4 and 2"),
        (lambda: done.predict(x, None, own=(x[:, :2], y)), "own x has shape [4, 2]"),
        (lambda: done.predict(x, None, own=(x, y + 9)), "own y is"),
        (
            lambda: done.predict(x, None, adaptation="train"),
            "but the new client has no rows",
        ),
        (lambda: done.predict(x, "ward 1", model="best"), "no 'best' model"),
        (lambda: done.predict(x, "ward 1", draws=0), "draws is 0; expected"),
        (lambda: done.predict(x, "ward 1", part="train"), "unknown argument 'part'"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            ask()


def test_a_prior_and_numbers_survive(tmp_path):
    net = toys.net()
    method = perfedavg.build(net, lr=0.01)
    assert recipes.spec_of(method) is not None
    own = fedavg.build(net, prior=priors.fixed(), guide=pyrofl.guides.mean_field, epochs=1)
    done = fit(own, data(), 1, progress=False, draws=4)
    done.save(tmp_path)
    x = mine("ward 1")[0]
    assert torch.equal(
        pyrofl.load(tmp_path).predict(x, "ward 1").mean, done.predict(x, "ward 1").mean
    )
