"""Private aggregation: differential privacy, and secure sums that hide single messages."""

from pyrofl.inference.definition.budget import Privacy, PrivacySpent
from pyrofl.inference.privacy.differential_privacy import private
from pyrofl.inference.privacy.masks import Masks, unmask
from pyrofl.inference.privacy.sums import summed

__all__ = ["Masks", "Privacy", "PrivacySpent", "private", "summed", "unmask"]
