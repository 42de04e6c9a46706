"""``batchscope kernels``: compile every kernel for named GPUs, check it against its reference, show what it takes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.aot import TARGETS, Finding, examine
from kernels.cards import CARDS, GB, TERA, Card, card_of, named_card

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def _items(text: str) -> list[str]:
    items = list(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))
    if not items:
        raise argparse.ArgumentTypeError("nothing is named")
    return items


def _targets(text: str) -> list[Card]:
    names = _items(text)
    for name in names:
        if name not in TARGETS:
            raise argparse.ArgumentTypeError(f"unknown target {name!r}; known are {', '.join(TARGETS)}")
    return [card_of(name) for name in names]


def _cards(text: str) -> list[Card]:
    try:
        return [named_card(name) for name in _items(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batchscope kernels",
        description="Compile every kernel for named GPUs (none need be there), check it against its reference under "
        "the interpreter, and show registers, spills, shared memory, and on paper what a stated workload must at least "
        "move and how long that takes on a card.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--targets",
        type=_targets,
        dest="cards",
        default=list(CARDS),
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(TARGETS)}, each with a card of it (default: all)",
    )
    which.add_argument(
        "--cards",
        type=_cards,
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(card.name for card in CARDS)}, or another as NAME:TARGET:GB/s:TFLOP/s",
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


def _show(findings: list[Finding], console: Console) -> None:
    for _, of_a_card in groupby(findings, lambda finding: finding.card):
        console.print(_table(list(of_a_card)))
    console.print(_summary(findings), highlight=False)


def _table(findings: list[Finding]) -> Table:
    """The findings of one card."""
    from rich import box
    from rich.table import Table

    table = Table(title=_title(findings[0].card), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    table.add_column("configuration", ratio=6)
    table.add_column("workload", ratio=5)
    for name in ("MB", "Gop", "µs", "regs", "spills", "shared", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    kernel = ""
    for finding in findings:
        if finding.label.kernel != kernel:
            kernel = finding.label.kernel
            table.add_row(f"[bold]{kernel}[/]")
        table.add_row(*_cells(finding))
    return table


def _title(card: Card) -> str:
    rates = [f"{rate / TERA:,.4g} TFLOP/s {name}" for name, rate in card.rates.items() if name != "fp16"]
    parts = [
        card.memory and f"{card.memory / GB:.0f} GB",
        card.multiprocessors and f"{card.multiprocessors} multiprocessors",
        card.l2 and f"L2 {card.l2 >> 20} MiB",
        f"source: {card.source}",
    ]
    peaks = f"{card.name} ({card.target}): {card.bandwidth / GB:,.0f} GB/s, {', '.join(rates)}"
    return f"{peaks}\n{', '.join(part for part in parts if part)}"


def _cells(finding: Finding) -> list[str]:
    label, resources, least = finding.label, finding.resources, finding.roofline_us
    occupied = (resources.registers, resources.spills, f"{resources.shared_bytes:,}") if resources else ("–",) * 3
    return [
        label.config,
        label.workload,
        f"{label.bytes / 1e6:,.2f}",
        f"{label.operations / 1e9:,.2f}" if label.operations else "–",
        "–" if least is None else f"{least:,.1f}",
        *map(str, occupied),
        "–" if finding.max_error is None else f"{finding.max_error:.2g}",
        "[red]failed[/]" if finding.problem else "[green]ok[/]",
    ]


def _summary(findings: list[Finding]) -> str:
    targets = list(dict.fromkeys(finding.card.target for finding in findings))
    resources = [finding.resources for finding in findings if finding.resources]
    kernels = len({finding.label.kernel for finding in findings})
    configurations = len({(finding.label.kernel, finding.label.config) for finding in findings})
    failed = sum(bool(finding.problem) for finding in findings)
    lines = [
        f"{kernels} kernels in {configurations} configurations for {', '.join(targets)}: "
        f"{sum(each.spills for each in resources)} spills, "
        + (f"{failed} of {len(findings)} failed" if failed else f"all {len(findings)} ok"),
        "µs is the least that the stated workload takes on paper: what it must move at the card's stated bandwidth, or "
        "its matrix products at the stated rate. Nothing of it was measured on a GPU.",
    ]
    return "\n".join(lines)


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
        findings = examine(arguments.cards, progress)
    document = json.dumps({"kernels": [finding.as_json() for finding in findings]}, indent=1)
    if arguments.json == "-":
        print(document)
    else:
        from rich.console import Console

        _show(findings, Console() if sys.stdout.isatty() else Console(width=120))
    if target is not None:
        try:
            target.write_text(document + "\n", encoding="utf-8")
        except OSError as error:
            print(f"batchscope kernels: {_unwritable(target, error)}", file=sys.stderr)
            return 1
    failed = [finding for finding in findings if finding.problem]
    for finding in failed:
        label = finding.label
        print(f"{label.kernel} ({label.config}) on {finding.card.target}: {finding.problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
