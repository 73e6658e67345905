"""Replies of hostile clients are left out by name, and the others count as without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from sites import SIZES, some

import pyrofl
from pyrofl import federations
from pyrofl.data import Federation
from pyrofl.inference import hmc as sampler
from pyrofl.inference.engine.messages import Inbox
from pyrofl.inference.posteriors.guided_sites import CannotCorrect
from pyrofl.inference.posteriors.importance_sampling import Request
from pyrofl.inference.transport import Client, Server
from pyrofl.inference.transport.correction import reporter
from pyrofl.models import conjugate, fedavg, fedhb, fisher, guides, pvi, two_stage
from pyrofl.tensors import role

DATA = toys.blobs(SIZES)
METHOD = fedavg.build(toys.net(), epochs=1)
LONG = "x" * 1_000_000
EVIL = "\x1b[2J\nround 9: all is well\x07\u202e"
Reply = dict[str, Any]
Change = Callable[[Reply], Any]


def served() -> Server:
    return Server(METHOD, DATA.names, DATA.sizes, DATA.dtype)


@cache
def honest() -> tuple[dict[str, Reply], dict[str, Reply]]:
    """Return the replies of all clients to the first request, and their scores."""
    server = served()
    clients = {n: Client(METHOD, some(DATA, [n]), min_scored_rows=1) for n in DATA.names}
    replies = {n: clients[n].train(order) for n, order in server.configure_train().items()}
    asked = server.configure_evaluate()
    return replies, {n: clients[n].evaluate(question) for n, question in asked.items()}


def put(name: str, value: Any) -> Change:
    return lambda reply: reply | {name: value}


def sparse(reply: Reply) -> Reply:
    return reply | {"up/w/head.bias": reply["up/w/head.bias"].to_sparse()}


def one(number: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([number], dtype=dtype)


class AnyText(str):
    """A text that equals every other."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def every(number: float) -> Change:
    """Return a change that sets all entries of a message to a number."""
    return lambda reply: {
        n: torch.full_like(v, number) if n.startswith("up/") else v for n, v in reply.items()
    }


BIAS = torch.zeros(1, 5).double()
with warnings.catch_warnings(action="ignore"):  # that such tensors are deprecated
    QUANTIZED = torch.quantize_per_tensor(BIAS.float(), 0.1, 0, torch.qint8)
LOSS = next(n for n in honest()[0]["client 0"] if n.startswith("loss/"))
TRAINING: dict[str, tuple[Change, str]] = {
    "negative steps": (put("steps", one(-5, torch.long)), "steps are [-5]; expected 0 to"),
    "huge steps": (put("steps", one(2**62, torch.long)), "expected 0 to 1,000,000,000,000"),
    "sparse": (sparse, "up/w/head.bias is a tensor of layout torch.sparse_coo"),
    "sparse steps": (put("steps", one(1, torch.long).to_sparse()), "expected torch.int64 [1]"),
    "meta": (put("up/w/head.bias", torch.zeros(1, 5, device="meta")), "without numbers"),
    "gradients": (put("up/w/head.bias", BIAS.clone().requires_grad_()), "requires gradients"),
    "parameter": (put("up/w/head.bias", torch.nn.Parameter(BIAS)), "is a Parameter; expected a"),
    "loss with gradients": (put(LOSS, one(1.0).requires_grad_()), "requires gradients"),
    "nested": (
        put("up/w/head.bias", torch.nested.nested_tensor([BIAS[0]], layout=torch.jagged)),
        "is a NestedTensor; expected a tensor",
    ),
    "quantized": (
        put("up/w/head.bias", QUANTIZED),
        "is a quantized tensor of layout",
    ),
    "1e300": (every(1e300), "is 1e+300; expected at most 1e100"),
    "-1.7e308": (every(-1.7e308), "is -1.7e+308; expected at most 1e100"),
    "equal names": (put("names", (AnyText("client 3"),)), "its reply is of client 3; expected"),
    "loss of NaN": (put(LOSS, one(torch.nan)), "is not finite; expected finite numbers"),
    "infinite loss": (put(LOSS, one(torch.inf)), "is not finite; expected finite numbers"),
    "loss of another name": (put(f"loss/{EVIL}", one(1.0)), "expected a printable name"),
    "unknown loss": (put("loss/mine", one(1.0)), "unknown loss of 'mine'"),
    "loss of texts": (put(LOSS, ("a",)), "is a tuple; expected a tensor"),
    "name of a tensor": (put(f"up/{EVIL}", one(1.0)), "expected a printable name"),
    "long name of a tensor": (put(f"up/{LONG}", one(1.0)), "expected a printable name"),
    "control characters": (put("odd", (EVIL,)), "client 0: "),
    "long reason": (put("odd", (LONG,)), "(1,000,000 characters)"),
    "another's reason": (put("odd", ("client 3: tau is -1",)), "client 0: client 3: tau is -1"),
    "many reasons": (put("odd", ("",) * 100_000), "odd has 100000 texts; expected 1"),
    "reasons of numbers": (put("odd", (1,)), "odd is (1,); expected a tuple of texts"),
    "long names": (put("names", (LONG,)), "expected a printable name"),
    "names with newlines": (put("names", (EVIL,)), "expected a printable name"),
    "name of another": (put("names", ("client 1",)), "its reply is of client 1; expected"),
    "name of all": (put("names", DATA.names), "expected a reply of its own clients"),
    "names as a number": (put("names", 3), "names is 3; expected a tuple of texts"),
    "nested names": (put("names", (("client 0",),)), "expected a tuple of texts"),
    "huge round": (put("round", 10**5000), "round is a number of 16610 bits; expected 0 to"),
    "negative round": (put("round", -1), "round is -1; expected 0 to"),
    "round of text": (put("round", LONG), "round is 'xxx"),
    "true round": (put("round", True), "round is True; expected a whole number"),
    "sends of numbers": (put("sends", one(1.0)), "sends is torch.float64 [1]; expected torch.bool"),
    "wide tensor": (
        put("up/w/head.bias", torch.zeros(1, 1).double().expand(1, 2**40)),
        "is a tensor of 8,796,093,022,208 bytes that repeats its entries",
    ),
    "expanded rows": (
        put("up/w/head.bias", torch.zeros(1, 5).double().expand(2**40, 5)),
        "has shape [1099511627776, 5]; expected shape [1, ...]",
    ),
    "complex": (
        put("up/w/head.bias", torch.zeros(1, 5, dtype=torch.complex128)),
        "is torch.complex128; expected torch.float64",
    ),
    "a number as a key": (lambda reply: reply | {3: 1}, "its reply has the key 3; expected texts"),
    "a list": (lambda reply: [reply], "its reply is a list; expected a dict"),
    "a text": (lambda reply: LONG, "its reply is a str; expected a dict"),
}


def one_line(text: str) -> None:
    assert text.isprintable()
    assert len(text) < 1500


@pytest.mark.parametrize("kind", TRAINING)
def test_a_hostile_training_reply_is_named_and_left_out(kind):
    change, told = TRAINING[kind]
    replies, _ = honest()
    others = {n: r for n, r in replies.items() if n != "client 0"}
    server = served()
    found = server.aggregate_train(replies | {"client 0": change(replies["client 0"])})
    expected = served().aggregate_train(others)
    toys.assert_same(found.server, expected.server)
    assert server.accepted.tolist() == [0, 1, 1, 1, 1, 1]
    (reason,) = found.rejected
    assert reason.startswith("client 0: ")
    assert told in reason
    one_line(reason)
    assert found.loss.keys() == expected.loss.keys()
    assert bool((found.steps >= 0).all())


ODD_FORMS = {
    "shape": torch.zeros(1, 6).double(),
    "bool": torch.zeros(1, 5, dtype=torch.bool),
    "complex": torch.zeros(1, 5, dtype=torch.complex128),
    "no entries": torch.empty(1, 2**61, 0).double(),
}


@pytest.mark.parametrize("kind", ODD_FORMS)
@pytest.mark.parametrize("others", [0, 1])
def test_another_form_than_that_of_the_method_does_not_end_round_one(kind, others):
    """Without a round before, the form of one client, or the first of two, counts as correct."""
    replies, _ = honest()
    rest = {n: replies[n] for n in DATA.names[1 : 1 + others]}
    odd = replies["client 0"] | {"up/w/head.bias": ODD_FORMS[kind]}
    server = served()
    state = server.aggregate_train(rest | {"client 0": odd})
    (reason,) = state.rejected
    assert reason.startswith("client 0: ")
    one_line(reason)
    assert state.reporters.ids.tolist() == [*range(1, 1 + others)]
    assert server.accepted.tolist() == [0, *[1] * others, *[0] * (5 - others)]
    expected = served().aggregate_train(rest).server if others else served().state.server
    toys.assert_same(state.server, expected)


def test_the_error_of_a_method_is_not_taken_for_that_of_its_clients():
    def fails(*_: Any) -> Any:
        raise KeyError("mine")

    replies, _ = honest()
    method = replace(METHOD, aggregate=fails)
    server = Server(method, DATA.names, DATA.sizes, DATA.dtype)
    with pytest.raises(ValueError, match="aggregate raises KeyError"):
        server.aggregate_train(replies)


def test_no_room_is_made_for_messages_of_another_form(monkeypatch):
    replies, _ = honest()
    odd = replies["client 0"] | {"up/w/head.bias": torch.zeros(1, 1000).double()}
    taken, take = [], Inbox.take

    def spy(self: Inbox, form: Any, cohort: Any, sent: Any) -> None:
        taken.extend((len(cohort.ids), tuple(v.shape)) for v in sent.values())
        take(self, form, cohort, sent)

    monkeypatch.setattr(Inbox, "take", spy)
    state = served().aggregate_train(replies | {"client 0": odd})
    assert state.reporters.ids.tolist() == [1, 2, 3, 4, 5]
    assert len(taken) == 5 * 4
    assert (1, (1, 1000)) not in taken


def test_a_sender_without_a_request_takes_no_place():
    replies, _ = honest()
    for name in ("a", "client", "client 00", EVIL, LONG):  # which sort before or after
        found = served().aggregate_train(replies | {name: replies["client 0"] | {"steps": None}})
        exact = served().aggregate_train(replies | {name: replies["client 0"]})
        for state in (found, exact):
            assert state.reporters.ids.tolist() == list(range(6))
            (reason,) = state.rejected
            assert "no request was sent to it" in reason
            one_line(reason)


def test_a_machine_answers_for_its_own_clients_alone():
    holders = {"a": ("client 0", "client 2"), "b": ("client 1",), "rest": DATA.names[3:]}
    server = served()
    orders = server.configure_train(holders)
    clients = {h: Client(METHOD, some(DATA, [*names])) for h, names in holders.items()}
    replies = {h: clients[h].train(order) for h, order in orders.items()}
    stolen = replies | {"a": replies["a"] | {"names": ("client 1", "client 2")}}
    state = server.aggregate_train(stolen)
    assert state.reporters.ids.tolist() == [1, 3, 4, 5]
    assert state.rejected == ("a: its reply is of client 1; expected a reply of its own clients",)
    again = served()  # has begun again, and has not asked anybody
    assert again.aggregate_train(replies).rejected[0].startswith("a: no request was sent to it")
    again = served()
    again.configure_train(holders)
    assert not again.aggregate_train(replies).rejected


def scored(change: Change) -> tuple[Any, Any]:
    """Return the scores with a changed reply of client 0, and those without its reply."""
    _, answers = honest()
    others = {n: a for n, a in answers.items() if n != "client 0"}
    each = []
    for some_answers in (answers | {"client 0": change(answers["client 0"])}, others):
        server = served()
        server.configure_evaluate()
        each.append(server.aggregate_evaluate(some_answers))
    return each[0], each[1]


def no_scores(reply: Reply) -> Reply:
    return {n: v for n, v in reply.items() if not n.startswith("score/")}


def without(metric: str) -> Change:
    return lambda reply: {n: v for n, v in reply.items() if n != f"score/{metric}"}


SCORES: dict[str, tuple[Change, str]] = {
    "far below": (put("score/accuracy", one(-1e9)), "accuracy of client 0 is -1e+09; expected 0 t"),
    "above one": (put("score/accuracy", one(17.0)), "accuracy of client 0 is 17; expected 0 to 1"),
    "NaN": (put("score/accuracy", one(torch.nan)), "accuracy of client 0 is nan; expected 0 to 1"),
    "infinite": (put("score/nll", one(torch.inf)), "nll of client 0 is inf; expected at least 0"),
    "negative nll": (put("score/nll", one(-3.0)), "nll of client 0 is -3; expected at least 0"),
    "brier": (put("score/brier", one(2.5)), "brier of client 0 is 2.5; expected 0 to 2"),
    "entropy": (put("score/entropy", one(-1.0)), "entropy of client 0 is -1; expected at least"),
    "ece": (put("score/ece", one(1.5)), "ece of client 0 is 1.5; expected 0 to 1"),
    "whole numbers": (put("score/accuracy", one(1, torch.long)), "score/accuracy is torch.int64"),
    "two clients": (put("score/accuracy", torch.ones(2).double()), "expected torch.float64 [1]"),
    "sparse": (put("score/accuracy", one(1.0).to_sparse()), "layout torch.sparse_coo"),
    "no metrics": (no_scores, "it sends rows without scores; expected both"),
    "one metric less": (without("nll"), "it sends no nll; expected all metrics of most clients"),
    "many rows": (put("rows", one(10**12, torch.long)), "client 0 has 1,000,000,000,000 test row"),
    "negative rows": (put("rows", one(-60, torch.long)), "client 0 has -60 test rows; expected 1"),
    "huge nll": (put("score/nll", one(1.7e308)), "is 1.7e+308; expected at most 1e+100"),
    "unknown adaptation": (put("adaptation", "x"), "adaptation is 'x'; expected one of none"),
    "equal names": (put("names", (AnyText("client 3"),)), "its reply is of client 3; expected"),
    "no rows": (put("rows", one(0, torch.long)), "client 0 has 0 test rows; expected 1 to"),
    "text": (put("score/accuracy", "good"), "score/accuracy is a str; expected a tensor"),
    "another's": (put("names", ("client 3",)), "its reply is of client 3; expected a reply of"),
    "another round": (put("round", 7), "replies to {'round': 7"),
    "another model": (put("model", EVIL), "; expected replies to"),
    "model of tensors": (put("model", torch.ones(2)), "model is a Tensor; expected a string"),
    "long model": (put("model", LONG), "(1,000,000 characters)"),
    "part": (put("part", ["test"]), "part is a list; expected a string"),
    "a number": (lambda reply: 7, "its reply is a int; expected a dict"),
    "metric's name": (put(f"score/{EVIL}", one(1.0)), "expected a printable name"),
}


@pytest.mark.parametrize("kind", SCORES)
def test_hostile_scores_are_named_and_left_out(kind):
    change, told = SCORES[kind]
    found, expected = scored(change)
    toys.assert_same(found.values, expected.values)
    assert found.values.keys() >= {"accuracy", "nll"}
    assert (found.ids.tolist(), found.rows.tolist()) == (
        expected.ids.tolist(),
        expected.rows.tolist(),
    )
    (reason,) = found.rejected
    assert reason.startswith("client 0: ")
    assert told in reason
    one_line(reason)


def test_a_metric_of_one_client_is_of_no_use():
    found, _ = scored(put("score/mine", one(1.0)))
    assert "mine" not in found.values
    assert not found.rejected
    assert found.ids.tolist() == list(range(6))


@pytest.mark.parametrize(
    "change", [put("model", "other"), put("round", 7), put("draws", 2**128), put("part", "x")]
)
def test_scores_of_another_evaluation_are_refused_from_a_client_alone(change):
    _, answers = honest()
    server = served()
    server.configure_evaluate()
    with pytest.raises(ValueError, match=r"no client has replied with valid scores: client 0: "):
        server.aggregate_evaluate({"client 0": change(answers["client 0"])})
    assert server.aggregate_evaluate({"client 0": answers["client 0"]}).ids.tolist() == [0]


def test_scores_in_single_precision_stay_finite():
    _, answers = honest()
    server = Server(METHOD, DATA.names, DATA.sizes, torch.float32)
    server.configure_evaluate()
    odd = answers | {"client 0": answers["client 0"] | {"score/nll": one(1e300)}}
    found = server.aggregate_evaluate(odd)
    assert found.rejected == ("client 0: nll of client 0 is 1e+300; expected at most 1e+31",)
    most = answers | {"client 0": answers["client 0"] | {"score/nll": one(1e30)}}
    assert not server.aggregate_evaluate(most).rejected  # of a model that excludes a row


def test_rows_of_training_are_those_that_the_server_knows():
    server = served()
    client = Client(METHOD, some(DATA, ["client 0"]), min_scored_rows=1)
    question = server.configure_evaluate(part="train")["client 0"]
    answer = client.evaluate(question)
    assert server.aggregate_evaluate({"client 0": answer}).rows.tolist() == [3]
    more = answer | {"rows": one(4, torch.long)}
    with pytest.raises(ValueError, match=r"client 0: client 0 has 4 train rows; expected 3; exp"):
        server.aggregate_evaluate({"client 0": more})


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the server's chains."""
    for name, value in {"NUM_METRIC_UPDATES": 1, "THINNING": 1}.items():
        monkeypatch.setattr(sampler, name, value)


def coin(received: Any, local: Any, batch: Any) -> None:
    with batch.clients():
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Bernoulli(p), obs=batch.y)


def effects(received: Any, local: Any, batch: Any) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        effect = pyro.sample("effect", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Normal(effect, 1.0), obs=batch.y)


@cache
def hierarchical(kind: str) -> tuple[Any, Federation]:
    """Return a method with factors of clients, and its data."""
    import numpy as np
    import pandas as pd

    rng, frames = np.random.default_rng(0), {}
    for name in "abc":
        x = rng.normal(size=8)
        y = x + rng.normal(size=8)
        frames[name] = pd.DataFrame({"x": x, "y": y if kind == "linear" else (y > 0) * 1.0})
    family = "gaussian" if kind == "linear" else "bernoulli"
    data = federations.from_frames(frames)
    if kind == "pvi":
        made = pvi.build(toys.net(), covariance="full", epochs=1)
        return made, DATA
    if kind == "fedhb":
        return fedhb.build(toys.net(), epochs=1), DATA
    if kind == "fisher":
        return fisher.build(toys.net(), guide=guides.full_covariance, epochs=1), DATA
    if kind in ("coin", "two_stage"):
        rows = {n: (frame[["x"]].to_numpy(), frame["y"].to_numpy()) for n, frame in frames.items()}
        whole = Federation.from_arrays(rows)
        if kind == "coin":
            return conjugate.method(coin, whole), whole
        return two_stage.hierarchical(effects, whole, shared="mu tau", draws=16), whole
    method = pyrofl.regression("y ~ x + (1 | client)", data, family=family)
    return method, method.prepare(data)


@cache
def factors(kind: str) -> tuple[Callable[[], Server], dict[str, Reply], dict[str, torch.Tensor]]:
    """Return new servers, the replies of all clients, and the state without the first of them."""
    made, data = hierarchical(kind)

    def server() -> Server:
        return Server(made, data.names, data.sizes, data.dtype)

    orders = server().configure_train()
    replies = {n: Client(made, some(data, [n])).train(order) for n, order in orders.items()}
    assert not server().aggregate_train(replies).rejected
    others = {n: reply for n, reply in replies.items() if n != data.names[0]}
    return server, replies, server().aggregate_train(others).server


def changed(value: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a precision that no client may send."""
    found = value.clone()
    if kind == "negative":
        return -1e6 - found.abs()
    if kind == "huge":
        return found * 0 + 1e300
    found.flatten(1)[:, 1] += 1e3  # one entry of a matrix, and not that across the diagonal
    return found


@pytest.mark.parametrize("method", ["linear", "bernoulli", "pvi"])
@pytest.mark.parametrize("kind", ["negative", "huge", "asymmetric"])
def test_precisions_of_no_factor_are_named_and_left_out(method, kind, short):
    if (method, kind) == ("pvi", "asymmetric"):
        pytest.skip("the server receives a triangle")
    server, replies, expected = factors(method)
    name, odd = next(iter(replies)), next(iter(replies.values()))["up/precision"]
    state = server().aggregate_train(
        replies | {name: replies[name] | {"up/precision": changed(odd, kind)}}
    )
    toys.assert_same(state.server, expected)
    (reason,) = state.rejected
    assert reason.startswith(f"{name}: precision")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("square", -1.0, "square is -1; expected >= 0"),
        ("count", -3.0, "count is -3; expected >= 0"),
        ("shift", 1e300, "expected at most 1e100"),
    ],
)
def test_sums_of_no_rows_are_named_and_left_out(name, value, told, short):
    server, replies, expected = factors("linear")
    odd = torch.full_like(replies["a"][f"up/{name}"], value)
    state = server().aggregate_train(replies | {"a": replies["a"] | {f"up/{name}": odd}})
    (reason,) = state.rejected
    assert told in reason
    assert state.reporters.ids.tolist() == [1, 2]
    toys.assert_same(state.server, expected)


@pytest.mark.parametrize(
    ("kind", "name", "value", "told"),
    [
        ("coin", "change/p", -1.0, "its sums or counts are negative; expected those of rows"),
        ("coin", "change/p", 1e300, "expected at most 1e100"),
        ("coin", "change/clients", -1e6, "expected 0 or 1"),
        ("fisher", "precision", -1e6, "precision is negative; expected the precision of a normal"),
        ("fisher", "precision", 1e300, "expected at most 1e100"),
        ("fisher", "shift", 1e300, "expected at most 1e100"),
        ("fedhb", "mean/fc1.bias", -1.0, "its second moment is below its squared mean"),
        ("fedhb", "square/fc1.bias", 0.0, "its second moment is below its squared mean"),
        ("two_stage", "draws", 1e300, "expected at most 1e100"),
        ("two_stage", "log_p1", -1e300, "expected at most 1e100"),
    ],
)
def test_numbers_of_no_rows_are_named_and_left_out(kind, name, value, told, short):
    server, replies, expected = factors(kind)
    first, *others = replies
    odd = replies[first][f"up/{name}"].clone()
    odd.view(-1)[-1] = value
    state = server().aggregate_train(replies | {first: replies[first] | {f"up/{name}": odd}})
    (reason,) = state.rejected
    assert reason.startswith(f"{first}: ")
    assert told in reason
    assert len(state.reporters.ids) == len(others)
    toys.assert_same(state.server, expected)


class Weighed:
    """A server with draws, whose clients report log likelihoods that are made up."""

    def __init__(self) -> None:
        self.server = served()
        self.noise = torch.zeros(4, 2).double()

    def report(self, change: Change) -> str:
        """Return why the reports are not used, with one that is changed; "" if they are."""

        def send(requests: Mapping[str, Reply]) -> dict[str, Reply]:
            answers: dict[str, Reply] = {}
            for name in requests:
                log_l = -torch.ones(1, 4).double()
                own: Reply = {"names": (name,), "round": 0, "exchange": 0}
                own |= {"up/log_l": log_l, "up/noise": log_l.abs()}
                answers[name] = change(own) if name == "client 0" else own
            return answers

        try:
            found = reporter(self.server, send)(Request(self.noise, [0] * 6, 2), 0)
        except CannotCorrect as error:
            return str(error)
        assert [list(v.shape) for v in found] == [[4, 6], [4, 6]]
        return ""


WEIGHTS: dict[str, tuple[Change, str]] = {
    "NaN": (put("up/log_l", torch.full((1, 4), torch.nan).double()), "NaN or infinite numbers"),
    "infinite": (put("up/log_l", torch.full((1, 4), torch.inf).double()), "NaN or infinite"),
    "nowhere": (put("up/log_l", torch.full((1, 4), -torch.inf).double()), "not finite at any dr"),
    "huge": (put("up/log_l", torch.ones(1, 4).double() * 1e308), "is 1e+308; expected at most"),
    "gradients": (put("up/log_l", torch.ones(1, 4).double().requires_grad_()), "gradients"),
    "one draw": (put("up/log_l", torch.zeros(1, 1).double()), "log_l is torch.float64 [1, 1]; ex"),
    "negative variance": (put("up/noise", -torch.ones(1, 4).double()), "a variance is -1; expect"),
    "complex": (put("up/log_l", torch.zeros(1, 4, dtype=torch.complex128)), "torch.complex128"),
    "sparse": (put("up/log_l", torch.zeros(1, 4).to_sparse()), "layout torch.sparse_coo"),
    "missing": (lambda r: {n: v for n, v in r.items() if n != "up/noise"}, "up/noise is missing"),
    "another's": (put("names", ("client 1",)), "its reply is of client 1; expected a reply of"),
    "a number": (lambda r: 3, "its reply is a int; expected a dict"),
    "refusal": (put("why", EVIL), "round 9: all is well"),
    "long refusal": (put("why", LONG), "(1,000,000 characters)"),
    "refusal of numbers": (put("why", 7), "client 0: why is a int; expected a string"),
    "refusal of tensors": (
        put("why", torch.ones(2)),
        "client 0: why is a Tensor; expected a string",
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_hostile_likelihoods_are_named_and_nothing_is_corrected(kind):
    change, told = WEIGHTS[kind]
    reason = Weighed().report(change)
    assert "(client 0: " in reason
    assert told in reason
    one_line(reason)
    assert Weighed().report(lambda own: own) == ""


def test_seeds_of_participation_stay_at_the_server():
    seed = pyrofl.Seeds(init=1, participation=987654321, noise=2)
    server = Server(METHOD, DATA.names, DATA.sizes, DATA.dtype, seed)
    about = {"exchange": 0, "sets": 1}
    columns = {"draws": torch.zeros(6, dtype=torch.long)}
    orders = (
        server.configure_train(),
        server.configure_evaluate(),
        server.configure_posterior(None, about, columns),
    )
    for order in orders:
        for flat in order.values():
            assert role("seed", flat) == {"init": 1, "noise": 2}
            assert "987654321" not in repr(flat)
    client = Client(METHOD, some(DATA, ["client 0"]), pyrofl.Seeds(init=1, noise=2))
    assert client.train(orders[0]["client 0"])["odd"] == ("",)


def test_a_client_does_not_answer_more_rounds_than_it_agreed_to(tmp_path):
    server = served()
    here = {"state": tmp_path / "client", "rounds": 2, "min_scored_rows": 1}
    client = Client(METHOD, some(DATA, ["client 0"]), **here)
    for _ in range(2):
        server.aggregate_train({"client 0": client.train(server.configure_train()["client 0"])})
    assert client.evaluate(server.configure_evaluate()["client 0"])["names"] == ("client 0",)
    order = server.configure_train()["client 0"]
    told = "a request is of round 3, but this client takes part in 2 rounds; raise its number of"
    for again in (client, Client(METHOD, some(DATA, ["client 0"]), **here)):
        with pytest.raises(ValueError, match=told):
            again.train(order)
    with pytest.raises(ValueError, match="a request is of round 7"):
        client.evaluate(server.configure_evaluate()["client 0"] | {"round": 7})
    here["rounds"] = 3
    assert Client(METHOD, some(DATA, ["client 0"]), **here).train(order)["odd"] == ("",)
