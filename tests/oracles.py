"""Helpers that other tests build on: a runner that proves the KV bookkeeping, and the six oracles of the engine.

Nothing here needs torch: :class:`KVCheckingRunner` keeps, per slot of a make-believe KV memory, which token of which
position was written there, gathers each request's whole context through its block table, and asserts that it is exactly
the request's tokens. Scheduling, prefix hits, preemption and copies are thus proven in microseconds a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from engine.config import SchedulerConfig
from engine.core import EngineCore, StepResult
from engine.events import Keyframe, StepRecord
from engine.messages import Output
from engine.request import Request, SamplingParams
from engine.run_state import RunState
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput

VOCAB_SIZE = 1_000


def next_token(context: Sequence[int], vocab_size: int = VOCAB_SIZE) -> int:
    """The make-believe model: a token that depends on every token before it."""
    digest = blake2b(",".join(map(str, context)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def cold_answer(prompt: Sequence[int], length: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """What a fresh engine with nothing else to do would answer: the reference of oracle 2."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


class KVCheckingRunner:
    """A :class:`engine.core.Runner` whose KV memory remembers what was written where."""

    def __init__(self, block_size: int, vocab_size: int = VOCAB_SIZE) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.memory: dict[int, tuple[int, int]] = {}
        """Slot → (token id, position)."""
        self.failures: dict[int, str] = {}
        """Request id → why its next row fails; a test's way to poison one request."""
        self.during: Callable[[SchedulerOutput], None] | None = None
        """Called in the middle of an execution; a test's way to abort just then."""
        self.plans: list[SchedulerOutput] = []
        """The last plan: kept short so that long traces need no memory."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.plans = [output]
        for source, destination in output.block_copies:
            for offset in range(self.block_size):
                entry = self.memory.get(source * self.block_size + offset)
                if entry is not None:
                    self.memory[destination * self.block_size + offset] = entry
        for row in range(len(output.requests)):
            self._write(output, row)
        token_ids: list[list[int]] = []
        errors: dict[int, str] = {}
        for row, request in enumerate(output.requests):
            context = self._gather(output, row)
            if request.request_id in self.failures:
                errors[row] = self.failures.pop(request.request_id)
            token_ids.append([next_token(context, self.vocab_size)] if output.samples[row] else [])
        if self.during is not None:
            self.during(output)
        return ModelRunnerOutput(token_ids=token_ids, logprobs=[], errors=errors)

    def _write(self, output: SchedulerOutput, row: int) -> None:
        request, start, count = output.requests[row], output.starts[row], output.num_new_tokens[row]
        assert count >= 1, f"{request!r} is scheduled for nothing"
        assert output.samples[row] == (start + count == request.num_tokens)
        for position in range(start, start + count):
            slot = self._slot(output.block_tables[row], position)
            assert slot >= self.block_size, f"{request!r} writes to the null block"
            self.memory[slot] = (request.token_ids[position], position)

    def _gather(self, output: SchedulerOutput, row: int) -> list[int]:
        request = output.requests[row]
        end = output.starts[row] + output.num_new_tokens[row]
        found = [self.memory.get(self._slot(output.block_tables[row], p)) for p in range(end)]
        wanted = [(request.token_ids[p], p) for p in range(end)]
        assert found == wanted, f"{request!r}: its block table does not lead to its own tokens"
        return request.token_ids[:end]

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size
