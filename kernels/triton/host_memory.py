"""Host memory that a GPU's kernels read and write themselves."""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch


def reachable_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed host memory that kernels on ``device`` reach: page-locked and mapped where that is a GPU, until the last
    tensor on it is gone. Raises RuntimeError where the system does not let so much be locked.

    Not ``torch.empty(pin_memory=True)``, which rounds up to a power of two and never gives the memory back.
    """
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    if device.type == "cuda":
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data).atexit = False
    return torch.from_numpy(memory).view(dtype).view(shape)
