"""A busy engine for measuring the window: the real core with a stand-in for the model, far more requests than fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.events import Keyframe, StepRecord
from engine.request import SamplingParams
from tests.app.scripted import TimedRunner
from tests.oracles import VOCAB_SIZE

USERS = ("ann", "ben", "cleo")


@dataclass
class BusyEngine:
    """Keeps ``requests`` requests in a pool of ``num_blocks`` blocks: whoever ends is followed by another. Prompts have
    16 to 256 tokens, and some begin alike; answers 16 to 384; there are three priorities and three users."""

    requests: int = 500
    num_blocks: int = 16_384
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._runner = TimedRunner(16)
        self._next_id = 1
        self._open = 0
        self.core = EngineCore(
            self._runner,
            scheduler=SchedulerConfig(max_num_seqs=self.requests, order="priority"),
            num_blocks=self.num_blocks,
            block_size=16,
            prefix_cache=True,
            max_model_len=2048,
            vocab_size=VOCAB_SIZE,
            token_budget=1024,
            clock=lambda: self._runner.now,
        )

    def keyframe(self) -> Keyframe:
        return self.core.keyframe()

    def records(self) -> Iterator[StepRecord]:
        """Step after step, without end."""
        while True:
            while self._open < self.requests:
                self._add()
            result = self.core.step()
            self._open -= sum(output.finish_reason is not None for output in result.outputs)
            if result.record is not None:
                yield result.record

    def _add(self) -> None:
        random = self._random
        length, answer = int(random.integers(16, 257)), int(random.integers(16, 385))
        head = [int(random.integers(4))] * min(length, 64)
        tail = random.integers(0, VOCAB_SIZE, size=length - len(head))
        self.core.add_request(
            self._next_id,
            [*head, *tail.tolist()],
            SamplingParams(max_tokens=answer, ignore_eos=True),
            priority=int(random.integers(3)),
            user=USERS[int(random.integers(3))],
            arrival_time=self._runner.now,
            stream_text=False,
        )
        self._next_id += 1
        self._open += 1
