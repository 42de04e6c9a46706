"""Loops over runs of numbers with explicit vectors, where LLVM makes none of its own: exponentials and maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu.vectors import FLOATS, I32, INTP, INTS, LANES, FloatStep, address, call, load, splat


def _emit_exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x to 2 units in the last place between e^-87 and e^88; what is beyond gets these. The polynomial is that of
    Cephes' ``expf``. NaN stays NaN."""

    def constant(value: float) -> ir.Value:
        return ir.Constant(FLOATS, [value] * LANES)

    def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return FloatStep(False).add(builder, c, a, b)

    for limit, beyond in ((-87.0, "<"), (88.0, ">")):
        outside = builder.fcmp_ordered(beyond, x, constant(limit))
        x = builder.select(outside, constant(limit), x)
    power = call(builder, f"llvm.floor.v{LANES}f32", FLOATS, [fma(x, constant(1.44269504088896341), constant(0.5))])
    rest = fma(power, constant(2.12194440e-4), fma(power, constant(-0.693359375), x))
    series = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fma(series, rest, constant(factor))
    value = builder.fadd(fma(series, builder.fmul(rest, rest), rest), constant(1.0))
    number = builder.fcmp_ordered("ord", power, power)  # what the conversion makes of NaN is not defined
    power = builder.select(number, power, ir.Constant(FLOATS, None))
    exponent = builder.add(builder.fptosi(power, INTS), ir.Constant(INTS, [127] * LANES))
    return builder.fmul(value, builder.bitcast(builder.shl(exponent, ir.Constant(INTS, [23] * LANES)), FLOATS))


def _emit_loop(
    builder: ir.IRBuilder,
    count: ir.Value,
    total: ir.Value,
    body: Callable[[ir.Value, ir.Value, ir.Value | None], ir.Value],
) -> ir.Value:
    """``body(first, total, valid)`` for each vector of ``count`` numbers; ``valid``, for the last and incomplete one,
    tells which lanes are numbers. Returns the last total."""
    lanes = ir.Constant(INTP, LANES)
    whole = builder.sub(count, builder.srem(count, lanes))
    entry = builder.block
    names = ("vector.test", "vector", "vector.rest", "vector.last", "vector.end")
    test, loop, rest, last, end = (builder.append_basic_block(name) for name in names)
    builder.branch(test)
    builder.position_at_end(test)
    first, so_far = builder.phi(INTP), builder.phi(FLOATS)
    first.add_incoming(ir.Constant(INTP, 0), entry)
    so_far.add_incoming(total, entry)
    builder.cbranch(builder.icmp_signed("<", first, whole), loop, rest)
    builder.position_at_end(loop)
    so_far.add_incoming(body(first, so_far, None), builder.block)
    first.add_incoming(builder.add(first, lanes), builder.block)
    builder.branch(test)
    builder.position_at_end(rest)
    builder.cbranch(builder.icmp_signed("<", whole, count), last, end)
    builder.position_at_end(last)
    left = splat(builder, builder.trunc(builder.sub(count, whole), I32), INTS)
    valid = builder.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), left)
    final = body(whole, so_far, valid)
    last = builder.block
    builder.branch(end)
    builder.position_at_end(end)
    result = builder.phi(FLOATS)
    result.add_incoming(so_far, rest)
    result.add_incoming(final, last)
    return result


def _emit_reduce(
    builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    lanes = [builder.extract_element(vector, ir.Constant(I32, lane)) for lane in range(LANES)]
    while len(lanes) > 1:
        lanes = [combine(lanes[i], lanes[i + len(lanes) // 2]) for i in range(len(lanes) // 2)]
    return lanes[0]


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _largest(of_magnitude: bool) -> Any:
    @intrinsic
    def find(context: Any, array: Any, at: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
        return types.float32(array, types.intp, types.intp), generate

    start = 0.0 if of_magnitude else -float("inf")

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        pointer = address(context, builder, signature.args[0], args[0], args[1])
        nothing = ir.Constant(FLOATS, [start] * LANES)

        def body(first: ir.Value, total: ir.Value, valid: ir.Value | None) -> ir.Value:
            values = load(builder, builder.gep(pointer, [first]), FLOATS, 4)
            if of_magnitude:
                values = call(builder, f"llvm.fabs.v{LANES}f32", FLOATS, [values])
            return _larger(builder, values if valid is None else builder.select(valid, values, nothing), total)

        result = _emit_loop(builder, args[2], nothing, body)
        return _emit_reduce(builder, result, lambda a, b: _larger(builder, a, b))

    return find


largest = _largest(of_magnitude=False)
"""(array, at, count): the largest of ``count`` numbers of a flat float32 array, -inf without any. NaN may be passed
over, and numbers behind are read up to a whole vector."""
largest_magnitude = _largest(of_magnitude=True)
"""Likewise of their magnitudes, 0 without any."""


@intrinsic
def exp_sum(context: Any, array: Any, at: Any, count: Any, minus: Any) -> tuple[Any, Callable[..., Any]]:
    """Replace ``count`` numbers x of a flat float32 array from ``at`` on by e^(x - minus); returns their sum. What is
    behind them, up to a whole vector, becomes 0."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        pointer = address(context, builder, signature.args[0], args[0], args[1])
        shift, zero = splat(builder, args[3], FLOATS), ir.Constant(FLOATS, None)

        def body(first: ir.Value, total: ir.Value, valid: ir.Value | None) -> ir.Value:
            place = builder.gep(pointer, [first])
            values = _emit_exp(builder, builder.fsub(load(builder, place, FLOATS, 4), shift))
            if valid is not None:
                values = builder.select(valid, values, zero)
            builder.store(values, builder.bitcast(place, FLOATS.as_pointer()), align=4)
            return builder.fadd(total, values)

        return _emit_reduce(builder, _emit_loop(builder, args[2], zero, body), builder.fadd)

    return types.float32(array, types.intp, types.intp, types.float32), generate


@intrinsic
def silu_product(
    context: Any, array: Any, gate_at: Any, up_at: Any, count: Any, out: Any
) -> tuple[Any, Callable[..., Any]]:
    """out[i] = SiLU(gate[i]) · up[i] for ``count`` numbers of a flat float32 array, and for what is behind them up to a
    whole vector."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        gates, ups = (address(context, builder, signature.args[0], args[0], args[i]) for i in (1, 2))
        target = address(context, builder, signature.args[4], args[4], ir.Constant(INTP, 0))
        one = ir.Constant(FLOATS, [1.0] * LANES)

        def body(first: ir.Value, total: ir.Value, valid: ir.Value | None) -> ir.Value:
            gate = load(builder, builder.gep(gates, [first]), FLOATS, 4)
            up = load(builder, builder.gep(ups, [first]), FLOATS, 4)
            sigmoid = builder.fadd(one, _emit_exp(builder, builder.fneg(gate)))
            value = builder.fmul(builder.fdiv(gate, sigmoid), up)
            builder.store(value, builder.bitcast(builder.gep(target, [first]), FLOATS.as_pointer()), align=4)
            return total

        _emit_loop(builder, args[3], ir.Constant(FLOATS, None), body)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp, out), generate
