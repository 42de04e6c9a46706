"""``batchscope demo``: the real window drives itself through a scenario, shows what came of it and quits.

Without a display the same window is rendered offscreen. ``--json -`` writes to standard output and nothing else goes
there. Exit 0 done, 1 failed (no model, the engine died, interrupted), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from app.demo_plan import DemoPlan, LoadingReport
from engine.output_files import OutputFailure, deliver, target_fault
from engine.workload import EngineOptions, WorkloadError, load_scenario

DONE, FAILED, WRONG_USAGE = 0, 1, 2
DEFAULT_SCENARIO = "kv-crunch"
DEFAULT_PICTURE = Path("batchscope-demo.png")
"""Where the picture goes that nobody asked a place for, when there is no display to look at."""
ENGINE_OPTIONS = ("model", "dtype", "device", "threads", "max_model_len", "kv_blocks")
"""Options before the command's name that are for the engine."""


class UsageError(ValueError):
    """Options that make no sense; the message says which."""


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo of parsed command-line options; returns the exit code. Raises ConfigError on a bad knob."""
    try:
        plan = _plan(options)
        _check_places(plan.screenshot, options.json)
    except (WorkloadError, UsageError) as error:
        print(f"batchscope demo: {error}", file=sys.stderr)
        return WRONG_USAGE
    if options.offscreen:
        os.environ["QT_QPA_PLATFORM"] = "offscreen"
    from app.demo_driver import drive  # only now: Qt takes its platform from the environment

    outcome = drive(plan, LoadingReport())
    try:
        if outcome.result:
            text = json.dumps(outcome.result, allow_nan=False, indent=2) + "\n"
            deliver(options.json, text, sys.stdout, lambda: _print_table(outcome.result))
    except OutputFailure as failure:
        outcome.error = outcome.error or str(failure)
    if outcome.error:
        print(f"batchscope demo: {outcome.error}", file=sys.stderr)
    return FAILED if outcome.error else DONE


def _check_places(screenshot: Path | None, json_target: str | None) -> None:
    """Before anything is loaded: a result that has nowhere to go would come too late to be told."""
    if fault := target_fault("--screenshot", screenshot) or target_fault("--json", json_target):
        raise UsageError(fault)
    if screenshot is not None and screenshot.suffix.lower() != ".png":
        raise UsageError(f"--screenshot {screenshot}: the picture is a PNG; give a path that ends in .png")


def _plan(options: argparse.Namespace) -> DemoPlan:
    scenario = load_scenario(options.scenario or DEFAULT_SCENARIO)
    given = {name: getattr(options, name, None) for name in ENGINE_OPTIONS}
    # "auto" is what the command line says where nobody said anything.
    said = EngineOptions(**{name: value for name, value in given.items() if value not in (None, "auto")})
    screenshot = options.screenshot
    if screenshot is None and options.offscreen:
        screenshot = DEFAULT_PICTURE
    return DemoPlan(scenario, said.over(scenario.engine).config(), options.seconds, screenshot)


def _print_table(result: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right", overflow="fold")
    for name, value in result.items():
        table.add_row(name.replace("_", " "), _figure(value))
    console = Console()
    console.print(f"Batchscope demo: {result['scenario']} on {result['model']}", style="bold", soft_wrap=True)
    console.print(table)


def _figure(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
