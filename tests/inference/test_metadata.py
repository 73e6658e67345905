"""Metadata of methods: what is refused when it is built."""

from dataclasses import replace

import pytest
import toys

from pyrofl.inference.definition.metadata import (
    FINITE,
    POSITIVE,
    SHARED,
    JointRule,
    Metadata,
    Rule,
    metadata_of_class,
)
from pyrofl.models import fedavg


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensors": {"*": 3}}, r"metadata of '\*' is 3; expected a Rule"),
        ({"tensors": {"*": (FINITE, 3)}}, r"metadata of '\*' is \(.*3\); expected a Rule"),
        ({"tensors": {3: FINITE}}, "metadata has the key 3; expected a string"),
        ({"train_all_clients": "no"}, "train_all_clients is 'no'; expected True or False"),
        ({"reads": {"prior": None}}, r"reads has the keys \['prior'\]; valid are 'model'"),
    ],
)
def test_wrong_types_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Metadata(**given)


def test_a_tensor_may_have_several_rules():
    joint = JointRule("whole", lambda server, message, cohort: cohort.size > 0)
    facts = Metadata({"*": (FINITE, POSITIVE, joint, SHARED), "w": FINITE})
    rules = [("*", FINITE), ("*", POSITIVE), ("*", joint), ("w", FINITE)]
    assert metadata_of_class(facts.tensors, Rule) == rules
    assert metadata_of_class(facts.tensors, JointRule) == [("*", joint)]
    method = replace(fedavg.build(toys.net()), metadata=facts)
    assert method.rules == [rule for rule in rules if rule[1] is not joint]
