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
        ("a posterior for each client", "fedhb  fedwba"),
    )),
    ("rough uncertainty enough?", (
        ("clients of unequal size", "pfedvem"),
        ("few rows", "pfedbayes  pfedgp"),
        ("new clients join often", "fedabml  metavd  amortized"),
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


WIDTH = 5.4  # inches: 390 px of a telephone show the text in its size of 10 points


def which() -> bytes:
    """Draw the figure as SVG: one column, so that it can be read on a telephone."""
    lines = sum(len(answers) + 1.9 for _, answers in QUESTIONS) - 0.9
    figure = style.canvas(WIDTH, 0.23 * lines)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(-lines, 0))
    axes.set_axis_off()
    look: dict[str, Any] = {"va": "center", "fontsize": 10}
    y = -0.6
    for i, (question, answers) in enumerate(QUESTIONS):
        _box(axes, y, question)
        yes = "" if question.startswith("how") else "yes:"
        axes.text(3.0, y, yes, color="#444444", **look)
        for answer, methods in answers:
            y -= 1
            axes.text(0.35, y - 0.1, answer, **look)
            axes.text(3.0, y - 0.1, methods, weight="bold", color="#00548a", **look)
        if i + 1 < len(QUESTIONS):
            arrow = {"arrowstyle": "-|>", "color": "#666666"}
            axes.annotate("", (0.15, y - 1.35), (0.15, y + len(answers) - 0.5), arrowprops=arrow)
            words = ("no", "no uncertainty needed", "no: a model for each client")[i]
            axes.text(0.35, y - 1.05, words, style="italic", color="#444444", **look)
        y -= 1.9
    file = BytesIO()
    figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})
    return file.getvalue()


def _box(axes: Any, y: float, words: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    look: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.1", "ec": "none"}
    look |= {"fc": style.COLORS[0], "mutation_aspect": 4}
    axes.add_patch(FancyBboxPatch((0.05, y - 0.5), 2.75, 1.0, **look))
    axes.text(0.15, y, words, va="center", color="white", fontsize=10)
