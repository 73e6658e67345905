"""What is accepted from clients, entry by entry; `test_faults` has every method."""

from __future__ import annotations

import pytest
import torch

from pyrofl.data import Cohort
from pyrofl.inference.definition.metadata import POSITIVE, Rule
from pyrofl.inference.engine.messages import (
    form_difference,
    form_of,
    validate_messages,
    validated_state,
    vote_on_forms,
)
from pyrofl.tensors import Tensors

NAMES = ("north", "south", "east", "west")
WHO = Cohort(torch.tensor([3, 0, 2]), torch.tensor([5.0, 2.0, 9.0]))


def message() -> Tensors:
    return {"w.scale": torch.full((3, 2, 2), 0.5), "tau": torch.ones(3)}


def found(**options: object) -> list[str]:
    asked = {"message": message(), "client_states": {}, "cohort": WHO, "names": NAMES} | options
    return validate_messages(**asked)  # type: ignore[arg-type]


def test_good_messages_pass():
    assert found() == found(rules=[("*", POSITIVE)]) == ["", "", ""]
    assert found(message={}) == ["", "", ""]
    assert found(message={"none": torch.zeros(3, 0)}, rules=[("*", POSITIVE)]) == ["", "", ""]
    assert found(message={"count": torch.tensor([1, 2, 3])}) == ["", "", ""]


def test_a_rule_may_be_about_whole_rows():
    rule = Rule("a symmetric matrix", lambda v: torch.isclose(v, v.mT).all((-1, -2)))
    bad = message()
    bad["w.scale"][0, 0, 1] = 2
    assert (
        found(message=bad, rules=[("w.*", rule)])[0]
        == "west: w.scale is not; expected a symmetric matrix"
    )


def test_client_states_and_sizes_count_too():
    states = {"own": torch.tensor([[1.0], [2.0], [torch.nan]])}
    assert found(client_states=states)[2] == "east: own[0] is nan; expected a finite number"
    cohort = Cohort(WHO.ids, torch.tensor([0.0, -1.0, torch.nan]))
    assert found(cohort=cohort) == [
        "west: its size is 0; expected > 0",
        "north: its size is -1; expected > 0",
        "east: its size is nan; expected a finite number",
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tau": torch.ones(3, 1)}, "tau has shape [1]; expected shape []"),
        ({"tau": torch.ones(3).double()}, "tau is torch.float64; expected torch.float32"),
        ({"more": torch.ones(3)}, "more is there; expected ['tau', 'w.scale']"),
    ],
)
def test_a_message_of_another_form_is_told_what_differs(change, told):
    assert form_difference(form_of(message() | change), form_of(message())) == told
    assert form_difference(form_of(message()), form_of(message())) == ""


def test_most_clients_say_what_a_message_looks_like_but_after_the_last_round():
    usual, odd = form_of(message()), form_of({"tau": torch.ones(3, 2)})
    other = form_of({"of another method": torch.ones(3)})
    assert vote_on_forms([(odd, 2), (usual, 2), (odd, 1), (usual, 2)], (), {}) == usual
    assert vote_on_forms([(odd, 2), (usual, 2)], (), {}) == odd  # the first of equals
    assert vote_on_forms([(odd, 9), (usual, 2)], usual, {}) == usual
    assert vote_on_forms([(odd, 2), (other, 1)], other, {}) == odd
    assert vote_on_forms([], usual, {}) == usual
    assert vote_on_forms([], (), {}) == ()


def test_what_all_clients_agree_upon_is_accepted_whatever_they_sent_before():
    old, new = (form_of({n: torch.ones(1, 2) for n in names}) for names in ("ab", "abc"))
    assert vote_on_forms([(new, 3), (new, 2)], old, {}) == new
    assert vote_on_forms([(new, 3), (old, 0)], old, {}) == new, "refused clients do not vote"
    assert vote_on_forms([(new, 3), (old, 1)], old, {}) == old
    assert vote_on_forms([(new, 1)], old, {}) == old, "one client alone is not several that agree"
    assert vote_on_forms([(new, 1)], old, {"c": torch.ones(2)}) == new, (
        "an aggregation has added it"
    )
    assert vote_on_forms([(new, 1)], old, {"c": torch.ones(3)}) == old


def test_complex_numbers_are_looked_at_too():
    value = torch.tensor([1 + 1j, complex(torch.nan, 2)])
    cohort = Cohort(WHO.ids[:2], WHO.size[:2])
    for told in (
        found(message={"v": value}, cohort=cohort),
        found(message={}, client_states={"v": value}, cohort=cohort),
    ):
        assert told == ["", "north: v is nan+2j; expected a finite number"]
    state, bad = validated_state({"v": value[:1]}, {"v": value[1:]}, 5)
    assert torch.equal(state["v"], value[:1])
    assert bad == "the server: aggregated v[0] is nan+2j; expected a finite number"
