"""``batchscope kernels``: compile every kernel for named GPUs, check it against its reference, show what it takes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels.aot import DEFAULT_TARGETS, TARGETS, Finding, examine


def _targets(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TARGETS]
    if unknown or not names:
        wrong = f"unknown target {unknown[0]!r}" if unknown else "no target"
        raise argparse.ArgumentTypeError(f"{wrong}; known are {', '.join(TARGETS)}")
    return list(dict.fromkeys(names))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchscope kernels",
        description="Compile every kernel for named GPUs (none need be there), check it against its reference under "
        "the interpreter, and show registers, spills and shared memory.",
    )
    parser.add_argument(
        "--targets",
        type=_targets,
        default=list(DEFAULT_TARGETS),
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(TARGETS)} (default: {','.join(DEFAULT_TARGETS)})",
    )
    parser.add_argument("--json", metavar="FILE", help="write the findings as JSON; - for standard output")
    return parser


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's standard error, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Compiling and checking kernels", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table("kernel", "configuration", "target", title="Kernels")
    for name in ("registers", "spills", "shared bytes", "largest error"):
        table.add_column(name, justify="right")
    table.add_column("")
    for finding in findings:
        resources = finding.resources
        numbers = (resources.registers, resources.spills, resources.shared_bytes) if resources else ("–", "–", "–")
        error = "–" if finding.max_error is None else f"{finding.max_error:.2g}"
        mark = "[red]failed[/]" if finding.problem else "[green]ok[/]"
        table.add_row(finding.label.kernel, finding.label.config, finding.target, *map(str, numbers), error, mark)
    console.print(table)


def _unwritable(path: Path, error: OSError) -> str:
    return f"--json {path} cannot be written: {error.strerror or error}"


def _target_fault(path: Path) -> str:
    """Why the findings cannot go there, found out before the work by appending nothing."""
    try:
        new = not path.exists()
        if new or path.is_file() or path.is_dir():  # opening a pipe would be felt at its other end
            path.open("ab").close()
        if new:
            path.resolve().unlink()
    except OSError as error:
        return _unwritable(path, error)
    return ""


def main(argv: list[str] | None = None) -> int:
    """0: all compile, fit, do not spill and agree with their references; 1: not; 2: wrong usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    target = None if arguments.json in (None, "-") else Path(arguments.json)
    if target is not None and (fault := _target_fault(target)):
        parser.error(fault)
    if importlib.util.find_spec("triton") is None:
        print(
            "Triton is not installed here: it exists for Linux only, elsewhere models run on the CPU.", file=sys.stderr
        )
        return 1
    with _progress() as progress:
        findings = examine(arguments.targets, progress)
    document = json.dumps({"kernels": [finding.as_json() for finding in findings]}, indent=1)
    if arguments.json == "-":
        print(document)
    else:
        _show(findings)
    if target is not None:
        try:
            target.write_text(document + "\n", encoding="utf-8")
        except OSError as error:
            print(f"batchscope kernels: {_unwritable(target, error)}", file=sys.stderr)
            return 1
    failed = [finding for finding in findings if finding.problem]
    for finding in failed:
        label = finding.label
        print(f"{label.kernel} ({label.config}) on {finding.target}: {finding.problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
