"""IVON: natural-gradient steps of a normal posterior with Hessians estimated from gradients.

Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan and Moellenhoff,
"Variational Learning is Effective for Large Deep Networks", ICML 2024 (algorithm 1).

For q(w) = Normal(m, 1 / s) and the objective E_q[n L(w)] + KL(q || exp(c'w - w'Cw / 2)), with L the
mean loss per row and n the number of rows that it stands for,

    g^  = grad L(m + sigma e),  sigma = s^-1/2,  e ~ Normal(0, 1)
    f   = e g^ / sigma + (C - P) / n                   P > 0, C - P of any sign
    g   = beta1 g + (1 - beta1) g^
    h   = beta2 h + (1 - beta2) f + (1 - beta2)^2 (h - f)^2 / (2 (h + P / n))
    s   = n h + P
    m   = m - lr (g / (1 - beta1^t) + (C m - c) / n) / (h + P / n)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyrofl.arguments import described
from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import elbo, with_guide
from pyrofl.inference.definition.method import GradientStep, Phase
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Program
from pyrofl.models.guides import Family, mean_field
from pyrofl.models.guides.correlated import split_vectors, standard_noise
from pyrofl.models.shared.laplace import LaplaceCore
from pyrofl.tensors import Tensors, under


def independent_family(guide: Family) -> Family:
    """Return the guide's family; raise ValueError if it is not that of independent normals."""
    if guide is not mean_field:
        raise ValueError(
            f"guide is {described(guide)}, and IVON learns independent normals; expected mean_field"
        )
    return guide


@dataclass(frozen=True)
class Ivon:
    """Local training by IVON.

    Before it, `start` stores the normal at which it begins and its objective. Then "mean" and
    "curvature" [C, d] hold m and h.
    """

    core: LaplaceCore
    lr: float
    beta1: float
    beta2: float
    temperature: float

    def phase(self, epochs: int, batch: int | None) -> Phase:
        """Return the phase with IVON's steps."""
        # The loss's gradient at the drawn weights is what one step of SGD subtracts from zero.
        slope = GradientStep("slope", sgd(1.0), self.loss)
        return Phase((self.draw, slope, self.move), epochs, batch)

    def start(
        self, mean: Tensor, precision: Tensor, base: Tensor, goal: Tensors, data: Batch
    ) -> Tensors:
        """Return the local tensors at the start.

        Args:
            mean: m, [C, d].
            precision: s, [C, d].
            base: P, [C, d].
            goal: c and C, as "shift" and "precision" [C, d].
            data: the clients' rows.
        """
        each = {n: v / self.rows(data) for n, v in goal.items()}
        h = (precision - base) / self.rows(data)
        zero = {n: torch.zeros_like(mean) for n in ("slope", "average", "noise")}
        state = {"mean": mean, "curvature": h, "base": base / self.rows(data)}
        return state | zero | under("goal", each) | {"steps": torch.zeros_like(data.size)}

    def rows(self, data: Batch) -> Tensor:
        """Return n, the number of a client's rows divided by the temperature, [C, 1]."""
        return (data.size / self.temperature).clamp(min=1e-3)[:, None]

    def draw(self, received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Draw the noise of a step."""
        precision = (local["curvature"] + local["base"]) * self.rows(data)
        with data.clients():
            e = standard_noise("_noise", torch.zeros_like(precision)[:, None])[:, 0]  # [C, d]
        return {"noise": e * precision.rsqrt(), "slope": torch.zeros_like(precision)}

    def loss(
        self, model: Program, _: Program, received: Tensors, local: Tensors, data: Batch
    ) -> Tensor:
        """Return the mean loss per row [C] at the drawn weights."""
        w = split_vectors(local["mean"] + local["noise"] + local["slope"], self.core.net.shapes)
        fit = with_guide(self.core.point_guide, elbo(kl=0.0, mean=True))
        return fit(model, self.core.point_guide, received, local | under("w", w), data)

    def move(self, received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Update the curvature, the average gradient and the mean."""
        slope, h, base, mean = -local["slope"], local["curvature"], local["base"], local["mean"]
        goal, precision = local["goal/precision"], (h + base) * self.rows(data)
        gradient = slope * local["noise"] * precision + goal - base
        average = self.beta1 * local["average"] + (1 - self.beta1) * slope
        rest = 1 - self.beta2
        h = h + rest * (gradient - h) + rest**2 * (h - gradient).square() / (2 * (h + base))
        steps = local["steps"] + 1
        ahead = average / (1 - self.beta1 ** steps[:, None]) + goal * mean - local["goal/shift"]
        mean = mean - self.lr * ahead / (h + base)
        return {"mean": mean, "curvature": h, "average": average, "steps": steps}

    def precision(self, local: Tensors, data: Batch) -> Tensor:
        """Return the precision s [C, d] of the client's normal."""
        return (local["curvature"] + local["base"]) * self.rows(data)
