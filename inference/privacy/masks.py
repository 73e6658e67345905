"""Secure sums: the server learns the sum of messages, and of none of them more than that.

Every two clients i < j of a round agree on a secret s_ij (X25519), make a stream of random 64-bit
words of it (HKDF, ChaCha20), and add it to their messages with opposite signs:

    masked_i = round(message_i / step) + sum_{j > i} words(s_ij) - sum_{j < i} words(s_ij)  mod 2^64

so that the masks are gone from the sum of all, and each masked message alone is uniform. It is the
first half of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", CCS 2017. We have not its second half, by which a sum survives clients that drop out:
where one is missing the round is refused, as its masks stay in the sum.

Messages are sums, see `summed`. Clients must know that public keys are of whom they seem to be: a
server that hands out keys of its own reads everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from pyrofl.arguments import Positive, checked, known
from pyrofl.inference.privacy.sums import SUM, WEIGHT
from pyrofl.tensors import Tensors, matches, role, under

STEP = 2.0**-32  # of the fixed point
FEWEST = 3  # of two, each knows the other's message once it knows the sum
UP = "up"  # a reply's message

Words = np.ndarray[Any, np.dtype[np.uint64]]


class Masks:
    """What one client needs to mask its messages: a key pair, made again with every object.

    Attributes:
        public: the public key, 32 bytes, for all other clients.
    """

    def __init__(self) -> None:
        """Make the keys; ValueError if cryptography is not installed."""
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ImportError:
            raise ValueError(
                "secure sums need cryptography, which is not installed; expected pip install "
                "'pyrofl[privacy]'"
            ) from None
        self._secret = X25519PrivateKey.generate()
        self.public: bytes = self._secret.public_key().public_bytes_raw()
        self._sent: dict[int, str] = {}

    @checked
    def mask(
        self, reply: Mapping[str, Any], keys: Mapping[str, bytes], step: Positive = STEP
    ) -> dict[str, Any]:
        """Return a reply of `Client.train` with its message masked; losses are left out.

        Args:
            reply: of one client, which trains a `summed` method.
            keys: public keys of all that are to report in this round, by name; its own among them.
            step: of the fixed point that numbers are rounded to, the same for all.

        Raises:
            ValueError: if the message is no sum, a number does not fit 64 bits, there are fewer
                than three clients, or another message of this round has been masked before.
        """
        (name,), number = reply["names"], reply["round"]
        told = {n: v for n, v in reply.items() if not n.startswith(("loss/", "begun/"))}
        if not bool(reply["sends"].all()):
            return told  # whose message is of nobody, [0, ...]
        if len(keys) < FEWEST:
            raise ValueError(f"keys are of {len(keys)} clients; expected at least {FEWEST}")
        known(name, keys, "client")
        if keys[name] != self.public:
            raise ValueError(f"{name}: the key by its name is another's; expected its own")
        message = role(UP, reply)
        words = _fixed(name, message, step, len(keys))
        digest = hashlib.sha256(repr(sorted(keys.items())).encode() + words.tobytes()).hexdigest()
        if self._sent.setdefault(number, digest) != digest:
            raise ValueError(
                f"{name}: another message of round {number} has been masked; expected one, as two "
                "under the same masks tell their difference"
            )
        about = _about(number, keys)
        for other in keys:
            if other != name:
                mask = self._words(keys[other], about, len(words))
                words = words + mask if name < other else words - mask
        kind = str(next(iter(message.values())).dtype).partition(".")[2]
        told |= {"mask/step": step, "mask/type": kind}
        return told | under(UP, _shaped(words, message))

    def _words(self, public: bytes, about: bytes, count: int) -> Words:
        """Return the random words that are agreed on with another client, for a round."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        agreed = self._secret.exchange(X25519PublicKey.from_public_bytes(public))
        key = HKDF(SHA256(), 32, None, about).derive(agreed)
        stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
        return np.frombuffer(stream.update(bytes(8 * count)), np.uint64)


def unmask(
    replies: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return replies for `Server.aggregate_train`, each with an equal share of the sum.

    Args:
        replies: name -> reply, masked where it has a message.
        names: of all that were to report, whose keys the clients were given.

    Raises:
        ValueError: if one of them has sent nothing, so that there is no sum;
            `Server.aggregate_train({})` then makes the round one in which nobody is heard.
    """
    each: list[Tensors] = []
    for name in names:
        message = role(UP, replies.get(name, {}))
        if not sum(map(len, message.values())):
            raise ValueError(
                f"{name} sends no message, and the masks of {len(names)} clients are gone only "
                "from the sum of all; expected take({}), and another round"
            )
        each.append(message)
    about = [_form(replies[name]) for name in names]
    for name, form in zip(names, about, strict=True):
        if form != about[0]:
            raise ValueError(f"{name} has masked a message of another form; expected one for all")
    step, kind, _ = about[0]
    total = {n: torch.stack([one[n] for one in each]).sum(0) for n in each[0]}  # mod 2^64
    mine = under(UP, {n: _plain(v, step / len(names), kind) for n, v in total.items()})
    plain = {
        name: {n: v for n, v in reply.items() if not n.startswith("mask/")}
        for name, reply in replies.items()
    }
    return {name: reply | (mine if name in names else {}) for name, reply in plain.items()}


def _fixed(name: str, message: Tensors, step: float, clients: int) -> Words:
    """Return a message [1, *p] as whole multiples of the step, one tensor after the other."""
    most = (2**63 - 1) // clients * step
    for n, value in message.items():
        if not matches(n, f"{SUM}/* {WEIGHT}/*"):
            raise ValueError(f"{name}: {n!r} is no sum; expected privacy.summed(method)")
        large = ~(value.double().abs() < most)  # as is NaN
        if bool(large.any()):
            at = tuple(large.nonzero()[0].tolist())
            raise ValueError(
                f"{name}: {n}{list(at[1:])} is {value[at].item():g}; expected less than {most:g} "
                f"in size, so that the sum of {clients} clients fits 64 bits in steps of {step:g}"
            )
    flat = torch.cat([message[n].double().flatten() for n in sorted(message)])
    return (flat / step).round().long().cpu().numpy().view(np.uint64)


def _shaped(words: Words, message: Tensors) -> Tensors:
    """Give words the names and shapes of a message."""
    names = sorted(message)
    parts = torch.from_numpy(words.view(np.int64)).split([message[n].numel() for n in names])
    return {n: p.reshape(message[n].shape).clone() for n, p in zip(names, parts, strict=True)}


def _about(number: int, keys: Mapping[str, bytes]) -> bytes:
    """Return what masks are for: a round and who takes part."""
    return repr(("pyrofl secure sum", number, sorted(keys))).encode()


def _form(reply: Mapping[str, Any]) -> tuple[float, str, dict[str, Size]]:
    """Return step and type of what was masked, and the shapes of its tensors."""
    shapes = {n: v.shape for n, v in role(UP, reply).items()}
    return reply["mask/step"], reply["mask/type"], shapes


def _plain(value: Tensor, step: float, kind: str) -> Tensor:
    dtype: torch.dtype = getattr(torch, kind)
    return (value.double() * step).to(dtype)
