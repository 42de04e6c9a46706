"""Keys and values of 8 bits through the whole engine: what is stored is the same however it came to be, so the ids are.

Every query reads its keys and values from the cache, those of its own step too. So the cut into batches and chunks, a
preemption or a swap changes the order of sums and nothing else, as with keys and values of the model's type.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.execution.runner import host_step
from kernels.spec import DecoderSpec
from kernels.triton.backend import TritonBackend
from tests.kernels.interpreted.tiny_engine import BLOCK_SIZE, VOCAB, run_engine, tiny_spec, tiny_weights
from tests.kernels.plain_decoder import reference_logits

SPEC = tiny_spec(head_dim=16, num_heads=3, qk_norm=True, num_layers=2, kv_dtype=torch.float8_e4m3fn)
PROMPT = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(7)).tolist()


def _logits(spec: DecoderSpec, tokens: list[int]) -> torch.Tensor:
    """float32 [T, vocab], computed in one step."""
    backend = TritonBackend("cpu")
    backend.load(spec, tiny_weights(spec))
    blocks = -(-len(tokens) // BLOCK_SIZE)
    backend.allocate_kv(blocks + 1, BLOCK_SIZE)
    table = list(range(blocks, 0, -1))
    step = host_step([tokens], [0], [table], np.array([0]), np.array([len(tokens)]), BLOCK_SIZE)
    return backend.forward(backend.upload(step)).float()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_the_logits_are_those_of_rounded_keys_and_values(kv_dtype: torch.dtype) -> None:
    """To the last digits those of a decoder that rounds keys and values and nothing else; and by at most a
    twentieth of their spread, a hundredth on average, other than without rounding: 3 bits of mantissa are off by up to
    1/16."""
    spec = dataclasses.replace(SPEC, kv_dtype=kv_dtype)
    logits, weights = _logits(spec, PROMPT).double(), tiny_weights(spec)
    assert (logits - reference_logits(spec, weights, PROMPT)).abs().max() < 1e-4
    exact = reference_logits(dataclasses.replace(spec, kv_dtype=None), weights, PROMPT)
    off, spread = (logits - exact).abs(), float(exact.max() - exact.min())
    assert 1e-3 * spread < off.max() < spread / 20
    assert off.mean() < spread / 100


def test_the_ids_are_the_same_however_they_came() -> None:
    """Roomy, where each prompt is computed once; and tight, recomputed or swapped, after prefix hits and in chunks."""
    spec, lengths = dataclasses.replace(SPEC, num_layers=1), (11, 13)
    roomy = run_engine(TritonBackend("cpu"), spec, num_blocks=40, prompt_lengths=lengths)
    for preemption in ("recompute", "swap"):
        tight = run_engine(TritonBackend("cpu"), spec, preemption=preemption, num_blocks=5, prompt_lengths=lengths)
        assert tight.preemptions > 0 == roomy.preemptions and tight.cached_tokens > 0 == roomy.cached_tokens
        assert tight.token_ids == roomy.token_ids
        assert max(abs(a - b) for a, b in zip(tight.logprobs, roomy.logprobs, strict=True)) < 1e-5


def test_another_type_is_refused() -> None:
    spec = dataclasses.replace(SPEC, kv_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"not in torch\.int8"):
        TritonBackend("cpu").load(spec, tiny_weights(spec))


def test_a_pool_takes_a_quarter_of_float32() -> None:
    backend = TritonBackend("cpu")
    backend.load(SPEC, tiny_weights(SPEC))
    backend.allocate_kv(7, BLOCK_SIZE)
    assert backend.kv.dtype == torch.float8_e4m3fn
    assert backend.kv.nbytes == 7 * backend.kv_bytes_per_block(BLOCK_SIZE) == 7 * BLOCK_SIZE * 2 * 2 * 16
