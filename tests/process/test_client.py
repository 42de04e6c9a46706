"""The life of an engine process: its faults are reported in words, its end leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from engine.client import EngineClient, EngineDied
from engine.config import EngineConfig
from engine.environment import PACKAGE_ROOT, module_environment
from engine.events import RunTotals
from engine.messages import (
    MAX_FRAME_RECORDS,
    Abort,
    AckFrame,
    AddRequest,
    ChatMessage,
    CountTokens,
    Frame,
    Hello,
    LoadFailed,
    Loading,
    Output,
    TokenCount,
)
from engine.request import SamplingParams
from tests.process.helpers import FAKE_ENGINE, Listener, fake_client, is_running, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    """A client of the fake engine in the mode that the test's parameter names."""
    client = fake_client(getattr(request, "param", "plain"))
    yield Listener(client)
    pid = client.pid
    client.close()
    assert pid is None or not is_running(pid)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("engine-")]
    assert not psutil.Process().children(recursive=True)


def test_hello_comes_first_then_the_stages_then_ready(listener: Listener) -> None:
    ready = listener.wait_ready()
    kinds = [type(arrival) for arrival in listener.seen]
    assert kinds[0] is Hello
    assert Loading in kinds
    assert listener.seen[0].pid == listener.client.pid
    assert ready.info.name == "counting"


def test_tokens_come_all_and_in_order_although_libraries_print(listener: Listener) -> None:
    for request_id in (1, 2, 3):
        listener.client.send(AddRequest(request_id, params(50), prompt="abc"))
    for request_id in (1, 2, 3):
        listener.wait_finished(request_id)
        assert listener.token_ids(request_id) == list(range(1, 51))
        assert listener.text(request_id) == "".join(f"{n} " for n in range(1, 51))


def test_a_client_that_takes_no_frames_loses_no_token_and_slows_nothing(listener: Listener) -> None:
    listener.acknowledges = False
    steps = MAX_FRAME_RECORDS * 4
    listener.client.send(AddRequest(1, params(steps), prompt="a"))
    listener.wait_finished(1)
    assert listener.token_ids(1) == list(range(1, steps + 1))
    (only,) = listener.frames()
    # The engine idles now; what it kept back comes with the acknowledgement, with every count right.
    listener.client.send(AckFrame(only.number))
    late = listener.wait_for(Frame)
    assert late.keyframe is not None
    assert late.records == []
    assert late.keyframe.totals == RunTotals(steps=steps, arrived=1, finished=1, output_tokens=steps)


def test_an_idle_engine_still_delivers_its_last_records(listener: Listener) -> None:
    listener.acknowledges = False
    listener.client.send(AddRequest(1, params(20), prompt="a"))
    listener.wait_finished(1)
    first = listener.frames()[0]
    listener.client.send(AckFrame(first.number))
    rest = listener.wait_for(Frame)
    assert [r.step for frame in (first, rest) for r in frame.records] == list(range(1, 21))


def test_an_idle_engine_burns_no_processor(listener: Listener) -> None:
    listener.wait_ready()
    assert listener.client.pid is not None
    engine = psutil.Process(listener.client.pid)
    before = sum(engine.cpu_times()[:2])
    time.sleep(0.5)
    assert sum(engine.cpu_times()[:2]) - before <= 0.05


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": " \n\t "}, "prompt is empty"),
        ({"messages": []}, "messages hold no text"),
        ({"messages": [ChatMessage("user", "  ")]}, "messages hold no text"),
        ({"messages": [ChatMessage("system", "be kind")]}, "no place for a system message"),
        ({"messages": [ChatMessage("user", "template bug")]}, "ZeroDivisionError: in the template"),
        ({}, "none of them"),
        ({"prompt": "a", "prompt_tokens": 3}, "prompt and prompt_tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"prompt_tokens": -4}, "prompt_tokens is -4"),
        ({"prompt_tokens": 10**15}, "prompt_tokens is 1,000,000,000,000,000; the model's context holds 1,000"),
        ({"prompt_token_ids": [2**70]}, "cannot be sent"),
        ({"prompt": "half a pair \ud83d"}, "cannot be sent"),
    ],
)
def test_a_bad_request_is_refused_alone(listener: Listener, fields: dict[str, object], words: str) -> None:
    listener.client.send(AddRequest(1, params(30), prompt="a good neighbour"))
    listener.client.send(AddRequest(2, params(5), **fields))  # type: ignore[arg-type]
    refusal = listener.wait_finished(2)
    assert refusal.finish_reason == "error"
    assert words in refusal.error
    listener.wait_finished(1)
    assert listener.token_ids(1) == list(range(1, 31))


@pytest.mark.parametrize("listener", ["paced"], indirect=True)
def test_an_abort_overtakes_the_requests_that_still_wait_to_be_tokenised(listener: Listener) -> None:
    listener.wait_ready()
    listener.client.send(AddRequest(1, params(100_000), prompt="a"))
    for request_id in range(2, 400):
        listener.client.send(AddRequest(request_id, params(1), prompt="b" * 1000))
    listener.client.send(Abort(399))
    listener.client.send(Abort(1))
    assert listener.wait_finished(1).finish_reason == "abort"
    assert listener.wait_finished(399).finish_reason == "abort"
    assert listener.wait_finished(398).finish_reason == "length"


def test_a_chat_without_a_limit_asks_for_1024_tokens(listener: Listener) -> None:
    listener.client.send(AddRequest(1, SamplingParams(), messages=[ChatMessage("user", "hello")]))
    listener.wait_finished(1)
    assert len(listener.token_ids(1)) == 1024


def test_counting_tokens_answers_with_the_number_or_the_reason(listener: Listener) -> None:
    listener.client.send(CountTokens(1, [ChatMessage("user", "seven!!")]))
    listener.client.send(CountTokens(2, [ChatMessage("system", "x")]))
    assert listener.wait_for(TokenCount) == TokenCount(1, 7, kept_tokens=7)
    second = next((s for s in listener.seen if isinstance(s, TokenCount) and s.query_id == 2), None)
    second = second or listener.wait_for(TokenCount)
    assert "system" in second.error


@pytest.mark.parametrize("listener", ["paced"], indirect=True)
def test_a_kill_in_mid_answer_is_reported_within_a_second_and_a_restart_works(listener: Listener) -> None:
    client = listener.client
    client.send(AddRequest(1, params(1_000_000), prompt="a"))
    listener.wait(lambda arrival: isinstance(arrival, Output) and len(arrival.token_ids) == 1)
    first_pid = client.pid
    assert first_pid is not None
    killed = time.monotonic()
    os.kill(first_pid, signal.SIGKILL)
    died = listener.wait_for(EngineDied, timeout=5)
    assert time.monotonic() - killed < 1.0
    assert died.exit_code == -signal.SIGKILL
    assert "SIGKILL" in died.reason
    assert not client.alive
    assert client.pid is None
    assert not psutil.pid_exists(first_pid), "a zombie is left"
    client.send(AddRequest(2, params(1), prompt="a"))  # to nobody: no exception
    client.start()
    client.load(EngineConfig())
    listener.seen.clear()
    listener.wait_ready()
    client.send(AddRequest(3, params(5), prompt="a"))
    listener.wait_finished(3)
    assert listener.token_ids(3) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("listener", "exit_code", "words"),
    [
        ("memory-error", 1, "Memory ran out in a step (MemoryError: cannot hold 7 GiB)"),
        ("bug", 1, "A step failed (IndexError: list index out of range)"),
        ("segfault", -signal.SIGSEGV, "SIGSEGV"),
    ],
    indirect=["listener"],
)
def test_a_step_that_fails_ends_the_engine_with_a_sentence(listener: Listener, exit_code: int, words: str) -> None:
    listener.client.send(AddRequest(1, params(100), prompt="a"))
    died = listener.wait_for(EngineDied)
    assert died.exit_code == exit_code
    assert words in died.reason
    assert listener.token_ids(1) == [1, 2], "what was made before the fault arrives"
    assert any("fake_engine.py" in line for line in died.last_lines), died.last_lines


@pytest.mark.parametrize(
    ("listener", "kind", "words"),
    [
        ("load-memory-error", "memory", "MemoryError: cannot hold 70 GiB"),
        ("load-bug", "other", "KeyError: 'rope_theta'"),
    ],
    indirect=["listener"],
)
def test_a_load_that_fails_says_why_once(listener: Listener, kind: str, words: str) -> None:
    failed = listener.wait_for(LoadFailed)
    assert failed.kind == kind
    assert words in failed.message
    assert wait_until(lambda: not listener.client.alive)
    listener.client.close()
    assert listener.client.poll() == [], "the end after LoadFailed is no news"


@pytest.mark.parametrize("listener", ["exit-3"], indirect=True)
def test_an_exit_is_reported_with_its_code_and_last_words(listener: Listener) -> None:
    died = listener.wait_for(EngineDied)
    assert (died.exit_code, died.reason) == (3, "The engine ended with exit code 3.")
    assert died.last_lines[-1] == "last words"


@pytest.mark.parametrize("listener", ["chatty"], indirect=True)
def test_a_talkative_engine_neither_blocks_nor_fills_memory(listener: Listener) -> None:
    listener.wait_ready()
    listener.client.send(AddRequest(1, params(3), prompt="a"))
    listener.wait_finished(1)
    listener.client.kill()
    died = listener.wait_for(EngineDied)
    assert len(died.last_lines) <= 40
    assert all(len(line) <= 2000 for line in died.last_lines)
    assert died.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("listener", ["slow-step", "stuck-load", "plain"], indirect=True)
def test_close_is_quick_whatever_the_engine_is_doing(listener: Listener) -> None:
    listener.client.send(AddRequest(1, params(100), prompt="a"))
    listener.wait_for(Loading)
    time.sleep(0.2)  # into the step that hangs, of which no message tells
    begun = time.monotonic()
    assert listener.client.close() == 0
    assert time.monotonic() - begun < 2.0
    assert not any(isinstance(arrival, EngineDied) for arrival in listener.client.poll())


def test_close_ends_an_engine_that_does_not_listen(listener: Listener) -> None:
    listener.wait_ready()
    assert listener.client.pid is not None
    os.kill(listener.client.pid, signal.SIGSTOP)
    listener.client.send(AddRequest(1, params(1), prompt="x" * 5_000_000))  # far more than the pipe holds
    begun = time.monotonic()
    assert listener.client.close(timeout=0.2) == -signal.SIGKILL
    assert time.monotonic() - begun < 3.0


def test_an_engine_that_was_never_told_to_load_ends_when_asked() -> None:
    client = EngineClient()
    client.start()
    Listener(client).wait_for(Hello)
    assert client.close() == 0


def test_a_command_before_the_model_is_a_fault_of_the_client() -> None:
    client = EngineClient()
    client.start()
    client.send(Abort(1))
    assert "Abort came before LoadModel" in Listener(client).wait_for(LoadFailed).message
    client.close()


def test_a_closed_client_can_be_closed_again_and_sends_to_nobody(listener: Listener) -> None:
    listener.wait_ready()
    listener.client.close()
    listener.client.close()
    listener.client.send(Abort(1))
    assert listener.client.poll() == []


def test_a_program_that_cannot_be_started_is_reported_like_a_death() -> None:
    client = EngineClient(command=["/nowhere/python"])
    client.start()
    (died,) = client.poll()
    assert isinstance(died, EngineDied)
    assert died.exit_code is None
    assert "/nowhere/python" in died.reason
    assert client.close() is None


def test_something_that_does_not_speak_the_protocol_is_ended() -> None:
    client = EngineClient(command=[sys.executable, "-c", "print('hello, world'); import time; time.sleep(60)"])
    client.start()
    died = Listener(client).wait_for(EngineDied, timeout=20)
    assert "cannot be read" in died.reason
    client.close()


def test_activity_is_announced_once_for_all_that_waits() -> None:
    calls: list[str] = []
    client = EngineClient(
        lambda: calls.append(threading.current_thread().name), command=[sys.executable, str(FAKE_ENGINE), "plain"]
    )
    client.start()
    client.load(EngineConfig())
    client.send(AddRequest(1, params(50), prompt="a"))
    assert wait_until(lambda: len(calls) == 1, 30)
    listener = Listener(client)
    listener.wait_finished(1)
    assert set(calls) == {"engine-reader"}
    client.close()


WINDOW = """
import sys, time
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.messages import AddRequest, Loading, Output, Ready
from engine.request import SamplingParams
mode, fake = sys.argv[1:]
client = EngineClient(command=[sys.executable, fake, mode])
client.start()
client.load(EngineConfig())
client.send(AddRequest(1, SamplingParams(max_tokens=10**6), prompt="a"))
awaited = Loading if mode in ("stuck-load", "slow-step") else Output
child = ""
while True:
    for arrival in client.poll(1.0):
        if isinstance(arrival, Loading) and arrival.stage.startswith("child "):
            child = arrival.stage[6:]
        if isinstance(arrival, awaited) and (child or mode != "stuck-load"):
            print(client.pid, child, flush=True)
            time.sleep(60)
"""


@pytest.mark.parametrize("listener", ["stuck-load"], indirect=True)
def test_a_kill_of_the_engine_alone_takes_its_download_along(listener: Listener) -> None:
    told = listener.wait(lambda arrival: isinstance(arrival, Loading) and arrival.stage.startswith("child "))
    child = int(told.stage.removeprefix("child "))
    assert listener.client.pid is not None
    os.kill(listener.client.pid, signal.SIGKILL)
    begun = time.monotonic()
    listener.wait_for(EngineDied)
    assert time.monotonic() - begun < 1.0
    assert wait_until(lambda: not is_running(child), 5.0)


@pytest.mark.parametrize("mode", ["paced", "stuck-load", "slow-step"])
def test_the_engine_ends_with_its_window_even_when_that_is_killed(mode: str) -> None:
    window = subprocess.Popen(
        [sys.executable, "-c", WINDOW, mode, str(FAKE_ENGINE)],
        stdout=subprocess.PIPE,
        text=True,
        env=module_environment(),
        cwd="/",
    )
    assert window.stdout is not None
    pids = [int(word) for word in window.stdout.readline().split()]
    assert len(pids) == (2 if mode == "stuck-load" else 1)
    window.kill()
    window.wait()
    window.stdout.close()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids), 5.0), "the engine outlives its window"


def test_ctrl_c_reaches_the_window_only(tmp_path: object) -> None:
    client = fake_client("paced")
    listener = Listener(client)
    listener.wait_ready()
    assert client.pid is not None
    assert os.getpgid(client.pid) != os.getpgid(0), "a terminal's Ctrl+C would reach the engine"
    os.kill(client.pid, signal.SIGINT)  # and where it is sent by hand it changes nothing
    client.send(AddRequest(1, params(5), prompt="a"))
    listener.wait_finished(1)
    client.close()


def test_a_folder_called_engine_in_the_working_folder_is_not_taken_for_ours(tmp_path: object) -> None:
    import pathlib

    folder = pathlib.Path(str(tmp_path)) / "engine"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('not ours')")
    code = "from engine.client import EngineClient; from engine.messages import Hello\n"
    code += "c = EngineClient(); c.start(); print(type(c.poll(20)[0]).__name__); c.close()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "Hello", done.stderr
