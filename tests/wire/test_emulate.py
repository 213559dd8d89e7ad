"""Emulated links: schedules worked out by hand on the clocks, then threads and processes that wait for them."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

import dplab
from dplab.errors import UsageError, WireError
from dplab.telemetry.recorder import NULL, Recorder, install, now
from dplab.topology import Link, Topology
from dplab.wire.emulate import clocks as module
from dplab.wire.emulate.clocks import SLOTS, Clocks, Page
from dplab.wire.emulate.transport import Emulated
from dplab.wire.world import Mesh
from tests.worlds import in_processes, in_shm, in_threads

SECOND = 1_000_000_000
LAB = Topology.of(2, 2, inside=Link(name="fast", bandwidth=1e9), across=Link(name="slow", bandwidth=1e8),
                  text="2x2@slow")
WIRE = 4
"""The first host's network card."""


def page(timeout: float = 5.0, ranks: int = 2) -> list[Clocks]:
    shared = Page(bytearray(Page.bytes_for(LAB)), threading.Lock())
    return [Clocks(shared, LAB, timeout) for _ in range(ranks)]


def test_a_collective_starts_at_the_latest_issue_among_its_members() -> None:
    one, other = page()
    group = one.group([0, 2])
    assert other.group([0, 2]) == group
    ticket = one.issue(group, 2, {WIRE: 3.0}, at=10 * SECOND)
    assert one.end(ticket) is None
    assert other.issue(group, 2, {WIRE: 3.0}, at=17 * SECOND) == ticket
    assert one.end(ticket) == other.end(ticket) == 20 * SECOND


def test_two_collectives_on_a_link_take_the_sum_whichever_group_asks() -> None:
    """Groups [0, 2] and [1, 3] share the cards: 3 s and 2 s, both issued at 10 s, are over at 13 and 15 s."""
    ranks = page(ranks=4)
    first = [ranks[r].issue(ranks[r].group([0, 2]), 2, {4: 3.0, 5: 3.0}, at=10 * SECOND) for r in (0, 2)]
    second = [ranks[r].issue(ranks[r].group([1, 3]), 2, {4: 2.0, 5: 2.0}, at=10 * SECOND) for r in (1, 3)]
    assert [ranks[0].end(first[0]), ranks[1].end(second[0])] == [13 * SECOND, 15 * SECOND]
    assert ranks[0].group([0, 2]) != ranks[0].group([1, 3])


def test_links_that_nothing_shares_do_not_wait_for_each_other() -> None:
    ranks = page(ranks=4)
    ends = []
    for pair in ([0, 1], [2, 3]):
        tickets = [ranks[r].issue(ranks[r].group(pair), 2, dict.fromkeys(pair, 3.0), at=10 * SECOND) for r in pair]
        ends.append(ranks[pair[0]].end(tickets[0]))
    assert ends == [13 * SECOND, 13 * SECOND]


def test_the_slowest_link_ends_it_and_each_is_taken_for_its_own_work_only() -> None:
    (alone,) = page(ranks=1)
    group = alone.group([0])
    first = alone.issue(group, 1, {0: 1.0, 4: 5.0}, at=10 * SECOND)
    inside = alone.issue(group, 1, {0: 1.0}, at=10 * SECOND)
    both = alone.issue(group, 1, {0: 1.0, 4: 1.0}, at=10 * SECOND)
    behind = alone.issue(group, 1, {0: 1.0}, at=10 * SECOND)
    # the last is served after what came before it on its link, which itself waited for the card
    assert [alone.end(each) for each in (first, inside, both, behind)] == [
        15 * SECOND, 12 * SECOND, 16 * SECOND, 17 * SECOND]


def test_slots_serve_again_once_all_have_read_them() -> None:
    one, other = page(timeout=0.05)
    group = one.group([0, 2])
    for _ in range(2 * SLOTS + 3):
        tickets = [rank.issue(group, 2, {WIRE: 1e-9}, at=1) for rank in (one, other)]
        assert one.finish(tickets[0]) == other.finish(tickets[1])
    for _ in range(SLOTS):
        one.issue(group, 2, {WIRE: 1.0}, at=1)
    with pytest.raises(WireError, match=rf"emulated links waited 0.05 s for 2 ranks to end a collective that is "
                                        rf"{SLOTS} behind this one; every rank must issue and wait for the same"):
        one.issue(group, 2, {WIRE: 1.0}, at=1)


def test_a_rank_that_does_not_come_is_an_error_within_the_timeout() -> None:
    one, _ = page(timeout=0.05)
    ticket = one.issue(one.group([0, 2]), 2, {WIRE: 1.0}, at=1)
    with pytest.raises(WireError, match=r"emulated links waited 0.05 s for a rank to issue the same collective"):
        one.finish(ticket)


class Kept(Recorder):
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int, dict[str, Any]]] = []

    def span(self, kind: str, name: str, t0: int, t1: int, **attrs: Any) -> None:
        if kind == "collective":
            self.spans.append((name, t0, t1, attrs))


def emulated(topology: Topology) -> Mesh:
    return Mesh.flat(dplab.init(), sharded=True, topology=topology)


def every_collective(topology: Topology) -> list[tuple[str, float, float]]:
    """(name, seconds from issue to the links' end, seconds that the topology says) of calls one after the other."""
    kept = Kept()
    install(kept)
    axis = emulated(topology).world
    rank, size = axis.rank, axis.size
    flat = torch.arange(size * 8.0) + rank
    axis.barrier()
    axis.all_reduce(flat).wait()
    assert torch.equal(flat, torch.arange(size * 8.0) * size + sum(range(size)))
    axis.barrier()
    axis.reduce_scatter(flat).wait()
    axis.barrier()
    axis.segment(flat).fill_(float(rank))
    axis.all_gather(flat).wait()
    assert flat.view(size, -1)[:, 0].tolist() == [float(r) for r in range(size)]
    axis.barrier()
    out = torch.empty_like(flat)
    axis.all_to_all(flat + 10 * rank, out).wait()
    assert out.view(size, -1)[:, 0].tolist() == [11.0 * r - r + rank for r in range(size)]
    axis.barrier()
    axis.broadcast(flat.fill_(float(rank)), source=1).wait()
    assert (flat == 1).all()
    install(NULL)
    nbytes = flat.numel() * 4
    return [(name, (t1 - t0) * 1e-9, topology.seconds(name, nbytes)) for name, t0, t1, _ in kept.spans]


MILLI = Topology.of(2, 2, inside=Link(name="fast", bandwidth=1e8), text="2x2@slow",
                    across=Link(name="slow", bandwidth=1e5, latency=1e-3))
WORLDS = [pytest.param(in_threads, id="threads"), pytest.param(in_shm, id="shm"),
          pytest.param(in_processes, id="gloo")]


@pytest.mark.parametrize("where", WORLDS)
def test_nothing_is_seen_before_the_links_have_carried_it_and_the_span_says_when(where: Any) -> None:
    for rank in where(4, every_collective, MILLI):
        assert [name for name, _, _ in rank] == [
            "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
        for _, took, theirs in rank:
            assert took >= theirs


def shared_card(topology: Topology) -> tuple[int, int]:
    """Ranks 0, 2 and 1, 3 all-reduce at once: their groups differ and their cards do not. From when to when, in ns."""
    mesh = Mesh.of(dplab.init(), (2, 2), topology=topology)
    mesh.world.barrier()
    begun = now()
    mesh.replicate.all_reduce(torch.ones(250)).wait()
    mesh.world.barrier()
    return begun, now()


@pytest.mark.parametrize("where", WORLDS)
def test_a_card_is_shared_by_all_groups_of_a_host(where: Any) -> None:
    one = MILLI.seconds("all_reduce", 1000, [0, 2])
    begun, ended = zip(*where(4, shared_card, MILLI), strict=True)
    # a rank may come out of the first barrier after another has begun
    assert (min(ended) - min(begun)) * 1e-9 >= 2 * one


def resting(topology: Topology) -> tuple[float, float]:
    """Seconds of CPU that this thread spends in a collective of 0.3 s, and how long it took."""
    axis = emulated(topology).world
    axis.barrier()
    begun, spent = time.monotonic(), time.thread_time()
    axis.all_reduce(torch.ones(axis.size * 25)).wait()
    return time.thread_time() - spent, time.monotonic() - begun


@pytest.mark.parametrize("where", WORLDS)
def test_waiting_costs_no_cpu(where: Any) -> None:
    slow = Topology.of(2, 1, inside=Link(name="fast", bandwidth=1e9), across=Link(name="slow", bandwidth=1e3 / 1.5),
                       text="2x1@slow")
    for spent, took in where(2, resting, slow):
        assert took >= 0.3
        assert spent < 0.03


def wrapped_again(topology: Topology) -> bool:
    return emulated(topology).world.transport.clocks is emulated(topology).world.transport.clocks


@pytest.mark.parametrize("where", WORLDS)
def test_all_meshes_of_a_world_share_its_links(where: Any) -> None:
    assert all(where(2, wrapped_again, Topology.parse("2@pcie4")))


def test_a_topology_of_another_size_is_refused_on_every_rank() -> None:
    def body() -> str:
        with pytest.raises(UsageError) as caught:
            emulated(LAB)
        return str(caught.value)

    assert in_threads(3, body) == 3 * ["topology '2x2@slow' has 4 ranks (2 hosts x 2 ranks, slow between hosts, fast "
                                       "inside), and the world has 3; start 4 ranks, or give another topology"]


def test_ranks_on_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Apart:
        """As if the other rank were elsewhere."""

        rank, size = 0, 2

        def gather_objects(self, value: tuple[str, int, int]) -> list[tuple[str, int, int]]:
            os.close(value[2])
            return [value, ("another boot", *value[1:])]

    with pytest.raises(UsageError, match=r"topology '2x2@slow' is emulated, and emulated links join processes of one "
                                         r"host; these ranks are on 2, with links of their own: leave it out"):
        module._page_of_processes(Apart(), LAB)  # type: ignore[arg-type]


def test_without_nameless_memory_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        rank, size = 0, 1

        def gather_objects(self, value: Any) -> list[Any]:
            return [value]

    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UsageError, match=r"topology '2x2@slow' is emulated, which needs Linux: leave it out, or let"):
        module._page_of_processes(Alone(), LAB)  # type: ignore[arg-type]


def test_bytes_are_told_by_where_they_go() -> None:
    def body() -> dict[str, int]:
        mesh = Mesh.of(dplab.init(), (2, 2), topology=LAB)
        flat = torch.zeros(256)
        mesh.world.all_reduce(flat).wait()
        mesh.shard.reduce_scatter(flat).wait()
        mesh.replicate.all_reduce(flat, purpose="control").wait()
        return mesh.world.counters.rows

    ring = 2 * 3 * 1024 // 4
    for rank, rows in enumerate(in_threads(4, body)):
        where = ["inside", "across", "inside", "across"][rank]
        assert rows == {"all_reduce": {"count": 1, "bytes": ring, where: ring},
                        "reduce_scatter": {"count": 1, "bytes": 512, "inside": 512},
                        "control": {"count": 1, "bytes": 1024, "across": 1024}}


def test_a_transport_below_keeps_its_memory_and_its_labels() -> None:
    def body() -> tuple[bool, str]:
        axis = emulated(Topology.parse("2@pcie4")).world
        flat = axis.housed(torch.zeros(1 << 16))
        axis.reduce_scatter(flat, bucket=3).wait()
        from dplab.wire.shm.memory import HOMES  # a rank's own: the test's would travel by value

        return HOMES.place(flat) is not None, axis.transport.label

    assert in_shm(2, body) == 2 * [(True, "bucket 3")]


def test_a_world_of_one_has_no_links() -> None:
    (mesh,) = in_threads(1, emulated, Topology.parse("1@pcie4"))
    assert not isinstance(mesh.world.transport, Emulated)
