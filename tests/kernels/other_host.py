"""A plugin for pytest (``-p tests.kernels.other_host``): kernels are made for a CPU with the features in the
environment variable ``KERNELS_CPU_FEATURES`` and no others, whatever this one has. numba has its own say in what LLVM
compiles for: ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES``."""

from __future__ import annotations

import os

from llvmlite import binding

binding.get_host_cpu_features = lambda: dict.fromkeys(os.environ["KERNELS_CPU_FEATURES"].split(), True)
