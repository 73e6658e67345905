"""Method of a regression: a hierarchical method with its formula, family and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

import torch

from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.data.tables.wording import listed
from pyrofl.inference.definition.table_method import TableMethod
from pyrofl.inference.engine.origin import rows_of
from pyrofl.inference.evaluation.predictions import PredictionOptions, Predictions
from pyrofl.models.regression.design import Design, level_text, make_design
from pyrofl.models.regression.prediction import derived_sites, predict_rows
from pyrofl.models.regression.priors import Priors, of, printed
from pyrofl.models.regression.program import coefficients, compile_program
from pyrofl.tensors import Tensors


@dataclass(frozen=True, repr=False)
class Regression(TableMethod):
    """Regression from a formula: a method with its formula, family and data.

    Attributes:
        design: agreed columns, levels and rows.
        chosen: priors.
        text: source of the program.
        link: name of the link.
        center: whether the prior of the intercept is that at the mean of all columns.
    """

    design: Design | None = None
    chosen: Priors | None = None
    text: str = ""
    link: str = ""
    center: bool = True

    def program(self) -> str:
        """Return the Pyro source of the model, which reads `prepare(data)`."""
        return self.text

    def priors(self) -> str:
        """Return all priors, one per line."""
        assert self.chosen is not None
        return self.chosen.text()

    def prepare(self, data: Federation | Tables) -> Federation:
        """Return the federation that the program reads, of the clients that the design is of.

        Raises:
            ValueError: if data has other clients or rows than the regression was made of.
        """
        design = self.design
        assert design is not None
        source = data.source if isinstance(data, Federation) else None
        if isinstance(data, Federation) and source and source.features == tuple(design.places):
            return data
        federation, other = design.federation(), _design_of(design, data).federation()
        cure = "; call pyrofl.regression(formula, data) with these data"
        if sorted(federation.names) != sorted(other.names):
            raise ValueError(
                f"data has clients {listed(other.names)}, but the regression was made of "
                f"{listed(federation.names)}{cure}"
            )
        place = torch.tensor([other.names.index(name) for name in federation.names])
        same = (rows_of(federation) == rows_of(other)[place]).all(1)
        if not bool(same.all()):
            name = federation.names[int((~same).nonzero()[0])]
            raise ValueError(f"{name!r} has other rows than the regression was made of{cure}")
        return federation

    def variables(self) -> dict[str, str]:
        """Return the parameters that a summary lists, without effects of groups."""
        assert self.design is not None
        assert self.chosen is not None
        return parameters(self.design, self.chosen)

    def predict_table(
        self, run: Any, x: Any, client: str | None, own: Any, options: PredictionOptions
    ) -> Predictions:
        """Predict new rows of a table; see `pyrofl.effects.predict`."""
        if own is not None:
            raise ValueError(
                "own rows are given; a regression predicts for a new client from all others: add "
                "the client with pyrofl.join to use its rows"
            )
        return predict_rows(run, x, client, **options)

    def derived(self, shared: Tensors) -> Tensors:
        """Return draws of the intercept, of correlations and of cut points, by name."""
        assert self.design is not None
        return derived_sites(compile_program(self.text), self.design, shared)

    def axes(self) -> tuple[dict[str, tuple[str, ...]], dict[str, list[Any]]]:
        """Return names of the axes of sites, and labels of the axes, for ArviZ."""
        assert self.design is not None
        assert self.chosen is not None
        return _axes(self.design, self.chosen)


def _design_of(design: Design, data: Federation | Tables) -> Design:
    """Return the design of the same formula for other data; its warnings were given before."""
    how: dict[str, Any] = {"client": design.client, "namespace": design.namespace}
    with catch_warnings():
        simplefilter("ignore")
        return make_design(design.formula, data, design.family, **how)


def parameters(design: Design, priors: Priors) -> dict[str, str]:
    """Return the sites of parameters that all clients share, and their names in tables."""
    site_names: dict[str, str] = {}
    for parameter, coefs in priors.predictors.items():
        b, intercept = of("b", parameter), of("Intercept", parameter)
        sites = coefficients(priors, parameter)
        site_names |= {b: b} if coefs.normal else {}
        site_names |= {site: printed(parameter, name) for name, site in sites.items()}
        site_names |= {intercept: intercept} if intercept in priors.others else {}
    for name in priors.others:
        if name == "cut_first" or name == "cuts":
            site_names["cutpoints"] = "cutpoints"
        elif name != "cut_gaps":
            site_names.setdefault(name, name)
    for one in design.groups:
        if len(one.correlations) == 1:  # of several, the axis has the names
            site_names[f"corr_{one.name}"] += f"[{one.correlations[0]}]"
    return site_names


def _axes(design: Design, priors: Priors) -> tuple[Any, Any]:
    """Return names of the axes of sites, and labels of the axes."""
    dims: dict[str, tuple[str, ...]] = {}
    coords: dict[str, list[Any]] = {}
    for parameter, coefs in priors.predictors.items():
        if parameter and coefs.normal:
            dims[of("b", parameter)] = (f"{parameter}_term",)
            coords[f"{parameter}_term"] = coefs.normal
    if normal := priors.predictors[""].normal:
        is_many = design.family.kind == "categorical"
        dims["b"] = ("answer", "term") if is_many else ("term",)
        coords["term"] = normal
        if is_many:
            dims["Intercept"] = dims["Intercept_centered"] = ("answer",)
            coords["answer"] = list(design.answers[1:])
    for parameter, columns in design.predictors.items():
        for name, block in columns.blocks.items():
            prefix = {"mo": "zeta_"}.get(block.transform.name, "")
            site = of(f"{prefix}{name}", parameter)
            steps = [str(answer) for answer in design.answers[:-1]]  # a threshold follows each
            labels = steps if block.transform.name == "cs" else block.labels
            dims[site], coords[f"{site}_term"] = (f"{site}_term",), labels
    for one in design.groups:
        name, k, axis = one.name, len(one.entries), f"{one.name}_term"
        single = k == 1 and one.kind != "shared"
        if k > 1:
            dims[f"sd_{name}"] = (axis,)
        if len(one.correlations) > 1:
            dims[f"corr_{name}"] = (f"{name}_pair",)
            coords[f"{name}_pair"] = one.correlations
        if not single:
            coords[axis] = one.entries
        effect = () if single else (axis,)
        if one.kind == "shared":
            levels = [level_text(v) if isinstance(v, tuple) else v for v in one.levels[""]]
            dims[f"r_{name}"] = (name, axis)
            coords[name] = levels
        elif one.kind == "nested":
            dims[f"r_{name}"] = (f"{name}_level", *effect)
            coords[f"{name}_level"] = list(one.texts)
        else:
            dims[f"r_{name}"] = effect
    return {n: axes for n, axes in dims.items() if axes}, coords
