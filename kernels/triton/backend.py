"""The GPU backend: Triton kernels between torch's matrix products.

One layer::

    hidden, residual ─▶ rms_norm(sum) ─▶ qkv ─▶ kv_write (norm, rotary, cache) ─▶ paged_attention ─▶ out ─┐
                            └── sum ──────────────────────────────────────────────────────────────────────┤
    hidden, residual ◀────────────────────────────────────────────────────────────────────────────────────┘
    hidden, residual ─▶ rms_norm(sum) ─▶ gate_up ─▶ silu_mul ─▶ down ─▶ hidden, residual = down, sum

Keys and values of all layers are one tensor [layers, 2, blocks, kv_heads, block_size, head_dim]: under one head a block
is a contiguous run of memory, and a block copy is one launch for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton

from kernels.backend import check_swap, uploaded
from kernels.cpu.sampling import sample_on_device
from kernels.sampling import SampledTokens, SamplingBatch
from kernels.spec import DecoderSpec, HostStep, StepBatch, StepLimits
from kernels.triton.activation import silu_mul
from kernels.triton.block_copy import copy_blocks, move_blocks
from kernels.triton.host_memory import reachable_zeros
from kernels.triton.kv_write import kv_write
from kernels.triton.norms import rms_norm
from kernels.triton.paged_attention import paged_attention
from kernels.triton.weights import DecoderWeights, pack_decoder


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers of one step share."""

    batch: StepBatch
    cos: torch.Tensor
    """float32 [T, rotary_dim / 2], as ``sin``: attention scaling included."""
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Stream:
    """The residual stream between two blocks, kept as two addends so that the next norm's kernel adds them.

    Its value is ``hidden + residual`` (``hidden`` alone where ``residual`` is None); both [T, hidden_size].
    """

    hidden: torch.Tensor
    residual: torch.Tensor | None = None


class TritonBackend:
    """Implements :class:`kernels.backend.Backend` on a CUDA or ROCm device, or on the CPU under Triton's interpreter.

    A missing compiler, a driver that does not fit or a kernel that fails shows as an exception of the first step.
    """

    name = "triton"

    def __init__(self, device: torch.device | str) -> None:
        """Raises RuntimeError for a CPU without TRITON_INTERPRET=1."""
        self.device = torch.device(device)
        if self.device.type == "cpu" and not triton.knobs.runtime.interpret:
            raise RuntimeError("Triton kernels run on a CPU only interpreted: set TRITON_INTERPRET=1 before the start")
        self._spec: DecoderSpec | None = None
        self._weights: DecoderWeights | None = None
        self._kv: torch.Tensor | None = None
        self._num_host_blocks = 0
        self._host_kv: torch.Tensor | None = None

    @property
    def spec(self) -> DecoderSpec:
        if self._spec is None:
            raise RuntimeError("load a model first")
        return self._spec

    @property
    def weights(self) -> DecoderWeights:
        if self._weights is None:
            raise RuntimeError("load a model first")
        return self._weights

    @property
    def kv(self) -> torch.Tensor:
        """[layers, 2, blocks, kv_heads, block_size, head_dim]: keys, then values."""
        if self._kv is None:
            raise RuntimeError("allocate the KV storage first")
        return self._kv

    @torch.inference_mode()
    def load(self, spec: DecoderSpec, weights: Mapping[str, torch.Tensor]) -> None:
        if spec.weight_dtype not in (None, spec.dtype):
            raise ValueError(f"the Triton backend multiplies in {spec.dtype} only, not in {spec.weight_dtype}")
        self._weights = pack_decoder(spec, weights, self.device)
        self._spec = spec

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self.spec.kv_bytes_per_token() * block_size

    def preparation(self) -> str:
        return "Loading the kernels of the GPU; the first start compiles them"

    @torch.inference_mode()
    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        spec = self.spec
        self._kv = None  # the old storage goes before the new one comes
        shape = (spec.num_layers, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self._kv = torch.zeros(shape, dtype=spec.dtype, device=self.device)

    def allocate_host_kv(self, num_blocks: int) -> None:
        self._host_kv = None
        self._num_host_blocks = num_blocks

    def make_ready(self, limits: StepLimits) -> None:
        """Nothing: memory is taken as steps come."""

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        copy_blocks(self._planes(), pairs)

    @torch.inference_mode()
    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        planes, host = self._planes(), self._host_planes()
        check_swap(pairs, planes.shape[1], host.shape[1])
        move_blocks(planes, host, pairs, self.device)

    @torch.inference_mode()
    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        planes, host = self._planes(), self._host_planes()
        check_swap(pairs, host.shape[1], planes.shape[1])
        move_blocks(host, planes, pairs, self.device)

    @torch.inference_mode()
    def upload(
        self, step: HostStep, sampling: SamplingBatch | None = None, previous: torch.Tensor | None = None
    ) -> StepBatch:
        return uploaded(step, self.device, previous)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        step = self._prepare(batch)
        x = _Stream(F.embedding(batch.token_ids, self.weights.embedding))
        for layer in range(self.spec.num_layers):
            x = self._attention_block(layer, x, step)
            x = self._mlp_block(layer, x)
        return self._head(x, batch.logits_rows)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        return sample_on_device(logits, sampling)

    def _attention_block(self, layer: int, x: _Stream, step: _Step) -> _Stream:
        spec, weights = self.spec, self.weights.layers[layer]
        keys, values = self.kv[layer, 0], self.kv[layer, 1]
        normed, residual = rms_norm(x.hidden, x.residual, weights.input_norm, spec.rms_norm_eps)
        q = kv_write(
            F.linear(normed, weights.qkv, weights.qkv_bias),
            keys,
            values,
            step.batch.slot_mapping,
            step.cos,
            step.sin,
            num_heads=spec.num_heads,
            use_rope=spec.layer_uses_rope(layer),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=spec.rms_norm_eps,
        )
        window = spec.layer_window(layer)
        attended = paged_attention(q, keys, values, step.batch, scale=spec.attention_scale, window=window)
        return _Stream(F.linear(attended.flatten(1), weights.out, weights.out_bias), residual)

    def _mlp_block(self, layer: int, x: _Stream) -> _Stream:
        weights = self.weights.layers[layer]
        normed, residual = rms_norm(x.hidden, x.residual, weights.post_norm, self.spec.rms_norm_eps)
        activated = silu_mul(F.linear(normed, weights.gate_up, weights.gate_up_bias))
        return _Stream(F.linear(activated, weights.down, weights.down_bias), residual)

    def _head(self, x: _Stream, rows: torch.Tensor) -> torch.Tensor:
        """Logits of the rows ``rows``, int64 [R], of the stream."""
        if rows.shape[0] == 0:
            return torch.empty((0, self.spec.vocab_size), device=self.device)
        residual = None if x.residual is None else x.residual.index_select(0, rows)
        hidden = x.hidden.index_select(0, rows)
        normed, _ = rms_norm(hidden, residual, self.weights.final_norm, self.spec.rms_norm_eps)
        return F.linear(normed, self.weights.head).float()

    def _planes(self) -> torch.Tensor:
        """[2 · layers, blocks, elements of a block under all heads]"""
        return self.kv.view(2 * self.kv.shape[0], self.kv.shape[2], -1)

    def _host_planes(self) -> torch.Tensor:
        """The host's blocks in the same layout. Allocated with the first block that moves: locking pages takes time and
        takes them from everybody else, and most runs never swap."""
        if self._host_kv is None:
            if self._num_host_blocks == 0:
                raise RuntimeError("allocate the host's KV storage first")
            planes, _, elements = self._planes().shape
            self._host_kv = reachable_zeros((planes, self._num_host_blocks, elements), self.kv.dtype, self.device)
        return self._host_kv

    def _prepare(self, batch: StepBatch) -> _Step:
        angles = batch.positions[:, None].float() * self.weights.inv_freq
        scaling = self.spec.rope_attention_scaling
        return _Step(batch, angles.cos() * scaling, angles.sin() * scaling)
