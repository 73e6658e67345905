"""Networks whose head is one fully connected layer at the end of a sequential network."""

from __future__ import annotations

from pyrofl.nets import Network
from pyrofl.nets.architectures import Noise


def without_noise(net: Network) -> tuple[Network, list[str]]:
    """Return the network without a final noise layer, and that layer's parameter names."""
    if type([net.module, *net.module.children()][-1]) is not Noise:
        return net, []
    *_, name = net.shapes
    cut = net.split(name)
    assert cut is not None  # it is a layer of a sequential network
    return cut[0], [name]


def split_head(net: Network) -> tuple[Network | None, int, int]:
    """Return the network below its head, and the head's numbers of inputs and outputs."""
    head, cut = net.select_params(net.head), net.split(net.head)
    weight = max(head.values(), key=len)
    alone = len(head) == len(net.shapes)
    if len(head) > 2 or len(weight) not in (1, 2) or not (alone or cut):
        raise ValueError(
            f"the network's head is {net.head!r}; expected one fully connected layer at the end of "
            "a sequential network, such as those of nets.build"
        )
    outputs, features = weight if len(weight) == 2 else (1, *weight)
    return (cut[0] if cut else None), features, outputs
