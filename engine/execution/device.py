"""Where a model runs and in which type, each with its reason. No question to a GPU may end the program."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.failures import describe
from engine.models.errors import ModelLoadError
from kernels.backend import Backend


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    device: torch.device
    dtype: torch.dtype
    reason: str
    """Why this device and this type; shown by ``doctor`` and kept with a run."""
    weight_dtype: torch.dtype | None = None
    """Type in which the matrices are kept; None: ``dtype``."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def choose_device(config: EngineConfig) -> DeviceChoice:
    """Raises :class:`ModelLoadError` where a GPU was asked for and none works, or a type the device should not use."""
    if config.device == "cpu":
        return cpu_choice(config, "device is cpu")
    problem = gpu_problem()
    if problem is None:
        return _gpu_choice(config)
    if config.device == "cuda":
        raise ModelLoadError(f"device is cuda, but {problem}. Use --device cpu, or auto.", "unsupported")
    return cpu_choice(config, problem)


def cpu_choice(config: EngineConfig, why: str) -> DeviceChoice:
    """The CPU, because of ``why`` (the first half of a sentence)."""
    if config.dtype == "float16":
        raise ModelLoadError(
            "dtype is float16, but on a CPU it is slower than float32 and overflows; use --dtype float32 or bfloat16.",
            "unsupported",
        )
    device = torch.device("cpu")
    if config.dtype not in ("auto", "int8"):
        return DeviceChoice(device, getattr(torch, config.dtype), why)
    # Only where the CPU computes: it brings numba.
    from kernels.cpu.vectors import int8_instruction

    return DeviceChoice(device, torch.bfloat16, f"{why}; int8 products with {int8_instruction()}", torch.int8)


def gpu_problem() -> str | None:
    """Why no GPU can be used, as a clause; None: one works. Whatever torch raises when it is asked is the answer."""
    try:
        if not torch.cuda.is_available():
            return "torch finds no GPU" if torch.version.cuda or torch.version.hip else "this torch is built for CPUs"
        value = float(torch.ones(4, device="cuda").add_(1).sum().item())
    except Exception as error:
        return f"the GPU does not work ({describe(error)})"
    if value != 8.0:
        return "the GPU computes wrong results"
    return None


def make_backend(choice: DeviceChoice) -> Backend:
    if choice.is_gpu:
        # Only where a GPU is: triton is not installed everywhere.
        from kernels.triton.backend import TritonBackend

        return TritonBackend(choice.device)
    from kernels.cpu.backend import CpuBackend

    return CpuBackend()


def _gpu_choice(config: EngineConfig) -> DeviceChoice:
    if config.dtype == "int8":
        raise ModelLoadError(
            "dtype is int8, which is computed on a CPU only; use --device cpu, or --dtype auto.", "unsupported"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    if config.dtype != "auto":
        return DeviceChoice(device, getattr(torch, config.dtype), f"{name} works")
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if native else torch.float16
    return DeviceChoice(
        device, dtype, f"{name} works; it {'computes' if native else 'does not compute'} bfloat16 natively"
    )
