"""Why a GPU cannot be used, as a clause for people with the way out: what torch and Triton raise tells developers.

Triton builds a small C library for every kernel it launches, with the compiler that ``CC`` names or else gcc or clang,
against Python's headers, and keeps it with the compiled kernels in its cache folder. Each of these may be missing; what
the questions below find is what ``doctor`` says, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.failures import describe, is_out_of_memory

NEWER_DRIVER = "install a newer NVIDIA driver"
NO_WAY = "this version of Batchscope does not run on it"
_OLD_DRIVER = ("driver on your system is too old", "driver version is insufficient")
_OLD_LOADER = ("unsupported toolchain", "unsupported_ptx", "device kernel image is invalid", "invalid_image")
_OTHER_GPU = ("no kernel image is available", "not compatible with the current pytorch", "no_binary_for_gpu")
_NO_DRIVER = ("0 active drivers", "libcuda.so cannot found", "libcuda.so.1: cannot open")


def explain(error: BaseException) -> str:
    """What went wrong and the way out, as a clause; the error's own words where nothing better is known."""
    said = str(error).lower()
    if is_out_of_memory(error):
        return f"its memory ran out ({describe(error)}): close what else uses it, or choose a smaller model"
    if any(words in said for words in _NO_DRIVER):
        return "Triton finds no driver library libcuda.so.1: install the NVIDIA driver, or run sudo ldconfig"
    if any(words in said for words in _OLD_DRIVER):
        return f"its driver is too old for this torch ({toolkit()}): {NEWER_DRIVER}, or a torch for an older CUDA"
    if any(words in said for words in _OLD_LOADER):
        return f"its driver is too old for the kernels that Triton compiles: {NEWER_DRIVER}"
    if any(words in said for words in _OTHER_GPU):
        return f"this torch ({toolkit()}) is not built for it{_capability()}: install a torch that is"
    if type(error).__name__ == "OutOfResources":
        return f"it has too little shared memory for a kernel ({describe(error)}): {NO_WAY}"
    if type(error).__name__ == "PTXASError":
        return f"Triton's assembler refuses a kernel ({describe(error)}): {NO_WAY}"
    return _of_building(error) or describe(error)


def compiler() -> str | None:
    """The C compiler that Triton would call, by :func:`triton.runtime.build._build`; None: there is none."""
    named = os.environ.get("CC")
    return named if named is not None else shutil.which("gcc") or shutil.which("clang")


@dataclass(frozen=True, slots=True)
class Problem:
    what: str
    """A clause."""
    way_out: str
    command: str
    """That mends it, or begins to."""

    def __str__(self) -> str:
        return f"{self.what}: {self.way_out}"


def compiler_problem() -> Problem | None:
    """Why no C library can be built for the kernels' launches; None: nothing is known to be missing."""
    found = compiler()
    if found is None:
        what = "no C compiler was found, with which Triton builds the launches of its kernels"
        return Problem(what, "install gcc, or set CC", "sudo apt install gcc")
    if shutil.which(found) is None:
        what = f"CC is {found!r}, which is no program"
        return Problem(what, "set CC to a C compiler, or unset it and install gcc", "unset CC; sudo apt install gcc")
    header = Path(_headers()) / "Python.h"
    if not header.is_file():
        what = f"the C headers of Python are missing ({header})"
        return Problem(what, "install python3-dev, or the package like it", "sudo apt install python3-dev")
    return None


def cache_folder() -> str:
    """Where Triton keeps what it has compiled."""
    from triton import knobs  # only where a GPU is asked about: triton is not installed everywhere

    return str(knobs.cache.dir or "")


def cache_problem() -> Problem | None:
    """Why the cache folder cannot be written; None: it can, or nothing of it is there yet and it can be made."""
    folder = Path(cache_folder())
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if there.is_dir() and os.access(there, os.W_OK):
        return None
    what = f"Triton's cache folder {folder} cannot be written"
    return Problem(what, "set TRITON_CACHE_DIR to a folder that can", "export TRITON_CACHE_DIR=/tmp/triton")


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Of NVIDIA's kernel module; None: there is none."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found.group(1) if found else "unknown"


def toolkit() -> str | None:
    """What this torch is built for; None: CPUs alone."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else None


def _of_building(error: BaseException) -> str | None:
    """Where it came from the building of a launch: the file or the program that it names is the compiler's or lies in
    the cache folder."""
    problem: Problem | str | None = None
    if isinstance(error, subprocess.CalledProcessError):
        program = error.cmd[0] if isinstance(error.cmd, list | tuple) and error.cmd else str(error.cmd)
        if program == compiler():
            problem = compiler_problem() or (
                f"the C compiler {program} fails (exit status {error.returncode}): see what it wrote to the error "
                "output, or set CC to another"
            )
    elif isinstance(error, OSError):
        named = "" if error.filename is None else str(error.filename)
        folder = cache_folder()
        if named == compiler():
            problem = compiler_problem() or f"the C compiler {named!r} cannot be run ({error.strerror}): set CC to one"
        elif folder and (named == folder or named.startswith(f"{folder}/")):
            problem = cache_problem() or f"Triton's cache folder {folder} cannot be written: {error.strerror}"
        elif named.endswith(".so"):
            problem = f"the C compiler {compiler()} wrote no library: set CC to another"
    elif "failed to find c compiler" in str(error).lower():
        problem = compiler_problem()
    return None if problem is None else str(problem)


def _headers() -> str:
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _capability() -> str:
    try:
        major, minor = torch.cuda.get_device_capability()
    except Exception:  # it works too little to be asked
        return ""
    return f" (compute capability {major}.{minor})"
