"""What there is: the card, the driver, the versions, and which attention Transformers has to compute with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
from typing import Any

import torch
import transformers
import triton

from tests.gpu.card import Card
from tests.gpu.figures import Report


def run(card: Card, report: Report, facts: dict[str, Any]) -> None:
    report.fact("python", platform.python_version())
    report.fact("torch", f"{torch.__version__} (CUDA {torch.version.cuda}, HIP {torch.version.hip})")
    report.fact("triton", triton.__version__)
    report.fact("transformers", transformers.__version__)
    flash = [name for name in ("flash_attn", "flash_attn_3", "kernels") if _is_installed(name)]
    report.fact("packages with flash attention", ", ".join(flash) or "none: Transformers computes with torch's own")
    if card.rehearsal:
        report.fact("card", "none: a rehearsal on the processor")
        return
    properties = torch.cuda.get_device_properties(card.device)
    report.fact("card", properties.name)
    report.fact("target", card.target)
    report.fact("multiprocessors", properties.multi_processor_count)
    report.fact("memory", properties.total_memory / 2**30, "GiB")
    report.fact("memory free", card.free_bytes() / 2**30, "GiB")
    report.fact("L2", card.l2_bytes / 2**20, "MiB")
    report.fact("driver", _asked("driver_version,clocks.sm,clocks.mem,power.limit"))
    mode = _asked("compute_mode")
    report.fact("compute mode", mode)
    facts["one_process"] = mode.startswith("Exclusive")


def _is_installed(package: str) -> bool:
    """Of ``kernels``, a distribution of Hugging Face with the name of our own folder, only the metadata tell."""
    if package == "kernels":
        return any(True for _ in importlib.metadata.distributions(name=package))
    return importlib.util.find_spec(package) is not None


def _asked(what: str) -> str:
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=15, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not told: {error}"
