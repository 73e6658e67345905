"""Reference inference: the same Pyro program with all clients pooled, and what federation costs.

A user's program is written once, for clients that each hold their own copy of what all share:

    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            theta = pyro.sample("theta", dist.Normal(mu, 10.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)

Here it runs on one batch of all clients, and a site named in `shared` is sampled once for all of
them. Sites outside `batch.clients()` are sampled once in any case.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
from pyro.infer import MCMC, NUTS, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal

from pyrofl.data import Federation
from pyrofl.inference.elbo import Program
from pyrofl.inference.joint import Dims, alone, joined
from pyrofl.inference.method import Method
from pyrofl.inference.state import Round

if TYPE_CHECKING:
    import pandas
    import xarray


def nuts(
    model: Method | Program,
    data: Federation,
    draws: int = 1000,
    warmup: int = 1000,
    chains: int = 4,
    seed: int = 0,
    *,
    state: Round | None = None,
    shared: str | None = None,
    dims: Dims | None = None,
    jit: bool = False,
    **options: Any,
) -> Any:
    """Draw from the joint posterior of all clients by Pyro's NUTS, one chain after the other.

    Args:
        model: a program (received, local, batch), or a method for its model.
        data: the federation; draws have its floating-point type, and float64 is worth its time.
        draws: of each chain.
        warmup: steps of each chain before them.
        chains: how many.
        seed: fixes all random numbers.
        state: a round of the method, for a model that reads what the server or the client holds.
        shared: patterns of the sites that all clients share; default the method's, or none.
        dims: site -> names of its axes; default "SITE_dim_0" and so on.
        jit: compile the density: about three times faster, for programs whose Python control
            flow depends on no latent value.
        options: of `pyro.infer.NUTS`, such as target_accept_prob.

    Returns:
        What `Run.to_arviz` gives: a posterior with dims chain, draw, client (not for shared sites)
        and the site's own, with the model's deterministic sites; sample_stats tell divergences.

    Raises:
        ValueError: if a number is less than 1, the model reads what it is not given, the prior of a
            shared site differs between clients, or a latent site lies inside `batch.rows()`.
    """
    if min(draws, chains) < 1 or warmup < 0 or seed < 0:
        raise ValueError(
            f"draws is {draws}, chains {chains}, warmup {warmup}, seed {seed}; expected at least "
            "1, 1, 0 and 0"
        )
    program = joined(model, data, state, seed, shared)
    found, diverging = [], np.zeros((chains, draws), dtype=bool)
    for chain in range(chains):
        with alone(data, seed, chain), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.trace` is deprecated", FutureWarning)
            kernel = NUTS(program, jit_compile=jit, ignore_jit_warnings=True, **options)
            sampler = MCMC(kernel, draws, warmup_steps=warmup, disable_progbar=True)
            sampler.run()
        found.append(sampler.get_samples())
        diverging[chain, sampler.diagnostics()["divergences"]["chain 0"]] = True
    with alone(data, seed):
        return program.gathered(found, dims, {"diverging": diverging})


def centralised(
    model: Method | Program,
    data: Federation,
    draws: int = 1000,
    seed: int = 0,
    *,
    guide: Callable[..., Any] = AutoMultivariateNormal,
    steps: int = 2000,
    lr: float = 0.02,
    particles: int = 16,
    state: Round | None = None,
    shared: str | None = None,
    dims: Dims | None = None,
) -> Any:
    """Fit the joint posterior of all clients by SVI with an automatic guide, and draw from it.

    Between NUTS and a federated fit it tells the price of the guide from that of federation.

    Args:
        model: as in `nuts`, as are data, seed, state, shared and dims.
        data: the federation.
        draws: from the guide.
        seed: fixes all random numbers.
        guide: makes an automatic guide of a model.
        steps: of Adam, whose learning rate falls to zero.
        lr: its learning rate at first.
        particles: Monte Carlo draws of the ELBO.
        state: a round of the method.
        shared: patterns of shared sites.
        dims: names of axes.

    Returns:
        As `nuts`, with one chain; sample_stats hold nothing but the last loss.

    Raises:
        ValueError: as `nuts`.
    """
    if min(draws, steps, particles) < 1 or seed < 0:
        raise ValueError(
            f"draws is {draws}, steps {steps}, particles {particles}, seed {seed}; expected at "
            "least 1, 1, 1 and 0"
        )
    program = joined(model, data, state, seed, shared)
    with alone(data, seed), pyro.settings.context(module_local_params=True):
        q = guide(program)
        elbo: Any = Trace_ELBO(particles, max_plate_nesting=2, vectorize_particles=True)
        bound = elbo(program, q)
        bound()  # makes the guide's parameters
        optimiser = torch.optim.Adam(bound.parameters(), lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            optimiser.zero_grad()
            loss = bound()
            loss.backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            parts = [q() for _ in range(draws)]
        sites = {n: torch.stack([part[n] for part in parts]) for n in parts[0]}
        return program.gathered([sites], dims, {"loss": np.full((1, draws), loss.item())})


def pooled(data: Federation) -> Federation:
    """Return a federation of one client that holds all training clients' rows."""
    rows = [torch.cat(part[: data.clients]) for part in (data.train, data.test)]
    return replace(
        data, train=(rows[0].unique(),), test=(rows[1].unique(),), names=("all",), held_out=0
    )


def cost(federated: Any, reference: Any, group: str = "posterior") -> pandas.DataFrame:
    """Compare two posteriors, variable by variable and coordinate by coordinate.

    Args:
        federated: what `Run.to_arviz` gives.
        reference: what `nuts` gives; only what both hold is compared.
        group: of the data.

    Returns:
        A row for each coordinate, named as in `arviz.summary`, with columns variable; mean, sd,
        low and high, the ends of the central 95%; the same of the reference, as reference_mean and
        so on; difference of the means in reference sds; ratio of the sds; and energy, the distance
        (2 E|X - Y| - E|X - X'| - E|Y - Y'|)^1/2 in reference sds: 0 for equal distributions, 0.05
        is small, 1 is large.

    Raises:
        ValueError: if no variable is in both, or their axes or labels differ.
    """
    import pandas
    from scipy.stats import energy_distance

    mine, other = (_dataset(one, group) for one in (federated, reference))
    common = [n for n in mine.data_vars if n in other.data_vars]
    if not common:
        raise ValueError(
            f"variables are {', '.join(map(str, mine))} and {', '.join(map(str, other))}; "
            "expected at least one in both"
        )
    rows = {}
    for name in map(str, common):
        x, y = (one[name].stack(sample=("chain", "draw")) for one in (mine, other))
        axes = [d for d in x.dims if d != "sample"]
        if set(axes) != set(y.dims) - {"sample"} or any(
            x[d].values.tolist() != y[d].values.tolist() for d in axes
        ):
            raise ValueError(f"{name}: axes are {x.dims} and {y.dims}; expected the same labels")
        for place in np.ndindex(*(x.sizes[d] for d in axes)):
            at = dict(zip(axes, place, strict=True))
            a, b = (one.isel(at).to_numpy().astype(float) for one in (x, y))
            labels = ", ".join(str(x[d].values[i]) for d, i in at.items())
            found, known = _summary(a), _summary(b)
            a, b = ((v - known["mean"]) / known["sd"] for v in (a, b))
            rows[f"{name}[{labels}]" if labels else name] = {
                "variable": name,
                **found,
                **{f"reference_{n}": v for n, v in known.items()},
                "difference": a.mean(),
                "ratio": found["sd"] / known["sd"],
                "energy": energy_distance(a, b),
            }
    return pandas.DataFrame.from_dict(rows, orient="index")


def _summary(draws: np.ndarray) -> dict[str, float]:
    """Return mean, standard deviation and the ends of the central 95% of draws [S]."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": draws.mean(), "sd": draws.std(ddof=1), "low": low, "high": high}


def _dataset(data: Any, group: str) -> xarray.Dataset:
    """Return one group of an InferenceData or a DataTree."""
    found = data[group]
    dataset: xarray.Dataset = found.to_dataset() if hasattr(found, "to_dataset") else found
    return dataset
