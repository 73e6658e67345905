"""Hash of a federation's rows and of their partition among clients."""

from __future__ import annotations

import hashlib
import json
from weakref import WeakKeyDictionary

import torch

from pyrofl.data.federation import Federation

_fingerprints: WeakKeyDictionary[Federation, str] = WeakKeyDictionary()


def set_fingerprint(data: Federation, fingerprint: str) -> None:
    """Store an already known hash for a federation whose rows are not in memory."""
    _fingerprints[data] = fingerprint


def fingerprint(data: Federation) -> str:
    """Return the hash of a federation's rows and partition (cached, so rows must not change)."""
    if data not in _fingerprints:
        digest = hashlib.sha256()
        for value in (data.x, data.y, *data.train, *data.test, data.pooled_test, data.server_data):
            if value is not None:
                digest.update(f"{value.dtype}{list(value.shape)}".encode())
                whole = value.detach().cpu().contiguous()
                flat = whole.as_strided([whole.numel()], [1])  # one row may have any stride
                digest.update(flat.view(torch.uint8).numpy().data)
            digest.update(b"-")
        if data.weights is not None:
            digest.update(data.weights.double().numpy().tobytes())
        digest.update(json.dumps([data.names, data.classes, data.held_out]).encode())
        _fingerprints[data] = digest.hexdigest()[:16]
    return _fingerprints[data]
