"""Methods that are made from tables, such as a regression by formula: columns, labels, predictions.

A `Method` knows features and responses only. A `TableMethod` is a method that also makes them from
the columns of tables, and names what is estimated; `fit`, `summary`, `predict` and `to_arviz` ask
the functions of this file.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.tensors import Tensors

if TYPE_CHECKING:
    from pyrofl.data.frames import Tables


@dataclass(frozen=True, repr=False)
class TableMethod(Method):
    """Method that makes its features from the columns of tables."""

    @abstractmethod
    def prepare(self, data: Federation | Tables) -> Federation:
        """Return the federation that the model reads, made from tables."""

    @abstractmethod
    def axes(self) -> tuple[dict[str, tuple[str, ...]], dict[str, list[Any]]]:
        """Return names of the axes of sites, and labels of the axes, for ArviZ."""

    @abstractmethod
    def variables(self) -> dict[str, str]:
        """Return the variables that a summary lists, and their names in it."""

    @abstractmethod
    def predict_table(self, run: Any, x: Any, client: str | None, own: Any, options: Any) -> Any:
        """Return predictions of the rows of a table."""

    @abstractmethod
    def derived(self, shared: Tensors) -> Tensors:
        """Return draws [S, *p] of what follows from draws of the shared sites alone."""


def prepare_data(method: Method, data: Federation | Tables) -> Federation:
    """Return the federation that a method's model reads: the given one, or that of the tables.

    Raises:
        ValueError: if data is not a federation, and the method has no formula.
    """
    if isinstance(method, TableMethod):
        return method.prepare(data)
    if not isinstance(data, Federation):
        raise ValueError(
            f"data is a {type(data).__name__}; expected a Federation, as this method has no "
            "formula that makes features of tables"
        )
    return data


def axes_of(method: Method) -> tuple[dict[str, tuple[str, ...]], dict[str, list[Any]]]:
    """Return names of the axes of sites, and labels of the axes, for ArviZ: none by default."""
    return method.axes() if isinstance(method, TableMethod) else ({}, {})


def derived_of(method: Method, shared: Tensors) -> Tensors:
    """Return draws [S, *p] of what follows from draws of the shared sites alone, by name."""
    return method.derived(shared) if isinstance(method, TableMethod) else {}


def variables_of(method: Method) -> dict[str, str] | None:
    """Return the variables that a summary lists, and their names in it; None lists all."""
    return method.variables() if isinstance(method, TableMethod) else None
