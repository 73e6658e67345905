"""The table of the page on regressions has the numbers of its code."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("formulae")

PAGE = Path(__file__).parents[3] / "examples" / "docs" / "regression.md"


def test_the_table_of_the_page_is_the_summary():
    text = PAGE.read_text()
    first = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    with redirect_stdout(StringIO()):
        exec(first[1], names)
    summary = names["run"].summary()
    rows = re.findall(r"(?m)^\| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", text)
    assert [name for name, *_ in rows] == summary.index.tolist()
    for name, mean, sd, *ends in rows:
        found = summary.loc[name]
        assert float(mean) == pytest.approx(found["mean"], abs=0.15 * found["sd"])
        assert float(sd) == pytest.approx(found["sd"], rel=0.15)
        # Quantiles in the tails are estimated less precisely than the mean.
        for end, value in zip(("2.5%", "97.5%"), ends, strict=True):
            assert float(value) == pytest.approx(found[end], abs=0.5 * found["sd"])
