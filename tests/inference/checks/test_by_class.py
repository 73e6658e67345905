"""Scores by class are those of rows counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import toys
from sklearn.metrics import balanced_accuracy_score

from pyrofl import checks, metrics
from pyrofl.inference.fit import fit
from pyrofl.models import fedavg, likelihoods
from pyrofl.nets import build

RUN = fit(fedavg.build(toys.net(), epochs=2), toys.blobs(), 2, progress=False)


def test_it_counts_the_rows_of_all_clients():
    table, data = checks.classification_report(RUN), RUN.data
    pairs = [
        (data.classes[int(y)], label, p)
        for name, rows in zip(data.names, data.test, strict=True)
        for found in [RUN.predict(data.x[rows], name)]
        for y, label, p in zip(data.y[rows], found.labels, found.mean, strict=True)
    ]
    true, said = (np.array(words) for words in zip(*((t, s) for t, s, _ in pairs), strict=True))
    assert list(table.index) == [*data.classes, "all"]
    for k, name in enumerate(data.classes):
        own = true == name
        line = table.loc[name]
        assert line["rows"] == own.sum()
        assert line["recall"] == pytest.approx(np.mean(said[own] == name))
        scores = [float(p[k]) for *_, p in pairs]
        inside, outside = (
            RUN.data.x.new_tensor([s for s, mine in zip(scores, own, strict=True) if mine == yes])
            for yes in (False, True)
        )
        assert line["auroc"] == pytest.approx(float(metrics.auroc(inside, outside)), abs=1e-9)
    assert table.loc["all", "recall"] == pytest.approx(balanced_accuracy_score(true, said))
    assert table.loc["all", "rows"] == len(pairs)


def test_what_is_not_defined_is_nan():
    data = RUN.data
    mine = [rows[data.y[rows] != 2] for rows in data.test]
    table = checks.classification_report(RUN.copy(data=replace(data, test=tuple(mine))))
    assert table.loc["c", "rows"] == 0
    assert table.loc["c", ["recall", "auroc"]].isna().all()
    assert table.loc["all"].notna().all()


def test_numbers_have_no_classes():
    data = toys.blobs((9, 12))
    data = replace(data, y=data.y.double(), classes=())
    method = fedavg.build(build("linear", (toys.FEATURES,), 1), likelihood=likelihoods.normal())
    with pytest.raises(ValueError, match="predicts numbers; classification_report needs"):
        checks.classification_report(fit(method, data, 0, progress=False))
