"""What memory the machine offers a model. Containers are taken at their limits."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping, in this container if there is one."""
    available = int(psutil.virtual_memory().available)
    limit = _read_words(cgroup / "memory.max")
    used = _read_words(cgroup / "memory.current")
    if limit and used and limit[0].isdigit() and used[0].isdigit():
        # File pages count as used, but are given back when memory is needed.
        statistics = dict(line.split() for line in _read_text(cgroup / "memory.stat").splitlines())
        reclaimable = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
        available = min(available, max(0, int(limit[0]) - int(used[0]) + reclaimable))
    return available


def memory_limit(cgroup: Path = _CGROUP) -> int:
    """Bytes that this machine, or this container, has in all."""
    total = int(psutil.virtual_memory().total)
    limit = _read_words(cgroup / "memory.max")
    return min(total, int(limit[0])) if limit and limit[0].isdigit() else total


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _read_words(path: Path) -> list[str]:
    return _read_text(path).split()
