"""Pictures that move: every frame is drawn, and print shows the last one."""

from __future__ import annotations

import re

import pytest

from pyrofl import figures


def draw(axes, frame):
    axes.plot([0, 1], [0, frame])


def test_every_frame_has_a_picture_and_print_has_the_last():
    shown = figures.moving(draw, [1, 2, 5], size=(2, 1.5))
    assert len(re.findall(r"frames\[\d\] = \"data:image/png", shown._repr_html_())) == 3
    figure = shown.still()
    assert figure.axes[0].get_title(loc="left") == "round 5"
    assert list(figure.axes[0].lines[0].get_ydata()) == [0, 5]
    assert shown.still(2).axes[0].get_title(loc="left") == "round 2"
    assert shown._repr_png_().startswith(b"\x89PNG")


def test_a_page_fetches_nothing_and_its_buttons_have_signs():
    page = figures.moving(draw, [1, 2], size=(2, 1.5)).html
    assert not re.findall(r"<link|(?:src|href) *= *[\"']?http|@import|url\(", page)
    signs = re.findall(r"<button[^>]*>\s*(.*?)\s*</button>", page, re.DOTALL)
    assert len(signs) == len({*signs}) == 9
    assert not any("<" in sign for sign in signs)


def test_nothing_to_show_is_refused():
    with pytest.raises(ValueError, match="frames is empty; expected at least one"):
        figures.moving(draw, [])
