"""The whole engine behind the pipes, on a tiny model of random weights: nothing between is faked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_letters

import psutil
import pytest
from tokenizers import pre_tokenizers

from engine.client import EngineClient, EngineDied
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.messages import (
    Abort,
    AckFrame,
    AddRequest,
    ChatMessage,
    ConfigRefused,
    ContextCut,
    CountTokens,
    Frame,
    LoadFailed,
    Output,
    Ready,
    Reconfigure,
    TokenCount,
)
from engine.request import SamplingParams
from engine.run_state import RunState
from tests.process.helpers import Listener, wait_until
from tests.process.tiny_model import MAX_POSITION, make_tiny_model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def config_for(model: Path, **scheduler: object) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        dtype="float32",
        device="cpu",
        threads=1,
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_num_batched_tokens=64, **scheduler),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[tuple[Listener, Ready]]:
    """One engine for the tests that leave it as it was."""
    with EngineClient() as client:
        client.start()
        client.load(config_for(model))
        listener = Listener(client)
        yield listener, listener.wait_ready()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("engine-")]
    assert not psutil.Process().children(recursive=True)


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def in_letters(max_tokens: int) -> SamplingParams:
    """Only letters, since half a character would be no text to go on from; the bias keeps their order among
    themselves."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return greedy(max_tokens, logit_bias={alphabet.index(letter): 100.0 for letter in ascii_letters})


def ask(listener: Listener, params: SamplingParams, **fields: object) -> int:
    request_id = listener.client.next_request_id()
    listener.client.send(AddRequest(request_id, params, **fields))  # type: ignore[arg-type]
    return request_id


def test_ready_tells_what_is_loaded(engine: tuple[Listener, Ready]) -> None:
    _, ready = engine
    assert (ready.info.architecture, ready.info.device, ready.info.dtype) == ("LlamaForCausalLM", "cpu", "float32")
    assert (ready.info.num_blocks, ready.info.max_model_len) == (64, MAX_POSITION)
    assert ready.info.has_chat_template
    assert ready.keyframe.num_blocks == 64
    assert ready.keyframe.requests == []


def test_answers_that_share_a_batch_stream_in_order_and_are_what_each_is_alone(
    engine: tuple[Listener, Ready],
) -> None:
    listener, _ = engine
    prompts = ["hello there", "a much longer prompt, so that it is computed in pieces " * 3, "x"]
    alone: list[list[int]] = []
    for prompt in prompts:
        request_id = ask(listener, greedy(24), prompt=prompt)
        listener.wait_finished(request_id)
        alone.append(listener.token_ids(request_id))
    together = [ask(listener, greedy(24), prompt=prompt) for prompt in prompts]
    for request_id, expected in zip(together, alone, strict=True):
        last = listener.wait_finished(request_id)
        assert (last.finish_reason, last.prompt_tokens) == ("length", len(prompts[together.index(request_id)]))
        assert listener.token_ids(request_id) == expected
        assert listener.text(request_id)


def test_a_synthetic_prompt_is_the_same_for_the_same_seed(engine: tuple[Listener, Ready]) -> None:
    listener, _ = engine
    ids = [ask(listener, greedy(8), prompt_tokens=100, synthetic_seed=seed, stream_text=False) for seed in (5, 5, 6)]
    lasts = [listener.wait_finished(request_id) for request_id in ids]
    assert [last.prompt_tokens for last in lasts] == [100, 100, 100]
    first, again, other = (listener.token_ids(request_id) for request_id in ids)
    assert first == again != other
    assert listener.text(ids[0]) == ""


def test_a_conversation_goes_through_the_template(engine: tuple[Listener, Ready]) -> None:
    listener, _ = engine
    messages = [ChatMessage("user", "hi")]
    listener.client.send(CountTokens(9, messages))
    count = listener.wait_for(TokenCount)
    assert count.tokens == len("user\nhi\nassistant\n") + 3
    last = listener.wait_finished(ask(listener, greedy(3), messages=messages))
    assert last.prompt_tokens == count.tokens


def test_a_stopped_answer_goes_on_as_if_it_had_not_been_stopped(engine: tuple[Listener, Ready]) -> None:
    listener, _ = engine
    asked = [ChatMessage("user", "hi there, how are you?")]
    whole = ask(listener, in_letters(24), messages=asked)
    listener.wait_finished(whole)
    begun = ask(listener, in_letters(9), messages=asked)
    listener.wait_finished(begun)
    messages = [*asked, ChatMessage("assistant", listener.text(begun))]
    more = ask(listener, in_letters(15), messages=messages, continues=True)
    last = listener.wait_finished(more)
    assert last.prompt_tokens == len("user\nhi there, how are you?\nassistant\n") + 3 + 9
    assert len(set(listener.text(whole))) > 2
    assert listener.text(begun) + listener.text(more) == listener.text(whole)


def test_a_long_conversation_loses_its_oldest_exchanges_and_says_so_first(engine: tuple[Listener, Ready]) -> None:
    listener, _ = engine
    messages = [ChatMessage("user" if n % 2 == 0 else "assistant", f"{n:02}" + "x" * 48) for n in range(21)]
    listener.client.send(CountTokens(31, messages, max_tokens=5))
    count = listener.wait(lambda arrival: isinstance(arrival, TokenCount) and arrival.query_id == 31)
    request_id = ask(listener, greedy(5), messages=messages, drop_oldest=True)
    last = listener.wait_finished(request_id)
    cut = next(arrival for arrival in listener.seen if isinstance(arrival, ContextCut))
    assert cut == ContextCut(request_id, count.dropped_messages, count.kept_tokens)
    assert (last.finish_reason, last.prompt_tokens) == ("length", cut.prompt_tokens)
    assert listener.seen.index(cut) < listener.seen.index(listener.outputs(request_id)[0])
    assert cut.dropped_messages % 2 == 0
    assert cut.prompt_tokens + 5 <= MAX_POSITION < count.tokens
    refused = listener.wait_finished(ask(listener, greedy(5), messages=messages))
    assert f"The conversation is {count.tokens:,} tokens; the context holds 512" in refused.error


BAD_REQUESTS = {
    "empty prompt": ({"prompt": ""}, "prompt is empty"),
    "no ids": ({"prompt_token_ids": []}, "prompt is empty"),
    "empty conversation": ({"messages": []}, "messages hold no text"),
    "prompt longer than the model": ({"prompt": "x" * 600}, "600.*512"),
    "synthetic prompt longer than the model": ({"prompt_tokens": 100_000}, "100,000.*512"),
    "prompt that leaves no room": ({"prompt_tokens": MAX_POSITION}, "512"),
    "id beyond the vocabulary": ({"prompt_token_ids": [5, 258]}, "258"),
    "id far beyond the vocabulary": ({"prompt_token_ids": [10**9]}, "1,?000,?000,?000"),
    "negative id": ({"prompt_token_ids": [3, -1]}, "-1"),
    "id of 70 bits": ({"prompt_token_ids": [2**70]}, "cannot be sent"),
    "unknown role": ({"messages": [ChatMessage("user", "a"), ChatMessage("wizard", "b")]}, "wizard"),
}


@pytest.mark.parametrize("name", list(BAD_REQUESTS))
def test_a_bad_request_fails_alone_with_a_clear_message(engine: tuple[Listener, Ready], name: str) -> None:
    import re

    listener, _ = engine
    fields, pattern = BAD_REQUESTS[name]
    neighbour = ask(listener, greedy(12), prompt="a neighbour")
    last = listener.wait_finished(ask(listener, greedy(4), **fields))
    assert last.finish_reason == "error"
    assert re.search(pattern, last.error), last.error
    assert listener.wait_finished(neighbour).finish_reason == "length"
    assert len(listener.token_ids(neighbour)) == 12


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_below_one_from_a_client_that_does_not_check(
    engine: tuple[Listener, Ready], max_tokens: int
) -> None:
    listener, _ = engine
    params = greedy(1)
    object.__setattr__(params, "max_tokens", max_tokens)
    last = listener.wait_finished(ask(listener, params, prompt="hello"))
    assert (last.finish_reason, last.error) == ("error", f"max_tokens is {max_tokens}; it must be at least 1")
    assert listener.wait_finished(ask(listener, greedy(2), prompt="hello")).finish_reason == "length"


def test_max_tokens_beyond_the_room_is_cut_to_it(engine: tuple[Listener, Ready]) -> None:
    listener, _ = engine
    request_id = ask(listener, greedy(10_000), prompt_tokens=MAX_POSITION - 20)
    assert listener.wait_finished(request_id).finish_reason == "length"
    assert len(listener.token_ids(request_id)) == 20


def test_an_id_used_twice_costs_the_first_request_nothing(engine: tuple[Listener, Ready]) -> None:
    listener, _ = engine
    request_id = ask(listener, greedy(40), prompt="first")
    listener.client.send(AddRequest(request_id, greedy(1), prompt="second"))
    assert listener.wait_finished(request_id).prompt_tokens == 5
    assert len(listener.token_ids(request_id)) == 40


def test_stop_and_send_at_once_fifty_times(engine: tuple[Listener, Ready]) -> None:
    listener, _ = engine
    expected: list[int] | None = None
    for _ in range(50):
        stopped = ask(listener, greedy(400), prompt="to be stopped")
        listener.wait(lambda arrival, wanted=stopped: isinstance(arrival, Output) and arrival.request_id == wanted)
        listener.client.send(Abort(stopped))
        following = ask(listener, greedy(4), prompt="the next")
        assert listener.wait_finished(stopped).finish_reason == "abort"
        listener.wait_finished(following)
        tokens = listener.token_ids(following)
        expected = expected or tokens
        assert tokens == expected
        after = listener.outputs(stopped)
        assert [output.finish_reason for output in after].index("abort") == len(after) - 1


def test_the_scheduler_is_changed_while_it_runs(model: Path) -> None:
    with EngineClient() as client:
        client.start()
        client.load(config_for(model))
        listener = Listener(client)
        ready = listener.wait_ready()
        assert (ready.keyframe.discipline, ready.keyframe.order) == ("vllm", "fcfs")
        state = RunState()
        state.restore(ready.keyframe)

        def change(**knobs: object) -> None:
            scheduler = config_for(model).scheduler
            for name, value in knobs.items():  # unchecked: a bad one is the engine's to refuse
                object.__setattr__(scheduler, name, value)
            client.send(Reconfigure(scheduler))

        def told(wanted: Callable[[RunState], bool]) -> None:
            def folded(arrival: object) -> bool:
                for record in arrival.records if isinstance(arrival, Frame) else ():
                    state.apply(record)
                return wanted(state)

            listener.wait(folded)

        change(order="fair")  # with nothing to compute
        told(lambda s: s.order == "fair")
        running = ask(listener, greedy(200), prompt="runs on")
        told(lambda s: running in s.requests and s.requests[running].output_tokens > 2)
        change(discipline="static", order="fair")
        told(lambda s: s.pending_discipline == "static")
        assert state.discipline == "vllm"
        later = ask(listener, greedy(20), prompt="of the batch")
        told(lambda s: s.discipline == "static")
        assert running not in state.requests, "the batch had not drained"
        told(lambda s: later not in s.requests and len(s.batches) == 1)
        assert len(listener.token_ids(running)) == 200 and len(listener.token_ids(later)) == 20
        for bad, words in (({"speculative": "draft:/no/such"}, "draft model"), ({"order": "none"}, "order is 'none'")):
            change(**bad)
            assert words in listener.wait_for(ConfigRefused).message
        assert listener.wait_finished(ask(listener, greedy(2), prompt="still here")).finish_reason == "length"


def test_counts_are_right_for_a_window_that_drops_frames(model: Path) -> None:
    with EngineClient() as client:
        client.start()
        # One at a time, so that there are far more steps than a frame takes records.
        client.load(config_for(model, max_num_seqs=1))
        listener = Listener(client, acknowledges=False)
        ready = listener.wait_ready()
        requests = [ask(listener, greedy(200), prompt_tokens=10 + n, stream_text=False) for n in range(4)]
        requests += [ask(listener, greedy(480), prompt_tokens=3, ends_after=480) for _ in range(2)]
        for request_id in requests:
            listener.wait_finished(request_id)
        state = RunState()
        state.restore(ready.keyframe)
        frames = listener.frames()
        assert len(frames) == 1, "frames came without acknowledgement"
        while state.totals.finished < len(requests):
            for frame in frames:
                if frame.keyframe is not None:
                    state.restore(frame.keyframe)
                for record in frame.records:
                    state.apply(record)
                client.send(AckFrame(frame.number))
            frames = [listener.wait_for(Frame)] if state.totals.finished < len(requests) else []
        assert any(frame.keyframe for frame in listener.frames()), "nothing was dropped: the test proves nothing"
        totals = state.totals
        assert totals.output_tokens == 4 * 200 + 2 * 480
        assert (totals.arrived, totals.finished) == (6, 6)
        assert totals.prompt_tokens + totals.prefix_hit_tokens == sum(10 + n for n in range(4)) + 2 * 3
        assert state.requests == {}


def test_kill_in_mid_answer_then_restart_gives_the_same_answer(model: Path) -> None:
    with EngineClient() as client:
        client.start()
        client.load(config_for(model))
        listener = Listener(client)
        listener.wait_ready()
        request_id = ask(listener, greedy(480), prompt="an answer cut short")
        listener.wait(lambda arrival: isinstance(arrival, Output) and len(listener.token_ids(request_id)) > 5)
        begun = time.monotonic()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        died = listener.wait_for(EngineDied, timeout=5)
        assert time.monotonic() - begun < 1.0
        assert "SIGKILL" in died.reason
        partial = listener.token_ids(request_id)
        client.start()
        client.load(config_for(model))
        listener.wait_ready()
        again = ask(listener, greedy(480), prompt="an answer cut short")
        assert again != request_id
        listener.wait_finished(again)
        assert listener.token_ids(again)[: len(partial)] == partial


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


# One of each kind: what else can be wrong with a folder is tested where folders are read.
BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "pickles only": (_pickle_only, "unsupported", r"pytorch_model\.bin"),
    "cut short": (_truncated, "damaged", r"model\.safetensors"),
    "unknown architecture": (_edit_config(architectures=["MambaForCausalLM"]), "unsupported", "MambaForCausalLM"),
}


@pytest.mark.parametrize("name", list(BAD_FOLDERS))
def test_a_folder_that_is_no_model_is_refused_in_words(model: Path, tmp_path: Path, name: str) -> None:
    import re

    spoil, kind, pattern = BAD_FOLDERS[name]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    spoil(folder)
    failed = _load_failure(EngineConfig(model=str(folder), device="cpu"))
    assert failed.kind == kind, failed.message
    assert re.search(pattern, failed.message), failed.message


def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", cache=CacheConfig(num_blocks=10**11))
    failed = _load_failure(config)
    assert failed.kind == "memory"
    assert failed.message.count("B") >= 2, "both sizes are named"


def _load_failure(config: EngineConfig) -> LoadFailed:
    with EngineClient() as client:
        client.start()
        client.load(config)
        failed = Listener(client).wait_for(LoadFailed)
        assert wait_until(lambda: not client.alive)
    assert client.poll() == []
    assert isinstance(failed, LoadFailed)
    return failed
