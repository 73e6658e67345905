"""Plot accuracy, error and width of a posterior against the epsilon of differential privacy.

A thousand hospitals with ten patients each fit a logistic regression by PVI. Each adds noise to the
change of its factor before sending it. The posterior does not account for this noise: its standard
deviation hardly increases while the error of its mean does. Requires pip install -e '.[privacy]'.

Run: python examples/privacy.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, figures
from pyrofl.figures.style import COLORS, LINES, MARKERS, panels, with_legend
from pyrofl.models import pvi

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with few hospitals.")
parser.add_argument("--out", type=Path, default=Path("results/privacy"))
args = parser.parse_args()

# Twenty patients per hospital, ten of them for testing, with two covariates.
hospitals, rounds = (10, 1) if args.quick else (1000, 6)
random = torch.Generator().manual_seed(0)
truth = torch.tensor([1.0, -0.5], dtype=torch.float64)
x = torch.randn(20 * hospitals, 2, generator=random, dtype=torch.float64)
y = (torch.rand(len(x), generator=random) < torch.sigmoid(x @ truth)).double()
rows = torch.arange(len(x)).split(10)
data = Federation(x, y, rows[::2], rows[1::2])
test = torch.cat(rows[1::2])


def program(received, local, batch):
    """Logistic regression with shared weights."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Bernoulli(logits=(w * batch.x).sum(-1)), obs=batch.y)


method = pvi.hierarchical(program, data, shared="w", damping=0.5, steps=4, num_particles=16)


def fitted(privacy: pyrofl.Privacy | None) -> tuple[float, float, float, float]:
    """Return epsilon, test accuracy, error of the mean and posterior standard deviation."""
    run = pyrofl.fit(method, data, rounds=rounds, privacy=privacy, progress=False)
    drawn = run.posterior(400, ids=torch.tensor([0]))["w"][:, 0]
    mean, sd = drawn.mean(0), drawn.std(0)
    right = ((x[test] @ mean > 0) == (y[test] > 0.5)).double().mean()
    epsilon = run.privacy.epsilon if run.privacy else torch.inf
    return epsilon, float(right), float((mean - truth).norm()), float(sd.norm())


# The seed makes this simulation reproducible; do not set it for noise that protects real data.
bounds = {"clip": 4.0, "delta": 1e-4, "where": "client", "seed": 0}
options = [pyrofl.Privacy(noise_multiplier=z, **bounds) for z in (2, 4, 8, 16)]
plain, *private = [fitted(privacy) for privacy in (None, *options[: 2 if args.quick else None])]
for epsilon, accuracy, error, width in (plain, *private):
    scores = f"accuracy {accuracy:.3f}, error of the mean {error:.3f}, posterior sd {width:.3f}"
    print(f"epsilon {epsilon:.2f}: {scores}")

figure, (left, right) = panels(2, 2, 4.0, 3.2, (0, 0.8), across="epsilon per hospital (delta 1e-4)")
shown = {"accuracy": left, "error of the mean": right, "posterior sd": right}
for i, (name, axes) in enumerate(shown.items(), 1):
    look = {"color": COLORS[i - 1], "label": name}
    axes.plot(
        [one[0] for one in private], [one[i] for one in private], MARKERS[i - 1] + "-", **look
    )
    axes.axhline(plain[i], ls=LINES[i], **look | {"label": f"{name}, no privacy"})
    axes.set_xscale("log")
    axes.set_xticks([one[0] for one in private], [f"{one[0]:.2g}" for one in private])
    axes.minorticks_off()
left.set_ylabel("accuracy")
right.set(yscale="log", ylabel="norm over the two weights (log odds)")
with_legend(figure, [left, right])
figures.save(figure, args.out / "privacy.png")
print(f"figure: {args.out / 'privacy.png'}")
