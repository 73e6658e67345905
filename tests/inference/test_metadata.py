"""Metadata of methods: what is refused when it is built."""

import pytest

from pyrofl.inference.metadata import FINITE, Metadata


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensors": {"*": 3}}, r"metadata of '\*' is 3; expected a Rule"),
        ({"tensors": {"*": (FINITE, 3)}}, r"metadata of '\*' is \(.*3\); expected a Rule"),
        ({"tensors": {3: FINITE}}, "metadata has the name 3; expected patterns"),
        ({"train_all_clients": "no"}, "train_all_clients is 'no'; expected True or False"),
        ({"reads": {"prior": None}}, r"reads has \['prior'\]; expected 'model' or 'guide'"),
    ],
)
def test_wrong_types_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Metadata(**given)
