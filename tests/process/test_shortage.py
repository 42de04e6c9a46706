"""Memory that runs out in a step of the engine process: what the window hears, and what is let in afterwards."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import torch

from engine.messages import AckFrame, AddRequest, ChatMessage, Frame, Output, PoolShrank, Shutdown
from engine.request import FinishReason, SamplingParams
from engine.run_state import RunState
from engine.serving import EngineLoop
from tests.oracles import KVCheckingRunner, by_id, cold_answer, make_core


class Codec:
    special_ids: frozenset[int] = frozenset()
    chat_stops: tuple[str, ...] = ()

    def encode_chat(self, messages: list[ChatMessage], **_: Any) -> list[int]:
        return [len(word) for message in messages for word in message.content.split()]


def test_the_window_hears_of_it_and_nobody_notices() -> None:
    runner = KVCheckingRunner(16)
    core = make_core(runner=runner, num_blocks=10)
    state, heard = RunState(), list[Any]()
    state.restore(core.keyframe())
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def info_of(core: Any) -> Any:
        pool = core.keyframe()
        return SimpleNamespace(max_model_len=4096, num_blocks=pool.num_blocks, block_size=16, vocab_size=1000)

    def send(*replies: Any) -> None:
        heard.extend(replies)
        for reply in replies:
            if isinstance(reply, Frame):
                for record in reply.records:
                    state.apply(record)
                commands.put(AckFrame(reply.number))
            if isinstance(reply, Output) and sum(isinstance(each, Output) for each in heard) == 3:
                runner.shortage = ("after", torch.OutOfMemoryError("CUDA out of memory."))
            if isinstance(reply, Output) and reply.finish_reason is not None:
                later = AddRequest(2, SamplingParams(max_tokens=2), prompt_token_ids=[5] * 129)
                commands.put(later if reply.request_id == 1 else Shutdown())

    loaded = SimpleNamespace(codec=Codec(), core=core, info=info_of(core), info_of=info_of)
    commands.put(AddRequest(1, SamplingParams(max_tokens=9), prompt_token_ids=[1, 2, 3]))
    EngineLoop(loaded, commands, send).run()  # type: ignore[arg-type]
    (told,) = [reply for reply in heard if isinstance(reply, PoolShrank)]
    assert "Memory ran out in a step" in told.message and told.info.num_blocks == 8
    outputs = [reply for reply in heard if isinstance(reply, Output)]
    assert [token for o in outputs if o.request_id == 1 for token in o.token_ids] == cold_answer([1, 2, 3], 9)
    refused = outputs[-1]
    assert refused.finish_reason == FinishReason.ERROR and "the pool has 8 (128 tokens)" in refused.error
    assert state.num_blocks == 8 and state.keyframe() == by_id(core.keyframe())
