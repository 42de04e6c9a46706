"""What the definition of the Trace Event Format asks of a file, as a check: object form, phases X, i, C and M."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
HALF_A_NANOSECOND = 5e-4
"""In microseconds: what the digits of a file leave open."""


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def load_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that holds to the format; AssertionError with what does not."""
    trace = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    assert isinstance(trace, dict) and isinstance(trace["traceEvents"], list)
    assert trace.get("displayTimeUnit") in (None, "ms", "ns")
    assert all(isinstance(value, str) for value in trace.get("otherData", {}).values())
    for event in trace["traceEvents"]:
        _check_event(event)
    _check_names(trace["traceEvents"])
    _check_nesting(trace["traceEvents"])
    return trace["traceEvents"]


def _check_event(event: dict[str, Any]) -> None:
    assert isinstance(event["name"], str) and event["name"], event
    for key in ("pid", "tid"):
        assert type(event[key]) is int and 0 <= event[key] < 2**31, event
    assert type(event["ts"]) in (int, float) and math.isfinite(event["ts"]) and event["ts"] >= 0, event
    assert isinstance(event.get("args", {}), dict), event
    phase = event["ph"]
    assert set(event) <= {
        "name",
        "ph",
        "pid",
        "tid",
        "ts",
        "args",
        "cat",
        "cname",
        *{"X": ["dur"], "i": ["s"]}.get(phase, []),
    }
    if phase == "X":
        assert type(event["dur"]) in (int, float) and math.isfinite(event["dur"]) and event["dur"] >= 0, event
    elif phase == "i":
        assert event["s"] in ("g", "p", "t"), event
    elif phase == "C":
        values = event["args"].values()
        assert values and all(type(v) in (int, float) and math.isfinite(v) for v in values), event
    elif phase == "M":
        key, kind = METADATA[event["name"]]
        assert type(event["args"][key]) is kind, event
    else:
        raise AssertionError(f"phase {phase!r}: {event}")


def _check_names(events: list[dict[str, Any]]) -> None:
    """Every process and thread has one name, and a thread belongs to one process."""
    processes: dict[int, str] = {}
    threads: dict[int, tuple[int, str]] = {}
    for event in events:
        if event["name"] == "process_name":
            assert event["pid"] not in processes, event
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            assert event["tid"] not in threads, event
            threads[event["tid"]] = (event["pid"], event["args"]["name"])
    for event in events:
        assert event["pid"] in processes, event
        if event["ph"] in "Xi":
            assert threads[event["tid"]][0] == event["pid"], event


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of a thread come in order of their beginnings, and each lies within the one it begins in."""
    open_ends: dict[int, list[float]] = defaultdict(list)
    begun: dict[int, float] = defaultdict(float)
    for event in events:
        if event["ph"] != "X":
            continue
        thread, begin, end = event["tid"], event["ts"], event["ts"] + event["dur"]
        assert begin >= begun[thread] - HALF_A_NANOSECOND, event
        begun[thread] = begin
        ends = open_ends[thread]
        while ends and ends[-1] <= begin + HALF_A_NANOSECOND:
            ends.pop()
        assert not ends or end <= ends[-1] + HALF_A_NANOSECOND, f"cuts the slice around it: {event}"
        ends.append(end)


def named(events: list[dict[str, Any]]) -> dict[int, str]:
    """Names of the threads."""
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
