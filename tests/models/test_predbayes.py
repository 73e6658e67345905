"""beta-PredBayes: products and mixtures by hand, beta, and what the student learns."""

from __future__ import annotations

import torch
import toys
from checks import close
from promises import Promises
from toys import last

from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.models import fedavg, predbayes
from pyrofl.models.shared import distillation
from pyrofl.nets import build
from pyrofl.tensors import generator, role

S = 5
X = toys.blobs().x[-30:]
PROMISES = {
    "predbayes": Promises(
        together="*",
        message=(S * toys.ALL, toys.ALL),
        settings={"server_data": X},
        rises=frozenset({"w/*"}),
        any_number="sample/*",
        numbers=False,
    )
}
QUICK: dict[str, object] = {"server_data": X, "distil_epochs": 5, "samples": 2, "epochs": 2}


def test_products_and_mixtures_by_hand():
    each = torch.tensor([[[0.7, 0.2, 0.1]], [[0.2, 0.3, 0.5]]])
    product = torch.tensor([0.14, 0.06, 0.05]) / 0.25
    mixture = torch.tensor([0.45, 0.25, 0.3])
    close(predbayes.interpolate_predictions(each, 1.0).exp()[0], product, 1e-6)
    close(predbayes.interpolate_predictions(each, 0.0).exp()[0], mixture, 1e-6)
    halfway = (product * mixture).sqrt()
    close(predbayes.interpolate_predictions(each, 0.5).exp()[0], halfway / halfway.sum(), 1e-6)
    sure = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    assert predbayes.interpolate_predictions(sure, 1.0).isfinite().all()


def test_clients_that_agree_are_too_sure_together():
    each = torch.tensor([0.8, 0.2]).expand(10, 1, 2)
    assert float(predbayes.interpolate_predictions(each, 1.0).exp()[0, 0]) > 0.999
    close(predbayes.interpolate_predictions(each, 0.0).exp()[0, 0], 0.8, 1e-6)


def test_beta_is_where_the_loss_is_least():
    rng = generator(5)
    each = torch.randn(4, 200, 3, generator=rng, dtype=torch.float64).softmax(-1)
    truth = predbayes.interpolate_predictions(each, 0.3).exp()
    y = torch.multinomial(truth, 1, generator=rng).squeeze(1)

    def loss(beta: float) -> float:
        return -float(predbayes.interpolate_predictions(each, beta).gather(1, y[:, None]).mean())

    found = float(predbayes.tune_beta(each, y))
    assert 0.05 < found < 0.6
    assert loss(found) < min(loss(found + 0.01), loss(found - 0.01))
    sharp = predbayes.interpolate_predictions(each, 1.0).argmax(-1)
    close(predbayes.tune_beta(each, sharp), 1.0, 1e-6)
    dull = predbayes.interpolate_predictions(each, 1.0).argmin(-1)
    close(predbayes.tune_beta(each, dull), 0.0, 1e-6)


def test_the_mixture_of_points_is_fedbes_ensemble(tiny):
    net, x = build("mlp:5", (4,), 3), torch.randn(9, 4, generator=generator(1)).double()
    models = {
        n: torch.randn(3, 1, *s, generator=generator(2)).double() for n, s in net.shapes.items()
    }
    found = predbayes.ensemble(net, {f"sample/{n}": v for n, v in models.items()}, x, 0.0)
    teachers = {n: v[:, 0] for n, v in models.items()}
    close(found, distillation.predictions(net, teachers, x).mean(0))


def test_without_a_chain_and_a_teacher_it_is_fedavg(tiny):
    net, x = build("mlp:5", (4,), 3), torch.randn(9, 4, generator=generator(1)).double()
    still = predbayes.build(
        net, server_data=x, chain_lr=0.0, temperature=0.0, distil_epochs=0, prior=fedavg.flat
    )
    plain = last(fedavg.build(net, lr=0.05), tiny, 1)
    state = last(still, tiny, 1)
    for n in net.shapes:
        close(state.message[f"sample/{n}"][:, 2], plain.message[f"w/{n}"])


def test_the_student_learns_what_the_ensemble_predicts(blobs):
    method = predbayes.build(toys.net(), server_data=X, samples=3)
    state = last(method, blobs, 1)
    taught = predbayes.ensemble(toys.net(), state.message, X, 0.5)
    start = first(method, blobs, 0).server
    apart = []
    for server in (start, state.server):
        models = {n: v[None] for n, v in role("w", server).items()}
        told = distillation.predictions(toys.net(), models, X)[0]
        apart.append(float((taught * (taught.log() - told.log())).sum(-1).mean()))
    assert apart[1] < 0.05 < apart[0]


def test_beta_is_found_on_rows_with_labels(blobs):
    rows = torch.cat(blobs.test)
    method = predbayes.build(toys.net(), tuning=(blobs.x[rows], blobs.y[rows]), **QUICK)
    state = run_round(method, blobs, first(method, blobs, 0), *[torch.arange(12)] * 2)
    each = predbayes.each_predicts(toys.net(), role("sample", state.message), blobs.x[rows])
    close(state.server["server/beta"], predbayes.tune_beta(each, blobs.y[rows]))
