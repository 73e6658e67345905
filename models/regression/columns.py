"""Columns of design matrices, computed by formulae at each client with states that all agree on.

Contrasts follow from the union of the levels. The states of center, scale, standardize, poly, bs,
s, gp and mo follow from sums, extremes and counts over clients, so that each client's columns equal
its rows of the matrix that formulae makes of the pooled rows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pyrofl.data.tables.wording import listed
from pyrofl.models.regression.agreement import Report
from pyrofl.models.regression.rows import (
    Clients,
    kind_of,
    moments_of,
    quantiles,
    refuse_large,
    total,
)
from pyrofl.models.regression.smooths import (
    FUNCTIONS,
    STANDING,
    Block,
    CategorySpecific,
    Monotonic,
    Process,
    Smooth,
    codes,
    gp,
    s,
)

UNSUPPORTED = {"cr", "cc", "tp", "hsgp"}
IN_R = {
    "Surv": "censored(time, event), with entry=start or upper=bound",
    "cens": "censored(time, event), with entry=start or upper=bound",
    "cbind": "p(successes, trials)",
    "trials": "p(successes, trials)",
    "factor": "C(x)",
    "relevel": "C(x, Treatment('level'))",
    "ns": "bs(x, df=4)",
    "te": "s(x) + s(z)",
    "t2": "s(x) + s(z)",
}
"""Function in formulas of lme4, brms or survival -> how formulas of pyrofl write it."""
Namespace = Mapping[str, Any]


class Curve(NamedTuple):
    """Spline or polynomial of a variable, and the range of the variable in the training rows."""

    variable: str
    values: Callable[[pd.DataFrame], np.ndarray]
    low: float
    high: float


class Columns:
    """Columns of a right-hand side, such as "1 + x + bs(z, df=4)".

    Attributes:
        labels: names of the columns, without the intercept and offsets.
        blocks: name for sites, such as "s_x" -> columns of a term with one prior, such as s(x).
        has_intercept: whether the formula has an intercept.
    """

    def __init__(self, text: str, clients: Clients, namespace: Namespace) -> None:
        """Agree on the columns of a right-hand side.

        Raises:
            ValueError: if formulae cannot read or evaluate it, or a transform is not supported.
        """
        from formulae.environment import Environment
        from formulae.terms.terms import Intercept
        from formulae.transforms import TRANSFORMS

        self.text, self.clients = text, clients
        self.model = described(text)
        usual = {"np": np, "log": np.log, "exp": np.exp, "sqrt": np.sqrt, **STANDING}
        self._env = Environment([{**usual, **namespace}])
        calls = Environment([{**TRANSFORMS, **_contrasts()}])
        self._calls = calls.with_outer_namespace(self._env.namespace)
        self._known: dict[str, Any] = {}
        self._curves: dict[str, Curve] = {}
        for term in self.model.common_terms:
            for component in getattr(term, "components", ()):
                for call in _calls(getattr(component, "call", None)):
                    if call.callee in STANDING and (
                        call is not component.call or len(term.components) > 1
                    ):
                        raise ValueError(
                            f"{text!r} has {call} inside {term.name}; expected a term of its own"
                            f"{_in_products(call) if len(term.components) > 1 else ''}"
                        )
                    self._agree(call)
        try:
            with np.errstate(all="ignore"):
                self.model.eval(clients.padded(clients.example)[0], self._env)
        except Exception as error:
            raise ValueError(f"{text!r} cannot be evaluated: {_line(error)}") from error
        terms = self.model.common_terms
        self.has_intercept = any(isinstance(term, Intercept) for term in terms)
        self.offsets = [t for t in terms if getattr(t, "kind", "") == "offset"]
        self.terms = [t for t in terms if not isinstance(t, Intercept) and t not in self.offsets]
        self.labels = [label for term in self.terms for label in labels_of(term)]
        self.blocks = self._blocks()
        if twice := [label for label in self.labels if self.labels.count(label) > 1]:
            raise ValueError(f"{text!r} has two columns named {twice[0]}; expected distinct names")
        if clients.frames:
            self._refuse_other_rows(clients.example)

    @property
    def curves(self) -> set[str]:
        """Columns without coefficients of their own, such as those of s(x) that are no lines."""
        return {label for block in self.blocks.values() for label in block.labels}

    def _blocks(self) -> dict[str, Block]:
        """Return the terms whose columns have one prior, by names for sites."""
        blocks: dict[str, Block] = {}
        for term in self.terms:
            if not (found := block_of(term)):
                continue
            transform, variable = found
            name = transform.name + "_" + re.sub(r"\W+", "_", variable).strip("_")
            if name in blocks:
                kind = "smooth functions" if transform.name == "s" else f"terms {transform.name}()"
                raise ValueError(f"{self.text!r} has two {kind} of {variable}; expected one")
            labels, plain = labels_of(term), transform.plain
            blocks[name] = Block(transform, labels[plain:], labels[0] if plain else "")
        return blocks

    def _refuse_other_rows(self, frame: pd.DataFrame) -> None:
        """Raise ValueError if the columns of a row depend on other rows of the client."""
        whole, alone = self.evaluate(frame), self.evaluate(frame[:1])
        bad = ~np.isclose(whole[:1], alone, equal_nan=True).all(0)
        if bad.any():
            raise ValueError(
                f"{self.labels[int(bad.argmax())]} of a row depends on other rows of the client; "
                "expected functions of single rows, or center(), scale(), poly() and bs()"
            )

    def evaluate(self, frame: pd.DataFrame) -> np.ndarray:
        """Return the columns of a client's rows, [N, P], without intercept and offsets."""
        return self._evaluated(self.terms, frame)

    def offset(self, frame: pd.DataFrame) -> np.ndarray:
        """Return the sum of the offsets of a client's rows, [N]."""
        offsets: np.ndarray = self._evaluated(self.offsets, frame).sum(1)
        return offsets

    def beyond(self, frame: pd.DataFrame) -> Iterator[str]:
        """Describe the splines and polynomials of a table outside the range of training rows."""
        for text, curve in self._curves.items():
            x, rounding = curve.values(frame), 1e-9 * (curve.high - curve.low)
            low, high = getattr(self._known[text], "ends", (-np.inf, np.inf))
            if len(x) and (x.min() < low or x.max() > high):
                continue  # which the process itself refuses
            if len(x) and (x.min() < curve.low - rounding or x.max() > curve.high + rounding):
                yield (
                    f"{curve.variable} of new rows is between {x.min():.4g} and {x.max():.4g}, and "
                    f"{text} was fitted between {curve.low:.4g} and {curve.high:.4g}"
                )

    def _evaluated(self, terms: list[Any], frame: pd.DataFrame) -> np.ndarray:
        if not terms:
            return np.zeros((len(frame), 0))
        full, extra = self.clients.padded(frame)
        try:
            with np.errstate(all="ignore"):
                parts = [np.asarray(t.eval_new_data(full), dtype=np.float64) for t in terms]
        except Exception as error:
            raise ValueError(f"{self.text!r} cannot be evaluated: {_line(error)}") from error
        return np.column_stack(parts)[extra:]

    def _agree(self, call: Any) -> None:
        """Set the state of a transform to that of the rows of all clients."""
        name = str(call.callee)
        if name in UNSUPPORTED:
            raise ValueError(
                f"{name}() in {self.text!r} is not supported; expected s(), gp(), bs(), "
                "poly(), center(), scale(), standardize() or a function of single rows"
            )
        make = {
            "center": self._center,
            "scale": self._scale,
            "standardize": self._scale,
            "poly": self._poly,
            "bs": self._spline,
            "s": self._smooth,
            "gp": self._process,
            "mo": self._monotonic,
            "cs": self._specific,
        }.get(name)
        if make is None:
            return
        key = str(call)
        if key not in self._known:
            try:
                self._refuse_variable(call)
                self._known[key] = make(call)
            except Exception as error:
                raise ValueError(f"{key} cannot be evaluated: {_line(error)}") from error
        call.stateful_transform = self._known[key]

    def _refuse_variable(self, call: Any) -> None:
        """Raise ValueError unless a call has one variable, of finite numbers or levels of mo().

        Its values may be those of an expression; other arguments are no columns.
        """
        name, columns = str(call.callee), {*map(str, self.clients.template)}
        further = {n for arg in (*call.args[1:], *call.kwargs.values()) for n in _names(arg)}
        if further & columns:
            raise ValueError(
                f"{name}() takes one variable; expected a term for each, such as "
                f"{name}(x) + {name}(z), or bs(x, df=5):treat for a curve at each level of treat"
            )
        if not call.args or not columns & {*_names(call.args[0])}:
            raise ValueError(f"it has no variable; expected one, such as {name}(x)")
        if name == "mo":
            return  # levels may be text
        for site, frame in self.clients.frames.items():
            refuse_large(f"{site}: {call.args[0]}", self._values(call)(frame), frame)

    def _learn_range(self, call: Any) -> Curve:
        """Store the range of the variable of a spline or polynomial."""
        values = self._values(call)
        low, high = self.clients.agree(
            f"{call}: range",
            lambda frame: [min(x := values(frame).tolist()), max(x)],
            _outer,
        )
        self._curves[str(call)] = curve = Curve(str(call.args[0]), values, low, high)
        return curve

    def _values(self, call: Any) -> Callable[[pd.DataFrame], np.ndarray]:
        """Return the function of a table that evaluates the first argument of a call."""

        def values(frame: pd.DataFrame) -> np.ndarray:
            full, extra = self.clients.padded(frame)
            try:
                with np.errstate(all="ignore"):
                    value = call.args[0].eval(full, self._calls)
                return np.asarray(value, dtype=np.float64)[extra:]
            except (TypeError, ValueError) as error:
                texts = [n for n in _names(call.args[0]) if n in frame and is_text(frame[n])]
                if not texts:
                    raise
                raise ValueError(
                    f"column {listed(texts)} holds text; expected numbers, such as "
                    f"{call.callee}(age), or text as a term of its own: {texts[0]}"
                ) from error

        def is_text(column: pd.Series) -> bool:
            return kind_of(column) == "text"

        return values

    def _given(self, call: Any, function: Any) -> dict[str, Any]:
        """Return the arguments of a call after the first, by name."""
        first = self.clients.padded(self.clients.example)[0]
        args = [arg.eval(first, self._calls) for arg in call.args]
        kwargs = {n: arg.eval(first, self._calls) for n, arg in call.kwargs.items()}
        signature = inspect.signature(function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            known = [f"{n}={one.default}" for n, one in signature.parameters.items()][1:]
            raise ValueError(f"{error}; expected {call.callee}(x, {', '.join(known)})") from error
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])

    def _moments(self, call: Any) -> tuple[Any, Any]:
        """Return mean and mean square deviation of the first argument of a call."""
        values = self._values(call)
        name = f"{call.args[0]}: mean and spread"
        return moments_of(self.clients, name, lambda frame: {"values": values(frame)})["values"]

    def _center(self, call: Any) -> Any:
        from formulae.transforms import Center

        transform = Center()
        transform.mean, _ = self._moments(call)
        transform.params_set = True
        return transform

    def _scale(self, call: Any) -> Any:
        from formulae.transforms import Scale

        transform = Scale()
        transform.mean, square = self._moments(call)
        transform.std = np.sqrt(square)  # of each column, as of poly()
        transform.params_set = True
        return transform

    def _poly(self, call: Any) -> Any:
        """Return orthogonal polynomials, by one exchange of sums for each degree."""
        from formulae.transforms import Polynomial

        transform = Polynomial()
        arguments = self._given(call, transform.__call__)
        if arguments["degree"] < 1:
            raise ValueError(f"its degree is {arguments['degree']}; expected at least 1")
        values = self._learn_range(call).values
        for k in range(arguments["degree"] + 1):

            def sums(frame: pd.DataFrame, k: int = k) -> Report:
                """Return sums of p^2 and x p^2 of the polynomial p of degree k."""
                x = values(frame)
                p = _orthogonal(x, k, transform.alpha, transform.norms2)
                return [float((p**2).sum()), float((x * p**2).sum())]

            norm, product = self.clients.agree(f"{call}: sums of degree {k}", sums, _totals)
            transform.norms2[k], transform.alpha[k] = norm, product / norm
        return transform

    def _spline(self, call: Any) -> Any:
        """Return a B-spline basis, by extremes, quantiles and the sums of its columns."""
        from formulae.transforms import BSpline
        from formulae.utils import get_centering_matrix

        transform = BSpline()
        arguments = self._given(call, transform.__call__)
        curve = self._learn_range(call)
        for name, extreme in (("lower_bound", curve.low), ("upper_bound", curve.high)):
            if arguments[name] is None:
                arguments[name] = extreme
        center = (
            arguments["center"] if arguments["intercept"] is None else not arguments["intercept"]
        )
        if arguments["knots"] is None and arguments["df"] is not None:
            inner = arguments["df"] - arguments["degree"] - 1 + bool(center)
            parts = np.linspace(0, 1, max(inner, 0) + 2)[1:-1].tolist()
            arguments["knots"] = self._quantiles(call, curve, parts)
            arguments["df"] = (
                arguments["df"] if inner < 0 else None
            )  # formulae refuses too small a df
        transform(np.array([arguments["lower_bound"], arguments["upper_bound"]]), **arguments)
        if center:
            sums = self.clients.agree(
                f"{call}: sums of the basis",
                lambda frame: transform._eval_basis(curve.values(frame)).sum(0).tolist(),
                _totals,
            )
            transform._centering_matrix = get_centering_matrix(
                np.array(sums)[None] / self.clients.rows
            )
        return transform

    def _smooth(self, call: Any) -> Any:
        """Return a smooth function, by extremes and two exchanges of sums."""
        arguments = self._given(call, s)
        curve = self._learn_range(call)
        smooth = Smooth(curve.low, curve.high, **arguments)
        rows = self.clients.rows
        # The server computes the map, whose signs may depend on the machine.
        smooth.to_columns = np.array(
            self.clients.agree(
                f"{call}: sums of the basis",
                lambda frame: smooth.basis(curve.values(frame)).sum(0).tolist(),
                lambda reports: smooth.centered(np.array(_totals(reports)), rows).tolist(),
            )
        )
        (squares,) = self.clients.agree(
            f"{call}: sum of squares",
            lambda frame: [float((smooth(curve.values(frame))[:, 1:] ** 2).sum())],
            _totals,
        )
        smooth.to_columns[:, 1:] /= np.sqrt(squares / rows)
        return smooth

    def _process(self, call: Any) -> Any:
        """Return a Gaussian process, by extremes and one exchange of sums."""
        arguments = self._given(call, gp)
        curve = self._learn_range(call)
        process = Process(curve.low, curve.high, **arguments)
        sums = self.clients.agree(
            f"{call}: sums of the basis",
            lambda frame: process.sines(curve.values(frame)).sum(0).tolist(),
            _totals,
        )
        process.means = np.array(sums) / self.clients.rows
        return process

    def _monotonic(self, call: Any) -> Any:
        """Return a monotonic effect, by the declared order of levels or by extremes."""
        if len(call.args) != 1 or call.kwargs:
            raise ValueError("expected one variable, such as mo(stage)")
        name = str(call.args[0])
        levels = self.clients.levels.get(name, ())
        if levels and isinstance(self.clients.template[name].dtype, pd.CategoricalDtype):
            return Monotonic(0, len(levels) - 1, levels)

        def range_of_levels(frame: pd.DataFrame) -> list[float]:
            """Return the lowest and the highest level of a table; refuse fractions."""
            full, extra = self.clients.padded(frame)
            x = codes(call.args[0].eval(full, self._calls), ())[extra:]
            if (odd := x != np.round(x)).any():
                raise ValueError(
                    f"a level is {x[odd][0]:g}; expected whole numbers, or s({name}) instead of "
                    f"mo({name})"
                )
            return [float(x.min()), float(x.max())]

        low, high = self.clients.agree(f"{call}: levels", range_of_levels, _outer)
        return Monotonic(low, high)

    def _specific(self, call: Any) -> Any:
        """Return the column of a category-specific effect."""
        if len(call.args) != 1 or call.kwargs:
            raise ValueError("expected one variable, such as cs(treated)")
        return CategorySpecific()

    def _quantiles(self, call: Any, curve: Curve, parts: list[float]) -> list[float]:
        """Return quantiles of the variable of a spline, by counts up to bounds."""

        def below(bounds: np.ndarray, exchange: int) -> list[int]:
            """Return how many rows of all clients have values up to each bound."""

            def counts(frame: pd.DataFrame) -> Report:
                return np.searchsorted(np.sort(curve.values(frame)), bounds, side="right").tolist()

            result: list[int] = self.clients.agree(f"{call}: counts {exchange}", counts, _totals)
            return result

        return quantiles(below, self.clients.rows, (curve.low, curve.high), parts)


def block_of(term: Any) -> tuple[Any, str] | None:
    """Return function and variable of a term whose columns have one prior; None for others."""
    call: Any = getattr(term.components[0], "call", None)
    transform = getattr(call, "stateful_transform", None)
    return (transform, str(call.args[0])) if isinstance(transform, FUNCTIONS) else None


def labels_of(term: Any) -> list[str]:
    """Return the names of a term's columns, such as s(x), the line, and s(x)[1]."""
    labels: list[str] = term.labels
    if not (found := block_of(term)):
        return labels
    transform, variable = found
    name = f"{transform.name}({variable})"
    plain, count = transform.plain, len(labels)
    if count == 1:
        return [name]
    return [name] * plain + [f"{name}[{k}]" for k in range(1, count - plain + 1)]


def _outer(reports: Mapping[str, Report]) -> Report:
    """Return the smallest first and the largest second number of the clients' reports."""
    return [end(one[k] for one in reports.values()) for k, end in enumerate((min, max))]


def _totals(reports: Mapping[str, Report]) -> Report:
    """Return the sum of the clients' lists of numbers."""
    return total([*reports.values()]).tolist()


def _orthogonal(
    x: np.ndarray, degree: int, alpha: Mapping[int, float], norms: Mapping[int, float]
) -> np.ndarray:
    """Return the orthogonal polynomial of a degree at x [N], given the sums of lower degrees."""
    before, now = np.zeros_like(x), np.ones_like(x)
    for k in range(degree):
        beta = norms[k] / norms[k - 1] if k else 0.0
        before, now = now, (x - alpha[k]) * now - beta * before
    return now


def described(text: str) -> Any:
    """Return formulae's description of a right-hand side."""
    from formulae import model_description
    from formulae.parser import Parser
    from formulae.scanner import Scanner

    try:
        parser = Parser(Scanner(text).scan())
        parsed = parser.parse()
        description = model_description(text)
    except Exception as error:
        raise ValueError(f"{text!r} is not a formula: {_line(error)}") from error
    if not parser.at_end():  # formulae would ignore the rest
        raise ValueError(
            f"{text!r} is not a formula: unexpected {parser.peek().lexeme!r}; expected + - * : or "
            "/ between terms, such as x:g for x %in% g"
        )
    _refuse_power(parsed)
    return description


def _refuse_power(parsed: Any) -> None:
    """Raise ValueError for the power of one term, which formulas of R and formulae read as it."""
    operator = getattr(getattr(parsed, "operator", None), "lexeme", "")
    if operator == "**" and type(parsed.left).__name__ in ("Variable", "Call"):
        raise ValueError(
            "a power of one term is the term itself in formulas; expected {x ** 2} for the power "
            "of the values, or poly(x, 2)"
        )
    for part in ("left", "right", "expression"):
        if hasattr(parsed, part):
            _refuse_power(getattr(parsed, part))


def variables(text: str) -> tuple[set[str], set[str]]:
    """Return the columns that a right-hand side uses, and those among them inside C(), S(), T()."""
    model, factors = described(text), set()
    for term in model.common_terms:
        for component in getattr(term, "components", ()):
            for call in _calls(getattr(component, "call", None)):
                if str(call.callee) in ("C", "S", "T"):
                    factors |= set(re.findall(r"[A-Za-z_]\w*", str(call.args[0])))
    if numbers := [name for name in model.var_names if not isinstance(name, str)]:
        raise ValueError(
            f"{text!r} has the number {numbers[0]} as a term; expected names of columns"
        )
    names = set(model.var_names) - {"", "True", "False", "None", *_contrasts()}
    return names, factors & names


def _calls(lazy: Any) -> Iterator[Any]:
    """Yield the calls of a lazy expression, those inside of others first."""
    if lazy is None:
        return
    for part in (*getattr(lazy, "args", ()), *getattr(lazy, "kwargs", {}).values()):
        yield from _calls(part)
    if hasattr(lazy, "callee"):
        yield lazy


def _names(lazy: Any) -> Iterator[str]:
    """Yield the names of columns and values in a lazy expression."""
    if hasattr(lazy, "args"):
        for part in (*lazy.args, *getattr(lazy, "kwargs", {}).values()):
            yield from _names(part)
    elif hasattr(lazy, "name"):
        yield str(lazy.name).strip("`")


def _in_products(call: Any) -> str:
    """Return which function of a variable, instead of a term with one prior, has products."""
    variable = str(call.args[0]) if call.args else "x"
    cures = {"mo": f"C({variable})", "cs": variable}
    cure = cures.get(str(call.callee), f"bs({variable}, df=5)")
    return f", or {cure} instead of {call} in products"


def _contrasts() -> dict[str, Any]:
    from formulae.categorical import ENCODINGS

    return dict(ENCODINGS)


def _line(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args[0] in IN_R:
        return f"unknown name {error}; expected {IN_R[error.args[0]]}"
    if isinstance(error, KeyError):
        return f"unknown name {error}; expected np.NAME, log, exp, sqrt, or a name of namespace="
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text}; expected {{x ** 2}} for powers" if "character: ^" in text else text
