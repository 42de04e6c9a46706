"""The backend that runs anywhere: torch operators on the CPU, as few of them a layer as possible.

One layer, with the weights of :mod:`kernels.cpu.weights` (norm weights are folded into the matrices)::

    x ─▶ 1/rms ─▶ qkv ─▶ (q/k norm) ─▶ rotary in place ─▶ k, v into their slots ─▶ attention ─▶ x += out
    x ─▶ 1/rms ─▶ gate_up ─▶ silu(gate) · up in place ─────────────────────────────────────────▶ x += down

What is the same for all layers of a step (rotary factors, attention plan) is made once, before the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kernels.backend import check_swap
from kernels.cpu.attention import AttentionPlanner, attend
from kernels.cpu.sampling import sample
from kernels.cpu.weights import DecoderWeights, pack_decoder
from kernels.sampling import SampledTokens, SamplingBatch
from kernels.spec import DecoderSpec, StepBatch


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one step share."""

    batch: StepBatch
    rotation: torch.Tensor
    """complex64 [T, 1, rotary_dim / 2]: the factor of each position and pair, attention scaling included."""
    planner: AttentionPlanner


class CpuBackend:
    """Implements :class:`kernels.backend.Backend`. Not for two threads at once."""

    name = "cpu"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._spec: DecoderSpec | None = None
        self._weights: DecoderWeights | None = None
        self._storage: torch.Tensor | None = None
        self._host_storage: torch.Tensor | None = None
        self._block_size = 0
        self._eps = torch.tensor(0.0)

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

    def load(self, spec: DecoderSpec, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.inference_mode():
            self._weights = pack_decoder(spec, weights)
            self._eps = torch.tensor(spec.rms_norm_eps)
        self._spec = spec

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self.spec.kv_bytes_per_token() * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._storage = None
        self._block_size = block_size
        self._storage = self._blocks(num_blocks)

    def allocate_host_kv(self, num_blocks: int) -> None:
        self._host_storage = None
        self._host_storage = self._blocks(num_blocks)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        storage = self._kv()
        _move(storage, storage, pairs)

    @torch.inference_mode()
    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        storage, host = self._kv(), self._host_kv()
        check_swap(pairs, storage.shape[1], host.shape[1])
        _move(storage, host, pairs)

    @torch.inference_mode()
    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        storage, host = self._kv(), self._host_kv()
        check_swap(pairs, host.shape[1], storage.shape[1])
        _move(host, storage, pairs)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        step = self._prepare(batch)
        stream = self.weights.embedding.index_select(0, batch.token_ids)
        for layer in range(self.spec.num_layers):
            self._attention_block(layer, stream, step)
            self._mlp_block(layer, stream)
        return self._head(stream.index_select(0, batch.logits_rows))

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        return sample(logits, sampling)

    def _attention_block(self, layer: int, stream: torch.Tensor, step: _Step) -> None:
        """Adds to the stream in place, as the next does."""
        spec, weights = self.spec, self.weights.layers[layer]
        qkv = weights.qkv(self._normalised(stream))
        q_size = spec.num_heads * spec.head_dim
        qk_heads = spec.num_heads + spec.num_kv_heads
        qk = qkv[:, : qk_heads * spec.head_dim].view(-1, qk_heads, spec.head_dim)
        if weights.qk_norm is not None:
            qk.copy_(F.rms_norm(qk.float(), (spec.head_dim,), None, spec.rms_norm_eps).mul_(weights.qk_norm))
        if spec.layer_uses_rope(layer):
            self._rotate(qk, step.rotation)
        storage = self._kv()[layer]
        storage.view(-1, qkv.shape[1] - q_size).index_copy_(0, step.batch.slot_mapping, qkv[:, q_size:])
        attention = attend(qkv, storage, step.planner, spec.layer_window(layer), spec)
        stream.add_(weights.out(attention))

    def _mlp_block(self, layer: int, stream: torch.Tensor) -> None:
        weights = self.weights.layers[layer]
        gate_up = weights.gate_up(self._normalised(stream))
        gate, up = gate_up.chunk(2, dim=-1)
        F.silu(gate, inplace=True).mul_(up)
        stream.add_(weights.down(gate))

    def _head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of rows of the stream."""
        if rows.shape[0] == 0:
            return torch.empty((0, self.spec.vocab_size))
        normalised = F.rms_norm(rows.float(), (self.spec.hidden_size,), self.weights.final_norm, self.spec.rms_norm_eps)
        return self.weights.head(normalised.to(self.spec.dtype)).float()

    def _kv(self) -> torch.Tensor:
        if self._storage is None:
            raise RuntimeError("allocate the KV storage first")
        return self._storage

    def _host_kv(self) -> torch.Tensor:
        if self._host_storage is None:
            raise RuntimeError("allocate the host's KV storage first")
        return self._host_storage

    def _blocks(self, num_blocks: int) -> torch.Tensor:
        """Zeroed storage [layers, blocks, values of a block]."""
        spec = self.spec
        values = self._block_size * 2 * spec.num_kv_heads * spec.head_dim
        size = spec.num_layers * num_blocks * values * spec.dtype.itemsize
        # numpy asks the system for zeroed pages, which take no memory until they are written; torch would write them.
        memory = torch.from_numpy(np.zeros(size, np.uint8))
        return memory.view(spec.dtype).view(spec.num_layers, num_blocks, values)

    def _prepare(self, batch: StepBatch) -> _Step:
        spec = self.spec
        planner = AttentionPlanner(batch, self._block_size, spec)
        for block in planner.blocks_to_clear():
            self._kv()[:, block].zero_()
        angles = batch.positions[:, None].float() * spec.inv_freq
        rotation = torch.polar(torch.full_like(angles, spec.rope_attention_scaling), angles).unsqueeze(1)
        return _Step(batch, rotation, planner)

    def _normalised(self, stream: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) in float32; the norm's weight is in the matrix that follows."""
        values = stream.float()
        norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / values.shape[-1]).rsqrt_()
        return (values * scale).to(stream.dtype)

    def _rotate(self, qk: torch.Tensor, rotation: torch.Tensor) -> None:
        """In place: the first ``rotary_dim`` values of each head are pairs, taken as complex numbers."""
        rotated = qk[..., : self.spec.rotary_dim]
        if rotated.dtype == torch.float32:
            torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(rotation)
        else:
            product = torch.view_as_complex(rotated.float().unflatten(-1, (-1, 2))) * rotation
            rotated.copy_(torch.view_as_real(product).flatten(-2))


def _move(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies blocks (source, destination) between storages [layers, blocks, values]; all are read before any is
    written."""
    table = torch.tensor(pairs, dtype=torch.int64)
    destination.index_copy_(1, table[:, 1], source.index_select(1, table[:, 0]))
