"""Can a figure be read?"""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def overlaps(figure: Figure) -> list[str]:
    """Return the labels of ticks that touch the next one, or leave the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, found = canvas.get_renderer(), []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [t.label1 for t in axis.get_major_ticks() if t.label1.get_visible()]
            labels = [label for label in labels if label.get_text()]
            boxes = [label.get_window_extent(renderer) for label in labels]
            found += [b.get_text() for a, b, c, d in _pairs(labels, boxes) if c.overlaps(d)]
        box = axes.get_tightbbox(renderer)
        if min(*box.min) < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1:
            found.append(f"axes {axes.get_xlabel()}")
    return found


def _pairs(labels, boxes):
    return zip(labels, labels[1:], boxes, boxes[1:], strict=False)
