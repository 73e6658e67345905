"""Widths of pFedVEM's heads in closed form: a variant that is not in the paper.

The paper's schedule hardly moves the widths sd_j of q(w_j). With `prior_scale` = s, tau_j has a
prior that weighs as much as the d weights, so tau_j is at most 2 / s^2 and its start is forgotten
after a few rounds:

    p(1 / tau_j) = scaled inverse chi-square, d degrees of freedom, scale s^2
    tau_j        = 2 d / (sum sd_j^2 + ||mu_j - w||^2 + d s^2)     mode of log tau_j, for eq. 8
    sd_j^2       = 1 / (tau_j + E_q[diag F_j])         after the base's steps, without gradients

F_j is the Fisher information of the client's rows. For a linear head it is the Hessian of -log p,
and these sd_j maximize the ELBO (Opper and Archambeau, Neural Computation 2009).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Size, Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import latent, trace_program, with_rows
from pyrofl.inference.definition.method import ClosedFormUpdate
from pyrofl.inference.definition.programs import Guide, Likelihood
from pyrofl.models.guides import log_mean_field, mean_field
from pyrofl.models.guides.correlated import split_vectors
from pyrofl.models.shared import curvature
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, pick, role

INDEPENDENT_GUIDES = mean_field, log_mean_field


def widths_update(
    net: Network,
    shapes: Mapping[str, Size],
    likelihood: Likelihood,
    guide: Guide,
    num_particles: int,
) -> ClosedFormUpdate:
    """Return the update of "pi" to the widths that maximize the ELBO, given "tau" and "base".

    Args:
        net: the network.
        shapes: of the head's parameters, by name.
        likelihood: likelihood of a row, given the network's outputs.
        guide: q(w_j), independent normals with "mu" and "pi".
        num_particles: draws of w_j at which the information is averaged.
    """
    head = " ".join(shapes)

    def update_widths(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the standard deviations of q(w_j); a minibatch represents all rows."""
        rows = with_rows(local, len(data))
        precision: Tensor = local["tau"][:, None]  # [C, 1]
        for _ in range(num_particles):
            draw = dict(latent(trace_program(guide, (received, rows, data))))
            w = {n: site["value"].squeeze(1).detach() for n, site in draw.items()}  # [C, *p]
            fisher = information(net, head, likelihood, local, w, data)
            precision = precision + fisher / num_particles
        state = guide.start(role("mu", local), split_vectors(precision.rsqrt(), shapes))
        return pick(state, "pi/*")

    return update_widths


def information(
    net: Network,
    head: str,
    likelihood: Likelihood,
    local: Tensors,
    w: Tensors,
    data: Batch,
) -> Tensor:
    """Return the diagonal [C, d] of the Fisher information of clients' heads w [C, *p].

    A minibatch represents all rows of its client.
    """
    (clients, width), base, x = data.mask.shape, role("base", local), data.x
    run: Network | None = None
    if parts := net.split(head):
        run, x = parts[1], parts[0](with_rows(base, clients), x).detach()
    x = x.reshape(clients * width, 1, *x.shape[2:])

    def outputs(each: Tensors, _: Tensor) -> Tensor:
        """Return the network's outputs for each row with heads of its own, [C * N, 1, K]."""
        if run:
            return run(each, x)
        # Tensors of the base, repeated for each row: [C, N, *p].
        wide = {n: v[:, None].expand(clients, width, *v.shape[1:]) for n, v in base.items()}
        return net({n: v.reshape(len(x), 1, *v.shape[2:]) for n, v in wide.items()} | each, x)

    diagonal = curvature.diagonal(curvature.slopes(outputs, likelihood, w, data))
    return diagonal * curvature.weight_of_each(data)[:, None]
