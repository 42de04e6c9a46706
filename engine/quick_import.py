"""The engine's heavy modules, imported in four fifths of the time, by a process that lives for the engine.

Two things make ``import torch`` slow that are of no use here. The collector of garbage walks, again and again, through
objects of which none will go. And torch registers in Python how its operators treat tensors that have a shape and no
values (``meta``), which its compiler needs. Where there may be a GPU, torch is left as it is.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LATER = ("torch._meta_registrations", "torch.distributed._meta_registrations")
"""Modules that only tensors without values use."""
_WANTED = "torch._prims.rng_prims"
"""What those would have imported and ``torch.Generator`` cannot do without."""
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of them is there where Linux has a driver for a GPU that torch knows."""


class _Later(types.ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module, by whoever looks through them
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_the_rest() -> None:
    """What :func:`quick_import` left out, for who computes with shapes alone."""
    for name in LATER:
        if isinstance(sys.modules.get(name), _Later):
            del sys.modules[name]
            importlib.import_module(name)


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Import within this what is heavy. Without effect where torch is there already."""
    if "torch" in sys.modules:
        yield
        return
    later = () if sys.platform != "linux" or any(Path(file).exists() for file in GPU_FILES) else LATER
    for name in later:
        sys.modules.setdefault(name, _Later(name))
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        if later and "torch" in sys.modules:
            importlib.import_module(_WANTED)
    finally:
        gc.freeze()
        if collects:
            gc.enable()
