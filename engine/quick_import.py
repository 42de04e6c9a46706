"""The engine's heavy modules, imported in about two thirds of the time, by a process that lives for the engine.

Two things make ``import torch`` slow that are of no use here. The collector of garbage walks, again and again, through
objects of which none will go. And torch registers in Python how its operators treat tensors that have a shape and no
values (``meta``), which its compiler needs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

LATER = ("torch._meta_registrations", "torch.distributed._meta_registrations")
"""Modules that nothing here uses."""


class _Later(types.ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module, by whoever looks through them
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """Import within this what is heavy. Without effect where torch is there already."""
    if "torch" in sys.modules:
        yield
        return
    for name in LATER:
        sys.modules.setdefault(name, _Later(name))
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
