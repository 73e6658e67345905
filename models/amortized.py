"""Amortized: a set encoder, shared by all clients, gives each client the posterior of its effects.

Zaheer, Kottur, Ravanbakhsh, Poczos, Salakhutdinov and Smola, "Deep Sets", NeurIPS 2017, for the
encoder; Rouillard and Wassermann, "ADAVI: Automatic Dual Amortized Variational Inference Applied To
Pyramidal Bayesian Models", ICLR 2022, for amortized guides of hierarchical models. The network is a
shared base and a personal linear head z_j, the effects of client j:

    p(z_j)             = Normal(m, diag(s)^2)                      the population, at the server
    p(y | x, base, z)  = Categorical(logits=head(base(x); z))      or any other likelihood
    q(z_j)  proportional to  p(z_j) prod_i Normal(v_ij; r_ij o_ij(z_j), r_ij)

The encoder f maps the set of a client's rows to the factors of q, in L passes. A row i has features
h = base(x), outputs o at z = m or, in later passes, at the last mean of q, and their score g =
d log p(y | o) / d o; n is the number of rows:

    e_i            = silu(A asinh(h, o, g) + a)      c = mean_i e_i      the same in any order
    (t_i, log r_i) = B silu(C (e_i, c, log(1 + n)) + b) + d
    v_i            = t_i g_i + r_i o_i               one factor for each of the K outputs

so that q is normal, with one full covariance for the effects of each output:

    precision  P_k = diag(s_k)^-2 + sum_i r_ik h_i h_i'
    mean       m_k + P_k^-1 sum_i (v_ik - r_ik o_ik(m)) h_i

    client   f       by gradient steps on the negative ELBO per row of q, mean of the passes
             q(z_j)  by f
             base_j  by epochs on E_q[mean of -log p(y | x, base, z_j)]
    server   base    = sum_j n_j base_j / sum_j n_j,   f = mean_j f_j
             s^2     = mean_j E_q (z_j - m)^2, then m = mean_j E_q z_j

A new client evaluates f on its rows: its posterior needs no optimization (`adapt`), and without
rows it is the population. The last line has the two conditional maxima of the ELBO (ECM), whose
fixed point is the maximum of the evidence if q is exact. With a normal likelihood of known standard
deviation sigma, q is the exact posterior if t = 1 and r = sigma^-2, at which the ELBO has its
maximum; training finds them.

Use it where clients come and go, or are many with few rows each, and the effects of a linear head
need a posterior with correlations. It assumes that effects are drawn from one normal population,
of which several clients report in every round (s falls to 0 with a single one), and that new
clients resemble those in training: check by `checks.sbc` on their rows.

Departures from the papers: ADAVI trains on simulated data for a given prior, with an encoder for
any pyramid of plates and flows as guides; here the federation's own rows train the encoder, the
prior is estimated, and the guide is normal. The encoder is a deep set up to its last layer, whose
values enter as factors of a normal distribution, so that rows narrow q and their number
extrapolates. A pass is a Newton step with learned gains and curvatures, as in Marino, Yue and
Mandt, "Iterative Amortized Inference", ICML 2018, but no gradient flows through earlier passes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Size, Tensor, nn

from pyrofl.arguments import Count, NotNegative, Positive, ShareBelowOne, Whole, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregator, by_size, uniform
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.elbo import elbo, with_rows
from pyrofl.inference.definition.metadata import NOT_NEGATIVE, POSITIVE, Metadata, normals
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import adam, sgd
from pyrofl.inference.definition.programs import Guide, Likelihood, Program, of_network
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import PriorFamily, as_event, as_families
from pyrofl.models.shared.linear_head import split_head, without_noise
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, pick, renamed, role, under

MAX_COVARIANCE_ENTRIES = 10_000_000  # numbers of a client's covariances
SEARCH_GRID = {"lr_encoder": (0.003, 0.01, 0.03), "lr_base": (0.003, 0.01, 0.03, 0.1)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: PriorFamily = dist.Normal,
    guide: guides.Family | None = None,
    init_scale: Positive = 0.2,
    passes: Count = 2,
    hidden: Count = 32,
    num_particles: Count = 4,
    encoder_epochs: Whole = 5,
    encoder_batch: Count | None = None,
    base_epochs: Whole = 5,
    batch: Count | None = 10,
    lr_encoder: NotNegative = 0.01,
    lr_base: NotNegative = 0.01,
    momentum: ShareBelowOne = 0.9,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the amortized method (posteriors of clients' effects by a shared set encoder).

    Args:
        net: Network, a sequential one whose head is one fully connected layer. A network of this
            layer alone, such as `nets.build("linear", (3,), 1)`, is a hierarchical linear model.
        likelihood: Likelihood of a row, given the network's outputs.
        prior: Location-scale family of the population, see `pyrofl.priors`. The server's maxima
            are exact for the normal; for others it sets m and s by the same moments.
        guide: Family of q(z_j) that replaces the guide below, started at the encoder's means and
            standard deviations, such as `guides.mean_field`. With `guides.delta` s is that of
            points, which is too small.
        init_scale: s before round one.
        passes: Passes L of the encoder; 1 is enough for normal responses.
        hidden: Width of the encoder's two hidden layers.
        num_particles: Monte Carlo samples of every loss.
        encoder_epochs: Epochs on the encoder.
        encoder_batch: Rows in a step on the encoder, each of which stands for several of the
            client's; None takes all.
        base_epochs: Epochs on the base, at the q(z_j) that the encoder has computed.
        batch: Rows in a step on the base; None takes all.
        lr_encoder: Learning rate of Adam for the encoder, which starts again in every round.
        lr_base: Learning rate of the base; the loss is a mean over the rows.
        momentum: Momentum of the base's optimizer.
        aggregation: As in `fedavg.build`, of base, and of encoder and moments.

    Raises:
        ValueError: If the network has another head, or its covariances are too large to store.

    Examples:
        >>> import torch
        >>> import pyrofl
        >>> from pyrofl import nets
        >>> from pyrofl.models import amortized, likelihoods
        >>> x = torch.randn(4, 6, 1, generator=torch.Generator().manual_seed(0))
        >>> parts = {f"client {j}": (x[j], j * x[j, :, 0]) for j in range(4)}
        >>> data = pyrofl.Federation.from_arrays(parts, held_out=["client 3"])
        >>> net = nets.build("linear", (1,), 1)
        >>> method = amortized.build(net, likelihood=likelihoods.normal(0.5))
        >>> run = pyrofl.fit(method, data, 100, progress=False)
        >>> new = pyrofl.posterior(
        ...     method, data, run.state, 100, ids=torch.tensor([3]), adaptation="fine_tune")
        >>> 2.5 < float(new["w"].mean()) < 3.5
        True
    """
    whole, (net, _) = net, without_noise(net)
    below, features, outputs = split_head(net)
    shapes = net.select_params(net.head)
    points = [n for n in whole.shapes if n not in shapes]
    layer = Layer(shapes, features, outputs)
    if outputs * layer.size**2 > MAX_COVARIANCE_ENTRIES:
        raise ValueError(
            f"the posterior of a head with {outputs} outputs of {layer.size} weights has "
            f"{outputs * layer.size**2:,} numbers per client; expected at most "
            f"{MAX_COVARIANCE_ENTRIES:,}: use a network with a narrower last hidden layer"
        )
    encoder = Encoder.of(features, outputs, hidden)
    families = as_families(prior, shapes)

    @of_network(whole, likelihood, points="base")
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample each client's effects z_j from the population, then the responses of its rows."""
        with batch.clients():
            head = {}
            for n, shape in shapes.items():  # p(z_j)
                mean, sd = received[f"loc/{n}"], received[f"log_scale/{n}"].exp()
                head[n] = pyro.sample(n, as_event(families[n](mean, sd), len(shape)))
            with batch.rows():
                out = whole(role("base", local) | head, batch.x)
                pyro.sample("y", likelihood(out, batch.x), obs=batch.y)

    def by_output(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample each client's effects from q(z_j), a normal distribution for each output."""
        root = local["pi/root"]  # [C, 1, K, p, p], a root of the covariance, upper triangular
        with batch.clients():
            standard = dist.Normal(torch.zeros_like(root[..., 0]), 1.0).to_event(2)
            e = pyro.sample("_pi", standard, infer={"is_auxiliary": True})
            step = (root @ e.unsqueeze(-1)).squeeze(-1)
            density = -root.diagonal(dim1=-2, dim2=-1).log().sum((-1, -2))
            for n, value in layer.unstack(step).items():
                at = dist.Delta(local[f"mu/{n}"] + value, density, len(shapes[n]))
                pyro.sample(n, at)
                density = torch.zeros_like(density)  # it counts once

    def start(center: Tensors, sd: Tensors | None = None) -> Tensors:
        """Return the tensors of a guide with given means, and independent effects."""
        width = {n: init_scale * torch.ones_like(center[n]) for n in shapes} if sd is None else sd
        return under("mu", center) | {"pi/root": layer.stack(width).diag_embed()}

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the guide's mean and variance of every effect."""
        return role("mu", local), layer.unstack(local["pi/root"].square().sum(-1))

    q = Guide(by_output, start, moments, "mu/* pi/*")
    if guide is not None:
        q = guides.build_guide(guide, shapes, init_scale=init_scale, loc="mu", spread="pi")

    def init(generator: Generator, clients: int) -> Tensors:
        """Return the server's initial state: network and encoder drawn by their own rules."""
        first = whole.init(generator)
        base, loc = {n: first[n] for n in points}, {n: first[n] for n in shapes}
        variance = {n: torch.full_like(v, init_scale**2) for n, v in loc.items()}
        weights = {n: v.to(next(iter(loc.values()))) for n, v in encoder.init(generator).items()}
        population = under("loc", loc) | under("log_scale", log_scale(variance))
        return under("base", base) | under("encoder", weights) | population

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's posterior with the population, that of a client without rows."""
        sd = {n: v.exp() for n, v in role("log_scale", received).items()}
        return q.start(role("loc", received), sd) | renamed(pick(received, "base/*"), OWN)

    def describe(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute features, and outputs at z = m, of the client's rows."""
        weights = with_rows(role("base", local) | role("loc", received), len(data))
        with torch.no_grad():
            h = data.x.flatten(2) if below is None else below(weights, data.x)
            return under("rows", {"features": h, "outputs": whole(weights, data.x)})

    def encode(received: Tensors, local: Tensors, data: Batch) -> Iterator[Tensors]:
        """Yield the tensors of q(z_j) after each pass of the encoder over the batch's rows."""
        row = {n: data.take_rows(v) for n, v in role("rows", local).items()}
        h, (first, noise) = layer.extend(row["features"]), layer.split(row["outputs"])
        loc, log_width = (layer.stack(role(n, received)) for n in ("loc", "log_scale"))
        out = first
        for _ in range(passes):
            full = torch.cat([out, noise], -1)
            score, _ = layer.split(score_of(lambda o: likelihood(o, data.x).log_prob(data.y), full))
            inputs = torch.cat([row["features"], out, score], -1)
            gain, precision = encoder(role("encoder", local), inputs, data.counts)
            shift = gain * score + precision * (out - first)
            mean, root = normal(loc, log_width.exp(), h, shift, precision)
            yield as_guide(mean, root)
            out = first + h @ (mean.detach() - loc).mT

    def as_guide(mean: Tensor, root: Tensor) -> Tensors:
        """Return the tensors of a guide with this mean [C, K, p] and root of its covariance."""
        if guide is None:
            return under("mu", layer.unstack(mean)) | {"pi/root": root}
        return q.start(layer.unstack(mean), layer.unstack(root.square().sum(-1).sqrt()))

    inner = elbo(num_particles if q.random else None, mean=True)

    def negative_elbo(
        model: Program, guide: Program, received: Tensors, local: Tensors, data: Batch
    ) -> Tensor:
        """Return the negative ELBO per row of the encoder's posteriors, mean of its passes, [C]."""
        each = [
            inner(model, guide, received, local | posterior, data)
            for posterior in encode(received, local, data)
        ]
        return torch.stack(each).mean(0)

    def infer(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the client's posterior by the encoder, and its moments for the server."""
        with torch.no_grad():
            *_, posterior = encode(received, local, data)
            mean, variance = q.moments(received, posterior, data)
        apart = {n: mean[n] - v for n, v in role("loc", received).items()}
        square = {n: v + apart[n].square() for n, v in variance.items()}
        base = renamed(pick(local, "base/*"), OWN)  # at which the posterior was computed
        return posterior | under("mean", mean) | under("square", square) | base

    def by_server_names(server: Tensors, message: Tensors) -> Tensors:
        """Rename the moments of clients' messages to the names used in the server's state."""
        variance = {n: (2 * v).exp() for n, v in role("log_scale", message).items()}
        variance |= role("square", message)
        loc = role("loc", message) | role("mean", message)
        points = pick(message, "base/* encoder/*")
        return points | under("loc", loc) | under("log_scale", variance)

    def update(server: Tensors, pooled: Tensors) -> Tensors:
        """Update base and encoder, and the population's mean and variance."""
        return pooled | under("log_scale", log_scale(role("log_scale", pooled)))

    def common(received: Tensors, local: Tensors) -> Tensors:
        """Return the global model: shared base, and head with the population's distribution."""
        sd = {n: v.exp() for n, v in role("log_scale", received).items()}
        return local | received | q.start(role("loc", received), sd)

    step = GradientStep("encoder/*", adam(lr_encoder), negative_elbo)
    move = GradientStep(
        "base/*",
        sgd(lr_base, momentum),
        elbo(num_particles if q.random else None, kl=0.0, mean=True),
    )
    return Method(
        name="amortized",
        init=init,
        init_client=init_client,
        model=model,
        guide=q,
        phases=(
            Phase((describe,)),
            Phase((step,), encoder_epochs, encoder_batch),
            Phase((infer,)),
            *((Phase((move,), base_epochs, batch),) if points else ()),
        ),
        upload=lambda received, local: pick(local, "base/* encoder/* mean/* square/*"),
        aggregate=Aggregator(
            {"base/*": by_size, "encoder/* loc/* log_scale/*": uniform},
            update,
            rule=aggregation,
            transform=by_server_names,
        ),
        adapt=(Phase((describe, infer)),),
        views={
            "personal": lambda received, local: local | renamed(local, {"own": "base"}),
            "global": common,
        },
        metadata=Metadata(
            {
                "square/*": POSITIVE if q.random else NOT_NEGATIVE,
                **normals("loc", "log_scale", torch.exp),
            },
            reads={"model": model, "guide": q},
        ),
    )


OWN = {"base": "own"}  # the base that a client has used for its posterior
MIN_VARIANCE = 1e-24  # smallest variance of the population, as of points


def log_scale(variance: Tensors) -> Tensors:
    """Return log standard deviations."""
    return {n: v.clamp(min=MIN_VARIANCE).log() / 2 for n, v in variance.items()}


class Layer:
    """Fully connected layer: its parameters as a tensor [..., K, p] of effects by output."""

    def __init__(self, shapes: dict[str, Size], features: int, outputs: int) -> None:
        """Find weight and bias among the layer's parameters."""
        self.shapes, self.features, self.outputs = shapes, features, outputs
        self.weight = max(shapes, key=lambda n: len(shapes[n]))
        self.bias = next((n for n in shapes if n != self.weight), None)
        self.size = features + (self.bias is not None)  # p

    def stack(self, values: Tensors) -> Tensor:
        """Return effects [..., K, p]: the weights of each output, and its bias."""
        lead = values[self.weight].shape[: -len(self.shapes[self.weight])]
        weight = values[self.weight].reshape(*lead, self.outputs, self.features)
        if self.bias is None:
            return weight
        return torch.cat([weight, values[self.bias].reshape(*lead, self.outputs, 1)], -1)

    def unstack(self, effects: Tensor) -> Tensors:
        """Return the layer's parameters, given effects [..., K, p]."""
        lead, parts = effects.shape[:-2], {self.weight: effects[..., : self.features]}
        if self.bias is not None:
            parts[self.bias] = effects[..., self.features]
        return {n: parts[n].reshape(*lead, *shape) for n, shape in self.shapes.items()}

    def extend(self, features: Tensor) -> Tensor:
        """Return features [..., p], with a column of ones for the bias."""
        ones = torch.ones_like(features[..., :1])
        return features if self.bias is None else torch.cat([features, ones], -1)

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs of the layer, and those of the noise that may follow."""
        return outputs[..., : self.outputs], outputs[..., self.outputs :]


def score_of(log_prob: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    """Return the slope of log densities [C, B] by outputs [C, B, K], as a constant."""
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        (score,) = torch.autograd.grad(log_prob(outputs).sum(), outputs)
    return score


class Encoder:
    """Set encoder: rows of clients -> log gain and log precision of each row's factors."""

    def __init__(self, row: Network, site: Network) -> None:
        """Store the network of a row, and that of a row with its set."""
        self.row, self.site = row, site

    @classmethod
    def of(cls, features: int, outputs: int, hidden: int) -> Encoder:
        """Return an encoder that begins with gains and precisions of 1."""
        first = nn.Linear(features + 2 * outputs, hidden)
        last = nn.Linear(hidden, 2 * outputs)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        row = OrderedDict(row=first, row_silu=nn.SiLU())
        site = OrderedDict(set=nn.Linear(2 * hidden + 1, hidden), set_silu=nn.SiLU(), site=last)
        return cls(Network(nn.Sequential(row)), Network(nn.Sequential(site), pretrained="site.*"))

    def init(self, generator: Generator) -> Tensors:
        """Return initial weights, by name."""
        return self.row.init(generator) | self.site.init(generator)

    def __call__(self, weights: Tensors, row: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return gains and precisions [C, B, K] of rows, each multiplied by its count.

        Args:
            weights: of the encoder, [C, *p].
            row: features, outputs and score, [C, B, f + 2 K].
            counts: how much each row counts, [C, B]; 0 where there is none.
        """
        weights = with_rows(weights, len(counts))
        e = self.row(weights, row.asinh())
        counts = counts.unsqueeze(-1)
        n = counts.sum(1, keepdim=True)  # [C, 1, 1]
        context = (counts * e).sum(1, keepdim=True) / n.clamp(min=torch.finfo(n.dtype).tiny)
        together = torch.cat([context, n.log1p()], -1).expand(-1, e.shape[1], -1)
        values = self.site(weights, torch.cat([e, together], -1))
        gain, log_precision = values.chunk(2, -1)
        return counts * (1 + gain), counts * log_precision.exp()


def normal(
    loc: Tensor, width: Tensor, h: Tensor, shift: Tensor, precision: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the normal distribution that is a normal prior times normal factors of rows.

    Args:
        loc: means of the prior, [C, K, p].
        width: its standard deviations.
        h: features of rows, [C, B, p].
        shift: slope of each factor at `loc`, by h'(z - loc), [C, B, K].
        precision: of each factor, [C, B, K].

    Returns:
        Mean [C, K, p] and upper triangular root [C, K, p, p] of the covariance; NaN where it is not
        positive definite in double precision.
    """
    scaled = h.unsqueeze(1) * width.unsqueeze(2)  # [C, K, B, p]
    a = ((precision.mT.unsqueeze(-1) * scaled).mT @ scaled).double()
    slope = (shift.mT.unsqueeze(2) @ scaled).squeeze(2).double()
    eye = torch.eye(a.shape[-1]).to(a)
    lower, failed = torch.linalg.cholesky_ex(a + eye)
    inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    inverse = torch.where(failed[..., None, None] > 0, torch.nan, inverse)
    root = width.unsqueeze(-1) * inverse.mT.to(width)
    mean = loc + (root @ (inverse @ slope.unsqueeze(-1)).to(width)).squeeze(-1)
    return mean, root
