"""Designs of the clients' own rows equal those that formulae makes of the pooled rows."""

import numpy as np
import pandas as pd
import pytest

formulae = pytest.importorskip("formulae")

from pyrofl import federations  # noqa: E402
from pyrofl.models.regression.design import OFFSET, make_design  # noqa: E402
from pyrofl.models.regression.families import FAMILIES  # noqa: E402
from pyrofl.models.regression.formula import read  # noqa: E402
from pyrofl.models.regression.rows import quantiles  # noqa: E402

FORMULAS = [
    "y ~ x",
    "y ~ 0 + x + z",
    "y ~ f",
    "y ~ 0 + f",
    "y ~ x * f",
    "y ~ x:f",
    "y ~ f * g",
    "y ~ f:g",
    "y ~ x / f",
    "y ~ (x + z + f) ** 2",
    "y ~ center(x) + scale(z)",
    "y ~ standardize(np.log(z)) * f",
    "y ~ poly(x, 3)",
    "y ~ poly(x, 2, raw=True) + g",
    "y ~ bs(x, df=5)",
    "y ~ bs(x, df=6, degree=2, center=False) + f",
    "y ~ bs(z, knots=knots, lower_bound=0, upper_bound=12)",
    "y ~ C(k) + x",
    "y ~ C(k, Sum) * z",
    "y ~ S(f) + T(g, ref='v')",
    "y ~ I(x ** 2) + {x > 0} + np.exp(x)",
    "y ~ scale(center(x) ** 2) + offset(np.log(z))",
    "y ~ o + x - 1",
]


def table(seed=0, rows=60):
    """Return rows of several clients, which do not all have every level."""
    random = np.random.default_rng(seed)
    site = np.repeat(["a", "b", "c", "d"], [1, 9, 20, rows - 30])
    f = np.where(site == "b", "low", random.choice(["low", "mid", "top"], rows))
    order = pd.CategoricalDtype(["small", "large", "huge"], ordered=True)
    return pd.DataFrame(
        {
            "client": site,
            "y": random.normal(size=rows),
            "x": random.normal(2.0, 3.0, rows),
            "z": random.gamma(3.0, size=rows),
            "k": random.integers(1, 5, rows),
            "f": f,
            "g": np.where(site == "a", "w", random.choice(["u", "v", "w"], rows)),
            "o": pd.Categorical(random.choice(list(order.categories), rows), dtype=order),
        }
    )


def parts(frame):
    return federations.from_frames(
        {name: rows.reset_index(drop=True) for name, rows in frame.groupby("client")}
    )


def design_of(formula, frame, family="gaussian", **how):
    usual = {"client": "client", "namespace": {"knots": [1.0, 2.0]}}
    return make_design(read(formula), parts(frame), FAMILIES[family], **{**usual, **how})


@pytest.mark.parametrize("formula", FORMULAS)
def test_columns_equal_those_of_the_pooled_rows(formula):
    frame = table()
    pooled = formulae.design_matrices(formula, frame, extra_namespace={"knots": [1.0, 2.0]}).common
    expected = pooled.as_dataframe()
    made = design_of(formula, frame)
    offsets = [n for n in expected.columns if n.startswith("offset(")]
    plain = expected.drop(columns=["Intercept", *offsets], errors="ignore")
    assert made.terms == list(plain.columns)
    assert made.population.has_intercept == ("Intercept" in expected)
    data = made.federation()
    scale = np.maximum(1.0, np.abs(plain.to_numpy()).max(0))
    found = data.x.numpy()[:, : plain.shape[1]]
    np.testing.assert_allclose(found / scale, plain.to_numpy() / scale, rtol=0, atol=1e-12)
    for name in offsets:
        column = data.x[:, made.places[OFFSET]]
        np.testing.assert_allclose(column, expected[name], rtol=1e-12)
    np.testing.assert_array_equal(data.y, frame["y"])


@pytest.mark.parametrize("part", [0.0, 0.25, 1 / 3, 0.5, 0.9, 1.0])
def test_quantiles_are_those_of_the_pooled_values(part):
    random = np.random.default_rng(1)
    values = [random.normal(size=n) for n in (1, 4, 30)] + [np.array([-1e300, 0.0, 0.0, 1e-300])]

    def below(bounds, exchange):
        return sum(np.searchsorted(np.sort(v), bounds, side="right") for v in values)

    pooled = np.concatenate(values)
    (found,) = quantiles(below, len(pooled), (pooled.min(), pooled.max()), [part])
    assert found == pytest.approx(np.percentile(pooled, 100 * part), rel=1e-14)


@pytest.mark.parametrize("text", ["bs(z, df=4)", "x + poly(z, 2)"])
def test_curves_beyond_the_training_rows_are_described(text):
    frame = table()
    columns, low, high = design_of(f"y ~ {text}", frame).population, frame.z.min(), frame.z.max()
    assert not list(columns.beyond(frame))
    far = frame.assign(z=frame.z.where(frame.z < high, high + 3))
    (line,) = columns.beyond(far)
    assert line.startswith(f"z of new rows is between {low:.4g} and {high + 3:.4g}, and ")
    assert line.endswith(f" was fitted between {low:.4g} and {high:.4g}")
