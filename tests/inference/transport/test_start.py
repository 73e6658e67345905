"""Engines are refused in one line before any work, or started."""

from __future__ import annotations

import sys

import pytest
import toys

from pyrofl.cli.parser import main
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.fit import fit
from pyrofl.inference.transport import ray as by_ray
from pyrofl.models import fedavg


@pytest.fixture
def there(monkeypatch):
    """Let Ray seem to be there, and no cluster."""
    monkeypatch.setattr(by_ray, "find_spec", lambda name: True)
    monkeypatch.setattr(by_ray, "_is_ray_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def refused(match, blobs, **how):
    with pytest.raises(ValueError, match=match):
        federate(fedavg.build(toys.net()), blobs, 1, **how)


def test_an_engine_that_is_not_there_is_refused_before_any_work(blobs, monkeypatch, capsys):
    monkeypatch.setattr(by_ray, "find_spec", lambda name: None)
    told = r"engine is 'ray', but ray and cloudpickle cannot be imported; run pip install "
    refused(told + r"-e '\.\[ray\]' in the clone, or use engine='local'", blobs, engine="ray")
    with pytest.raises(ValueError, match="cannot be imported"):
        fit(fedavg.build(toys.net()), blobs, 1, engine="ray", progress=False)
    words = ["run", "fedavg", "--data", "eight_schools", "--engine", "ray", "--out", "nowhere"]
    assert main(words) == 2
    assert "run pip install -e '.[ray]' in the clone" in capsys.readouterr().err
    refused("engine is 'dask'; expected", blobs, engine="dask")


def test_workers_are_of_ray_and_no_more_than_clients(blobs, there):
    refused("workers is 2, but engine 'local' is one process; use", blobs, workers=2)
    refused("workers is 0; expected", blobs, engine="ray", workers=0)
    refused("workers is 13, but only 12 clients train; expected", blobs, engine="ray", workers=13)


def test_a_cluster_is_to_be_told_how_many_and_has_room_for_them(blobs, there, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    refused("workers is None, but RAY_ADDRESS names a cluster; pass", blobs, engine="ray")
    monkeypatch.setattr(by_ray, "_is_ray_initialized", lambda: True)
    monkeypatch.setattr(by_ray, "_max_workers", lambda _: 3)
    refused("workers is 4, but Ray has 3 CPUs; expected at most 3", blobs, engine="ray", workers=4)
    assert by_ray.choose_worker_count(None, blobs) == 3


def test_as_many_workers_as_cores_or_clients(blobs, there, monkeypatch):
    monkeypatch.setattr(by_ray, "_max_workers", lambda _: 64)
    assert by_ray.choose_worker_count(None, blobs) == 12
    assert by_ray.choose_worker_count(5, blobs) == 5
    assert "ray" not in sys.modules or not by_ray._is_ray_initialized()
