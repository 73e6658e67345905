"""A data flow shows every message with its size, and where each tensor is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pictures import overlaps, title
from toys import BASE, HEAD, blobs, net

import pyrofl
from pyrofl import figures
from pyrofl.figures.flows import CLIENT, SERVER
from pyrofl.inference.data_flow import FlowPart
from pyrofl.models import fedper, local, pfedvem

DATA = blobs((3, 40, 7))


def words(figure):
    """Return the texts of a diagram in columns: server, messages, clients."""
    found = {"server": [], "messages": [], "clients": []}
    for text in figure.axes[0].texts:
        if text.get_text():
            x = text.get_position()[0]
            place = "server" if x < SERVER[1] else "clients" if x > CLIENT[0] else "messages"
            found[place].append(text.get_text())
    return found


def arrows(figure):
    """Return +1 for each arrow to the clients and -1 for each arrow to the server, in order."""
    found = [t for t in figure.axes[0].texts if not t.get_text()]
    return [1 if t.xy[0] > t.xyann[0] else -1 for t in found]


def test_messages_and_stored_tensors_have_their_places_and_sizes():
    figure = figures.data_flow(pyrofl.get_data_flow(fedper.build(net()), DATA))
    told = words(figure)
    size = f"w (fc1): {BASE} numbers, {BASE * 8} bytes"
    assert told["messages"] == [
        "Once, before round 1",
        "name and number of rows: 1 number, 16 bytes",
        "In every round",
        size,
        size,
    ]
    assert arrows(figure) == [-1, 1, -1]
    assert told["server"] == ["Server", "Stored", f"w: {BASE} numbers"]
    stays = told["clients"].index("Stored, not sent")
    assert told["clients"][stays + 1] == f"w (head): {HEAD} numbers"
    assert told["clients"][0] == "Each of 3 clients"
    assert "3 to 40 rows of 9 numbers" in told["clients"]
    found = title(figure)
    assert found.startswith(f"fedper: each client receives {BASE * 8} bytes and sends {BASE * 8}")
    assert overlaps(figure) == []


def test_a_wider_arrow_is_a_larger_message():
    figure = figures.data_flow(pyrofl.get_data_flow(pfedvem.build(net()), DATA))
    found = [t.arrow_patch.get_linewidth() for t in figure.axes[0].texts if not t.get_text()]
    *_, tau, base, mean = found
    assert tau < mean < base


def test_a_method_without_messages_has_no_arrow_in_a_round():
    figure = figures.data_flow(pyrofl.get_data_flow(local.build(net()), DATA))
    assert words(figure)["messages"][-2:] == ["In every round", "nothing"]
    assert arrows(figure) == [-1]


@pytest.mark.parametrize("clients", [1, 3, 929])
def test_many_tensors_with_long_names_are_summarized(clients):
    flow = pyrofl.get_data_flow(fedper.build(net()), DATA)
    many = tuple(FlowPart(f"{'a long name' * 5} {i}", 10**6, (4 * 10**6,) * 2) for i in range(40))
    flow = replace(flow, clients=clients, server=many, up=many, stays=many, stored=many)
    figure = figures.data_flow(flow)
    assert figure.get_figheight() < 10
    told = words(figure)
    assert "and 34 more: 34,000,000 numbers, 136.0 MB" in told["messages"]
    assert "and 35 more: 35,000,000 numbers" in told["server"]
    assert told["clients"][0] == ("One client" if clients == 1 else f"Each of {clients} clients")
    assert len(figure.axes[0].patches) == 1 + min(clients, 3)
    assert overlaps(figure) == []
