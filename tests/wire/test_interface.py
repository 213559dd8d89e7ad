"""The wire's byte counters against the network interface's own, across two network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

HOSTS = tuple(f"dplab-{os.getpid()}-{side}" for side in "ab")
LINK = "lab0"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not shutil.which("ip") or not hasattr(os, "geteuid") or os.geteuid() != 0,
                       reason="needs root and iproute2 for network namespaces"),
]

PROGRAM = textwrap.dedent("""
    import json, sys
    import torch
    from torch import nn
    import dplab

    strategy = sys.argv[1]
    world = dplab.init(device="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    engine = dplab.parallelize(model, lambda ps: torch.optim.SGD(ps, lr=0.01), strategy)

    def sent():
        return int(open("/sys/class/net/lab0/statistics/tx_bytes").read())

    def step():
        engine.backward(engine(torch.ones(4, 512)).square().mean())
        engine.step()

    step()
    engine.mesh.world.barrier()
    wire, link = engine.wire(), sent()
    for _ in range(20):
        step()
    engine.mesh.world.barrier()
    after, link = engine.wire(), sent() - link
    counted = sum(row["bytes"] - wire.get(name, {"bytes": 0})["bytes"] for name, row in after.items())
    print(json.dumps({"counted": counted, "link": link}))
""")


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Path]:
    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True)

    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "name", LINK, "netns", HOSTS[0], "type", "veth", "peer", "name", LINK, "netns", HOSTS[1])
        for number, host in enumerate(HOSTS, start=1):
            for command in (["addr", "add", f"10.77.0.{number}/24", "dev", LINK], ["link", "set", LINK, "up"],
                            ["link", "set", "lo", "up"]):
                ip("-n", host, *command)
    except subprocess.CalledProcessError as error:
        remove_hosts()
        pytest.skip(f"network namespaces do not work here: {error.stderr.decode().strip()}")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    yield program
    remove_hosts()


def remove_hosts() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_counters_equal_what_the_interface_sends(two_hosts: Path, strategy: str) -> None:
    ranks = []
    for rank, host in enumerate(HOSTS):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
               "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29501", "GLOO_SOCKET_IFNAME": LINK,
               "PYTHONPATH": str(Path(__file__).parents[2])}
        ranks.append(subprocess.Popen(["ip", "netns", "exec", host, sys.executable, str(two_hosts), strategy],
                                      env=env, stdout=subprocess.PIPE, text=True))
    try:
        for rank in ranks:
            out, _ = rank.communicate(timeout=90)
            assert rank.returncode == 0
            seen = json.loads(out.splitlines()[-1])
            # the rest is TCP's and IP's headers, acknowledgements and gloo's own
            assert seen["counted"] <= seen["link"] <= 1.03 * seen["counted"], seen
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
