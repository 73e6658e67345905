"""Metadata of methods: what is refused when it is built."""

import pytest

from pyrofl.inference.definition.metadata import FINITE, Metadata


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
