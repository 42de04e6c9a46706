"""What a process takes of the machine: processor time, memory, and the GPU it computes on. Qt-free.

Reading costs about 0.1 ms a process and 1 ms for a GPU, so it is done seldom, and only for who looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessLoad:
    cores: float | None
    """Processor time since the reading before, per second of it: 1.0 is one core. None: the first reading."""
    memory: int
    """Resident bytes."""


@dataclass(frozen=True, slots=True)
class GpuLoad:
    busy: float
    """Share of the last fraction of a second in which a kernel ran, 0 to 1, by whatever process (NVML)."""
    memory: int
    """Bytes in use on the device, by all processes."""
    total: int


class ProcessLoads:
    """Reads processes by their ids, again and again."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def read(self, pids: dict[str, int | None]) -> dict[str, ProcessLoad]:
        """name -> process id, to name -> load; a process that is not there, or cannot be read, is left out."""
        import psutil  # costs the start of the window 20 ms

        loads: dict[str, ProcessLoad] = {}
        known, self._known = self._known, {}
        for name, pid in pids.items():
            if pid is None:
                continue
            try:
                process = known.get(pid)
                first = process is None or not process.is_running()
                if first:
                    process = psutil.Process(pid)
                percent = process.cpu_percent(None)
                loads[name] = ProcessLoad(None if first else percent / 100, process.memory_info().rss)
            except psutil.Error:
                continue
            self._known[pid] = process
        return loads


class GpuReader:
    """The GPU on which a process computes, through NVML where its Python binding is installed."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._silent = False
        self._handles: dict[int, Any] = {}

    def read(self, pid: int) -> GpuLoad | None:
        """None where there is no NVML, or it does not know of the process."""
        if self._silent:
            return None
        try:
            nvml = self._start()
            if pid not in self._handles:
                self._handles = {pid: self._find(pid)}
            handle = self._handles[pid]
            if handle is None:
                self._handles.clear()  # it may not have touched the GPU yet
                return None
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            return GpuLoad(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, memory.used, memory.total)
        except Exception:  # a driver that is gone, a binding that does not fit it: the window goes on without
            self._silent = True
            return None

    def _start(self) -> Any:
        if self._nvml is None:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        return self._nvml

    def _find(self, pid: int) -> Any:
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        for handle in handles:
            if pid in [process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)]:
                return handle
        return handles[0] if len(handles) == 1 else None  # in a container ids are others
