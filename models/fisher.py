"""Fisher: average of the clients' models, weighted by each parameter's Fisher information.

Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022, across clients, as
in one-shot federated learning by Laplace's approximation.

    p(w)        = Normal(m0, S0)                  S0 diagonal
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = Normal, diagonal or full

    client   w_j = SGD from the mean of q on the mean loss per row
             F_j = sum_i E_y[g g'],  g = grad of log p(y | x_i, w) at w_j
    server   q   = p(w) prod_j exp(-(w - w_j)'F_j(w - w_j) / 2), over the clients that reported:
             precision  S0^-1 + sum_j F_j
             mean       its inverse times  S0^-1 m0 + sum_j F_j w_j

Where the model is linear and normal and w_j the optimum, q is the exact posterior after one round,
with all parameters against each other (`full_covariance`). One round is what merging is about: it
contains what no average of the w_j does: each client's information on each parameter. After more
rounds clients start from the mean and q is computed again, from the rows of those that reported
alone; so nothing is counted twice.

With `local_prior` this is Bayesian federated inference (BFI; Jonker, Pazira and Coolen, Statistics
in Medicine 2024): clients find the mode of their own posterior, so that no client's rows need to
determine all parameters, and the server takes out the priors that were counted J times,

    client   w_j = argmax p(D_j | w) p(w),   A_j = F_j + S0^-1
    server   A   = S0^-1 + sum_j (A_j - S0^-1),   mean  A^-1 (sum_j A_j w_j - (J - 1) S0^-1 m0)

With `strata`, as in BFI, some parameters c_j of the last ones differ between clients, with the
prior of each, such as intercepts of hospitals. A client integrates c_j out of its normal factor,
keeps c_j given the others, and sends nothing of it; results are those of one product over all.

Use it where there is one round and no second: each parameter is weighed by what a client knows of
it. It assumes that clients end near an optimum, and that a normal fits there.

Of the paper's text nothing could be read here; the aggregation is its well-known closed form.
Departures from the paper: the prior, which keeps parameters without information where
they are likely to be; every row counts the same, with no weights of clients except F_j. The
expectation over y is exact (see `shared.laplace`), not sampled. FedLPA's blocks by layer are not
here: a sum over clients of Kronecker products is none.
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, NotNegative, ShareBelowOne, Whole, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregator, WeightedSum, uniform
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.metadata import SHARED, Metadata
from pyrofl.inference.definition.method import Method, Phase, as_received, keep_nothing
from pyrofl.inference.definition.programs import Likelihood, Prior, Program
from pyrofl.models import guides
from pyrofl.models.guides.correlated import split_vectors, standard_noise
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import fixed
from pyrofl.models.shared.laplace import LaplaceCore
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, times, under

STANDARD = fixed()  # Normal(0, 1)
NOISE = "_spread", "_strata"  # auxiliary sites of shared and of other parameters

SEARCH_GRID = {"lr": (0.003, 0.01, 0.03, 0.1), "momentum": (0.0, 0.9), "epochs": (2, 5)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.mean_field,
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr: NotNegative = 0.01,
    momentum: ShareBelowOne = 0.9,
    local_prior: bool = False,
    strata: str | None = None,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the Fisher merging method (Fisher-weighted averaging of models).

    Args:
        net: the network; all its parameters are shared and Bayesian.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters; independent normals, such as dist.Normal(0.0, 1.0).
        guide: `mean_field` for the diagonal of F_j, `full_covariance` for all of it, with a few
            hundred parameters.
        epochs: local epochs.
        batch: rows in a step, and of what F_j is added up from, which takes memory for the same
            number of slopes; None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.
        local_prior: whether clients maximize the prior times their likelihood, as BFI does, not the
            likelihood alone.
        strata: patterns of parameters that each client has for itself, the last ones of the
            network, such as its intercept; needs `full_covariance`. The view "personal" has them.
        aggregation: of factors; other than "mean" it is their number times the median or the like.

    Raises:
        ValueError: if the prior is not normal, the guide another one, a full covariance too big, or
            strata are not the last parameters.
    """
    core = LaplaceCore(net, likelihood, prior, guide)
    own = Strata(core, strata) if strata else None

    def times_prior(factor: Tensors) -> Tensors:
        """Return the natural parameters of a normal factor multiplied by the prior."""
        return {n: core.factor_of_prior[n].to(v) + v for n, v in factor.items()}

    def begin(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Set the prior under which the client's optimum is found."""
        mean, sd = (v.to(data.size).expand(len(data), -1) for v in core.layout.prior())  # [C, d]
        return {
            "prior/mean": mean,
            "prior/precision": core.normals.independent(mean, sd)["precision"],
        }

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the client's posterior, and the normal approximation of its likelihood."""
        factor = core.factor(local["information"], flatten_clients(role("w", local)))
        if local_prior:  # the optimum is that of the factor times the prior
            precision = local["prior/precision"]
            pull = core.factor(precision, flatten_clients(role("w", local)) - local["prior/mean"])
            factor["shift"] = factor["shift"] + pull["shift"]
        own_tensors: Tensors = {}
        if own:
            factor, own_tensors = own.integrated(factor)
        return (
            factor | own_tensors | core.guide_parameters(*core.normals.moments(times_prior(factor)))
        )

    def product(server: Tensors, pooled: Tensors) -> Tensors:
        """Return the server's posterior: the prior times the aggregated factors."""
        return core.posterior(times_prior(pooled))

    q: Program = own.guide if own else core.q
    first = (Phase((begin,)),) if local_prior else ()
    phases = (*first, *core.training_phases(epochs, batch, lr, momentum, float(local_prior)))
    return Method(
        name="fisher",
        init=core.init,
        model=core.model,
        guide=q,
        init_client=own.start if own else keep_nothing,
        phases=(*phases, Phase((settle,))),
        upload=core.upload,
        aggregate=Aggregator({"*": WeightedSum(uniform)}, product, aggregation),
        views=({"personal": own.personal} if own else {}) | {"global": as_received},
        metadata=own.metadata(q) if own else core.metadata,
    )


class Strata:
    """Parameters that each client has for itself, in a normal posterior of all parameters.

    A client keeps "stratum/shift" and "stratum/precision", the natural parameters of p(c_j | s) as
    a function of all parameters (s, c_j), where s are those that all clients share.
    """

    def __init__(self, core: LaplaceCore, patterns: str) -> None:
        """Validate that strata are the last parameters, and the guide has a full covariance."""
        shapes, strata_names = core.net.shapes, list(core.net.select_params(patterns))
        if not core.normals.full:
            raise ValueError("strata need all covariances; expected guide=guides.full_covariance")
        if list(shapes)[-len(strata_names) :] != strata_names or len(strata_names) == len(shapes):
            raise ValueError(
                f"strata are {', '.join(strata_names)}; expected some of the last of "
                f"{', '.join(shapes)}"
            )
        shared = [n for n in shapes if n not in strata_names]
        self.core, self.shared = core, " ".join(shared)
        self.size = sum(shapes[n].numel() for n in shared)  # of s

    def integrated(self, factor: Tensors) -> tuple[Tensors, Tensors]:
        """Return the factor of s, with c_j integrated out under its prior; and what is kept."""
        normals, k = self.core.normals, self.size
        whole = {n: factor[n] + v for n, v in self._prior(factor["shift"]).items()}
        p, h = normals.matrix(whole["precision"]), whole["shift"]
        across = p[..., :k, k:]  # [..., k, d - k]
        solved = torch.linalg.solve(p[..., k:, k:], torch.cat([across.mT, h[..., k:, None]], -1))
        off = across @ solved  # [..., k, d - k + 1]; the last column is of the shift
        alone, shift = torch.zeros_like(p), torch.zeros_like(h)
        alone[..., :k, :k] = p[..., :k, :k] - off[..., :k]
        shift[..., :k] = h[..., :k] - off[..., k]
        found = {"shift": shift, "precision": normals.packed(alone)}
        return found, under("stratum", {n: whole[n] - v for n, v in found.items()})

    def start(self, received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Start with the prior of c_j."""
        zero = torch.zeros_like(flatten_clients(role("w", received)))
        return under("stratum", {n: v.expand(len(zero), -1) for n, v in self._prior(zero).items()})

    def personal(self, received: Tensors, local: Tensors) -> Tensors:
        """Return the client's posterior of all parameters: that of s, times p(c_j | s)."""
        normals, k = self.core.normals, self.size
        precision = normals.matrix(self.core.precision(received))
        precision[..., k:, :] = precision[..., :, k:] = 0.0
        q = self.core.factor(normals.packed(precision), flatten_clients(role("w", received)))
        joint = {n: v + local[f"stratum/{n}"] for n, v in q.items()}
        return self.core.guide_parameters(*normals.moments(joint))

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Draw s by noise that all clients share, and c_j by the client's own."""
        own, k = role("spread", local), self.size
        width = own["log_sd"].exp()
        row, column = torch.tril_indices(width.shape[-1], width.shape[-1], -1)
        root = torch.diag_embed(width)  # [C, 1, d, d]
        root[..., row, column] = own["below"] * width[..., row]
        mean = torch.cat([local[f"w/{n}"].flatten(2) for n in self.core.net.shapes], -1)
        with batch.clients():
            parts = zip(NOISE, mean.tensor_split([k], -1), strict=True)
            w = mean + times(root, torch.cat([standard_noise(n, v) for n, v in parts], -1))
            density = split_vectors(
                -own["log_sd"], self.core.net.shapes
            )  # of w, less that of the noise
            for n, value in split_vectors(w, self.core.net.shapes).items():
                axes = density[n].dim() - 2
                log_q = density[n].flatten(2).sum(-1).expand(value.shape[: value.dim() - axes])
                pyro.sample(n, dist.Delta(value, log_q, event_dim=axes))

    def metadata(self, guide: Program) -> Metadata:
        """Return metadata of the method's tensors, in which strata are not shared."""
        tensor_metadata = {n: v for n, v in self.core.metadata.tensors.items() if v is not SHARED}
        reads: dict[str, Program] = {"model": self.core.model, "guide": guide}
        sites = {f"{self.shared} {NOISE[0]}": SHARED, **tensor_metadata}
        return Metadata(sites, reads=reads)

    def _prior(self, like: Tensor) -> Tensors:
        """Return natural parameters of the prior of c_j, 0 for s."""
        mean, sd = (v.to(like) for v in self.core.layout.prior())
        precision = sd**-2
        precision[: self.size] = 0.0
        whole = self.core.normals.packed(torch.diag(precision))
        return {"shift": precision * mean, "precision": whole}
