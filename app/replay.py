"""``batchscope replay``: the window on a recorded run, without a model. Exit 0 done, 1 the file cannot be shown, 2
wrong usage."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from app.demo import DONE, FAILED, WRONG_USAGE
from engine.output_files import target_fault

DEFAULT_PICTURE = Path("batchscope-replay.png")
"""Where the picture goes that nobody asked a place for, when there is no display to look at."""


def run_replay(options: argparse.Namespace) -> int:
    """Show the run of parsed command-line options; returns the exit code."""
    screenshot: Path | None = options.screenshot or (DEFAULT_PICTURE if options.offscreen else None)
    fault = target_fault("--screenshot", screenshot)
    if not fault and screenshot is not None and screenshot.suffix.lower() != ".png":
        fault = f"--screenshot {screenshot}: the picture is a PNG; give a path that ends in .png"
    if fault:
        return _fail(fault, WRONG_USAGE)
    from engine.recording import RecordingError, RunReader

    try:
        reader = RunReader(options.run)  # what is no run at all is said before a window opens
        reader.close()
    except (RecordingError, OSError) as error:
        return _fail(str(error), FAILED)
    first, last, step = reader.first_step, reader.last_step, options.step
    if step is not None and reader.num_steps and not first <= step <= last:
        return _fail(f"--step {step:,}: {options.run} has the steps {first:,} to {last:,}", WRONG_USAGE)
    if options.offscreen:
        os.environ["QT_QPA_PLATFORM"] = "offscreen"
    from app.replay_window import show_replay  # only now: Qt takes its platform from the environment

    fault = show_replay(options.run, step=options.step, screenshot=screenshot, stays=not options.offscreen)
    if fault:
        return _fail(fault, FAILED)
    if screenshot is not None:
        print(f"batchscope replay: the picture is {screenshot.resolve()}", file=sys.stderr)
    return DONE


def _fail(message: str, code: int) -> int:
    print(f"batchscope replay: {message}", file=sys.stderr)
    return code
