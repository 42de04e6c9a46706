"""Explicit vectors for kernels written in Python: numba has no vector type, its intrinsics can emit LLVM's.

The products of this backend all have one inner step: a vector of neighbouring columns times one number, added to an
accumulator. :func:`tile` emits that step for a tile of rows × vectors, which LLVM keeps in registers::

                      vector 0   vector 1            the columns: outputs of a matrix, keys of a block, dimensions of
    row 0   a[0, k] ×  acc 00     acc 01             a value
    row 1   a[1, k] ×  acc 10     acc 11       every number is the sum over k in ascending order, so it does not depend
    row 2   a[2, k] ×  acc 20     acc 21       on how rows were put together to tiles or tiles shared out to threads

The element types pick the step, when a caller is compiled:

=========  ==========  =========================================================================================
columns    rows        one step
=========  ==========  =========================================================================================
float32    float32     fused multiply and add
uint16     float32     the bits of bfloat16, widened
int8       int16       pairs of neighbours in k: ``vpmaddwd`` or its like; exact
int8       uint8       groups of four, rows offset by 128: ``vpdpbusd`` where the host has VNNI; exact
=========  ==========  =========================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FEATURES: dict[str, bool] = dict(binding.get_host_cpu_features())
LANES = 16 if _FEATURES.get("avx512f") and _FEATURES.get("avx512bw") else 8
"""float32 numbers in a vector. LLVM splits vectors where the host's are shorter."""
TILE_ROWS = 6
TILE_VECTORS = 4 if LANES == 16 else 2
"""6 × 2 accumulators leave 4 of AVX2's 16 registers for operands; 6 × 4 leave 8 of AVX-512's 32."""
HAS_FMA = bool(_FEATURES.get("fma")) or "x86" not in binding.get_default_triple()
HAS_VNNI = bool(_FEATURES.get("avx512vnni") and LANES == 16)
HAS_PMADDWD = bool(_FEATURES.get("avx2")) and LANES == 8

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_INTP = ir.IntType(64)
_FLOATS = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)


def int8_instruction() -> str:
    """What multiplies int8 on this host, for people."""
    if HAS_VNNI:
        return "AVX-512 VNNI"
    return "AVX2" if HAS_PMADDWD else "generic vectors"


def activation_dtype(matrix_dtype: np.dtype) -> np.dtype:
    """Element type of the rows that a packed matrix of ``matrix_dtype`` is multiplied with."""
    if matrix_dtype == np.int8:
        return np.dtype(np.uint8 if HAS_VNNI else np.int16)
    return np.dtype(np.float32)


def depth(matrix_dtype: np.dtype) -> int:
    """Neighbours in k that one step takes together."""
    if matrix_dtype == np.int8:
        return 4 if HAS_VNNI else 2
    return 1


def _splat(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType) -> ir.Value:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, vector.count), None))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _load(builder: ir.IRBuilder, pointer: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)


class _FloatStep:
    """float32 rows; float32 columns, or the bits of bfloat16."""

    accumulator = _FLOATS

    def __init__(self, widen: bool) -> None:
        self._widen = widen

    def columns(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        if not self._widen:
            return _load(builder, pointer, _FLOATS, 4)
        bits = builder.zext(_load(builder, pointer, ir.VectorType(_I16, LANES), 2), _INTS)
        return builder.bitcast(builder.shl(bits, ir.Constant(_INTS, [16] * LANES)), _FLOATS)

    def row(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        return _splat(builder, builder.load(pointer, align=4), _FLOATS)

    def add(self, builder: ir.IRBuilder, total: ir.Value, row: ir.Value, columns: ir.Value) -> ir.Value:
        if HAS_FMA:
            return _call(builder, f"llvm.fma.v{LANES}f32", _FLOATS, [row, columns, total])
        return builder.fadd(total, builder.fmul(row, columns))


class _PairStep:
    """int16 rows and int8 columns, two neighbours in k at a time, exact in int32."""

    accumulator = _INTS

    def columns(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        narrow = _load(builder, pointer, ir.VectorType(ir.IntType(8), 2 * LANES), 1)
        return builder.sext(narrow, ir.VectorType(_I16, 2 * LANES))

    def row(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        pair = _splat(builder, _load(builder, pointer, _I32, 2), _INTS)
        return builder.bitcast(pair, ir.VectorType(_I16, 2 * LANES))

    def add(self, builder: ir.IRBuilder, total: ir.Value, row: ir.Value, columns: ir.Value) -> ir.Value:
        if HAS_PMADDWD:
            return builder.add(total, _call(builder, "llvm.x86.avx2.pmadd.wd", _INTS, [row, columns]))
        wide = ir.VectorType(_I32, 2 * LANES)
        products = builder.mul(builder.sext(row, wide), builder.sext(columns, wide))
        undefined = ir.Constant(wide, ir.Undefined)
        for first in (0, 1):
            lanes = ir.Constant(_INTS, list(range(first, 2 * LANES, 2)))
            total = builder.add(total, builder.shuffle_vector(products, undefined, lanes))
        return total


class _QuadStep:
    """uint8 rows and int8 columns, four neighbours in k at a time, exact in int32."""

    accumulator = _INTS

    def columns(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        return _load(builder, pointer, _INTS, 1)

    def row(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        return _splat(builder, _load(builder, pointer, _I32, 1), _INTS)

    def add(self, builder: ir.IRBuilder, total: ir.Value, row: ir.Value, columns: ir.Value) -> ir.Value:
        return _call(builder, f"llvm.x86.avx512.vpdpbusd.{LANES * 32}", _INTS, [total, row, columns])


def _step(columns: types.Array, rows: types.Array) -> _FloatStep | _PairStep | _QuadStep:
    if columns.dtype == types.int8:
        return _QuadStep() if rows.dtype == types.uint8 else _PairStep()
    return _FloatStep(widen=columns.dtype == types.uint16)


def _pointer(context: Any, builder: ir.IRBuilder, kind: types.Array, array: ir.Value, offset: ir.Value) -> ir.Value:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


@dataclass(frozen=True, slots=True)
class _Operands:
    """Pointers to the first elements, and how many elements further the next row, vector or step of k is."""

    a: ir.Value
    a_row: ir.Value
    a_step: ir.Value
    b: ir.Value
    b_vector: ir.Value
    b_step: ir.Value
    count: ir.Value
    out: ir.Value
    out_row: ir.Value


def _emit_tile(
    builder: ir.IRBuilder, step: _FloatStep | _PairStep | _QuadStep, on: _Operands, rows: int, vectors: int, add: bool
) -> None:
    def place(start: ir.Value, stride: ir.Value, number: int) -> ir.Value:
        return builder.gep(start, [builder.mul(stride, ir.Constant(_INTP, number))])

    row_starts = [place(on.a, on.a_row, i) for i in range(rows)]
    column_starts = [place(on.b, on.b_vector, j) for j in range(vectors)]
    out_rows = [place(on.out, on.out_row, i) for i in range(rows)]
    targets = [builder.gep(row, [ir.Constant(_INTP, j * LANES)]) for row in out_rows for j in range(vectors)]
    zero = ir.Constant(step.accumulator, None)
    before = [_load(builder, target, step.accumulator, 4) if add else zero for target in targets]
    entry = builder.block
    loop, done = builder.append_basic_block("k"), builder.append_basic_block("k.done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(_INTP)
    totals = [builder.phi(step.accumulator) for _ in targets]
    a_k, b_k = builder.mul(k, on.a_step), builder.mul(k, on.b_step)
    columns = [step.columns(builder, builder.gep(start, [b_k])) for start in column_starts]
    after = []
    for i, start in enumerate(row_starts):
        row = step.row(builder, builder.gep(start, [a_k]))
        after += [step.add(builder, totals[i * vectors + j], row, columns[j]) for j in range(vectors)]
    following = builder.add(k, ir.Constant(_INTP, 1))
    for phi, first, last in zip([k, *totals], [ir.Constant(_INTP, 0), *before], [following, *after], strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, on.count), loop, done)
    builder.position_at_end(done)
    for target, total in zip(targets, after, strict=True):
        builder.store(total, builder.bitcast(target, step.accumulator.as_pointer()), align=4)


def tile(vectors: int, add: bool, most_rows: int = TILE_ROWS) -> Any:
    """An intrinsic that multiplies 1 to ``most_rows`` rows with ``vectors`` vectors of columns over ``count`` steps of k.

    ``(rows, a, a_at, a_row, a_step, b, b_at, b_vector, b_step, count, out, out_at, out_row)``: flat arrays, the place of
    the first element in each, and how many elements further the next row, vector or step of k is. The sums go to
    ``out``, whose type is that of the accumulators (float32 or int32), or are added to what is there with ``add``.
    ``count`` is at least 1.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        context: Any, rows: Any, a: Any, a_at: Any, a_row: Any, a_step: Any, b: Any, b_at: Any, b_vector: Any,
        b_step: Any, count: Any, out: Any, out_at: Any, out_row: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
            step = _step(signature.args[5], signature.args[1])
            rows, a, a_at, a_row, a_step, b, b_at, b_vector, b_step, count, out, out_at, out_row = args
            on = _Operands(
                _pointer(context, builder, signature.args[1], a, a_at), a_row, a_step,
                _pointer(context, builder, signature.args[5], b, b_at), b_vector, b_step, count,
                _pointer(context, builder, signature.args[10], out, out_at), out_row,
            )  # fmt: skip
            end = builder.append_basic_block("tile.end")
            blocks = [builder.append_basic_block(f"tile.{number}") for number in range(1, most_rows + 1)]
            choice = builder.switch(rows, blocks[-1])
            for number, block in enumerate(blocks, start=1):
                if number < most_rows:
                    choice.add_case(ir.Constant(_INTP, number), block)
                builder.position_at_end(block)
                _emit_tile(builder, step, on, number, vectors, add)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        size = types.intp
        return types.void(size, a, size, size, size, b, size, size, size, size, out, size, size), generate

    return multiply


def _reinterpret(source: types.Type, result: types.Type, kind: ir.Type) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def convert(context: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
        return result(source), lambda context, builder, signature, args: builder.bitcast(args[0], kind)

    return convert


bits_of = _reinterpret(types.float32, types.int32, _I32)
"""The bits of a float32 as int32."""
float_of = _reinterpret(types.int32, types.float32, _F32)
"""The float32 with these bits."""


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(context: Any, array: Any, index: Any, amount: Any) -> tuple[Any, Callable[..., Any]]:
    """Add to an element of an int64 array, undivided; returns what was there before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_shared(context: Any, array: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    """An element of an int64 array as another thread wrote it, and whatever it wrote before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(array, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def relax(context: Any) -> tuple[Any, Callable[..., Any]]:
    """Tell the core that this thread waits in a loop."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        if "x86" in binding.get_default_triple():
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def give_way(context: Any) -> tuple[Any, Callable[..., Any]]:
    """Let another thread have the core."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        _call(builder, "SwitchToThread" if sys.platform == "win32" else "sched_yield", _I32, [])
        return context.get_dummy_value()

    return types.void(), generate
