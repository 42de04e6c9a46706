"""Pausing, steps, priorities, run files and comparisons over the real pipes, on the tiny model."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.client import EngineClient
from engine.events import Reprioritised
from engine.messages import (
    Abort,
    CancelCompare,
    Compare,
    CompareDone,
    ComparePlan,
    CompareProgress,
    Output,
    Paced,
    Ready,
    Record,
    RecordingFailed,
    SetPace,
    SetPriority,
    StepOnce,
    Variant,
)
from engine.recording import RunReader
from engine.run_state import RunState
from engine.workload import EngineOptions, Workload, WorkloadRequest
from tests.process.helpers import Listener, is_running, wait_until
from tests.process.test_real_engine import ask, config_for, greedy
from tests.process.tiny_model import make_tiny_model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups")


class Follower(Listener):
    """A listener with the run state that a window would have."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client)
        self.ready: Ready = self.wait_ready()
        self.state = RunState()
        self.state.restore(self.ready.keyframe)
        self._folded = 0

    def forget(self) -> None:
        """End what runs, and forget what was seen."""
        self.pause(False)
        for request_id in self.settle(0.05).requests:
            self.client.send(Abort(request_id))
        while self.settle(0.05).requests:
            pass
        self.seen, self._folded = [], 0

    def fold(self) -> RunState:
        frames = self.frames()
        for frame in frames[self._folded :]:
            if frame.keyframe is not None:
                self.state.restore(frame.keyframe)
            for record in frame.records:
                self.state.apply(record)
        self._folded = len(frames)
        return self.state

    def pause(self, paused: bool) -> None:
        self.client.send(SetPace(paused))
        assert self.wait_for(Paced).paused is paused

    def settle(self, seconds: float = 0.3) -> RunState:
        """The state once nothing more comes."""
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < seconds:
            if self.take(0.05):
                quiet_since = time.monotonic()
        return self.fold()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Follower]:
    yield from started(model)


@pytest.fixture
def engine(shared: Follower) -> Iterator[Follower]:
    """One engine for the tests that leave it alive."""
    yield shared
    shared.forget()


@pytest.fixture
def own(model: Path) -> Iterator[Follower]:
    yield from started(model)


def started(model: Path) -> Iterator[Follower]:
    with EngineClient() as client:
        client.start()
        client.load(config_for(model, max_num_seqs=1, order="priority"))
        yield Follower(client)


def test_it_pauses_steps_and_runs_on(engine: Follower) -> None:
    engine.pause(True)
    before = engine.fold().totals.steps
    first = ask(engine, greedy(5), prompt="hello")
    state = engine.settle()
    assert list(state.requests) == [first] and state.num_waiting == 1, "what waits is seen while it pauses"
    assert state.totals.steps == before and engine.outputs(first) == []
    for steps in (1, 2):
        engine.client.send(StepOnce())
        engine.wait(lambda arrival: isinstance(arrival, Output) and arrival.request_id == first)
        assert engine.settle(0.1).totals.steps == before + steps and len(engine.token_ids(first)) == steps
    engine.pause(False)
    assert engine.wait_finished(first).finish_reason == "length"
    assert len(engine.token_ids(first)) == 5


def test_a_step_with_nothing_to_do_is_not_kept_for_later(engine: Follower) -> None:
    engine.client.send(StepOnce())  # it does not pause
    engine.pause(True)
    before = engine.fold().totals.steps
    for _ in range(3):
        engine.client.send(StepOnce())
    ask(engine, greedy(5), prompt="hello")
    assert engine.settle().totals.steps == before


def test_an_abort_does_not_wait_for_the_pause_to_end(engine: Follower) -> None:
    running = ask(engine, greedy(400), prompt="hello")
    engine.wait_for(Output)
    engine.pause(True)
    waiting = ask(engine, greedy(5, n=2), prompt="hello")
    for request_id in (running, waiting):
        engine.client.send(Abort(request_id))
        assert engine.wait_finished(request_id).finish_reason == "abort"
    assert engine.settle(0.1).requests == {}
    assert sum(output.finish_reason == "abort" for output in engine.outputs(waiting)) == 2


def test_an_engine_that_pauses_uses_no_processor(engine: Follower) -> None:
    import psutil

    ask(engine, greedy(400), prompt="hello")
    engine.pause(True)
    engine.settle(0.1)
    process = psutil.Process(engine.client.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(0.5)
    assert sum(process.cpu_times()[:2]) - before < 0.1


def test_priorities_count_from_the_next_step_on(engine: Follower) -> None:
    engine.pause(True)
    ids = [ask(engine, greedy(3), prompt="hello", priority=5) for _ in range(3)]
    engine.client.send(SetPriority(ids[2], 1))
    engine.client.send(SetPriority(999, 1))
    state = engine.settle()
    assert [state.requests[request].priority for request in ids] == [5, 5, 1]
    events = [event for frame in engine.frames() for record in frame.records for event in record.events]
    assert [event for event in events if isinstance(event, Reprioritised)] == [Reprioritised(ids[2], 1)]
    engine.pause(False)
    for request in ids:
        engine.wait_finished(request)
    ends = [output.request_id for output in engine.seen if isinstance(output, Output) and output.finish_reason]
    assert ends == [ids[2], ids[0], ids[1]]


def test_it_ends_while_it_pauses(own: Follower) -> None:
    ask(own, greedy(400), prompt="hello")
    own.pause(True)
    begun = time.monotonic()
    assert own.client.close() == 0
    assert time.monotonic() - begun < 2


def test_a_window_that_vanishes_while_it_pauses_takes_the_engine_with_it(own: Follower) -> None:
    ask(own, greedy(400), prompt="hello")
    own.pause(True)
    pid, process = own.client.pid, own.client._process
    assert pid is not None and process is not None
    os.close(process.stdin.fileno())
    assert wait_until(lambda: not is_running(pid), 5)


def test_a_run_is_written_step_by_step_and_ends_where_it_is_told(engine: Follower, tmp_path: Path) -> None:
    path = tmp_path / "run.batchscope"
    engine.client.send(Record(str(path), 2**22, texts=True))
    request = ask(engine, greedy(8), prompt="hello")
    engine.wait_finished(request)
    state = engine.settle(0.8)
    reader = RunReader(path)
    assert reader.last_step == state.step and reader.truncated, "it goes on"
    assert reader.header.config is not None and reader.header.config.scheduler.order == "priority"
    assert reader.header.info == engine.ready.info
    assert reader.state_at(state.step).keyframe() == state.keyframe()
    texts = [(text.request_id, text.role, text.text) for _, text in reader.texts()]
    assert texts[0] == (request, "prompt", "hello")
    assert "".join(text for _, role, text in texts if role == "assistant") == engine.text(request)
    engine.client.send(Record("", 0))
    engine.wait_finished(ask(engine, greedy(8), prompt="hello"))
    reader.refresh()
    assert reader.last_step == state.step and not reader.truncated
    reader.close()


def test_a_run_file_that_cannot_be_written_is_told_and_costs_nothing_else(engine: Follower, tmp_path: Path) -> None:
    nowhere, none = str(tmp_path / "no" / "such" / "folder.batchscope"), "no\0path"
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path in (nowhere, str(tmp_path), none, str(tmp_path / "circle"), "x" * 300):
        engine.client.send(Record(path, 2**22))
        assert repr(path)[1:-1] in engine.wait_for(RecordingFailed).message
    assert engine.wait_finished(ask(engine, greedy(3), prompt="hello")).finish_reason == "length"


# Comparisons ---------------------------------------------------------------------------------------------------------


def plan_of(requests: int = 4, output: int = 6, **fields: object) -> ComparePlan:
    workload = Workload("small", [WorkloadRequest(output_tokens=output, prompt_tokens=12) for _ in range(requests)])
    plan = ComparePlan(
        title="small",
        watch="",
        options=EngineOptions(max_num_seqs=2),
        variants=[Variant(name, EngineOptions(discipline=name)) for name in ("static", "vllm")],
        baseline="static",
        workloads=[workload],
        seeds=[1],
        warm_up=0,
    )
    return msgspec.structs.replace(plan, **fields)


def test_a_comparison_waits_for_who_runs_and_holds_back_who_comes(engine: Follower) -> None:
    running = ask(engine, greedy(60), prompt="hello")
    engine.wait_for(Output)
    engine.pause(True)
    engine.client.send(Compare(plan_of()))
    assert engine.wait_for(Paced).paused is False, "a pause would keep it from beginning"
    held, given_up = ask(engine, greedy(3), prompt="hello"), ask(engine, greedy(3, n=2), prompt="hello")
    engine.client.send(SetPriority(held, 7))
    engine.client.send(Abort(given_up))
    engine.client.send(SetPace(True))
    done = engine.wait_for(CompareDone)
    result = json.loads(done.result)
    assert done.error == "" and [run["variant"] for run in result["runs"]] == ["static", "vllm"]
    assert all(run["completed"] == 4 for run in result["runs"])
    told = [seen.run for seen in engine.seen if isinstance(seen, CompareProgress)]
    assert list(dict.fromkeys(told)) == [-1, 0, 1]
    assert [seen.paused for seen in engine.seen if isinstance(seen, Paced)] == [True, False, False]
    assert engine.wait_finished(held).finish_reason == "length"
    ends = {output.request_id: engine.seen.index(output) for output in lasts(engine)}
    assert ends[running] < engine.seen.index(done) < ends[held] and ends[given_up] < engine.seen.index(done)
    assert [output.finish_reason for output in engine.outputs(given_up)] == ["abort", "abort"]
    state = engine.settle()
    assert state.scheduler is not None and state.scheduler.order == "priority" and state.max_num_seqs == 1
    assert [request.priority for request in state.finished] == [7], "the fresh core has seen nothing else"


def lasts(engine: Follower) -> list[Output]:
    return [seen for seen in engine.seen if isinstance(seen, Output) and seen.finish_reason]


def test_a_comparison_is_cancelled_before_and_while_it_runs(engine: Follower) -> None:
    running = ask(engine, greedy(300), prompt="hello")
    engine.wait_for(Output)
    engine.client.send(Compare(plan_of()))
    engine.client.send(CancelCompare())
    done = engine.wait_for(CompareDone)
    assert done.result == b"" and "cancelled" in done.error and engine.outputs(running)
    engine.client.send(Abort(running))
    engine.client.send(Compare(plan_of(requests=50, output=200)))
    engine.wait(lambda arrival: isinstance(arrival, CompareProgress) and arrival.run == 0)
    engine.client.send(CancelCompare())
    assert "ancelled" in engine.wait_for(CompareDone, 10).error
    assert engine.wait_finished(ask(engine, greedy(3), prompt="hello")).finish_reason == "length"
    engine.client.send(CancelCompare())  # too late: nothing
    assert engine.wait_finished(ask(engine, greedy(3), prompt="hello")).finish_reason == "length"


def test_a_comparison_that_cannot_be_sent_or_read_is_over_at_once(engine: Follower) -> None:
    engine.client.send(Compare(plan_of(title="half a pair \ud83d")))
    done = engine.wait_for(CompareDone)
    assert done.result == b"" and "cannot be sent" in done.error
    engine.client.send(Compare(plan_of(warm_up="one")))
    done = engine.wait_for(CompareDone)
    assert done.result == b"" and "cannot be read" in done.error and "warm_up" in done.error


def test_it_ends_in_the_middle_of_a_comparison(own: Follower) -> None:
    own.client.send(Compare(plan_of(requests=50, output=200)))
    own.wait(lambda arrival: isinstance(arrival, CompareProgress) and arrival.run == 0)
    begun = time.monotonic()
    own.client.close()
    assert time.monotonic() - begun < 2
