"""Rules that the likelihood factors of clients must satisfy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyrofl.data import Cohort
from pyrofl.inference.definition.metadata import (
    MODERATE,
    NOT_NEGATIVE,
    JointRule,
    Rule,
)
from pyrofl.models.shared.matrices import is_semidefinite, is_symmetric, to_cpu_double
from pyrofl.tensors import Tensors


def message_rules(
    is_linear: bool, cavity: Callable[[Tensors, Cohort], Tensors]
) -> dict[str, Rule | tuple[Rule, ...]]:
    """Return the rules of the tensors of a factor, given what the clients receive."""
    positive = cavity_rule(cavity)
    if not is_linear:
        whole = Rule("a symmetric matrix", is_symmetric)
        return {"precision": (whole, positive), "shift precision": MODERATE}
    whole = Rule("a symmetric matrix without negative eigenvalues", is_semidefinite)
    return {"square count": NOT_NEGATIVE, "*": MODERATE, "precision": (whole, positive)}


def cavity_rule(cavity: Callable[[Tensors, Cohort], Tensors]) -> JointRule:
    """Return the rule that a factor and the rest of the posterior give a distribution.

    The factor of a likelihood that is not log-concave may have a negative precision; clients bound
    it by that of the cavity, so that the sum of both is positive definite.

    Args:
        cavity: (server, cohort) -> what the clients receive.
    """

    def holds(server: Tensors, message: Tensors, cohort: Cohort) -> Tensor:
        """Return whether the precisions of factor and cavity have a positive definite sum, [C]."""
        received, total = cavity(server, cohort), to_cpu_double(message["precision"]).clone()
        near, back = (
            to_cpu_double(received["cavity"]),
            torch.linalg.inv(to_cpu_double(received["root"])).mT,
        )
        p = near.shape[-1]
        total[:, :p, :p] += near
        total[:, p:, p:] += back @ back.mT
        info: Tensor = torch.linalg.cholesky_ex(total).info
        return info == 0

    return JointRule(
        "precision is too negative; expected a positive definite sum with that of the cavity", holds
    )
