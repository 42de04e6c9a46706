"""The benchmark of scheduling measures what it says: small versions of its cases."""

from __future__ import annotations

import pytest

from engine.config import DISCIPLINES
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from tests import scheduler_bench, scheduler_cases
from tests.scheduler_cases import DECODE_STEPS, Case, Make, Samples, Setup


@pytest.mark.parametrize("column", ["step", "scheduler"])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_the_measured_steps_are_decodes_of_all_who_run(discipline: str, column: str) -> None:
    make = scheduler_bench.makers(discipline, "fcfs")[column]
    samples = scheduler_cases.decode(make, running=5, waiting=7, num_blocks=100, rounds=2)
    assert DECODE_STEPS <= len(samples.seconds) <= 2 * DECODE_STEPS
    assert min(samples.seconds) > 0


@pytest.mark.parametrize("column", ["step", "scheduler"])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_prompts_are_started_and_requests_ended_in_every_discipline(discipline: str, column: str) -> None:
    make = scheduler_bench.makers(discipline, "fcfs")[column]
    assert min(scheduler_cases.start_prompts(make, cached=False, count=3, rounds=2).seconds) > 0
    if discipline != "static":  # which does not look into the prefix cache
        assert min(scheduler_cases.start_prompts(make, cached=True, count=3, rounds=2).seconds) > 0
    assert min(scheduler_cases.end_requests(make, count=3, rounds=2).seconds) > 0


@pytest.mark.parametrize("column", ["step", "scheduler"])
def test_a_tight_pool_preempts_about_every_third_step(column: str) -> None:
    make = scheduler_bench.makers("vllm", "fcfs")[column]
    samples = scheduler_cases.decode_in_tight_pool(make, running=32, steps=48)
    # 32 running take 2 blocks a step, and one that yields gives 48 back.
    assert samples.counts["preemptions_per_step"][0] == pytest.approx(1 / 24, abs=0.03)
    assert 28 < samples.counts["mean_running"][0] < 32


@pytest.mark.parametrize("column", ["step", "scheduler"])
def test_memory_stays_flat_over_many_requests(column: str) -> None:
    make = scheduler_bench.makers("vllm", "fcfs")[column]
    samples = scheduler_cases.run_many(make, count=2_000, warm_up=2_000, batch=50)
    assert samples.counts["object_growth"][0] < 50


def test_a_leak_of_one_list_a_step_is_seen() -> None:
    class Leaking(scheduler_bench.CoreSubject):
        kept: list[SchedulerOutput]

        def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
            self.kept = [*getattr(self, "kept", []), output]
            return super().execute(output)

    def make(setup: Setup) -> Leaking:
        return Leaking(scheduler_bench.SchedulerConfig(max_num_seqs=setup.max_num_seqs), setup)

    assert scheduler_cases.run_many(make, count=2_000, warm_up=2_000, batch=50).counts["object_growth"][0] > 80


def test_a_leak_of_bytes_is_seen_behind_a_case_that_gave_much_memory_back() -> None:
    class Leaking(scheduler_bench.CoreSubject):
        def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
            kept.extend(bytes([i % 256]) * 400 for i in range(500))  # nothing that the collector counts
            return super().execute(output)

    kept: list[bytes] = []
    left_over: list[bytes] = []

    def large(make: Make) -> Samples:
        # One in 500 stays, so that the memory of the others stays resident too.
        left_over.extend([bytes([i % 256]) * 400 for i in range(100_000)][::500])
        return Samples([1.0])

    def growth(subject: type[scheduler_bench.CoreSubject]) -> float:
        def make(setup: Setup) -> scheduler_bench.CoreSubject:
            return subject(scheduler_bench.SchedulerConfig(max_num_seqs=setup.max_num_seqs), setup)

        many = Case("many", lambda make: scheduler_cases.run_many(make, count=2_000, warm_up=2_000, batch=50))
        return scheduler_cases.run_pass(make, [Case("large", large), many])["many"].counts["rss_growth_mb"][0]

    leaked = 2 * 40 * 500 * 433 / 1e6
    assert growth(Leaking) == pytest.approx(leaked, rel=0.25)
    assert growth(scheduler_bench.CoreSubject) < leaked / 10
