"""Can a figure be read?"""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def overlaps(figure: Figure) -> list[str]:
    """Return texts that touch another one or leave the figure: ticks, title, labels, legend."""
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
    legends = [legend.get_window_extent(renderer) for legend in figure.legends]
    found += [f"legend {box}" for box in legends if not _inside(box, figure)]
    for text in [*_titles(figure), *_shared_labels(figure)]:
        box = text.get_window_extent(renderer)
        if not _inside(box, figure) or any(box.overlaps(legend) for legend in legends):
            found.append(text.get_text())
    for axes in figure.axes:
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            box = text.get_window_extent(renderer)
            if text.get_text() and any(box.overlaps(legend) for legend in legends):
                found.append(text.get_text())
    return found


def _inside(box, figure: Figure) -> bool:
    end = figure.bbox
    return min(*box.min) >= -1 and box.x1 <= end.x1 + 1 and box.y1 <= end.y1 + 1


def _shared_labels(figure: Figure) -> list[Text]:
    labels = (figure._supxlabel, figure._supylabel)
    return [label for label in labels if label is not None and label.get_text()]


def title(figure: Figure) -> str:
    """Return the title above a figure."""
    return "".join(text.get_text() for text in _titles(figure))


def _titles(figure: Figure) -> list[Text]:
    return [text for text in figure.texts if text.get_gid() == "title"]


def _pairs(labels, boxes):
    return zip(labels, labels[1:], boxes, boxes[1:], strict=False)
