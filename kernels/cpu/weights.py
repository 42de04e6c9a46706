"""A decoder's weights as the CPU backend keeps them: fewer and larger matrices than the checkpoint has, in one piece.

::

    q_proj, k_proj, v_proj   ->  qkv      [(heads + 2 · kv heads) · head_dim, hidden]   one product a layer
    gate_proj, up_proj       ->  gate_up  [2 · intermediate, hidden]                    one product a layer
    lm_head, embed_tokens    ->  packed like the others; tied, one matrix is both
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kernels.cpu.products import BIAS, PER_OUTPUT, pack, padded_inputs, padded_outputs
from kernels.cpu.step import (
    INPUT_NORM,
    K_NORM,
    LAYER_COLUMNS,
    POST_NORM,
    Q_NORM,
    ROTARY,
    WINDOW,
    Weights,
)
from kernels.cpu.vectors import depth
from kernels.spec import DecoderSpec

PACKED_TYPES = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8}
"""numpy's types for the types of weights that this backend takes; bfloat16 as bits."""
_ROWS_AT_ONCE = 4096
"""Rows of a checkpoint's tensor that are converted together: a whole embedding in float32 could be gigabytes."""


def pack_decoder(spec: DecoderSpec, tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Raises ValueError for a type of weights that this backend does not compute with."""
    packer = _Packer(spec, tensors)
    layers = [packer.layer(layer) for layer in range(spec.num_layers)]
    embedding = "model.embed_tokens.weight"
    if spec.tie_embeddings:
        packer.matrix([embedding], spec.hidden_size, None)
        packer.matrices.append(packer.matrices[-1])
    else:
        packer.matrix(["lm_head.weight"], spec.hidden_size, None)
        packer.matrix([embedding], spec.hidden_size, None)
    return Weights(
        packed=packer.packed,
        depth=packer.depth,
        scales=packer.scales,
        matrices=np.array(packer.matrices, dtype=np.int64),
        layer_table=np.array(layers, dtype=np.int64).reshape(-1, LAYER_COLUMNS),
        final_norm=packer.parameter(["model.norm.weight"]),
        parameters=np.concatenate(packer.parameters),
    )


class _Packer:
    """Fills the one array of matrices from the front; room for all of them is taken at once and untouched as yet."""

    def __init__(self, spec: DecoderSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        kind = spec.weight_dtype or spec.dtype
        if kind not in PACKED_TYPES:
            raise ValueError(f"the CPU backend computes with {', '.join(map(str, PACKED_TYPES))}, not with {kind}")
        self._spec = spec
        self._tensors = tensors
        dtype = np.dtype(PACKED_TYPES[kind])
        self.depth = depth(dtype)
        numbers, outputs = self._sizes()
        self.packed = np.zeros(numbers, dtype=dtype)
        per_output = outputs if dtype == np.int8 else 1
        self.scales = np.zeros(per_output, dtype=np.float32)
        self.matrices: list[list[int]] = []
        self.parameters: list[np.ndarray] = []
        self._num_parameters = 0
        self._end = 0
        self._outputs = 0

    def _sizes(self) -> tuple[int, int]:
        """Numbers and outputs of all matrices, padding included."""
        spec = self._spec
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, intermediate = spec.hidden_size, spec.intermediate_size
        shapes = [(q + 2 * kv, hidden), (hidden, q), (2 * intermediate, hidden), (hidden, intermediate)]
        shapes = shapes * spec.num_layers + [(spec.vocab_size, hidden)] * (1 if spec.tie_embeddings else 2)
        padded = [(padded_outputs(outputs), padded_inputs(inputs)) for outputs, inputs in shapes]
        return sum(o * i for o, i in padded), sum(o for o, _ in padded)

    def layer(self, layer: int) -> list[int]:
        """Packs a layer; returns its row of the table of layers."""
        spec, prefix = self._spec, f"model.layers.{layer}."
        attention = [prefix + f"self_attn.{name}_proj" for name in "qkv"]
        heads = spec.num_heads * spec.head_dim
        self.matrix(
            [f"{name}.weight" for name in attention], spec.hidden_size, attention if spec.attention_bias else None
        )
        out = prefix + "self_attn.o_proj"
        self.matrix([out + ".weight"], heads, [out] if spec.attention_out_bias else None)
        gate_up = [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"]
        self.matrix([f"{name}.weight" for name in gate_up], spec.hidden_size, gate_up if spec.mlp_bias else None)
        down = prefix + "mlp.down_proj"
        self.matrix([down + ".weight"], spec.intermediate_size, [down] if spec.mlp_bias else None)
        row = [0] * LAYER_COLUMNS
        row[INPUT_NORM] = self.parameter([prefix + "input_layernorm.weight"])
        row[POST_NORM] = self.parameter([prefix + "post_attention_layernorm.weight"])
        row[Q_NORM] = self.parameter([prefix + "self_attn.q_norm.weight"]) if spec.qk_norm else -1
        row[K_NORM] = self.parameter([prefix + "self_attn.k_norm.weight"]) if spec.qk_norm else -1
        row[WINDOW] = spec.layer_window(layer) or 0
        row[ROTARY] = int(spec.layer_uses_rope(layer))
        return row

    def matrix(self, names: list[str], inputs: int, biases: list[str] | None) -> None:
        """Packs the tensors ``names`` on top of each other, and appends a row to the table of matrices."""
        padded, first = padded_inputs(inputs), 0
        for name in names:
            tensor = self._tensors[name]
            for rows in tensor.split(_ROWS_AT_ONCE):
                place = (padded, self.depth, first, self.scales, self._outputs)
                pack(self._numbers(rows), self.packed, self._end, *place)
                first += rows.shape[0]
        outputs = padded_outputs(first)
        row = [self._end, padded, outputs, self._outputs, -1]
        if biases is not None:
            row[BIAS] = self.parameter([f"{name}.bias" for name in biases])
        assert row[PER_OUTPUT] == self._outputs
        self.matrices.append(row)
        self._end += padded * outputs
        self._outputs += outputs if self.packed.dtype == np.int8 else 0

    def parameter(self, names: list[str]) -> int:
        """Appends tensors, one behind the other, to the parameters; returns the place of the first."""
        place = self._num_parameters
        for name in names:
            values = self._tensors[name].to(torch.float32).contiguous().numpy().copy()
            self.parameters.append(values)
            self._num_parameters += values.shape[0]
        return place

    def _numbers(self, rows: torch.Tensor) -> np.ndarray:
        if self.packed.dtype == np.uint16:
            return rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
        return rows.to(torch.float32).contiguous().numpy()
