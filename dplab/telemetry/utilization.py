"""How busy the machine is with a run: CPU and memory of each rank, and its GPU through NVML.

Sampled from outside (the supervisor), so that no rank gives up its interpreter for it. What a machine cannot
tell is said once and by name (`sources`), and is absent from the gauges: never a zero, never a blank.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dplab.telemetry import process


@dataclass(frozen=True)
class Source:
    """One quantity of the gauges, its unit, and why it cannot be measured here (None where it can)."""

    name: str
    unit: str
    reason: str | None = None

    @property
    def measurable(self) -> bool:
        """True where the gauges carry it."""
        return self.reason is None

    def __str__(self) -> str:
        return f"{self.name} [{self.unit}]" + ("" if self.measurable else f": not measurable here, {self.reason}")


_PROCESS_SOURCES = (Source("cpu", "percent of one core"), Source("private", "bytes"), Source("resident", "bytes"))
_TRAFFIC = ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")
_GPU_UNITS = {"gpu": "percent", "gpu_memory": "bytes", "power": "watts", "temperature": "degrees Celsius",
              **dict.fromkeys(_TRAFFIC, "bytes a second")}
TRAFFIC_SECONDS = 4.0
"""How often traffic is asked for: NVML watches the PCIe link for 20 ms to answer."""
_NVLINK_FIELDS = (138, 139)
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: KiB so far, of all links together where the scope is _ALL_LINKS."""
_ALL_LINKS = 0xFFFFFFFF


def sources(gpus: Gpus | None = None) -> dict[str, Source]:
    """Every quantity that the gauges know, each with the reason where this machine cannot tell it."""
    return {source.name: source for source in (*_PROCESS_SOURCES, *(Gpus() if gpus is None else gpus).sources)}


class Gpus:
    """The machine's NVIDIA GPUs through NVML, which needs no CUDA context; none where there is no driver."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self.reason: str | None = None
        self._traffic_at: dict[Any, float] = {}
        self._linked: dict[Any, tuple[float, list[float]]] = {}
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index)
                             for index in range(self._nvml.nvmlDeviceGetCount())]
        except ImportError:
            self.reason = "the package nvidia-ml-py is not installed"
        except self._errors() as error:
            self.reason = f"NVML says: {error}"
        if self.reason is None and not self._handles:
            self.reason = "NVML finds no GPU"

    @property
    def sources(self) -> list[Source]:
        """The GPU's quantities; a quantity that one GPU lacks (power on some) is found out by asking each."""
        if self.reason is not None:
            return [Source(name, unit, self.reason) for name, unit in _GPU_UNITS.items()]
        found: dict[str, float] = {}
        self._traffic_at.clear()
        for handle in self._handles:
            found |= self._read(handle)
        if self._linked:      # a rate takes two readings
            found |= dict.fromkeys(_TRAFFIC[2:], 0.0)
        return [Source(name, unit, None if name in found else "no GPU here reports it")
                for name, unit in _GPU_UNITS.items()]

    def of_process(self, pid: int) -> dict[str, float]:
        """Gauges of the GPUs that a process uses: percent, power and temperature the mean, memory and traffic the sum.

        `gpu_memory` is what is in use on the whole device. Empty where the process holds no CUDA context yet,
        and where NVML cannot name processes (another pid namespace): the caller then asks by index.
        """
        readings = [self._read(handle) for handle in self._handles if pid in self._pids(handle)]
        return _combine(readings)

    def at(self, index: int) -> dict[str, float]:
        """Gauges of one GPU by its index among NVML's; empty where there is none."""
        return self._read(self._handles[index]) if 0 <= index < len(self._handles) else {}

    def __len__(self) -> int:
        return len(self._handles)

    def _read(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        readers: dict[str, Callable[[], Any]] = {
            "gpu": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu_memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,  # milliwatts
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        values: dict[str, float] = {}
        for name, read in readers.items():
            try:
                values[name] = float(read())
            except self._errors():  # this GPU does not report it: the name stays absent, sources() says why
                continue
        moment = time.monotonic()
        if moment >= self._traffic_at.get(handle, moment):
            self._traffic_at[handle] = moment + TRAFFIC_SECONDS
            values |= self._pcie(handle) | self._nvlink(handle, moment)
        return values

    def _pcie(self, handle: Any) -> dict[str, float]:
        """Bytes a second over the PCIe link, as the GPU sends and receives."""
        unreported: tuple[type[Exception], ...] = (AttributeError, *self._kinds())
        try:
            return {name: 1e3 * float(self._nvml.nvmlDeviceGetPcieThroughput(handle, counter))
                    for counter, name in enumerate(_TRAFFIC[:2])}
        except unreported:
            return {}

    def _nvlink(self, handle: Any, moment: float) -> dict[str, float]:
        """Bytes a second over all NVLinks since the last time; nothing the first time, and without such links."""
        unreported: tuple[type[Exception], ...] = (AttributeError, TypeError, *self._kinds())
        try:
            told = self._nvml.nvmlDeviceGetFieldValues(handle, [(field, _ALL_LINKS) for field in _NVLINK_FIELDS])
            counters = [1024.0 * field.value.ullVal for field in told if not field.nvmlReturn]
        except unreported:
            return {}
        if len(counters) < len(_NVLINK_FIELDS):
            return {}
        before, self._linked[handle] = self._linked.get(handle), (moment, counters)
        if before is None or moment <= before[0]:
            return {}
        return {name: max(0.0, now - then) / (moment - before[0])
                for name, now, then in zip(_TRAFFIC[2:], counters, before[1], strict=True)}

    def _pids(self, handle: Any) -> set[int]:
        try:
            return {found.pid for found in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except self._errors():
            return set()

    def _kinds(self) -> tuple[type[Exception], ...]:
        return () if self._nvml is None else (self._nvml.NVMLError,)

    def _errors(self) -> type[Exception] | tuple[()]:
        return () if self._nvml is None else self._nvml.NVMLError


class Sampler:
    """Takes the gauges of one rank, twice a second or so: each reading is what was used since the last."""

    def __init__(self, pid: int, local_rank: int, gpus: Gpus, visible_gpus: list[int]) -> None:
        self._meter = process.Meter(pid)
        self.pid = pid
        self._gpus = gpus
        self._index = visible_gpus[local_rank % len(visible_gpus)] if visible_gpus else None
        self._last: tuple[float, process.Usage] | None = None

    def sample(self) -> dict[str, dict[str, float]]:
        """Gauges by name, `utilization` and `process`; empty where the process has ended."""
        now, usage = time.monotonic(), self._meter.read()
        if usage is None:
            return {}
        busy: dict[str, float] = {}
        if self._last is not None and now > self._last[0]:
            busy["cpu"] = round(100 * (usage.cpu_seconds - self._last[1].cpu_seconds) / (now - self._last[0]), 1)
        self._last = (now, usage)
        busy |= self._gpus.of_process(self.pid) or ({} if self._index is None else self._gpus.at(self._index))
        return {"utilization": busy, "process": {"private": usage.private, "resident": usage.resident}}


def visible_gpus(environ: dict[str, str], count: int) -> list[int]:
    """NVML indices that CUDA_VISIBLE_DEVICES leaves, in its order; all where it is unset or names GPUs by UUID."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.lstrip("-").isdigit() for part in parts):
        return list(range(count))
    indices = []
    for part in map(int, parts):
        if part < 0:
            break  # as CUDA does: nothing behind an invalid index is visible
        indices.append(part)
    return indices


def describe(found: dict[str, Source]) -> dict[str, dict[str, str | None]]:
    """Sources as plain values, as they stand in the header of utilization.jsonl."""
    return {name: asdict(source) for name, source in found.items()}


def _combine(readings: list[dict[str, float]]) -> dict[str, float]:
    combined: dict[str, float] = {}
    for name in {name for reading in readings for name in reading}:
        values = [reading[name] for reading in readings if name in reading]
        combined[name] = sum(values) if name in ("gpu_memory", *_TRAFFIC) else sum(values) / len(values)
    return combined
