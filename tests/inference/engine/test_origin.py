"""A run goes on with the clients and rows that it comes from, or is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys

from pyrofl.data import Federation
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.origin import rows_of
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fit import fit
from pyrofl.models import fedavg

METHOD = fedavg.build(toys.net(), epochs=1)


def begun(data: Federation) -> RoundState:
    return fit(METHOD, data, 1, progress=False).state


def changed(data: Federation, **fields: object) -> Federation:
    return replace(data, **fields)


def others(data: Federation) -> dict[str, Federation]:
    x, y, (a, b, c, *rest) = data.x.clone(), data.y.clone(), data.train
    x[b[1], 0] += 1e-4
    y[c[0]] = (y[c[0]] + 1) % len(data.classes)
    one, two, *more = data.names
    return {
        "client 1 has other training rows than in resume_from": changed(data, x=x),
        "client 2 has other training rows than in resume_from": changed(data, y=y),
        "client 0 has other training rows than": changed(data, train=(a.flip(0), b, c, *rest)),
        "client 1 has 8 training rows, but 9 in resume_from": changed(
            data, train=(a, b[1:], c, *rest)
        ),
        "client 0 is 'client 1', but 'client 0' in resume_from": changed(
            data, names=(two, one, *more)
        ),
        "resume_from is a round of 4 clients, but the data have 3": changed(data, held_out=2),
    }


def test_other_clients_and_rows_are_refused_by_name():
    data = toys.blobs((3, 9, 7, 12, 5), held_out=1)
    run = fit(METHOD, data, 1, progress=False)
    for told, other in others(data).items():
        for start in (run, run.state):
            with pytest.raises(ValueError, match=told) as caught:
                fit(METHOD, other, 2, resume_from=start, progress=False)
            assert "; resume with the same clients in the same order" in str(caught.value)
        with pytest.raises(ValueError, match=told):
            federate(METHOD, other, 2, resume_from=run.state)
        again = fit(METHOD, other, 1, server_state=run.state.server, progress=False)
        assert again.state.number == 1


def test_a_round_of_a_round_is_compared_too():
    data = toys.blobs((3, 9, 7))
    (second,) = federate(METHOD, data, 2, resume_from=begun(data))
    with pytest.raises(ValueError, match="client 1 has other training rows"):
        federate(
            METHOD,
            others(toys.blobs((3, 9, 7)))["client 1 has other training rows than in resume_from"],
            3,
            resume_from=second,
        )


def test_what_does_not_train_may_be_others():
    data = toys.blobs((3, 9, 7, 12, 5), held_out=1)
    start = begun(data)
    train = (*data.train[:4], data.train[4][:2])
    test = tuple(rows[:1] for rows in data.test)
    names = (*data.names[:4], "somebody else")
    (state,) = federate(
        METHOD, replace(data, train=train, test=test, names=names), 2, resume_from=start
    )
    toys.assert_same(state.server, next(federate(METHOD, data, 2, resume_from=start)).server)


def test_the_type_of_the_data_does_not_matter():
    data = toys.blobs((3, 9, 7)).to("cpu", torch.float32)
    assert torch.equal(rows_of(data.to("cpu", torch.float64)), rows_of(data))


def test_rounds_that_know_nothing_are_compared_by_their_number():
    data = toys.blobs((3, 9, 7))
    old = begun(data)
    for name in ("names", "rows"):  # as an old file leaves them
        vars(old).pop(name)
    other = others(toys.blobs((3, 9, 7)))["client 1 has other training rows than in resume_from"]
    (state,) = federate(METHOD, other, 2, resume_from=old)
    assert state.names == other.names
    begin = first(METHOD, data, 0)
    assert next(federate(METHOD, other, 1, resume_from=begin)).number == 1


def test_hashes_tell_rows_apart():
    x = torch.zeros(3000, 4)
    x[torch.arange(3000), torch.arange(3000) % 4] = torch.arange(3000.0) // 4 + 1
    train = tuple(torch.arange(3000).split(1))
    data = Federation(x, torch.zeros(3000), train, tuple(t[:0] for t in train))
    assert len(rows_of(data)[:, 1].unique()) == 3000
    assert rows_of(data)[:, 0].tolist() == [1] * 3000
