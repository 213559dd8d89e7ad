"""Two levels: sums inside hosts before sums across, shards inside and copies across; results, bytes and refusals."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dplab
from dplab.errors import UsageError, WireError
from dplab.topology import Device, Hosts
from dplab.wire import accelerators, axes, hosts
from dplab.wire.chain import Chain
from dplab.wire.collectives import Pending
from dplab.wire.world import Mesh
from tests.worlds import Uneven, build, in_processes, in_shm, in_threads, reference, train, uneven_batches

SHARDINGS = ["ddp", "zero1", "zero2", "zero3"]


def differences(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in expected if not torch.allclose(got[name], expected[name], rtol=1e-9, atol=1e-12)]


@pytest.mark.parametrize(("shape", "extra"), [
    ("2x2", ""), ("2x2", "+accum2"), ("2x2", "+accum2+accumulate_mode=micro_batch"), ("2x2", "+clip_grad_norm=0.05"),
    ("3x2", ""), ("2x3", "+bucket_mb=1e-05")])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_it_trains_as_one_process_does(sharding: str, extra: str, shape: str) -> None:
    size, window = {"2x2": 4}.get(shape, 6), 2 if "accum2" in extra else 1
    model, batches = build(Uneven), uneven_batches(2 * size * window)
    expected = reference(model, batches, per_step=size * window, clip=0.05 if "clip" in extra else None)
    for got in in_threads(size, train, model, batches, f"{sharding}+hybrid+topology={shape}@100GB/s{extra}"):
        assert not differences(got, expected)


@pytest.mark.parametrize("where", [in_shm, in_processes], ids=["shm", "gloo"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_it_trains_in_processes(sharding: str, where: Any) -> None:
    model, batches = build(Uneven), uneven_batches(8)
    expected = reference(model, batches, per_step=4)
    for got in where(4, train, model, batches, f"{sharding}+hybrid+topology=2x2@100GB/s+bucket_mb=1e-05"):
        assert not differences(got, expected)


def test_bf16_is_added_up_in_fp32_at_each_level() -> None:
    def body() -> torch.Tensor:
        mesh = Mesh.hybrid(dplab.init(), sharded=False, topology=dplab.Topology.parse("2x2@100GB/s"))
        flat = torch.full((512,), 1.0 + dplab.init().rank, dtype=torch.bfloat16)
        mesh.replicate.all_reduce(flat).wait()
        return flat

    assert all((flat == 10).all() for flat in in_threads(4, body))


def traffic(sharding: str) -> tuple[dict[str, dict[str, Any]], int, int]:
    """What one step sends; bytes of the padded gradients; bytes of rank 0's optimizer state."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    engine = dplab.parallelize(model, lambda ps: torch.optim.AdamW(ps), sharding)
    engine.backward(engine(torch.ones(2, 64)).sum())
    engine.step()
    rows = engine.wire()
    return ({name: row for name, row in rows.items() if name not in ("init", "control")},
            4 * sum(bucket.layout.numel for bucket in engine._buckets), engine.memory()["optimizer"])


@pytest.mark.parametrize(("hosts_", "ranks"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_bytes_by_link_equal_the_formulas(sharding: str, hosts_: int, ranks: int) -> None:
    """Across: 2 (H-1)/H of a G-th, from every rank. Inside: (G-1)/G of all, once or more."""
    topology = f"topology={hosts_}x{ranks}@100GB/s"
    for rows, total, optimizer in in_threads(hosts_ * ranks, traffic, f"{sharding}+hybrid+{topology}"):
        across = pytest.approx(2 * (hosts_ - 1) / hosts_ * total / ranks, abs=8)      # rounded down once a bucket
        inside = (ranks - 1) * total // ranks
        if sharding == "ddp":
            assert rows == {"all_reduce": {"count": rows["all_reduce"]["count"], "inside": 2 * inside, "across": across,
                                           "bytes": rows["all_reduce"]["across"] + 2 * inside}}
        else:
            assert rows["reduce_scatter"]["bytes"] == rows["reduce_scatter"]["inside"] == inside
            assert rows["all_reduce"]["bytes"] == rows["all_reduce"]["across"] == across
            assert rows["all_gather"]["bytes"] == rows["all_gather"]["inside"]
            # ZeRO-3 gathers in forward, and in backward what it has let go of
            assert inside <= rows["all_gather"]["bytes"] <= (2 if sharding == "zero3" else 1) * inside
        state = 2 * total // (1 if sharding == "ddp" else ranks)
        assert optimizer == pytest.approx(state, abs=4096)      # padding has none


LINKS = "topology=2x2@100GB/s"


def windowed(strategy: str, window: int) -> dict[str, dict[str, Any]]:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    engine = dplab.parallelize(model, lambda ps: torch.optim.AdamW(ps), strategy)
    for _ in range(window):
        engine.backward(engine(torch.ones(2, 64)).sum())
    assert engine.step(last=True)
    return engine.wire()


@pytest.mark.parametrize("window", [3, 2, 1])
@pytest.mark.parametrize("sharding", ["zero1+accumulate_mode=micro_batch", "zero2", "zero3"])
def test_micro_batches_meet_inside_a_host_and_cross_hosts_once_a_step(sharding: str, window: int) -> None:
    """Also where a window of three ends early: what its micro-batches have left inside crosses then."""
    strategy = f"{sharding}+hybrid+{LINKS}"
    [once, *_] = in_threads(4, windowed, f"{strategy}+accum1", 1)
    for rows in in_threads(4, windowed, f"{strategy}+accum3", window):
        assert rows["all_reduce"]["bytes"] == rows["all_reduce"]["across"] == once["all_reduce"]["across"]
        assert rows["reduce_scatter"]["inside"] == window * once["reduce_scatter"]["inside"]


def differently(strategy: str, plan: str, batches: list[Any], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`b` a backward, `n` one inside no_sync, `s` a step, `l` one that closes its window, `c` clips (closes it too)."""
    engine = dplab.parallelize(copy.deepcopy(model), lambda ps: torch.optim.AdamW(ps, lr=1e-2), strategy)
    rank, size, seen = dplab.init().rank, dplab.init().size, 0
    for verb in plan:
        if verb in "bn":
            x, y = batches[(seen * size + rank) % len(batches)]
            seen += 1
            with engine.no_sync() if verb == "n" else contextlib.nullcontext():
                engine.backward(engine(x, y))
        elif verb == "c":
            engine.clip_grad_norm_(0.05)
        else:
            engine.step(last=verb == "l")
    engine.check_agreement()
    return engine.full_state_dict()


@pytest.mark.parametrize(("window", "plan"), [
    (3, "bbbsbbbs"), (3, "bblbbbs"), (3, "blbbl"), (3, "nbbsbnl"), (3, "bnl"), (1, "bbsbs"), (1, "bcbs"), (2, "bbcbs"),
    (4, "bbblbbbbs")])
@pytest.mark.parametrize("sharding", ["zero1+accumulate_mode=micro_batch", "zero2", "zero3"])
def test_whatever_a_window_is_made_of_it_equals_the_flat_mesh(sharding: str, window: int, plan: str) -> None:
    model, batches = build(Uneven), uneven_batches(8)
    strategy = f"{sharding}+accum{window}+{LINKS}"
    [expected, *_] = in_threads(4, differently, strategy, plan, batches, model)
    for got in in_threads(4, differently, f"{strategy}+hybrid", plan, batches, model):
        assert not differences(got, expected)


@pytest.mark.parametrize(("first", "second"), [
    (f"ddp+hybrid+{LINKS}", "zero1"), (f"zero2+hybrid+{LINKS}", "ddp+wire=int8-ef"), (f"zero3+hybrid+{LINKS}", "zero3"),
    ("ddp+wire=int8-ef", f"zero2+hybrid+{LINKS}")])
def test_checkpoints_go_between_meshes_and_codecs(first: str, second: str, tmp_path: Path) -> None:
    model, batches = build(Uneven, torch.float32), uneven_batches(8)

    def body() -> list[str]:
        rank = dplab.init().rank
        saved = dplab.parallelize(copy.deepcopy(model), lambda ps: torch.optim.AdamW(ps, lr=1e-2), first)
        for turn in range(2):
            x, y = batches[turn * 4 + rank]
            saved.backward(saved(x, y))
            saved.step()
        saved.save(tmp_path / "all")
        loaded = dplab.parallelize(copy.deepcopy(model), lambda ps: torch.optim.AdamW(ps, lr=1e-2), second)
        assert loaded.load(tmp_path / "all") == 2
        values = loaded.full_state_dict()
        return [name for name, value in saved.full_state_dict().items() if not torch.equal(value, values[name])]

    assert in_threads(4, body) == [[]] * 4


def test_a_flat_ring_leaves_a_host_from_one_rank_of_it() -> None:
    """With N ranks: 2 (N-1)/N of everything, which in two levels is 2 (H-1)/H of a G-th."""
    every = in_threads(4, traffic, "ddp+topology=2x2@100GB/s")
    total = every[0][1]
    assert [rows["all_reduce"].get("across", 0) for rows, _, _ in every] == [0, 2 * 3 * total // 4] * 2


# ---- chains

class Told(Pending):
    """Says when it is issued and when it is waited for."""

    def __init__(self, log: list[str], name: str, *, fails: bool = False) -> None:
        super().__init__()
        self.log, self.name, self.fails = log, name, fails
        log.append(f"issue {name}")

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        if self.fails:
            raise WireError("the link broke")


def chain(log: list[str], *, count: int | None = None, quick: bool = False, fails: bool = False) -> Chain:
    def steps() -> Iterator[Pending]:
        yield Told(log, "a", fails=fails)
        yield Told(log, "b")
        yield Told(log, "c")
        log.append("end")

    return Chain(steps(), count=count, quick=quick)


def test_a_chain_goes_on_when_it_is_waited_for() -> None:
    log: list[str] = []
    whole = chain(log)
    assert log == ["issue a"]
    whole.wait()
    whole.wait()
    assert log == ["issue a", "wait a", "issue b", "wait b", "issue c", "wait c", "end"]
    assert not whole.push()


def test_a_chain_goes_on_after_so_many_nudges() -> None:
    log: list[str] = []
    patient = chain(log)
    patient.nudge()
    assert log == ["issue a"]
    patient.nudge()
    assert log == ["issue a", "wait a", "issue b"]
    log.clear()
    quick = chain(log, count=3, quick=True)
    quick.nudge()
    assert log == ["issue a", "wait a", "issue b"]
    quick.nudge()
    quick.nudge()
    assert log[-1] == "issue c"
    for _ in range(5):
        quick.nudge()
    assert log[-1] == "issue c"      # nothing follows the last, so nobody waits for it before he must


def test_nothing_follows_what_has_failed() -> None:
    log: list[str] = []
    broken = chain(log, fails=True)
    with pytest.raises(WireError, match="the link broke"):
        broken.wait()
    broken.wait()
    assert log == ["issue a", "wait a"]


# ---- where ranks are

def test_ranks_find_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Everyone:
        def gather_objects(self, mine: str) -> list[str]:
            return [("b", None), ("a", None), ("b", None), ("a", None)]

    world = dplab.World(0, 4, 0, torch.device("cpu"), "gloo")
    found = hosts.found(world, Everyone())  # type: ignore[arg-type]
    assert [device.host for device in found.devices] == [0, 1, 0, 1]
    assert found.grid() == [[0, 2], [1, 3]]
    monkeypatch.setattr(hosts.process, "_BOOT", hosts.process.Path("/nowhere"))
    assert hosts.boot()


@pytest.mark.parametrize(("joined", "hosts_"), [
    ([[0, 1], [0, 1], [2, 3], [2, 3]], [0, 0, 1, 1]),      # two pairs with a bridge each
    ([[0, 2], [1, 3], [0, 2], [1, 3]], [0, 1, 0, 1]),
    ([[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]], [0, 0, 0, 0]),      # each joined to two, all to all in the end
    ([[0], [1], [2], [3]], [0, 0, 0, 0]),      # no NVLink: a host
    ([[0, 1], [0, 1], [2], [3]], [0, 0, 0, 0]),      # a pair and two alone
])
def test_islands_of_nvlink_count_as_hosts(joined: list[list[int]], hosts_: list[int]) -> None:
    names = hosts.islands(["kernel"] * 4, joined)
    assert [list(dict.fromkeys(names)).index(name) for name in names] == hosts_


def test_islands_stay_on_their_host() -> None:
    assert len(set(hosts.islands(["a", "a", "b", "b"], [[0, 1], [0, 1], [2, 3], [2, 3]]))) == 2


class Nvml:
    """NVML of a host whose GPUs 0 and 1 have a bridge."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    class NVMLError(Exception):
        """Its error."""

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid == "GPU-x":
            raise self.NVMLError
        return int(uuid[4:])

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        assert index == 2
        return 0 if {one, other} == {0, 1} else 5


def test_nvml_says_what_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [f"GPU-{number}" for number in range(3)]
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert [accelerators.joined(gpu, every) for gpu in every] == [every[:2], every[:2], every[2:]]
    assert accelerators.joined("GPU-x", [*every, "GPU-x"]) == ["GPU-x"]      # it does not tell
    assert accelerators.joined(None, every) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert accelerators.joined("GPU-0", every) == ["GPU-0"]
    assert accelerators.identity(torch.device("cpu")) is None


def test_ranks_with_gpus_find_their_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    class Everyone:
        """Four GPUs of one host, of which this rank has the third."""

        def gather_objects(self, mine: Any) -> list[Any]:
            if isinstance(mine, tuple):
                return [(mine[0], f"GPU-{rank}") for rank in range(4)]
            assert mine == [2, 3]
            return [[0, 1], [0, 1], [2, 3], [2, 3]]

    monkeypatch.setattr(accelerators, "identity", lambda device: "GPU-2")
    monkeypatch.setattr(accelerators, "joined", lambda mine, others: ["GPU-2", "GPU-3"])
    world = dplab.World(2, 4, 2, torch.device("cuda", 2), "nccl")
    assert hosts.found(world, Everyone()).grid() == [[0, 1], [2, 3]]  # type: ignore[arg-type]


def test_hosts_that_the_ranks_find_make_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if even and odd ranks were apart, with no topology given."""
    monkeypatch.setattr(axes.hosts, "found", lambda world, everyone: Hosts(devices=tuple(
        Device(rank=rank, host=rank % 2) for rank in range(4))))

    def body() -> tuple[list[int], list[int]]:
        mesh = Mesh.hybrid(dplab.init(), sharded=True)
        rank = dplab.init().rank
        return mesh.shard.gather_objects(rank), mesh.replicate.gather_objects(rank)

    assert in_threads(4, body) == [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]
    for rows, _, _ in in_threads(4, traffic, "zero2"):
        assert {"inside", "across"} & set(rows["reduce_scatter"])


@pytest.mark.parametrize(("strategy", "size", "message"), [
    ("zero2+hybrid", 2, r"hybrid needs several hosts .*; here are 2 ranks on 1 host: give such a topology"),
    ("ddp+hybrid", 2, r"hybrid needs several hosts"),
    ("ddp+hybrid", 1, r"here are 1 rank on 1 host"),
    ("zero1+hybrid+topology=2x1@10gbe", 2, r"here are 1, 1 ranks on 2 hosts"),
    ("zero1+topology=2x2@10gbe", 3, r"topology '2x2@10gbe' has 4 ranks .*, and the world has 3; start 4 ranks"),
    ("zero1+topology=2x2@10gbee", 4, r"link '10gbee' is not known; the nearest are 10GbE"),
])
def test_what_cannot_be_is_refused(strategy: str, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        in_threads(size, traffic, strategy)


def test_hybrid_takes_its_mesh_from_the_hosts() -> None:
    with pytest.raises(UsageError, match=r"strategy 'zero1\+hybrid' takes its mesh from the hosts; leave"):
        dplab.parallelize(torch.nn.Linear(2, 2), lambda ps: torch.optim.SGD(ps, lr=0.1), "zero1+hybrid", mesh=(1, 1))
