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
int8       int16       pairs of neighbours in k, exact in int32: ``vpdpwssd``, ``vpmaddwd``, or what LLVM makes of it
=========  ==========  =========================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FEATURES: dict[str, bool] = dict(binding.get_host_cpu_features())
LANES = 16 if _FEATURES.get("avx512f") and _FEATURES.get("avx512bw") else 8
"""float32 numbers in a vector. LLVM splits vectors where the host's are shorter."""
CACHE_LINE = 64
TILE_ROWS = 6
TILE_VECTORS = 4 if LANES == 16 else 2
"""6 × 2 accumulators leave 4 of AVX2's 16 registers for operands; 6 × 4 leave 8 of AVX-512's 32."""
HAS_FMA = bool(_FEATURES.get("fma")) or "x86" not in binding.get_default_triple()
HAS_VNNI = bool(_FEATURES.get("avx512vnni")) and LANES == 16
HAS_PMADDWD = bool(_FEATURES.get("avx2"))
if HAS_VNNI:
    # Without it LLVM makes most vpdpwssd of a tile into two instructions on Intel's CPUs, to shorten a chain of sums
    # that is not what a tile of so many waits for.
    _compiled_for = os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten()
    numba.config.CPU_FEATURES = f"{_compiled_for},+fast-dpwssd"  # type: ignore[attr-defined]

I16, I32, F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
INTP = ir.IntType(64)
FLOATS = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)


def int8_instruction() -> str:
    """What multiplies int8 on this host, for people."""
    if HAS_VNNI:
        return "AVX-512 VNNI"
    return ("AVX-512" if LANES == 16 else "AVX2") if HAS_PMADDWD else "generic vectors"


def activation_dtype(matrix_dtype: np.dtype) -> np.dtype:
    """Element type of the rows that a packed matrix of ``matrix_dtype`` is multiplied with."""
    return np.dtype(np.int16 if matrix_dtype == np.int8 else np.float32)


def depth(matrix_dtype: np.dtype) -> int:
    """Neighbours in k that one step takes together."""
    return 2 if matrix_dtype == np.int8 else 1


def splat(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType) -> ir.Value:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), None))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def load(builder: ir.IRBuilder, pointer: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)


class FloatStep:
    """float32 rows; float32 columns, or the bits of bfloat16."""

    accumulator = FLOATS
    depth = 1

    def __init__(self, widen: bool) -> None:
        self._widen = widen

    def columns(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        if not self._widen:
            return load(builder, pointer, FLOATS, 4)
        bits = builder.zext(load(builder, pointer, ir.VectorType(I16, LANES), 2), INTS)
        return builder.bitcast(builder.shl(bits, ir.Constant(INTS, [16] * LANES)), FLOATS)

    def row(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        return splat(builder, builder.load(pointer, align=4), FLOATS)

    def add(self, builder: ir.IRBuilder, total: ir.Value, row: ir.Value, columns: ir.Value) -> ir.Value:
        if HAS_FMA:
            return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, [row, columns, total])
        return builder.fadd(total, builder.fmul(row, columns))


class _PairStep:
    """int16 rows and int8 columns, two neighbours in k at a time, exact in int32."""

    accumulator = INTS
    depth = 2

    def columns(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        narrow = load(builder, pointer, ir.VectorType(ir.IntType(8), 2 * LANES), 1)
        return builder.sext(narrow, ir.VectorType(I16, 2 * LANES))

    def row(self, builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
        pair = splat(builder, load(builder, pointer, I32, 2), INTS)
        return builder.bitcast(pair, ir.VectorType(I16, 2 * LANES))

    def add(self, builder: ir.IRBuilder, total: ir.Value, row: ir.Value, columns: ir.Value) -> ir.Value:
        if HAS_VNNI:
            halves = [builder.bitcast(each, INTS) for each in (row, columns)]
            return call(builder, "llvm.x86.avx512.vpdpwssd.512", INTS, [total, *halves])
        if HAS_PMADDWD:
            name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
            return builder.add(total, call(builder, name, INTS, [row, columns]))
        wide = ir.VectorType(I32, 2 * LANES)
        products = builder.mul(builder.sext(row, wide), builder.sext(columns, wide))
        undefined = ir.Constant(wide, ir.Undefined)
        for first in (0, 1):
            lanes = ir.Constant(INTS, list(range(first, 2 * LANES, 2)))
            total = builder.add(total, builder.shuffle_vector(products, undefined, lanes))
        return total


def _step(columns: types.Array) -> FloatStep | _PairStep:
    return _PairStep() if columns.dtype == types.int8 else FloatStep(widen=columns.dtype == types.uint16)


def address(context: Any, builder: ir.IRBuilder, kind: types.Array, array: ir.Value, offset: ir.Value) -> ir.Value:
    """Of an element of a numba array of type ``kind``."""
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

    def interleaved(self, rows: int, step: FloatStep | _PairStep) -> _Operands:
        """With the distances of ``rows`` interleaved rows: constants, which cost no instructions in the loop."""
        row, next_step = ir.Constant(INTP, step.depth), ir.Constant(INTP, rows * step.depth)
        return replace(self, a_row=row, a_step=next_step)


def _emit_tile(
    builder: ir.IRBuilder,
    step: FloatStep | _PairStep,
    on: _Operands,
    rows: int,
    vectors: int,
    add: bool,
    finish: Callable[[ir.Value, int, int], ir.Value],
) -> None:
    """``finish`` makes what is stored of an accumulator, its row and its vector."""

    def place(start: ir.Value, stride: ir.Value, number: int) -> ir.Value:
        return builder.gep(start, [builder.mul(stride, ir.Constant(INTP, number))])

    row_starts = [place(on.a, on.a_row, i) for i in range(rows)]
    column_starts = [place(on.b, on.b_vector, j) for j in range(vectors)]
    out_rows = [place(on.out, on.out_row, i) for i in range(rows)]
    targets = [builder.gep(row, [ir.Constant(INTP, j * LANES)]) for row in out_rows for j in range(vectors)]
    zero = ir.Constant(step.accumulator, None)
    before = [load(builder, target, FLOATS, 4) if add else zero for target in targets]
    entry = builder.block
    loop, done = builder.append_basic_block("k"), builder.append_basic_block("k.done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(INTP)
    totals = [builder.phi(step.accumulator) for _ in targets]
    a_k, b_k = builder.mul(k, on.a_step), builder.mul(k, on.b_step)
    columns = [step.columns(builder, builder.gep(start, [b_k])) for start in column_starts]
    after = []
    for i, start in enumerate(row_starts):
        row = step.row(builder, builder.gep(start, [a_k]))
        after += [step.add(builder, totals[i * vectors + j], row, columns[j]) for j in range(vectors)]
    following = builder.add(k, ir.Constant(INTP, 1))
    for phi, first, last in zip([k, *totals], [ir.Constant(INTP, 0), *before], [following, *after], strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, on.count), loop, done)
    builder.position_at_end(done)
    for index, (target, total) in enumerate(zip(targets, after, strict=True)):
        value = finish(total, index // vectors, index % vectors)
        builder.store(value, builder.bitcast(target, FLOATS.as_pointer()), align=4)


def _emit_tiles(builder: ir.IRBuilder, rows: ir.Value, most_rows: int, emit: Callable[[int], None]) -> None:
    """``emit`` for as many rows as there are, of 1 to ``most_rows``."""
    end = builder.append_basic_block("tile.end")
    blocks = [builder.append_basic_block(f"tile.{number}") for number in range(1, most_rows + 1)]
    choice = builder.switch(rows, blocks[-1])
    for number, block in enumerate(blocks, start=1):
        if number < most_rows:
            choice.add_case(ir.Constant(INTP, number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(end)
    builder.position_at_end(end)


def tile(vectors: int, add: bool, most_rows: int = TILE_ROWS, interleaved: bool = False) -> Any:
    """An intrinsic that multiplies 1 to ``most_rows`` rows with ``vectors`` vectors of columns over ``count`` steps.

    ``(rows, a, a_at, a_row, a_step, b, b_at, b_vector, b_step, count, out, out_at, out_row)``: flat arrays, the place
    of the first element in each, and how many elements further the next row, vector or step of k is. The sums go to
    ``out``, or are added to what is there with ``add``. ``count`` is at least 1. No int8. ``interleaved``: the rows of
    a tile lie as :func:`panel_tile` has them, and ``a_row`` and ``a_step`` are not looked at.
    """

    @intrinsic
    def multiply(
        context: Any, rows: Any, a: Any, a_at: Any, a_row: Any, a_step: Any, b: Any, b_at: Any, b_vector: Any,
        b_step: Any, count: Any, out: Any, out_at: Any, out_row: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
            step = _step(signature.args[5])
            on = _operands(context, builder, signature, args)

            def emit(number: int) -> None:
                operands = on.interleaved(number, step) if interleaved else on
                _emit_tile(builder, step, operands, number, vectors, add, lambda total, row, vector: total)

            _emit_tiles(builder, args[0], most_rows, emit)
            return context.get_dummy_value()

        size = types.intp
        return types.void(size, a, size, size, size, b, size, size, size, size, out, size, size), generate

    return multiply


def _operands(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> _Operands:
    """Of the arguments of :func:`tile`."""
    _, a, a_at, a_row, a_step, b, b_at, b_vector, b_step, count, out, out_at, out_row = args
    return _Operands(
        address(context, builder, signature.args[1], a, a_at), a_row, a_step,
        address(context, builder, signature.args[5], b, b_at), b_vector, b_step, count,
        address(context, builder, signature.args[10], out, out_at), out_row,
    )  # fmt: skip


@intrinsic
def panel_tile(
    context: Any, rows: Any, a: Any, a_at: Any, b: Any, b_at: Any, b_vector: Any, b_step: Any, count: Any, out: Any,
    out_at: Any, out_row: Any, row_scales: Any, row_at: Any, scales: Any, output_at: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """As :func:`tile` for a panel of a packed matrix and interleaved rows: for each step of k the numbers of all rows
    of the tile lie side by side. An int8 sum becomes sum · scale of the output · scale of the row,
    ``row_scales[row_at + row]``."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        kinds = signature.args
        rows, a, a_at, b, b_at, b_vector, b_step, count, out, out_at, out_row, *scaling = args
        step, zero = _step(kinds[3]), ir.Constant(INTP, 0)
        on = _Operands(
            address(context, builder, kinds[1], a, a_at), zero, zero,
            address(context, builder, kinds[3], b, b_at), b_vector, b_step, count,
            address(context, builder, kinds[8], out, out_at), out_row,
        )  # fmt: skip
        row_scales = address(context, builder, kinds[11], scaling[0], scaling[1])
        scales = address(context, builder, kinds[13], scaling[2], scaling[3])

        def finish(total: ir.Value, row: int, vector: int) -> ir.Value:
            if step.accumulator is FLOATS:
                return total
            scale = load(builder, builder.gep(scales, [ir.Constant(INTP, vector * LANES)]), FLOATS, 4)
            row_scale = splat(builder, builder.load(builder.gep(row_scales, [ir.Constant(INTP, row)])), FLOATS)
            return builder.fmul(builder.sitofp(total, FLOATS), builder.fmul(scale, row_scale))

        def emit(number: int) -> None:
            _emit_tile(builder, step, on.interleaved(number, step), number, TILE_VECTORS, False, finish)

        _emit_tiles(builder, rows, TILE_ROWS, emit)
        return context.get_dummy_value()

    size = types.intp
    operands = (size, a, size, b, size, size, size, size, out, size, size)
    return types.void(*operands, row_scales, size, scales, size), generate


def _reinterpret(source: types.Type, result: types.Type, kind: ir.Type) -> Any:
    @intrinsic
    def convert(context: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
        return result(source), lambda context, builder, signature, args: builder.bitcast(args[0], kind)

    return convert


bits_of = _reinterpret(types.float32, types.int32, I32)
"""The bits of a float32 as int32."""
float_of = _reinterpret(types.int32, types.float32, F32)
"""The float32 with these bits."""


@intrinsic
def prefetch(context: Any, array: Any, at: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
    """Ask for ``count`` numbers of a flat array from ``at`` on, so that they are on their way when they are read."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        start = address(context, builder, signature.args[0], args[0], args[1])
        size = context.get_abi_sizeof(context.get_data_type(array.dtype))
        bytes_ = ir.IntType(8).as_pointer()
        with cgutils.for_range_slice(
            builder, ir.Constant(INTP, 0), args[2], ir.Constant(INTP, CACHE_LINE // size), INTP
        ) as (place, _):
            hint = [
                ir.Constant(I32, 0),
                ir.Constant(I32, 3),
                ir.Constant(I32, 1),
            ]  # to read, to the first cache, data
            pointer = builder.bitcast(builder.gep(start, [place]), bytes_)
            call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *hint])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate
