"""Loading onto a GPU, and memory that runs out there, through the interpreted kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import PoolShrunk
from engine.execution.gpu_pool import LEAST_MARGIN, Fitted, fit_to_gpu
from engine.execution.loaded_model import LoadedModel
from engine.execution.sizing import MemoryPlan, StepMeasurement
from engine.execution.warm_up import StepSizes, heaviest, warm_up
from engine.request import SamplingParams
from kernels.cpu.backend import CpuBackend
from kernels.triton.backend import TritonBackend
from kernels.triton.graphs import Recording
from tests.kernels.interpreted.stand_in import KeptStep, KeptSteps
from tests.kernels.interpreted.tiny_engine import BLOCK_SIZE, VOCAB, tiny_spec, tiny_weights
from tests.oracles import EngineProbe

SPEC = tiny_spec(num_layers=1, num_heads=2, head_dim=16, tie_embeddings=True)
MAX_MODEL_LEN = 12
PROMPTS = [[3], list(range(3, 8))]


class Captured(KeptSteps):
    """Steps that are recorded once for every pool."""

    def record(self, run: Any, beside: Recording | None) -> KeptStep:
        if beside is None:
            self.recordings = []
        return super().record(run, beside)


@dataclass
class Roomy:
    """A device with room for ``blocks`` beside all else."""

    free: int

    def release(self) -> None: ...

    def free_bytes(self) -> int:
        return self.free

    def total_bytes(self) -> int:
        return self.free

    def watch(self) -> None: ...

    def peak_bytes(self) -> int:
        return 0


def load(capture: Captured, num_blocks: int) -> tuple[LoadedModel, Fitted]:
    backend = TritonBackend("cpu", capture=capture)
    backend.load(SPEC, tiny_weights(SPEC))
    block_bytes = backend.kv_bytes_per_block(BLOCK_SIZE)
    model = LoadedModel([backend], [SPEC], None, None, Roomy(LEAST_MARGIN + num_blocks * block_bytes))
    config = EngineConfig(cache=CacheConfig(block_size=BLOCK_SIZE), scheduler=SchedulerConfig(max_num_seqs=2))
    plan = MemoryPlan(0, block_bytes, 10**6, 0, 0, 0)
    fitted = fit_to_gpu(
        model, plan, config, MAX_MODEL_LEN, lambda largest: StepMeasurement(8, 1e-3), lambda *stage: None
    )
    model.allocate_host(fitted.memory.num_host_blocks)
    return model, fitted


def answers(model: LoadedModel, *, overlap: bool) -> EngineProbe:
    core = EngineCore(
        model.runner(model.proposer("ngram")),
        scheduler=SchedulerConfig(max_num_seqs=2),
        num_blocks=model.size.num_blocks,
        block_size=BLOCK_SIZE,
        prefix_cache=True,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB,
        token_budget=8,
        overlap=overlap,
        resize_pool=model.shrink,
    )
    probe = EngineProbe(core)
    for prompt in PROMPTS:
        probe.add(prompt, SamplingParams(max_tokens=7))
    probe.run()
    return probe


def test_memory_that_runs_out_in_a_step_changes_no_id(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("warm_up", "run_heaviest"):  # the other test runs them
        monkeypatch.setattr(LoadedModel, name, lambda *_: None)
    capture = Captured()
    model, fitted = load(capture, num_blocks=6)
    assert fitted.memory.num_blocks == model.size.num_blocks == 6 == model.backend.kv.shape[2] - 1  # type: ignore
    assert capture.sizes() and not model.graphs_problem
    cpu = CpuBackend()
    cpu.load(SPEC, tiny_weights(SPEC))
    reference = LoadedModel([cpu], [SPEC], None)
    reference.allocate(BLOCK_SIZE, 6)
    undisturbed = answers(reference, overlap=False)
    forward, steps = model.backend.forward, iter(range(100))

    def short(batch: Any) -> torch.Tensor:
        if next(steps) in (1, 4):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(batch)

    monkeypatch.setattr(model.backend, "forward", short)
    disturbed = answers(model, overlap=True)
    assert [event.num_blocks for event in disturbed.of(PoolShrunk)] == [4, 3]
    assert model.size.num_blocks == 3
    for request_id, answer in undisturbed.answers.items():
        assert disturbed.answers[request_id].token_ids == answer.token_ids
        assert len(answer.token_ids) == 7
    assert sum(capture.replays().values()) > 0, "the smaller pool's decode steps are recorded, too"


def test_the_list_of_what_is_launched_at_the_load_runs_in_the_smallest_pool() -> None:
    backend = TritonBackend("cpu")
    backend.load(SPEC, tiny_weights(SPEC))
    backend.allocate_kv(2, BLOCK_SIZE)
    sizes = StepSizes(2, 3, 6)
    warm_up(backend, sizes, BLOCK_SIZE, 1)
    heaviest(backend, sizes, BLOCK_SIZE, 1)
