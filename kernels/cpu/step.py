"""One step of a decoder as one compiled function that all threads of a team run together.

A step is a chain of products with something to do for each row before each of them. Every line is a phase: shared out
among the threads, which meet behind it. x are rows as the next product wants them::

    stream += y of the layer before, norm ─▶ x
    x · qkv ─▶ y
    q/k norm, rotary; keys and values into their slots
    attention ─▶ attended
    attended ─▶ x
    x · out ─▶ y
    stream += y, norm ─▶ x
    x · gate_up ─▶ y
    silu(gate) · up ─▶ x
    x · down ─▶ y

Behind the last layer only the rows whose logits are wanted go on. The residual stream and all between two products are
float32 whatever the type of the weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from kernels.cpu.attention import attend, clear_behind, write_row
from kernels.cpu.compiled import inner, kept
from kernels.cpu.products import AT, BIAS, INPUTS, OUTPUTS, PER_OUTPUT, multiply, place_of, put_row
from kernels.cpu.rows import activate_row, add_row, norm_row, rotate_row
from kernels.cpu.team import claim, meet
from kernels.cpu.vectors import float_of

QKV, OUT, GATE_UP, DOWN, MATRICES_PER_LAYER = 0, 1, 2, 3, 4
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, WINDOW, ROTARY, LAYER_COLUMNS = 0, 1, 2, 3, 4, 5, 6
"""Columns of a table of layers: places among the parameters (-1: none), the window (0: all keys), rotary or not."""
PHASES_PER_LAYER = 10
UNITS_OF_ROWS = 4
"""Units for each thread in a phase of rows."""


class Shape(NamedTuple):
    """Sizes of the model and of the KV storage. Behind ``query_size`` a row of q, k, v has keys and values."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    group: int
    """Query heads of a kv head."""
    head_dim: int
    query_size: int
    """heads · head_dim"""
    rotary_half: int
    tokens_together: int
    block_size: int
    block_keys: int
    value_dims: int
    block_values: int
    """Numbers in a block of a layer."""
    layer_values: int
    scale: np.float32
    """Of the scores."""
    eps: np.float32


class Weights(NamedTuple):
    packed: np.ndarray
    """All matrices (:mod:`kernels.cpu.products`), flat."""
    depth: int
    scales: np.ndarray
    """float32, one per output of each int8 matrix."""
    matrices: np.ndarray
    """int64 [4 · layers + 2, 5]: the layers' matrices, the head, the embedding."""
    parameters: np.ndarray
    """float32: norms and biases."""
    layer_table: np.ndarray
    """int64 [layers, 6]"""
    final_norm: int


class Batch(NamedTuple):
    token_ids: np.ndarray
    slots: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    logits_rows: np.ndarray
    task_start: np.ndarray
    """int64 [S + 1]: pieces of queries of the requests before."""
    clears: np.ndarray
    """uint8 [T]: rows that are the last of a block begun in this step; what lies behind them is cleared."""
    cos: np.ndarray
    """float32 [T · rotary_half], flat; the attention scaling included."""
    sin: np.ndarray


class Work(NamedTuple):
    """Flat float32 but ``x``."""

    stream: np.ndarray
    """[T, hidden]"""
    x: np.ndarray
    """[T, inputs], float32 or int16, the rows of a tile interleaved"""
    x_words: np.ndarray
    """Its memory by words of 4 bytes, float32 or int32."""
    x_scales: np.ndarray
    """[T]"""
    y: np.ndarray
    """[T, outputs]"""
    attended: np.ndarray
    """[T, heads · head_dim]"""
    logits: np.ndarray
    """[R, outputs of the head]"""


class Scratch(NamedTuple):
    """A thread's own, flat float32 but ``words``."""

    row: np.ndarray
    words: np.ndarray
    """[inputs], of the type of ``x``"""
    queries: np.ndarray
    scores: np.ndarray
    sums: np.ndarray
    values: np.ndarray


@inner()
def _rows_of(counters, phase, threads, rows):
    """First and last row of the next unit of a phase of rows; both the same when there is none."""
    units = min(rows, threads * UNITS_OF_ROWS) if threads > 1 else 1
    unit = claim(counters, phase)
    if unit >= units:
        return rows, rows
    return unit * rows // units, (unit + 1) * rows // units


def read_number(weights, place, output):
    """A number of a packed matrix as float32."""
    raise NotImplementedError


@numba.extending.overload(read_number, inline="always")
def _read_number(weights, place, output):
    kind = weights.types[weights.fields.index("packed")].dtype
    if kind == numba.types.int8:
        return lambda weights, place, output: np.float32(weights.packed[place]) * weights.scales[output]
    if kind == numba.types.uint16:
        return lambda weights, place, output: float_of(np.int32(np.int32(weights.packed[place]) << np.int32(16)))
    return lambda weights, place, output: weights.packed[place]


@inner()
def _embed(counters, phase, threads, shape, weights, batch, work):
    matrix = weights.matrices[MATRICES_PER_LAYER * shape.layers + 1]
    rows = batch.token_ids.shape[0]
    while True:
        first, last = _rows_of(counters, phase, threads, rows)
        if first == last:
            return
        for row in range(first, last):
            token = batch.token_ids[row]
            for k in range(shape.hidden):
                place = matrix[AT] + place_of(token, k, matrix[INPUTS], weights.depth)
                work.stream[row * shape.hidden + k] = read_number(weights, place, matrix[PER_OUTPUT] + token)


@inner()
def _norm_rows(counters, phase, threads, shape, weights, rows, work, scratch, previous, norm, matrix):
    """Add the product before (``previous``: its matrix, -1: none) to the stream; norm it for the product with
    ``matrix``."""
    hidden, inputs = shape.hidden, weights.matrices[matrix, INPUTS]
    while True:
        first, last = _rows_of(counters, phase, threads, rows)
        if first == last:
            return
        for row in range(first, last):
            at = row * hidden
            if previous >= 0:
                before = weights.matrices[previous]
                add_row(work.stream, at, work.y, row * before[OUTPUTS], hidden, weights.parameters, before[BIAS])
            norm_row(work.stream, at, hidden, weights.parameters, norm, shape.eps, scratch.row, 0)
            put_row(work, scratch, row, rows, scratch.row, hidden, inputs)


@inner()
def _place_rows(counters, phase, threads, shape, weights, batch, work, layer, storage, layer_at):
    """Bias, q/k norm and rotary of q and k in place; keys and values into their slots."""
    columns, matrix = weights.layer_table[layer], weights.matrices[MATRICES_PER_LAYER * layer + QKV]
    size, kv_at = shape.head_dim, shape.query_size
    total = shape.query_size + 2 * shape.kv_heads * size
    y, parameters = work.y, weights.parameters
    while True:
        first, last = _rows_of(counters, phase, threads, batch.slots.shape[0])
        if first == last:
            return
        for row in range(first, last):
            at = row * matrix[OUTPUTS]
            if matrix[BIAS] >= 0:
                for i in range(total):
                    y[at + i] += parameters[matrix[BIAS] + i]
            for head in range(shape.heads + shape.kv_heads):
                place = at + head * size
                if columns[Q_NORM] >= 0:
                    norm = columns[Q_NORM] if head < shape.heads else columns[K_NORM]
                    norm_row(y, place, size, parameters, norm, shape.eps, y, place)
                if columns[ROTARY]:
                    rotate_row(y, place, shape.rotary_half, batch.cos, batch.sin, row * shape.rotary_half)
            values_at = at + kv_at + shape.kv_heads * size
            slot = batch.slots[row]
            write_row(shape, storage, layer_at, slot, y, at + kv_at, values_at)
            if batch.clears[row]:
                clear_behind(shape, storage, layer_at, slot // shape.block_size, slot % shape.block_size + 1)


@inner()
def _attended_rows(counters, phase, threads, shape, weights, work, rows, matrix, scratch):
    size, inputs = shape.query_size, weights.matrices[matrix, INPUTS]
    while True:
        first, last = _rows_of(counters, phase, threads, rows)
        if first == last:
            return
        for row in range(first, last):
            put_row(work, scratch, row, rows, work.attended[row * size : (row + 1) * size], size, inputs)


@inner()
def _activated_rows(counters, phase, threads, shape, weights, work, rows, matrix, scratch):
    """``matrix``: of the product that follows; the one before has [gate | up] as outputs."""
    before, inputs = weights.matrices[matrix - 1], weights.matrices[matrix, INPUTS]
    while True:
        first, last = _rows_of(counters, phase, threads, rows)
        if first == last:
            return
        for row in range(first, last):
            at = row * before[OUTPUTS]
            size, bias = shape.intermediate, before[BIAS]
            activate_row(work, scratch, row, rows, work.y, at, size, inputs, weights.parameters, bias)


@inner()
def _wanted_rows(counters, phase, threads, shape, weights, batch, work, scratch, matrix):
    """The rows whose logits are wanted, as the head's input; the product behind the last layer is not in the stream."""
    rows, hidden = batch.logits_rows.shape[0], shape.hidden
    before, inputs = weights.matrices[matrix - 1], weights.matrices[matrix, INPUTS]
    while True:
        first, last = _rows_of(counters, phase, threads, rows)
        if first == last:
            return
        for index in range(first, last):
            row = batch.logits_rows[index]
            # Into scratch: two logits may be of one row.
            for i in range(hidden):
                scratch.row[i] = work.stream[row * hidden + i]
            add_row(scratch.row, 0, work.y, row * before[OUTPUTS], hidden, weights.parameters, before[BIAS])
            norm_row(scratch.row, 0, hidden, weights.parameters, weights.final_norm, shape.eps, scratch.row, 0)
            put_row(work, scratch, index, rows, scratch.row, hidden, inputs)


@kept
def forward(counters, threads, shape, weights, batch, work, scratch, storage):
    """A thread's part of a step: keys and values of all tokens go to ``storage``, logits of the wanted rows to
    ``work.logits``. ``counters`` has room for :func:`num_phases`, and all zeros.

    A step is a chain of products. Each kind of phase has one place here, since every call is compiled anew.
    """
    rows, wanted = batch.token_ids.shape[0], batch.logits_rows.shape[0]
    head = MATRICES_PER_LAYER * shape.layers
    _embed(counters, 0, threads, shape, weights, batch, work)
    meet(counters, threads)
    phase = np.int64(1)
    for matrix in range(head + 1):
        layer, kind = matrix // MATRICES_PER_LAYER, matrix % MATRICES_PER_LAYER
        y = work.y
        if matrix == head:
            if wanted == 0:
                return
            rows, y = wanted, work.logits
            _wanted_rows(counters, phase, threads, shape, weights, batch, work, scratch, matrix)
        elif kind == OUT:
            layer_at, y_row = layer * shape.layer_values, weights.matrices[matrix - 1, OUTPUTS]
            window = weights.layer_table[layer, WINDOW]
            _place_rows(counters, phase, threads, shape, weights, batch, work, layer, storage, layer_at)
            meet(counters, threads)
            attend(counters, phase + 1, shape, batch, storage, layer_at, window, y, y_row, work.attended, scratch)
            meet(counters, threads)
            phase += 2
            _attended_rows(counters, phase, threads, shape, weights, work, rows, matrix, scratch)
        elif kind == DOWN:
            _activated_rows(counters, phase, threads, shape, weights, work, rows, matrix, scratch)
        else:
            norm = weights.layer_table[layer, INPUT_NORM if kind == QKV else POST_NORM]
            _norm_rows(counters, phase, threads, shape, weights, rows, work, scratch, matrix - 1, norm, matrix)
        meet(counters, threads)
        multiply(counters, phase + 1, threads, weights, weights.matrices[matrix], rows, work, y)
        meet(counters, threads)
        phase += 2


def num_phases(layers: int) -> int:
    return 3 + layers * PHASES_PER_LAYER
