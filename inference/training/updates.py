"""Checks of what the updates of a training phase read and return."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.method import GradientStep
from pyrofl.returned import as_tensors
from pyrofl.tensors import Tensors, pick


def stepped_names(step: GradientStep, local: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that a gradient step changes; ValueError for none."""
    names = [*pick(local, step.names)]
    if not names:
        raise ValueError(
            f"no local tensor matches {step.names!r}; expected patterns of {sorted(local)}"
        )
    return names


def client_losses(step: GradientStep, loss: object, batch: Batch) -> Tensor:
    """Return the loss of a gradient step, [C]; ValueError if it is not one number per client."""
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"the loss of step {step.names!r} is a {type(loss).__name__}; expected a tensor "
            "with one number for each client"
        )
    if loss.shape != batch.size.shape:
        raise ValueError(
            f"the loss of step {step.names!r} has shape {list(loss.shape)}; expected "
            f"[{len(batch)}], one number for each client"
        )
    return loss


def closed_form_values(
    name: str, values: object, now: Mapping[str, Tensor], clients: int
) -> Tensors:
    """Return what a closed-form update returns, [C, ...]; ValueError if it does not fit."""
    changed = as_tensors(f"what update {name!r} returns", values, clients)
    for key, value in changed.items():
        before = now.get(key, value)
        if before.is_floating_point() != value.is_floating_point():
            raise ValueError(
                f"{name} changes {key!r} from {before.dtype} to {value.dtype}; convert "
                "the result to the original type"
            )
    return changed


def absent_tensor(name: str) -> ValueError:
    """Return the error of an update that creates a tensor only for the clients with a step."""
    return ValueError(
        f"a client without a step in this phase would lack {name!r}; compute it in init_client too"
    )
