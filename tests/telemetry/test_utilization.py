"""Gauges of processes and GPUs; what cannot be measured is said by name."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dplab.telemetry import process, utilization


class NvmlError(Exception):
    pass


class Nvml:
    """Two GPUs: the first runs process 100, the second tells no power."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=[40, 60][handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=[1000, 2000][handle])

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise NvmlError("Not Supported")
        return 250_000

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 50 + handle

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:
        if handle == 1:
            raise NvmlError("Not Supported")
        return [300, 400][counter]      # KB a second

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[tuple[int, int]]) -> list[Any]:
        """KiB so far; the second GPU has no NVLink."""
        assert [field for field, _ in fields] == [138, 139]
        self.sent = getattr(self, "sent", 0) + 2000
        return [SimpleNamespace(nvmlReturn=handle, value=SimpleNamespace(ullVal=count))
                for count in (self.sent, 2 * self.sent)]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=100)] if handle == 0 else []


def gpus(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> utilization.Gpus:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return utilization.Gpus()


def test_gauges_of_a_process_and_of_a_gpu_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus(monkeypatch, Nvml())
    assert found.of_process(100) == {"gpu": 40, "gpu_memory": 1000, "power": 250, "temperature": 50,
                                     "pcie_sent": 300e3, "pcie_received": 400e3}
    assert found.of_process(101) == {}
    assert found.at(1) == {"gpu": 60, "gpu_memory": 2000, "temperature": 51}
    assert found.at(2) == {}
    assert all(source.measurable for source in found.sources)


def test_a_process_on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: [SimpleNamespace(pid=7)])
    assert gpus(monkeypatch, nvml).of_process(7) == {"gpu": 50, "gpu_memory": 3000, "power": 250, "temperature": 50.5,
                                                     "pcie_sent": 300e3, "pcie_received": 400e3}


def test_traffic_is_asked_for_now_and_then_and_nvlink_s_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = [100.0]
    monkeypatch.setattr(utilization.time, "monotonic", lambda: moment[0])
    found = gpus(monkeypatch, Nvml())
    assert set(found.at(0)) == {"gpu", "gpu_memory", "power", "temperature", "pcie_sent", "pcie_received"}
    moment[0] += 1
    assert "pcie_sent" not in found.at(0)      # asked for a second ago
    moment[0] += 4
    told = found.at(0)
    assert (told["nvlink_sent"], told["nvlink_received"]) == (2000 * 1024 / 5, 4000 * 1024 / 5)
    assert not {"nvlink_sent", "pcie_sent"} & set(found.at(1))


def test_no_driver_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()

    def no_driver() -> None:
        raise NvmlError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    told = utilization.sources()
    assert str(told["gpu"]) == "gpu [percent]: not measurable here, NVML says: Driver Not Loaded"
    assert str(told["cpu"]) == "cpu [percent of one core]"
    assert utilization.describe(told)["power"] == {
        "name": "power", "unit": "watts", "reason": "NVML says: Driver Not Loaded"}


def test_no_gpu_no_package_and_a_quantity_that_none_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lambda: 0)
    assert gpus(monkeypatch, nvml).reason == "NVML finds no GPU"
    assert gpus(monkeypatch, None).reason == "the package nvidia-ml-py is not installed"
    nvml = Nvml()
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", lambda index: 1)
    reasons = {source.name: source.reason for source in gpus(monkeypatch, nvml).sources}
    unreported = ("power", "pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")
    assert reasons == {"gpu": None, "gpu_memory": None, "temperature": None,
                       **dict.fromkeys(unreported, "no GPU here reports it")}


def test_visible_gpus() -> None:
    def visible(text: str) -> list[int]:
        return utilization.visible_gpus({"CUDA_VISIBLE_DEVICES": text}, 4)

    assert utilization.visible_gpus({}, 4) == [0, 1, 2, 3]
    assert visible("2,0") == [2, 0]
    assert visible("1,-1,3") == [1]
    assert visible("") == []
    assert visible("GPU-8932f937") == [0, 1, 2, 3]


def test_sampling_a_busy_process_and_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus(monkeypatch, Nvml())
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        sampler = utilization.Sampler(busy.pid, 1, found, [0, 1])
        first = sampler.sample()
        assert first["utilization"] == found.at(1)  # no CPU share before there are two readings
        assert first["process"].keys() == {"private", "resident"}
        start = process.usage(busy.pid)
        assert start is not None
        while (now := process.usage(busy.pid)) and now.cpu_seconds < start.cpu_seconds + 0.1:
            pass
        assert 1 < sampler.sample()["utilization"]["cpu"] < 150
    finally:
        busy.kill()
        busy.wait()
    assert sampler.sample() == {}


def test_private_bytes_are_what_the_process_alone_holds() -> None:
    before = process.usage(os.getpid())
    block = bytearray(b"x") * 50_000_000
    after = process.usage(os.getpid())
    assert before is not None
    assert after is not None
    assert 45_000_000 < after.private - before.private < 60_000_000
    assert len(block) == 50_000_000


def test_between_walks_of_all_pages_private_bytes_follow_the_anonymous_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    walk = process._private_linux
    monkeypatch.setattr(process, "_private_linux", lambda pid: walks.append(pid) or walk(pid))
    monkeypatch.setattr(process.Meter, "WALKING", 1e-9)
    meter = process.Meter(os.getpid())
    before = meter.read()
    block = bytearray(b"x") * 50_000_000
    after = meter.read()
    assert walks == [os.getpid()]
    assert before is not None
    assert after is not None
    assert 45_000_000 < after.private - before.private < 60_000_000
    assert len(block) == 50_000_000


def test_pages_are_walked_again_once_that_costs_little_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[float] = []
    clock = iter([0.0, 0.01, 5.0, 11.0, 11.02, 12.0])
    monkeypatch.setattr(process.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(process, "_private_linux", lambda pid: walks.append(pid) or 1000)
    monkeypatch.setattr(process.Meter, "WALKING", 0.001)
    meter = process.Meter(os.getpid())
    for expected in (1, 1, 2, 2):            # read at 0, 5, 11 and 12 seconds; a walk took 10 and 20 ms
        meter.read()
        assert len(walks) == expected
