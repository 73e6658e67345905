"""Networks: torch modules as functions of their parameters, for many clients at once."""

from pyrofl.choices import NETWORKS
from pyrofl.nets.low_rank import lora
from pyrofl.nets.network import Forward, Network, build, with_noise

__all__ = ["NETWORKS", "Forward", "Network", "build", "lora", "with_noise"]
