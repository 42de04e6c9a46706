"""What this machine gives Batchscope, and what is missing with the command that mends it: ``batchscope doctor``.

Every question may fail, on a broken machine most of all: each is asked on its own, and its failure is an answer. Exit
code 0 where the program can run, 1 where a package that it needs is missing or unfit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from engine import environment
from engine.output_files import OutputFailure, printing, target_fault, write_target

T = TypeVar("T")

CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16")
"""Flags of /proc/cpuinfo that decide how fast a model runs on the CPU."""


@dataclass
class Findings:
    """What is asked, collects: the report, what is missing, and whether the program can run all the same."""

    report: dict[str, Any] = field(default_factory=dict)
    missing: list[dict[str, str]] = field(default_factory=list)
    can_run: bool = True

    def miss(self, what: str, fix: str, *, fatal: bool = False) -> None:
        self.missing.append({"what": what, "fix": fix})
        self.can_run = self.can_run and not fatal


def examine() -> Findings:
    """Ask everything. Never raises; torch is imported."""
    findings = Findings()
    findings.report |= {
        "version": environment.version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    _packages(findings)
    _device(findings)
    findings.report["threads"] = _ask(environment.usable_cores, os.cpu_count() or 1)
    findings.report["cpu"] = {
        "name": _ask(_cpu_name, platform.processor()),
        "features": _ask(_cpu_features, list[str]()),
    }
    findings.report["memory"] = _ask(_memory, None)
    _model_cache(findings)
    _display(findings)
    findings.report["missing"] = findings.missing
    return findings


def _ask(question: Callable[[], T], otherwise: T) -> T:
    try:
        return question()
    except Exception:  # a broken machine may answer with anything
        return otherwise


# The questions -------------------------------------------------------------------------------------------------------


def _packages(findings: Findings) -> None:
    """Every requirement with the version that is installed; None where it is not."""
    versions: dict[str, str | None] = {}
    for requirement in environment.requirements():
        name, specifier, applies = _parse(requirement)
        if not applies:
            continue
        try:
            versions[name] = installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
            findings.miss(f"the package {name}", _pip_install(name, specifier), fatal=True)
            continue
        if not _fits(installed, specifier):
            what = f"{name} {installed} is installed, but {specifier} is needed"
            findings.miss(what, _pip_install(name, specifier), fatal=True)
    findings.report["packages"] = versions


def _parse(requirement: str) -> tuple[str, str, bool]:
    """Name, versions and whether it is asked for on this platform."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # among what may be missing
        head, _, marker = requirement.partition(";")
        name = head.strip().split("[")[0]
        for mark in "<>=!~ (":
            name = name.split(mark)[0]
        return name, "", "linux" not in marker or sys.platform.startswith("linux")
    parsed = Requirement(requirement)
    return parsed.name, str(parsed.specifier), parsed.marker is None or parsed.marker.evaluate({"extra": ""})


def _fits(installed: str, specifier: str) -> bool:
    if not specifier:
        return True
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(installed, prereleases=True)


def _pip_install(name: str, specifier: str) -> str:
    return f'{sys.executable} -m pip install "{name}{specifier}"'


def _device(findings: Findings) -> None:
    """The choice that a load would make, by the very code that makes it."""
    answer: dict[str, Any] = {"device": None, "backend": None, "dtype": None, "kv_dtype": None}
    try:
        from engine.config import EngineConfig
        from engine.execution.device import choose_device
        from engine.execution.sizing import dtype_name

        choice = choose_device(EngineConfig())
        answer |= {
            "device": str(choice.device),
            "backend": "triton" if choice.is_gpu else "cpu",
            "dtype": dtype_name(choice.weight_dtype or choice.dtype),
            "kv_dtype": dtype_name(choice.kv_dtype or choice.dtype),
            "backend_reason": choice.reason,
        }
        _gpu(findings, choice.is_gpu)
    except Exception as error:
        answer["backend_reason"] = f"nothing can be computed: {type(error).__name__}: {error}"
        if findings.can_run:  # else a package is missing, which explains it
            fix = f"{sys.executable} -m pip install --force-reinstall torch"
            findings.miss("a torch that can be imported", fix, fatal=True)
    findings.report |= answer


def _gpu(findings: Findings, is_gpu: bool) -> None:
    """What a GPU that is here needs, whether it is used or not."""
    import torch

    from engine.execution import gpu_problems

    driver = _ask(gpu_problems.driver_version, None)
    seen = _ask(torch.cuda.device_count, 0) > 0
    if driver is None and not seen:
        findings.report["gpu"] = None
        return
    major_minor = _ask(torch.cuda.get_device_capability, None) if seen else None
    findings.report["gpu"] = {
        "name": _ask(torch.cuda.get_device_name, None) if seen else None,
        "capability": None if major_minor is None else ".".join(map(str, major_minor)),
        "memory_bytes": _ask(lambda: int(torch.cuda.get_device_properties(0).total_memory), None) if seen else None,
        "driver": driver,
        "cuda": _ask(gpu_problems.toolkit, None),
        "compiler": _ask(gpu_problems.compiler, None),
        "cache_folder": _ask(gpu_problems.cache_folder, None),
        "graphs": "decode steps are recorded" if is_gpu else "not used",
    }
    if torch.version.cuda is None and torch.version.hip is None:
        fix = f"{sys.executable} -m pip install --force-reinstall --no-cache-dir torch"
        findings.miss("a torch for the NVIDIA GPU that is here; this one is built for CPUs", fix)
    for question in (gpu_problems.compiler_problem, gpu_problems.cache_problem):
        problem = _ask(question, None)
        if problem is not None:
            findings.miss(problem.what, problem.command)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _cpu_features() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.partition(":")[0].strip() in ("flags", "Features"):
            flags = set(line.split())
            return [feature for feature in CPU_FEATURES if feature in flags]
    return []


def _memory() -> dict[str, int]:
    import psutil

    from engine.execution.host import available_memory

    return {"total_bytes": int(psutil.virtual_memory().total), "available_bytes": available_memory()}


def _model_cache(findings: Findings) -> None:
    """Where models lie. The starter's folder appears by one rename when all of it is there."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        from engine.model_catalog import starter_folder

        folder = starter_folder()
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
        cache: dict[str, Any] = {
            "starter": folder.is_dir(),
            "starter_folder": str(folder),
            "starter_bytes": size,
            "hub_folder": HF_HUB_CACHE,
        }
    except Exception as error:
        cache = {"starter": False, "error": f"{type(error).__name__}: {error}"}
    findings.report["model_cache"] = cache
    if not cache["starter"]:
        findings.miss("the starter model, which the first start fetches (93 MB)", "batchscope")


def _display(findings: Findings) -> None:
    libraries: list[str] = _ask(environment.missing_libraries, [])
    if libraries:
        findings.miss(
            f"{', '.join(libraries)}, without which Qt opens no window", environment.install_command(libraries)
        )
    state = _ask(environment.display_state, environment.DisplayState())
    findings.report["display"] = state.absent or state.broken or "usable"


# The answers ---------------------------------------------------------------------------------------------------------


def show(findings: Findings) -> None:
    """The report as a table for people."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for key, value in findings.report.items():
            print(f"{key}: {value}")
        return
    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(findings.report):
        table.add_row(label, value)
    console.print(table)
    console.print()
    for miss in findings.missing:
        console.print(f"[yellow]missing[/] {miss['what']}", highlight=False)
        console.print(f"        [dim]{miss['fix']}[/]", highlight=False, soft_wrap=True)
    if findings.can_run:
        console.print("[green]Batchscope can run here.[/]")
    else:
        console.print("[red]Batchscope cannot run here[/] until what is missing is mended.")


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    memory, cache, cpu = report["memory"], report["model_cache"], report["cpu"]
    features = " ".join(cpu["features"]) or "no known features"
    packages = (f"{name} {version}" for name, version in report["packages"].items() if version)
    return [
        ("Batchscope", report["version"]),
        ("Python", f"{report['python']} on {report['platform']}"),
        ("Device", f"{report['device']}: {report['backend_reason']}"),
        ("Weights", f"{report['dtype']}, keys and values {report['kv_dtype']}"),
        ("Backend", str(report["backend"])),
        *_gpu_rows(report.get("gpu")),
        (
            "Processor",
            f"{cpu['name']}, {report['threads']} threads: {features}",
        ),
        ("Memory", _memory_text(memory)),
        ("Starter model", cache["starter_folder"] if cache["starter"] else "not fetched yet"),
        ("Display", report["display"]),
        ("Packages", ", ".join(packages)),
    ]


def _gpu_rows(gpu: dict[str, Any] | None) -> list[tuple[str, str]]:
    if gpu is None:
        return [("GPU", "none found")]
    named = [
        gpu["name"] or "not usable by torch",
        gpu["capability"] and f"compute capability {gpu['capability']}",
        gpu["memory_bytes"] and f"{gpu['memory_bytes'] / 2**30:.0f} GiB",
        gpu["driver"] and f"driver {gpu['driver']}",
        gpu["cuda"] and f"torch for {gpu['cuda']}",
    ]
    return [
        ("GPU", ", ".join(filter(None, named))),
        (
            "GPU kernels",
            f"compiler {gpu['compiler'] or 'missing'}, kept in {gpu['cache_folder'] or 'no known folder'}; "
            f"{gpu['graphs']}",
        ),
    ]


def _memory_text(memory: dict[str, int] | None) -> str:
    if memory is None:
        return "unknown"
    return f"{memory['available_bytes'] / 2**30:.1f} of {memory['total_bytes'] / 2**30:.1f} GiB free"


def main(argv: Sequence[str] | None = None) -> int:
    description = "What this machine gives Batchscope, and what is missing with the command that mends it."
    parser = argparse.ArgumentParser(prog="batchscope doctor", description=description)
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; '-' is standard output")
    options = parser.parse_args(argv)
    if fault := target_fault("--json", options.json):
        parser.error(fault)
    findings = examine()
    try:
        _answer(findings, options.json)
    except OutputFailure as failure:
        print(f"batchscope doctor: {failure}", file=sys.stderr)
        return 1
    return 0 if findings.can_run else 1


def _answer(findings: Findings, target: str | None) -> None:
    text = json.dumps(findings.report, indent=2) + "\n"
    if target not in (None, "-"):
        write_target("--json", target, text)
        return
    with printing(sys.stdout):
        if target is None:
            show(findings)
        else:
            sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
