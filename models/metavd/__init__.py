"""MetaVD: a hypernetwork at the server predicts the dropout rates of each client.

Jeon, Hong, Yun and Kim, "Federated Learning via Meta-Variational Dropout", NeurIPS 2023. One layer,
the one before the output, has random weights w_m of d parameters; the rest is shared as in X, which
is FedAvg, Reptile, MAML or PerFedAvg:

    p(w_m | gamma) = Normal(0, gamma),  gamma = theta^2 (1 + alpha_m)        hierarchical
    p(y | x, w_m)  = Categorical(logits=net(x; theta_rest, w_m))
    q(w_m)         = Normal(theta, alpha_m theta^2),  alpha_m = h_psi(e_m)   eq. 3
    ELBO           = sum_m g_m (E_q[log p(D_m | w_m)] - KL[q(w_m) || p(w_m)])           eq. 2
    KL             = sum_k 1/2 log(1 + 1 / alpha_m,k),  at the gamma above        appendix B

    client   theta, s_m by X's steps on  mean CE + beta / d sum_k 1/2 log(1 + 1 / alpha_m,k)   eq. 4
    server   g_m    = n_m / sum_m n_m                                                          eq. 1
             mu     = sum_m g_m theta_m / v_m / sum_m g_m / v_m,  v_m = alpha_m theta_m^2      eq. 5
             theta <- theta - lr (theta - mu)                                momentum 0.9
             psi   <- psi - lr sum_m g_m J_psi^T (s_m^server - s_m^local)    momentum 0.6
             e_m   <- e_m - lr g_m J_e^T (s_m^server - s_m^local)            momentum 0.3

s_m are the coordinates of alpha_m that h puts out and clients train: log(alpha theta^2) as in the
authors' code, or log alpha. The last three lines are of algorithm 1. Neither psi nor e_m travels.
The programs below define the model; by default training runs `programs.DropoutLayers`, the same
model with the weights integrated out of the layer's outputs. Eq. 4 is `programs.objective`, eq. 5
`dropout.product`, and h, psi and e_m are in `hypernetwork`. Of the rates, theta's is `server_lr`,
and that of psi and e_m `hyper_lr`. For unseen clients e_m is the mean, or fitted by `embed`.

Use it where clients are many, small and unlike, and new ones come: the server learns how unsure
each client's weights are. It assumes that this grows with the size of a weight, in one layer, and
that the server can distinguish clients. On CIFAR-10 it lowers NLL and calibration error where X
overfits, without a gain in accuracy, and costs accuracy where X underfits.

Departures from the paper: as in the authors' code, the hypernetwork has three hidden layers, where
the paper has two (`depth=2`); psi and e_m decay by 5e-4, all of the server's gradients together are
clipped to norm 100, and decay and momentum also act on e_m of clients that did not report. Its text
prints "inversely proportional to its dropout variable" for the weights of mu, which
`precision="alpha"` is; the default is the variance of the weight, as the code has it. The code
tests with s = -8.5 for all clients (`head="code"`); here each has its own. Cross entropies are
averaged over draws, where the code averages logits (`logit_average`). Hessian-vector products are
exact, where the code halves them. The step before testing sees all rows of a client, not 64. Unseen
clients of EnsembleVD have the mean s. Weights pruned by a client count as zeros in mu, and s where
a weight is dropped neither travels nor teaches. Networks start by their layers' own rules.

beta tempers the divergence. Exact Bayes is beta = d / n_m (`beta=None`; the statistic
"exact_beta"): the authors' network has d = 32,768, so a client of 385 rows has beta = 85, where
they set 10. It pulls every rate up, by 1 / d of itself in each step, and the hypernetwork adds up
what all clients found: at the authors' rates and without any data three quarters of the rates pass
0.9 by round 6 for 512 weights, round 8 for 2,048 and round 15 for 8,192. The paper's sparsity of
about 70% is this state; small networks only get there earlier. The default `hyper_lr`, a tenth of
the authors' 0.9, delays it, `hyper_step` bounds its speed, and every round reports the fraction of
rates above 0.9 ("rates_above_0.9"). `Run.predict` and `Run.evaluate` use theta, the mean of the
weights, unless `draws` is given: `run.predict(x, client, draws=100)` averages over the posterior
that `to_arviz` draws from. Test with draws, as the mean of so wide a posterior has little meaning.
`examples/papers/metavd` has the numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Generator

from pyrofl.arguments import (
    Count,
    NotNegative,
    Positive,
    Range,
    Share,
    ShareBelowOne,
    Whole,
    checked,
)
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.averages import Combine, get_rule
from pyrofl.inference.definition.metadata import INCOMPARABLE, SPARSE, Metadata, Monitor
from pyrofl.inference.definition.method import (
    GradientStep,
    Method,
    Phase,
    View,
    as_trained,
    return_received,
)
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Likelihood, Prior, Program, as_prior, flat
from pyrofl.models import guides
from pyrofl.models.guides.dropout import (
    DROPOUT_GUIDES,
    LOG_BOUND,
    MIN_SQUARED_MEAN,
    Coordinates,
    clamp_log,
    hierarchical_prior,
    mode_of_normal_product,
)
from pyrofl.models.likelihoods import categorical
from pyrofl.models.metavd import hypernetwork, pruning
from pyrofl.models.metavd.hypernetwork import DropoutSource, embed
from pyrofl.models.metavd.programs import (
    DropoutLayers,
    Sampling,
    likelihood_of_mean,
    objective,
    warm_up,
    zero_pruned,
)
from pyrofl.models.shared.meta_gradients import Order, maml
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, pick, role, spread_out, under

__all__ = ["build", "embed", "layer_before_output"]

Base = Literal["fedavg", "reptile", "maml", "perfedavg"]
Dropout = Literal["meta", "vd", "ensemble", "none"]
Rate = Annotated[float, Range(0, 1, open_low=True, open_high=True)]

DECAY = 5e-4  # of the weights of all that the server learns about spreads
MAX_GRADIENT_NORM = 100.0  # norm of all the server's pseudo-gradients together
SATURATED = f"server/rates_above_{pruning.DROPPED_RATE}"
RUNAWAY = Monitor(
    high=0.5,
    why="the layer before the output is mostly noise, as the divergence pulls rates up in every "
    "round; expected fewer rounds, hyper_step=0.1, a smaller hyper_lr or a smaller beta",
    words=f"share of dropout rates above {pruning.DROPPED_RATE}",
)

SEARCH_GRID = {
    "lr": (0.02, 0.07, 0.2),
    "hyper_lr": (0.01, 0.09, 0.9, 3.0),
    "beta": (1.0, 10.0, 100.0),
}


@rebuildable
@checked
def build(
    net: Network,
    *,
    on: Base = "reptile",
    dropout: Dropout = "meta",
    bayesian: str | None = None,
    likelihood: Likelihood = categorical,
    prior: Prior | None = None,
    guide: guides.Family | None = None,
    coords: Coordinates = "logvar",
    init_scale: Positive | None = None,
    sampling: Sampling = "activations",
    precision: Literal["variance", "alpha"] = "variance",
    head: Literal["personal", "code"] = "personal",
    num_particles: Count = 3,
    logit_average: bool = False,
    beta: NotNegative | None = 10.0,
    epochs: Whole = 5,
    batch: Count | None = 64,
    lr: NotNegative = 0.07,
    client_lr: NotNegative = 0.1,
    clip: Positive = 5.0,
    server_lr: NotNegative = 0.9,
    hyper_lr: NotNegative = 0.09,
    hyper_step: Positive | None = None,
    momentum: ShareBelowOne = 0.9,
    embedding: Count | None = None,
    width: Count = 200,
    depth: Whole = 3,
    prune: Rate | Literal["snip"] | None = None,
    prune_from: Share = 0.15,
    sparsity: ShareBelowOne = 0.7,
    elapsed: Share | None = None,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build MetaVD (meta-variational dropout), one of its ablations, or its base method alone.

    Defaults are the authors' except lr and hyper_lr.

    Args:
        net: the network.
        on: X. "fedavg" averages theta without server_lr and momentum, and tests unadapted; the
            others take one step on a client's rows before its test.
        dropout: "meta" is the hypernetwork, "vd" one s for all clients, "ensemble" one s for each,
            "none" X alone.
        bayesian: patterns of the random weights. Default: the weight before the output layer's.
        likelihood: of a row, given the network's outputs.
        prior: on the random weights, as in `fedavg.build`; default the hierarchical one, whose
            gamma fits best.
        guide: family of q(w_m) instead of the guide below. The delta guide leaves X alone.
        coords: "logvar" trains s = log(alpha theta^2), "alpha" s = log alpha, with `log_alpha` for
            the guide. Of another guide: "alpha" if its variance follows theta.
        init_scale: of the guide at the start; default 0.0143 ("logvar") and 0.4 ("alpha").
        sampling: draw in training what the layer puts out for each row, or its weights.
        precision: the server weighs theta_m by 1 / (alpha_m theta_m^2), or by 1 / alpha_m.
        head: test with a client's own s, or with that of the start.
        num_particles: Monte Carlo samples of every loss.
        logit_average: average logits over draws instead of losses, as the authors' code does.
        beta: weight of the mean divergence per weight against the mean loss per row; None is exact
            Bayes, d / n_m. It warms up in the first 2% of the rounds.
        epochs: local epochs.
        batch: rows in a step; three times as many for "maml" and "perfedavg", which part them.
        lr: learning rate of clients; of the inner step for "maml" and "perfedavg". The latter
            diverges beyond 1 by the loss's largest curvature, where g - lr H g ascends.
        client_lr: learning rate of the outer step of these two.
        clip: largest norm of a client's gradient.
        server_lr: learning rate of the server's steps on theta.
        hyper_lr: of its steps on psi, e and a shared s.
        hyper_step: the largest change of any s_m in a round: the step on psi and e is shortened to
            it, that of a spread kept by row is cut off. None bounds nothing, as the authors.
        momentum: of theta at the server.
        embedding: length of e_m; None is 1 + clients // 4.
        width: of the hypernetwork's hidden layers.
        depth: their number; the paper has two, the authors' code three.
        prune: a number drops weights whose dropout rate exceeds it, both ways ("+DP", the authors'
            0.9); "snip" drops the least sensitive ones for good after round one.
        prune_from: share of the rounds before the former starts.
        sparsity: share of the weights that "snip" drops.
        elapsed: share of the rounds that are over; None: no schedule, as after it.
        aggregation: how the server makes one theta of the clients', as in `fedavg.build`, and one
            s for "vd". Other than "mean" it weighs by size: a bad client may claim any precision.
            What the hypernetwork learns is not robust, but its steps are bounded.

    Raises:
        ValueError: if no parameter matches `bayesian`, its layer's outputs cannot be drawn, there
            is no dropout rate to prune by, or the divergence from `prior` has no closed form and
            sampling is "activations".
    """
    shapes = net.select_params(layer_before_output(net) if bayesian is None else bayesian)
    family = DROPOUT_GUIDES[coords] if guide is None else guide
    family = guides.delta if dropout == "none" else family
    scale: dict[str, Any] = {} if init_scale is None else {"init_scale": init_scale}
    q = guides.build_guide(family, shapes, loc="loc", spread="spread", **scale)
    prior_of_w = None if prior is None else as_prior(prior, shapes)
    is_hierarchical = prior is None and q.random

    def model_with(likelihood: Likelihood) -> Program:
        """Return the model with a likelihood of the network's outputs."""

        def model(received: Tensors, local: Tensors, batch: Batch) -> None:
            """Sample the random weights of each client, then the responses of its rows."""
            theta = role("loc", local)
            # gamma follows the moments of q, where the divergence is least.
            mean, variance = q.moments(received, local, batch) if is_hierarchical else ({}, {})
            with batch.clients():
                w = {}
                for n, shape in shapes.items():
                    if is_hierarchical:  # p(w_m | gamma_m) = Normal(0, gamma_m)
                        fn = hierarchical_prior(mean[n], variance[n], len(shape), coords)
                    else:
                        fn = (prior_of_w or flat)(n, shape, received, local, batch)
                    w[n] = pyro.sample(n, fn)
                with batch.rows():
                    outputs = net(theta | (zero_pruned(received, w) if prune else w), batch.x)
                    pyro.sample("y", likelihood(outputs, batch.x), obs=batch.y)

        return model

    def dropout_guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the random weights from q(w_m) = Normal(theta, alpha theta^2) (eq. 3)."""
        with batch.clients():
            for n, shape in shapes.items():
                theta, s = local[f"loc/{n}"], clamp_log(local[f"spread/{n}"])
                if coords == "logvar":  # s = log(alpha theta^2)
                    sd = (s / 2).exp()
                else:  # s = log alpha
                    sd = (s / 2).exp() * theta.abs().clamp(min=MIN_SQUARED_MEAN**0.5)
                pyro.sample(n, dist.Normal(theta, sd).to_event(len(shape)))

    def variances(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return mean and variance exp(s) of the weights, without their standard deviation."""
        theta = {n: local[f"loc/{n}"] for n in shapes}
        return theta, {n: clamp_log(local[f"spread/{n}"]).exp() for n in shapes}

    if guide is None and q.random:
        q = replace(q, program=dropout_guide)
    model = model_with(likelihood)
    rate = None if prune is None or prune == "snip" else prune
    if rate is not None and not q.random:
        raise ValueError(f"prune is {rate} where no weight is random; expected 'snip' or None")
    limit = rate if elapsed is None or elapsed >= prune_from else None
    weights = sum(shape.numel() for shape in shapes.values())
    exactly = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in shapes.items()}
    first = role("spread", q.start(exactly))
    combine = get_rule(aggregation)
    psi_optim = sgd(hyper_lr, 0.6, weight_decay=DECAY)  # also of a shared s
    embedding_optim = sgd(hyper_lr, 0.3, weight_decay=DECAY)
    match dropout if q.random else "none":
        case "meta":
            widths = [width] * depth
            learning = (psi_optim, embedding_optim)
            source = hypernetwork.hypernetwork(first, widths, embedding, LOG_BOUND, learning)
        case "vd":
            source = hypernetwork.shared(first, psi_optim, combine)
        case "ensemble":
            source = hypernetwork.rows(first, hyper_step)
        case _:
            source = DropoutSource()
    adapts, meta = on != "fedavg", on in ("maml", "perfedavg")
    optims = {"loc/*": sgd(server_lr, momentum) if adapts else sgd(1.0), **source.optims}

    def moments(tensors: Tensors) -> tuple[Tensors, Tensors]:
        none = torch.zeros(len(next(iter(tensors.values()))), 0)
        return q.moments({}, tensors, Batch(none, none, none.bool(), none.sum(1), none.sum(1)))

    def init(generator: Generator, clients: int) -> Tensors:
        """Return the server's initial state: parameters drawn by the network's initialization."""
        return under("loc", net.init(generator)) | source.start(generator, clients)

    def download(server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the shared weights theta and its own dropout parameters s_m."""
        theta = spread_out(pick(server, "loc/*"), len(cohort.ids))
        return pruning.drop(
            theta | under("spread", source.read(server, cohort.ids)), moments, limit
        )

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the client's trained weights theta_m and dropout parameters s_m."""
        return pruning.drop(return_received(received, local), moments, limit)

    def update(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Update model theta, hypernetwork psi and client embeddings e_m by all messages."""
        if limit is not None:
            message = pruning.fill(message, under("spread", source.read(server, cohort.ids)))
        mean = combine(role("loc", message), cohort.size, role("loc", server))
        if q.random and aggregation == "mean":
            # What depends on theta's size takes the server's where none was sent.
            sent_means = pruning.fill(message, {f"loc/{n}": server[f"loc/{n}"] for n in shapes})
            theta, variance = moments(sent_means)
            for n, v in theta.items():
                alike = v.square().clamp(min=MIN_SQUARED_MEAN) if precision == "alpha" else 1
                # mu of eq. 5
                mean[n] = mode_of_normal_product(
                    message[f"loc/{n}"], variance[n] / alike, cohort.size
                )
        gradient = under("loc", {n: server[f"loc/{n}"] - v for n, v in mean.items()})
        gradient |= source.slope(server, cohort, role("spread", message))
        moved = hypernetwork.learn(server, gradient, optims, MAX_GRADIENT_NORM)
        moved = hypernetwork.shorten_step(source, server, moved, hyper_step)
        if prune == "snip":
            moved |= pruning.snip(server, gradient, moved, shapes, sparsity)
        after = server | moved | source.store(server, cohort, role("spread", message))
        return after | (saturation(after, cohort) if q.random else {})

    def saturation(server: Tensors, cohort: Cohort) -> Tensors:
        """Return the fraction of the reporting clients' dropout rates that exceed 0.9."""
        theta = spread_out(pick(server, "loc/*"), len(cohort.ids))
        spread = under("spread", source.read(server, cohort.ids))
        return {SATURATED: pruning.saturated_fraction(*moments(theta | spread)).mean()}

    def begun(received: Tensors) -> Tensors:
        """Reset the dropout parameters among the received tensors to their initial values."""
        like = next(iter(received.values()))
        start = {f"spread/{n}": v.to(like) for n, v in first.items()}
        return received | spread_out(start, len(like))

    def statistics(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Return each client's dropout rates, log alpha, sparsity, and the beta of exact Bayes."""
        exact = {"exact_beta": weights / data.size} if q.random else {}
        return pruning.report(local, moments, limit, shapes) | exact

    both = "loc/* spread/*" if q.random else "loc/*"
    pair: tuple[Program, Program] | None = None
    layers = None
    of_training = likelihood_of_mean(likelihood) if logit_average else likelihood
    if q.random and sampling == "activations":
        fast = replace(q, moments=variances) if guide is None and coords == "logvar" else q
        parts = net, fast, shapes, of_training, prior_of_w, coords, prune is not None
        layers = DropoutLayers(*parts)
        layers.refuse_no_divergence()
        pair = layers.programs()
    elif q.random and logit_average:
        pair = model_with(of_training), q
    precompute = layers.variance_and_divergence if layers else None
    draws = num_particles if q.random else None
    loss = objective(pair, weights, draws, beta, elapsed, precompute)
    to_predict = (
        (lambda server, cohort: begun(download(server, cohort))) if head == "code" else None
    )
    inner, outer = sgd(lr, clip=clip), sgd(client_lr, clip=clip)
    step = test = GradientStep(both, inner, loss)
    if meta:
        order: Order = "exact" if on == "maml" else "hessian_free"
        step = GradientStep(both, outer, maml(loss, "loc/*", lr, order=order, clip=clip))
        test = GradientStep("loc/*", inner, loss)
    return Method(
        name="metavd",
        init=init,
        model=model,
        guide=q,
        phases=(Phase((step,), epochs, 3 * batch if meta and batch else batch),),
        aggregate=update,
        download=download,
        upload=upload,
        adapt=(Phase((test,)),) if adapts else (),
        views={
            "personal": View(as_trained, to_predict),
            "global": View(lambda received, _: begun(received), to_predict),
        },
        metadata=Metadata(
            {
                **source.metadata,
                **({SATURATED: RUNAWAY} if q.random else {}),
                **({} if prune is None else {"*": SPARSE}),
                **({both: INCOMPARABLE} if warm_up(elapsed) < 1 else {}),
            },
            statistics=statistics,
            reads={"model": model, "guide": q},
        ),
    )


def layer_before_output(net: Network) -> str:
    """Return the parameter name of the last hidden layer's weight, or else the only layer's."""
    weights = [n for n, shape in net.shapes.items() if len(shape) > 1]
    return (weights or list(net.shapes))[-2:][0]
