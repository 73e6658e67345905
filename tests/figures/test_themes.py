"""Every figure of the gallery has a title, and can be read on a page and on a slide."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pictures import overlaps, title
from promises import others_slow

from pyrofl import figures

GALLERY = Path(__file__).parents[2] / "examples" / "docs" / "gallery"
SCRIPTS = sorted(path.stem for path in GALLERY.glob("*.py"))
WITHOUT_AXES = ("data_flow", "plates", "simplex")  # diagrams


@pytest.mark.parametrize("theme", ["page", "slides"])
@pytest.mark.parametrize(
    "name", others_slow(SCRIPTS, ("comparison", "data_flow", "forest", "ranks"))
)
def test_figures_have_a_title_labels_and_room(name, theme):
    with figures.theme(theme):
        figure = runpy.run_path(str(GALLERY / f"{name}.py"))["figure"]
        assert overlaps(figure) == []
    assert len(title(figure)) > 10
    if name not in WITHOUT_AXES:
        labels = [figure.get_supxlabel(), *(axes.get_xlabel() for axes in figure.axes)]
        labels += [axes.get_xlabel() for part in figure.subfigs for axes in part.axes]
        assert any(labels)


def test_a_title_is_not_cut_off_if_a_figure_is_saved_tightly():
    figure = runpy.run_path(str(GALLERY / "data_flow.py"))["figure"]
    FigureCanvasAgg(figure).draw()
    box = figure.get_tightbbox()
    (text,) = figure.texts
    assert box.y1 * figure.dpi >= text.get_window_extent().y1
