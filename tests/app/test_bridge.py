"""The bridge: one wake-up, one timer, one fold; and what it does when the engine is not there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from app.engine_bridge import EngineBridge
from app.frame_pacer import FramePacer
from engine.client import EngineDied
from engine.config import EngineConfig
from engine.messages import (
    AckFrame,
    AddRequest,
    ChatMessage,
    CompareDone,
    ComparePlan,
    CompareProgress,
    Loading,
    Output,
    Variant,
)
from engine.recording import RunReader
from engine.request import SamplingParams
from engine.run_state import RunState
from engine.workload import EngineOptions, Workload
from tests.app.conftest import active_timers
from tests.app.scripted import ScriptedClient


class Heard:
    """Everything a bridge says, in order."""

    def __init__(self, bridge: EngineBridge) -> None:
        self.said: list[tuple[str, object]] = []
        for name in ("loading", "ready", "load_failed", "died", "outputs", "state_changed", "token_counted"):
            getattr(bridge, name).connect(lambda value, name=name: self.said.append((name, value)))
        bridge.stepped.connect(lambda: self.said.append(("stepped", None)))

    def of(self, name: str) -> list[object]:
        return [value for said, value in self.said if said == name]

    @property
    def tokens(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for outputs in self.of("outputs"):
            for output in outputs:
                found.setdefault(output.request_id, []).extend(output.token_ids)
        return found


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient(num_blocks=16, token_budget=32)


@pytest.fixture
def bridge(qapp, client: ScriptedClient) -> Iterator[EngineBridge]:
    made = EngineBridge(client=client, pacer=FramePacer(cores=64))
    yield made
    made.shutdown()
    assert active_timers(made) == []
    made.deleteLater()


def make_ready(bridge: EngineBridge, client: ScriptedClient, qtbot) -> None:
    bridge.start(EngineConfig())
    client.ready()
    qtbot.waitUntil(lambda: bridge.state == "ready")


def test_a_load_is_told_step_by_step(bridge: EngineBridge, client: ScriptedClient, qtbot) -> None:
    heard = Heard(bridge)
    bridge.start(EngineConfig())
    client.loading("Reading weights", 3, 10)
    qtbot.waitUntil(lambda: bool(heard.of("loading")))
    client.ready()
    qtbot.waitUntil(lambda: bridge.state == "ready")
    assert heard.of("state_changed") == ["starting", "loading", "ready"]
    assert heard.of("loading") == [Loading("Reading weights", 3, 10)]
    assert bridge.info is not None and bridge.info.num_blocks == 16
    assert bridge.run_state.num_blocks == 16


def test_tokens_come_whole_and_the_fold_is_the_engines_own_state(bridge, client, qtbot) -> None:
    heard = Heard(bridge)
    make_ready(bridge, client, qtbot)
    core = client.core
    wanted = {bridge.add_request(params=SamplingParams(max_tokens=n), prompt_tokens=30): n for n in (50, 80, 90, 60)}
    while client.step():
        qtbot.wait(1)
    qtbot.waitUntil(lambda: bridge.run_state.totals.finished == 4)
    assert {request_id: len(tokens) for request_id, tokens in heard.tokens.items()} == wanted
    assert bridge.run_state.totals.preemptions > 0
    engine = RunState()
    engine.restore(core.keyframe())
    assert bridge.run_state.keyframe() == engine.keyframe()
    assert bridge.run_state.keyframe().totals == core.keyframe().totals
    frames = [command.number for command in client.sent if isinstance(command, AckFrame)]
    assert frames == list(range(1, len(frames) + 1))


def test_many_arrivals_are_one_frame(bridge, client, qtbot) -> None:
    make_ready(bridge, client, qtbot)
    heard = Heard(bridge)
    for number in range(200):
        client.deliver(Output(1, 0.0, [number]))
    qtbot.waitUntil(lambda: bool(heard.of("outputs")))
    assert heard.tokens == {1: list(range(200))}
    assert len(heard.of("outputs")) == 1


def test_nothing_runs_while_nothing_arrives(bridge, client, qtbot, monkeypatch) -> None:
    make_ready(bridge, client, qtbot)
    polls: list[float] = []
    poll = client.poll
    monkeypatch.setattr(client, "poll", lambda *a: polls.append(time.monotonic()) or poll(*a))
    qtbot.wait(250)
    assert polls == []
    assert active_timers(bridge) == []


def test_a_slow_window_misses_frames_but_no_count(bridge, client, qtbot) -> None:
    client.num_blocks = 100
    make_ready(bridge, client, qtbot)
    for _ in range(2):
        bridge.add_request(params=SamplingParams(max_tokens=600), prompt_tokens=8)
    assert client.step(700) >= 600  # the window has not turned its loop once
    qtbot.waitUntil(lambda: bridge.run_state.totals.finished == 2)
    assert bridge.run_state.totals.output_tokens == 1200
    assert bridge.run_state.missed_steps > 0
    assert bridge.run_state.requests == {}


def test_without_an_engine_a_request_is_answered_with_the_reason(bridge, client, qtbot) -> None:
    heard = Heard(bridge)
    request = bridge.add_request(params=SamplingParams(), prompt="hello")
    qtbot.waitUntil(lambda: bool(heard.of("outputs")))
    [[output]] = heard.of("outputs")
    assert (output.request_id, output.finish_reason) == (request, "error")
    assert "not ready" in output.error
    assert not any(isinstance(command, AddRequest) for command in client.sent)


def test_a_death_is_told_with_its_reason_and_a_restart_begins_anew(bridge, client, qtbot) -> None:
    heard = Heard(bridge)
    make_ready(bridge, client, qtbot)
    first = bridge.add_request(params=SamplingParams(max_tokens=50), prompt_tokens=20)
    client.step(5)
    client.die("The engine was ended by SIGKILL.", ("Traceback", "Killed"))
    qtbot.waitUntil(lambda: bridge.state == "dead")
    assert heard.of("died") == [EngineDied(-9, "The engine was ended by SIGKILL.", ("Traceback", "Killed"))]
    assert len(heard.tokens[first]) > 0  # what had come before the death is kept
    bridge.restart()
    client.ready()
    qtbot.waitUntil(lambda: bridge.state == "ready")
    assert client.loaded == [bridge.config] * 2
    assert bridge.run_state.step == 0 and bridge.run_state.requests == {}
    assert bridge.add_request(params=SamplingParams(), prompt_tokens=3) > first


def test_nothing_is_said_after_a_shutdown(bridge, client, qtbot) -> None:
    make_ready(bridge, client, qtbot)
    bridge.add_request(params=SamplingParams(max_tokens=50), prompt_tokens=20)
    client.step(3)
    heard = Heard(bridge)
    bridge.shutdown()
    qtbot.wait(60)
    assert heard.said == [("state_changed", "stopped")]


def test_a_slot_that_restarts_the_engine_ends_the_frame(bridge, client, qtbot) -> None:
    heard = Heard(bridge)
    make_ready(bridge, client, qtbot)
    bridge.died.connect(lambda _: bridge.restart())
    client.die("gone")
    client.deliver(Output(9, 0.0, [1]))  # of the engine that is gone
    qtbot.waitUntil(lambda: len(client.loaded) == 2)
    qtbot.wait(40)
    assert 9 not in heard.tokens


def test_counting_tokens(bridge, client, qtbot) -> None:
    heard = Heard(bridge)
    make_ready(bridge, client, qtbot)
    query = bridge.count_tokens([ChatMessage("user", "x" * 40)])
    qtbot.waitUntil(lambda: bool(heard.of("token_counted")))
    [answer] = heard.of("token_counted")
    assert (answer.query_id, answer.tokens) == (query, 18)


def test_frames_come_slower_where_they_cost_tokens() -> None:
    assert FramePacer(cores=2).interval(busy_on_cpu=False) == pytest.approx(1 / 30)
    assert 1 / 15 <= FramePacer(cores=2).interval(busy_on_cpu=True) <= 1 / 10
    assert FramePacer(cores=32).interval(busy_on_cpu=True) == pytest.approx(1 / 30)
    dear = FramePacer(cores=32)
    for _ in range(50):
        dear.note_cost(0.02)
    assert dear.interval(busy_on_cpu=False) == pytest.approx(0.16, rel=0.01)
    for _ in range(50):
        dear.note_cost(5.0)
    assert dear.interval(busy_on_cpu=True) <= 0.25


# With a real process -------------------------------------------------------------------------------------------------


@pytest.fixture
def real_bridge(qapp) -> Iterator[EngineBridge]:
    made = EngineBridge()
    yield made
    made.shutdown()
    made.deleteLater()


def test_kill_9_is_known_within_a_second(real_bridge: EngineBridge, qtbot) -> None:
    heard = Heard(real_bridge)
    real_bridge.start(EngineConfig(model="/nowhere/at/all"))
    qtbot.waitUntil(lambda: real_bridge.state == "loading", timeout=20_000)
    os.kill(real_bridge.engine_pid, signal.SIGKILL)
    killed = time.monotonic()
    qtbot.waitUntil(lambda: real_bridge.state == "dead", timeout=5_000)
    assert time.monotonic() - killed < 1.0
    [death] = heard.of("died")
    assert death.exit_code == -signal.SIGKILL and "SIGKILL" in death.reason


def test_a_shutdown_in_the_middle_of_loading_is_short(real_bridge: EngineBridge, qtbot) -> None:
    real_bridge.start(EngineConfig(model="/nowhere/at/all"))
    qtbot.waitUntil(lambda: real_bridge.state == "loading", timeout=20_000)
    begun = time.monotonic()
    real_bridge.shutdown()
    assert time.monotonic() - begun < 5.0
    assert real_bridge.state == "stopped" and real_bridge.engine_pid is None


def test_a_load_that_fails_is_no_death(real_bridge: EngineBridge, qtbot) -> None:
    heard = Heard(real_bridge)
    real_bridge.start(EngineConfig(model="/nowhere/at/all"))
    qtbot.waitUntil(lambda: real_bridge.state == "failed", timeout=60_000)
    qtbot.wait(200)
    [failure] = heard.of("load_failed")
    assert "/nowhere/at/all" in failure.message
    assert heard.of("died") == []


def test_ends_that_are_hurried_do_not_wait_for_their_frame(bridge, client, qtbot, monkeypatch) -> None:
    make_ready(bridge, client, qtbot)
    heard = Heard(bridge)
    monkeypatch.setattr(bridge.pacer, "interval", lambda **_: 0.5)
    bridge.hurry_ends(True)
    requests = [bridge.add_request(params=SamplingParams(max_tokens=n), prompt_tokens=9) for n in (2, 8)]
    qtbot.wait(1)
    begun = time.perf_counter()
    client.step(4)
    qtbot.waitUntil(lambda: bool(heard.of("outputs")), timeout=400)
    assert time.perf_counter() - begun < 0.4
    assert {request: len(heard.tokens[request]) for request in requests} == {requests[0]: 2, requests[1]: 4}
    assert heard.of("stepped") == [], "nothing is drawn for it"
    qtbot.waitUntil(lambda: bridge.run_state.step == 4)
    bridge.hurry_ends(False)
    client.step(4)
    qtbot.wait(50)
    assert len(heard.tokens[requests[1]]) == 4
    qtbot.waitUntil(lambda: len(heard.tokens[requests[1]]) == 8)


# Pausing, comparing, recording ---------------------------------------------------------------------------------------


def small_plan() -> ComparePlan:
    variants = [Variant("vllm", EngineOptions())]
    return ComparePlan("t", "", EngineOptions(), variants, "vllm", [Workload("w", [])], [None])


def test_a_pause_is_told_once_the_engine_confirms_it(bridge, client, qtbot) -> None:
    make_ready(bridge, client, qtbot)
    told: list[bool] = []
    bridge.paced.connect(told.append)
    bridge.set_paused(True)
    assert not bridge.paused and told == []
    qtbot.waitUntil(lambda: bridge.paused)
    bridge.set_paused(True)
    request = bridge.add_request(params=SamplingParams(max_tokens=4), prompt_tokens=10, priority=3)
    qtbot.waitUntil(lambda: request in bridge.run_state.requests)
    bridge.set_priority(request, 1)
    qtbot.waitUntil(lambda: bridge.run_state.requests[request].priority == 1)
    assert client.step() == 0 and bridge.run_state.totals.steps == 0
    bridge.step_once()
    qtbot.waitUntil(lambda: bridge.run_state.totals.steps == 1)
    bridge.set_paused(False)
    qtbot.waitUntil(lambda: not bridge.paused)
    assert told == [True, False]
    assert client.step() == 1


def test_nothing_runs_while_the_engine_pauses(bridge, client, qtbot) -> None:
    make_ready(bridge, client, qtbot)
    bridge.add_request(params=SamplingParams(max_tokens=40), prompt_tokens=10)
    client.step(3)
    bridge.set_paused(True)
    qtbot.waitUntil(lambda: bridge.paused)
    qtbot.wait(120)
    frames: list[None] = []
    bridge.stepped.connect(lambda: frames.append(None))
    qtbot.wait(120)
    assert frames == [] and active_timers(bridge) == []


def test_a_pause_ends_with_the_engine(bridge, client, qtbot) -> None:
    make_ready(bridge, client, qtbot)
    told: list[bool] = []
    bridge.paced.connect(told.append)
    for end in (lambda: client.die("gone"), bridge.restart):
        bridge.set_paused(True)
        qtbot.waitUntil(lambda: bridge.paused)
        end()
        qtbot.waitUntil(lambda: not bridge.paused)
        bridge.start(EngineConfig())
        client.ready()
        qtbot.waitUntil(lambda: bridge.state == "ready")
    assert told == [True, False, True, False]


def test_a_comparison_is_followed_and_who_comes_meanwhile_is_answered_after_it(bridge, client, qtbot) -> None:
    make_ready(bridge, client, qtbot)
    heard = Heard(bridge)
    done: list[CompareDone] = []
    bridge.compare_done.connect(done.append)
    running = bridge.add_request(params=SamplingParams(max_tokens=4), prompt_tokens=10)
    bridge.compare(small_plan())
    qtbot.waitUntil(lambda: bridge.comparing)
    later = bridge.add_request(params=SamplingParams(max_tokens=4), prompt_tokens=10)
    client.run_comparison(CompareProgress(0, 1, "vllm", None, 1, 2))
    qtbot.waitUntil(lambda: len(heard.tokens.get(running, [])) == 4)
    assert later not in heard.tokens and client.step() == 0
    client.end_comparison(b"{}")
    qtbot.waitUntil(lambda: not bridge.comparing)
    assert done == [CompareDone(b"{}")] and bridge.run_state.step == 0
    client.step(5)
    qtbot.waitUntil(lambda: len(heard.tokens.get(later, [])) == 4)


def test_every_comparison_that_is_asked_for_is_told_to_be_over(bridge, client, qtbot) -> None:
    done: list[CompareDone] = []
    bridge.compare_done.connect(done.append)
    bridge.compare(small_plan())
    qtbot.waitUntil(lambda: len(done) == 1)
    assert "not ready (stopped)" in done[0].error
    make_ready(bridge, client, qtbot)
    bridge.compare(small_plan())
    qtbot.waitUntil(lambda: bridge.comparing)
    client.die("The engine was ended by SIGKILL.")
    qtbot.waitUntil(lambda: len(done) == 2)
    assert "SIGKILL" in done[1].error and not bridge.comparing
    make_ready(bridge, client, qtbot)
    bridge.compare(small_plan())
    bridge.restart()
    assert len(done) == 3 and done[2].result == b"" and not bridge.comparing
    client.ready()
    qtbot.waitUntil(lambda: bridge.state == "ready")
    bridge.restart()
    assert len(done) == 3


def test_a_run_is_recorded_and_a_failure_is_told(bridge, client, qtbot, tmp_path) -> None:
    make_ready(bridge, client, qtbot)
    told: list[str] = []
    bridge.recording_failed.connect(told.append)
    path = tmp_path / "run.batchscope"
    bridge.record(str(path), 2**22)
    bridge.add_request(params=SamplingParams(max_tokens=9), prompt_tokens=10)
    client.step(9)
    qtbot.waitUntil(lambda: bridge.run_state.totals.finished == 1)
    reader = RunReader(path)
    assert reader.state_at(reader.last_step).keyframe() == bridge.run_state.keyframe()
    reader.close()
    bridge.record(str(tmp_path), 2**22)
    qtbot.waitUntil(lambda: len(told) == 1)
