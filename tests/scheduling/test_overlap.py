"""Steps in flight: overlap changes when tokens are known, never which, and no decision that does not hang on them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec
import pytest

from app.scope.latency import Latency
from engine.config import DISCIPLINES
from engine.core import EngineCore
from engine.events import Finished, Preempted, RowKind, StepTimings, SwappedIn
from engine.recorded_requests import RecordedRequest, RequestLog
from engine.request import PENDING, SamplingParams
from engine.run_state import RunState
from engine.scheduling.plan import SchedulerOutput
from tests.oracles import EngineProbe, KVCheckingRunner, assert_pool_whole, cold_answer, make_core
from tests.scheduling.pairs import name_of
from tests.scheduling.test_every_pair import PAIRWISE, run


def _core(*, overlap: bool, **settings: Any) -> EngineCore:
    return make_core(clock=iter(range(10**9)).__next__, overlap=overlap, **settings)


def _probe(seed: int, *, overlap: bool, **settings: Any) -> EngineProbe:
    """The same crowd for both: lengths, users and priorities of ``seed``, all there from the start."""
    rng = random.Random(seed)
    probe = EngineProbe(_core(overlap=overlap, **settings))
    heads = [[rng.randrange(900) for _ in range(20)] for _ in range(2)]
    for _ in range(14):
        prompt = rng.choice(heads)[: rng.randrange(21)] + [rng.randrange(900) for _ in range(rng.randint(1, 9))]
        params = SamplingParams(max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 2]))
        probe.add(prompt, params, priority=rng.randrange(2), user=rng.choice("ab"))
    probe.run()
    return probe


def _decisions(probe: EngineProbe) -> list[bytes]:
    """The records but for their times; those that tell of nothing but a landing are left out."""
    records = [record for record in probe.records if record.request_ids or record.events]
    nothing = {"step": 0, "time": 0.0, "timings": StepTimings(), "events": [], "in_flight": False, "landed_at": 0.0}
    plain = [msgspec.structs.replace(record, **nothing) for record in records]
    events = [[_timeless(event) for event in record.events] for record in records]
    return [msgspec.json.encode(pair) for pair in zip(plain, events, strict=True)]


def _timeless(event: Any) -> str:
    times = {"waited", "seconds", "time", "arrival_time"}
    fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in times}
    return f"{type(event).__name__} {fields}"


SETTINGS: dict[str, dict[str, Any]] = {
    "tight, recompute": {"num_blocks": 12, "block_size": 4},
    "tight, swap": {"num_blocks": 12, "block_size": 4, "num_host_blocks": 12, "preemption": "swap"},
    "roomy, chunks of 3": {"num_blocks": 64, "block_size": 4, "chunk_size": 3},
    "fair": {"num_blocks": 16, "block_size": 4, "order": "fair"},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_decisions_are_the_same_where_answers_end_by_their_length(discipline: str, settings: str) -> None:
    options = {"discipline": discipline, "max_num_seqs": 5, "token_budget": 16, **SETTINGS[settings]}
    apart, together = (_probe(3, overlap=overlap, **options) for overlap in (False, True))
    assert _decisions(together) == _decisions(apart)
    answers = [{key: answer.token_ids for key, answer in probe.answers.items()} for probe in (apart, together)]
    assert answers[0] == answers[1] and len(answers[0]) >= 14


def test_the_crowd_is_preempted_and_swapped() -> None:
    """Or the test above would prove little."""
    common = {"discipline": "vllm", "max_num_seqs": 5, "token_budget": 16}
    assert _probe(3, overlap=True, **common, **SETTINGS["tight, recompute"]).of(Preempted)
    assert _probe(3, overlap=True, **common, **SETTINGS["tight, swap"]).of(SwappedIn)


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_random_traffic(case: Any) -> None:
    """Aborts in every state, failures, pauses, knobs that change, drafts that come and go
    (:mod:`tests.scheduling.traces`)."""
    run(case, 11, num_requests=25, overlap=True, failures=0.05, pauses=0.1)


def _stopping(overlap: bool, **settings: Any) -> tuple[EngineProbe, list[int]]:
    """Answers of which about every fourth token is a stop token."""
    stops = frozenset(range(0, 1_000, 4))
    probe = EngineProbe(_core(overlap=overlap, eos_token_ids=stops, **settings))
    rng = random.Random(5)
    ids = [
        probe.add([rng.randrange(900) for _ in range(rng.randint(1, 12))], SamplingParams(max_tokens=9))
        for _ in range(24)
    ]
    probe.run()
    return probe, ids


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_stop_token_is_seen_a_step_late_and_changes_no_answer(discipline: str) -> None:
    options = {"discipline": discipline, "num_blocks": 12, "block_size": 4, "max_num_seqs": 4, "token_budget": 12}
    apart, ids = _stopping(False, **options)
    together, _ = _stopping(True, **options)
    reasons = set()
    for request_id in ids:
        one, other = apart.answers[request_id], together.answers[request_id]
        assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
        reasons.add(str(one.finish_reason))
    assert reasons == {"stop", "length"}
    assert _idle_decodes(apart) == 0 < _idle_decodes(together) <= len(ids)


def _idle_decodes(probe: EngineProbe) -> int:
    """Rows that decoded for an answer that was over."""
    return sum(
        kind == RowKind.DECODE and not given
        for record in probe.records
        for kind, given in zip(record.kinds, record.new_tokens, strict=True)
    )


def test_nothing_is_known_before_it_arrives() -> None:
    """The first step hands out nothing; its token comes with the second, whose own is pending then."""
    core = _core(overlap=True)
    core.add_request(1, [1, 2, 3], SamplingParams(max_tokens=3))
    request = core._roster.requests[1]
    first, second = core.step(), core.step()
    assert first.outputs == [] and first.record is not None and first.record.new_tokens == [1]
    expected = cold_answer([1, 2, 3], 3)
    assert [output.token_ids for output in second.outputs] == [expected[:1]]
    assert request.token_ids == [1, 2, 3, expected[0], PENDING]
    third = core.step()
    assert isinstance(third.record and third.record.events[-1], Finished), "its length is known, its last token is not"
    assert core.has_work and core.num_requests == 1
    last = core.step()
    assert last.record is not None and last.record.request_ids == [] == last.record.events and not core.has_work
    assert [output.finish_reason for output in last.outputs] == ["length"]


@pytest.mark.parametrize("steps", range(5))
def test_an_abort_with_a_token_under_way(steps: int) -> None:
    """Nothing comes but the output that ends it, whatever was in flight; also where only the last token was missing."""
    probe = EngineProbe(_core(overlap=True, num_blocks=8, block_size=4))
    victim, other = probe.add([1, 2, 3], SamplingParams(max_tokens=4)), probe.add([4, 5], SamplingParams(max_tokens=6))
    for _ in range(steps):
        probe.step()
    before = len(probe.answers[victim].token_ids)
    probe.core.abort(victim)
    probe.run()
    answer = probe.answers[victim]
    assert answer.finish_reason == "abort" and len(answer.token_ids) == before
    assert probe.answers[other].token_ids == cold_answer([4, 5], 6)
    assert probe.records[-1].totals.output_tokens == before + 6


def test_who_pauses_sees_everything() -> None:
    probe = EngineProbe(_core(overlap=True))
    request_id = probe.add([1, 2, 3], SamplingParams(max_tokens=3))
    probe.step()
    assert probe.core.has_notes
    probe.take_in()
    assert len(probe.answers[request_id].token_ids) == 1 and not probe.core.has_notes
    result = probe.core.step(overlap=False)
    assert [len(output.token_ids) for output in result.outputs] == [1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_records_tell_when_clients_got_tokens_and_ends(discipline: str, seed: int) -> None:
    """Also of answers of one token, which have left when it arrives, and of those that a stop token ends."""
    stops = frozenset(range(0, 1_000, 4))
    core = _core(overlap=True, eos_token_ids=stops, discipline=discipline, num_blocks=24, block_size=4, max_num_seqs=4)
    state, gone, latency, rng = RunState(), list[RecordedRequest](), Latency(), random.Random(seed)
    log, midway = RequestLog(gone.append), list[RecordedRequest]()
    folds: list[Any] = [state, log, latency]
    for fold in folds:
        fold.restore(core.keyframe())
    for i in range(1, 25):
        core.add_request(
            i, [rng.randrange(900) for _ in range(rng.randint(1, 12))], SamplingParams(max_tokens=i % 7 + 1)
        )
    got: dict[int, list[float]] = {i: [] for i in range(1, 25)}
    ended = {}
    while core.has_work:
        result = core.step(overlap=rng.random() < 0.9)
        for output in result.outputs:
            got[output.request_id] += [output.time] * len(output.token_ids)
            if output.finish_reason is not None:
                ended[output.request_id] = output.time
        for fold in folds if result.record is not None else ():
            fold.apply(result.record)
        if rng.random() < 0.2:  # begin there, whatever is in flight
            folds.append(RequestLog(midway.append))
            folds[-1].restore(core.keyframe())
    assert {request.request_id: request.token_times for request in gone} == got
    assert {request.request_id: request.finished for request in gone} == ended
    assert {request.request_id: request.finished_time for request in state.finished} == ended
    ttft, e2el = (samples.between(-1, 10**9) for samples in (latency.ttft, latency.e2el))
    arrivals = {request.request_id: request.arrival for request in gone}
    assert sorted(e2el.values) == sorted(ended[i] - arrivals[i] for i in ended)
    if discipline != "static":  # where tokens are made before their batch is handed out
        assert {request.request_id: request.first_token_time for request in state.finished} == {
            i: times[0] for i, times in got.items()
        }
        assert {(r.request_id, r.first_token, r.finished, r.output_tokens) for r in midway} <= {
            (i, times[0], ended[i], len(times)) for i, times in got.items()
        }
        assert any(request.earlier_tokens for request in midway)
        assert sorted(ttft.values) == sorted(times[0] - arrivals[i] for i, times in got.items())


class _Watching(KVCheckingRunner):
    """Says which steps were launched while another was in flight."""

    def __init__(self) -> None:
        super().__init__(4)
        self.in_flight = 0
        self.most = 0

    def launch(self, output: SchedulerOutput) -> Any:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return super().launch(output)

    def collect(self, flight: Any) -> Any:
        self.in_flight -= 1
        return super().collect(flight)


@pytest.mark.parametrize(
    ("params", "most"),
    [({}, 2), ({"temperature": 1.0, "seed": 1}, 2), ({"presence_penalty": 0.5}, 1), ({"repetition_penalty": 1.1}, 1)],
)
def test_penalties_wait_for_the_tokens_that_they_count(params: dict[str, Any], most: int) -> None:
    runner = _Watching()
    core = _core(overlap=True, runner=runner, block_size=4)
    core.add_request(1, [1, 2, 3], dataclasses.replace(SamplingParams(max_tokens=6), **params))
    while core.has_work:
        core.step()
    assert runner.most == most and runner.in_flight == 0
    assert_pool_whole(core)


def test_a_batch_that_an_abort_ends_keeps_its_last_tokens() -> None:
    """One row has ended with its last token under way, the other is aborted: the batch leaves before the token came."""
    probe = EngineProbe(_core(overlap=True, discipline="static", num_blocks=16, block_size=4))
    short, long = probe.add([1, 2, 3], SamplingParams(max_tokens=1)), probe.add([4, 5], SamplingParams(max_tokens=9))
    probe.step()
    probe.core.abort(long)
    probe.run()
    assert probe.answers[short].token_ids == cold_answer([1, 2, 3], 1)
    assert [probe.answers[request_id].finish_reason for request_id in (short, long)] == ["length", "abort"]


def test_a_last_token_that_fails_is_taken_off_the_totals() -> None:
    """Its request has left by then, and nothing else is to be told: there is a record all the same."""
    probe = EngineProbe(_core(overlap=True, num_blocks=16, block_size=4))
    failed = probe.add([1, 2, 3], SamplingParams(max_tokens=1))
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    runner.failures[failed] = "not finite"
    probe.step()
    assert probe.records[-1].totals.output_tokens == 1, "it is under way"
    last = probe.step().record
    assert last is not None and last.request_ids == [] and last.totals.output_tokens == 0
    assert probe.answers[failed].finish_reason == "error" and not probe.core.has_work


def test_a_row_that_ended_and_failed_leaves_its_batch() -> None:
    core = _core(overlap=True, discipline="static", num_blocks=16, block_size=4)
    probe = EngineProbe(core)
    failed, other = probe.add([1, 2, 3], SamplingParams(max_tokens=1)), probe.add([4, 5], SamplingParams(max_tokens=4))
    runner = core._runner
    assert isinstance(runner, KVCheckingRunner)
    runner.failures[failed] = "not finite"
    probe.run()
    assert probe.answers[failed].finish_reason == "error" and probe.answers[failed].token_ids == []
    assert probe.answers[other].token_ids == cold_answer([4, 5], 4)
