"""Diagrams of Pyro models: sample sites, plates and dependencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyrofl.figures import style
from pyrofl.figures.style import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plates"]

NODE_WIDTH, NODE_HEIGHT = 2.35, 1.15  # inches from one node to the next
PLATES = {"clients": "clients j = 1 … J", "rows": r"rows i = 1 … $n_j$"}
OBSERVED_COLOR = "#d9d9d9"
TENSORS = {"server": "the server's", "client": "kept by the client"}  # kind -> in the legend
MAX_LETTERS = 22  # of a name that there is room for
NAMES_PER_LINE = 2  # names of a node's members that there is room for, in each of its lines


@dataclass
class Node:
    """Node of a model diagram: sample sites drawn together, such as a network's weights."""

    kind: str
    plates: tuple[str, ...]
    observed: bool = False
    members: list[str] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    column: int = 0
    at: tuple[float, float] = (0.0, 0.0)

    @property
    def label(self) -> str:
        """Label of the diagram node: names of its sample sites and their distribution."""
        names = [style.plain(style.short(name, MAX_LETTERS)) for name in self.members]
        if len(names) > 2 * NAMES_PER_LINE:
            names = [*names[:NAMES_PER_LINE], f"and {len(names) - NAMES_PER_LINE} more"]
        lines = [
            ", ".join(names[i : i + NAMES_PER_LINE]) for i in range(0, len(names), NAMES_PER_LINE)
        ]
        drawn = "" if self.kind in TENSORS else f"\n~ {self.kind}"
        return "\n".join(lines) + drawn.replace("~ Deterministic", "computed")


def plates(dependencies: Mapping[str, Any], ax: Axes | None = None) -> Figure:
    """Draw a model's sample sites in their plates, ordered from left to right by dependency.

    Rounded: what is drawn; gray: what is observed; boxes: tensors, of the server to the left, and
    in the plate of the clients what each keeps. Sites that are drawn alike share a node. A legend
    explains the kinds that occur.

    Args:
        dependencies: what `pyrofl.get_dependencies` returns, site -> what it is and depends on.
        ax: where to draw; None makes a figure.
    """
    nodes = _placed(_nodes(dependencies))
    columns = 1 + max(node.column for node in nodes)
    tall = max(Counter(node.column for node in nodes).values())
    more = style.pt(1) ** 0.5  # as texts have to fit into the nodes
    size = (more * (NODE_WIDTH * columns + 0.4), more * (NODE_HEIGHT * tall + 1.3))
    figure, axes = style.one_panel(*size, ax, grid=None)
    axes.set_xlim(-0.6 * NODE_WIDTH, (columns - 0.4) * NODE_WIDTH)
    axes.set_ylim(-0.75 - NODE_HEIGHT * tall / 2, NODE_HEIGHT * tall / 2 + 0.55)
    axes.set_axis_off()
    for depth, (name, words) in enumerate(PLATES.items()):
        _box(axes, [n for n in nodes if name in n.plates], words, depth)
    for node in nodes:
        for read in node.reads:
            _arrow(axes, nodes[read], node)
    for node in nodes:
        _draw(axes, node)
    _explain(axes, nodes)
    return style.titled(figure, "What each variable of the model depends on", ax)


def _nodes(dependencies: Mapping[str, Any]) -> list[Node]:
    """Group a model's sites and tensors into the nodes of a diagram, parents first."""
    numbers: dict[Any, int] = {}
    nodes: list[Node] = []
    home: dict[str, int] = {}

    def put(key: Any, node: Node, member: str) -> int:
        if key not in numbers:
            numbers[key] = len(nodes)
            nodes.append(node)
        nodes[numbers[key]].members.append(member)
        return numbers[key]

    for tensor in dict.fromkeys(n for s in dependencies.values() for n in s.reads if " " in n):
        place, _, name = tensor.partition(" ")
        role = name.partition("/")[0]
        if (place, role) not in numbers:
            plates = ("clients",) if place == "client" else ()
            put((place, role), Node(place, plates), role)
        home[tensor] = numbers[place, role]
    for name, site in dependencies.items():
        reads = tuple(dict.fromkeys(home[n] for n in site.reads if n in home))
        of = (site.distribution, site.plates, site.observed)
        alone = "" if "." in name else name  # a network's weights are many, and drawn alike
        home[name] = put((*of, reads, alone), Node(*of, [], [*reads]), name)
    return nodes


def _placed(nodes: list[Node]) -> list[Node]:
    """Assign each diagram node a column right of its parents, and a height in the column."""
    has_client = any(node.kind == "client" for node in nodes)
    for node in nodes:
        before = [nodes[i].column for i in node.reads]
        inside = "clients" in node.plates
        least = inside + (inside and has_client and node.kind != "client")
        node.column = max([least, *(c + 1 for c in before)])
    last = max((n.column for n in nodes if "rows" not in n.plates), default=0)
    for node in nodes:
        if "rows" in node.plates:
            node.column = max(node.column, last + 1)
    if all(node.column for node in nodes):
        for node in nodes:
            node.column -= 1
    _spread_out(nodes)
    return nodes


def _spread_out(nodes: Iterable[Node]) -> None:
    """Set node heights in each column of a diagram; nodes with long arrows are placed lowest."""
    nodes = list(nodes)
    reach = [
        max((n.column - node.column for n in nodes if i in n.reads), default=0)
        for i, node in enumerate(nodes)
    ]
    for column in {node.column for node in nodes}:
        own = sorted((i for i, n in enumerate(nodes) if n.column == column), key=lambda i: reach[i])
        for place, i in enumerate(own):
            nodes[i].at = (NODE_WIDTH * column, NODE_HEIGHT * ((len(own) - 1) / 2 - place))


def _box(axes: Axes, nodes: list[Node], words: str, depth: int) -> None:
    """Draw a plate of a model as a box around its nodes, with a label below them."""
    from matplotlib.patches import FancyBboxPatch

    if not nodes:
        return
    left, right = (f(n.at[0] for n in nodes) for f in (min, max))
    low, high = axes.get_ylim()
    low, high = low + 0.05 + 0.28 * depth, high - 0.05 - 0.14 * depth
    pad = 0.56 - 0.09 * depth
    corner, size = (left - pad * NODE_WIDTH, low), (right - left + 2 * pad * NODE_WIDTH, high - low)
    look: dict[str, Any] = {"fc": "none", "ec": "#666666", "lw": 1.2}
    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=shape, **look))
    place, look = (corner[0] + size[0] - 0.1, low + 0.07), {"ha": "right", "va": "bottom"}
    axes.text(*place, words, fontsize=style.pt(10), color="#444444", **look)


def _arrow(axes: Axes, parent: Node, child: Node) -> None:
    """Draw an arrow between two nodes of a model diagram, bent if it passes another column."""
    far = child.column - parent.column > 1
    start, end = (
        (parent.at[0] + 0.4 * NODE_WIDTH, parent.at[1]),
        (child.at[0] - 0.4 * NODE_WIDTH, child.at[1]),
    )
    look = {"arrowstyle": "-|>", "color": "#444444", "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    above, level = parent.at[1] > child.at[1], parent.at[1] == child.at[1]
    bend = 0.5 if level else -0.28 if above else 0.28
    look["connectionstyle"] = f"arc3,rad={bend if far else 0.0}"
    axes.annotate("", end, start, arrowprops=look, zorder=1)


def _draw(axes: Axes, node: Node) -> None:
    """Draw a node of a model diagram and its label."""
    from matplotlib.patches import FancyBboxPatch

    tensor = node.kind in TENSORS
    wide, tall = 0.8 * NODE_WIDTH, 0.66 * NODE_HEIGHT
    face, edge = _colors(node)
    shape = f"round,pad=0,rounding_size={0.02 if tensor else 0.36}"
    corner = (node.at[0] - wide / 2, node.at[1] - tall / 2)
    look: dict[str, Any] = {"boxstyle": shape, "fc": face, "ec": edge, "lw": 1.4, "zorder": 2}
    axes.add_patch(FancyBboxPatch(corner, wide, tall, **look))
    axes.text(*node.at, node.label, ha="center", va="center", fontsize=style.pt(10), zorder=3)


def _colors(node: Node) -> tuple[str, str]:
    """Return the fill color and the edge color of a node in a model diagram."""
    edge = {"server": COLORS[0], "client": COLORS[1]}.get(node.kind, "black")
    return OBSERVED_COLOR if node.observed else "white", edge


def _explain(axes: Axes, nodes: list[Node]) -> None:
    """Draw a legend of the kinds of nodes above a model diagram."""
    kinds = {TENSORS.get(n.kind, "observed" if n.observed else "drawn"): n for n in nodes}
    for words in ("the server's", "kept by the client", "drawn", "observed"):
        if words in kinds:
            face, edge = _colors(kinds[words])
            mark = "s" if kinds[words].kind in TENSORS else "o"
            axes.plot([], [], mark, label=words, mfc=face, mec=edge, markersize=9)
    look: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 4}
    axes.legend(frameon=False, fontsize=style.pt(9), handletextpad=0.2, columnspacing=1.2, **look)
