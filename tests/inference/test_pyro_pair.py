"""`Method.to_pyro`: Pyro's own inference on a method's model and guide."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import promises
import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal, AutoNormal
from pyro.infer.inspect import get_model_relations

from pyrofl import federate, fit
from pyrofl.data import Federation
from pyrofl.inference.definition.elbo import latent
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Guide
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.pyro_pair import PyroPair
from pyrofl.inference.training.noise import NUMBERS_AHEAD, ClientNoise
from pyrofl.models import ditto, fedabml, fedavg, likelihoods, pfedvem

PAPERS = ["pfedvem", "pfedmb", "metavd", "fedbe", "fedabml"]
CAVITIES = ["pvi", "fedep", "fedgvi", "virtual"]
METHODS = [*PAPERS, "fedavg", "ditto", "fedpop", "pfedbayes"]
CLIENT = 2

methods = pytest.mark.parametrize("name", [*METHODS, *CAVITIES])


@pytest.fixture(autouse=True)
def _store():
    with pyro.get_param_store().scope():
        yield


def build(name: str) -> Method:
    method: Method = import_module(f"pyrofl.models.{name}").build(
        toys.net(), **promises.of(name).settings
    )
    return method


@pytest.mark.filterwarnings("ignore:the loss of .* approximate another distribution")
def programs(name: str, *, every: bool = False) -> PyroPair:
    data = toys.blobs()
    client = None if every else data.names[CLIENT]
    return build(name).to_pyro(data, client)


def losses(pair: PyroPair, loss: object, steps: int, guide: object = None) -> list[float]:
    svi = SVI(pair.model, guide or pair.guide, pyro.optim.Adam({"lr": 0.02}), loss)
    pyro.set_rng_seed(0)
    return [svi.step() for _ in range(steps)]


@pytest.mark.filterwarnings("ignore:the loss of .* approximate another distribution")
@methods
@pytest.mark.parametrize("every", [False, True])
def test_svi_trains_the_tensors_of_the_gradient_steps(name, every):
    pair = programs(name, every=every)
    for loss in (Trace_ELBO(), TraceMeanField_ELBO(), TraceGraph_ELBO()):
        pyro.clear_param_store()
        losses(pair, loss, 1)
        before = {n: v.detach().clone() for n, v in pyro.get_param_store().items()}
        losses(pair, loss, 2)
        after = dict(pyro.get_param_store().items())
        assert before.keys() == after.keys() != set()
        assert all(not torch.equal(before[n], after[n]) for n in before)


@pytest.mark.filterwarnings("ignore:the loss of .* approximate another distribution")
@methods
def test_nuts_autoguides_and_relations_work(name):
    pair = programs(name)
    kernel = NUTS(pair.model, max_tree_depth=2)
    chain = MCMC(kernel, num_samples=2, warmup_steps=2, disable_progbar=True)
    chain.run()
    latent = set(chain.get_samples())
    assert latent == set(get_model_relations(pair.model)["sample_dist"]) - {"y", "cavity"}
    assert all(v.isfinite().all() for v in chain.get_samples().values())
    pyro.clear_param_store()
    first, *_, last = losses(pair, Trace_ELBO(), 20, AutoNormal(pair.model, init_scale=0.01))
    assert last < first


@pytest.mark.filterwarnings("ignore:the loss of .* approximate another distribution")
@methods
@pytest.mark.parametrize("parallel", [False, True])
def test_predictive_draws_responses(name, parallel):
    pair = programs(name)
    sizes = toys.blobs().sizes
    predict = Predictive(
        poutine.uncondition(pair.model), guide=pair.guide, num_samples=40, parallel=parallel
    )
    y = predict()["y"]
    assert y.shape == (40, 1, int(sizes[CLIENT]))
    assert set(y.unique().tolist()) <= set(range(toys.CLASSES))
    assert len(y.unique(dim=0)) > 1


@pytest.mark.filterwarnings("ignore:the loss of .* approximate another distribution")
@methods
def test_handlers_work(name):
    model = programs(name).model
    plain = poutine.trace(model).get_trace()
    site, value = next((n, v["value"]) for n, v in latent(plain))
    trace = poutine.trace(poutine.condition(model, {site: value})).get_trace()
    assert trace.nodes[site]["is_observed"]
    assert torch.equal(trace.nodes[site]["value"], value)
    hidden = poutine.trace(poutine.block(model, hide=["y"])).get_trace()
    assert hidden.nodes.keys() == plain.nodes.keys() - {"y"}
    twice = poutine.trace(poutine.scale(poutine.replay(model, trace=plain), scale=2.0)).get_trace()
    once, double = (float(t.log_prob_sum().detach()) for t in (plain, twice))
    assert double == pytest.approx(2 * once)
    masked = poutine.trace(poutine.mask(model, mask=False)).get_trace()
    assert float(masked.log_prob_sum().detach()) == 0


@pytest.mark.filterwarnings("ignore:the loss of .* approximate another distribution")
@pytest.mark.parametrize("name", PAPERS)
def test_models_are_drawn(name):
    pytest.importorskip("graphviz")
    pair = programs(name)
    drawing = pyro.render_model(pair.model).source
    assert "y [label=y fillcolor=gray" in drawing  # observed
    assert all(f"label={plate} " in drawing for plate in ("clients", "rows"))
    for site in set(get_model_relations(pair.model)["sample_dist"]) - {"y"}:
        assert re.search(rf'"?{site}"? \[label="?{site}"? fillcolor=white', drawing)


@pytest.mark.parametrize("kind", [AutoMultivariateNormal, AutoIAFNormal])
def test_correlated_autoguides_train_small_models(kind):
    data = toys.blobs()
    pair = pfedvem.build(toys.net()).to_pyro(data.to("cpu", torch.float32), data.names[CLIENT])
    guide = kind(pair.model, [80]) if kind is AutoIAFNormal else kind(pair.model)
    assert all(map(torch.isfinite, map(torch.tensor, losses(pair, Trace_ELBO(), 3, guide))))


def test_svi_by_hand_equals_the_head_phase_of_the_engine():
    """With the noise of the clients, ten steps on all heads are those of a round."""
    data, method = toys.blobs(), pfedvem.build(toys.net())
    (state,) = federate(method, data, 1, chunk_size=1, record=False)
    pair = method.to_pyro(data, phase=1)
    noise = ClientNoise(
        [stream(0, Stream.NOISE, 0, name) for name in data.names[: data.clients]], NUMBERS_AHEAD
    )
    loss = TraceMeanField_ELBO(num_particles=5, vectorize_particles=True, max_plate_nesting=2)
    svi = SVI(pair.model, pair.guide, pyro.optim.SGD({"lr": 1e-3, "momentum": 0.9}), loss)
    for _ in range(10):
        with noise:
            svi.step()
    heads = {n: v for n, v in state.client_states.items() if n[:3] in ("mu/", "pi/")}
    assert heads.keys() == set(pyro.get_param_store())
    for n, v in heads.items():
        torch.testing.assert_close(pyro.param(n).detach(), v, rtol=0, atol=1e-6)


def test_programs_start_at_the_state_of_a_run():
    data, method = toys.blobs(), pfedvem.build(toys.net())
    run = fit(method, data, 2, progress=False)
    model, guide = method.to_pyro(data, data.names[CLIENT], run, phase=1)
    guide()
    states = run.state.get_client_states(torch.tensor([CLIENT]))
    for n in pyro.get_param_store():
        assert torch.equal(pyro.param(n).detach(), states[n])
    prior = poutine.trace(model).get_trace().nodes["head.bias"]["fn"]
    assert torch.equal(prior.mean.squeeze(), run.state.server["loc/head.bias"])


def test_personal_models_read_their_own_tensors():
    """Ditto's second phase trains v_j; the received w is the center of its prior."""
    data = toys.blobs()
    model, _ = (method := ditto.build(toys.net(), strength=2.0)).to_pyro(data, data.names[0])
    nodes = poutine.trace(model).get_trace().nodes
    pyro.clear_param_store()
    losses(method.to_pyro(data, data.names[0]), Trace_ELBO(), 3)
    assert {n.partition("/")[0] for n in pyro.get_param_store()} == {"own"}
    sd = (2.0 * data.sizes[0]) ** -0.5
    assert float(nodes["head.bias"]["fn"].stddev.unique()) == pytest.approx(float(sd))
    pyro.clear_param_store()
    after = poutine.trace(method.to_pyro(data, data.names[0]).model).get_trace().nodes
    assert torch.equal(nodes["head.bias"]["fn"].mean, after["head.bias"]["fn"].mean)


def test_nuts_under_a_flat_prior_is_the_exact_posterior():
    """Y = w x + noise of known sd: Normal(sum xy / sum x^2, sd^2 / sum x^2)."""
    x = torch.linspace(-1, 2, 20).double()[:, None]
    y = 1.5 * x[:, 0] + 0.3 * torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    rows = torch.arange(20)
    data = Federation(x, y, [rows], [rows[:0]])
    line = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    import pyrofl

    method = fedavg.build(pyrofl.Network(line), likelihood=likelihoods.normal(0.3))
    pyro.set_rng_seed(1)
    chain = MCMC(
        NUTS(method.to_pyro(data).model), num_samples=600, warmup_steps=200, disable_progbar=True
    )
    chain.run()
    w = chain.get_samples()["0.weight"].flatten()
    square = float(x.square().sum())
    mean, sd = float(x[:, 0] @ y) / square, 0.3 / square**0.5
    # Five Monte Carlo standard errors of about 300 effective draws.
    assert float(w.mean()) == pytest.approx(mean, abs=5 * sd / 300**0.5)
    assert float(w.std()) == pytest.approx(sd, rel=5 / 600**0.5)


@pytest.mark.parametrize("name", [*METHODS, *CAVITIES])
def test_a_guide_without_parameters_is_refused_by_svi(name):
    data, method = toys.blobs(), build(name)
    state, *_ = federate(method, data, 1)
    batch = data.batch(torch.tensor([0]))
    svi = SVI(method.model, method.guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    with pytest.raises(ValueError, match="to_pyro"):
        svi.step(state.server, state.server, batch)


def test_parameters_of_another_client_are_not_used():
    data, method = toys.blobs(), pfedvem.build(toys.net())
    one, other = (method.to_pyro(data, data.names[j], phase=1) for j in (0, 1))
    losses(one, Trace_ELBO(), 2)
    with pytest.raises(ValueError, match=r"already has 'mu/.*clear_param_store"):
        other.guide()
    pyro.clear_param_store()
    assert all(map(torch.isfinite, map(torch.tensor, losses(other, Trace_ELBO(), 2))))


def test_invalid_arguments_are_refused():
    data, method = toys.blobs(), pfedvem.build(toys.net())
    with pytest.raises(ValueError, match="unknown client 'nobody'"):
        method.to_pyro(data, "nobody")
    with pytest.raises(ValueError, match=r"phase is 0; expected .*: 1, 2"):
        method.to_pyro(data, phase=0)


def test_a_tempered_loss_is_said():
    with pytest.warns(UserWarning, match="fedabml weighs the divergence .* by 0.1"):
        fedabml.build(toys.net()).to_pyro(toys.blobs())


def test_the_printed_guide_is_the_named_family():
    """PFedVEM and FedAvg print the program of mean_field and delta."""
    from pyrofl import guides

    data = toys.blobs()
    for build_it, family in ((pfedvem.build, guides.mean_field), (fedavg.build, guides.delta)):
        printed, named = build_it(toys.net()), build_it(toys.net(), guide=family)
        assert printed.guide.program is not named.guide.program
        (one,), (other,) = (list(federate(m, data, 1)) for m in (printed, named))
        assert all(torch.equal(v, other.server[n]) for n, v in one.server.items())


@pytest.mark.parametrize("name", [*METHODS, "pvi"])
def test_a_methods_file_shows_its_model_and_guide(name):
    method = build(name)
    guide = method.guide.program if isinstance(method.guide, Guide) else method.guide
    for program in (getattr(method.model, "program", method.model), guide):
        assert program.__module__.startswith(f"pyrofl.models.{name}")
        assert "pyro.sample" in inspect.getsource(program)


def test_another_prior_takes_effect():
    data = toys.blobs()
    model, _ = pfedvem.build(toys.net(), prior=dist.Laplace).to_pyro(data)
    prior = poutine.trace(model).get_trace().nodes["head.bias"]["fn"]
    assert isinstance(prior.base_dist, dist.Laplace)
