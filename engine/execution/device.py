"""Where a model runs and in which type, each with its reason. No question to a GPU may end the program."""

from __future__ import annotations

import dataclasses
import os
import warnings
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.execution.gpu_problems import explain
from engine.models.errors import ModelLoadError
from engine.models.transformers_spec import TransformersSpec
from kernels.backend import Backend

FP8_CAPABILITY = (8, 9)
"""NVIDIA's first compute capability that converts from 8-bit numbers."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    device: torch.device
    dtype: torch.dtype
    reason: str
    """Why this device and this type; shown by ``doctor`` and kept with a run."""
    weight_dtype: torch.dtype | None = None
    """Type in which the matrices are kept; None: ``dtype``."""
    device_reason: str = ""
    """The part of ``reason`` that is about the device; empty: all of it."""
    kv_dtype: torch.dtype | None = None
    """Type in which keys and values are kept; None: ``dtype``."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def choose_device(config: EngineConfig) -> DeviceChoice:
    """Raises :class:`ModelLoadError` where a GPU was asked for and none works, or a type the device should not use or
    does not have."""
    if config.device == "cpu":
        return cpu_choice(config, "device is cpu")
    problem = gpu_problem()
    if problem is None:
        choice = _gpu_choice(config)
        return dataclasses.replace(choice, kv_dtype=_kv_type(config, choice.device))
    if config.device == "cuda":
        raise ModelLoadError(f"device is cuda, but {problem}. Use --device cpu, or auto.", "unsupported")
    return cpu_choice(config, problem)


def cpu_choice(config: EngineConfig, why: str) -> DeviceChoice:
    """The CPU, because of ``why`` (the first half of a sentence)."""
    if config.kv_dtype == "fp8":
        raise ModelLoadError(
            f"kv_dtype is fp8, but {why}, and a CPU does not keep keys and values in 8 bits; use --kv-dtype auto.",
            "unsupported",
        )
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

    reason = f"{why}; int8 products with {int8_instruction()}"
    return DeviceChoice(device, torch.bfloat16, reason, torch.int8, device_reason=why)


def library_choice(choice: DeviceChoice, config: EngineConfig, spec: TransformersSpec, free_bytes: int) -> DeviceChoice:
    """``choice`` for a model that the Transformers library computes, which has no int8: on a CPU float32 where its
    weights take at most half of ``free_bytes``, else bfloat16. Raises :class:`ModelLoadError` where int8 was asked for,
    or fp8 for keys and values.
    """
    whose = f"{spec.architecture} runs through {spec.library}"
    if config.kv_dtype == "fp8":
        raise ModelLoadError(
            f"kv_dtype is fp8, but {whose}, whose keys and values are kept in the type it computes in; use "
            "--kv-dtype auto.",
            "unsupported",
        )
    if config.dtype == "int8":
        raise ModelLoadError(
            f"dtype is int8, but {whose}, which does not compute in int8; use --dtype auto, bfloat16 or float32.",
            "unsupported",
        )
    dtype, reason = choice.dtype, f"{choice.reason}; {whose}"
    if choice.weight_dtype is not None and not choice.is_gpu:
        fits = 2 * spec.parameters * torch.float32.itemsize <= free_bytes
        dtype = torch.float32 if fits else torch.bfloat16
        said = "at most half" if fits else "more than half"
        reason = f"{choice.device_reason}; {whose}, its weights take {said} of the free memory in float32"
    if spec.limit_reason:
        reason = f"{reason}; {spec.limit_reason}"
    return DeviceChoice(choice.device, dtype, reason)


def with_int8(choice: DeviceChoice, why: str) -> DeviceChoice:
    """On a GPU, where ``auto`` takes weights of 8 bits because of ``why``, a clause."""
    return dataclasses.replace(choice, weight_dtype=torch.int8, reason=f"{choice.reason}; int8, because {why}")


def without_float16(choice: DeviceChoice) -> DeviceChoice:
    """Where float16 was taken because the device has no better type, and a model's numbers are too large for it."""
    reason = f"{choice.reason}; float32, because this model's numbers are too large for float16"
    return dataclasses.replace(choice, dtype=torch.float32, reason=reason)


def gpu_problem() -> str | None:
    """Why no GPU can be used, as a clause; None: one works, torch's kernels and Triton's. Whatever they raise when they
    are asked is the answer."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            available = torch.cuda.is_available()
        if not available:
            return _absence([str(warning.message) for warning in said])
        ones = torch.ones(4, device="cuda")
        right = float(ones.add(1).sum().item()) == 8.0 and _launches(ones)
    except Exception as error:
        return f"the GPU cannot be used: {explain(error)}"
    return None if right else "the GPU computes wrong results"


def _absence(said: list[str]) -> str:
    """Why torch sees no GPU; ``said`` are its warnings: it does not raise where the driver is too old."""
    if not (torch.version.cuda or torch.version.hip):
        return "this torch is built for CPUs"
    if said:
        return f"torch finds no GPU that it can use: {explain(RuntimeError(said[0]))}"
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return f"torch finds no GPU among those that CUDA_VISIBLE_DEVICES names ({named!r})"
    return "torch finds no GPU"


def _launches(ones: torch.Tensor) -> bool:
    """Whether a kernel of ours gives the right numbers: Triton needs a compiler, a cache folder and a driver that fits,
    and what is missing is better found out before the weights are read. ``ones`` [n]"""
    # Only where a GPU is: triton is not installed everywhere.
    from kernels.triton.activation import silu_mul

    made = silu_mul(torch.cat([ones, ones])[None])[0]
    return bool(torch.allclose(made, torch.nn.functional.silu(ones), rtol=1e-3))


def gpu_failure(error: Exception) -> str:
    """``error``, raised while a model was loaded onto a GPU, as a clause."""
    message = error.message if isinstance(error, ModelLoadError) else f"the GPU cannot be used: {explain(error)}"
    return message.rstrip(".")


def make_backend(choice: DeviceChoice, *, cuda_graphs: bool = True) -> Backend:
    if choice.is_gpu:
        # Only where a GPU is: triton is not installed everywhere.
        from kernels.triton.backend import TritonBackend

        return TritonBackend(choice.device, cuda_graphs=cuda_graphs)
    from kernels.cpu.backend import CpuBackend

    return CpuBackend()


def _gpu_choice(config: EngineConfig) -> DeviceChoice:
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    if config.dtype not in ("auto", "int8"):
        return DeviceChoice(device, getattr(torch, config.dtype), f"{name} works")
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if native else torch.float16
    reason = f"{name} works; it {'computes' if native else 'does not compute'} bfloat16 natively"
    return DeviceChoice(device, dtype, reason, torch.int8 if config.dtype == "int8" else None)


def _kv_type(config: EngineConfig, device: torch.device) -> torch.dtype | None:
    """What a GPU keeps keys and values in; None: the type of the activations. Raises :class:`ModelLoadError` where it
    does not have the type that was asked for."""
    if config.kv_dtype == "auto":
        return None
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        if architecture == "gfx942":
            return torch.float8_e4m3fnuz
        has = f"{name} is {architecture}, and on AMD's GPUs 8 bits are for gfx942 (MI300) alone"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= FP8_CAPABILITY:
            return torch.float8_e4m3fn
        has = f"{name} has compute capability {major}.{minor}, and numbers of 8 bits begin with 8.9"
    raise ModelLoadError(f"kv_dtype is fp8, but {has}; use --kv-dtype auto.", "unsupported")
