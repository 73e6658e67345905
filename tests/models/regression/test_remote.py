"""Hospitals that keep their tables agree on the regression of one process, by messages."""

import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from messy_hospitals import LINEAR, LOGISTIC, agreed, client_of, hospitals

pytest.importorskip("formulae")

import pyrofl
from pyrofl import federations
from pyrofl.data.outlines import facts, outline, outline_federation
from pyrofl.inference import hmc
from pyrofl.inference.definition.description import clients_part
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.shared import corrected_shared, shared_to_arviz
from pyrofl.inference.transport.correction import reporter
from pyrofl.inference.transport.message_checks import InvalidRequestError

FORMULAS = [
    LOGISTIC,
    LINEAR,
    ("score ~ bs(age, df=4) + poly(beds, 2) + C(arm, Treatment('b'))", {}),
    ("score ~ scale(age) * sex + (1 + center(beds) || client) + (1 | arm)", {}),
    ("score ~ age + (1 | hospital/sex)", {"client": "hospital"}),
    ("arm ~ age + sex", {"family": "categorical"}),
    ("score ~ {age > limit}", {"namespace": {"limit": 60}}),
    ("censored(beds, died) ~ age", {"family": "weibull"}),
    (
        "censored(beds, died, upper=beds + died, entry=beds / 2) ~ age",
        {"family": "lognormal", "link": "identity"},
    ),
    ({"score": "score ~ age + (1 | client)", "sigma": "~ scale(beds)"}, {}),
    ("score | se(beds) ~ age + (1 | client)", {}),
    ("score ~ s(age, df=6) + (1 | client)", {}),
    ("score ~ gp(age) + mo(beds)", {}),
]


def pooled(formula, frames=None, **how):
    """Return the regression of one process and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method = pyrofl.regression(formula, federations.from_frames(frames or hospitals()), **how)
    return method, [str(one.message) for one in caught]


@pytest.mark.parametrize(("formula", "how"), FORMULAS, ids=[str(f) for f, _ in FORMULAS])
def test_remote_hospitals_agree_on_the_regression_of_one_process(formula, how):
    frames = hospitals()
    server, clients = agreed(frames, formula, **how)
    method, texts = pooled(formula, **how)
    expected, made = method.design.federation(), server.method
    assert made.program() == method.program()
    assert made.priors() == method.priors()
    assert made.axes() == method.axes()
    assert (server.names, server.sizes) == (expected.names, tuple(expected.sizes.tolist()))
    assert server.results == json.loads(json.dumps(method.design.clients.agreement.results))
    for name, request in server.configure_describe().items():
        own, data = clients[name].build(request)
        assert clients_part(own) == clients_part(made)
        rows = expected.train[expected.names.index(name)]
        assert torch.equal(data.x, expected.x[rows])
        assert torch.equal(data.y, expected.y[rows])
    assert not (set(texts) - set(server.warnings))
    assert all("may determine its rows" in text for text in set(server.warnings) - set(texts))


def test_what_clients_receive_names_no_other_client_and_no_level_of_a_nested_group():
    frames = {
        n: f.assign(patient=[f"{n} {k}" for k in range(len(f))]) for n, f in hospitals().items()
    }
    frames = {
        n: pd.concat([f, f.assign(age=f.age + 0.5)], ignore_index=True) for n, f in frames.items()
    }
    sent = []

    def spoil(label, name, reply):
        sent.append(reply["reports"])
        return reply

    server, _ = agreed(frames, "score ~ age + (1 | client/patient)", spoil=spoil)
    for request in server.configure_describe().values():
        assert not any(name in request["results"] for name in frames)
        assert "not used" not in request["results"]
    assert not any("chur 1" in reply or "not used" in reply for reply in sent)
    assert server.design.groups[1].count == 39


@pytest.mark.parametrize(("formula", "how"), [LOGISTIC, LINEAR], ids=["logistic", "linear"])
def test_the_posterior_is_that_of_one_process(formula, how, monkeypatch):
    for name, value in {"NUM_METRIC_UPDATES": 1, "THINNING": 1}.items():
        monkeypatch.setattr(hmc, name, value)
    agreement, sites = agreed(hospitals(), formula, **how)
    plans, rounds = agreement.configure_describe(), 2
    server = pyrofl.Server(agreement.method, agreement.names, agreement.sizes, torch.float64)
    clients = {name: pyrofl.Client(*sites[name].build(plan)) for name, plan in plans.items()}
    for _ in range(rounds):
        orders = server.configure_train()
        server.aggregate_train({n: clients[n].train(order) for n, order in orders.items()})
    method, _ = pooled(formula, **how)
    tables = federations.from_frames(hospitals())
    run = pyrofl.fit(method, tables, rounds, progress=False, chunk_size=1)
    for name, value in run.state.server.items():
        torch.testing.assert_close(server.state.server[name], value, rtol=1e-8, atol=1e-8)
    roster = outline(server.roster.names, server.roster.sizes, (len(agreement.design.places),))
    data = outline_federation(
        facts(replace(roster.to("cpu", torch.float64), source=agreement.design.source))
    )
    here = Run(agreement.method, data, server.state, 0)

    def send(requests):
        return {n: clients[n].weigh(one) for n, one in requests.items()}

    found = shared_to_arviz(here, 400, corrected_shared(here, reporter(server, send), 400))
    expected = run.copy(state=replace(run.state, server=server.state.server))
    expected = expected.to_arviz(400, progress=False)
    assert found["posterior"].attrs["corrected"] == expected["posterior"].attrs["corrected"]
    for name in found["posterior"]:
        one, other = found["posterior"][name], expected["posterior"][name]
        assert one.dims == other.dims
        np.testing.assert_allclose(one.values[0], other.values[0], rtol=1e-8, atol=1e-8)
    assert {"Intercept", "sd_client", "b"} <= set(found["posterior"])


def test_a_hospital_without_a_complete_row_is_left_out():
    frames = hospitals()
    frames["chur"]["age"] = np.nan
    server, clients = agreed(frames, LOGISTIC[0], family="bernoulli")
    method, texts = pooled(LOGISTIC[0], frames, family="bernoulli")
    assert server.names == ("bern", "basel") == method.design.federation().names
    assert texts[0] == server.warnings[0]
    assert "no row is left of chur" in texts[0]
    plans = server.configure_describe()
    assert set(plans) == {"bern", "basel"}
    with pytest.raises(InvalidRequestError, match="no row without missing values is left here"):
        clients["chur"].build({**plans["bern"], "names": ("chur",)})


def report_of(change, label="columns", client="basel"):
    """Return a function that changes a report of one hospital."""

    def spoil(now, name, reply):
        if name != client or not now.endswith(label):
            return reply
        reports = json.loads(reply["reports"])
        reports[client] = change(reports[client])
        return {**reply, "reports": json.dumps(reports)}

    return spoil


def at(path, value):
    """Return a function that sets an entry of a report."""

    def change(report):
        part = report
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        return report

    return change


def reply_of(change):
    def spoil(label, name, reply):
        return change(reply) if name == "basel" else reply

    return spoil


SEX = ("columns", "sex")
AGE = ("columns", "age", "numbers")
MEANS = ("parts", "columns of the location", "mean")
HOSTILE = {
    "levels of another type": (
        report_of(at((*SEX, "levels"), ["f", 1])),
        "levels of type int, str",
    ),
    "levels as numbers": (
        report_of(at((*SEX, "kind"), "numbers")),
        "expected levels of categories",
    ),
    "a huge level": (
        report_of(at((*SEX, "levels"), ["f" * 10**6])),
        "a level of 1,000,000 characters",
    ),
    "a level of control characters": (report_of(at((*SEX, "levels"), ["\x1b[2J"])), "printable"),
    "too many levels": (
        report_of(at((*SEX, "levels"), [*map(str, range(10**5))])),
        "100000 levels",
    ),
    "levels that are lists": (report_of(at((*SEX, "levels"), [[1], [2]])), "levels of type list"),
    "a level twice": (report_of(at((*SEX, "levels"), ["f", "f"])), "a level twice"),
    "no levels": (report_of(at((*SEX, "levels"), None)), "expected levels of categories"),
    "a sum of NaN": (report_of(at((*AGE, "mean"), math.nan)), "the number NaN; expected finite"),
    "a sum as text": (report_of(at((*AGE, "mean"), "60")), "a str; expected a finite number"),
    "a negative square": (report_of(at((*AGE, "squares"), -1.0)), "a negative sum of squares"),
    "more complete rows": (report_of(at(("complete",), 99)), "expected whole numbers of rows"),
    "negative rows": (report_of(at(("rows",), -1)), "expected whole numbers of rows"),
    "another column": (report_of(at(("columns", "salary"), {})), "got columns .*salary; expected"),
    "no report": (report_of(lambda report: None), "got no report on columns"),
    "a client of two names": (report_of(at(("client",), ["bern", "chur"])), "levels of type list"),
    "the name of another": (
        report_of(at(("client",), "bern")),
        "column client is 'bern' at bern and basel",
    ),
    "sums of other columns": (
        report_of(at(MEANS, [0.0] * 9), "spreads"),
        "9 entries; expected 4 ent",
    ),
    "an infinite mean": (report_of(at(MEANS, [math.inf] * 4), "spreads"), "the number Infinity"),
    "huge sums": (
        report_of(at(MEANS, [1e299] * 4), "spreads"),
        r"1e\+299, whose sums are not finite",
    ),
    "other products": (report_of(at(("products", ""), [[1.0]]), "checks"), "expected 4 entries"),
    "no reply": (reply_of(lambda reply: None), "no reply"),
    "a refusal": (reply_of(lambda reply: {"why": "no consent"}), "no consent"),
    "a list": (reply_of(lambda reply: [1]), ""),
    "another client": (
        reply_of(lambda reply: {**reply, "names": ("bern",)}),
        "its reply is of bern",
    ),
    "another label": (reply_of(lambda reply: {**reply, "label": "rows"}), "its reply is on 'rows'"),
    "no JSON": (reply_of(lambda reply: {**reply, "reports": "{"}), "Expecting property name"),
    "deep JSON": (reply_of(lambda reply: {**reply, "reports": "[" * 10**5}), "nested lists"),
    "bytes": (reply_of(lambda reply: {**reply, "reports": b"{}"}), "got a bytes; expected JSON"),
    "much JSON": (
        reply_of(lambda reply: {**reply, "reports": " " * 30_000_000}),
        "30,000,000 char",
    ),
}


@pytest.mark.parametrize(("spoil", "text"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_or_broken_client_is_refused_in_one_line_with_its_name(spoil, text):
    with pytest.raises(ValueError, match=f"(?s)^(basel: .*|){text}") as caught:
        agreed(hospitals(), LOGISTIC[0], spoil=spoil, family="bernoulli")
    line = str(caught.value)
    assert "basel" in line
    assert "\n" not in line
    assert len(line) < 1200


def test_an_exchange_can_be_repeated_after_an_invalid_reply():
    server = pyrofl.RegressionServer(LINEAR[0], list(hospitals()))
    clients = {n: client_of(n, frame, LINEAR[0]) for n, frame in hospitals().items()}
    requests = server.configure_describe()
    replies = {n: clients[n].describe(one) for n, one in requests.items()}
    with pytest.raises(ValueError, match=r"^chur: no reply$"):
        server.aggregate_describe({n: reply for n, reply in replies.items() if n != "chur"})
    assert server.configure_describe() == requests
    server.aggregate_describe(replies)
    assert server.configure_describe() != requests
    with pytest.raises(ValueError, match="its reply is on 'columns'; expected 'means and spreads'"):
        server.aggregate_describe(replies)


def test_numbers_at_one_client_and_text_at_another_are_refused_without_a_cell():
    frames = hospitals()
    frames["basel"]["age"] = frames["basel"]["age"].map(lambda value: f"{value} years")
    text = "column age holds numbers at bern, chur, and text at basel; expected one type at all"
    with pytest.raises(ValueError, match=text):
        agreed(frames, LINEAR[0])


def test_the_client_refuses_other_settings_columns_and_clients():
    request = pyrofl.RegressionServer(LINEAR[0], list(hospitals())).configure_describe()["bern"]
    frame = hospitals()["bern"]
    for change, how, text in (
        ({}, {"family": "student"}, "family is 'student', but 'gaussian' at the server"),
        ({}, {"center": False}, "center is 'False', but 'True' at the server"),
        ({"names": ("zug",)}, {}, "a request is for 'zug', but the clients here are bern"),
        ({"lacking": "rows"}, {}, "a request is on 'rows', but 'columns' is lacking"),
        ({"version/torch": "0"}, {}, "torch is .*, but '0' at the server"),
    ):
        client = client_of("bern", frame, LINEAR[0], **how)
        with pytest.raises(InvalidRequestError, match=text):
            client.describe(request | change)
    client = client_of("bern", frame.drop(columns="age"), LINEAR[0])
    with pytest.raises(InvalidRequestError, match=r"^bern: column age is missing; expected"):
        client.describe(request)
    client = client_of("bern", frame.assign(age=np.inf), LINEAR[0])
    with pytest.raises(InvalidRequestError, match=r"^columns: a report has .*not finite"):
        client.describe(request)
    with pytest.raises(InvalidRequestError, match="'columns' is lacking in the request"):
        client_of("bern", frame, LINEAR[0]).build(request)


def test_settings_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="f of namespace is a function; expected a number or a"):
        pyrofl.RegressionServer("score ~ f(age)", ["bern"], namespace={"f": lambda x: x})
    with pytest.raises(ValueError, match="a regression of remote clients has no row weights"):
        pyrofl.RegressionServer("score | weights(beds) ~ age", ["bern"])
    with pytest.raises(ValueError, match="the clients have not agreed on columns; call"):
        pyrofl.RegressionServer(LINEAR[0], ["bern"]).method  # noqa: B018
