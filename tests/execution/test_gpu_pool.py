"""The pool of a GPU: what is left when weights, recorded steps and the largest step have what they need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.execution.gpu_pool import LEAST_MARGIN, Fitted, Readings, fit_to_gpu, working_bytes
from engine.execution.loaded_model import LoadedModel
from engine.execution.sizing import LARGEST_GPU_BUDGET, MemoryPlan, StepMeasurement
from engine.execution.warm_up import SAMPLINGS, StepSizes, largest_step, steps_of_all_kinds
from engine.models.errors import ModelLoadError
from engine.models.transformers_spec import ModelSpec
from tests.execution.scripted_gpu import MIB, ScriptedBackend, ScriptedGpu

GIB = 2**30
WEIGHTS = 4 * GIB


def loaded(backend: ScriptedBackend, limit: int | None = None) -> LoadedModel:
    backend.gpu.take("weights", WEIGHTS)
    spec = cast(ModelSpec, SimpleNamespace())
    return LoadedModel([backend.as_backend()], [spec], None, limit, backend.gpu)


def fit(
    model: LoadedModel,
    backend: ScriptedBackend,
    *,
    budget: int = 2048,
    max_model_len: int = 4096,
    num_blocks: int | None = None,
    **scheduler: Any,
) -> Fitted:
    config = EngineConfig(
        cache=CacheConfig(num_blocks=num_blocks, swap_blocks=3), scheduler=SchedulerConfig(**scheduler)
    )
    plan = MemoryPlan(WEIGHTS, backend.block_bytes, num_blocks or 10**6, 0, 192 * MIB, backend.gpu.total)
    step = StepMeasurement(config.scheduler.max_num_batched_tokens or budget, 1e-5)
    return fit_to_gpu(model, plan, config, max_model_len, lambda largest: step, lambda *stage: None)


def test_what_was_measured_stays_free_and_a_margin() -> None:
    idle, ready, after = 20 * GIB, 19 * GIB, 17 * GIB
    of_torch = working_bytes(Readings(24 * GIB, idle, ready, after, peak=3 * GIB))
    assert of_torch == GIB + 3 * GIB + int(24 * GIB / 50), "the peak that torch tells"
    beside = working_bytes(Readings(24 * GIB, idle, ready, after, peak=GIB))
    assert beside == GIB + 2 * GIB + int(24 * GIB / 50), "or what is missing, where something else took more"
    given_back = working_bytes(Readings(4 * GIB, idle, idle + MIB, idle + MIB, peak=0))
    assert given_back == LEAST_MARGIN, "another program that ends meanwhile makes nothing negative"


def test_the_pool_is_all_that_is_left() -> None:
    gpu = ScriptedGpu(24 * GIB)
    backend = ScriptedBackend(gpu)
    model = loaded(backend)
    fitted = fit(model, backend, max_num_seqs=256, max_model_len=65_536)
    step = 2048 * backend.token_bytes + 256 * backend.logit_bytes
    margin = int(24 * GIB / 50)
    assert fitted.memory.num_blocks == (20 * GIB - backend.graph_bytes - step - margin) // MIB - 1
    assert fitted.memory.num_blocks == model.size.num_blocks == backend.num_blocks - 1
    assert fitted.step.token_budget == 2048 and fitted.note == "" and fitted.memory.num_host_blocks == 3
    assert backend.limits is not None and backend.limits.max_tokens == 2048 and backend.limits.max_requests == 256
    assert backend.limits.max_blocks == 65_536 // 16
    model.run_heaviest(StepSizes(256, 2048, 65_536))
    gpu.take("another program", margin - MIB)
    model.run_heaviest(StepSizes(256, 2048, 65_536))


def test_no_more_than_all_requests_could_use_and_no_more_than_the_limit() -> None:
    backend = ScriptedBackend(ScriptedGpu(24 * GIB))
    assert fit(loaded(backend), backend, max_num_seqs=4).memory.num_blocks == 4 * 256
    limited = ScriptedBackend(ScriptedGpu(24 * GIB))
    assert fit(loaded(limited, GIB), limited, max_num_seqs=256).memory.num_blocks == 1023


def test_a_step_that_leaves_no_room_is_made_smaller() -> None:
    """Half the tokens, until the pool holds at least as many; a step of a given size stays."""
    backend = ScriptedBackend(ScriptedGpu(WEIGHTS + 2 * GIB), token_bytes=MIB)
    fitted = fit(loaded(backend), backend, budget=LARGEST_GPU_BUDGET)
    assert fitted.step.token_budget == 1024
    assert fitted.memory.num_blocks * 16 >= fitted.step.token_budget
    given = ScriptedBackend(ScriptedGpu(WEIGHTS + 2 * GIB), token_bytes=MIB)
    assert fit(loaded(given), given, max_num_batched_tokens=1500).step.token_budget == 1500
    with pytest.raises(ModelLoadError, match=r"a step of 8,192 tokens does not fit .*--token-budget") as refused:
        beyond = ScriptedBackend(ScriptedGpu(WEIGHTS + 2 * GIB), token_bytes=MIB)
        fit(loaded(beyond), beyond, max_num_batched_tokens=8192)
    assert refused.value.kind == "memory"


def test_a_gpu_without_room_for_two_blocks_is_said_with_the_numbers() -> None:
    backend = ScriptedBackend(ScriptedGpu(WEIGHTS + 350 * MIB))
    with pytest.raises(ModelLoadError, match=r"a step of 64 tokens \(\d+ MiB\) \d+ MiB are free") as refused:
        fit(loaded(backend), backend)
    assert refused.value.kind == "memory"


def test_more_blocks_than_fit_are_refused_with_the_number_that_does() -> None:
    def ask(num_blocks: int) -> Fitted:
        backend = ScriptedBackend(ScriptedGpu(8 * GIB))
        return fit(loaded(backend), backend, num_blocks=num_blocks)

    with pytest.raises(ModelLoadError, match=r"5,000 KV blocks of 16 tokens need .*--kv-blocks \d+") as refused:
        ask(5000)
    fitting = int(refused.value.message.rsplit("--kv-blocks ", 1)[1].rstrip(")."))
    assert ask(fitting).memory.num_blocks == fitting > 3000
    with pytest.raises(ModelLoadError):
        ask(fitting + 1)


class Crowded(ScriptedGpu):
    """Another program takes its share as soon as it sees much memory free for the second time."""

    def __init__(self, total: int, share: int) -> None:
        super().__init__(total)
        self.share = share
        self.releases = 0

    def release(self) -> None:
        super().release()
        self.releases += 1
        if self.releases == 3:  # behind the measurement
            self.after = True

    def free_bytes(self) -> int:
        free = super().free_bytes()
        if getattr(self, "after", False) and "another program" not in self.taken:
            self.taken["another program"] = self.share
        return free


def test_memory_that_goes_between_measurement_and_pool_makes_the_pool_smaller() -> None:
    backend = ScriptedBackend(Crowded(16 * GIB, 4 * GIB))
    fitted = fit(loaded(backend), backend, max_num_seqs=256)
    assert "instead of" in fitted.note and f"{fitted.memory.num_blocks:,} KV blocks" in fitted.note
    assert 5000 < fitted.memory.num_blocks == backend.num_blocks - 1
    assert backend.limits is not None and not backend.graphs_problem, "decode steps are recorded in what is left"


def test_a_given_pool_that_memory_runs_out_for_is_refused_with_what_fits() -> None:
    backend = ScriptedBackend(Crowded(16 * GIB, 4 * GIB))
    with pytest.raises(ModelLoadError, match=r"it ran out: ([\d,]+) blocks do \(--kv-blocks") as refused:
        fit(loaded(backend), backend, num_blocks=11_000)
    assert refused.value.kind == "memory"


def test_steps_that_cannot_be_recorded_anyway_cost_no_blocks() -> None:
    backend = ScriptedBackend(ScriptedGpu(16 * GIB), graph_bytes=100 * GIB)
    fitted = fit(loaded(backend), backend, max_num_seqs=256)
    assert fitted.memory.num_blocks > 10_000 and backend.graphs_problem


def test_all_that_may_be_launched_is_launched_before_the_first_request() -> None:
    backend = ScriptedBackend(ScriptedGpu(24 * GIB))
    fit(loaded(backend), backend, max_num_seqs=8)
    assert {(1, 1), (8, 8), (64, 1), (64, 8)} <= set(backend.steps)
    chosen = {id(row) for sampling in backend.samplings for row in sampling.rows}
    assert chosen == {id(row) for row in SAMPLINGS.values()}
    assert {"copy", "out", "in"} <= set(backend.moved)


def test_steps_of_all_kinds_stay_within_their_sizes() -> None:
    for sizes in (StepSizes(1, 64, 2), StepSizes(32, 16, 100), StepSizes(5, 8192, 300, 4), StepSizes(256, 2048, 10**5)):
        for name, step in steps_of_all_kinds(sizes, 16, 3).items():
            assert len(step.token_ids) <= sizes.max_tokens, name
            assert len(step.seq_lens) <= sizes.max_requests and step.seq_lens.max() <= sizes.max_model_len, name
            assert step.block_tables[:, 0].min() >= 1 and step.block_tables.max() <= 3, name
            assert step.positions.min() >= 0 and (step.slot_mapping >= 16).all(), name
        new, contexts = largest_step(sizes, min(64, sizes.max_model_len))
        full = min(sizes.max_tokens, sizes.max_model_len * len(new))
        assert sum(new) == full and all(n <= c <= sizes.max_model_len for n, c in zip(new, contexts, strict=True))


# Later ---------------------------------------------------------------------------------------------------------------


def test_a_pool_that_shrinks_is_ready_again_and_stays_small() -> None:
    backend = ScriptedBackend(ScriptedGpu(16 * GIB))
    model = loaded(backend)
    before = fit(model, backend, max_num_seqs=256).memory.num_blocks
    size = model.size
    assert model.shrink(before // 2) == before // 2 == backend.num_blocks - 1
    assert backend.limits is not None and backend.limits.max_tokens == 2048
    model.resize(size)
    assert model.size.num_blocks == before // 2, "a later core does not ask for what there was no memory for"
    backend.gpu.taken["another program"] = 10 * GIB
    assert 0 < model.shrink(before // 2) < before // 2


def test_blocks_that_do_not_fit_later_leave_things_as_they_were() -> None:
    backend = ScriptedBackend(ScriptedGpu(16 * GIB))
    model = loaded(backend)
    fit(model, backend, max_num_seqs=8)
    before = model.size
    with pytest.raises(ModelLoadError, match="--kv-blocks"):
        model.resize_to_fit(16, 10**6, None)
    assert model.size.num_blocks == before.num_blocks == backend.num_blocks - 1 and backend.limits is not None
    model.resize_to_fit(16, before.num_blocks + 100, 2)
    assert backend.num_blocks == before.num_blocks + 101 and backend.limits is not None


def test_an_error_that_is_no_lack_of_memory_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(ScriptedGpu(16 * GIB))

    def broken(limits: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(backend, "make_ready", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        fit(loaded(backend), backend)


def test_torch_names_its_error_as_the_engine_knows_it() -> None:
    from engine.failures import is_out_of_memory

    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
