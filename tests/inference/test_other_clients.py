"""Clients are matched by name: a permuted or renamed federation is reordered or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import toys

import pyrofl
from pyrofl import Federation, checks, federations, nets, reference
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import statistics
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models import ditto, fedavg, likelihoods, metavd, pvi
from pyrofl.models.metavd import hypernetwork

NAMES = "abc"


def federation(names: str, has_classes: bool = True) -> Federation:
    """Return clients whose rows and sizes depend on their names alone."""
    sites = {}
    for name in names:
        source = torch.Generator().manual_seed(ord(name))
        x = torch.randn(20 + ord(name) % 5, 3, generator=source)
        y = x @ torch.randn(3, generator=source)
        sites[name] = (x, (y > 0).long() if has_classes else y, x[:9], (y > 0).long()[:9])
        if not has_classes:
            sites[name] = (x, y, x[:9], y[:9])
    return Federation.from_arrays(sites, **({"classes": ("n", "y")} if has_classes else {}))


def others(has_classes: bool = True) -> dict[str, Federation]:
    data = federation(NAMES, has_classes)
    return {
        "client 0 is 'c', but 'a'": federation("cab", has_classes),
        "client 0 is 'x', but 'a'": replace(data, names=("x", "y", "z")),
        "client 3 is 'd', but absent": federation("abcd", has_classes),
        "client 2 is absent, but 'c'": federation("ab", has_classes),
    }


@cache
def personal() -> Run:
    method = ditto.build(nets.build("softmax", (3,), 2), epochs=1)
    return pyrofl.fit(method, federation(NAMES), 2, progress=False)


@cache
def factors() -> Run:
    method = pvi.build(nets.build("linear", (3,), 1), likelihood=likelihoods.normal(0.5))
    return pyrofl.fit(method, federation(NAMES, has_classes=False), 2, progress=False)


@cache
def hyper() -> Run:
    method = metavd.build(nets.build("mlp:4", (3,), 2))
    return pyrofl.fit(method, federation(NAMES), 1, progress=False)


Door = Callable[[Any, Federation, RoundState], object]
DOORS: dict[str, Door] = {
    "evaluate": lambda m, d, s: pyrofl.evaluate(m, d, s),
    "calibration": lambda m, d, s: checks.calibration(m, d, s),
    "calibration_by_client": lambda m, d, s: checks.calibration_by_client(m, d, s),
    "uncertainty": lambda m, d, s: checks.uncertainty(m, d, s),
    "statistics": lambda m, d, s: statistics(m, d, s),
    "posterior": lambda m, d, s: pyrofl.posterior(m, d, s, 2),
    "Run": lambda m, d, s: Run(m, d, s),
    "resume": lambda m, d, s: pyrofl.fit(m, d, 3, resume_from=s, progress=False),
    "federate": lambda m, d, s: list(pyrofl.federate(m, d, 3, resume_from=s)),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("told", others())
def test_a_state_of_single_clients_is_refused_for_others(door: str, told: str) -> None:
    run, data = personal(), others()[told]
    resumed = door in ("resume", "federate")
    expected = told if not (resumed and len(data.names) != 3) else "a round of 3 clients, but the"
    with pytest.raises(ValueError, match=expected) as caught:
        DOORS[door](run.method, data, run.state)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize("told", others())
def test_tables_of_the_server_are_refused_for_others(told: str) -> None:
    run, data = factors(), others(has_classes=False)[told]
    for door in ("evaluate", "posterior", "Run"):
        with pytest.raises(ValueError, match=told):
            DOORS[door](run.method, data, run.state)
    with pytest.raises(ValueError, match=told):
        reference.hmc(run.method, data, 8, 8, state=run.state)
    for change in (run.copy, lambda **new: replace(run, **new)):
        with pytest.raises(ValueError, match=told):
            change(data=data)


@pytest.mark.parametrize("told", others())
def test_embeddings_are_refused_for_others(told: str) -> None:
    run, data = hyper(), others()[told]
    for use in (statistics, lambda *what: hypernetwork.embed(*what)):
        with pytest.raises(ValueError, match=told):
            use(run.method, data, run.state)


def test_held_out_clients_may_differ() -> None:
    run = personal()
    data = federation("abcd")
    more = replace(data, held_out=1)
    scores = pyrofl.evaluate(run.method, more, run.state)
    assert torch.equal(scores.values["accuracy"], run.evaluate().values["accuracy"])
    assert pyrofl.evaluate(run.method, more, run.state, population="held_out").ids.tolist() == [3]


def test_a_model_without_tensors_of_clients_is_evaluated_anywhere() -> None:
    method = fedavg.build(nets.build("softmax", (3,), 2), epochs=1)
    run = pyrofl.fit(method, federation(NAMES), 1, progress=False)
    mine = dict(zip(NAMES, run.evaluate().values["accuracy"].tolist(), strict=True))
    for data in others().values():
        found = pyrofl.evaluate(method, data, run.state).values["accuracy"].tolist()
        known = [(mine[n], v) for n, v in zip(data.names, found, strict=True) if n in mine]
        assert all(one == other for one, other in known)
        with pytest.raises(ValueError, match="in the state; pass data with the same clients"):
            run.copy(data=data)  # its records are of other clients
        assert run.copy(data=data, records=[]).evaluate().ids.tolist() == [*range(data.clients)]


def test_tables_of_a_round_are_matched_by_name() -> None:
    run, permuted = factors(), federation("cab", has_classes=False)
    started = pyrofl.fit(run.method, permuted, 0, server_state=run.state, progress=False).state
    for name in ("server/shift", "server/precision"):
        assert torch.equal(started.server[name], run.state.server[name][[2, 0, 1]])
    state = pyrofl.fit(run.method, permuted, 1, server_state=run.state, progress=False).state
    same = pyrofl.fit(run.method, run.data, 1, server_state=run.state, progress=False).state
    torch.testing.assert_close(state.server["server/shift"], same.server["server/shift"][[2, 0, 1]])
    for told in ("client 0 is 'x', but 'a'", "client 3 is 'd', but absent"):
        data = others(has_classes=False)[told]
        for go in (pyrofl.fit, pyrofl.federate):
            with pytest.raises(ValueError, match=f"{told} in server_state.*pyrofl.leave and"):
                go(run.method, data, 1, server_state=run.state)
    with pytest.raises(
        ValueError, match=r"'server/shift' of shape \[3, 3\]; expected a row for ea"
    ):
        pyrofl.fit(
            run.method, federation("abcd", has_classes=False), 1, server_state=run.state.server
        )
    free = pyrofl.fit(personal().method, federation("xy"), 0, server_state=personal().state)
    toys.assert_same(free.state.server, personal().state.server)


def test_the_advice_of_a_refused_resume_works() -> None:
    run = personal()
    data = others()["client 0 is 'x', but 'a'"]
    with pytest.raises(ValueError, match=r"start again on other clients with server_state=state$"):
        pyrofl.fit(run.method, data, 3, resume_from=run, progress=False)
    assert pyrofl.fit(run.method, data, 1, server_state=run.state, progress=False).state.number == 1


def test_scores_of_other_rows_are_matched_by_name() -> None:
    run = personal()
    own = checks.uncertainty(run.method, run.data, run.state)
    order = [2, 0, 1]
    permuted = replace(
        own,
        ids=torch.arange(3),
        rows=own.rows[order],
        values={"total": torch.cat([own.by_client("total")[j] + 1 for j in order])},
        names=tuple(own.names[j] for j in order),
    )
    moved = replace(own, values={"total": own.values["total"] + 1})
    assert torch.equal(own.told_apart(permuted, "total"), own.told_apart(moved, "total"))
    renamed = replace(permuted, names=("x", "y", "z"))
    with pytest.raises(ValueError, match="clients are a, b, c and x, y, z; both must have"):
        own.told_apart(renamed, "total")


def drawn(names: str, shift: float = 0.0) -> Any:
    import xarray

    values = np.stack([np.random.default_rng(ord(n)).normal(size=(2, 50)) for n in names], -1)
    theta = xarray.DataArray(values + shift, dims=("chain", "draw", "client"))
    return xarray.DataTree.from_dict(
        {"posterior": theta.assign_coords(client=list(names)).to_dataset(name="theta")}
    )


def test_posteriors_are_compared_by_name() -> None:
    table = reference.compare_posteriors(drawn("abc"), drawn("cab"))
    assert table["difference"].abs().max() < 1e-12
    assert table.index.tolist() == ["theta[a]", "theta[b]", "theta[c]"]
    with pytest.raises(ValueError, match=r"theta: axes are .* with other labels of client; both"):
        reference.compare_posteriors(drawn("abc"), drawn("abx"))


def test_rows_of_other_clients_are_not_compared() -> None:
    run = factors()
    permuted = pyrofl.fit(run.method, federation("cab", has_classes=False), 2, progress=False)
    with pytest.raises(ValueError, match="with other labels of row_client"):
        reference.compare_posteriors(run, permuted, "log_likelihood", 20)


def test_chains_need_the_same_rows() -> None:
    run, data = factors(), federation(NAMES, has_classes=False)
    moved = replace(data, x=data.x + 1)
    for other, told in (
        (moved, "a has different training rows in two runs"),
        (
            federation("cab", has_classes=False),
            "clients a, b, c and c, a, b; all chains need the same, in",
        ),
    ):
        second = pyrofl.fit(run.method, other, 2, seed=1, progress=False)
        with pytest.raises(ValueError, match=told):
            pyrofl.to_arviz([run, second], 10, corrected=False)
        with pytest.raises(ValueError, match=told):
            checks.loco([run, second], 100)


def test_models_of_other_responses_are_not_compared() -> None:
    run, data = factors(), federation(NAMES, has_classes=False)
    moved = replace(data, x=data.x + 1)

    def fitted(data: Federation) -> Run:
        return pyrofl.fit(run.method, data, 2, progress=False)

    with pytest.warns(UserWarning, match="Pareto k"):
        table = checks.compare_loo({"one": run, "two": fitted(moved)}, 100, corrected=False)
    assert {*table.index} == {"one", "two"}
    responses = replace(data, y=data.y + 1)
    with pytest.raises(ValueError, match="'one' and 'two' have different rows of a; expected"):
        checks.compare_loo({"one": run, "two": fitted(responses)}, 100)
    permuted = fitted(federation("cab", has_classes=False))
    with pytest.raises(ValueError, match="of clients a, b, c and c, a, b; expected the same"):
        checks.compare_loo({"one": run, "two": permuted}, 100)


def test_a_saved_run_is_loaded_with_its_clients_alone(tmp_path: Path) -> None:
    run = factors()
    run.save(tmp_path / "run")
    for data in others(has_classes=False).values():
        with pytest.raises(ValueError, match="is of another run; now hash of the data is"):
            pyrofl.load(tmp_path / "run", data=data)


def test_a_server_resumes_with_its_clients_in_order(tmp_path: Path) -> None:
    method, roster = factors().method, ((20, 21, 22), torch.float32)
    pyrofl.Server(method, tuple(NAMES), *roster, state=tmp_path).configure_train()
    with pyrofl.Server(method, tuple(NAMES), *roster, state=tmp_path)._locked_and_saved_state():
        pass
    sizes = (22, 20, 21)
    with pytest.raises(ValueError, match=r"order of the clients is .*'c', 'a', 'b'.* and was"):
        pyrofl.Server(method, tuple("cab"), sizes, torch.float32, state=tmp_path)


# Regressions


def tables(names: str, shift: float = 0.0) -> Any:
    found = {}
    for name in names:
        source = np.random.default_rng(ord(name))
        x = source.normal(size=20)
        found[name] = pd.DataFrame({"x": x + shift, "y": x + source.normal(size=20)})
    return federations.from_frames(found)


def test_a_regression_is_fitted_to_its_own_rows() -> None:
    method = pyrofl.regression("y ~ x + (1 | client)", tables(NAMES))
    permuted = method.prepare(tables("cab"))
    assert permuted.names == tuple(NAMES)
    assert torch.equal(permuted.x, method.prepare(tables(NAMES)).x)
    for other, told in (
        (tables(NAMES, shift=1.0), "'a' has other rows than the regression was made of; call"),
        (tables("xyz"), "data has clients x, y, z, but the regression was made of a, b, c; call"),
        (tables("abcd"), "data has clients a, b, c, d, but the regression was made of a, b, c"),
    ):
        with pytest.raises(ValueError, match=told):
            pyrofl.fit(method, other, 1, progress=False)
