"""Messages keep tensors and words as they are, and nothing else gets in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyrofl.inference.transport.records import deserialize, serialize

DTYPES = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8)
FLOATS = (math.nan, math.inf, -math.inf, -0.0, 5e-324)
PLACES = ('"x"', "5", '["1", 0]', '["0", -1]', '["0", "2"]', '["0"]')
NAMES = st.text(min_size=1, max_size=8).filter(lambda text: "|" not in text)


@given(
    label=NAMES,
    words=st.dictionaries(
        NAMES,
        st.one_of(
            st.booleans(),
            st.integers(),
            st.text(),
            st.floats(allow_nan=False),
            st.lists(st.text()).map(tuple),
        ),
    ),
)
def test_words_come_back_as_they_were(label, words):
    found = deserialize(*serialize({label: words, "other": {}}))
    assert found == ({"other": {}} | {label: words} if label != "other" else {"other": {}})
    assert all(type(found[label][n]) is type(v) for n, v in words.items() if label != "other")


def bits(value):
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (1, 2), (2, 0, 3), (4, 3, 2)])
def test_tensors_come_back_to_the_last_bit(dtype, shape):
    value = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    odd = value.clone()
    if dtype.is_floating_point and odd.numel() > 4:
        odd.view(-1)[:5] = torch.tensor(FLOATS).to(dtype)
    flat = {"a/b c": odd, "t": odd.transpose(0, -1) if odd.dim() else odd, "n": 3}
    found = deserialize(*serialize({"one": flat}))["one"]
    for name in ("a/b c", "t"):
        assert found[name].dtype == dtype
        assert found[name].shape == flat[name].shape
        assert bits(found[name]) == bits(flat[name])
        found[name].view(-1)[:0] = 0  # it may be written to


def test_what_all_receive_travels_once():
    row = torch.randn(1, 1000)
    flat = {"down/w": row.expand(50, -1), "own": torch.randn(50, 2)}
    content, _ = serialize({"order": flat})
    assert 4000 + 400 <= len(content) < 5000
    found = deserialize(*serialize({"order": flat}))["order"]["down/w"]
    assert torch.equal(found, row.expand(50, -1))
    assert found.stride(0) == 0


def test_what_no_message_holds_is_refused():
    for value, told in (
        (None, "order: w is None; expected a tensor, a number, a string or strings"),
        ({"a": 1}, "order: w is {'a': 1}; expected a tensor"),
        ((1, 2), r"order: w is \(1, 2\); expected a tensor"),
    ):
        with pytest.raises(ValueError, match=told):
            serialize({"order": {"w": value}})


def test_what_cannot_be_read_is_refused():
    content, text = serialize({"a": {"w": torch.zeros(2)}})
    for odd in ("{", "[1]", '{"a": 3}', *(f'{{"a": {{"|w": {place}}}}}' for place in PLACES)):
        with pytest.raises(ValueError, match="a message cannot be read"):
            deserialize(content, odd)
    for cut in (b"", content[:-1], content[4:]):
        with pytest.raises(ValueError, match="a message cannot be read"):
            deserialize(cut, text)
