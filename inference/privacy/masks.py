"""Secure aggregation: the server learns the sum of messages, but no single message.

Every two clients i < j of a round agree on a secret s_ij (X25519), derive a stream of random 64-bit
words from it (HKDF, ChaCha20), and add it to their messages with opposite signs:

    masked_i = round(message_i / step) + sum_{j > i} words(s_ij) - sum_{j < i} words(s_ij)  mod 2^64

so that the masks cancel in the sum of all, and each masked message alone is uniform. It is the
first half of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", CCS 2017. The second half, recovery from dropouts, is not implemented: if a client is
missing the round fails, as its masks remain in the sum.

Messages are sums, see `summed`. Clients must verify the owners of public keys: a server that
distributes its own keys can read all messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from pyrofl.arguments import Positive, check_name, checked
from pyrofl.inference.privacy.sums import SUM, WEIGHT
from pyrofl.tensors import Tensors, matches, role, under

FIXED_POINT_STEP = 2.0**-32  # of the fixed point
MIN_CLIENTS = 3  # with two clients, each could compute the other's message from the sum
UP = "up"  # a reply's message

Words = np.ndarray[Any, np.dtype[np.uint64]]


class Masks:
    """Secret key of one client, used to mask its messages; every object creates a new key pair.

    Attributes:
        public: the public key, 32 bytes, for all other clients.
    """

    def __init__(self) -> None:
        """Create the key pair; raise ValueError if the package cryptography is not installed."""
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ImportError:
            raise ValueError(
                "secure sums need cryptography, which is not installed; run "
                "pip install -e '.[privacy]' in the clone"
            ) from None
        self._secret = X25519PrivateKey.generate()
        self.public: bytes = self._secret.public_key().public_bytes_raw()
        self._sent: dict[int, str] = {}

    @checked
    def mask(
        self, reply: Mapping[str, Any], keys: Mapping[str, bytes], step: Positive = FIXED_POINT_STEP
    ) -> dict[str, Any]:
        """Return a copy of a client's training reply with masked message and without losses.

        The reply is that of `Client.train`.

        Args:
            reply: reply of one client with a `summed` method.
            keys: name -> public key of all clients selected to report in this round, including
                this client.
            step: resolution of the fixed-point numbers, equal for all clients.

        Raises:
            ValueError: if the message is not a sum, a number does not fit 64 bits, there are fewer
                than three clients, or another message of this round has been masked before.
        """
        (name,), number = reply["names"], reply["round"]
        masked = {n: v for n, v in reply.items() if not n.startswith(("loss/", "begun/"))}
        if not bool(reply["sends"].all()):
            return masked  # the message is empty, [0, ...]
        if len(keys) < MIN_CLIENTS:
            raise ValueError(
                f"keys are of {len(keys)} clients; at least {MIN_CLIENTS} are required"
            )
        check_name(name, keys, "client")
        if keys[name] != self.public:
            raise ValueError(
                f"{name}: keys has another public key under its name; pass its own `public` key"
            )
        message = role(UP, reply)
        words = _fixed(name, message, step, len(keys))
        digest = hashlib.sha256(repr(sorted(keys.items())).encode() + words.tobytes()).hexdigest()
        if self._sent.setdefault(number, digest) != digest:
            raise ValueError(
                f"{name}: another message of round {number} has been masked; only one per round is "
                "allowed, as two with the same masks reveal their difference"
            )
        about = _about(number, keys)
        for other in keys:
            if other != name:
                mask = self._words(keys[other], about, len(words))
                words = words + mask if name < other else words - mask
        kind = str(next(iter(message.values())).dtype).partition(".")[2]
        masked |= {"mask/step": step, "mask/type": kind}
        return masked | under(UP, _shaped(words, message))

    def _words(self, public: bytes, about: bytes, count: int) -> Words:
        """Return pseudorandom 64-bit words that only this and one other client can compute."""
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
    """Replace every masked message by an equal share of the sum of all, which the server can read.

    The result is for `Server.aggregate_train`.

    Args:
        replies: name -> reply, masked where it has a message.
        names: names of all clients selected to report, in the keys of the clients.

    Raises:
        ValueError: if one of them sent no message, so that there is no sum;
            `Server.aggregate_train({})` then ends the round without reports.
    """
    each: list[Tensors] = []
    for name in names:
        message = role(UP, replies.get(name, {}))
        if not sum(map(len, message.values())):
            raise ValueError(
                f"{name} sent no message, and the masks of {len(names)} clients only cancel in the "
                "sum of all; call Server.aggregate_train({}) and run another round"
            )
        each.append(message)
    about = [_form(replies[name]) for name in names]
    for name, form in zip(names, about, strict=True):
        if form != about[0]:
            raise ValueError(
                f"{name} masked a message with another step, type or shape; all clients must use "
                "the same"
            )
    step, kind, _ = about[0]
    total = {n: torch.stack([one[n] for one in each]).sum(0) for n in each[0]}  # mod 2^64
    shares = under(UP, {n: _plain(v, step / len(names), kind) for n, v in total.items()})
    plain = {
        name: {n: v for n, v in reply.items() if not n.startswith("mask/")}
        for name, reply in replies.items()
    }
    return {name: reply | (shares if name in names else {}) for name, reply in plain.items()}


def _fixed(name: str, message: Tensors, step: float, clients: int) -> Words:
    """Convert a message to fixed-point numbers: one flat array of integer multiples of `step`."""
    most = (2**63 - 1) // clients * step
    for n, value in message.items():
        if not matches(n, f"{SUM}/* {WEIGHT}/*"):
            raise ValueError(f"{name}: {n!r} is not a sum; train with privacy.summed(method)")
        large = ~(value.double().abs() < most)  # as is NaN
        if bool(large.any()):
            at = tuple(large.nonzero()[0].tolist())
            raise ValueError(
                f"{name}: {n}{list(at[1:])} is {value[at].item():g}; its size must be less than "
                f"{most:g}, so that the sum of {clients} clients fits 64 bits in steps of {step:g}"
            )
    flat = torch.cat([message[n].double().flatten() for n in sorted(message)])
    return (flat / step).round().long().cpu().numpy().view(np.uint64)


def _shaped(words: Words, message: Tensors) -> Tensors:
    """Split a flat array of 64-bit words into tensors named and shaped like those of a message."""
    names = sorted(message)
    parts = torch.from_numpy(words.view(np.int64)).split([message[n].numel() for n in names])
    return {n: p.reshape(message[n].shape).clone() for n, p in zip(names, parts, strict=True)}


def _about(number: int, keys: Mapping[str, bytes]) -> bytes:
    """Return bytes that identify a round and its clients, as input of the key derivation."""
    return repr(("pyrofl secure sum", number, sorted(keys))).encode()


def _form(reply: Mapping[str, Any]) -> tuple[float, str, dict[str, Size]]:
    """Return step size, data type and tensor shapes of a reply's masked message."""
    shapes = {n: v.shape for n, v in role(UP, reply).items()}
    return reply["mask/step"], reply["mask/type"], shapes


def _plain(value: Tensor, step: float, kind: str) -> Tensor:
    dtype: torch.dtype = getattr(torch, kind)
    return (value.double() * step).to(dtype)
