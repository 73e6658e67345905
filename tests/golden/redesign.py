"""Compare what all methods give with numbers that were stored before the code was reorganized.

Each case fits a method for three rounds to ragged clients in float64, with minibatches and partial
participation. Stored are fingerprints of the server's state, the clients' states, messages, losses,
bytes, scores of every view, statistics and a few posterior draws. Equal algorithms with equal noise
agree within rounding, so the numbers have to be the same to a relative difference of 1e-10, on
processors with the same kernels: networks start at weights in single precision, which others round
differently.

Run: python tests/golden/redesign.py [--make] [CASE ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import programs
import toys

import pyrofl
from pyrofl import guides, likelihoods, priors
from pyrofl.data import Federation
from pyrofl.models import fedavg, fedbe, local, pvi
from pyrofl.models.priors import learned_scales
from pyrofl.models.shared import schedules

PATH = Path(__file__).with_suffix(".npz")
STARTS = "first weights"  # stored like a case, by which a machine is recognized
RTOL = 1e-10  # of an element, and of the root mean square of its tensor
# Inverses of full covariances: measured between two code paths of MKL, 1.5e-10.
LARGER_RTOL = {"pvi: full": 1e-9}
WHOLE = 8  # elements of a tensor up to which all of them are stored
SIZES = (3, 40, 7, 12, 25, 16, 5, 9)  # training rows; the last client is held out
ROUNDS = 3

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A method, what it is fitted to, and how.

    Attributes:
        build: data -> method, or a function of the round's number.
        data: returns the federation.
        how: arguments of `pyrofl.fit`, under the names that `fitted` knows.
        arviz: store the groups of `to_arviz` instead of `posterior`; None draws nothing.
        corrected: as of `to_arviz`.
        apart: fit by `Server` and `Client`, each client on a machine of its own.
    """

    build: Callable[[Federation], Any]
    data: Callable[[], Federation]
    how: Mapping[str, Any] = field(default_factory=dict)
    arviz: bool | None = False
    corrected: bool = False
    apart: bool = False


# Everything that depends on names of the public interface is in the next two functions.


def fitted(case: Case) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (part, name -> tensor) of the rounds, scores and draws of a case."""
    data = case.data()
    method = case.build(data)
    if case.apart:
        yield from halves(method, data)
        return
    how = dict(case.how)
    settings = {
        "participation": how.pop("participation", pyrofl.participation.bernoulli(0.5)),
        "chunk_size": how.pop("chunk_size", None),
        "draws": how.pop("draws", None),
    }
    if "drop_rate" in how or "min_work" in how:
        share = {"drop_rate": how.pop("drop_rate", 0.0), "min_work": how.pop("min_work", 1.0)}
        settings["stragglers"] = pyrofl.participation.Stragglers(**share)
    states: list[Any] = []
    run = pyrofl.fit(
        method,
        data,
        how.pop("rounds", ROUNDS),
        seed=3,
        progress=False,
        check=False,
        callback=lambda run: states.append((f"round {run.state.number} ", state_of(run.state))),
        **settings,
        **how,
    )
    for at, parts in states:
        for part, values in parts.items():
            yield at + part, values
    for scores in run.evaluate_all():
        kind = f"scores {scores.model} {scores.adaptation} {scores.population}"
        yield kind, scores.values | {"ids": scores.ids, "rows": scores.rows}
    yield "statistics", run.statistics()
    if case.arviz is None:
        return
    if case.arviz:
        groups = ("posterior", "log_prior", "log_likelihood", "posterior_predictive", "prior")
        found = run.to_arviz(
            4 if not case.corrected else 40,
            groups=groups if not case.corrected else ("posterior", "sample_stats"),
            corrected=case.corrected,
            allow_diverged=True,
            progress=False,
        )
        for group in found.groups() if callable(found.groups) else found.groups:
            if group.strip("/"):
                values = {str(n): v.values for n, v in found[group.strip("/")].data_vars.items()}
                yield f"arviz {group.strip('/')}", values
        return
    with suppress(ValueError):  # of an ensemble
        yield "posterior", run.posterior(4)


def state_of(state: Any) -> dict[str, Mapping[str, Any]]:
    """Return the parts of the state after a round; client states of clients that were seen."""
    seen = torch.as_tensor(state.seen).nonzero().flatten()
    cohort = {"reported": state.reporters.ids, "trained": state.trained, "silent": state.silent}
    return {
        "server": state.server,
        "clients": {n: torch.as_tensor(v)[seen].clone() for n, v in state.client_states.items()},
        "message": state.message,
        "loss": state.loss,
        "cohort": cohort | {"seen": seen, "rejected": torch.tensor(len(state.rejected))},
        "bytes": {"down": state.bytes_down, "up": state.bytes_up, "steps": state.steps},
    }


def halves(method: Any, data: Federation) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the same of a run of `Server` and `Client`, with a reply lost in round two."""
    names = data.names[: data.clients]
    draw = pyrofl.participation.bernoulli(0.7)
    sizes = data.sizes[: data.clients]
    server = pyrofl.Server(method, names, sizes, data.dtype, 3, participation=draw)
    clients = {}
    for i, name in enumerate(names):
        own = replace(data, train=(data.train[i],), test=(data.test[i],), names=(name,), held_out=0)
        clients[name] = pyrofl.Client(method, own, 3, min_scored_rows=1)
    for number in range(1, ROUNDS + 1):
        orders = server.configure_train()
        replies = {name: clients[name].train(order) for name, order in orders.items()}
        if number == 2:
            replies.pop(next(iter(replies)))
        parts = state_of(server.aggregate_train(replies))
        for part in ("server", "message", "bytes"):
            yield f"round {number} {part}", parts[part]
    for view in method.views:
        questions = server.configure_evaluate(model=view, draws=2)
        scores = server.aggregate_evaluate(
            {n: clients[n].evaluate(one) for n, one in questions.items()}
        )
        yield f"scores {view}", scores.values


# The federations.


def classes(held_out: int = 1) -> Federation:
    """Return ragged clients with rows of five classes."""
    return toys.blobs(SIZES, held_out=held_out)


def wide() -> Federation:
    """Return clients with far more features than rows."""
    data = classes()
    rng = np.random.default_rng(2)
    more = torch.from_numpy(rng.standard_normal((toys.FEATURES, 300)) / 3)
    return replace(data, x=torch.cat([data.x, (data.x @ more).tanh()], dim=1))


def server_rows() -> torch.Tensor:
    """Return rows without labels, [30, x], for servers that have some."""
    return toys.blobs((30, 30)).x[:30]


def server_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the server's with their labels."""
    data = toys.blobs((30, 30))
    return data.x[:20], data.y[:20]


def numbers(kind: str = "normal") -> Federation:
    """Return ragged clients with responses that are normal or counts."""
    data = toys.blobs(SIZES, held_out=1)
    rng = np.random.default_rng(11)
    line = 0.4 * data.x.numpy() @ rng.standard_normal(data.x.shape[1])
    y = line + rng.standard_normal(len(line)) if kind == "normal" else rng.poisson(np.exp(line / 4))
    return replace(data, y=torch.from_numpy(y.astype(float)), classes=())


def groups(rows: tuple[int, ...] = (2, 5, 3, 4, 6, 2)) -> Federation:
    """Return clients with a line each; x is the time."""
    rng = np.random.default_rng(5)
    found = {}
    for i, n in enumerate(rows):
        x = rng.standard_normal((n, 1))
        line = rng.normal(1.0, 0.5) + rng.normal(-0.5, 0.5) * x[:, 0]
        found[f"group {i}"] = (
            torch.from_numpy(x),
            torch.from_numpy(line + 0.3 * rng.standard_normal(n)),
        )
    return Federation.from_arrays(found)


def schools() -> Federation:
    """Return the effects of eight schools and their standard errors."""
    effects, errors = (28, 8, -3, 7, -1, 1, 18, 12), (15, 10, 16, 11, 9, 11, 10, 18)
    return Federation.from_arrays(
        {
            f"school {i}": (torch.tensor([[float(s)]]).double(), torch.tensor([float(y)]).double())
            for i, (y, s) in enumerate(zip(effects, errors, strict=True))
        }
    )


# The cases.

NORMAL = priors.fixed(dist.Normal, 0.0, 0.8)
SOME = {"epochs": 2, "batch": 6}  # so that cases are cheap, and have minibatches


def of(name: str, net: Any = None, **settings: Any) -> Callable[[Federation], Any]:
    """Return what builds a method, by default for the network of `toys`."""
    module = import_module(f"pyrofl.models.{name}")
    return lambda data: module.build(net or toys.net(), **settings)


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    found: dict[str, Case] = {}

    def add(name: str, build: Callable[[Federation], Any], **more: Any) -> None:
        how = {k: more.pop(k) for k in list(more) if k not in ("arviz", "corrected", "apart")}
        source = how.pop("data", classes)
        assert name not in found, name
        found[name] = Case(build, source, how, **more)

    def vary(method: str, variants: Mapping[str, Mapping[str, Any]], **common: Any) -> None:
        """Add a method with `common`, with chunk_size=4 and with stragglers, and its variants."""
        settings = (SOME if "base_epochs" not in common else {"batch": 6}) | common
        add(method, of(method, **settings), chunk_size=4, draws=2)
        add(f"{method}: stragglers", of(method, **settings), drop_rate=0.2, min_work=0.3)
        for i, (label, own) in enumerate(variants.items()):
            how = {"chunk_size": 4} if i % 2 else {}
            add(f"{method}: {label}", of(method, **(settings | own)), **how)

    bayes = {"prior": NORMAL, "num_particles": 2}
    vary(
        "fedavg",
        {
            "mean field": bayes | {"guide": guides.mean_field},
            "full covariance": bayes | {"guide": guides.full_covariance},
            "low rank": bayes | {"guide": guides.low_rank(2)},
            "flow": bayes | {"guide": guides.flow(2, 4)},
            "copula": bayes | {"guide": guides.copula},
            "laplace prior": {"prior": priors.fixed(dist.Laplace, 0.0, 0.8)},
            "mixture": bayes
            | {"guide": guides.mean_field, "prior": priors.fixed(priors.mixture())},
            "decay": {"weight_decay": 0.1, "fine_tune": 2, "decay": True, "elapsed": 0.3},
            "uneven": {"epochs": schedules.uneven(3)},
            "no momentum": {"momentum": 0.0, "batch": None},
            "median": {"aggregation": "median"},
            "trimmed": {"aggregation": "trimmed:0.2"},
            "krum": {"aggregation": "krum:0:2"},
            "clip": {"aggregation": "clip:0.1"},
        },
    )
    vary("fedprox", {"student t": {"prior": priors.student_t(4.0), "mu": 0.5}})
    vary("fedavgm", {})
    vary("fedopt", {rule: {"optimizer": rule} for rule in ("yogi", "adagrad", "sgd")})
    vary("reptile", {"momentum": {"server_momentum": 0.5}})
    vary("fedper", {})
    vary("fedrep", {}, head_epochs=2)
    vary("fedbabu", {"head": {"tune": "head"}, "base": {"tune": "base"}}, fine_tune=2)
    vary("lgfedavg", {})
    vary("local", {})
    vary("apfl", {"fixed share": {"lr_alpha": 0.0, "alpha": 0.2}})
    vary("ditto", {"own epochs": {"own_epochs": 3, "prior": dist.Laplace}})
    vary("pfedme", {"laplace": {"prior": dist.Laplace}}, steps=2)
    vary("perfedavg", {order: {"order": order} for order in ("exact", "first")})
    vary("fedamp", {"exponential": {"attention": "exponential"}})
    vary("fedfomo", {"everyone": {"downloads": None, "held_back": 0.4, "least": 3}})
    vary("fedpa", {})
    vary("ifca", {"three": {"clusters": 3}, "trimmed": {"aggregation": "trimmed:0.2"}})
    vary("scaffold", {"option I": {"option": "I"}, "remember": {"remember": True}}, lr=0.01)
    vary("fedem", {"dirichlet": {"guide": "dirichlet", "components": 2}}, adapt_steps=3)
    vary(
        "fedep",
        {
            "langevin": {"moments": "langevin", "burn_in": 1},
            "natural": {"moments": "natural"},
            "stateless": {"stateless": True},
            "damping": {"damping": 0.5, "guide": guides.full_covariance},
        },
        num_particles=10,
    )
    vary(
        "fedhb",
        {"centers": {"centers": 2, "guide": guides.delta}, "median": {"aggregation": "median"}},
        fine_tune=2,
        sampling="weights",
    )
    vary(
        "fedpop", {"cold": {"temperature": 0.0, "burn_in": 0}, "median": {"aggregation": "median"}}
    )
    vary("fisher", {"full covariance": {"guide": guides.full_covariance}})
    vary("fola", {"together": {"multiply": True, "clip": None}})
    vary("fald", {s: {"surrogates": s} for s in ("diagonal", "full")}, lr=1e-4, keep=5, discard=0.1)
    vary(
        "fedabml",
        {
            "unrolled": {"meta_grad": "unrolled", "natural": False, "average": "std"},
            "moments": {"natural": False, "average": "moments", "guide": "mean_field"},
            "delta": {"guide": "delta", "natural": False},
        },
        num_particles=2,
        steps=2,
        fine_tune=2,
        tune_steps=2,
    )
    vary("pfedbayes", {"fine tune": {"fine_tune": 2, "beta": 0.5}}, steps=2)
    vary("pfedgp", {"linear": {"kernel": "linear", "init_scale": 1.0}}, num_particles=3, lr=0.01)
    vary(
        "pfedmb",
        {
            "projection": {"guide": "projection"},
            "dirichlet": {"guide": "dirichlet"},
            "shared": {"shared": True, "weighted": False},
            "drop": {"drop": 0.32, "momentum": 0.5},
            "branched": {"branched": "head.*", "aggregation": "clip:0.3"},
        },
        branches=3,
        lr=0.05,
        num_particles=2,
    )
    vary(
        "pfedvem",
        {
            "uncertainty": {"confidence": "uncertainty", "confidence_after_training": True},
            "deviation": {"confidence": "deviation", "m_step_iters": 2},
            "whole network": {"head": "*"},
            "common base": {"personal_base": False, "beta": 0.3, "guide": guides.full_covariance},
            "laplace": {"prior": dist.Laplace, "aggregation": "trimmed:0.2"},
        },
        head_epochs=2,
        base_epochs=1,
        num_particles=2,
        lr_head=0.01,
        lr_base=0.01,
    )
    vary(
        "metavd",
        {
            "fedavg": {"on": "fedavg", "coords": "alpha", "precision": "alpha"},
            "maml": {"on": "maml", "sampling": "weights"},
            "perfedavg": {"on": "perfedavg", "hyper_step": 0.1},
            "vd": {"dropout": "vd"},
            "median": {"aggregation": "median"},
            "ensemble": {"dropout": "ensemble"},
            "none": {"dropout": "none"},
            "code": {"head": "code", "logit_average": True},
            "prune": {"prune": 0.3, "elapsed": 0.5},
            "snip": {"prune": "snip", "elapsed": 0.5},
        },
        width=12,
        depth=1,
        num_particles=2,
        lr=0.02,
    )
    rows = {"server_data": server_rows(), "distil_epochs": 3, "distil_batch": 10}
    rate = {"distil_lr": 1e-2, "distil_lr_end": 4e-3}  # the defaults when numbers were stored
    vary("predbayes", {"tuned": {"tuning": server_labels(), "thin": 2}}, samples=3, **rows)
    vary(
        "fedbe",
        {
            "dirichlet": {"posterior": "dirichlet", "distil": "sgd", "sharpen": True},
            "ensemble": {"distil": "none", "teachers": "SC"},
            "fedprox": {"on": "fedprox"},
            "fedavgm": {"on": "fedavgm"},
            "scaffold": {"on": "scaffold", "lr": 0.01},
        },
        samples=3,
        cycle=2,
        **rate,
        **rows,
    )
    vary("virtual", {"all private": {"private": "*.bias", "damping": 0.5}}, num_particles=4)
    vary(
        "pvi",
        {"full": {"covariance": "full", "epochs": 1, "batch": None}, "damping": {"damping": 0.7}},
        num_particles=4,
    )

    # Many steps of a kind, and wide layers, which steps in less arithmetic or code are made for.
    everyone = pyrofl.participation.everyone
    longer = {"epochs": 6, "batch": 4}
    for name, own in {
        "fedavg": {},
        "fedprox": {"mu": 0.5},
        "scaffold": {"lr": 0.01},
        "ditto": {},
        "fedep": {},
        "fedper": {},
        "pfedvem": {"head_epochs": 6, "base_epochs": 3, "batch": 4},
        "metavd": {"width": 12, "depth": 1},
    }.items():
        settings = own if "batch" in own else longer | own
        add(f"{name}: many steps", of(name, **settings), participation=everyone)
        if name in ("fedavg", "fedprox", "fedper", "pfedvem", "ditto"):
            net = pyrofl.nets.build("mlp:12", (toys.FEATURES + 300,), toys.CLASSES)
            add(f"{name}: wide", of(name, net, **settings), data=wide, participation=everyone)

    # Priors, likelihoods, programs and arguments of fit that are not a method's own.
    add(
        "learned scales",
        lambda data: learned_scales.learning(
            local.build(
                toys.net(),
                prior=learned_scales.learned(),
                guide=guides.mean_field,
                num_particles=2,
                **SOME,
            ),
            toys.net().shapes,
        ),
    )
    regression = partial(
        fedavg.build, prior=NORMAL, guide=guides.mean_field, num_particles=2, **SOME
    )
    for kind, likelihood in (
        ("normal", likelihoods.normal(0.5)),
        ("learned normal", likelihoods.learned_normal()),
        ("poisson", likelihoods.poisson),
    ):
        outputs = 2 if kind == "learned normal" else 1
        net = pyrofl.nets.build("mlp:4", (toys.FEATURES,), outputs)
        add(
            f"fedavg: {kind} responses",
            lambda data, net=net, likelihood=likelihood: regression(net, likelihood=likelihood),
            data=partial(numbers, "counts" if kind == "poisson" else "normal"),
            arviz=True,
        )
    for kind in ("AutoNormal", "pyro.param", "gamma and beta", "discrete"):
        family = toys.FAMILIES[kind]
        add(f"guide: {kind}", lambda data, f=family: toys.trained(f, data), chunk_size=4, draws=2)
    add(
        "guide: adam",
        lambda data: toys.trained(toys.FAMILIES["mean_field"], data, optim=pyrofl.adam(0.01)),
        chunk_size=4,
        arviz=True,
    )
    for where in ("server", "client"):
        privacy = pyrofl.Privacy(clip=0.5, noise_multiplier=0.3, where=where, seed=1)
        add(f"privacy: {where}", of("fedavg", **SOME), privacy=privacy, arviz=None)
    add("pfedvem: privacy", of("pfedvem", batch=6), arviz=None,
        privacy=pyrofl.Privacy(clip=0.5, noise_multiplier=0.3, max_weight=2.0, seed=1))  # fmt: skip
    add(
        "fedavg: all train, some report, folded",
        of("fedavg", **SOME),
        training_clients=everyone,
        keep_messages=False,
        chunk_size=2,
    )
    add("scaffold: everyone", of("scaffold", **SOME, lr=0.01), participation=everyone, chunk_size=1)
    add(
        "fedavg: schedule",
        lambda data: lambda r: fedavg.build(toys.net(), epochs=1, lr=0.1 / (r + 1)),
    )
    add(
        "fedbe: distilled apfl",
        lambda data: fedbe.with_distillation(
            of("apfl", **SOME)(data), toys.net(), server_rows(), samples=2, distil_epochs=2, **rate
        ),
    )

    # Programs of a user's own.
    hierarchical = partial(pvi.hierarchical, num_particles=16, steps=3)
    for kind, options in {
        "normal": {},
        "blocks": {"covariance": "blocks"},
        "diagonal": {"covariance": "diagonal", "damping": 0.5},
        "batch": {"batch": 2},
        "flow": {"guide": guides.flow(2, 4)},
        "low rank": {"guide": guides.low_rank(2)},
        "copula": {"guide": guides.copula},
    }.items():
        add(
            f"lines: {kind}",
            lambda data, options=options: hierarchical(
                programs.lines, data, shared="beta sd sigma", **options
            ),
            data=groups,
            arviz=True,
        )
    eight = partial(hierarchical, programs.eight_schools, shared="mu tau")
    add("schools", eight, data=schools, arviz=True, chunk_size=4)
    add("schools: corrected", eight, data=schools, arviz=True, corrected=True)
    add("lines: corrected", partial(hierarchical, programs.lines, shared="beta sd sigma"),
        data=groups, arviz=True, corrected=True)  # fmt: skip

    # Servers and clients on machines of their own.
    for name in ("fedavg", "scaffold", "pfedvem", "pvi", "metavd", "fedbe", "ifca", "fedpop"):
        add(f"{name}: apart", found[name].build, data=partial(classes, 0), apart=True)
    return found


# Fingerprints.


def fingerprint(value: Any) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the shape, and all elements or else three projections and the sum of squares."""
    array = value.detach().cpu().numpy() if torch.is_tensor(value) else np.asarray(value)
    flat = array.astype(np.float64).ravel()
    if flat.size <= WHOLE:
        return array.shape, flat
    weights = np.random.default_rng(flat.size).standard_normal((3, flat.size))
    bad = ~np.isfinite(flat)
    kept = np.where(bad, 0.0, flat)
    # The fifth number stands for elements that are not finite, and where they are.
    odd = weights[0, np.isnan(flat)].sum() + 2 * weights[0, np.isinf(flat)].sum()
    return array.shape, np.array([*weights @ kept, kept @ kept, odd])


def measure(case: Case) -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
    """Fit a case: "part/name" -> fingerprint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            f"{part}/{name}": fingerprint(value)
            for part, values in fitted(case)
            for name, value in values.items()
        }


def starts() -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
    """Return the fingerprints of the first weights of a network."""
    first = toys.net().init(torch.Generator().manual_seed(0))
    return {name: fingerprint(value) for name, value in first.items()}


def is_comparable() -> bool:
    """Return whether this machine rounds as the one of the stored numbers."""
    return not differences(starts(), read()[STARTS])


def write(found: Mapping[str, Mapping[str, tuple[tuple[int, ...], np.ndarray]]]) -> None:
    """Write the file."""
    keys = {c: [[n, list(shape)] for n, (shape, _) in each.items()] for c, each in found.items()}
    values = [v for each in found.values() for _, v in each.values()]
    index = np.frombuffer(json.dumps(keys).encode(), np.uint8)
    np.savez_compressed(PATH, index=index, values=np.concatenate(values))


def read() -> dict[str, dict[str, tuple[tuple[int, ...], np.ndarray]]]:
    """Read what `write` has written."""
    with np.load(PATH) as file:
        keys, values = json.loads(file["index"].tobytes()), file["values"]
    found: dict[str, dict[str, tuple[tuple[int, ...], np.ndarray]]] = {}
    at = 0
    for case, each in keys.items():
        found[case] = {}
        for name, shape in each:
            size = int(np.prod(shape))
            length = size if size <= WHOLE else 5
            found[case][name] = (tuple(shape), values[at : at + length])
            at += length
    return found


def differences(
    now: Mapping[str, tuple[tuple[int, ...], np.ndarray]],
    then: Mapping[str, tuple[tuple[int, ...], np.ndarray]],
    rtol: float = RTOL,
) -> list[str]:
    """Return a line for each tensor of a case that is not what it was."""
    lines = [f"{n} is missing" for n in then if n not in now]
    lines += [f"{n} is new" for n in now if n not in then]
    for name in now.keys() & then.keys():
        (shape, a), (before, b) = now[name], then[name]
        if shape != before:
            lines.append(f"{name} has shape {shape}, expected {before}")
            continue
        size = int(np.prod(shape))
        # An element counts relative to itself and to the others of its tensor. A projection has
        # the magnitude of the root of the sum of squares.
        if size <= WHOLE:
            finite = b[np.isfinite(b)]
            scale = np.full(b.shape, np.sqrt((finite**2).mean()) if finite.size else 0.0)
        else:
            scale = np.array([*[np.sqrt(b[3])] * 3, b[3], 1.0])
        with np.errstate(invalid="ignore"):
            off = np.abs(a - b)
            same = (
                (a == b)
                | (np.isnan(a) & np.isnan(b))
                | (off <= rtol * np.maximum(scale, np.abs(b)))
            )
        if not same.all():
            worst = np.nanmax(np.where(same, 0.0, off / np.maximum(scale, 1e-300)))
            lines.append(f"{name} differs by {worst:.1e} of its size")
    return sorted(lines)


def main() -> int:
    """Make the file or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", action="store_true", help="write the file")
    parser.add_argument("--times", action="store_true", help="print the seconds of each case")
    parser.add_argument("case", nargs="*", help="parts of names of cases; default: all")
    args = parser.parse_args()
    chosen = {
        n: c for n, c in cases().items() if not args.case or any(part in n for part in args.case)
    }
    found, kept, bad = {}, {} if args.make else read(), 0
    for name, case in chosen.items():
        begun = time.perf_counter()
        found[name] = measure(case)
        if args.times:
            print(f"{time.perf_counter() - begun:6.2f} s  {name}", flush=True)
        if args.make:
            continue
        lines = differences(found[name], kept.get(name, {}))
        bad += bool(lines)
        for line in lines[:5]:
            print(f"{name}: {line}", flush=True)
        if len(lines) > 5:
            print(f"{name}: {len(lines) - 5} more", flush=True)
    if args.make:
        write({STARTS: starts()} | (found if not args.case else read() | found))
    elif not is_comparable():
        print("this machine rounds the first weights differently: expect differences of 1e-7")
    print(f"{len(found)} cases, {bad} differ" if not args.make else f"{len(found)} cases stored")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
