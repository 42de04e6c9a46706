"""The core around the scheduler: ends, refusals, aborts, text, log-probabilities, totals and timings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from engine.answer import AnswerText
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.events import Arrived, Finished, Rejected
from engine.request import FinishReason, SamplingParams
from engine.scheduling.columns import PlanError
from engine.scheduling.discipline import Discipline, PlanningDesk
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from engine.text.codec import TextCodec
from engine.text.token_bytes import byte_alphabet
from tests.oracles import (
    ABORT_STATES,
    EngineProbe,
    KVCheckingRunner,
    abort_in_state,
    assert_blast_radius,
    assert_stream_law,
    cold_answer,
    make_core,
)


@dataclass(frozen=True)
class Logprob:
    """As :class:`kernels.sampling.TokenLogprobs`, which would import torch."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class ScriptedRunner:
    """Answers every request with the same given tokens, ``burst`` a step: all but one of them accepted drafts."""

    def __init__(self, script: list[int], burst: int = 1) -> None:
        self.script = script
        self.burst = burst
        self.seconds = (0.0, 0.0, 0.0)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        token_ids = [
            self.script[request.num_output_tokens :][: self.burst] if sampled else []
            for request, sampled in zip(output.requests, output.samples, strict=True)
        ]
        logprobs: list[Any] = [
            [Logprob(token, -0.5, [(token, -0.5)]) for token in ids] if request.params.logprobs is not None else []
            for request, ids in zip(output.requests, token_ids, strict=True)
        ]
        drafts = [max(len(ids) - 1, 0) for ids in token_ids] if self.burst > 1 else []
        return ModelRunnerOutput(token_ids, logprobs, {}, *self.seconds, drafts=drafts)


def scripted(script: list[int], burst: int = 1, **options: Any) -> EngineProbe:
    return EngineProbe(make_core(runner=ScriptedRunner(script, burst), **options))


PIECES = ["ab", "c", "de", "x", "stop"]
FIRST_PIECE = 256


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """Ids 0 to 255 are bytes, those behind them the pieces above."""
    bytes_to_characters = {byte: character for character, byte in byte_alphabet().items()}
    vocabulary = {bytes_to_characters[byte]: byte for byte in range(256)}
    for offset, piece in enumerate(PIECES):
        vocabulary["".join(bytes_to_characters[b] for b in piece.encode())] = FIRST_PIECE + offset
    # The later id wins where a piece is a single byte.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer.to_str().encode(), {}, None)


def piece(text: str) -> int:
    return FIRST_PIECE + PIECES.index(text)


# Ends ---------------------------------------------------------------------------------------------------------------


def end_of(probe: EngineProbe, **params: Any) -> tuple[list[int], str | None]:
    ends_after = params.pop("ends_after", None)
    request = probe.add([1, 2], SamplingParams(**params), ends_after=ends_after)
    probe.run()
    return probe.answers[request].token_ids, probe.answers[request].finish_reason


def test_the_models_own_ids_end_and_are_ignored_on_request() -> None:
    script, eos = [5, 6, 7, 8, 9, 10], frozenset({6, 8})
    assert end_of(scripted(script, eos_token_ids=eos), max_tokens=5) == ([5, 6], "stop")
    assert end_of(scripted(script, eos_token_ids=eos), max_tokens=5, ignore_eos=True) == ([5, 6, 7, 8, 9], "length")
    own = {"ignore_eos": True, "stop_token_ids": (7,)}
    assert end_of(scripted(script, eos_token_ids=eos), max_tokens=5, **own) == ([5, 6, 7], "stop")
    assert end_of(scripted(script, eos_token_ids=eos), max_tokens=5, stop_token_ids=(5,)) == ([5], "stop")


def test_nothing_stops_before_min_tokens() -> None:
    assert end_of(scripted([6, 6, 6, 6], eos_token_ids=frozenset({6})), max_tokens=4, min_tokens=3) == ([6] * 3, "stop")


def test_a_stop_id_at_max_tokens_is_a_stop() -> None:
    assert end_of(scripted([5, 6], eos_token_ids=frozenset({6})), max_tokens=2) == ([5, 6], "stop")


def test_a_replayed_request_ends_where_the_trace_says_and_the_scheduler_does_not_know() -> None:
    probe = scripted([5] * 20)
    assert end_of(probe, max_tokens=20, ends_after=3) == ([5] * 3, "length")
    assert probe.of(Arrived)[0].max_tokens == 20


def test_without_max_tokens_and_beyond_the_models_room_the_answer_ends_by_length() -> None:
    for params in ({}, {"max_tokens": 10_000}):
        assert end_of(scripted([5] * 40, max_model_len=32), **params) == ([5] * 30, "length")


def test_several_tokens_of_one_step_are_cut_at_the_end_with_their_logprobs() -> None:
    probe = scripted([5, 6, 7, 8, 9, 6], burst=4, eos_token_ids=frozenset({7}))
    request = probe.add([1, 2], SamplingParams(max_tokens=9, logprobs=1))
    limited = probe.add([1, 2], SamplingParams(max_tokens=6, logprobs=1, ignore_eos=True))
    probe.run()
    assert_stream_law(probe.answers[request], "", 3, logprobs=True)
    assert_stream_law(probe.answers[limited], "", 6, logprobs=True)
    assert probe.answers[limited].token_ids == [5, 6, 7, 8, 9, 6]
    assert probe.records[-1].totals.output_tokens == 9


# Text ---------------------------------------------------------------------------------------------------------------


def test_a_stop_string_across_tokens_ends_before_itself(codec: TextCodec) -> None:
    script = [piece("ab"), piece("c"), piece("de"), piece("x")]
    probe = scripted(script, codec=codec)
    request = probe.add([65], SamplingParams(max_tokens=4, stop=("bcd",), logprobs=0))
    probe.run()
    answer = probe.answers[request]
    assert answer.finish_reason == "stop"
    assert_stream_law(answer, "a", 3, logprobs=True)
    assert probe.of(Finished)[0].output_tokens == 3


def test_a_near_miss_of_a_stop_string_is_shown_in_full(codec: TextCodec) -> None:
    probe = scripted([piece("ab"), piece("x")], codec=codec)
    request = probe.add([65], SamplingParams(max_tokens=2, stop=("bcd",)))
    probe.run()
    assert_stream_law(probe.answers[request], "abx", 2)
    held = scripted([piece("x"), piece("ab")], codec=codec)
    request = held.add([65], SamplingParams(max_tokens=2, stop=("bcd",)))
    held.run()
    assert_stream_law(held.answers[request], "xab", 2)


def test_a_stop_string_inside_a_burst_cuts_ids_text_and_logprobs(codec: TextCodec) -> None:
    probe = scripted([piece("x"), piece("stop"), piece("x"), piece("ab")], burst=4, codec=codec)
    request = probe.add([65], SamplingParams(max_tokens=9, stop=("to",), logprobs=0))
    probe.run()
    assert_stream_law(probe.answers[request], "xs", 2, logprobs=True)
    assert probe.records[-1].totals.output_tokens == 2 and sum(probe.records[-1].new_tokens) == 2


def test_a_stop_string_at_max_tokens_is_a_stop_and_before_min_tokens_none(codec: TextCodec) -> None:
    probe = scripted([piece("stop"), piece("x"), piece("stop"), piece("x")], codec=codec)
    request = probe.add([65], SamplingParams(max_tokens=3, min_tokens=3, stop=("stop",)))
    probe.run()
    assert probe.answers[request].finish_reason == "stop"
    assert_stream_law(probe.answers[request], "stopx", 3)


def test_a_character_cut_short_by_the_limit_is_flushed_once(codec: TextCodec) -> None:
    probe = scripted([*"é".encode(), *"👍".encode()[:2], 65], codec=codec)
    request = probe.add([65], SamplingParams(max_tokens=4))
    probe.run()
    assert_stream_law(probe.answers[request], "é\ufffd", 4)
    assert probe.answers[request].deltas == ["", "é", "", "\ufffd"]


def test_the_token_that_ends_by_its_id_gives_no_text(codec: TextCodec) -> None:
    probe = scripted([piece("ab"), piece("x")], codec=codec)
    request = probe.add([65], SamplingParams(max_tokens=9, stop_token_ids=(piece("x"),)))
    probe.run()
    assert_stream_law(probe.answers[request], "ab", 2)


def test_without_streamed_text_stop_strings_still_end(codec: TextCodec) -> None:
    probe = scripted([piece("ab"), piece("c"), piece("de"), piece("x")], codec=codec)
    request = probe.add([65], SamplingParams(max_tokens=4, stop=("bcd",)), stream_text=False)
    silent = probe.add([65], SamplingParams(max_tokens=4), stream_text=False)
    probe.run()
    assert_stream_law(probe.answers[request], "", 3)
    assert_stream_law(probe.answers[silent], "", 4)


def test_an_abort_gives_the_text_that_was_held_back(codec: TextCodec) -> None:
    probe = scripted([piece("ab")] * 9, codec=codec)
    request = probe.add([65], SamplingParams(max_tokens=9, stop=("bcd",)))
    probe.step()
    probe.core.abort(request)
    probe.run()
    assert probe.answers[request].finish_reason == "abort"
    assert_stream_law(probe.answers[request], "ab", 1)


def test_text_that_cannot_be_made_ends_its_request_alone(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    push = AnswerText.push

    def fail(self: AnswerText, token_ids: list[int], ended: FinishReason | None) -> Any:
        if self._min_tokens == 2:
            raise UnicodeError("injected")
        return push(self, token_ids, ended)

    monkeypatch.setattr(AnswerText, "push", fail)
    probe = scripted([piece("ab")] * 9, codec=codec)
    bad = probe.add([65], SamplingParams(max_tokens=4, min_tokens=2))
    good = probe.add([65], SamplingParams(max_tokens=4))
    probe.run()
    last = probe.answers[bad].last
    assert last is not None and last.finish_reason == "error" and "injected" in last.error
    assert_stream_law(probe.answers[good], "ab" * 4, 4)


# Refusals and failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, params, words",
    [
        ([], {}, ["empty"]),
        ([1, -1], {}, ["-1", "0 to 999"]),
        ([1, 1_000], {}, ["1000", "0 to 999"]),
        ([1, 10**9], {}, ["1000000000"]),
        ([1, 10**12], {}, ["1000000000000"]),
        ([1, 2.5], {}, ["2.5"]),
        ([1, None], {}, ["None"]),
        ([1], {"stop_token_ids": (1_000,)}, ["stop_token_ids", "1000"]),
        ([1], {"logit_bias": {-1: 2.0}}, ["logit_bias", "-1"]),
        ([1] * 100, {}, ["100 tokens", "holds 100", "99"]),
        ([1] * 150, {}, ["150 tokens", "holds 100"]),
    ],
)
def test_bad_requests_are_refused_by_name_and_number(prompt: Any, params: dict[str, Any], words: list[str]) -> None:
    answer = assert_blast_radius(
        lambda: make_core(max_model_len=100),
        [([1, 2, 3], SamplingParams(max_tokens=5)), ([4] * 20, SamplingParams(max_tokens=7))],
        lambda probe: probe.add(prompt, SamplingParams(**params)),
    )
    assert answer.last is not None and answer.token_ids == []
    for word in words:
        assert word in answer.last.error


def test_more_logprobs_than_the_vocabulary_has_are_refused() -> None:
    probe = EngineProbe(make_core(vocab_size=10))
    request = probe.add([1], SamplingParams(logprobs=11))
    probe.run()
    last = probe.answers[request].last
    assert last is not None and "11" in last.error and "10 tokens" in last.error


def test_a_refusal_is_one_event_one_output_and_counted() -> None:
    probe = EngineProbe(make_core())
    probe.core.reject(7, "The template knows no role 'tool'.")
    assert probe.core.has_work
    result = probe.step()
    assert [type(event) for event in probe.events] == [Rejected]
    assert [(o.request_id, o.finish_reason, o.error) for o in result.outputs] == [
        (7, "error", "The template knows no role 'tool'.")
    ]
    totals = probe.records[-1].totals
    assert (totals.arrived, totals.finished, totals.rejected, totals.steps) == (1, 1, 1, 0)
    assert not probe.core.has_work and probe.step().record is None


def test_a_row_in_error_ends_its_request_alone_and_caches_nothing() -> None:
    def poison(probe: EngineProbe) -> int:
        runner = probe.core._runner
        assert isinstance(runner, KVCheckingRunner)
        request = probe.add([8] * 40, SamplingParams(max_tokens=5))
        runner.failures[request] = "The logits of this request are not finite."
        return request

    good = [([1, 2, 3], SamplingParams(max_tokens=8)), ([4] * 20, SamplingParams(max_tokens=8))]
    answer = assert_blast_radius(make_core, good, poison)
    assert answer.last is not None and "not finite" in answer.last.error
    probe = EngineProbe(make_core())
    poison(probe)
    probe.run()
    assert probe.core.keyframe().cached_blocks == []


def test_an_id_in_use_is_a_callers_fault_and_disturbs_nobody() -> None:
    probe = EngineProbe(make_core())
    request = probe.add([1, 2], SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="request 1 is in the engine"):
        probe.core.add_request(request, [3], SamplingParams())
    probe.run()
    assert probe.answers[request].token_ids == cold_answer([1, 2], 3)


def test_a_plan_that_breaks_the_rules_is_not_executed() -> None:
    core = make_core(token_budget=4)

    class Greedy(Discipline):
        def plan(self, desk: PlanningDesk) -> None:
            head = desk.waiting.head()
            assert head is not None
            desk.admit(head, desk.memory.look_up(head), len(head.token_ids))
            desk.plan[head] = len(head.token_ids)

    core._scheduler.discipline = Greedy(SchedulerConfig())
    core.add_request(1, [1] * 5, SamplingParams())
    with pytest.raises(PlanError, match="planned 5 tokens; the budget is 4"):
        core.step()


# Aborts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("state", ABORT_STATES)
def test_abort_in_every_state(state: str, prefix_cache: bool) -> None:
    probe = EngineProbe(make_core(max_num_seqs=2, order="priority", prefix_cache=prefix_cache))
    victim = abort_in_state(probe, state)
    answer = probe.answers[victim]
    assert answer.finish_reason == ("length" if state == "finished" else "abort")
    assert sum(1 for event in probe.of(Finished) if event.request_id == victim) == 1
    others = {request_id: other for request_id, other in probe.answers.items() if request_id != victim}
    assert others and all(other.finish_reason == "length" for other in others.values())


def test_a_token_computed_while_the_abort_came_is_dropped() -> None:
    probe = EngineProbe(make_core())
    victim = probe.add([1, 2], SamplingParams(max_tokens=9))
    other = probe.add([3, 4], SamplingParams(max_tokens=3))
    probe.step()
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    runner.during = lambda plan: probe.core.abort(victim)
    result = probe.step()
    runner.during = None
    last = [output for output in result.outputs if output.request_id == victim]
    assert [(output.token_ids, output.finish_reason) for output in last] == [([], "abort")]
    assert probe.answers[victim].token_ids == cold_answer([1, 2], 1)
    probe.run()
    assert probe.answers[other].token_ids == cold_answer([3, 4], 3)
    assert probe.records[-1].totals.output_tokens == 4


def test_an_abort_before_the_first_step_and_of_an_unknown_request() -> None:
    probe = EngineProbe(make_core())
    request = probe.add([1, 2])
    probe.core.abort(request)
    probe.core.abort(99)
    probe.run()
    assert probe.answers[request].finish_reason == "abort" and probe.answers[request].token_ids == []
    assert 99 not in probe.answers


# Book-keeping ---------------------------------------------------------------------------------------------------------


def ticking(step: float = 1.0) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step


def test_the_parts_of_a_step_add_up_to_it_and_outputs_carry_its_end() -> None:
    clock = ticking()
    runner = ScriptedRunner([5] * 4)
    runner.seconds = (0.25, 0.5, 0.125)
    core: EngineCore = make_core(runner=runner, clock=lambda: next(clock))
    core.add_request(1, [1, 2], SamplingParams(max_tokens=2), arrival_time=0.0)
    result = core.step()
    record = result.record
    assert record is not None
    timings = record.timings
    assert (timings.schedule, timings.forward, timings.sample, timings.detokenise) == (2.0, 0.5, 0.125, 1.0)
    assert timings.prepare == 1.0 - 0.5 - 0.125, "what is neither forward nor sampling"
    assert timings.total == 4.0
    assert result.outputs[0].time == record.time + 4.0 == core.keyframe().requests[0].first_token_time


def test_totals_only_rise_and_add_up() -> None:
    probe = EngineProbe(make_core(num_blocks=12, block_size=4, prefix_cache=False))
    for i in range(6):
        probe.add([i] * 9, SamplingParams(max_tokens=12))
    probe.add([], SamplingParams())
    probe.run()
    previous = None
    for record in probe.records:
        values = [getattr(record.totals, name) for name in record.totals.__struct_fields__]
        assert previous is None or all(now >= then for now, then in zip(values, previous, strict=True))
        previous = values
    totals = probe.records[-1].totals
    assert (totals.arrived, totals.finished, totals.rejected) == (7, 7, 1)
    assert (totals.prompt_tokens, totals.output_tokens) == (54, 72) and totals.preemptions > 0
    computed = sum(sum(record.num_tokens) for record in probe.records)
    decodes = (
        72 - 6 - totals.preemptions
    )  # every sample but those at the end of a prefill computes its token's position
    assert computed == totals.prompt_tokens + totals.recomputed_tokens + decodes + totals.preemptions


def test_seeds_depend_on_the_engines_seed_and_the_id_alone() -> None:
    def seeds(engine_seed: int, ids: list[int]) -> dict[int, int]:
        core = make_core()
        core._seed = engine_seed
        found: dict[int, int] = {}

        class Reader(KVCheckingRunner):
            def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
                found.update((request.request_id, request.seed) for request in output.requests)
                return super().execute(output)

        core._runner = Reader(16)
        for request_id in ids:
            core.add_request(request_id, [1], SamplingParams(max_tokens=1, seed=5 if request_id == 3 else None))
        while core.has_work:
            core.step()
        return found

    one = seeds(0, [1, 2, 3])
    assert one == seeds(0, [3, 2, 1]) and one[3] == 5 and one[1] != one[2]
    assert seeds(1, [1])[1] != one[1]
    assert all(0 <= seed < 2**63 for seed in one.values())


def calls_of_a_step(core: EngineCore) -> int:
    """Counted, not timed: what a step does, whatever else the machine does meanwhile."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        core.step()
    finally:
        sys.setprofile(None)
    return count


def test_a_step_costs_the_same_however_many_wait() -> None:
    def calls(waiting: int) -> int:
        core = make_core(num_blocks=600, max_num_seqs=4)
        for request_id in range(1, 5 + waiting):
            core.add_request(request_id, [request_id % 900] * 5, SamplingParams(max_tokens=60), arrival_time=request_id)
        for _ in range(3):
            core.step()
        return calls_of_a_step(core)

    assert calls(2_000) <= calls(1) + 5


def test_a_step_costs_the_same_however_much_is_cached() -> None:
    def calls(cached_requests: int) -> int:
        core = make_core(num_blocks=50_000, block_size=1, token_budget=4_096, runner=ScriptedRunner([5] * 60))
        for request_id in range(1, cached_requests + 1):
            prompt = [(request_id * 7 + i) % 1_000 for i in range(1_000)]
            core.add_request(request_id, prompt, SamplingParams(max_tokens=1))
        while core.has_work:
            core.step()
        assert len(core.keyframe().cached_blocks) == min(1_000 * cached_requests, 50_000)
        core.add_request(10_000, [3] * 20, SamplingParams(max_tokens=50))
        core.step()
        return calls_of_a_step(core)

    # In the full pool the new block is an evicted one: a few calls more, not 50,000.
    assert calls(52) <= calls(1) + 20
