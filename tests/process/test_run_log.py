"""The run file that an engine process writes, where it ends in the middle of a run."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.messages import AckFrame, AddRequest, Frame, Output, Record, Shutdown
from engine.recording import RunReader
from engine.request import SamplingParams
from engine.serving import EngineLoop
from tests.oracles import make_core
from tests.process.fake_engine import VOCAB, model_info


class Letters:
    """Of tokens: one for each."""

    def of(self, token_id: int) -> bytes:
        return b"a"

    def stream(self) -> Any:
        return SimpleNamespace(push=bytes.decode, flush=str)


class Codec:
    special_ids = frozenset[int]()
    token_bytes = Letters()


@pytest.mark.parametrize("end", [Record("", 0), Shutdown()], ids=["record", "shutdown"])
def test_a_run_file_has_the_texts_of_the_step_that_was_in_flight_where_it_ends(tmp_path: Path, end: Any) -> None:
    commands: queue.SimpleQueue[object] = queue.SimpleQueue()
    core = make_core(overlap=True, vocab_size=VOCAB, codec=Codec())
    letters = 0

    def take(*replies: Any) -> None:
        nonlocal letters
        for reply in replies:
            if isinstance(reply, Frame):
                commands.put(AckFrame(reply.number))
            if isinstance(reply, Output):
                letters += len(reply.text)
                if letters == 3:
                    assert core.has_notes, "the fourth is under way"
                    commands.put(end)
                if reply.finish_reason is not None:
                    commands.put(Shutdown())

    loaded = SimpleNamespace(core=core, codec=Codec(), info=model_info(), config=EngineConfig())
    commands.put(Record(str(tmp_path / "run"), 2**22, texts=True))
    commands.put(AddRequest(1, SamplingParams(max_tokens=9), prompt_token_ids=[1, 2, 3]))
    EngineLoop(loaded, commands, take).run()
    reader = RunReader(tmp_path / "run")
    (request,) = reader.state_at(reader.last_step).requests.values()
    written = "".join(text.text for _, text in reader.texts() if text.role == "assistant")
    assert len(written) == request.output_tokens >= 4
    assert not list(reader.records(0, 10**6))[-1].in_flight
