"""Figures of a lesson for its slides: its code is run, and the figures of each cell are kept."""

from __future__ import annotations

import ast
import warnings
from base64 import b64encode
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from typing import Any

from pyrofl import figures
from pyrofl.cli.output.notebooks import tags

DPI = 110


def run_cells(notebook: Any) -> None:
    """Run a lesson up to its exercises, and attach figures and printed text of each cell.

    Outputs are those of nbformat: figures with the data "image/png", in the type of slides, and a
    stream of text, with the value of the last expression if it is a table.

    Raises:
        Exception: any that the code of the lesson raises.
    """
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    with figures.theme("slides"), warnings.catch_warnings():
        for cell in notebook.cells:
            if cell["cell_type"] == "markdown":
                if f"\n{cell['source']}".find("\n## Ex") >= 0:
                    return
                continue
            if tags(cell) & {"solution", "test", "remove-cell"}:
                continue
            warnings.simplefilter("ignore")  # such as that plt.show() opens no window
            with redirect_stdout(StringIO()) as printed:
                cell["outputs"] = [_output(figure) for figure in _figures(cell["source"], names)]
            stream = {"output_type": "stream", "name": "stdout", "text": printed.getvalue()}
            cell["outputs"].append(stream)
            plt.close("all")


def _figures(source: str, names: dict[str, Any]) -> Iterator[Any]:
    """Run a cell, and yield the figures that a notebook would show below it."""
    import matplotlib.pyplot as plt

    lines = [line for line in source.splitlines() if not line.startswith("%")]
    *statements, last = ast.parse("\n".join(lines)).body or [ast.Pass()]
    shown = last if isinstance(last, ast.Expr) else None
    rest = statements if shown else [*statements, last]
    exec(compile(ast.Module(rest, []), "<lesson>", "exec"), names)
    value = None
    if shown:
        value = eval(compile(ast.Expression(shown.value), "<lesson>", "eval"), names)
    yield from map(plt.figure, plt.get_fignums())
    if isinstance(value, figures.Moving):
        yield value.still()
    elif hasattr(value, "savefig"):
        yield value
    elif value is not None and hasattr(value, "to_string"):
        print(value.to_string())


def _output(figure: Any) -> dict[str, Any]:
    """Return a figure as an output of a notebook's cell."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    data = {"image/png": b64encode(file.getvalue()).decode()}
    return {"output_type": "display_data", "data": data, "metadata": {}}
