"""The decision figure: the needed result, and how clients differ, lead to a method."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from pyrofl.figures import style

QUESTIONS = (
    ("calibrated intervals needed?", (
        ("a hierarchical program", "likelihood_factors"),
        ("the same, in one round", "two_stage  conjugate"),
        ("one posterior; full covariance", "pvi  fedep  fedlap"),
        ("one posterior, as a Markov chain", "fald"),
        ("one or few rounds; full covariance", "fisher  fola"),
        ("a posterior for each client", "fedhb"),
    )),
    ("rough uncertainty enough?", (
        ("clients of unequal size", "pfedvem"),
        ("few rows", "pfedbayes  pfedgp"),
        ("new clients join often", "fedabml  metavd"),
        ("a shared and a personal part", "virtual  fedpop"),
        ("the server has unlabeled rows", "fedbe  predbayes"),
        ("one model, many local steps", "fedpa"),
        ("wrong labels", "fedgvi"),
        ("one normal posterior of a network", "ivonadmm  fedivon"),
        ("scaled features or classes", "lrbpfl"),
    )),
    ("one model for all enough?", (
        ("clients' data are similar", "fedavg"),
        ("same clients take part repeatedly", "scaffold"),
        ("unequal amounts of work", "fedprox"),
        ("few clients report", "fedopt  fedavgm"),
    )),
    ("how do clients differ?", (
        ("same inputs, different labels", "fedrep  fedper  fedbabu"),
        ("inputs look different", "lgfedavg"),
        ("distinct or overlapping groups", "ifca  pfedmb  fedem"),
        ("unknown groups", "fedamp  fedfomo"),
        ("clients differ slightly", "ditto  pfedme  apfl"),
        ("a few gradient steps before use", "perfedavg  reptile"),
    )),
)  # fmt: skip


def which() -> bytes:
    """Draw the figure as SVG."""
    figure = style.canvas(9.6, 10.9)
    axes = figure.subplots()
    axes.set(xlim=(0, 9.6), ylim=(-27.2, 0.8))
    axes.set_axis_off()
    line = 0
    for i, (question, answers) in enumerate(QUESTIONS):
        middle = -line - (len(answers) - 1) / 2
        _box(axes, 1.35, middle, question, 2.5, style.COLOURS[0], "white")
        for j, (answer, methods) in enumerate(answers):
            y = -line - j
            axes.plot([2.6, 3.2, 3.4], [middle, y, y], color="#666666", linewidth=1)
            axes.text(3.5, y, answer, va="center", fontsize=11)
            axes.text(6.8, y, methods, va="center", fontsize=11, weight="bold", color="#00548a")
        line += len(answers) + 0.7
        if i + 1 < len(QUESTIONS):
            below = -line - (len(QUESTIONS[i + 1][1]) - 1) / 2
            look = {"arrowstyle": "-|>", "color": "#666666"}
            axes.annotate("", (1.35, below + 0.55), (1.35, middle - 0.55), arrowprops=look)
            words = ("no", "no uncertainty", "no: a model for each")[i]
            axes.text(1.45, (middle + below) / 2, words, fontsize=10, color="#444444")
    file = BytesIO()
    figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})
    return file.getvalue()


def _box(axes: Any, x: float, y: float, words: str, wide: float, face: str, ink: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    look: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.2", "fc": face, "ec": "none"}
    axes.add_patch(FancyBboxPatch((x - wide / 2, y - 0.5), wide, 1.0, **look))
    axes.text(x, y, words, ha="center", va="center", color=ink, fontsize=11)
