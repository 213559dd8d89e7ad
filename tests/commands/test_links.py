"""--topology: what it is checked against, what a run on emulated links reports, and who cannot have them."""

from __future__ import annotations

import argparse
import json

import pytest

import dplab
from dplab.cli import main
from dplab.commands.compare import _not_emulated
from dplab.commands.links import emulated, settle
from dplab.errors import UsageError
from dplab.peers.catalog import system
from dplab.telemetry.rundir import RunDirectory


def asked(topology: str | None = None, world_size: int | None = None) -> argparse.Namespace:
    return argparse.Namespace(topology=topology, world_size=world_size)


@pytest.mark.parametrize(("args", "given", "strategies", "ranks"), [
    (asked(), ["zero2"], ["zero2"], 2),
    (asked(world_size=3), ["zero2"], ["zero2"], 3),
    (asked("2x2@10gbe"), ["zero2", "ddp+accum2"], ["zero2+topology=2x2@10gbe", "ddp+accum2+topology=2x2@10gbe"], 4),
    (asked("2x2@10gbe", 4), ["zero2+topology=2x2@10gbe"], ["zero2+topology=2x2@10gbe"], 4),
    (asked(), ["ddp+topology=3x3090"], ["ddp+topology=3x3090"], 3),
])
def test_links_and_ranks_go_together(args, given, strategies, ranks):
    assert settle(args, given) == strategies
    assert args.world_size == ranks


@pytest.mark.parametrize(("args", "given", "message"), [
    (asked("2x2@10gbe", 3), ["ddp"], r"topology '2x2@10gbe' has 4 ranks \(2 hosts x 2 ranks, 10GbE between hosts, "
                                     r"PCIe4 inside\), and --world-size is 3; give --world-size 4, or another"),
    (asked(None, 3), ["ddp+topology=2x2@10gbe"], r"topology '2x2@10gbe' has 4 ranks .*, and --world-size is 3"),
    (asked("2x2@10gbe"), ["ddp+topology=2x1@10gbe"], r"--topology 2x2@10gbe and strategy 'ddp\+topology=2x1@10gbe' "
                                                     r"name different links; leave one out"),
    (asked(), ["ddp+topology=2x1@10gbe", "zero1+topology=2x2@10gbe"], r"'2x2@10gbe' has 4 ranks .* --world-size is 2"),
    (asked("2x2@-1Gb/s"), ["ddp"], r"topology '2x2@-1Gb/s': link '-1Gb/s' is no number above 0 with its unit"),
    (asked("2x2@nvlonk"), ["ddp"], r"link 'nvlonk' is not known; the nearest are NVLink"),
])
def test_what_does_not_fit_is_refused(args, given, message):
    with pytest.raises(UsageError, match=message):
        settle(args, given)


def test_the_command_line_refuses_with_status_2(capsys):
    assert main(["train", "--topology", "2x2@-1Gb/s"]) == 2
    assert "no number above 0" in capsys.readouterr().err
    assert main(["compare", "ddp", "--topology", "2x2@10gbe", "--world-size", "3"]) == 2
    assert "give --world-size 4" in capsys.readouterr().err


def test_a_run_on_emulated_links_says_so_and_records_them(capsys):
    assert main(["train", "--topology", "2x1@1gbe", "--strategy", "zero1", "--steps", "3", "--batch-size", "1",
                 "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["emulated"] == "2 hosts x 1 rank, 1GbE between hosts"
    assert (told["strategy"], told["world_size"]) == ("zero1+topology=2x1@1gbe", 2)
    assert told["wire"]["reduce_scatter"]["across"] == told["wire"]["reduce_scatter"]["bytes"] > 0
    assert RunDirectory(told["run_dir"]).spec.strategy == "zero1+topology=2x1@1gbe"
    carried = told["wire"]["reduce_scatter"]["bytes"] / 3 / 117.7e6
    assert told["step_ms_median"] > 1e3 * carried
    assert emulated("zero1") == {}


@pytest.mark.parametrize(("name", "strategy", "backend"), [
    ("zero2", "zero2", None), ("zero2@gloo", "zero2", "gloo"),
    ("ddp+topology=2x2@10gbe", "ddp+topology=2x2@10gbe", None),
    ("ddp+topology=2x2@10gbe@gloo", "ddp+topology=2x2@10gbe", "gloo"),
])
def test_a_system_may_name_links_and_a_backend(name, strategy, backend):
    found = system(name)
    assert (found.name, found.strategy, found.backend) == (name, strategy, backend)


@pytest.mark.parametrize(("strategy", "message"), [
    ("zero2+topology=2x2@10gbe", r"topology '2x2@10gbe' has 4 ranks .*, and the world has 2; start 4 ranks"),
    ("zero2+topology=2x1@10gbee", r"link '10gbee' is not known; the nearest are 10GbE"),
    ("zero2+hybrid+topology=2x1@10gbe", r"hybrid needs several hosts .* here are 1, 1 ranks on 2 hosts"),
])
def test_launch_refuses_links_that_do_not_fit(strategy, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        dplab.launch("dplab.workloads.train:train", world_size=2, strategy=strategy, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_rivals_have_no_emulated_links():
    assert _not_emulated(system("torch:ddp"), asked("2x2@10gbe")) == (
        "its collectives do not go through dplab's, so no links can be emulated under them")
    assert _not_emulated(system("torch:ddp"), asked()) is None
    assert _not_emulated(system("zero2"), asked("2x2@10gbe")) is None
    with pytest.raises(UsageError, match=r"backend 'mpi' is not known"):
        system("zero2@mpi")
