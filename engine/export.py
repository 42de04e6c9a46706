"""A run file for other programs: ``python -m engine.export RUN --perfetto trace.json --csv folder``.

``--perfetto`` writes a trace in the Trace Event Format, which ui.perfetto.dev and chrome://tracing load
(:mod:`engine.export_trace`); ``--csv`` a table of steps and one of requests (:mod:`engine.export_tables`). Times begin
at 0 with the first step or the first arrival that the file tells of.

A file that breaks off is exported up to its last whole step, and the error output says so. Exit 0: done; 1: the file
cannot be read or the output not written; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from engine.events import Keyframe, StepRecord
from engine.export_tables import TableExport
from engine.export_trace import TraceExport
from engine.output_files import OutputFailure, printing, target_fault, unwritable, writing
from engine.recording import RecordingError, RunReader


class _Export(Protocol):
    """Takes a run part by part, so that no run is too long for it."""

    def restore(self, keyframe: Keyframe) -> None: ...

    def apply(self, record: StepRecord) -> None: ...

    def finish(self) -> None: ...


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchscope export", description="A recorded run as a Perfetto trace, or as tables of steps and requests."
    )
    parser.add_argument("run", metavar="RUN", help="a run file, of bench --record or saved from the window")
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace for ui.perfetto.dev; - is standard output")
    parser.add_argument("--csv", metavar="FOLDER", help="write steps.csv and requests.csv into this folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.perfetto is None and args.csv is None:
        parser.error("nothing to write: give --perfetto FILE or --csv FOLDER")
    if fault := target_fault("--perfetto", args.perfetto) or _folder_fault(args.csv):
        parser.error(fault)
    if args.perfetto not in (None, "-") and Path(args.perfetto).resolve() == Path(args.run).resolve():
        parser.error(f"--perfetto {args.perfetto} is the run file itself; give another path")
    try:
        reader = RunReader(args.run)
        try:
            missing = export(reader, args.perfetto, args.csv)
        finally:
            reader.close()
    except (RecordingError, OutputFailure) as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("interrupted: nothing is written")
        return 1
    for sentence in _shortcomings(reader, missing):
        _say(sentence)
    return 0


def _folder_fault(folder: str | None) -> str:
    """Why the tables cannot be written there, as a sentence; a folder that is missing will be made."""
    if folder is None:
        return ""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        return f"--csv {folder}: this is a file; give the path of a folder"
    if not path.exists():
        return target_fault("--csv", folder)
    return target_fault("--csv", path / "steps.csv") or target_fault("--csv", path / "requests.csv")


def _say(sentence: str) -> None:
    print(f"batchscope export: {sentence}", file=sys.stderr)


def export(reader: RunReader, trace: str | Path | None, folder: str | Path | None) -> int:
    """Write what is asked for: a trace to a path (``-``: standard output), tables into a folder, made where it is
    missing. What is there stays as it is until all is written. Returns how many steps in the middle are damaged.

    Raises :class:`RecordingError` where the run cannot be read, :class:`OutputFailure` where it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        exports: list[tuple[_Export, AbstractContextManager[None]]] = []
        if folder is not None:
            _make_folder(Path(folder))
            steps = stack.enter_context(writing("--csv", Path(folder) / "steps.csv"))
            requests = stack.enter_context(writing("--csv", Path(folder) / "requests.csv"))
            exports.append((TableExport(steps, requests), _ToldOf("--csv", folder)))
        if trace is not None:  # the innermost file: what fails there is told of it
            file = stack.enter_context(_trace_file(trace))
            exports.append((TraceExport(file, reader.header), contextlib.nullcontext()))
        told = 0
        for part in reader.replay():
            told += isinstance(part, StepRecord)
            for target, told_of in exports:
                with told_of:
                    if isinstance(part, Keyframe):
                        target.restore(part)
                    else:
                        target.apply(part)
        for target, told_of in exports:
            with told_of:
                target.finish()
    return max(reader.last_step - reader.first_step + 1 - told, 0) if told else 0


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputFailure(f"--csv {folder} cannot be made: {error.strerror or error}") from error


@dataclass(frozen=True)
class _ToldOf(AbstractContextManager[None]):
    """Around what writes to one output while files of others are open: where it fails, the message names this one."""

    option: str
    target: str | Path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise OutputFailure(unwritable(self.option, self.target, error)) from error


@contextlib.contextmanager
def _trace_file(target: str | Path) -> Iterator[TextIO]:
    if target == "-":
        with printing(sys.stdout):
            yield sys.stdout
    else:
        with writing("--perfetto", target) as file:
            yield file


def _shortcomings(reader: RunReader, missing: int) -> list[str]:
    """What the export lacks of the run, a sentence each."""
    said = []
    if reader.truncated:
        said.append(f"{reader.path} breaks off, or is still being written: exported up to step {reader.last_step:,}")
    if missing:
        said.append(f"{reader.path} is damaged: {missing:,} steps in the middle are left out")
    return said


if __name__ == "__main__":
    sys.exit(main())
