"""What threads need that run one compiled function together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu.vectors import I32, address, call


@intrinsic
def fetch_add(context: Any, array: Any, index: Any, amount: Any) -> tuple[Any, Callable[..., Any]]:
    """Add to an element of an int64 array, undivided; returns what was there before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        pointer = address(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


@intrinsic
def load_shared(context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """An element of an int64 array as another thread wrote it, and whatever it wrote before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        pointer = address(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(array, types.intp), generate


@intrinsic
def relax(context: Any) -> tuple[Any, Callable[..., Any]]:
    """Tell the core that this thread waits in a loop."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        if "x86" in binding.get_default_triple():
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(context: Any) -> tuple[Any, Callable[..., Any]]:
    """Let another thread have the core."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        call(builder, "SwitchToThread" if sys.platform == "win32" else "sched_yield", I32, [])
        return context.get_dummy_value()

    return types.void(), generate
