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
CACHE_LINE = 64
TILE_ROWS = 6
TILE_VECTORS = 4 if LANES == 16 else 2
"""6 × 2 accumulators leave 4 of AVX2's 16 registers for operands; 6 × 4 leave 8 of AVX-512's 32."""
HAS_FMA = bool(_FEATURES.get("fma")) or "x86" not in binding.get_default_triple()
HAS_VNNI = bool(_FEATURES.get("avx512vnni")) and LANES == 16
HAS_PMADDWD = bool(_FEATURES.get("avx2"))

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_INTP = ir.IntType(64)
_FLOATS = ir.VectorType(_F32, LANES)
_INTS = ir.VectorType(_I32, LANES)


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
        if HAS_VNNI:
            halves = [builder.bitcast(each, _INTS) for each in (row, columns)]
            return _call(builder, "llvm.x86.avx512.vpdpwssd.512", _INTS, [total, *halves])
        if HAS_PMADDWD:
            name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
            return builder.add(total, _call(builder, name, _INTS, [row, columns]))
        wide = ir.VectorType(_I32, 2 * LANES)
        products = builder.mul(builder.sext(row, wide), builder.sext(columns, wide))
        undefined = ir.Constant(wide, ir.Undefined)
        for first in (0, 1):
            lanes = ir.Constant(_INTS, list(range(first, 2 * LANES, 2)))
            total = builder.add(total, builder.shuffle_vector(products, undefined, lanes))
        return total


def _step(columns: types.Array) -> _FloatStep | _PairStep:
    return _PairStep() if columns.dtype == types.int8 else _FloatStep(widen=columns.dtype == types.uint16)


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
    builder: ir.IRBuilder,
    step: _FloatStep | _PairStep,
    on: _Operands,
    rows: int,
    vectors: int,
    add: bool,
    finish: Callable[[ir.Value, int, int], ir.Value],
) -> None:
    """``finish`` makes what is stored of an accumulator, its row and its vector."""

    def place(start: ir.Value, stride: ir.Value, number: int) -> ir.Value:
        return builder.gep(start, [builder.mul(stride, ir.Constant(_INTP, number))])

    row_starts = [place(on.a, on.a_row, i) for i in range(rows)]
    column_starts = [place(on.b, on.b_vector, j) for j in range(vectors)]
    out_rows = [place(on.out, on.out_row, i) for i in range(rows)]
    targets = [builder.gep(row, [ir.Constant(_INTP, j * LANES)]) for row in out_rows for j in range(vectors)]
    zero = ir.Constant(step.accumulator, None)
    before = [_load(builder, target, _FLOATS, 4) if add else zero for target in targets]
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
    for index, (target, total) in enumerate(zip(targets, after, strict=True)):
        value = finish(total, index // vectors, index % vectors)
        builder.store(value, builder.bitcast(target, _FLOATS.as_pointer()), align=4)


def _emit_tiles(builder: ir.IRBuilder, rows: ir.Value, most_rows: int, emit: Callable[[int], None]) -> None:
    """``emit`` for as many rows as there are, of 1 to ``most_rows``."""
    end = builder.append_basic_block("tile.end")
    blocks = [builder.append_basic_block(f"tile.{number}") for number in range(1, most_rows + 1)]
    choice = builder.switch(rows, blocks[-1])
    for number, block in enumerate(blocks, start=1):
        if number < most_rows:
            choice.add_case(ir.Constant(_INTP, number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(end)
    builder.position_at_end(end)


def tile(vectors: int, add: bool, most_rows: int = TILE_ROWS) -> Any:
    """An intrinsic that multiplies 1 to ``most_rows`` rows with ``vectors`` vectors of columns over ``count`` steps of k.

    ``(rows, a, a_at, a_row, a_step, b, b_at, b_vector, b_step, count, out, out_at, out_row)``: flat arrays, the place of
    the first element in each, and how many elements further the next row, vector or step of k is. The sums go to
    ``out``, or are added to what is there with ``add``. ``count`` is at least 1. No int8.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        context: Any, rows: Any, a: Any, a_at: Any, a_row: Any, a_step: Any, b: Any, b_at: Any, b_vector: Any,
        b_step: Any, count: Any, out: Any, out_at: Any, out_row: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
            step = _step(signature.args[5])
            on = _operands(context, builder, signature, args)

            def emit(number: int) -> None:
                _emit_tile(builder, step, on, number, vectors, add, lambda total, row, vector: total)

            _emit_tiles(builder, args[0], most_rows, emit)
            return context.get_dummy_value()

        size = types.intp
        return types.void(size, a, size, size, size, b, size, size, size, size, out, size, size), generate

    return multiply


def _operands(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> _Operands:
    """Of the arguments of :func:`tile`."""
    _, a, a_at, a_row, a_step, b, b_at, b_vector, b_step, count, out, out_at, out_row = args
    return _Operands(
        _pointer(context, builder, signature.args[1], a, a_at), a_row, a_step,
        _pointer(context, builder, signature.args[5], b, b_at), b_vector, b_step, count,
        _pointer(context, builder, signature.args[10], out, out_at), out_row,
    )  # fmt: skip


@intrinsic  # type: ignore[untyped-decorator]
def panel_tile(
    context: Any, rows: Any, a: Any, a_at: Any, a_row: Any, a_step: Any, b: Any, b_at: Any, b_vector: Any,
    b_step: Any, count: Any, out: Any, out_at: Any, out_row: Any, row_scales: Any, row_at: Any, scales: Any,
    output_at: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """As :func:`tile` for a panel of a packed matrix. An int8 sum becomes
    sum · scale of the output · scale of the row, ``row_scales[row_at + row]``."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        step = _step(signature.args[5])
        on = _operands(context, builder, signature, args[:13])
        _, row_at, _, output_at = args[13:]
        row_scales = _pointer(context, builder, signature.args[13], args[13], row_at)
        scales = _pointer(context, builder, signature.args[15], args[15], output_at)

        def finish(total: ir.Value, row: int, vector: int) -> ir.Value:
            if step.accumulator is _FLOATS:
                return total
            first = [ir.Constant(_INTP, vector * LANES)]
            scale = _load(builder, builder.gep(scales, first), _FLOATS, 4)
            row_scale = _splat(builder, builder.load(builder.gep(row_scales, [ir.Constant(_INTP, row)])), _FLOATS)
            return builder.fmul(builder.sitofp(total, _FLOATS), builder.fmul(scale, row_scale))

        def emit(number: int) -> None:
            _emit_tile(builder, step, on, number, TILE_VECTORS, False, finish)

        _emit_tiles(builder, args[0], TILE_ROWS, emit)
        return context.get_dummy_value()

    size = types.intp
    operands = (size, a, size, size, size, b, size, size, size, size, out, size, size)
    return types.void(*operands, row_scales, size, scales, size), generate


def _emit_exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x to 2 units in the last place between e^-87 and e^88; what is beyond gets these. The polynomial is that of
    Cephes' ``expf``. NaN stays NaN."""

    def constant(value: float) -> ir.Value:
        return ir.Constant(_FLOATS, [value] * LANES)

    def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return _FloatStep(False).add(builder, c, a, b)

    for limit, beyond in ((-87.0, "<"), (88.0, ">")):
        outside = builder.fcmp_ordered(beyond, x, constant(limit))
        x = builder.select(outside, constant(limit), x)
    power = _call(builder, f"llvm.floor.v{LANES}f32", _FLOATS, [fma(x, constant(1.44269504088896341), constant(0.5))])
    rest = fma(power, constant(2.12194440e-4), fma(power, constant(-0.693359375), x))
    series = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fma(series, rest, constant(factor))
    value = builder.fadd(fma(series, builder.fmul(rest, rest), rest), constant(1.0))
    exponent = builder.add(builder.fptosi(power, _INTS), ir.Constant(_INTS, [127] * LANES))
    return builder.fmul(value, builder.bitcast(builder.shl(exponent, ir.Constant(_INTS, [23] * LANES)), _FLOATS))


def _emit_loop(
    builder: ir.IRBuilder,
    count: ir.Value,
    total: ir.Value,
    body: Callable[[ir.Value, ir.Value, ir.Value | None], ir.Value],
) -> ir.Value:
    """``body(first, total, valid)`` for each vector of ``count`` numbers; ``valid``, for the last and incomplete one,
    tells which lanes are numbers. Returns the last total."""
    lanes = ir.Constant(_INTP, LANES)
    whole = builder.sub(count, builder.srem(count, lanes))
    entry = builder.block
    names = ("vector.test", "vector", "vector.rest", "vector.last", "vector.end")
    test, loop, rest, last, end = (builder.append_basic_block(name) for name in names)
    builder.branch(test)
    builder.position_at_end(test)
    first, so_far = builder.phi(_INTP), builder.phi(_FLOATS)
    first.add_incoming(ir.Constant(_INTP, 0), entry)
    so_far.add_incoming(total, entry)
    builder.cbranch(builder.icmp_signed("<", first, whole), loop, rest)
    builder.position_at_end(loop)
    so_far.add_incoming(body(first, so_far, None), builder.block)
    first.add_incoming(builder.add(first, lanes), builder.block)
    builder.branch(test)
    builder.position_at_end(rest)
    builder.cbranch(builder.icmp_signed("<", whole, count), last, end)
    builder.position_at_end(last)
    left = _splat(builder, builder.trunc(builder.sub(count, whole), _I32), _INTS)
    valid = builder.icmp_signed("<", ir.Constant(_INTS, list(range(LANES))), left)
    final = body(whole, so_far, valid)
    last = builder.block
    builder.branch(end)
    builder.position_at_end(end)
    result = builder.phi(_FLOATS)
    result.add_incoming(so_far, rest)
    result.add_incoming(final, last)
    return result


def _emit_reduce(
    builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    lanes = [builder.extract_element(vector, ir.Constant(_I32, lane)) for lane in range(LANES)]
    while len(lanes) > 1:
        lanes = [combine(lanes[i], lanes[i + len(lanes) // 2]) for i in range(len(lanes) // 2)]
    return lanes[0]


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _largest(of_magnitude: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def find(context: Any, array: Any, at: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
        return types.float32(array, types.intp, types.intp), generate

    start = 0.0 if of_magnitude else -float("inf")

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        nothing = ir.Constant(_FLOATS, [start] * LANES)

        def body(first: ir.Value, total: ir.Value, valid: ir.Value | None) -> ir.Value:
            values = _load(builder, builder.gep(pointer, [first]), _FLOATS, 4)
            if of_magnitude:
                values = _call(builder, f"llvm.fabs.v{LANES}f32", _FLOATS, [values])
            return _larger(builder, values if valid is None else builder.select(valid, values, nothing), total)

        result = _emit_loop(builder, args[2], nothing, body)
        return _emit_reduce(builder, result, lambda a, b: _larger(builder, a, b))

    return find


largest = _largest(of_magnitude=False)
"""(array, at, count): the largest of ``count`` numbers of a flat float32 array, -inf without any. NaN may be passed over,
and numbers behind are read up to a whole vector."""
largest_magnitude = _largest(of_magnitude=True)
"""Likewise of their magnitudes, 0 without any."""


@intrinsic  # type: ignore[untyped-decorator]
def exp_sum(context: Any, array: Any, at: Any, count: Any, minus: Any) -> tuple[Any, Callable[..., Any]]:
    """Replace ``count`` numbers x of a flat float32 array from ``at`` on by e^(x - minus); returns their sum. What is
    behind them, up to a whole vector, becomes 0."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        shift, zero = _splat(builder, args[3], _FLOATS), ir.Constant(_FLOATS, None)

        def body(first: ir.Value, total: ir.Value, valid: ir.Value | None) -> ir.Value:
            place = builder.gep(pointer, [first])
            values = _emit_exp(builder, builder.fsub(_load(builder, place, _FLOATS, 4), shift))
            if valid is not None:
                values = builder.select(valid, values, zero)
            builder.store(values, builder.bitcast(place, _FLOATS.as_pointer()), align=4)
            return builder.fadd(total, values)

        return _emit_reduce(builder, _emit_loop(builder, args[2], zero, body), builder.fadd)

    return types.float32(array, types.intp, types.intp, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def silu_product(
    context: Any, array: Any, gate_at: Any, up_at: Any, count: Any, out: Any
) -> tuple[Any, Callable[..., Any]]:
    """out[i] = SiLU(gate[i]) · up[i] for ``count`` numbers of a flat float32 array, and for what is behind them up to a
    whole vector."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        gates, ups = (_pointer(context, builder, signature.args[0], args[0], args[i]) for i in (1, 2))
        target = _pointer(context, builder, signature.args[4], args[4], ir.Constant(_INTP, 0))
        one = ir.Constant(_FLOATS, [1.0] * LANES)

        def body(first: ir.Value, total: ir.Value, valid: ir.Value | None) -> ir.Value:
            gate = _load(builder, builder.gep(gates, [first]), _FLOATS, 4)
            up = _load(builder, builder.gep(ups, [first]), _FLOATS, 4)
            sigmoid = builder.fadd(one, _emit_exp(builder, builder.fneg(gate)))
            value = builder.fmul(builder.fdiv(gate, sigmoid), up)
            builder.store(value, builder.bitcast(builder.gep(target, [first]), _FLOATS.as_pointer()), align=4)
            return total

        _emit_loop(builder, args[3], ir.Constant(_FLOATS, None), body)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp, out), generate


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
def prefetch(context: Any, array: Any, at: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
    """Ask for ``count`` numbers of a flat array from ``at`` on, so that they are on their way when they are read."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        start = _pointer(context, builder, signature.args[0], args[0], args[1])
        size = context.get_abi_sizeof(context.get_data_type(array.dtype))
        bytes_ = ir.IntType(8).as_pointer()
        with cgutils.for_range_slice(
            builder, ir.Constant(_INTP, 0), args[2], ir.Constant(_INTP, CACHE_LINE // size), _INTP
        ) as (place, _):
            hint = [
                ir.Constant(_I32, 0),
                ir.Constant(_I32, 3),
                ir.Constant(_I32, 1),
            ]  # to read, to the first cache, data
            pointer = builder.bitcast(builder.gep(start, [place]), bytes_)
            _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *hint])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


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
