"""All that a run's programs say reaches ArviZ, by client and row, as joint draws."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor

import pyrofl
from pyrofl import nets
from pyrofl.choices import GROUPS
from pyrofl.data import Batch, Federation
from pyrofl.data.loaders import datasets
from pyrofl.inference.definition.metadata import SHARED, Metadata
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.posteriors import export
from pyrofl.inference.posteriors.export import import_arviz
from pyrofl.models import fedavg, metavd, pfedvem
from pyrofl.models.guides.automatic import from_pyro
from pyrofl.partitions import federations
from pyrofl.tensors import Tensors, spread_out

mpl.use("Agg")

SIZES = (3, 1, 6)


def schools(names: tuple[str, ...] = ("Ada", "Bea", "Cleo")) -> Federation:
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(sum(SIZES), 1)))
    y = 2 * x[:, 0] + torch.from_numpy(rng.normal(size=sum(SIZES)))
    parts = torch.arange(sum(SIZES)).split(list(SIZES))
    return Federation(x, y, parts, tuple(p[:0] for p in parts), names=names)


def model(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let slopes be mu + 2 eta_j, where all clients share mu."""
    zero = batch.x.new_zeros(())
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(zero, 5.0))
        eta = pyro.sample("eta", dist.Normal(zero, 1.0))
        slope = pyro.deterministic("slope", mu + 2 * eta)
        with batch.rows():
            fitted = pyro.deterministic("fitted", slope * batch.x[..., 0])
            pyro.sample("y", dist.Normal(fitted, 0.5), obs=batch.y)


def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(received["loc"], 0.4))
        pyro.sample("eta", dist.Normal(local["m"] - 0.5 * mu, 0.3))


def method(guide: Program = guide, model: Program = model, shared: str = "mu") -> Method:
    """Return what stands still at mu ~ Normal(1, 0.4^2), and says so."""
    one = torch.tensor(1.0, dtype=torch.float64)
    return Method(
        init=lambda generator, clients: {"loc": one},
        init_client=lambda received, cohort, generator: {"m": 0.1 * cohort.ids.to(received["loc"])},
        model=model,
        guide=guide,
        phases=(Phase((lambda received, local, batch: {"m": local["m"]},)),),
        aggregate=lambda server, message, cohort, generator: server,
        metadata=Metadata(
            {shared: SHARED} if shared else {},
            statistics=lambda received, local, batch: {"m": local["m"]},
        ),
    )


def run(seed: int = 0, data: Federation | None = None, **what: object) -> pyrofl.Run:
    made = method(**what)  # type: ignore[arg-type]
    return pyrofl.fit(made, data or schools(), 1, seed=seed, progress=False)


@pytest.fixture(scope="module")
def whole():
    return pyrofl.to_arviz([run(0), run(1)], 400, groups="all", corrected=False)


def test_every_group_has_named_axes_and_no_padding(whole):
    assert {g for g in GROUPS if g in whole} == set(GROUPS)
    samples, rows = ("chain", "draw"), ("chain", "draw", "row")
    for group in ("posterior", "prior"):
        found = {n: v.dims for n, v in whole[group].data_vars.items()}
        assert found == {
            "mu": samples,
            "eta": (*samples, "client"),
            "slope": (*samples, "client"),
            "fitted": rows,
        }
    for group in ("posterior_predictive", "prior_predictive", "log_likelihood"):
        assert whole[group]["y"].dims == rows
    y = whole["observed_data"]["y"]
    assert y.dims == ("row",)
    assert (y.values == schools().y.numpy()).all()
    assert y["row_client"].values.tolist() == ["Ada"] * 3 + ["Bea"] + ["Cleo"] * 6
    constant = whole["constant_data"]
    assert (constant["x"].values == schools().x.numpy()).all()
    assert constant["size"].sel(client="Cleo") == 6
    assert constant["table_row"].values.tolist() == list(range(10))


def test_draws_of_several_sites_are_joint(whole):
    posterior = whole["posterior"]
    slope = posterior["mu"] + 2 * posterior["eta"]
    np.testing.assert_allclose(slope, posterior["slope"], atol=1e-12)
    mine = posterior["slope"].sel(client=posterior["row_client"])
    np.testing.assert_allclose(
        mine * schools().x[:, 0].numpy(), posterior["fitted"].transpose(*mine.dims), atol=1e-12
    )
    # The guide ties each client's own site to the one that they share: slope -0.5.
    own = posterior["eta"] + 0.5 * posterior["mu"] - 0.1 * np.arange(3)
    assert abs(float(own.std()) - 0.3) < 4 * 0.3 / math.sqrt(2 * 2400)
    assert abs(float(posterior["mu"].mean()) - 1) < 4 * 0.4 / math.sqrt(800)


def test_densities_are_those_of_the_programs(whole):
    posterior, stats = whole["posterior"], whole["sample_stats"]
    mu, eta = posterior["mu"], posterior["eta"]

    def normal(value, loc, scale):
        return -0.5 * ((value - loc) / scale) ** 2 - math.log(scale * math.sqrt(2 * math.pi))

    y = schools().y.numpy()
    log_lik = normal(y, posterior["fitted"], 0.5)
    np.testing.assert_allclose(log_lik, whole["log_likelihood"]["y"], atol=1e-10)
    # All clients hold mu, and it counts once.
    log_p = normal(mu, 0, 5) + normal(eta, 0, 1).sum("client") + log_lik.sum("row")
    log_q = normal(mu, 1, 0.4) + normal(eta + 0.5 * mu, 0.1 * np.arange(3), 0.3).sum("client")
    np.testing.assert_allclose(log_p, stats["log_p"], atol=1e-9)
    np.testing.assert_allclose(log_q, stats["log_q"], atol=1e-9)
    assert stats["m"].dims == ("chain", "client")


def test_predictive_draws_follow_the_model(whole):
    for group, spread in (("posterior", 0.5), ("prior", 0.5)):
        noise = whole[f"{group}_predictive"]["y"] - whole[group]["fitted"]
        count = noise.size
        assert abs(float(noise.mean())) < 4 * spread / math.sqrt(count)
        assert abs(float(noise.std()) / spread - 1) < 4 / math.sqrt(2 * count)
    assert abs(float(whole["prior"]["mu"].std()) / 5 - 1) < 4 / math.sqrt(2 * 800)
    assert abs(float(whole["prior"]["eta"].std()) - 1) < 4 / math.sqrt(2 * 2400)
    noise = (whole["posterior_predictive"]["y"] - whole["posterior"]["fitted"]).values
    one, other = (chain.ravel() for chain in noise)  # of two seeds: independent
    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(len(one))


def test_without_sharing_each_client_has_its_own_densities():
    found = run(shared="").to_arviz(20, groups="all")
    stats, posterior = found["sample_stats"], found["posterior"]
    assert posterior["mu"].dims == stats["log_p"].dims == ("chain", "draw", "client")
    assert len(np.unique(posterior["mu"].values)) == 60
    of_rows = found["log_likelihood"]["y"].groupby("row_client").sum()
    own = stats["log_p"].rename(client="row_client") - of_rows
    mu, eta = posterior["mu"], posterior["eta"]
    prior = -0.5 * ((mu / 5) ** 2 + eta**2) - math.log(2 * math.pi * 5)
    np.testing.assert_allclose(own.transpose(*own.dims), prior, atol=1e-9)


def test_cheap_and_whole_exports_agree(whole):
    cheap = pyrofl.to_arviz([run(0), run(1)], 400, corrected=False)
    assert {g for g in GROUPS if g in cheap} == {"posterior", "sample_stats"}
    for name in ("mu", "eta", "slope"):
        assert cheap["posterior"][name].dims == whole["posterior"][name].dims
        np.testing.assert_allclose(cheap["posterior"][name], whole["posterior"][name], atol=1e-12)
    assert "fitted" not in cheap["posterior"]
    drawn = run().posterior(400)
    assert drawn["slope"].shape == (400, 3)
    one = run().to_arviz(400, groups=("log_likelihood",), ids=torch.tensor([2]), corrected=False)
    assert one["log_likelihood"]["y"].shape == (1, 400, 6)
    assert (
        one["log_likelihood"]["y"].values[0] == whole["log_likelihood"]["y"].values[0, :, 4:]
    ).all()
    assert "sample_stats" not in one  # shared sites depend on clients that are not there


@pytest.mark.filterwarnings("ignore::matplotlib.MatplotlibDeprecationWarning")  # ArviZ's own,
@pytest.mark.filterwarnings("ignore:The inplace keyword:DeprecationWarning")  # both of them
def test_arviz_takes_it_as_it_is(whole):
    az = import_arviz()
    summary = az.summary(whole, var_names=["mu", "slope"], kind="stats")
    assert list(summary.index) == ["mu", "slope[Ada]", "slope[Bea]", "slope[Cleo]"]
    az.plot_forest(whole, var_names=["slope"], combined=True)
    az.plot_trace(whole, var_names=["mu"])
    (az.plot_ppc if hasattr(az, "plot_ppc") else az.plot_ppc_dist)(whole)
    mpl.pyplot.close("all")
    with pytest.warns(UserWarning, match="Estimated shape parameter"):
        elpd = az.loo(whole, pointwise=True)
    assert elpd.n_data_points == 10
    assert elpd.pareto_k["row_client"].values[3] == "Bea"
    with pytest.warns(UserWarning, match="Estimated shape parameter"):
        table = az.compare({"one": whole, "other": run(2).to_arviz(400, groups="all")})
    assert set(table.index) == {"one", "other"}


@pytest.mark.parametrize("corrected", [None, False])
def test_axes_follow_what_a_deterministic_site_depends_on(corrected):
    def made(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(batch.x.new_zeros(()), 5.0))
            eta = pyro.sample("eta", dist.Normal(batch.x.new_zeros(()), 1.0))
            # Its last bits depend on how many rows a client has, its value on mu alone.
            curve = (mu[..., None] / 3).expand(*mu.shape, 5) + torch.linspace(0, 1, 5).to(mu)
            rows = batch.mask.shape[1]
            mean = sum([curve / rows] * rows, torch.zeros_like(curve))
            pyro.deterministic("curve", mean, event_dim=1)
            pyro.deterministic("own", mu + 0 * eta)
            pyro.deterministic("read", mu + 0 * batch.x[..., 0].sum(-1, keepdim=True))
            with batch.rows():
                pyro.sample("y", dist.Normal((mu + 2 * eta) * batch.x[..., 0], 0.5), obs=batch.y)

    found = run(model=made).to_arviz(20, corrected=corrected, groups=["posterior", "log_prior"])
    dims = {n: v.dims[2:] for n, v in found["posterior"].data_vars.items()}
    assert dims["curve"] == ("curve_dim_0",)
    assert dims["own"] == dims["read"] == dims["eta"] == ("client",)
    assert dims["mu"] == ()


def test_chains_must_be_alike():
    other = run(1, schools(("Ada", "Bea", "Dora")))
    with pytest.raises(ValueError, match="runs have clients Ada, Bea, Cleo and Ada, Bea, Dora"):
        pyrofl.to_arviz([run(), other])
    data = schools()
    with pytest.raises(ValueError, match="Ada has different training rows in two runs"):
        pyrofl.to_arviz([run(), run(1, replace(data, y=data.y + 1))])
    with pytest.raises(
        ValueError, match=r"runs differ in posterior/mu \[5, 3\], posterior/mu \[5\]"
    ):
        pyrofl.to_arviz([run(), run(1, shared="")], 5)
    with pytest.raises(ValueError, match=r"seeds of the runs are \[0, 0\]; fit each run"):
        pyrofl.to_arviz([run(), run()])
    with pytest.raises(ValueError, match="0 runs and groups"):
        pyrofl.to_arviz([])
    with pytest.raises(
        ValueError, match="groups 'posterior'; expected at least one run, and 'all'"
    ):
        run().to_arviz(groups="posterior")


def test_sites_that_are_not_one_for_all_are_refused():
    with pytest.raises(ValueError, match="site 'eta' is declared as shared"):
        run(shared="mu eta").to_arviz(5)


def test_an_improper_prior_has_no_draws(blobs: Federation):
    fitted = pyrofl.fit(fedavg.build(toys.net()), blobs, 1, progress=False)
    found = fitted.to_arviz(2, groups="all")
    assert {g for g in GROUPS if g not in found} == {"prior", "prior_predictive", "log_prior"}
    with pytest.raises(ValueError, match="the prior has no density; use a proper prior"):
        fitted.to_arviz(2, groups=["posterior", "log_prior"])
    with pytest.raises(ValueError, match=r"the prior has no draws: site '.*' has an improp"):
        fitted.to_arviz(2, groups=["prior"])


def test_the_loss_says_who_trained(blobs: Federation):
    built = pfedvem.build(toys.net(), head_epochs=1, base_epochs=1)
    fitted = pyrofl.fit(
        built, blobs, 3, training_clients=pyrofl.participation.fixed(5), progress=False
    )
    loss = fitted.to_arviz(2)["sample_stats"]["loss"]
    assert loss.dims == ("chain", "round", "client", "step")
    assert loss["step"].values.tolist() == ["mu/* pi/*", "base/*"]
    assert loss.notnull().sum("client").values.tolist() == [[[5, 5]] * 3]
    ids = fitted.state.trained
    last = fitted.state.loss["base/*"].numpy()
    np.testing.assert_array_equal(loss.sel(round=3, step="base/*").values[0, ids], last)
    more = pyrofl.fit(built, blobs, 4, resume_from=fitted.state, progress=False)
    assert more.to_arviz(2)["sample_stats"]["round"].values.tolist() == [4]


def test_rows_may_have_latent_sites_and_guides_may_read_rows():
    def noisy(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            level = pyro.sample("level", dist.Normal(batch.x.new_zeros(()), 3.0))
            with batch.rows():
                true = pyro.sample("true", dist.Normal(level, 1.0))
                pyro.sample("y", dist.Normal(true, 1.0), obs=batch.y)

    def reads(received: Tensors, local: Tensors, batch: Batch) -> None:
        mean = (batch.y * batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
        with batch.clients():
            pyro.sample("level", dist.Normal(mean, 1e-9))
            with batch.rows():
                pyro.sample("true", dist.Normal(batch.y, 1e-9))

    fitted = run(guide=reads, model=noisy, shared="")
    found = fitted.to_arviz(7, groups="all")
    assert found["posterior"]["true"].dims == ("chain", "draw", "row")
    np.testing.assert_allclose(found["posterior"]["true"].values[0, 3], schools().y, atol=1e-7)
    means = found["observed_data"]["y"].groupby("row_client").mean().values
    np.testing.assert_allclose(found["posterior"]["level"].values[0, 3], means, atol=1e-7)
    drawn = fitted.posterior(7)
    assert set(drawn) == {"level"}
    np.testing.assert_allclose(drawn["level"][3], means, atol=1e-7)


def test_families_that_couple_clients_are_studied_one_by_one():
    auto = from_pyro(AutoMultivariateNormal, schools(), model=model)
    start: Tensors = spread_out(auto.start({}), 3)

    def init_client(
        received: Tensors, cohort: pyrofl.data.Cohort, generator: torch.Generator
    ) -> Tensors:
        return {n: v[cohort.ids].to(torch.float64) for n, v in start.items()}

    fitted = pyrofl.fit(
        replace(
            method(guide=auto.program, shared=""),
            init_client=init_client,
            metadata=Metadata({}, statistics=no_numbers),
            phases=(),
        ),
        schools(),
        0,
        progress=False,
    )
    found = fitted.to_arviz(9, groups=["log_likelihood", "posterior"])
    assert found["log_likelihood"]["y"].shape == (1, 9, 10)
    with pytest.raises(ValueError, match="couples 3 clients; run with chunk_size=1"):
        fitted.to_arviz(9)
    assert fitted.to_arviz(9, chunk_size=1)["posterior"]["eta"].shape == (1, 9, 3)


def no_numbers(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    return {}


def test_ensembles_and_no_draws_are_refused():
    def twice(received: Tensors, local: Tensors) -> list[Tensors]:
        return [local, local]

    both = run()
    both.method = replace(both.method, views={"ensemble": twice})
    for groups in (["posterior"], ["log_likelihood"]):
        with pytest.raises(ValueError, match="'ensemble' is an ensemble"):
            both.to_arviz(2, groups=groups, model="ensemble")
        with pytest.raises(ValueError, match="draws is 0; expected a whole number of at least 1"):
            run().to_arviz(0, groups=groups)


def test_a_deterministic_site_has_axes_for_clients_and_rows():
    def flat(received: Tensors, local: Tensors, batch: Batch) -> None:
        model(received, local, batch)
        pyro.deterministic("two", torch.tensor(2.0))

    with pytest.raises(ValueError, match=r"site 'two' has shape \(\); expected \[1, rows or 1"):
        run(model=flat).to_arviz(2)


def test_a_factor_weighs_draws_and_is_no_data():
    def weighed(received: Tensors, local: Tensors, batch: Batch) -> None:
        model(received, local, batch)
        with batch.clients():
            pyro.factor("bonus", batch.x.new_full((len(batch), 1), 2.5))

    plain, more = (run(model=m).to_arviz(4, groups="all") for m in (model, weighed))
    assert list(more["log_likelihood"].data_vars) == list(more["observed_data"].data_vars) == ["y"]
    gain: Tensor = more["sample_stats"]["log_p"] - plain["sample_stats"]["log_p"]
    np.testing.assert_allclose(gain, 3 * 2.5, atol=1e-9)


def test_factors_alone_have_no_responses_to_draw():
    def weighed(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
            with batch.rows():
                pyro.factor("y", -0.5 * (batch.y - (mu + eta) * batch.x[..., 0]).square())

    found = run(model=weighed).to_arviz(4, groups="all")
    assert set(found["prior"].data_vars) == {"mu", "eta"}
    assert "prior_predictive" not in found
    assert "posterior_predictive" not in found


def counted(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Count with a shared rate, of which a deterministic site is made."""
    zero = batch.x.new_zeros(())
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(zero, 1.0))
        rate = pyro.deterministic("rate", mu.exp())
        eta = pyro.sample("eta", dist.Normal(zero, 1.0))
        pyro.deterministic("own", rate * eta.exp())
        with batch.rows():
            pyro.sample("y", dist.Poisson(rate * eta.exp() + 0 * batch.y), obs=batch.y)


def counts() -> Federation:
    data = schools()
    return replace(data, y=(data.y * 3).abs().round())


def test_what_is_made_of_shared_sites_alone_has_no_axis_of_clients():
    posterior = run(data=counts(), model=counted).to_arviz(7)["posterior"]
    assert posterior["rate"].dims == posterior["mu"].dims == ("chain", "draw")
    assert posterior["own"].dims == ("chain", "draw", "client")
    np.testing.assert_allclose(posterior["rate"], np.exp(posterior["mu"]))


def test_counts_are_integers():
    found = run(data=counts(), model=counted).to_arviz(7, groups="all")
    for group in ("observed_data", "posterior_predictive", "prior_predictive"):
        assert found[group]["y"].dtype == np.int64
    assert (found["observed_data"]["y"].values == counts().y.numpy()).all()
    assert found["log_likelihood"]["y"].dtype == np.float64


def test_log_priors_are_those_of_each_site(whole):
    found = whole["log_prior"]
    assert found["mu"].dims == ("chain", "draw")
    for name, prior in (("mu", dist.Normal(0.0, 5.0)), ("eta", dist.Normal(0.0, 1.0))):
        log_p = prior.log_prob(torch.from_numpy(whole["posterior"][name].values))
        np.testing.assert_allclose(found[name], log_p, atol=1e-6)


def test_axes_have_the_names_and_labels_that_are_given():
    def with_terms(received: Tensors, local: Tensors, batch: Batch) -> None:
        model(received, local, batch)
        pyro.deterministic("both", torch.ones(len(batch), 1, 2))

    found = run(model=with_terms).to_arviz(
        5, {"both": ("term",)}, coords={"term": ["intercept", "slope"]}
    )
    assert found["posterior"]["both"].dims[-1] == "term"
    assert found["posterior"]["term"].values.tolist() == ["intercept", "slope"]


def test_names_of_parameters_that_are_in_no_group_have_no_effect_with_a_warning():
    fitted = pyrofl.fit(metavd.build(toys.net("softmax")), toys.blobs(), 1, progress=False)
    told = "dims of head.bias have no effect, as no variable of the groups posterior, sample_stats"
    with pytest.warns(UserWarning, match=told):
        fitted.to_arviz(5, {"head.bias": ("class",)})
    found = fitted.to_arviz(5, {"head.bias": ("class",), "head.weight": ("a", "b")})
    assert found["posterior"]["head.weight"].dims[-2:] == ("a", "b")
    with pytest.raises(ValueError, match="unknown site in dims 'psi/bias0'"):  # of the server alone
        fitted.to_arviz(5, {"psi/bias0": ("a",)})
    with pytest.warns(UserWarning, match="dims of head.weight have no effect"):
        fitted.to_arviz(5, {"head.weight": ("a", "b")}, groups=["constant_data"])


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"dims": {"mu": ("p", "q")}}, r"dims of 'mu' are \('p', 'q'\); expected 0 names for its"),
        (
            {"dims": {"eta": ("chain",)}},
            "axis of 'eta' 'chain', which is already in use; choose a name",
        ),
        ({"dims": {"eta": ("a", "a")}}, "axis of 'eta' 'a', which is already in use"),
        ({"dims": {"eta": ("eta",)}}, "axis of 'eta' 'eta', which is already in use"),
        ({"dims": {"etaa": ()}}, "unknown site in dims 'etaa'; did you mean eta"),
        ({"coords": {"term": [1]}}, "unknown axis in coords 'term'"),
        ({"coords": {"client": ["a", "b", "c"]}}, "unknown axis in coords 'client'"),
    ],
)
def test_names_that_fit_nothing_are_refused(what, told):
    with pytest.raises(ValueError, match=told):
        run().to_arviz(5, **what)


def test_held_out_clients_have_all_groups_too(blobs: Federation):
    data = replace(schools(), held_out=1)
    fitted = run(data=data)
    found = fitted.to_arviz(5, ids=torch.tensor([0, 2]), groups="all")
    assert {g for g in GROUPS if g not in found} == {"sample_stats"}  # Cleo never trained
    for group in ("posterior", "prior", "constant_data"):
        assert found[group]["client"].values.tolist() == ["Ada", "Cleo"]
    for group in ("log_likelihood", "posterior_predictive", "prior_predictive", "observed_data"):
        assert found[group]["row_client"].values.tolist() == ["Ada"] * 3 + ["Cleo"] * 6
    rows = [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert (found["observed_data"]["y"].values == data.y[rows].numpy()).all()
    # Who never trained is drawn as who did: by the guide, from what it got when it joined.
    own = found["posterior"]["eta"] + 0.5 * found["posterior"]["mu"]
    assert abs(float(own.sel(client="Cleo").mean()) - 0.2) < 5 * 0.3 / math.sqrt(5)
    alone = fitted.to_arviz(5, ids=torch.tensor([2]))
    np.testing.assert_array_equal(
        alone["posterior"]["eta"].sel(client="Cleo"), found["posterior"]["eta"].sel(client="Cleo")
    )


def test_some_clients_have_their_statistics_and_losses(blobs: Federation):
    built = pfedvem.build(toys.net(), head_epochs=1, base_epochs=1)
    fitted = pyrofl.fit(built, blobs, 2, progress=False)
    whole, some = (
        fitted.to_arviz(2, ids=ids)["sample_stats"] for ids in (None, torch.tensor([7, 2]))
    )
    names = [blobs.names[7], blobs.names[2]]
    for n in ("tau", "deviation", "loss"):
        assert some["client"].values.tolist() == names
        np.testing.assert_array_equal(some[n], whole[n].sel(client=names))


def table(tmp_path: Path, *, classes: bool = False) -> Federation:
    """Return a federation from a CSV file of two covariates and a response."""
    rng = np.random.default_rng(4)
    lines = ["ward,age,bmi,effect"]
    for i in range(24):
        effect = ("low", "high", "mid")[i % 3] if classes else f"{rng.normal():.3f}"
        lines.append(f"{'NS'[i % 2]},{rng.normal():.3f},{rng.normal():.3f},{effect}")
    path = tmp_path / "wards.csv"
    path.write_text("\n".join(lines) + "\n")
    loaded = datasets.load(f"csv:{path}", target="effect", client_column="ward")
    return federations.split(loaded, "groups", None, seed=0)


def with_slopes(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        eta = pyro.sample("eta", dist.Normal(batch.x.new_zeros(()), 1.0))
        mu = pyro.sample("mu", dist.Normal(batch.x.new_zeros(()), 5.0))
        pyro.deterministic("beta", torch.stack([mu, eta], -1), event_dim=1)
        with batch.rows():
            pyro.sample("y", dist.Normal(eta, 1.0), obs=batch.y)


def test_covariates_have_the_names_of_their_columns(tmp_path):
    fitted = run(data=table(tmp_path).to("cpu", torch.float64), model=with_slopes)
    found = fitted.to_arviz(5, {"beta": ("feature",)}, groups="all", corrected=False)
    x = found["constant_data"]["x"]
    assert x.dims == ("row", "feature")
    assert x["feature"].values.tolist() == ["age", "bmi"]
    rows = found["constant_data"]["table_row"].values
    assert (x.sel(feature="bmi").values == fitted.data.x[rows, 1].numpy()).all()
    beta = found["posterior"]["beta"]
    assert beta["feature"].values.tolist() == ["age", "bmi"]
    np.testing.assert_array_equal(beta.sel(feature="bmi"), found["posterior"]["eta"])
    # Nothing is guessed from lengths, and words of one's own come first.
    assert fitted.to_arviz(5)["posterior"]["beta"].dims[-1] == "beta_dim_0"
    other = {"feature": ["years", "kg/m2"]}
    mine = fitted.to_arviz(5, {"beta": ("feature",)}, coords=other)
    assert mine["posterior"]["feature"].values.tolist() == other["feature"]


def test_labels_that_do_not_fit_an_axis_are_refused(tmp_path):
    def wide(received: Tensors, local: Tensors, batch: Batch) -> None:
        with_slopes(received, local, batch)
        pyro.deterministic("gamma", torch.zeros(len(batch), 1, 3))

    fitted = run(data=table(tmp_path).to("cpu", torch.float64), model=wide)
    with pytest.raises(ValueError, match="gamma: axis 'feature' has length 3; expected 2"):
        fitted.to_arviz(5, {"gamma": ("feature",)}, corrected=False)


def test_classes_have_their_names(tmp_path):
    data = table(tmp_path, classes=True)
    net = nets.build("softmax", (2,), 3)
    fitted = pyrofl.fit(pfedvem.build(net), data, 1, progress=False)
    dims = {n: net.dims(n) for n in net.shapes} | {"head.bias": ("class",)}
    found = fitted.to_arviz(6, dims, groups="all")
    assert found["posterior"]["class"].values.tolist() == ["high", "low", "mid"]
    for group in ("observed_data", "posterior_predictive", "prior_predictive"):
        y = found[group]["y"]
        named = found[group]["class"].values[y.values]
        assert set(named.flat) <= {"high", "low", "mid"}
    rows = found["constant_data"]["table_row"].values
    words = [data.classes[i] for i in data.y[rows]]
    of_rows = found["observed_data"]
    assert of_rows["class"].values[of_rows["y"].values].tolist() == words
    export.save(found, tmp_path / "posterior.nc")
    again = export.load(tmp_path / "posterior.nc")
    assert again["observed_data"]["class"].values.tolist() == ["high", "low", "mid"]


def test_it_says_of_which_run_it_is_and_what_made_it_when(tmp_path, monkeypatch):
    fitted = pyrofl.fit(fedavg.build(toys.net()), toys.blobs((3, 5, 4)), 2, seed=7, progress=False)
    path = tmp_path / "posterior.nc"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    before = datetime.now(UTC)
    export.save(fitted.to_arviz(2), path)
    found = export.load(path)
    for told in (found.attrs, found["posterior"].attrs, found["sample_stats"].attrs):
        assert told["inference_library"] == told["creation_library"] == "pyrofl"
        assert told["inference_library_version"] == version("pyrofl")
        assert before <= datetime.fromisoformat(told["created_at"]) <= datetime.now(UTC)
        assert (told["method"], told["model"], told["adaptation"]) == ("fedavg", "global", "none")
        assert (told["seed"], told["rounds"]) == (7, 2)
        assert told["status"] == str(fitted.status)
        assert told["fitting_time"] == pytest.approx(sum(r.seconds for r in fitted.records))
        assert told["sampling_time"] > 0
    # A method of one's own has no name, and its programs have.
    several = pyrofl.to_arviz([run(0), run(pyrofl.Seeds(1, 2, 3))], 2).attrs
    assert several["method"] == "model, with the guide guide"
    assert several["seed"] == "0; Seeds(init=1, participation=2, noise=3)"

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    told = fitted.to_arviz(2).attrs
    assert told["created_at"] == "2001-09-09T01:46:40+00:00"
    assert not {"fitting_time", "sampling_time"} & set(told)
    export.save(fitted.to_arviz(2), path)
    once = path.read_bytes()
    export.save(fitted.to_arviz(2), path)
    assert path.read_bytes() == once
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "now")
    with pytest.raises(
        ValueError, match="SOURCE_DATE_EPOCH is 'now'; set it to whole seconds since 1970"
    ):
        fitted.to_arviz(2)


def test_statistics_of_sites_have_the_axes_of_these():
    def told(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        value = local["m"][:, None] + torch.arange(2.0)
        return {"m": local["m"], "rate/both": value, "own": value}

    fitted = run()
    fitted.method = replace(
        fitted.method, metadata=replace(fitted.method.metadata, statistics=told)
    )
    stats = fitted.to_arviz(3, {"both": ("term",)})["sample_stats"]
    assert stats["rate.both"].dims == ("chain", "client", "term")
    assert stats["own"].dims == ("chain", "client", "own_dim_0")
    np.testing.assert_allclose(stats["rate.both"].sel(client="Bea"), [[0.1, 1.1]])
    assert set(fitted.clients["metric"]) >= {"m"}
    assert not set(fitted.clients["metric"]) & {"rate/both", "own"}


def test_points_are_there_once_and_stand_still(blobs: Federation):
    single = blobs.to("cpu", torch.float32)
    fitted = pyrofl.fit(fedavg.build(toys.net(), fine_tune=1), single, 1, progress=False)
    found = fitted.to_arviz(7, model="global")
    posterior = found["posterior"]
    for n in toys.net().shapes:
        assert "client" not in posterior[n].dims
        assert float(posterior[n].std("draw").max()) == 0  # and not 3e-8
        np.testing.assert_array_equal(posterior[n].values[0, 2], fitted.state.server[f"w/{n}"])
    assert found.attrs["points"] == ", ".join(toys.net().shapes)
    mine = fitted.to_arviz(7, model="personal", adaptation="fine_tune")["posterior"]["head.bias"]
    assert mine.dims[:3] == ("chain", "draw", "client")
    assert float(mine.std("draw").max()) == 0
    assert "points" not in run().to_arviz(7).attrs
