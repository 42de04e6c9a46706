"""The real engine process around a core without a model, so that its faults can be chosen: see ``MODES``.

Run as a program by the tests. Everything but the loader and the core is the product's own code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import engine.process as process
from engine.events import Arrived, Finished, Keyframe, Rejected, RequestState, RunTotals, StepRecord, StepTimings
from engine.messages import ChatMessage, ModelInfo, Output
from engine.request import RequestError, SamplingParams

VOCAB = 100


class LetterCodec:
    """One token a letter; enough of a codec for what the process does with it."""

    special_ids = frozenset({0, 1})
    vocab_size = VOCAB
    chat_stops = ()

    def encode(self, text: str) -> list[int]:
        return [2 + ord(letter) % (VOCAB - 2) for letter in text]

    def encode_chat(self, messages: list[ChatMessage], continues: bool = False) -> list[int]:
        if messages[0].role == "system":
            raise RequestError("this model's chat template has no place for a system message")
        if messages[0].content == "template bug":
            raise ZeroDivisionError("in the template")
        return self.encode("".join(message.content for message in messages))


class CountingCore:
    """Gives every request one token a step: its position in the answer."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.step_number = 0
        self.requests: dict[int, list[int]] = {}  # id -> [prompt tokens, output tokens, max_tokens]
        self.outputs: list[Output] = []
        self.events: list[Any] = []
        self.totals = RunTotals()

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.outputs)

    def add_request(self, request_id: int, prompt: list[int], params: SamplingParams, **options: Any) -> None:
        self.requests[request_id] = [len(prompt), 0, params.max_tokens or 10]
        self.events.append(Arrived(request_id, len(prompt), params.max_tokens or 10, 0, "", time.perf_counter()))

    def reject(self, request_id: int, message: str) -> None:
        self.events.append(Rejected(request_id, message))
        self.outputs.append(Output(request_id, 0.0, [], finish_reason="error", error=message))

    def abort(self, request_id: int) -> None:
        if self.requests.pop(request_id, None):
            self.events.append(Finished(request_id, "abort", 0))
            self.outputs.append(Output(request_id, 0.0, [], finish_reason="abort"))

    def step(self, *, overlap: bool = True) -> SimpleNamespace:
        self.step_number += 1
        print(f"stray print in step {self.step_number}")  # must not reach the stream of messages
        if self.mode == "slow-step":
            time.sleep(30)
        if self.mode == "memory-error" and self.step_number == 3:
            raise MemoryError("cannot hold 7 GiB")
        if self.mode == "bug" and self.step_number == 3:
            raise IndexError("list index out of range")
        if self.mode == "segfault" and self.step_number == 3:
            time.sleep(0.1)  # a forward pass lets the writer thread run
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.mode == "paced":
            time.sleep(0.002)
        outputs, self.outputs = self.outputs, []
        events, self.events = self.events, []
        rows = list(self.requests)
        for request_id in rows:
            row = self.requests[request_id]
            row[1] += 1
            ended = row[1] >= row[2]
            outputs.append(Output(request_id, 0.0, [row[1]], f"{row[1]} ", finish_reason="length" if ended else None))
            if ended:
                del self.requests[request_id]
                events.append(Finished(request_id, "length", row[1]))
        self._count(events, len(rows))
        return SimpleNamespace(record=self._record(events, rows), outputs=outputs, notice="")

    def _count(self, events: list[Any], new_tokens: int) -> None:
        before = self.totals
        self.totals = RunTotals(
            steps=self.step_number,
            arrived=before.arrived + sum(isinstance(event, Arrived) for event in events),
            finished=before.finished + sum(isinstance(event, Finished | Rejected) for event in events),
            output_tokens=before.output_tokens + new_tokens,
            rejected=before.rejected + sum(isinstance(event, Rejected) for event in events),
        )

    def _record(self, events: list[Any], rows: list[int]) -> StepRecord:
        ones = [1] * len(rows)
        return StepRecord(
            step=self.step_number,
            time=time.perf_counter(),
            timings=StepTimings(),
            events=events,
            request_ids=rows,
            num_tokens=ones,
            num_computed=ones,
            kinds=[0] * len(rows),
            new_tokens=ones,
            num_running=len(self.requests),
            num_waiting=0,
            free_blocks=10,
            cached_blocks=0,
            token_budget=64,
            totals=self.totals,
        )

    def keyframe(self) -> Keyframe:
        states = [
            RequestState(request_id, 0.0, prompt, limit, 0, "", 1, 1, done, 0, 0, [])
            for request_id, (prompt, done, limit) in self.requests.items()
        ]
        return Keyframe(self.step_number, 0.0, 10, 16, 32, 64, states, [], None, self.totals)


def model_info() -> ModelInfo:
    return ModelInfo(
        name="counting",
        architecture="None",
        parameters=0,
        weights_sha256="",
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        backend="none",
        backend_reason="a test",
        threads=1,
        vocab_size=VOCAB,
        max_model_len=1000,
        num_blocks=10,
        block_size=16,
        kv_bytes_per_block=0,
        weight_bytes=0,
        max_num_seqs=32,
        token_budget=64,
        has_chat_template=True,
        load_seconds=0.0,
    )


def load_model(config: Any, progress: Any) -> Any:
    mode = sys.argv[1]
    print("stray print in the loader")
    os.write(1, b"stray bytes on descriptor 1\n")
    progress("Reading", 1, 3)
    if mode == "stuck-load":
        # A download would be such a child: it must go with the process.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        progress(f"child {child.pid}")
        time.sleep(60)
    if mode == "load-memory-error":
        raise MemoryError("cannot hold 70 GiB")
    if mode == "load-bug":
        raise KeyError("rope_theta")
    if mode == "exit-3":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if mode == "chatty":
        for number in range(20_000):
            print(f"warning {number} " + "x" * 200, file=sys.stderr)
    return SimpleNamespace(core=CountingCore(mode), info=model_info(), codec=LetterCodec())


process.load_model = load_model

if __name__ == "__main__":
    process.main()
