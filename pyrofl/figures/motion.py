"""Animated figures: with a slider in notebooks and HTML pages, a still image elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING, Any

from pyrofl.figures.style import canvas, pt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Moving", "moving"]

# What stands on matplotlib's buttons instead of pictures from a font that it fetches.
BUTTON_SYMBOLS = {
    "fa-minus": "-",
    "fa-fast-backward": "|◀",
    "fa-step-backward": "&lt;",
    "fa-play fa-flip-horizontal": "◀",
    "fa-pause": "❚❚",
    "fa-play": "▶",
    "fa-step-forward": "&gt;",
    "fa-fast-forward": "▶|",
    "fa-plus": "+",
}


@dataclass(frozen=True)
class Moving:
    """Animated figure: notebooks show its frames with a slider; in print, only the last one.

    Attributes:
        draw: (axes, frame) -> None draws one frame on empty axes, with labels and limits.
        frames: what `draw` is called with, one after the other.
        size: width and height in inches.
        title: frame -> what stands above it.
    """

    draw: Callable[[Axes, Any], None]
    frames: Sequence[Any]
    size: tuple[float, float] = (6.0, 3.5)
    title: Callable[[Any], str] = "round {}".format

    def still(self, frame: Any = None) -> Figure:
        """Return one frame of the animation as a figure, by default the last."""
        figure = canvas(*self.size)
        self._draw_with_title(figure.add_subplot(), self.frames[-1] if frame is None else frame)
        return figure

    @cached_property
    def html(self) -> str:
        """Return the animation's frames with a slider, as HTML without external files."""
        from matplotlib.animation import FuncAnimation

        figure = canvas(*self.size)
        axes = figure.add_subplot()

        def shown(frame: Any) -> tuple[()]:
            axes.clear()
            self._draw_with_title(axes, frame)
            return ()

        shown(self.frames[-1])
        moving = FuncAnimation(figure, shown, frames=self.frames, interval=400, blit=False)
        page = re.sub(r"<link[^>]*>", "", moving.to_jshtml(default_mode="once"))
        return re.sub(r'<i class="fa ([^"]+)"></i>', lambda icon: BUTTON_SYMBOLS[icon[1]], page)

    def _draw_with_title(self, axes: Axes, frame: Any) -> None:
        self.draw(axes, frame)
        axes.set_title(self.title(frame), loc="left", fontsize=pt(10))

    def _repr_html_(self) -> str:
        return self.html

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.still().savefig(file, format="png", dpi=100)
        return file.getvalue()


def moving(draw: Callable[[Axes, Any], None], frames: Sequence[Any], **how: Any) -> Moving:
    """Build an animated figure from a function `draw(axes, frame)` and the frames.

    Args:
        draw: draws one frame on empty axes; it sets labels and limits itself.
        frames: what `draw` is called with, such as range(rounds + 1).
        how: size in inches and title (frame -> text) of `Moving`.

    Raises:
        ValueError: if there is no frame.
    """
    if not len(frames):
        raise ValueError("frames is empty; expected at least one, such as range(rounds + 1)")
    return Moving(draw, frames, **how)
