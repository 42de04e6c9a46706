"""Hypothesis drives a core through any sequence of adds, aborts, changes and steps, in pools from tight to absurd.

After every rule the invariants hold, and the fold of the records is the engine's own keyframe; at the end everything
drains, every answer is the cold one up to where it ended, and the pool is whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import DISCIPLINES, ORDERS, PREEMPTIONS, STATIC_DELIVERIES
from engine.request import FinishReason, SamplingParams, branch_id
from engine.scheduling.costs import PreemptionCosts
from tests.oracles import EngineProbe, KVCheckingRunner, cold_answer, make_core

MAX_MODEL_LEN = 40


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        pool_tokens=st.integers(8, 80),
        token_budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 5),
        host_blocks=st.sampled_from([0, 2, 80]),
        discipline=st.sampled_from(DISCIPLINES),
        order=st.sampled_from(ORDERS),
        preemption=st.sampled_from(PREEMPTIONS),
        costs=st.sampled_from([None, PreemptionCosts(1.0, 0.5), PreemptionCosts(1.0, 50.0)]),
        speculative=st.sampled_from(["off", "ngram"]),
        static_delivery=st.sampled_from(STATIC_DELIVERIES),
        ageing=st.sampled_from([None, 0.5, 5.0]),
        chunked_prefill=st.booleans(),
        chunk_size=st.sampled_from([None, 1, 3, 100]),
        prefix_cache=st.booleans(),
        watermark=st.sampled_from([0.0, 0.2, 0.9]),
    )
    def build(self, block_size: int, pool_tokens: int, host_blocks: int, **options: object) -> None:
        self.core = make_core(
            num_blocks=max(pool_tokens // block_size, 1),
            block_size=block_size,
            num_host_blocks=host_blocks,
            max_model_len=MAX_MODEL_LEN,
            clock=iter(range(10**9)).__next__,
            **options,  # type: ignore[arg-type]
        )
        runner = self.core._runner
        assert isinstance(runner, KVCheckingRunner)
        self.runner = runner
        self.probe = EngineProbe(self.core, max_quiet_steps=8 * MAX_MODEL_LEN)
        self.prompts: dict[int, tuple[list[int], int]] = {}
        """Prompt, and how many answers to it."""
        self.aborted: set[int] = set()
        self.poisoned: set[int] = set()

    @rule(
        head=st.integers(0, 30),
        tail=st.lists(st.integers(0, 2), max_size=15),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        priority=st.integers(0, 2),
        ends_after=st.one_of(st.none(), st.integers(0, 10)),
        n=st.sampled_from([1, 1, 1, 2]),
    )
    def add(self, head: int, tail: list[int], max_tokens: int | None, n: int, **options: Any) -> None:
        prompt = [*range(head), *tail]
        params = SamplingParams(max_tokens=max_tokens, n=n)
        request = self.probe.add(prompt, params, user=f"u{head % 3}", **options)
        self.prompts[request] = (prompt, n)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), during=st.booleans())
    def abort(self, data: st.DataObject, during: bool) -> None:
        """Abort one, known or over already, between two steps or in the middle of one."""
        victim = data.draw(st.sampled_from(sorted(self.prompts)))
        self.aborted.add(victim)
        if during:
            self.runner.during = lambda plan: self.core.abort(victim)
            self.probe.step()
            self.runner.during = None
        else:
            self.core.abort(victim)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(sorted(self.prompts)))
        if self.probe.answers[victim].last is None:
            self.poisoned.add(victim)
            self.runner.failures[victim] = "poisoned"

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), priority=st.integers(-1, 3), during=st.booleans())
    def rank(self, data: st.DataObject, priority: int, during: bool) -> None:
        """Another priority for one, known or over already, between two steps or in the middle of one."""
        request = data.draw(st.sampled_from(sorted(self.prompts)))
        if during:
            self.runner.during = lambda plan: self.core.set_priority(request, priority)
            self.probe.step()
            self.runner.during = None
        else:
            self.core.set_priority(request, priority)

    @rule()
    def take_in(self) -> None:
        """What a pause does."""
        self.probe.take_in()

    @rule(
        discipline=st.sampled_from(DISCIPLINES),
        order=st.sampled_from(ORDERS),
        preemption=st.sampled_from(PREEMPTIONS),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 24),
        chunk_size=st.sampled_from([None, 2, 7]),
        during=st.booleans(),
    )
    def change(self, during: bool, **knobs: Any) -> None:
        """Other knobs, between two steps or in the middle of one."""
        config = dataclasses.replace(self.core._scheduler.config, **knobs)
        if during:
            self.runner.during = lambda plan: self.core.reconfigure(config)
            self.probe.step()
            self.runner.during = None
        else:
            self.core.reconfigure(config)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.probe.step()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "core"):
            self.core.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.probe.run(max_steps=5_000)
        for request, (prompt, n) in self.prompts.items():
            for index in range(n):
                self._check(request, prompt, index)

    def _check(self, request: int, prompt: list[int], index: int) -> None:
        first = self.probe.answers[request].last
        if index and first is not None and first.error not in ("", "poisoned"):
            return  # one refusal for all
        answer = self.probe.answers[branch_id(request, index)]
        assert answer.token_ids == cold_answer(prompt, len(answer.token_ids), index=index)
        allowed = {FinishReason.LENGTH}
        allowed |= {FinishReason.ABORT} if request in self.aborted else set()
        refused = answer.last is not None and answer.last.error not in ("", "poisoned")
        allowed |= {FinishReason.ERROR} if request in self.poisoned or refused else set()
        assert answer.finish_reason in allowed


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
