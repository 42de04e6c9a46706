"""The backend that runs anywhere: a step is one compiled function (:mod:`kernels.cpu.step`) run by a few threads.

Here is what surrounds it: memory that the function works in, and the tensors of a step turned into plain arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kernels.backend import check_swap, uploaded
from kernels.cpu.attention import block_values, padded_lanes, rows_together
from kernels.cpu.compiled import is_ready
from kernels.cpu.sampling import sample
from kernels.cpu.step import Batch, Scratch, Shape, Weights, Work, forward, num_phases
from kernels.cpu.team import Team, counters
from kernels.cpu.vectors import LANES, activation_dtype
from kernels.cpu.weights import pack_decoder
from kernels.sampling import SampledTokens, SamplingBatch
from kernels.spec import DecoderSpec, HostStep, StepBatch, StepLimits


class CpuBackend:
    """Implements :class:`kernels.backend.Backend` with as many threads as torch has when a model is loaded. Not for two
    threads at once."""

    name = "cpu"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._spec: DecoderSpec | None = None
        self._weights: Weights | None = None
        self._team = Team(1)
        self._shape: Shape | None = None
        self._storage: torch.Tensor | None = None
        self._host_storage: torch.Tensor | None = None
        self._buffers: dict[str, np.ndarray] = {}

    @property
    def spec(self) -> DecoderSpec:
        if self._spec is None:
            raise RuntimeError("load a model first")
        return self._spec

    @property
    def weights(self) -> Weights:
        if self._weights is None:
            raise RuntimeError("load a model first")
        return self._weights

    def load(self, spec: DecoderSpec, weights: Mapping[str, torch.Tensor]) -> None:
        if spec.kv_dtype not in (None, spec.dtype):
            raise ValueError(f"the CPU backend keeps keys and values in {spec.dtype}, not in {spec.kv_dtype}")
        with torch.inference_mode():
            self._weights = pack_decoder(spec, weights)
        self._spec = spec
        self._team.close()
        self._team = Team(torch.get_num_threads())

    def kv_bytes_per_block(self, block_size: int) -> int:
        return self.spec.num_layers * self._block_values(block_size) * self.spec.dtype.itemsize

    def preparation(self) -> str:
        return "" if is_ready(forward) else "Compiling the kernels for this CPU, once: about half a minute"

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._storage = None
        self._shape = self._shape_of(num_blocks, block_size)
        self._storage = self._blocks(num_blocks)

    def allocate_host_kv(self, num_blocks: int) -> None:
        self._host_storage = None
        self._host_storage = self._blocks(num_blocks)

    def make_ready(self, limits: StepLimits) -> None:
        """Nothing: memory is taken as steps come."""

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
    def upload(
        self, step: HostStep, sampling: SamplingBatch | None = None, previous: torch.Tensor | None = None
    ) -> StepBatch:
        return uploaded(step, self.device, previous)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        weights, storage = self.weights, self._kv()
        shape = self._shape
        assert shape is not None
        rows, wanted = batch.num_tokens, batch.logits_rows.shape[0]
        vocab = int(weights.matrices[-2, 2])
        logits = np.empty(wanted * vocab, dtype=np.float32)
        step, work = self._batch(batch, shape), self._work(rows, wanted, logits)
        longest = max(batch.seq_lens_list) if batch.seq_lens_list else int(batch.seq_lens.max())
        scratch = [self._scratch(thread, shape, longest) for thread in range(self._team.threads)]
        phases, numbers = counters(num_phases(shape.layers)), storage.view(-1)
        kv = numbers.numpy() if self.spec.dtype == torch.float32 else numbers.view(torch.int16).numpy().view(np.uint16)
        self._team.run(
            phases, lambda thread: forward(phases, self._team.threads, shape, weights, step, work, scratch[thread], kv)
        )
        return torch.from_numpy(logits).view(wanted, vocab)[:, : self.spec.vocab_size]

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> SampledTokens:
        return sample(logits, sampling)

    def _kv(self) -> torch.Tensor:
        if self._storage is None:
            raise RuntimeError("allocate the KV storage first")
        return self._storage

    def _host_kv(self) -> torch.Tensor:
        if self._host_storage is None:
            raise RuntimeError("allocate the host's KV storage first")
        return self._host_storage

    def _block_values(self, block_size: int) -> int:
        return block_values(self.spec.num_kv_heads, self.spec.head_dim, block_size)

    def _shape_of(self, num_blocks: int, block_size: int) -> Shape:
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        values = self._block_values(block_size)
        return Shape(
            layers=spec.num_layers,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            group=group,
            head_dim=spec.head_dim,
            query_size=spec.num_heads * spec.head_dim,
            rotary_half=spec.rotary_dim // 2,
            tokens_together=rows_together(group) // group,
            block_size=block_size,
            block_keys=padded_lanes(block_size),
            value_dims=padded_lanes(spec.head_dim),
            block_values=values,
            layer_values=values * num_blocks,
            scale=np.float32(spec.attention_scale),
            eps=np.float32(spec.rms_norm_eps),
        )

    def _blocks(self, num_blocks: int) -> torch.Tensor:
        """Zeroed storage [layers, blocks, numbers of a block]."""
        assert self._shape is not None
        spec, values = self.spec, self._shape.block_values
        size = spec.num_layers * num_blocks * values * spec.dtype.itemsize
        # numpy asks the system for zeroed pages, which take no memory until they are written; torch would write them.
        memory = torch.from_numpy(np.zeros(size, np.uint8))
        return memory.view(spec.dtype).view(spec.num_layers, num_blocks, values)

    def _batch(self, batch: StepBatch, shape: Shape) -> Batch:
        spec = self.spec
        query_start, seq_lens = batch.query_start.numpy(), batch.seq_lens.numpy()
        query_lens = np.diff(query_start)
        task_start = np.zeros(query_start.shape[0], dtype=np.int64)
        np.cumsum(-(-query_lens // shape.tokens_together), out=task_start[1:])
        clears = np.zeros(batch.num_tokens, dtype=np.uint8)
        filled = seq_lens % shape.block_size
        begun = (filled > 0) & (filled <= query_lens)
        clears[query_start[1:][begun] - 1] = 1
        angles = batch.positions.numpy().astype(np.float32)[:, None] * spec.inv_freq.numpy()
        scaling = np.float32(spec.rope_attention_scaling)
        return Batch(
            token_ids=batch.token_ids.numpy(),
            slots=batch.slot_mapping.numpy(),
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=batch.block_tables.numpy(),
            logits_rows=batch.logits_rows.numpy(),
            task_start=task_start,
            clears=clears,
            cos=(np.cos(angles) * scaling).reshape(-1),
            sin=(np.sin(angles) * scaling).reshape(-1),
        )

    def _work(self, rows: int, wanted: int, logits: np.ndarray) -> Work:
        spec, matrices = self.spec, self.weights.matrices
        x = self._buffer("x", max(rows, wanted) * int(matrices[:, 1].max()), self._row_dtype())
        layers = matrices[:-2]
        return Work(
            stream=self._buffer("stream", rows * spec.hidden_size, np.float32),
            x=x,
            x_words=x.view(np.int32) if x.dtype == np.int16 else x,
            x_scales=self._buffer("x_scales", max(rows, wanted), np.float32),
            y=self._buffer("y", rows * int(layers[:, 2].max()), np.float32),
            attended=self._buffer("attended", rows * spec.num_heads * spec.head_dim, np.float32),
            logits=logits,
        )

    def _scratch(self, thread: int, shape: Shape, longest: int) -> Scratch:
        rows = shape.tokens_together * shape.group
        keys = (longest // shape.block_size + 1) * shape.block_keys + LANES

        def buffer(name: str, size: int) -> np.ndarray:
            return self._buffer(f"{name} {thread}", size, np.float32)

        return Scratch(
            row=buffer("row", max(shape.hidden, shape.intermediate)),
            words=self._buffer(f"words {thread}", int(self.weights.matrices[:, 1].max()), self._row_dtype()),
            queries=buffer("queries", rows * shape.head_dim),
            scores=buffer("scores", rows * keys),
            sums=buffer("sums", rows),
            values=buffer("values", rows * shape.value_dims),
        )

    def _row_dtype(self) -> np.dtype:
        return activation_dtype(self.weights.packed.dtype)

    def _buffer(self, name: str, size: int, dtype: np.dtype | type) -> np.ndarray:
        """At least ``size`` numbers, and room for a vector behind them, that stay from step to step."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < size + LANES or buffer.dtype != dtype:
            buffer = self._buffers[name] = np.empty(size + LANES, dtype=dtype)
        return buffer


def _move(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies blocks (source, destination) between storages [layers, blocks, values]; all are read before any is
    written."""
    table = torch.tensor(pairs, dtype=torch.int64)
    destination.index_copy_(1, table[:, 1], source.index_select(1, table[:, 0]))
