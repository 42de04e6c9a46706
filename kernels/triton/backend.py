"""The GPU backend: Triton kernels between torch's matrix products.

One layer::

    hidden, residual ─▶ rms_norm(sum) ─▶ qkv ─▶ kv_write (norm, rotary, cache) ─▶ paged_attention ─▶ out ─┐
                            └── sum ──────────────────────────────────────────────────────────────────────┤
    hidden, residual ◀────────────────────────────────────────────────────────────────────────────────────┘
    hidden, residual ─▶ rms_norm(sum) ─▶ gate_up ─▶ silu_mul ─▶ down ─▶ hidden, residual = down, sum

Keys and values of all layers are one tensor [layers, 2, blocks, kv_heads, block_size, head_dim]: under one head a block
is a contiguous run of memory, and a block copy is one launch for all layers.

A step, none of which waits for the device::

    upload    one copy from page-locked memory (:mod:`kernels.triton.step_inputs`)
    forward   a recorded step where every request has one token (:mod:`kernels.triton.graphs`), else launch by launch;
              then the head of the wanted rows
    sample    from the parameters that came with the upload; the copy of the ids to the host begins
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton

from kernels.backend import check_swap
from kernels.sampling import SampledTokens, SamplingBatch
from kernels.spec import DecoderSpec, HostStep, StepBatch, StepLimits
from kernels.triton.activation import silu_mul
from kernels.triton.block_copy import copy_blocks
from kernels.triton.embedding import embedding
from kernels.triton.fp8 import fp8_bias
from kernels.triton.graphs import Capture, CudaCapture, DecodeGraphs, graph_sizes
from kernels.triton.host_memory import HostBlocks, arrival, to_device, to_host
from kernels.triton.kv_write import kv_write
from kernels.triton.matrix import linear
from kernels.triton.norms import rms_norm
from kernels.triton.paged_attention import paged_attention
from kernels.triton.sampling import host_columns, sample_on_device
from kernels.triton.step_inputs import DeviceStep, StepInputs, StepShape, padding_step
from kernels.triton.swap import CudaStreams, SwapLane
from kernels.triton.weights import DecoderWeights, pack_decoder


@dataclass(frozen=True, slots=True)
class _Stream:
    """The residual stream between two blocks, kept as two addends so that the next norm's kernel adds them.

    Its value is ``hidden + residual`` (``hidden`` alone where ``residual`` is None); both [T, hidden_size].
    """

    hidden: torch.Tensor
    residual: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Uploaded:
    """The step whose inputs are on the device."""

    step: DeviceStep
    sampling: SamplingBatch | None
    """Whose parameters came with it."""
    previous: torch.Tensor | None
    """int64: what ``step.token_source`` refers to; None: all ids are known."""
    graph_size: int | None
    """Of the recorded step that its inputs are laid out for."""


class TritonBackend:
    """Implements :class:`kernels.backend.Backend` on a CUDA or ROCm device, or on the CPU under Triton's interpreter.

    A missing compiler, a driver that does not fit or a kernel that fails shows as an exception of the first step.
    """

    name = "triton"

    def __init__(self, device: torch.device | str, *, cuda_graphs: bool = True, capture: Capture | None = None) -> None:
        """``cuda_graphs``: whether decode steps are recorded. ``capture``: by what; None: by the device's own graphs,
        where it has any. Raises RuntimeError for a CPU without TRITON_INTERPRET=1."""
        self.device = torch.device(device)
        if self.device.type == "cpu" and not triton.knobs.runtime.interpret:
            raise RuntimeError("Triton kernels run on a CPU only interpreted: set TRITON_INTERPRET=1 before the start")
        self._spec: DecoderSpec | None = None
        self._weights: DecoderWeights | None = None
        self._kv: torch.Tensor | None = None
        self._host_blocks: HostBlocks | None = None
        self._streams = CudaStreams(self.device) if self.device.type == "cuda" else None
        self._swaps = SwapLane(self._streams)
        if cuda_graphs and capture is None and self._streams is not None:
            capture = CudaCapture(self.device)
        self._capture = capture if cuda_graphs else None
        self._graphs: DecodeGraphs | None = None
        self._graphs_problem = ""
        self._inputs = StepInputs(self.device)
        self._ids = torch.empty(0, dtype=torch.int64, device=self.device)
        self._uploaded: _Uploaded | None = None

    @property
    def graphs_problem(self) -> str:
        """Why decode steps are launched kernel by kernel although they were to be recorded; empty: they are not."""
        return self._graphs_problem

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
        if spec.kv_dtype not in (None, spec.dtype) and not fp8_bias(spec.kv_dtype):
            raise ValueError(f"the Triton backend keeps keys and values in {spec.dtype} or fp8, not in {spec.kv_dtype}")
        self._weights = pack_decoder(spec, weights, self.device)
        self._spec = spec

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self.spec.kv_bytes_per_token() * block_size

    def preparation(self) -> str:
        return "Loading the kernels of the GPU; the first start compiles them"

    @torch.inference_mode()
    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        spec = self.spec
        self._swaps.finish()
        self._graphs = None  # they write to the old storage, which goes before the new one comes
        self._uploaded = None
        self._kv = None
        shape = (spec.num_layers, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self._kv = torch.zeros(shape, dtype=spec.kv_dtype or spec.dtype, device=self.device)

    def allocate_host_kv(self, num_blocks: int) -> None:
        self._swaps.finish()
        self._host_blocks = HostBlocks(num_blocks)

    @torch.inference_mode()
    def make_ready(self, limits: StepLimits) -> None:
        """Memory at fixed addresses for steps within ``limits``, and decode steps recorded. Where recording fails, for
        want of memory or for anything else, steps are launched kernel by kernel: :attr:`graphs_problem`."""
        self._swaps.finish()
        self._graphs, self._graphs_problem, self._uploaded = None, "", None
        self._inputs.reserve(limits)
        self._ids = torch.zeros(limits.max_requests, dtype=torch.int64, device=self.device)
        if self._capture is None:
            return
        # While a step is recorded, memory that lies idle cannot be given back to make room.
        self._empty_cache()
        try:
            self._graphs = DecodeGraphs(self._capture, graph_sizes(limits.max_requests), self._recordable)
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            self._graphs_problem = f"decode steps could not be recorded ({type(error).__name__}: {first_line})"
        if self._graphs is None:
            self._empty_cache()  # what the recordings took

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._swaps.join()
        copy_blocks(self._planes(), pairs)
        self._swaps.note_copies(pairs)

    @torch.inference_mode()
    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        planes, host = self._planes(), self._host()
        check_swap(pairs, planes.shape[1], host.num_blocks)
        parts = host.parts(planes, pairs)
        self._swaps.out(pairs, self.kv.shape[4], lambda: to_host(parts, planes))

    @torch.inference_mode()
    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        planes, host = self._planes(), self._host()
        check_swap(pairs, host.num_blocks, planes.shape[1])
        parts = host.parts(planes, [(block, host_block) for host_block, block in pairs])
        self._swaps.back(pairs, self.kv.shape[4], lambda: to_device(parts, planes))

    @torch.inference_mode()
    def upload(
        self, step: HostStep, sampling: SamplingBatch | None = None, previous: torch.Tensor | None = None
    ) -> StepBatch:
        if step.token_source is None:
            previous = None
        elif previous is None:
            raise ValueError("tokens are to come from the step before, but there was none")
        self._swaps.begin_step(step)
        size = self._graph_size(step, previous)
        shape = None if size is None else StepShape(size, size, size)
        columns = None if sampling is None else host_columns(sampling)
        on_device = self._inputs.upload(step, columns, shape=shape)
        if size is not None and previous is not None and previous.data_ptr() != self._ids.data_ptr():
            self._ids[: previous.shape[0]] = previous  # where a recorded step looks for it
        self._uploaded = _Uploaded(on_device, sampling, previous, size)
        return on_device.batch

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._swaps.join()
        uploaded = self._uploaded
        if uploaded is None or batch.token_ids is not uploaded.step.batch.token_ids:
            self._swaps.begin_unknown()
            return self._logits(self._normed(self._layers(batch), batch.logits_rows))
        if self._graphs is None or uploaded.graph_size is None:
            x = self._layers(batch, uploaded.step.token_source, uploaded.previous)
            return self._logits(self._normed(x, batch.logits_rows))
        hidden = self._graphs.replay(uploaded.graph_size)
        rows = batch.logits_rows
        every_row = rows is uploaded.step.batch.logits_rows and rows.shape[0] == batch.num_requests
        return self._logits(hidden[: rows.shape[0]] if every_row else hidden.index_select(0, rows))

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        rows, uploaded = logits.shape[0], self._uploaded
        travelled = uploaded is not None and sampling is uploaded.sampling
        columns = uploaded.step.columns if uploaded is not None and travelled else None
        out = self._ids[:rows] if rows <= self._ids.shape[0] else None
        sampled = sample_on_device(logits, sampling, columns, out)
        return SampledTokens(sampled.token_ids, sampled.logprobs, arrival(sampled.token_ids))

    def _graph_size(self, step: HostStep, previous: torch.Tensor | None) -> int | None:
        """Of the recorded step that computes ``step``; None: none does."""
        num_requests = step.seq_lens.shape[0]
        if self._graphs is None or step.token_ids.shape[0] != num_requests:
            return None
        size = self._graphs.size_for(num_requests)
        if size is None or (previous is not None and previous.shape[0] > self._ids.shape[0]):
            return None
        return size if self._inputs.fits(StepShape(size, size, size), step.block_tables.shape[1]) else None

    def _recordable(self, size: int) -> Callable[[], torch.Tensor]:
        """A step of ``size`` requests with one token each, up to the final norm of all rows; its inputs are padding."""
        step = self._inputs.upload(padding_step(size))
        return lambda: self._normed(self._layers(step.batch, step.token_source, self._ids))

    def _layers(
        self, batch: StepBatch, token_source: torch.Tensor | None = None, previous: torch.Tensor | None = None
    ) -> _Stream:
        x = _Stream(
            embedding(
                batch.token_ids,
                self.weights.embedding,
                self.spec.dtype,
                token_source=token_source,
                previous=previous,
            )
        )
        for layer in range(self.spec.num_layers):
            x = self._attention_block(layer, x, batch)
            x = self._mlp_block(layer, x)
        return x

    def _attention_block(self, layer: int, x: _Stream, batch: StepBatch) -> _Stream:
        spec, weights = self.spec, self.weights.layers[layer]
        keys, values = self.kv[layer, 0], self.kv[layer, 1]
        normed, residual = rms_norm(x.hidden, x.residual, weights.input_norm, spec.rms_norm_eps)
        q = kv_write(
            linear(normed, weights.qkv, weights.qkv_bias),
            keys,
            values,
            batch.slot_mapping,
            batch.positions,
            self.weights.rotary,
            num_heads=spec.num_heads,
            use_rope=spec.layer_uses_rope(layer),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=spec.rms_norm_eps,
        )
        window = spec.layer_window(layer)
        attended = paged_attention(q, keys, values, batch, scale=spec.attention_scale, window=window)
        return _Stream(linear(attended.flatten(1), weights.out, weights.out_bias), residual)

    def _mlp_block(self, layer: int, x: _Stream) -> _Stream:
        weights = self.weights.layers[layer]
        normed, residual = rms_norm(x.hidden, x.residual, weights.post_norm, self.spec.rms_norm_eps)
        activated = silu_mul(linear(normed, weights.gate_up, weights.gate_up_bias))
        return _Stream(linear(activated, weights.down, weights.down_bias), residual)

    def _normed(self, x: _Stream, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The final norm of the rows ``rows``, int64 [R], of the stream; None: of all."""
        hidden, residual = x.hidden, x.residual
        if rows is not None:
            hidden = hidden.index_select(0, rows)
            residual = None if residual is None else residual.index_select(0, rows)
        if hidden.shape[0] == 0:
            return hidden
        return rms_norm(hidden, residual, self.weights.final_norm, self.spec.rms_norm_eps)[0]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weights.head)

    def _planes(self) -> torch.Tensor:
        """[2 · layers, blocks, elements of a block under all heads]"""
        return self.kv.view(2 * self.kv.shape[0], self.kv.shape[2], -1)

    def _host(self) -> HostBlocks:
        if self._host_blocks is None:
            raise RuntimeError("allocate the host's KV storage first")
        return self._host_blocks
