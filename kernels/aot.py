"""Compiles every shipped kernel ahead of time for named GPUs, which need not be there, and measures it interpreted.

Triton decides whether a kernel is compiled or interpreted when the kernel is decorated, once a process. So there are
two kinds of worker processes, and this module imports neither torch nor triton itself::

    examine ─┬─ compilers    (one a core)   code × target   -> registers, spills, shared memory
             ├─ interpreters (a few)        configuration   -> largest error against its reference
             └─ here                        traffic × card  -> least time on paper

Configurations that differ in their workload only have the same code, which is compiled once.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.cards import Card

if TYPE_CHECKING:
    from kernels.triton.configurations import Configuration


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU as a compiler knows it."""

    backend: str
    """``cuda`` or ``hip``."""
    arch: int | str
    warp_size: int
    shared_limit: int
    """Most shared memory (LDS) a program may have, in bytes."""


# Shared memory per block: CUDA C++ Programming Guide, table of technical specifications per compute capability (the
# opt-in maximum); 64 KiB of LDS per workgroup on CDNA 3.
TARGETS: dict[str, Target] = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "sm_89": Target("cuda", 89, 32, 99 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "sm_120": Target("cuda", 120, 32, 99 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread, or one program, of a compiled kernel occupies."""

    registers: int
    """Vector registers of a thread."""
    spills: int
    """32-bit values of a thread that live in memory for want of registers; on AMD scalar registers count too."""
    shared_bytes: int
    """Shared memory of a program."""


@dataclass(frozen=True, slots=True)
class Label:
    """What is known of a configuration without compiling it; plain values, which travel between processes."""

    kernel: str
    config: str
    """Its first word is the type of its operations."""
    tolerance: float
    """Largest error that rounding explains."""
    workload: str
    bytes: int
    operations: int
    targets: frozenset[str] | None
    """None: all."""
    code: str
    """Equal where two configurations compile to the same program."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kernel configuration on one card."""

    label: Label
    card: Card
    resources: Resources | None
    """None where it did not compile."""
    max_error: float | None
    """Against the float32 reference; None where it could not be interpreted."""
    problem: str
    """Why it is not ok; empty where it is."""

    @property
    def roofline_us(self) -> float | None:
        """Least microseconds of the stated workload on the card; None where a rate is needed and not known."""
        label = self.label
        seconds = self.card.roofline_s(label.bytes, label.operations, label.config.split()[0])
        return None if seconds is None else 1e6 * seconds

    def as_json(self) -> dict[str, Any]:
        resources, label = self.resources, self.label
        finite = self.max_error is not None and math.isfinite(self.max_error)
        return {
            "kernel": label.kernel,
            "target": self.card.target,
            "config": label.config,
            "registers": resources.registers if resources else None,
            "spills": resources.spills if resources else None,
            "shared_bytes": resources.shared_bytes if resources else None,
            "max_error": self.max_error if finite else None,
            "workload": label.workload,
            "bytes": label.bytes,
            "operations": label.operations,
            "card": self.card.name,
            "roofline_us": self.roofline_us,
            "ok": not self.problem,
        }


def examine(cards: Sequence[Card], progress: Callable[[int, int], None]) -> list[Finding]:
    """Compile for the cards' targets and measure everything; card by card. ``progress(done, total)`` is called after
    each piece of work.

    A kernel that does not compile or that gives wrong numbers is a finding, not an exception.
    """
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with (
        ProcessPoolExecutor(cores, context, initializer=_start_worker, initargs=(False,)) as compilers,
        ProcessPoolExecutor(max(1, cores // 4), context, initializer=_start_worker, initargs=(True,)) as interpreters,
    ):
        labels = compilers.submit(_labels).result()
        compiled: dict[tuple[str, str], Future[Resources]] = {}
        for target in dict.fromkeys(card.target for card in cards):
            for index, label in enumerate(labels):
                if _ships(label, target) and (label.code, target) not in compiled:
                    compiled[label.code, target] = compilers.submit(_compile, index, TARGETS[target])
        wanted = [any(_ships(label, card.target) for card in cards) for label in labels]
        errors = {i: interpreters.submit(_measure, i) for i, is_wanted in enumerate(wanted) if is_wanted}
        everything: list[Future[Any]] = [*compiled.values(), *errors.values()]
        for done, _ in enumerate(as_completed(everything), start=1):
            progress(done, len(everything))
    return [
        _finding(label, card, compiled[label.code, card.target], errors[index])
        for card in cards
        for index, label in enumerate(labels)
        if _ships(label, card.target)
    ]


def _ships(label: Label, target: str) -> bool:
    return label.targets is None or target in label.targets


def _finding(label: Label, card: Card, compiled: Future[Resources], measured: Future[float]) -> Finding:
    problems = []
    resources = max_error = None
    if failure := compiled.exception():
        problems.append(f"does not compile: {failure}")
    else:
        resources = compiled.result()
        limit = TARGETS[card.target].shared_limit
        if resources.spills:
            problems.append(f"{resources.spills} spilled registers")
        if resources.shared_bytes > limit:
            problems.append(f"{resources.shared_bytes:,} bytes of shared memory where {card.target} has {limit:,}")
    if failure := measured.exception():
        problems.append(f"cannot be interpreted: {failure}")
    else:
        max_error = measured.result()
        if not max_error <= label.tolerance:
            problems.append(f"error {max_error:.3g}, tolerance {label.tolerance:.3g}")
    return Finding(label, card, resources, max_error, "; ".join(problems))


def _start_worker(interpret: bool) -> None:
    """Runs before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"


def _configurations() -> list[Configuration]:
    from kernels.triton.configurations import shipped_configurations

    return shipped_configurations()


def _labels() -> list[Label]:
    return [
        Label(
            entry.kernel,
            entry.config,
            entry.tolerance,
            entry.traffic.workload,
            entry.traffic.bytes,
            entry.traffic.operations,
            entry.targets,
            _code(entry),
        )
        for entry in _configurations()
    ]


def _code(configuration: Configuration) -> str:
    function, constants = configuration.function, configuration.constants
    signature, attributes = signature_of(configuration)
    options = (configuration.num_warps, configuration.num_stages)
    return repr(
        (function.fn.__module__, function.fn.__name__, signature, attributes, sorted(constants.items()), options)
    )


def _measure(index: int) -> float:
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        # The interpreter computes with numpy, which tells of every NaN of the poisoned memory that is masked later.
        warnings.simplefilter("ignore", RuntimeWarning)
        return _configurations()[index].error()


def _compile(index: int, target: Target) -> Resources:
    return compile_configuration(_configurations()[index], target)


def compile_configuration(configuration: Configuration, target: Target) -> Resources:
    """Compile as a launch on such a GPU would, pointers aligned to 16 bytes; the result comes from Triton's cache where
    it is there. Not in an interpreting process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = signature_of(configuration)
    compiled = triton.compile(
        ASTSource(configuration.function, signature, configuration.constants, attributes),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options=options_of(configuration),
    )
    if target.backend == "hip":
        registers, spills = _amd_registers(compiled.asm["amdgcn"])
    else:
        registers, spills = _nvidia_registers(compiled.asm["cubin"], triton.knobs.nvidia.cuobjdump.path)
    return Resources(registers, spills, compiled.metadata.shared)


def signature_of(configuration: Configuration) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """Type of each parameter, and the attributes by position: what Triton derives from the arguments of a launch."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, parameter in enumerate(configuration.function.params):
        kind = configuration.types.get(parameter.name, "constexpr")
        signature[parameter.name] = kind
        if kind.startswith("*") and not parameter.do_not_specialize_on_alignment:
            attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, attributes


def options_of(configuration: Configuration) -> dict[str, int]:
    """What a launch tells the compiler."""
    options = {"num_warps": configuration.num_warps}
    if configuration.num_stages is not None:
        options["num_stages"] = configuration.num_stages
    return options


def _nvidia_registers(cubin: bytes, cuobjdump: str) -> tuple[int, int]:
    """Registers, and the thread's stack in 32-bit words: our kernels have no arrays, so only spills live there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [cuobjdump, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if usage is None:
        raise RuntimeError(f"cuobjdump gave no resource usage: {text!r}")
    return int(usage[1]), -(-int(usage[2]) // 4)


def _amd_registers(assembly: str) -> tuple[int, int]:
    """From the metadata that becomes the code object's note record (LLVM, "User Guide for AMDGPU Backend")."""
    fields = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", assembly))
    return int(fields["vgpr_count"]), int(fields["vgpr_spill_count"]) + int(fields["sgpr_spill_count"])
