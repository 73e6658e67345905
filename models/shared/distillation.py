"""Knowledge distillation of an ensemble's predictions on unlabeled rows.

Chen and Chao, "FedBE", ICLR 2021, section 4; Izmailov, Podoprikhin, Garipov, Vetrov and Wilson,
"Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import ceil

import torch
from torch import Generator, Tensor
from torch.optim.swa_utils import AveragedModel

from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Likelihood
from pyrofl.inference.training.schedules import make_schedule
from pyrofl.models.likelihoods import categorical
from pyrofl.nets import Network
from pyrofl.tensors import Tensors

Augment = Callable[[Tensor, Generator], Tensor]
"""(rows [B, *x], generator) -> rows of the same shape, changed at random."""

PREDICTION_CHUNK_ROWS = 512  # rows that are predicted at once
SWA_START_SHARE = 250 / 1580  # share of the steps after which the paper's SWA begins to collect


def log_answers(outputs: Tensor, x: Tensor, likelihood: Likelihood) -> Tensor:
    """Return the log probability of every possible response of each row: [B, K]."""
    fn = likelihood(outputs[None], x[None])
    if not fn.has_enumerate_support:
        raise ValueError(
            f"the likelihood is {type(fn).__name__}; expected one with finitely many answers, "
            "such as categorical"
        )
    log_prob: Tensor = fn.log_prob(fn.enumerate_support(expand=False))
    return log_prob[:, 0].T


def check_unlabeled_rows(
    net: Network, server_data: Tensor | None, likelihood: Likelihood
) -> Tensor:
    """Return the unlabeled rows; raise ValueError if network or likelihood reject them."""
    if server_data is None or not len(server_data):
        raise ValueError(
            "server_data is missing; expected rows [U, *x] for the server to distil on, such as "
            "Federation.server_data (on the command line: --server-data)"
        )
    dtype = server_data.dtype if server_data.is_floating_point() else None
    weights = {
        n: p.detach().to(server_data.device, dtype) for n, p in net.module.named_parameters()
    }
    try:
        outputs = net.apply(weights, server_data[:1])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"server_data has shape {tuple(server_data.shape)}; expected rows that the network "
            f"takes: {error}"
        ) from error
    log_answers(outputs, server_data[:1], likelihood)
    return server_data


def predictions(
    net: Network, models: Tensors, x: Tensor, likelihood: Likelihood = categorical
) -> Tensor:
    """Return the probabilities [M, U, K] of K possible responses that M models predict for U rows.

    Their mean over M is eq. 4.
    """

    def member(weights: Tensors) -> Tensor:
        blocks = x.split(PREDICTION_CHUNK_ROWS)
        return torch.cat([log_answers(net.apply(weights, b), b, likelihood) for b in blocks]).exp()

    count = len(next(iter(models.values())))
    with torch.no_grad():
        return torch.stack([member({n: v[m] for n, v in models.items()}) for m in range(count)])


def agreement(
    net: Network, weights: Tensors, x: Tensor, target: Tensor, likelihood: Likelihood = categorical
) -> Tensor:
    """Return the fraction of rows for which the student and its teachers predict the same class.

    The result is a scalar, [].
    """
    mine = predictions(net, {n: v[None] for n, v in weights.items()}, x, likelihood)[0]
    return (mine.argmax(-1) == target.argmax(-1)).to(mine).mean()


def sharpened(probs: Tensor, temperature: float = 0.5) -> Tensor:
    """Sharpen probabilities p [..., K] by a temperature T: p^(1/T) / sum p^(1/T).

    The default T = 1/2 squares them, as v-Distillation does.
    """
    return (probs.log() / temperature).softmax(-1)


def cyclical(step: int, cycle: int, high: float, low: float) -> float:
    """Return the learning rate of stochastic weight averaging, cyclical in the step number.

    >>> [round(cyclical(i, 25, 1e-3, 4e-4), 6) for i in (1, 25, 26)]
    [0.000976, 0.0004, 0.000976]
    """
    t = ((step - 1) % cycle + 1) / cycle
    return (1 - t) * high + t * low


def averaging_steps(steps: int, cycle: int, start: float = SWA_START_SHARE) -> list[int]:
    """Return the numbers of the steps at which stochastic weight averaging updates its mean.

    These are the ends of cycles after the fraction `start` of all steps, or else the last step.

    >>> taken = averaging_steps(1580, 25)
    >>> taken[0], taken[-1], len(taken)
    (275, 1575, 53)
    """
    first = int(steps * start)
    return [i for i in range(cycle, steps + 1, cycle) if i > first] or [steps]


def distil(
    net: Network,
    start: Tensors,
    x: Tensor,
    target: Tensor,
    generator: Generator,
    *,
    likelihood: Likelihood = categorical,
    swa: bool = True,
    epochs: int = 20,
    batch: int = 128,
    lr: float = 3e-3,
    lr_end: float = 1.2e-3,
    cycle: int = 25,
    swa_start: float = SWA_START_SHARE,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    augment: Augment | None = None,
) -> Tensors:
    """Train a network to predict given probabilities [U, K] of U rows, by cross-entropy.

    The loss is 1/U sum_u -p_u' log p(. | x_u; w).

    SWA returns the mean of the iterates at cycle ends, under the cyclical rate; otherwise it is
    the last iterate of SGD at the constant rate `lr`.
    """
    like = next(iter(start.values()))
    student = copy.deepcopy(net.module).to(like.device, like.dtype)
    student.load_state_dict(start, strict=False)  # buffers are not among the parameters
    optimizer = sgd(lr, momentum, weight_decay=weight_decay)(
        [student.get_parameter(n) for n in net.shapes]
    )
    mean = AveragedModel(student)
    steps = epochs * ceil(len(x) / batch)
    taken = set(averaging_steps(steps, cycle, swa_start) if swa else [steps])
    order = make_schedule([torch.arange(len(x))], [epochs], batch, [generator])
    with torch.enable_grad():
        for i, (index, mask) in enumerate(zip(order.rows[:, 0], order.mask[:, 0], strict=True), 1):
            if swa:
                optimizer.param_groups[0]["lr"] = cyclical(i, cycle, lr, lr_end)
            rows = index[mask].to(x.device)
            seen = augment(x[rows], generator) if augment else x[rows]
            log_prob = log_answers(student(seen), seen, likelihood)
            optimizer.zero_grad()
            (-(target[rows] * log_prob).sum(1).mean()).backward()
            optimizer.step()
            if i in taken:
                mean.update_parameters(student)
    return {n: mean.module.get_parameter(n).detach() for n in net.shapes}
