"""Everything about a GPU that only a GPU can prove, in one command of under five minutes::

    python -m tests.gpu_check [--json FILE] [--only SECTION,…] [--seconds N]      on a machine with a GPU
    python -m tests.gpu_check --rehearsal                                         on any: the same code, tiny, no rates

It needs what comes with torch and Transformers, no network and no files: models are made on the device from a seed.
Sections, in the order in which they run:

    environment  card, driver, versions
    ceilings     copy bandwidth, matrix rate, launch of an empty graph, as measured: what the rest is held against
    ids          the engine's ids in float32 against those of Transformers on the processor
    kernels      every shipped configuration against its reference, on the card
    decode       attention of decode steps as a share of the copy bandwidth, or against the launch of an empty graph
    rates        output tokens a second of the engine, beside Transformers' generate and generate_batch
    prefill      attention and a whole prefill as a share of the matrix rate; products with 8-bit weights
    swap         blocks out to host memory and back

Each section has a limit of time and, where it fails, fails alone. Exit 0: all ran, every check held and every target
was met; 1: not so; 2: wrong usage, or no GPU. The definitions of figures stand where they are computed, in tests/gpu.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.output_files import target_fault
from tests.gpu.lane import Lane, NoGpuError, Outcome

LIMITS = {
    "environment": 60.0,
    "ceilings": 30.0,
    "ids": 90.0,
    "kernels": 90.0,
    "decode": 60.0,
    "rates": 130.0,
    "prefill": 50.0,
    "swap": 30.0,
}
"""Seconds that each section may take at most, the start of its process included."""
SECONDS = 290.0
REHEARSAL_FACTOR = 4
"""Interpreted kernels, on whatever cores there are: each limit is so much wider."""
CHECKED = ("ids", "kernels")
"""What is checked and not measured, and so may share the card and the processor: mostly it compiles, or waits for the
reference on the processor."""
KERNEL_LANES = 8
"""Processes that check kernels side by side."""
MARKS = {None: " ", True: "✓", False: "✗"}


@dataclass
class Run:
    """What came in so far; figures and outcomes are printed as they come."""

    rehearsal: bool
    began: float = field(default_factory=time.monotonic)
    figures: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_figure(self, figure: dict[str, Any]) -> None:
        with self._lock:
            self.figures.append(figure)
            if figure["listed"] or figure["met"] is False:
                print(line_of(figure), flush=True)

    def add_outcome(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes.append(outcome)
            if outcome.error is None:
                print(f"  {outcome.item}: done after {outcome.seconds:.1f} s", flush=True)
            else:
                print(f"✗ {outcome.item} failed after {outcome.seconds:.1f} s:\n{outcome.error}", flush=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def failed(self) -> bool:
        """Also where nothing was checked at all."""
        wrong = any(figure["met"] is False for figure in self.figures)
        return wrong or not self.outcomes or any(outcome.error is not None for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        return {
            "rehearsal": self.rehearsal,
            "seconds": round(self.elapsed, 1),
            "ok": not self.failed,
            "targets": {
                f"{figure['section']}: {figure['name']}": "met" if figure["met"] else "missed"
                for figure in self.figures
                if figure["target"] and figure["met"] is not None
            },
            "failed": {outcome.item: outcome.error for outcome in self.outcomes if outcome.error is not None},
            "figures": self.figures,
        }


def line_of(figure: dict[str, Any]) -> str:
    value = figure["value"]
    if value is None:
        shown = "ran"
    else:
        shown = value if isinstance(value, str) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        shown = f"{shown} {figure['unit']}".rstrip()
    target = f"   target {figure['target']}" if figure["target"] else ""
    return f"{MARKS[figure['met']]} {figure['section']:<12}{figure['name']:<58} {shown}{target}"


def summary(run: Run) -> list[str]:
    """One short table: a line for each kind of target, and whatever failed."""
    lines = ["", "Summary (a rehearsal: nothing was measured)" if run.rehearsal else "Summary"]
    for section in LIMITS:
        figures = [figure for figure in run.figures if figure["section"] == section]
        kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for figure in figures:
            if figure["target"]:
                kinds.setdefault((figure["name"].rpartition(": ")[2], figure["target"]), []).append(figure)
        lines += [_line_of_kind(section, kind, target, among) for (kind, target), among in kinds.items()]
        lines += [line_of(figure) for figure in figures if figure["met"] is False and not figure["target"]]
        held = sum(figure["met"] is True and not figure["target"] for figure in figures)
        if held:
            lines.append(f"✓ {section:<12}{held} checks held")
    lines += [f"✗ {outcome.item} failed" for outcome in run.outcomes if outcome.error is not None]
    verdict = "something failed or missed its target" if run.failed else "all well"
    return [*lines, f"{verdict}, after {run.elapsed:.0f} s"]


def _line_of_kind(section: str, kind: str, target: str, figures: list[dict[str, Any]]) -> str:
    """How many of ``figures`` met the one target that they have in common, and the one that is worst."""
    measured = [figure for figure in figures if figure["value"] is not None]
    if not measured:
        return f"  {section:<12}{kind} {target}: {len(figures)} ran"
    met = sum(figure["met"] for figure in measured)
    worst = (max if target.startswith("≤") else min)(measured, key=lambda figure: figure["value"])
    words = f"{kind} {target}: {met} of {len(measured)} met, the worst {worst['value']:.4g} {worst['unit']}"
    return f"{MARKS[met == len(measured)]} {section:<12}{words} ({worst['name'].rpartition(': ')[0]})"


def run_sections(run: Run, sections: list[str], seconds: float) -> None:
    """Raises NoGpuError."""
    facts: dict[str, Any] = {}

    def limit(item: str) -> float:
        return min(LIMITS[item.partition(":")[0]] * (REHEARSAL_FACTOR if run.rehearsal else 1), seconds - run.elapsed)

    def lane(items: list[str], **environment: str) -> Lane:
        return Lane(items, limit, run.add_figure, run.add_outcome, run.rehearsal, facts, environment)

    for is_checked, group in groupby(sections, key=lambda section: section in CHECKED):
        if not is_checked or run.rehearsal or facts.get("one_process"):
            lane(list(group)).run()
            continue
        count = max(1, min(KERNEL_LANES, (os.cpu_count() or 1) // 2))
        lanes = []
        for section in group:
            if section == "kernels":
                lanes += [lane([f"kernels:{index}/{count}"], OMP_NUM_THREADS="2") for index in range(count)]
            else:
                lanes.append(lane([section]))
        side_by_side(lanes)


def side_by_side(lanes: list[Lane]) -> None:
    """Raises the first of what they raise, when all have ended."""
    raised: list[Exception] = []

    def run(lane: Lane) -> None:
        try:
            lane.run()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description="Check and measure a GPU.")
    parser.add_argument("--rehearsal", action="store_true", help="on the processor, tiny, interpreted; no rates")
    parser.add_argument("--only", metavar="SECTION,…", help=f"of {', '.join(LIMITS)}")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help=f"time for all (default: {SECONDS:g}, a rehearsal {REHEARSAL_FACTOR * SECONDS:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    options = parser.parse_args(arguments)
    asked = set(options.only.split(",")) if options.only else set(LIMITS)
    if unknown := sorted(asked - set(LIMITS)):
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(LIMITS)}")
    if fault := target_fault("--json", options.json):
        parser.error(fault)
    if asked & {"decode", "rates", "prefill", "swap"}:
        asked.add("ceilings")

    run = Run(options.rehearsal)
    seconds = options.seconds
    if seconds is None:
        seconds = SECONDS * (REHEARSAL_FACTOR if options.rehearsal else 1)
    try:
        run_sections(run, [section for section in LIMITS if section in asked], seconds)
    except NoGpuError as error:
        print(f"There is no GPU to check here ({str(error).strip()}). --rehearsal runs every section on the processor.")
        return 2
    finally:  # also of a run that somebody breaks off
        if options.json is not None:
            options.json.write_text(json.dumps(run.to_json(), indent=1, allow_nan=False) + "\n")
    print("\n".join(summary(run)))
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
