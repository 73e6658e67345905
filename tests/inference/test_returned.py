"""Functions of a method that return something else, and states that no file can hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from means import method, normal, numbers
from torch import Tensor

import pyrofl
from pyrofl.data import Batch
from pyrofl.inference.aggregation import Aggregator, by_size
from pyrofl.inference.definition.metadata import Metadata, Moments, Monitor, Rule, WireCost
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.fit import fit
from pyrofl.models import fedavg, likelihoods
from pyrofl.nets import build
from pyrofl.tensors import Tensors

STEPS = method().phases[0].updates


def failing(*given: object) -> Any:
    raise ZeroDivisionError("division by zero")


def about(fact: Any, name: str = "q/mu") -> dict[str, Metadata]:
    return {"metadata": Metadata({name: fact})}


def sending(change: Any) -> dict[str, Aggregator]:
    return {
        "aggregate": Aggregator({"*": by_size}, lambda s, p: {n: change(v) for n, v in p.items()})
    }


def weighing(weight: Any) -> dict[str, Aggregator]:
    return {"aggregate": Aggregator({"*": weight})}


def lasting(epochs: Any) -> dict[str, tuple[Phase]]:
    return {"phases": (Phase(STEPS, epochs, 2),)}


def changing(update: Any) -> dict[str, tuple[Phase]]:
    return {"phases": (Phase((update,)),)}


def viewing(view: Any) -> dict[str, dict[str, Any]]:
    return {"views": {"personal": view}}


RETURNED = [
    (viewing(lambda r, m: {}), "what view 'personal' returns is empty; expected a dict of tensors"),
    (viewing(lambda r, m: []), "what view 'personal' returns is empty; expected a dict of tensors"),
    (viewing(lambda r, m: [1]), "what view 'personal' returns is a int; expected a dict"),
    (
        viewing(lambda r, m: {"q/mu": 1.0}),
        "view 'personal' returns holds 'q/mu', a float; expected",
    ),
    (
        viewing(failing),
        "view 'personal' raises ZeroDivisionError: division by zero in .*test_returned.py",
    ),
    (sending(lambda v: v.expand(5)), r"aggregate returns 'q/mu' as torch.float64 \[5\]; expected"),
    (sending(lambda v: v.long()), "aggregate returns 'q/mu' as torch.int64 .* torch.float64"),
    (weighing(lambda m, w: w.size.tolist()), r"the weight of '\*' is a list; expected a tensor"),
    (weighing(failing), r"the weight of '\*' raises ZeroDivisionError"),
    (lasting(lambda ids: [1] * len(ids)), "what epochs returns is a list; expected a tensor of"),
    (lasting(lambda ids: ids + 0.5), "what epochs returns is torch.float32; .* whole numbers"),
    (lasting(failing), "epochs raises ZeroDivisionError"),
    (about(Rule("good", failing)), "rule 'good' of 'q/mu' raises ZeroDivisionError"),
    (about(Rule("good", lambda v: True)), r"rule 'good' of 'q/mu' is a bool; .* of bools, \[3, "),
    (about(Rule("good", lambda v: v)), r"rule 'good' of 'q/mu' is torch.float64; .* bools"),
    (about(WireCost(failing)), "the wire cost of 'q/mu' raises ZeroDivisionError"),
    (about(WireCost(lambda n, t: 3)), "the wire cost of 'q/mu' is a int; .* whole numbers, "),
    (about(Moments(failing)), "moments raises ZeroDivisionError"),
    (about(Moments(lambda t: {"a": (1.0, 1.0)})), "moments holds 'a', a float; expected tensors"),
    (
        changing(lambda r, m, b: [1]),
        "what update '<lambda>' returns is a list; expected a dict of tensors",
    ),
    (changing(lambda r, m, b: {"q/mu": m["q/mu"].long()}), "changes 'q/mu' from torch.float64 to"),
    ({"init": lambda g, c: {"q/mu": torch.eye(2).to_sparse()}}, "'q/mu', which is not dense; exp"),
    ({"init": lambda g, c: {"a": torch.ones(2, dtype=torch.complex32)}}, "'a', a complex32; expe"),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("changes", "told"), RETURNED)
def test_what_functions_may_not_return_is_refused_in_one_line(changes, told, check):
    with pytest.raises(ValueError, match=told) as found:
        fit(replace(method(), **changes), numbers(), 1, progress=False, check=check).evaluate_all()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"phases": ()}, r"phases are \(\), so no client would train; expected at least one"),
        (about(Monitor(1.0, "high"), "server/a"), "'server/a' in the Monitor matches no name"),
        (about(Moments(dict, optimal=("q/mu", "q/pie"))), "'q/pie' in the metadata .* mean q/pi"),
        (about(Rule("good", torch.isfinite), ""), "'' in the metadata of messages matches no name"),
        (
            {"metadata": Metadata(statistics=lambda r, m, b: {"a": torch.ones(9)})},
            r"what statistics returns holds 'a' of shape \[9\]; expected \[2, \.\.\.\]",
        ),
        (
            viewing(lambda r, m: {"q/mu": m["q/mu"]}),
            "view 'personal' lacks 'q/pi', which the programs read; return it too",
        ),
        (
            {"aggregate": Aggregator({"*": by_size, "q/*": by_size})},
            r"'q/\*' in the aggregation has no effect, as an earlier pattern matches 'q/mu'",
        ),
        (
            {"aggregate": Aggregator({"loc/*": by_size, "*": by_size})},
            r"'loc/\*' in the aggregation matches no name, so '\*' would decide for all; the names",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        pyrofl.validate_method(replace(method(), **changes), numbers())


def run(**options: Any) -> pyrofl.Run:
    return fit(method(), numbers(), 1, progress=False, **options)


def other() -> Method:
    return fedavg.build(build("mlp:3", (1,), 1), likelihood=likelihoods.normal())


def server() -> pyrofl.Server:
    return pyrofl.Server(method(), ["a"], [1], torch.float64)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Phase(()), r"updates are \(\); expected at least one, each a GradientStep"),
        (lambda: Phase((None,)), r"updates are \(None,\); expected at least one"),
        (lambda: method(views={3: failing}), "views are {3: .* expected a dict of name -> View"),
        (lambda: about(Rule("good", 3)), "metadata of 'q/mu': holds is 3; expected a function"),
        (lambda: about(WireCost(3)), "metadata of 'q/mu': bytes is 3; expected a function"),
        (lambda: about(Moments(3)), "metadata of 'q/mu': of is 3; expected a function"),
        (lambda: about(Monitor("a")), "metadata of 'q/mu': high is 'a'; expected a number$"),
        (
            lambda: fit(lambda: None, numbers(), 1),
            r"method is a function \(\); expected a Method or a function of 1",
        ),
        (lambda: run(participation=failing), "a draw of clients raises ZeroDivisionError"),
        (
            lambda: run(eval_every=1, metrics={"own": failing}),
            "metric 'own' raises ZeroDivisionError",
        ),
        (lambda: run(record="no"), "record is 'no'; expected True or False"),
        (
            lambda: run(server_state={"q/mu": torch.ones(3), "q/pi": torch.ones(())}),
            r"server_state: 'q/mu' is torch.float64 \[3\]; expected torch.float64 \[\]",
        ),
        (
            lambda: pyrofl.validate_method(method(), numbers(), chunk_size=0),
            "chunk_size is 0; expected a whole number",
        ),
        (lambda: pyrofl.evaluate(other(), numbers(), run().state), "the programs read 'w/.*'"),
        (lambda: server().aggregate_train(None), "replies is None; expected a dict"),
        (lambda: server().configure_train(["a"]), "holders is a list; expected a dict"),
        (
            lambda: server().aggregate_evaluate({"a": None}),
            "a: its reply is a NoneType; expected a dict",
        ),
        (lambda: pyrofl.Client(method(), numbers()).train(None), "order is None; expected a dict"),
        (lambda: pyrofl.load(None), "folder is None; expected a string or a path"),
        (lambda: pyrofl.load("a\0b"), r"folder is 'a\\x00b'; expected no NUL character"),
        (lambda: pyrofl.load(Path("a\0b")), "folder is .* expected no NUL character"),
        (lambda: pyrofl.figures.save(None, "a\0b"), "path is .* expected no NUL character"),
        (lambda: pyrofl.datasets.load("csv:a\0b"), "name is .* expected no NUL character"),
        (lambda: pyrofl.Client(method(), numbers(), state="\0"), "state is .* no NUL character"),
    ],
)
def test_wrong_values_are_refused_where_they_are_given(make, told):
    with pytest.raises(ValueError, match=told):
        make()


def reading(table: Tensor) -> Method:
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        assert table.dim() == 2
        normal(received, local, batch)

    return method(model)


def test_a_run_whose_model_reads_a_sparse_tensor_is_saved(tmp_path):
    table = torch.eye(3).to_sparse()
    run = fit(reading(table), numbers(), 1, progress=False)
    run.save(tmp_path / "run")
    loaded = pyrofl.load(tmp_path / "run", method=reading(table.clone()))
    assert torch.equal(loaded.state.server["q/mu"], run.state.server["q/mu"])
    with pytest.raises(ValueError, match=r"table"):
        pyrofl.load(tmp_path / "run", method=reading(2 * table))
