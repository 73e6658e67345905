"""Posterior probabilities of statements about parameters, such as "b[treat] < 0"."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyrofl.arguments import check_name
from pyrofl.inference.posteriors.export import SAMPLE_DIMS, coordinates, import_arviz
from pyrofl.inference.posteriors.summary import variable_labels

if TYPE_CHECKING:
    import pandas

FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "expit": lambda v: np.exp(-np.logaddexp(0.0, -v)),  # without overflow
    "logit": lambda v: np.log(v / (1 - v)),
}
OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
EXAMPLE = 'expected a comparison such as "b[treat] < 0" or "exp(b[dose]) > 1.1"'


def hypotheses(
    draws: Any,
    statements: str | Sequence[str],
    prob: float = 0.95,
    names: Mapping[str, str] | None = None,
) -> pandas.DataFrame:
    """Return the posterior probability of statements about parameters.

    A statement compares two expressions by < or >. Parameters have the names of `summarize`; there
    are numbers, + - * / **, parentheses, and exp, log, sqrt, abs, expit and logit.

    Args:
        draws: result of `to_arviz`.
        statements: one or several statements.
        prob: probability of the interval, whose ends are quantiles.
        names: variable -> its name in statements, as in `summarize`.

    Returns:
        A row for each statement. Columns are mean, sd and the ends of the interval of the left side
        minus the right side; probability, the share of the draws for which the statement holds;
        mcse, its Monte Carlo standard error; and evidence_ratio, probability / (1 - probability),
        which is infinite if the statement holds for all draws.

    Raises:
        ValueError: if a statement is not a comparison, a parameter is unknown, or prob is not
            between 0 and 1.
    """
    import pandas

    if not 0 < prob < 1:
        raise ValueError(f"prob is {prob}; expected a probability between 0 and 1")
    posterior = draws["posterior"]
    entries: dict[str, NDArray[Any]] = {}
    for name, label in variable_labels(posterior, names).items():
        value = posterior[name].transpose(*SAMPLE_DIMS, ...)
        for entry, at in coordinates(value.isel(dict.fromkeys(SAMPLE_DIMS, 0), drop=True)):
            entries[label + entry.removeprefix(name)] = value.values[(..., *at.values())]
    every = [statements] if isinstance(statements, str) else list(statements)
    ends = (1 - prob) / 2, (1 + prob) / 2
    rows = [_row(*_sides(one, entries), ends, _weighted_size(draws)) for one in every]
    shown = [f"{100 * end:.4g}%" for end in ends]
    columns = ["mean", "sd", *shown, "probability", "mcse", "evidence_ratio"]
    return pandas.DataFrame(rows, every, columns)


def _row(
    difference: NDArray[Any], holds: NDArray[Any], ends: tuple[float, float], size: float
) -> list[float]:
    """Return the columns of one statement, given left minus right, and where it holds."""
    share = float(holds.mean())
    cuts = np.quantile(difference, ends)
    effective = min(size, float(import_arviz().ess(holds.astype(float))), holds.size)
    mcse = (share * (1 - share) / effective) ** 0.5 if 0 < share < 1 else 0.0
    ratio = share / (1 - share) if share < 1 else np.inf
    return [difference.mean(), difference.std(ddof=1), *cuts, share, mcse, ratio]


def _weighted_size(draws: Any) -> float:
    """Return the smallest effective size of importance samples; infinity without a correction."""
    stats = draws.get("sample_stats", {})
    return float(stats["importance_ess"].min()) if "importance_ess" in stats else np.inf


def _sides(statement: str, entries: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], Any]:
    """Return left minus right of a statement at each draw, and whether it holds there."""
    names = sorted(entries, key=len, reverse=True)  # of b and b[x], the longer one first
    parameter = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, names))})(?![\w\[])")
    places = {f"parameter_{i}": name for i, name in enumerate(names)}
    of_name = {name: place for place, name in places.items()}
    text = parameter.sub(lambda match: of_name[match[0]], statement)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise ValueError(f"hypothesis {statement!r} cannot be read; {EXAMPLE}") from None
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
        raise ValueError(f"hypothesis {statement!r} is not a comparison; {EXAMPLE}")
    (comparison,) = tree.ops
    if not isinstance(comparison, ast.Lt | ast.Gt | ast.LtE | ast.GtE):
        raise ValueError(
            f"hypothesis {statement!r} is an equality, which has probability 0 for a continuous "
            f"parameter; {EXAMPLE}"
        )

    def value(node: ast.AST) -> Any:
        """Return the value of an expression at each draw."""
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.Name(id=name) if name in places:
                return entries[places[name]]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(operand))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
                check_name(name, FUNCTIONS, "function")
                return FUNCTIONS[name](value(argument))
            case ast.Name() | ast.Subscript():
                check_name(_restored(node, places), entries, "parameter")
        raise ValueError(f"hypothesis {statement!r} has {_restored(node, places)}; {EXAMPLE}")

    with np.errstate(all="ignore"):
        difference = value(tree.left) - value(tree.comparators[0])
    if not np.ndim(difference):
        raise ValueError(f"hypothesis {statement!r} has no parameter; {EXAMPLE}")
    if not np.isfinite(difference).all():
        raise ValueError(
            f"hypothesis {statement!r} is not finite at some draws, such as a logarithm of a "
            "negative value"
        )
    below = isinstance(comparison, ast.Lt | ast.LtE)
    return difference, difference < 0 if below else difference > 0


def _restored(node: ast.AST, places: Mapping[str, str]) -> str:
    """Return an expression as text with the names of parameters."""
    return re.sub(r"parameter_\d+", lambda m: places.get(m[0], m[0]), ast.unparse(node))
