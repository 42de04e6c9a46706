"""The whole engine on tiny models: through the Triton kernels it gives the CPU backend's ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernels.triton.host_memory as host_memory
from engine.execution.runner import host_step
from engine.execution.sizing import prompt_step
from kernels.backend import Backend
from kernels.cpu.backend import CpuBackend
from kernels.triton.backend import TritonBackend
from tests.kernels.interpreted.tiny_engine import BLOCK_SIZE, SPECS, VOCAB, run_engine, tiny_weights
from tests.kernels.swap_contract import IMPOSSIBLE_PAIRS, assert_refused


@pytest.mark.parametrize("name", SPECS)
def test_the_ids_of_the_cpu_backend(name: str) -> None:
    spec = SPECS[name]
    expected = run_engine(CpuBackend(), spec)
    result = run_engine(TritonBackend("cpu"), spec)
    assert result.token_ids == expected.token_ids
    assert len(result.logprobs) == 4 * 3
    assert max(abs(a - b) for a, b in zip(result.logprobs, expected.logprobs, strict=True)) < 1e-4
    # The pool is small enough for preemptions and the prompts alike enough for hits: the ids went through all of it.
    assert result.preemptions > 0 and result.cached_tokens > 0
    assert len({token for answer in result.token_ids for token in answer}) > 6


def test_a_step_without_logits_still_writes_keys_and_values() -> None:
    spec, logits = SPECS["group 5, q/k norm, scaled rotary"], []
    for backend in (TritonBackend("cpu"), CpuBackend()):
        backend.load(spec, tiny_weights(spec))
        backend.allocate_kv(4, BLOCK_SIZE)

        def forward(first: int, count: int, wanted: bool, backend: Backend = backend) -> torch.Tensor:
            tokens, first_logits = [[5, 6, 7, 8, 9][first : first + count]], np.array([count - 1])
            num_logits = np.array([int(wanted)])
            step = host_step(tokens, [first], [[2, 1]], first_logits, num_logits, BLOCK_SIZE)
            return backend.forward(backend.upload(step))

        nothing = forward(0, 4, wanted=False)
        assert nothing.shape == (0, VOCAB) and nothing.dtype == torch.float32
        logits.append(forward(4, 1, wanted=True))
    assert torch.allclose(*logits, atol=1e-4)


def test_a_step_wants_a_model_and_memory() -> None:
    spec, backend = SPECS["group 5, q/k norm, scaled rotary"], TritonBackend("cpu")
    batch = backend.upload(prompt_step(1, BLOCK_SIZE))
    with pytest.raises(RuntimeError, match="load a model"):
        backend.forward(batch)
    backend.load(spec, tiny_weights(spec))
    with pytest.raises(RuntimeError, match="allocate"):
        backend.forward(batch)


def test_a_bad_row_of_logits_is_marked_and_alone() -> None:
    from kernels.sampling import SamplingBatch, SamplingRow

    logits = torch.zeros(4, 8)
    logits[0, 3] = logits[3, 5] = 1.0
    logits[1, 2] = float("nan")
    logits[2, 6] = 1.0
    rows = [SamplingRow(), SamplingRow(), SamplingRow(temperature=1.0, top_k=1, logprobs=1), SamplingRow()]
    sampled = TritonBackend("cpu").sample(logits, SamplingBatch(rows))
    assert sampled.token_ids.tolist() == [3, -1, 6, 5]
    assert [report is not None for report in sampled.logprobs] == [False, False, True, False]


def test_a_storage_takes_what_it_says() -> None:
    spec = SPECS["biases, two kv heads, partial rotary, a layer without"]
    backend = TritonBackend("cpu")
    backend.load(spec, tiny_weights(spec))
    backend.allocate_kv(7, 16)
    assert backend.kv.nbytes == 7 * backend.kv_bytes_per_block(16)
    assert torch.count_nonzero(backend.kv) == 0


def _filled(num_blocks: int, num_host_blocks: int) -> tuple[TritonBackend, torch.Tensor]:
    """A backend whose pool holds numbers, and a copy of them."""
    spec = SPECS["biases, two kv heads, partial rotary, a layer without"]
    backend = TritonBackend("cpu")
    backend.load(spec, tiny_weights(spec))
    backend.allocate_kv(num_blocks, BLOCK_SIZE)
    backend.allocate_host_kv(num_host_blocks)
    with torch.inference_mode():
        backend.kv.copy_(torch.randn(backend.kv.shape, generator=torch.Generator().manual_seed(4)))
        return backend, backend.kv.clone()


@torch.inference_mode()
def test_swapped_blocks_come_back_in_every_layer() -> None:
    backend, before = _filled(12, 9)
    backend.swap_out([(7, 3), (2, 8), (11, 1)])
    backend.kv[:, :, [7, 2, 11]] = float("nan")
    backend.swap_out([(5, 4)])
    backend.swap_in([(8, 9), (1, 2), (4, 11), (3, 7)])
    expected = before.clone()
    expected[:, :, [9, 2, 11, 7]] = before[:, :, [2, 11, 5, 7]]
    assert torch.equal(backend.kv, expected)


@torch.inference_mode()
def test_many_blocks_move_at_once() -> None:
    backend, before = _filled(130, 200)
    order = torch.randperm(129, generator=torch.Generator().manual_seed(1)) + 1
    blocks, host_blocks = order.tolist(), (199 - torch.arange(129)).tolist()
    backend.swap_out(list(zip(blocks, host_blocks, strict=True)))
    backend.kv.zero_()
    backend.swap_in(list(zip(host_blocks, blocks, strict=True)))
    assert torch.equal(backend.kv[:, :, 1:], before[:, :, 1:])


@pytest.mark.parametrize("is_locked", [True, False])
@torch.inference_mode()
def test_host_memory_comes_in_pieces_that_may_not_be_locked(is_locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, before = _filled(12, 9)
    locked: list[int] = []
    block_bytes = backend.kv_bytes_per_block(BLOCK_SIZE)

    def lock(memory: np.ndarray, _: torch.device) -> bool:
        locked.append(memory.nbytes // block_bytes)
        return is_locked

    monkeypatch.setattr(host_memory, "PIECE_BYTES", 4 * block_bytes + 1)
    monkeypatch.setattr(host_memory, "lock", lock)
    backend.swap_out([(7, 3), (2, 8), (11, 1)])
    assert locked == [4, 1], "the blocks 0 to 3, and 8 alone"
    backend.kv[:, :, [7, 2, 11]] = float("nan")
    backend.swap_out([(5, 4)])
    backend.swap_in([(8, 9), (1, 2), (4, 11), (3, 7)])
    assert locked == [4, 1, 4]
    expected = before.clone()
    expected[:, :, [9, 2, 11, 7]] = before[:, :, [2, 11, 5, 7]]
    assert torch.equal(backend.kv, expected)


@pytest.mark.parametrize("pair", IMPOSSIBLE_PAIRS)
def test_blocks_that_do_not_exist_are_not_moved(pair: tuple[int, int]) -> None:
    backend, before = _filled(12, 9)
    assert_refused(backend, pair)
    assert torch.equal(backend.kv, before)


def test_host_memory_is_asked_for_before_it_is_used() -> None:
    backend = TritonBackend("cpu")
    spec = SPECS["biases, two kv heads, partial rotary, a layer without"]
    backend.load(spec, tiny_weights(spec))
    backend.allocate_kv(3, BLOCK_SIZE)
    with pytest.raises(RuntimeError, match="host"):
        backend.swap_out([(1, 1)])
