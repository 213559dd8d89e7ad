"""Topologies from text, the loads of collectives worked out by hand, and every refusal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dplab import cards
from dplab.errors import UsageError
from dplab.quantities import seconds
from dplab.topology import Device, Link, Topology, link

SLOW = Link(name="slow", bandwidth=1e6, latency=1e-3)
FAST = Link(name="fast", bandwidth=1e8, latency=1e-5)


def lab(hosts: int = 2, ranks: int = 2, nics: int = 1) -> Topology:
    return Topology.of(hosts, ranks, inside=FAST, across=SLOW if hosts > 1 else None, nics=nics)


@pytest.mark.parametrize(("text", "hosts", "ranks", "across", "inside", "nics"), [
    ("2x2@10gbe", 2, 2, 1.177e9, 31e9, 1),
    ("2x2@10GbE,NVLink3", 2, 2, 1.177e9, 300e9, 1),
    ("4@pcie3", 1, 4, None, 16e9, 1),
    ("1x4@pcie5", 1, 4, None, 63e9, 1),
    ("2x2@1Gb/s:50us,16GB/s", 2, 2, 125e6, 16e9, 1),
    ("2x4@4x25gbe", 2, 4, 2.942e9, 31e9, 4),
    ("3x3090", 1, 3, None, 31e9, 1),
    ("3xRTX-3090-24GB", 1, 3, None, 31e9, 1),
    ("2x8xH100", 2, 8, 50e9, 450e9, 8),
    ("2x3x3090@10gbe", 2, 3, 1.177e9, 31e9, 1),
])
def test_from_one_line(text, hosts, ranks, across, inside, nics):
    found = Topology.parse(text)
    assert (found.hosts, found.size, found.nics) == (hosts, hosts * ranks, nics)
    assert found.inside.bandwidth == pytest.approx(inside)
    assert (found.across and found.across.bandwidth) == (across and pytest.approx(across))
    assert [device.host for device in found.devices] == [rank // ranks for rank in range(hosts * ranks)]
    assert Topology.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert Topology.parse(found) is found


def test_it_says_what_it_is():
    assert str(Topology.parse("2x2@10gbe")) == "2 hosts x 2 ranks, 10GbE between hosts, PCIe4 inside"
    assert str(Topology.parse("3x3090")) == "1 host x 3 ranks, PCIe4 inside"
    assert str(Topology.parse("2x8xH100")) == ("2 hosts x 8 ranks, 400 Gb/s a GPU between hosts, 8 a host, "
                                              "NVLink4 inside")
    assert Topology.parse("2x8xH100").devices[9] == Device(rank=9, host=1, name="H100-SXM-80GB")


@pytest.mark.parametrize("name", cards.names("hardware/links"))
def test_every_link_is_whole(name):
    card, preset = cards.find("hardware/links", name, what="link"), link(name)
    assert preset.bandwidth == card["gb_s"] * 1e9 > 0
    assert 0 < preset.latency < 1e-4
    assert set(card["source"]) == {"gb_s", "latency_us"}


@pytest.mark.parametrize(("text", "message"), [
    ("2x2", r"topology '2x2' names no link; write 2x2@10gbe \(hosts x ranks @ the link between hosts\)"),
    ("twins", r"topology 'twins' has not the form of one; write 2x2@10gbe"),
    ("2x2@10gbe,pcie4,pcie4", r"has not the form of one"),
    ("0x2@10gbe", r"topology '0x2@10gbe' has no ranks; write"),
    ("99999x99999@10gbe", r"has 9999800001 ranks; 65536 are the most"),
    ("2x2@10gbee", r"topology '2x2@10gbee': link '10gbee' is not known; the nearest are 10GbE"),
    ("2x2@-1Gb/s", r"topology '2x2@-1Gb/s': link '-1Gb/s' is no number above 0 with its unit; write 50GB/s"),
    ("2x2@1Gb/s:-1us", r"latency '-1us' is no time; write 30us or 0.5ms"),
    ("2x2@1Gb/s:1.2.3us", r"latency '1.2.3us' is no time"),
    ("2x8xH1000", r"topology '2x8xH1000': GPU 'H1000' is not known; the nearest are H100"),
    ("4@pcie4,pcie3", r"names a link between hosts and has one host; leave one out"),
])
def test_other_text_is_refused_in_one_sentence(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        Topology.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Link(name="x", bandwidth=-1e9), r"Link\(bandwidth=-1000000000.0\) is not allowed; bandwidth is bytes"),
    (lambda: Link(name="x", bandwidth=1e9, latency=-1.0), r"Link\(latency=-1.0\) is not allowed; latency is seconds"),
    (lambda: lab(nics=0), r"Topology\(nics=0\) is not allowed; nics is an integer >= 1"),
    (lambda: Topology.of(2, 2, inside=FAST), r"Topology\(across=None\) with 2 hosts: name the link between hosts"),
    (lambda: Topology(devices=(Device(rank=1, host=0),), inside=FAST), r"needs ranks 0, 1, ... in order on hosts"),
    (lambda: Topology(devices=(), inside=FAST), r"needs ranks 0, 1, ... in order on hosts"),
    (lambda: Topology.from_dict({"devices": []}), r"these values are no topology's \('across'\)"),
    (lambda: Topology.parse("2x2@10gbe").require(3), r"topology '2x2@10gbe' has 4 ranks \(2 hosts x 2 ranks, 10GbE "
                                                     r"between hosts, PCIe4 inside\), and the world has 3; start 4"),
    (lambda: Topology.parse("3x3090").grid(), r"hybrid needs several hosts .*; here are 3 ranks on 1 host: give such"),
    (lambda: lab(2, 1).grid(), r"here are 1, 1 ranks on 2 hosts"),
])
def test_values_that_are_none_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_time_has_a_unit():
    assert seconds("30us", what="latency") == pytest.approx(30e-6)
    assert seconds("0 ms", what="latency") == 0


def test_a_ring_inside_a_host():
    """3 ranks, 9e6 bytes: each sends and receives 4 segments of 3e6, in 4 steps."""
    loads = lab(1, 3).loads("all_reduce", 9e6)
    assert [(loads[rank].sent, loads[rank].received, loads[rank].steps) for rank in loads] == 3 * [(12e6, 12e6, 4)]
    assert lab(1, 3).seconds("all_reduce", 9e6) == pytest.approx(0.12 + 4e-5)
    assert lab(1, 3).seconds("reduce_scatter", 9e6) == pytest.approx(0.06 + 2e-5)


def test_a_ring_over_two_hosts_leaves_each_once():
    """2 x 2, ring 0-1-2-3: 3 of 4 quarters twice over every edge; 1 to 2 and 3 to 0 go through the cards (4 and 5)."""
    loads = lab().loads("all_reduce", 4e6)
    assert {wire: (load.sent, load.received) for wire, load in loads.items()} == {
        0: (6e6, 0), 1: (0, 6e6), 2: (6e6, 0), 3: (0, 6e6), 4: (6e6, 6e6), 5: (6e6, 6e6)}
    assert lab().seconds("all_reduce", 4e6) == pytest.approx(6.0 + 6e-3)
    assert [lab().link_class(rank, range(4)) for rank in range(4)] == ["inside", "across", "inside", "across"]


def test_ranks_are_found_on_their_hosts_whatever_their_order():
    mixed = Topology(devices=tuple(Device(rank=rank, host=rank % 2) for rank in range(4)), inside=FAST, across=SLOW)
    assert mixed.grid() == [[0, 2], [1, 3]]
    assert [mixed.link_class(rank, range(4)) for rank in range(4)] == ["inside", "inside", "across", "across"]
    assert mixed.seconds("all_gather", 4e6) == lab().seconds("all_gather", 4e6) == pytest.approx(3.0 + 3e-3)


def test_a_group_of_one_rank_a_host_uses_its_own_card():
    two = lab(nics=2)
    assert set(two.loads("all_reduce", 4e6, [1, 3])) == {5, 7}
    assert set(two.loads("all_reduce", 4e6)) == {0, 1, 2, 3, 4, 5, 6, 7}
    assert two.loads("all_reduce", 4e6)[4].sent == 3e6      # half a ring's edge on each card
    assert set(lab().loads("all_reduce", 4e6, [1, 3])) == {4, 5}


def test_a_broadcast_goes_down_the_ring_from_its_source():
    loads = lab().loads("broadcast", 1e6, source=2)
    assert (loads[2].sent, loads[4].sent, loads[4].received, loads[5].sent) == (1e6, 0, 1e6, 1e6)
    assert loads[4].steps == 3


def test_all_to_all_sends_a_piece_to_each():
    loads = lab().loads("all_to_all", 4e6)
    assert (loads[0].sent, loads[4].sent, loads[4].received, loads[4].steps) == (1e6, 4e6, 4e6, 1)


def test_in_two_levels_less_goes_between_hosts():
    """Of 4e6 bytes, each of the 2 ranks sends 2 (H-1)/H of a half between hosts: 2e6, through one card: 4 s."""
    inside = 2 * (2e6 / 1e8 + 1e-5)
    assert lab().seconds("hierarchical_all_reduce", 4e6) == pytest.approx(inside + 4.0 + 2 * 2e-3)


@given(hosts=st.integers(1, 4), ranks=st.integers(1, 4), nics=st.integers(1, 4), nbytes=st.floats(1.0, 1e9),
       name=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]))
def test_what_is_sent_is_received(hosts, ranks, nics, nbytes, name):
    topology = lab(hosts, ranks, nics)
    loads = topology.loads(name, nbytes).values()
    assert sum(load.sent for load in loads) == pytest.approx(sum(load.received for load in loads))
    assert all(0 <= wire < topology.wires for wire in topology.loads(name, nbytes))
    assert topology.seconds(name, nbytes, [0]) == 0
