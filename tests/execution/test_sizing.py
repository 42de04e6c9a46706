"""Memory plans, the measured token budget, and what a container is allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.environment import usable_cores
from engine.execution.host import available_memory
from engine.execution.sizing import (
    CPU_POOL_BYTES,
    MemoryPlan,
    StepMeasurement,
    block_move_seconds,
    measure_token_budget,
    plan_memory,
    shortage,
)
from engine.models.architecture import spec_from_config
from engine.models.errors import ModelLoadError
from engine.models.transformers_spec import AttentionLayer, TransformersSpec
from engine.scheduling.costs import PreemptionCosts
from kernels.backend import Backend
from kernels.cpu.backend import CpuBackend
from kernels.spec import DecoderSpec, HostStep

GIB = 2**30


def llama_8b(dtype: torch.dtype = torch.float32) -> DecoderSpec:
    return spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
        dtype,
    )


def test_weights_and_pool_of_a_known_model() -> None:
    plan = plan_memory(llama_8b(torch.bfloat16), EngineConfig(), 8192, 64 * GIB, on_gpu=False)
    assert plan.weight_bytes == 2 * 8_030_261_248
    assert plan.block_bytes == 16 * 2 * 32 * 8 * 128 * 2
    assert plan.num_blocks == CPU_POOL_BYTES // plan.block_bytes
    assert plan.needed_bytes < 64 * GIB


def test_a_gpu_takes_most_of_what_is_free_and_no_more_than_is_useful() -> None:
    spec = llama_8b(torch.bfloat16)
    plan = plan_memory(spec, EngineConfig(), 8192, 40 * GIB, on_gpu=True)
    assert 0.85 < plan.num_blocks * plan.block_bytes / (40 * GIB - plan.weight_bytes) < 0.91
    few = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=2))
    assert plan_memory(spec, few, 8192, 80 * GIB, on_gpu=True).num_blocks == 2 * 512


def test_a_pool_shrinks_with_memory_and_stays_inside_it() -> None:
    spec = llama_8b(torch.bfloat16)
    for available in (33 * GIB // 2, 17 * GIB, 20 * GIB):
        plan = plan_memory(spec, EngineConfig(), 8192, available, on_gpu=False)
        assert plan.num_blocks >= 1 and plan.needed_bytes <= available
    asked = EngineConfig(cache=CacheConfig(num_blocks=100))
    assert plan_memory(spec, asked, 8192, 20 * GIB, on_gpu=False).num_blocks == 100


def test_what_is_kept_beside_the_weights_counts() -> None:
    """A large model's layers need room while they are packed; a tied head is kept once."""
    pool = EngineConfig(cache=CacheConfig(num_blocks=10))
    untied, tied = (
        plan_memory(spec, pool, 8192, 64 * GIB, on_gpu=False)
        for spec in (llama_8b(), dataclasses.replace(llama_8b(), tie_embeddings=True))
    )
    assert untied.weight_bytes - tied.weight_bytes == 4 * 128_256 * 4096
    assert untied.working_bytes == tied.working_bytes > 4 * 2 * 2 * 14_336 * 4096
    with pytest.raises(ModelLoadError, match="at most"):
        plan_memory(llama_8b(), pool, 8192, untied.needed_bytes - 1, on_gpu=False)
    assert plan_memory(llama_8b(), pool, 8192, untied.needed_bytes, on_gpu=False).num_blocks == 10


def test_int8_counts_a_byte_a_weight_and_keys_and_values_in_bfloat16() -> None:
    spec = dataclasses.replace(llama_8b(torch.bfloat16), weight_dtype=torch.int8)
    plan = plan_memory(spec, EngineConfig(), 8192, 64 * GIB, on_gpu=False)
    rows = 2 * 128_256 + 32 * (4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096)
    norms = (2 * 32 + 1) * 4096
    assert plan.weight_bytes == (8_030_261_248 - norms) + 4 * rows + 2 * norms
    assert plan.block_bytes == 16 * 2 * 32 * 8 * 128 * 2
    with pytest.raises(ModelLoadError, match=r"in int8, and 4\.0 GiB are free"):
        plan_memory(spec, EngineConfig(), 8192, 4 * GIB, on_gpu=False)


def test_a_gpu_has_room_for_a_model_only_beside_a_small_pool() -> None:
    """auto takes int8 on a GPU with less: 15.0 GiB of weights, 0.5 GiB for 4,096 tokens, and what packing needs."""
    spec, config = llama_8b(torch.bfloat16), EngineConfig()
    small = EngineConfig(cache=CacheConfig(num_blocks=4096 // 16))
    least = plan_memory(spec, small, 8192, 64 * GIB, on_gpu=True, host_bytes=GIB).needed_bytes
    assert 15.5 * GIB < least < 17 * GIB
    assert shortage([spec], config, 8192, least) == shortage([spec], small, 8192, least) == ""
    assert "room for 4,096 tokens bfloat16 needs about 16.5 GiB, and 15.0 GiB are free" in shortage(
        [spec], config, 8192, 15 * GIB
    )
    assert shortage([spec], config, 8192, least - 1) and not shortage([spec], config, 1024, least - 1)
    larger = EngineConfig(cache=CacheConfig(num_blocks=4096 // 16 + 1))
    assert shortage([spec], larger, 8192, least) and shortage([spec, spec], config, 8192, least)
    assert "the memory limit is 15.0 GiB" in shortage([spec], EngineConfig(memory_limit=15 * GIB), 8192, 80 * GIB)
    assert not shortage([spec], EngineConfig(memory_limit=16 * GIB), 8192, 80 * GIB)
    quantised = dataclasses.replace(spec, weight_dtype=torch.int8)
    assert not shortage([quantised], config, 8192, 10 * GIB)


class Machine:
    """Computes ``rate`` tokens a second behind ``fixed`` seconds; the first run of a size takes longer."""

    def __init__(self, rate: float, fixed: float = 0.0) -> None:
        self.rate, self.fixed = rate, fixed
        self.now = 0.0
        self.sizes: list[int] = []

    def forward(self, step: HostStep) -> torch.Tensor:
        first = len(step.token_ids) not in self.sizes
        self.sizes.append(len(step.token_ids))
        self.now += self.fixed + len(step.token_ids) / self.rate + (0.5 if first else 0.0)
        return torch.zeros(1, 4)

    def measure(self, largest: int = 100_000) -> StepMeasurement:
        return measure_token_budget(self.forward, largest=largest, block_size=16, clock=lambda: self.now, target=0.12)

    def budget(self, largest: int = 100_000) -> int:
        return self.measure(largest).token_budget


@pytest.mark.parametrize("rate", [50.0, 300.0, 430.0, 1000.0, 5000.0, 1e6])
def test_the_budget_keeps_a_step_under_the_target(rate: float) -> None:
    machine = Machine(rate)
    budget = machine.budget()
    assert budget % 16 == 0 and 64 <= budget <= 2048
    assert budget == 64 or budget / rate <= 0.12
    assert budget == 2048 or (budget + 16) / rate > 0.12, "a larger one would have done"


def test_the_budget_with_a_fixed_cost_is_not_exceeded() -> None:
    machine = Machine(1000.0, fixed=0.05)
    assert 0.05 + machine.budget() / 1000.0 <= 0.12


def test_measuring_stays_inside_the_pool_and_the_model() -> None:
    machine = Machine(1e6)
    assert machine.budget(largest=40) == 2048
    assert max(machine.sizes) == 40
    slow = Machine(300.0)
    slow.budget()
    assert max(slow.sizes) <= 64, "nothing slower than twice the target is tried"


@pytest.mark.parametrize(("rate", "size"), [(50.0, 64), (1000.0, 64), (5000.0, 256), (1e6, 2048)])
def test_a_token_costs_what_it_does_in_the_largest_fast_prefill(rate: float, size: int) -> None:
    """A fixed cost, such as reading the weights, weighs less in a larger one."""
    measured = Machine(rate, fixed=0.01).measure()
    assert measured.seconds_per_token == pytest.approx(1 / rate + 0.01 / size)


class Mover:
    """A backend whose copies take ``seconds`` a block each way; the first move touches memory and takes longer."""

    device = torch.device("cpu")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 1.0
        self.room = 0

    def allocate_host_kv(self, num_blocks: int) -> None:
        self.room = num_blocks
        self.now += 5.0

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        assert all(0 < block < self.room for pair in pairs for block in pair)
        self.now += self.seconds * len(pairs) + 3.0 / self.now

    swap_in = swap_out


def test_moving_a_block_costs_its_way_out_and_back_at_best() -> None:
    mover = Mover(100.0)
    cost = block_move_seconds(cast(Backend, mover), 3, lambda: mover.now)
    assert mover.room == 4
    assert 200.0 < cost < 200.01, "the best of several"
    many = Mover(1.0)
    block_move_seconds(cast(Backend, many), 1_000_000, lambda: many.now)
    assert many.room < 20, "a few are enough"


def test_costs_grow_with_what_is_lost() -> None:
    costs = PreemptionCosts(seconds_per_token=0.002, seconds_per_block=0.0001)
    assert costs.recompute_seconds(300) == pytest.approx(0.6)
    assert costs.swap_seconds(19) == pytest.approx(0.0019)


# Host memory ---------------------------------------------------------------------------------------------------------


def test_the_host_has_as_many_blocks_as_the_pool_within_half_of_what_is_left() -> None:
    spec = llama_8b(torch.bfloat16)
    plan = plan_memory(spec, EngineConfig(), 8192, 64 * GIB, on_gpu=False)
    assert plan.num_host_blocks == plan.num_blocks
    pool = EngineConfig(cache=CacheConfig(num_blocks=500))
    taken = plan_memory(spec, pool, 8192, 64 * GIB, on_gpu=False).needed_bytes
    plan = plan_memory(spec, pool, 8192, taken + 200 * plan.block_bytes, on_gpu=False)
    assert plan.num_host_blocks == 99, "100 blocks, one of which is no block"
    assert plan_memory(spec, pool, 8192, taken, on_gpu=False).num_host_blocks == 0
    asked = EngineConfig(cache=CacheConfig(num_blocks=500, swap_blocks=7))
    assert plan_memory(spec, asked, 8192, 64 * GIB, on_gpu=False).num_host_blocks == 7
    off = EngineConfig(cache=CacheConfig(num_blocks=500, swap_blocks=0))
    assert plan_memory(spec, off, 8192, taken, on_gpu=False).num_host_blocks == 0


def test_more_host_blocks_than_fit_are_refused_with_the_number_that_does() -> None:
    spec = llama_8b(torch.bfloat16)
    block_bytes = 16 * spec.kv_bytes_per_token()

    def plan(swap_blocks: int) -> MemoryPlan:
        config = EngineConfig(cache=CacheConfig(num_blocks=500, swap_blocks=swap_blocks))
        return plan_memory(spec, config, 8192, taken + 200 * block_bytes, on_gpu=False)

    taken = plan_memory(
        spec, EngineConfig(cache=CacheConfig(num_blocks=500)), 8192, 64 * GIB, on_gpu=False
    ).needed_bytes
    assert plan(199).num_host_blocks == 199
    with pytest.raises(ModelLoadError, match=r"200 blocks of host memory.*at most 199 .*--swap-blocks 199") as caught:
        plan(200)
    assert caught.value.kind == "memory"


def test_a_gpu_swaps_to_the_memory_of_its_host() -> None:
    spec = llama_8b(torch.bfloat16)
    pool = EngineConfig(cache=CacheConfig(num_blocks=500))
    host_blocks = [
        plan_memory(spec, pool, 8192, 40 * GIB, on_gpu=True, host_bytes=host * GIB).num_host_blocks
        for host in (0, 1, 64)
    ]
    assert host_blocks[0] == 0 and 100 < host_blocks[1] < 256 and host_blocks[2] == 500


# The machine ---------------------------------------------------------------------------------------------------------


def test_a_containers_limits_are_the_machines(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) >= 1
    free = available_memory(tmp_path)
    assert free > 0
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "memory.max").write_text(f"{64 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{60 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {8 * 2**20}\nactive_file {2**20}\n")
    assert available_memory(tmp_path) == 13 * 2**20
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_cores(tmp_path) >= 1
    assert available_memory(tmp_path) > 13 * 2**20


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_block_is_counted_as_the_cpu_backend_keeps_it(block_size: int) -> None:
    spec = llama_8b()
    backend = CpuBackend()
    backend._spec = spec
    config = EngineConfig(cache=CacheConfig(block_size=block_size))
    plan = plan_memory(spec, config, 8192, 64 * GIB, on_gpu=False)
    assert plan.block_bytes == backend.kv_bytes_per_block(block_size)


def test_a_memory_limit_bounds_weights_and_blocks_together() -> None:
    spec = llama_8b(torch.bfloat16)
    free = plan_memory(spec, EngineConfig(), 8192, 64 * GIB, on_gpu=True)
    limited = plan_memory(spec, EngineConfig(memory_limit=20 * GIB), 8192, 64 * GIB, on_gpu=True)
    assert limited.num_blocks < free.num_blocks
    room = 20 * GIB - limited.weight_bytes
    assert 0.85 * room < limited.num_blocks * limited.block_bytes < room
    loose = EngineConfig(memory_limit=100 * GIB)
    assert plan_memory(spec, loose, 8192, 64 * GIB, on_gpu=True) == free


def test_a_memory_limit_that_is_too_small_is_named_with_its_number() -> None:
    spec = llama_8b(torch.bfloat16)
    weights = plan_memory(spec, EngineConfig(), 8192, 64 * GIB, on_gpu=True).weight_bytes
    with pytest.raises(
        ModelLoadError, match=r"in bfloat16, and the memory limit is 8\.0 GiB \(memory_limit\)"
    ) as refused:
        plan_memory(spec, EngineConfig(memory_limit=8 * GIB), 8192, 64 * GIB, on_gpu=True)
    assert refused.value.kind == "memory" and "Raise it" in refused.value.message
    pool = EngineConfig(memory_limit=weights + GIB, cache=CacheConfig(num_blocks=100_000))
    with pytest.raises(ModelLoadError, match=r"1\.0 GiB are left by the memory limit \(memory_limit\): at most"):
        plan_memory(spec, pool, 8192, 64 * GIB, on_gpu=True)


def test_on_a_cpu_blocks_of_the_host_are_within_the_limit_too() -> None:
    spec = llama_8b(torch.bfloat16)
    plan = plan_memory(spec, EngineConfig(memory_limit=18 * GIB), 8192, 64 * GIB, on_gpu=False)
    blocks = plan.num_blocks + plan.num_host_blocks + 2
    assert plan.num_host_blocks > 0 and plan.weight_bytes + blocks * plan.block_bytes <= 18 * GIB


def test_what_the_library_loads_must_fit_into_the_host_on_its_way_to_a_gpu() -> None:
    spec = TransformersSpec(
        architecture="GemmaForCausalLM",
        config={},
        library="Transformers 5",
        vocab_size=1000,
        max_position=8192,
        limit_reason="",
        parameters=10 * GIB,
        dtype=torch.bfloat16,
        layers=(AttentionLayer("layers.0.attention", 2, 64, 64, None),),
    )
    with pytest.raises(ModelLoadError, match=r"about 20\.2 GiB there in bfloat16, and 8\.0 GiB are free") as refused:
        plan_memory(spec, EngineConfig(), 8192, 40 * GIB, on_gpu=True, host_bytes=8 * GIB)
    assert refused.value.kind == "memory"
    assert plan_memory(spec, EngineConfig(), 8192, 40 * GIB, on_gpu=True, host_bytes=32 * GIB).num_blocks > 0
    plan_memory(llama_8b(torch.bfloat16), EngineConfig(), 8192, 40 * GIB, on_gpu=True, host_bytes=GIB)
