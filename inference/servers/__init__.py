"""What a server makes of messages."""

from pyrofl.inference.servers.averages import average, blend, descend, weighted_mean

__all__ = ["average", "blend", "descend", "weighted_mean"]
