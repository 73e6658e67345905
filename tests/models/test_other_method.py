"""Fits by likelihood factors that fail continue with PVI, with a warning."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from programs import EFFECT_SD, NOISE_SD
from programs import normal_effects as normal

import pyrofl
from pyrofl import Federation, federations
from pyrofl.inference import hmc as sampler
from pyrofl.inference.fitted_run import checkpoints
from pyrofl.models import likelihood_factors

SIZES = (3, 1, 6, 2)
NAMES = ("a", "b", "c", "d")
MIXED = "likelihood_factors failed in round 1: r_hat is 3: the server's chains have not mixed"


def rows():
    """Return four clients with a normal response."""
    y = 1.0 + 1.5 * torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(3)).double()
    train = list(torch.arange(len(y)).split(SIZES))
    return Federation(y[:, None] * 0, y, train, [r[:0] for r in train], NAMES)


def exact():
    """Return mean and standard deviation of mu of `normal`."""
    data = rows()
    spread = [EFFECT_SD**2 + NOISE_SD**2 / len(r) for r in data.train]
    precision = 1 / 4 + sum(1 / v for v in spread)
    mean = sum(float(data.y[r].mean()) / v for r, v in zip(data.train, spread, strict=True))
    return mean / precision, precision**-0.5


def assert_exact(run):
    mean, sd = exact()
    values = run.to_arviz(2000, progress=False)["posterior"]["mu"].values
    assert abs(values.mean() - mean) < 4 * sd / 1000**0.5
    assert values.std() / sd == pytest.approx(1, abs=4 / 2000**0.5)


def sampled(monkeypatch, **changes):
    """Change what the sampler returns; values are functions of its draws."""

    def changed(log_density, start, source):
        drawn = sampler.hmc(log_density, start, source)
        return drawn._replace(**{name: change(drawn) for name, change in changes.items()})

    monkeypatch.setattr("pyrofl.models.likelihood_factors.method.hmc", changed)


@pytest.fixture
def unmixed(monkeypatch):
    """Have server's chains with an R-hat of 3."""
    sampled(monkeypatch, r_hat=lambda drawn: 3.0)


def built(**options):
    data = rows()
    return pyrofl.hierarchical(normal, data, shared="mu", **options), data


@pytest.fixture(scope="module")
def switched():
    """Return a fit that has continued with PVI, and the method and round of each callback."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        sampled(patch, r_hat=lambda drawn: 3.0)
        with pytest.warns(UserWarning, match=MIXED):
            run = pyrofl.fit(
                *built(),
                progress=False,
                callback=lambda run: seen.append((run.method.name, run.state.number)),
            )
    return run, seen


def test_chains_that_have_not_mixed_end_in_pvi(switched):
    run, seen = switched
    assert run.method.name == "pvi"
    assert run.status.kind == "converged"
    assert run.warnings == [run.switched]
    assert run.switched.startswith(f"fitted by pvi, as {MIXED}")
    numbers = range(1, run.state.number + 1)
    assert seen == [("likelihood_factors", 1), *(("pvi", n) for n in numbers)]
    assert_exact(run)


@pytest.mark.parametrize("options", [{"rounds": 2}, {"seeds": [5]}])
def test_the_other_method_runs_until_it_has_converged(unmixed, options):
    with pytest.warns(UserWarning, match=MIXED):
        runs = pyrofl.fit(*built(), progress=False, **options)
    (run,) = runs if "seeds" in options else (runs,)
    assert (run.method.name, run.seed) == ("pvi", options.get("seeds", [0])[0])
    assert run.status.kind == "converged"


def test_a_slightly_high_r_hat_may_pass_in_one_round(monkeypatch):
    values = iter([1.2, 1.0])
    sampled(monkeypatch, r_hat=lambda drawn: next(values))
    run = pyrofl.fit(*built(), progress=False)
    assert (run.method.name, run.state.number) == ("likelihood_factors", 2)
    assert run.status.kind == "converged"
    sampled(monkeypatch, r_hat=lambda drawn: 1.2)
    with pytest.warns(UserWarning, match="failed in round 2: r_hat is 1.2: "):
        pyrofl.fit(*built(), progress=False, callback=lambda run: run.method.name == "pvi")


def test_chains_that_have_not_moved_end_in_pvi(monkeypatch):
    sampled(monkeypatch, u=lambda drawn: drawn.u[:1].expand_as(drawn.u))
    reason = "failed in round 1: the server's chains have not moved, as a factor is narrow$"
    with pytest.warns(UserWarning, match=reason):
        run = pyrofl.fit(*built(), progress=False, callback=lambda run: run.method.name == "pvi")
    assert run.method.name == "pvi"


def test_a_method_that_the_user_chose_stays(unmixed):
    data = rows()
    for method in (
        likelihood_factors.hierarchical(normal, data, shared="mu"),
        built(method="likelihood_factors")[0],
    ):
        run = pyrofl.fit(method, data, progress=False)
        assert run.method.name == "likelihood_factors"
        assert "have not mixed" in str(run.status)
        assert not run.switched
    assert built(method="pvi")[0].name == "pvi"


def test_a_guide_is_of_pvi():
    with pytest.raises(ValueError, match="a guide is given, which likelihood factors have not"):
        built(guide=pyrofl.guides.flow(2), method="likelihood_factors")


def test_a_callback_ends_a_fit_before_another_method(unmixed):
    run = pyrofl.fit(*built(), progress=False, callback=lambda run: True)
    assert run.method.name == "likelihood_factors"
    assert run.state.number == 1


def test_saved_runs_name_their_method(switched, tmp_path):
    run, _ = switched
    run.save(tmp_path / "run")
    method, data = built()
    loaded = pyrofl.load(tmp_path / "run", method=method, data=data)
    assert loaded.method.name == "pvi"
    assert loaded.warnings == run.warnings
    assert torch.equal(loaded.posterior(5)["mu"], run.posterior(5)["mu"])
    without_rows = pyrofl.load(tmp_path / "run", method=built(method="pvi")[0])
    assert without_rows.status == run.status
    with pytest.raises(ValueError, match="another run"):
        pyrofl.load(tmp_path / "run", method=built(method="likelihood_factors")[0], data=data)


@pytest.mark.filterwarnings("ignore:fitted by pvi")
def test_resumed_runs_stay_with_their_method(unmixed, switched, tmp_path):
    keeper = checkpoints.Keeper(tmp_path / "last.safetensors", every=1)

    def two(run):
        """Save a run after each round, and end it after the second of PVI."""
        keeper(run)
        return (run.method.name, run.state.number) == ("pvi", 2)

    method, data = built()
    pyrofl.fit(method, data, progress=False, callback=two)
    half = checkpoints.load(tmp_path / "last.safetensors", method, data)
    assert (half.method.name, half.state.number) == ("pvi", 2)
    again = pyrofl.fit(method, data, resume_from=half, progress=False)
    whole, _ = switched
    assert again.switched == whole.switched
    assert again.state.number == whole.state.number
    assert all(torch.equal(v, again.state.server[n]) for n, v in whole.state.server.items())


@pytest.mark.filterwarnings("ignore:fitted by pvi")
def test_keepers_write_a_round_of_the_other_method_with_the_same_number(unmixed, tmp_path):
    keeper = checkpoints.Keeper(tmp_path / "last.safetensors", every=1)

    def first_of_pvi(run):
        keeper(run)
        return run.method.name == "pvi"

    method, data = built()
    pyrofl.fit(method, data, progress=False, callback=first_of_pvi)
    assert keeper.written == 1
    loaded = checkpoints.load(tmp_path / "last.safetensors", method, data)
    assert (loaded.method.name, loaded.state.number) == ("pvi", 1)


def test_regressions_end_in_pvi(unmixed):
    random = np.random.default_rng(0)
    frames = {
        name: pd.DataFrame({"x": random.normal(size=12), "y": random.normal(size=12)})
        for name in "abc"
    }
    data = federations.from_frames(frames)
    method = pyrofl.regression("y ~ x + (1 | client)", data)
    with pytest.warns(UserWarning, match=MIXED):
        run = pyrofl.fit(
            method, data, progress=False, callback=lambda run: run.method.name == "pvi"
        )
    assert isinstance(run.method, type(method))
    assert run.method.name == "pvi"
    names = ["b[x]", "Intercept", "sd_client", "sigma"]
    assert run.summary(100, corrected=False).index.tolist() == names
    chosen = pyrofl.regression("y ~ x + (1 | client)", data, method="likelihood_factors")
    assert not pyrofl.fit(chosen, data, progress=False).switched
    assert pyrofl.regression("y ~ x + (1 | client)", data, method="pvi").name == "pvi"
