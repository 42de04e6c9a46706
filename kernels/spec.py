"""What a backend must know of a decoder, and of one step's batch: plain data, no model code.

The engine turns a checkpoint's configuration into a :class:`DecoderSpec` and a scheduler's plan into a
:class:`StepBatch`; a backend sees nothing else.

Layout of one step. The new tokens of all requests are laid end to end, without padding::

    request          0              1          2
    new tokens   [ a0 a1 a2 ][    b7    ][ c3 c4 ]        T = 6 rows of every activation
    query_start  0            3          4         6      S + 1 = 4
    seq_lens          3             8         5           context after this step, the new tokens included

A decode is a request with one new token, a prefill chunk one with several; there is no other difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape of a decoder-only transformer with RMSNorm, rotary positions and a gated MLP."""

    architecture: str
    """The checkpoint's own name for it, e.g. ``LlamaForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    """Longest context the checkpoint was made for, in tokens."""
    dtype: torch.dtype
    """Type of the activations and, unless ``weight_dtype`` or ``kv_dtype`` says otherwise, of the weights and of keys
    and values; softmax, norms and sampling are float32 in any case."""
    inv_freq: torch.Tensor
    """float32 [rotary_dim / 2]: rotary frequencies, the checkpoint's scaling already applied. ``rotary_dim`` may be
    smaller than ``head_dim`` (partial rotary): the dimensions behind it pass through. Pairs are
    (i, i + rotary_dim / 2)."""
    rope_attention_scaling: float = 1.0
    """Factor on cos and sin (YaRN's mscale); 1 elsewhere."""
    rope_layers: tuple[bool, ...] = ()
    """Per layer, whether rotary is applied (SmolLM3 leaves it out in every fourth); empty: in all."""
    sliding_window: tuple[int | None, ...] = ()
    """Per layer: a query at position p sees keys at positions > p - window; None or empty: all keys."""
    attention_bias: bool = False
    """Bias on q, k and v."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before rotary."""
    tie_embeddings: bool = False
    weight_dtype: torch.dtype | None = None
    """Type in which the matrices are kept; None: ``dtype``. torch.int8: each output channel of a matrix is quantised
    symmetrically, w ≈ scale · q with integers q in -127 … 127 and scale = max |w| / 127. A CPU multiplies it with
    tokens that become integers too (:mod:`kernels.cpu.products`), a GPU widens it to ``dtype``."""
    kv_dtype: torch.dtype | None = None
    """Type in which keys and values are kept; None: ``dtype``. torch.float8_e4m3fn or torch.float8_e4m3fnuz, whichever
    the GPU has: rounded to it without a scale, what is beyond its largest number to that. Only the Triton backend takes
    another type than ``dtype``."""

    @property
    def rotary_dim(self) -> int:
        return 2 * int(self.inv_freq.shape[0])

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    def layer_uses_rope(self, layer: int) -> bool:
        return self.rope_layers[layer] if self.rope_layers else True

    def layer_window(self, layer: int) -> int | None:
        return self.sliding_window[layer] if self.sliding_window else None

    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token occupies over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * (self.kv_dtype or self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step as the engine lays it out, in host memory. T new tokens of S requests (diagram above)."""

    token_ids: np.ndarray
    """int64 [T]"""
    positions: np.ndarray
    """int64 [T]: position of each new token in its request."""
    slot_mapping: np.ndarray
    """int64 [T]: where its keys and values go, block id · block_size + offset."""
    query_start: np.ndarray
    """int32 [S + 1]"""
    seq_lens: np.ndarray
    """int32 [S]"""
    block_tables: np.ndarray
    """int32 [S, widest]: block ids; entries behind a request's last block are 0, the null block."""
    logits_rows: np.ndarray
    """int64 [R]: the rows among T whose logits are wanted."""
    token_source: np.ndarray | None = None
    """int32 [T]: where it is not negative, the token's id has not come to the host yet: it is that entry of the ids
    that the step before sampled, and ``token_ids`` says nothing. None: all are known."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large steps get, so that buffers can be made before the first one."""

    max_requests: int
    max_tokens: int
    """New tokens of a step; one prompt that may not be split can exceed it."""
    max_blocks: int
    """Of one request's block table."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tensors of one step, on the backend's device. T new tokens of S requests (diagram above)."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]: position of each new token in its request."""
    slot_mapping: torch.Tensor
    """int64 [T]: where its keys and values go, block id · block_size + offset."""
    query_start: torch.Tensor
    """int32 [S + 1]"""
    seq_lens: torch.Tensor
    """int32 [S]"""
    block_tables: torch.Tensor
    """int32 [S, widest]: block ids; entries behind a request's last block are 0, the null block."""
    logits_rows: torch.Tensor
    """int64 [R]: the rows among T whose logits are wanted."""
    query_lens_list: list[int] = field(default_factory=list)
    """The differences of ``query_start`` as host integers, so that a backend can plan without asking the device."""
    seq_lens_list: list[int] = field(default_factory=list)
    """``seq_lens`` as host integers."""
    table_stride: torch.Tensor | None = None
    """int32 [1]: entries from one request's block table to the next, where that differs from step to step at the same
    address; None: ``block_tables.stride(0)``."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_requests(self) -> int:
        return int(self.seq_lens.shape[0])
