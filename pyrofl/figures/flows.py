"""Diagrams of what server and clients of a method store, and what they send to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyrofl.data.tables.wording import number_of
from pyrofl.figures import style
from pyrofl.figures.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["data_flow"]

FIGURE_WIDTH = 9.6  # inches
LINE, ARROW = 0.23, 0.47  # inches from one line of text, or one arrow, to the next
SERVER, CLIENT = (0.05, 2.75), (6.75, 9.45)  # ends of the boxes, in inches
MAX_LISTED_PARTS = 6  # parts that a list names
MIN_ARROW_BYTES = 1_000  # bytes of the widest arrow, at least
MAX_LETTERS = 26  # of the name of a part
UP, DOWN = COLORS[1], COLORS[0]


def data_flow(flow: Any, ax: Axes | None = None) -> Figure:
    """Draw what server and clients store, and what they send to each other, with its size.

    Arrows to the right are messages to each client, arrows to the left those from each client;
    their width grows with their bytes.

    Args:
        flow: what `pyrofl.get_data_flow` returns.
        ax: where to draw; None makes a figure.
    """
    here = ["**Stored**", *_listed(flow.server)]
    there = ["**Training data, never sent**", _rows(flow)]
    there += ["**Stored, not sent**", *_listed(flow.stays)]
    if flow.stored:
        there += ["**Stored and sent**", *_listed(flow.stored)]
    messages = [
        ("Once, before round 1", _arrows(flow.once, UP)),
        ("In every round", [*_arrows(flow.down, DOWN), *_arrows(flow.up, UP)]),
    ]
    lines = 0.15 + LINE * max(len(here), len(there))
    arrows = sum(LINE + 0.12 + ARROW * max(1, len(of)) for _, of in messages)
    tall = max(lines, arrows) + 0.5
    more = style.pt(1) ** 0.5  # as texts have to fit into the boxes
    figure, axes = style.one_panel(more * FIGURE_WIDTH, more * tall, ax, grid=None)
    axes.set(xlim=(0, FIGURE_WIDTH), ylim=(0, tall))
    axes.set_axis_off()
    clients = f"Each of {flow.clients:,} clients" if flow.clients > 1 else "One client"
    _box(axes, SERVER, tall, "Server", here, DOWN)
    _box(axes, CLIENT, tall, clients, there, UP, copies=min(flow.clients, 3))
    top, most = tall - 0.17, max(max(each) for _, of in messages for _, _, each, _ in of)
    for title, parts in messages:
        top = _messages(axes, top, title, parts, most)
    down, up = (_size(_each(parts)) for parts in (flow.down, flow.up))
    name = f"{flow.name}: " if flow.name else ""
    told = f"{name}each client receives {down} and sends {up} in a round"
    if flow.first_round:
        down, up = flow.first_round
        told += f" (in round 1, all clients: {down:,} bytes down, {up:,} up)"
    return style.titled(figure, told, ax)


def _arrows(parts: Sequence[Any], color: str) -> list[tuple[str, int, Sequence[int], str]]:
    """Return name, numbers, bytes of each client and color of the arrow of each part."""
    shown, rest = parts[:MAX_LISTED_PARTS], parts[MAX_LISTED_PARTS:]
    arrows = [(style.short(p.role, 34), p.numbers, p.bytes, color) for p in shown]
    if rest:
        numbers = sum(part.numbers for part in rest)
        arrows.append((f"and {len(rest)} more", numbers, _each(rest), color))
    return arrows


def _listed(parts: Sequence[Any]) -> list[str]:
    """Return a line for each part with its numbers; the last line counts those without room."""
    shown = parts if len(parts) <= MAX_LISTED_PARTS else parts[: MAX_LISTED_PARTS - 1]
    texts = []
    for part in shown:
        each = ", for all clients" if part.per_client else ""
        texts.append(f"{style.short(part.role, MAX_LETTERS)}: {_numbers(part.numbers)}{each}")
    if rest := parts[len(shown) :]:
        texts.append(f"and {len(rest)} more: {_numbers(sum(part.numbers for part in rest))}")
    return texts or ["nothing"]


def _numbers(count: int) -> str:
    return number_of(count, "number")


def _rows(flow: Any) -> str:
    """Return how many rows of how many numbers a client has."""
    few, many = flow.rows
    rows = f"{few:,}" if few == many else f"{few:,} to {many:,}"
    return f"{rows} row{'s' * (rows != '1')} of {flow.row_numbers:,} numbers"


def _each(parts: Sequence[Any]) -> list[int]:
    """Return the bytes of all parts together, for each client."""
    return [sum(sizes) for sizes in zip(*(part.bytes for part in parts), strict=True)] or [0]


def _size(sizes: Sequence[int]) -> str:
    """Return the fewest and the most bytes as text, in megabytes if there are many."""
    few, many = min(sizes), max(sizes)
    scale, unit = (1e6, "MB") if many >= 1e7 else (1, "bytes")
    shown = [f"{v / scale:,.1f}" if scale > 1 else f"{v:,}" for v in (few, many)]
    return f"{' to '.join(dict.fromkeys(shown))} {unit}"


def _box(
    axes: Axes,
    ends: tuple[float, float],
    tall: float,
    title: str,
    lines: Sequence[str],
    color: str,
    copies: int = 1,
) -> None:
    """Draw a box with a title and lines of text; `**lines**` are headings."""
    from matplotlib.patches import Rectangle

    left, right = ends
    look: dict[str, Any] = {"fc": "white", "ec": color, "lw": 1.4}
    for k in reversed(range(copies)):
        corner = (left + 0.05 * k, 0.16 - 0.05 * k)
        axes.add_patch(Rectangle(corner, right - left, tall - 0.2, zorder=2 - 0.1 * k, **look))
    words: dict[str, Any] = {"va": "center", "zorder": 3}
    top = tall - 0.27
    place = (left + right) / 2, top
    axes.text(
        *place, title, ha="center", fontsize=style.pt(11), weight="bold", color=color, **words
    )
    for i, line in enumerate(lines):
        is_heading = line.startswith("**")
        at = (left + (0.12 if is_heading else 0.25), top - 0.1 - LINE * (i + 1))
        size = style.pt(9)
        weight = "bold" if is_heading else "normal"
        axes.text(*at, style.plain(line.strip("*")), fontsize=size, weight=weight, **words)


def _messages(axes: Axes, top: float, title: str, parts: Sequence[Any], most: int) -> float:
    """Draw the messages of one occasion below each other; return where the next one begins."""
    left, right = SERVER[1] + 0.15, CLIENT[0] - 0.15
    middle = (left + right) / 2
    words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": style.pt(9)}
    axes.text(middle, top - 0.1, title, **words | {"weight": "bold", "fontsize": style.pt(10)})
    top -= LINE + 0.12
    for name, numbers, sizes, color in parts:
        ends = (left, right) if color == DOWN else (right, left)
        wide = 1 + 5 * max(sizes) / max(most, MIN_ARROW_BYTES)
        arrow = {"arrowstyle": "-|>,head_width=0.35,head_length=0.6", "color": color, "lw": wide}
        arrow |= {"shrinkA": 0, "shrinkB": 0, "mutation_scale": 12}
        axes.annotate("", (ends[1], top - 0.2), (ends[0], top - 0.2), arrowprops=arrow)
        label = f"{name}: {_numbers(numbers)}, {_size(sizes)}"
        axes.text(middle, top, style.plain(label), **words)
        top -= ARROW
    if not parts:
        axes.text(middle, top, "nothing", **words)
        top -= ARROW
    return top
