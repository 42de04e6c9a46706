"""Why a GPU is not used: one clause with the way out, for whatever torch, Triton and the machine come up with."""

from __future__ import annotations

import errno
import sysconfig
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.execution import device, gpu_problems
from engine.execution.device import choose_device
from engine.execution.gpu_problems import Problem, cache_problem, compiler_problem, driver_version, explain
from engine.models.errors import ModelLoadError


def building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **variables: str | None) -> BaseException:
    """What Triton raises where it builds the launch of a kernel."""
    from triton.runtime.build import compile_module_from_src

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(BaseException) as caught:
        compile_module_from_src(f"int of_{tmp_path.name};", "nothing")
    return caught.value


def test_a_compiler_that_is_missing_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "no program"
    file.write_text("")
    for number, (variables, words) in enumerate(
        [
            (
                {"CC": None, "PATH": ""},
                "no C compiler was found, with which Triton builds the launches of its kernels: ",
            ),
            ({"CC": "/nonexistent"}, "CC is '/nonexistent', which is no program: set CC to a C compiler, or unset it"),
            ({"CC": ""}, "CC is '', which is no program"),
            ({"CC": "gcc -m64"}, "CC is 'gcc -m64', which is no program"),
            ({"CC": str(file)}, "no program', which is no program"),
            ({"CC": "/bin/false"}, "the C compiler /bin/false fails (exit status 1): see what it wrote"),
            ({"CC": "/bin/true"}, "the C compiler /bin/true wrote no library: set CC to another"),
        ]
    ):
        with monkeypatch.context() as patch:
            folder = tmp_path / str(number)
            folder.mkdir()
            assert words in explain(building(folder, patch, **variables)), variables


def test_headers_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_problem() is None, "this machine has both"
    paths = {**sysconfig.get_paths(), "include": str(tmp_path / "include")}
    monkeypatch.setattr(gpu_problems.sysconfig, "get_paths", lambda **_: paths)
    error = building(tmp_path, monkeypatch, CC="/bin/false")
    assert "the C headers of Python are missing" in explain(error) and "install python3-dev" in explain(error)


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/etc/passwd/cache"])
def test_a_cache_folder_that_cannot_be_written(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    with pytest.raises(OSError) as caught:
        get_cache_manager("0" * 64)
    said = explain(caught.value)
    assert f"Triton's cache folder {folder} cannot be written" in said
    monkeypatch.setenv("TRITON_CACHE_DIR", "/etc/passwd/cache")
    problem = cache_problem()
    assert problem is not None and "set TRITON_CACHE_DIR to a folder that can" in str(problem)


def test_a_cache_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert cache_problem() is None
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "abc" / "kernel.cubin"))
    assert explain(full) == f"Triton's cache folder {tmp_path} cannot be written: No space left on device"
    elsewhere = FileNotFoundError(errno.ENOENT, "No such file or directory", "/models/config.json")
    assert explain(elsewhere) == "FileNotFoundError: [Errno 2] No such file or directory: '/models/config.json'"


class OutOfResources(Exception):
    """As Triton names it."""


def test_what_drivers_and_gpus_say() -> None:
    for error, words in [
        (RuntimeError("0 active drivers ([]). There should only be one."), "install the NVIDIA driver"),
        (AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"), "run sudo ldconfig"),
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."), "for this torch"),
        (RuntimeError("CUDA error: the provided PTX was compiled with an unsupported toolchain."), "that Triton compi"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "is not built for it"),
        (OutOfResources("out of resource: shared memory, Required: 300000"), "too little shared memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "close what else uses it"),
        (RuntimeError("CUDA error: unspecified launch failure\nmore"), "RuntimeError: CUDA error: unspecified launch"),
    ]:
        assert words in explain(error), error
        assert "\n" not in explain(error)


# Through the choice of a device --------------------------------------------------------------------------------------


def on_the_cpu(words: str) -> None:
    """``auto`` falls back and says why; ``cuda`` is refused with the same words."""
    choice = choose_device(EngineConfig())
    assert choice.device.type == "cpu" and words in choice.reason
    with pytest.raises(ModelLoadError) as refused:
        choose_device(EngineConfig(device="cuda"))
    assert refused.value.kind == "unsupported" and words in refused.value.message
    assert "Use --device cpu, or auto" in refused.value.message


def test_a_driver_that_torch_only_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old (found 11040)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    on_the_cpu("its driver is too old for this torch (CUDA 13.0): install a newer NVIDIA driver")


def test_a_torch_for_cpus_and_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    on_the_cpu("this torch is built for CPUs")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    on_the_cpu("torch finds no GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_the_cpu("torch finds no GPU among those that CUDA_VISIBLE_DEVICES names ('')")


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that torch can use: tensors for it are made on the CPU."""
    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *size, **_: ones(*size))


def test_a_gpu_for_which_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out with one small kernel, before the weights are read; and once."""
    asked: list[str] = []

    def fail(*_: Any, **__: Any) -> Any:
        asked.append("kernel")
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    pretend(monkeypatch)
    monkeypatch.setattr("kernels.triton.activation.silu_mul", fail)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    on_the_cpu("the GPU cannot be used: no C compiler was found")
    assert len(asked) == 2, "once for each choice"


def test_a_gpu_whose_kernels_give_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr("kernels.triton.activation.silu_mul", lambda gate_up: gate_up[:, :4] * 3)
    on_the_cpu("the GPU computes wrong results")
    monkeypatch.setattr(
        "kernels.triton.activation.silu_mul",
        lambda gate_up: torch.nn.functional.silu(gate_up[:, :4]) * gate_up[:, 4:],
    )
    assert device.gpu_problem() is None


# What the doctor asks ------------------------------------------------------------------------------------------------


def test_the_version_of_a_driver(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC\n")
    assert driver_version(file) == "550.54.15"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert driver_version(file) == "580.95.05"


def test_the_doctor_tells_of_a_gpu_and_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine import doctor

    monkeypatch.setattr(gpu_problems, "driver_version", lambda: "550.54.15")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=141 * 2**30))
    monkeypatch.setattr(gpu_problems, "compiler_problem", lambda: Problem("no C compiler", "install gcc", "apt gcc"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    findings = doctor.Findings()
    doctor._gpu(findings, True)
    gpu = findings.report["gpu"]
    assert (gpu["name"], gpu["capability"], gpu["driver"]) == ("NVIDIA H200", "9.0", "550.54.15")
    assert gpu["memory_bytes"] == 141 * 2**30 and gpu["graphs"] == "decode steps are recorded"
    assert {"what": "no C compiler", "fix": "apt gcc"} in findings.missing
    rows = dict(doctor._gpu_rows(gpu))
    assert (
        "compute capability 9.0, 141 GiB, driver 550.54.15, torch for CUDA 13.0" in rows["GPU"]
        and "compiler" in rows["GPU kernels"]
    )


def test_the_doctor_misses_nothing_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine import doctor

    monkeypatch.setattr(gpu_problems, "driver_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    findings = doctor.Findings()
    doctor._gpu(findings, False)
    assert findings.report["gpu"] is None and findings.missing == []
    assert doctor._gpu_rows(None) == [("GPU", "none found")]
