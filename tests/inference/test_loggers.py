"""What loggers are told of a round, with libraries and without."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import toys

import pyrofl
from pyrofl import loggers
from pyrofl.inference.fit import fit
from pyrofl.models import fedavg


def test_a_logger_sees_every_round_and_its_scores():
    seen = []

    def log(run, record):
        seen.append((record.number, loggers.numbers(run, record)))

    method = fedavg.build(toys.net(), epochs=1, fine_tune=1)
    data = toys.blobs((3, 9, 7), held_out=1)
    done = fit(method, data, 3, eval_every=2, progress=False, logger=log)
    assert [number for number, _ in seen] == [1, 2, 3]
    for number, found in seen:
        scored = [row for row in done.history if row["round"] == number]
        assert len(found) == len(scored) + 9
        assert found["loss w/_"] == pytest.approx(
            float(done.records[number - 1].loss["w/*"].nanmean())
        )
        for row in scored:
            if (row["model"], row["population"], row["metric"]) == ("global", "held_out", "nll"):
                assert found["global/held_out/nll"] == row["value"]
    assert "personal/fine_tune/accuracy" in seen[1][1]
    assert "global/accuracy" not in seen[0][1]


def test_mlflow_gets_numbers_with_names_that_it_takes(monkeypatch):
    sent, begun = [], []
    fake = SimpleNamespace(
        end_run=lambda: None,
        start_run=lambda run_name: begun.append(run_name),
        log_metrics=lambda found, step: sent.append((step, found)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    method = fedavg.build(toys.net(), epochs=1)
    fit(method, toys.blobs((3, 9)), 2, progress=False, logger=loggers.mlflow("mine"))
    assert begun == ["mine"]
    assert [step for step, _ in sent] == [1, 2]
    assert not [name for name in sent[0][1] if "*" in name]


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_what_is_not_installed_is_said(kind, monkeypatch):
    for name in ("tensorboard", "torch.utils.tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=rf"{kind} is not installed .*-e .*\[{kind}\]"):
        getattr(pyrofl.loggers, kind)("somewhere")


def test_tensorboard_writes_what_it_reads(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    method = fedavg.build(toys.net(), epochs=1)
    log = loggers.tensorboard(tmp_path)
    done = fit(method, toys.blobs((3, 9)), 3, eval_every=1, progress=False, logger=log)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    found = read.Scalars("global/accuracy")
    assert [event.step for event in found] == [1, 2, 3]
    values = [
        r["value"]
        for r in done.history
        if r["metric"] == "accuracy" and r["population"] == "training"
    ]
    assert [event.value for event in found] == pytest.approx(values)
