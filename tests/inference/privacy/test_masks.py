"""Secure sums: equal to plain ones, and nothing to be seen in a single message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_contract as contract
import torch
import toys
from scipy.stats import chi2
from sites import SIZES, some

from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.privacy.masks import FIXED_POINT_STEP, Masks, unmask
from pyrofl.inference.privacy.sums import summed
from pyrofl.inference.transport import Client, Server
from pyrofl.models import fedavg, pfedvem
from pyrofl.tensors import Tensors, role, under

x25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.x25519")

DATA = toys.blobs(SIZES)
NAMES = ("a", "b", "c", "d")


def masks(names: tuple[str, ...] = NAMES) -> tuple[dict[str, Masks], dict[str, bytes]]:
    """Return keys of clients, the same in all runs of the tests, and the public ones."""
    made = {name: Masks() for name in names}
    for i, one in enumerate(made.values()):
        one._secret = x25519.X25519PrivateKey.from_private_bytes(bytes([i + 1] * 32))
        one.public = one._secret.public_key().public_bytes_raw()
    return made, {name: one.public for name, one in made.items()}


def reply(name: str, message: Tensors, number: int = 1) -> dict[str, Any]:
    about = {"names": (name,), "round": number, "sends": torch.tensor([True]), "odd": ("",)}
    return about | under("up", message) | {"loss/w": torch.tensor([0.3])}


def messages(dtype: torch.dtype = torch.float64) -> dict[str, Tensors]:
    """Return what pFedVEM's clients would send: a confidence of many digits, and weighted means."""
    g = torch.Generator().manual_seed(0)
    return {
        name: {
            "weight/0": 1e4 * torch.rand(1, generator=g, dtype=dtype),
            "sum/loc": 1e4 * torch.randn(1, 3, 2, generator=g, dtype=dtype),
        }
        for name in NAMES
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_is_the_plain_sum_to_the_step(dtype):
    (own, keys), sent = masks(), messages(dtype)
    masked = {n: own[n].mask(reply(n, sent[n]), keys) for n in NAMES}
    assert all(v.dtype == torch.int64 for v in role("up", masked["a"]).values())
    assert not [n for n in masked["a"] if n.startswith("loss")]
    opened = unmask(masked, NAMES)
    for tensor in ("weight/0", "sum/loc"):
        plain = torch.stack([sent[n][tensor].double() for n in NAMES]).sum(0)
        shares = torch.stack([opened[n][f"up/{tensor}"] for n in NAMES])
        assert shares.dtype == dtype
        assert bool((shares == shares[0]).all())
        rounded = 4 * torch.finfo(dtype).eps * plain.abs()
        gap = (shares[0].double() * len(NAMES) - plain).abs()
        assert bool((gap <= len(NAMES) * FIXED_POINT_STEP / 2 + rounded).all())


@pytest.mark.parametrize("value", [0.0, 1.0, -3e5])
def test_a_single_message_is_uniform(value):
    """Each of its 64 bits is 0 and 1 equally often, whatever it holds, and so is each byte."""
    own, keys = masks()
    message = {"sum/w": torch.full((1, 4000), value, dtype=torch.float64)}
    seen = own["b"].mask(reply("b", message), keys)["up/sum/w"].numpy().view(np.uint8)
    ones = np.unpackbits(seen.reshape(4000, 8), axis=1).sum(0)
    assert chi2.sf(((ones - 2000) ** 2 / 1000).sum(), 64) > 1e-3
    counts = np.bincount(seen.ravel(), minlength=256)
    assert chi2.sf(((counts - 125) ** 2 / 125).sum(), 255) > 1e-3
    assert len(np.unique(seen.reshape(4000, 8), axis=0)) == 4000


def test_what_is_left_of_some_messages_is_uniform():
    """The sum without one client still has its masks."""
    (own, keys), none = masks(), {"sum/w": torch.zeros(1, 4000, dtype=torch.float64)}
    masked = [own[n].mask(reply(n, none), keys)["up/sum/w"] for n in NAMES]
    assert not bool(torch.stack(masked).sum(0).any())
    seen = torch.stack(masked[1:]).sum(0).numpy().view(np.uint8)
    ones = np.unpackbits(seen.reshape(4000, 8), axis=1).sum(0)
    assert chi2.sf(((ones - 2000) ** 2 / 1000).sum(), 64) > 1e-3


def test_masks_are_new_in_every_round_and_for_everybody_else():
    own, keys = masks()
    message = {"sum/w": torch.zeros(1, 50)}
    first, second = (
        own["a"].mask(reply("a", message, number), keys)["up/sum/w"] for number in (1, 2)
    )
    assert not bool((first == second).any())
    fewer = {n: keys[n] for n in "abc"}
    others = masks()[0]["a"].mask(reply("a", message), fewer)["up/sum/w"]
    assert not bool((first == others).any())


@pytest.mark.parametrize("build", [fedavg.build, pfedvem.build])
def test_the_halves_make_the_rounds_of_the_loop(build):
    method, draw = summed(build(toys.net())), fixed(4)
    server = Server(method, DATA.names, DATA.sizes, DATA.dtype, 5, participation=draw)
    clients = {n: Client(method, some(DATA, [n]), 5) for n in DATA.names}
    own, keys = masks(DATA.names)
    for state in federate(method, DATA, 2, seed=5, participation=draw):
        orders = server.configure_train()
        asked = [n for n, order in orders.items() if bool(order["reports"].all())]
        mine = {n: keys[n] for n in asked}
        replies = {n: own[n].mask(clients[n].train(o), mine) for n, o in orders.items()}
        found = server.aggregate_train(unmask(replies, asked))
        assert not found.rejected
        toys.assert_same(found.server, state.server, rtol=1e-7, atol=1e-8)


def test_a_round_in_which_one_is_missing_is_refused():
    own, keys = masks()
    masked = {n: own[n].mask(reply(n, messages()[n]), keys) for n in NAMES[:3]}
    with pytest.raises(ValueError, match=r"^d sent no message, and the masks of 4 clients"):
        unmask(masked, NAMES)
    nothing = reply("d", {"sum/w": torch.zeros(0, 2)}) | {"sends": torch.tensor([False])}
    late = own["d"].mask(nothing, keys)
    with pytest.raises(ValueError, match=r"^d sent no message"):
        unmask({**masked, "d": late}, NAMES)


def refused(told: str, message: Tensors, keys: dict[str, bytes], one: Masks) -> None:
    with pytest.raises(ValueError, match=told):
        one.mask(reply("a", message), keys)


def test_what_cannot_be_masked_is_refused():
    own, keys = masks()
    one = own["a"]
    large = torch.tensor([[1.0, 6e8]], dtype=torch.float64)
    told = (
        r"^a: sum/w\[1\] is 6e\+08; its size must be less than 5.36871e\+08, so that the sum of 4"
    )
    refused(told, {"sum/w": large}, keys, one)
    refused(r"^a: sum/w\[0\] is nan; its size must be", {"sum/w": large * torch.nan}, keys, one)
    refused("^a: 'tau' is not a sum; train with privacy.summed", {"tau": large}, keys, one)
    good = {"sum/w": large / 2}
    refused(
        "^keys are of 2 clients; at least 3 are required", good, {n: keys[n] for n in "ab"}, one
    )
    refused("^unknown client 'a'", good, {n: keys[n] for n in "bcd"}, one)
    refused("^a: keys has another public key under its name", good, {**keys, "a": keys["b"]}, one)
    same = one.mask(reply("a", good), keys)["up/sum/w"]
    assert torch.equal(one.mask(reply("a", good), keys)["up/sum/w"], same)
    refused("^a: another message of round 1 has been masked", {"sum/w": large / 3}, keys, one)


def test_keys_are_never_the_same():
    assert Masks().public != Masks().public


@pytest.mark.parametrize("name", ["pvi", "metavd", "fedbe"])
def test_methods_of_another_kind_have_no_secure_sums(name):
    with pytest.raises(ValueError, match=f"^{name}: aggregation is not a weighted mean"):
        summed(contract.built(name))
